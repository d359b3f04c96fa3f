"""Ranks that do not agree on what they must share: all get a typed error that names it, and nothing is committed."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.jobs import SavingJob
from tests.support.models import differing, state, torchrec_job, whole
from tests.support.ranks import RankPools
from torchrec_cnr.format.manifest import History
from torchrec_cnr.policies import Since
from torchrec_cnr.saving import agreement
from torchrec_cnr.saving import writer as writer_module

MAX_SECS = 20.0
Options = dict[str, Any]


class _Run:
    """A job on each rank, about to save; the last rank differs in one thing."""

    def __init__(self, rank: int, root: str) -> None:
        self.is_odd = rank == dist.get_world_size() - 1
        self.root = root
        self.job = SavingJob(root, torchrec_job, group=dist.new_group(backend="gloo"))
        self.job.train_and_save("0")
        self.job.train()
        self.state = state(self.job.job)
        self.told: Options = {}  # what this rank tells the coordinator instead

    def options(self, **changed: Any) -> Options:
        """Arguments of the save."""
        common = {"storage_writer": self.job.writer, "planner": self.job.planner, "checkpoint_id": f"{self.root}/1"}
        return {**common, **(changed if self.is_odd else {})}


def _id(run: _Run) -> Options:
    return run.options(checkpoint_id=f"{run.root}/1-b")


def _root(run: _Run) -> Options:
    return run.options(checkpoint_id=f"{run.root}-b/1")


def _disks(run: _Run) -> Options:
    """Each process has a memory of its own."""
    return {**run.options(), "checkpoint_id": "memory://disagreeing/1", "planner": cnr.CNRSavePlanner()}


def _planner(run: _Run) -> Options:
    return run.options(planner=DefaultSavePlanner())


def _planner_of_coordinator(run: _Run) -> Options:
    return {**run.options(), "planner": run.job.planner if run.is_odd else DefaultSavePlanner()}


def _tracker(run: _Run) -> Options:
    return run.options(planner=cnr.CNRSavePlanner())


def _policy(run: _Run) -> Options:
    policy = cnr.OneShot() if run.is_odd else cnr.Consecutive()
    return {**run.options(), "planner": cnr.CNRSavePlanner(run.job.tracker, policy=policy)}


def _policy_parameter(run: _Run) -> Options:
    policy = cnr.Compacted(max_deltas=3 if run.is_odd else 4)
    return {**run.options(), "planner": cnr.CNRSavePlanner(run.job.tracker, policy=policy)}


class _OwnPolicy:
    """A policy of somebody else's, whose objects Python describes by where they lie in memory."""

    def __init__(self, since: Since) -> None:
        self.since = since

    def decide(self, history: History) -> Since:
        return self.since


def _own_policy(run: _Run) -> Options:
    policy = _OwnPolicy(Since.HEAD if run.is_odd else Since.BASELINE)
    return {**run.options(), "planner": cnr.CNRSavePlanner(run.job.tracker, policy=policy)}


def _sync_files(run: _Run) -> Options:
    return run.options(storage_writer=models.writer(run.root, sync_files=True))


def _no_scheme(run: _Run) -> Options:
    return run.options(storage_writer=models.writer(run.root, quantization=cnr.Asymmetric(4)))


def _bits(run: _Run) -> Options:
    scheme = cnr.Asymmetric(4) if run.is_odd else cnr.Asymmetric(8)
    return {**run.options(), "storage_writer": models.writer(run.root, quantization=scheme)}


def _patterns(run: _Run) -> Options:
    scheme = cnr.Asymmetric(8)
    pattern = "*t1*" if run.is_odd else "*"
    return {**run.options(), "storage_writer": models.writer(run.root, quantization={pattern: scheme})}


def _expected_restores(run: _Run) -> Options:
    scheme = cnr.ByExpectedRestores(2 if run.is_odd else 300)
    return {**run.options(), "storage_writer": models.writer(run.root, quantization=scheme)}


def _writer(run: _Run) -> Options:
    return run.options(storage_writer=FileSystemWriter(f"{run.root}/1"), planner=DefaultSavePlanner())


def _version(run: _Run) -> Options:
    run.told = {"version": "0.0.1"} if run.is_odd else {}
    return run.options()


def _topic(run: _Run) -> Options:
    run.told = {"row_log": "KafkaRows('localhost:9092', 'rows')"} if run.is_odd else {}
    return run.options()


DISAGREEMENTS: dict[str, tuple[Callable[[_Run], Options], str]] = {
    "id": (_id, "the checkpoint"),
    "root": (_root, "the checkpoint"),
    "disks": (_disks, "not in the store of the rank that commits"),
    "planner": (_planner, "the planner"),
    "planner-of-coordinator": (_planner_of_coordinator, "the planner"),
    "tracker": (_tracker, "the planner's tracker"),
    "policy": (_policy, "the policy"),
    "policy-parameter": (_policy_parameter, "the policy"),
    "own-policy": (_own_policy, "the policy"),
    "sync-files": (_sync_files, "the writer's 'sync_files'"),
    "no-scheme": (_no_scheme, "the quantization"),
    "bits": (_bits, "the quantization"),
    "patterns": (_patterns, "the quantization"),
    "expected-restores": (_expected_restores, "the quantization"),
    "writer": (_writer, "another storage writer"),
    "version": (_version, "the version of torchrec_cnr"),
    "topic": (_topic, "the Kafka topic"),
}


def _disagree(rank: int, root: str, how: str) -> None:
    run = _Run(rank, root)
    prepare, named = DISAGREEMENTS[how]
    options = prepare(run)
    began = time.monotonic()

    def told(**plan: Any) -> agreement.RankPlan:
        return agreement.RankPlan(**{**plan, **run.told})

    with mock.patch.object(writer_module, "RankPlan", told):
        failures = faults.failures_of(lambda: dcp.save(run.state, process_group=run.job.group, **options))
    assert time.monotonic() - began < MAX_SECS
    assert list(failures) == [0], "the coordinator refuses, for all"
    assert isinstance(failures[0], cnr.CNRError)
    assert named in str(failures[0])
    assert cnr.latest(root) == f"{root}/0"
    dist.barrier()
    run.job.planner = cnr.CNRSavePlanner(run.job.tracker, policy=cnr.Consecutive())
    cut = run.job.save("2")
    assert differing(cut, whole(run.state)) == []
    run.job.assert_loads("2")
    run.job.close()


@pytest.mark.parametrize("how", list(DISAGREEMENTS))
def test_ranks_that_disagree_commit_nothing(tmp_path: Path, rank_pool: RankPools, how: str) -> None:
    """All ranks are told within seconds what differs, and the next save holds all rows."""
    rank_pool(2).run(_disagree, str(tmp_path), how, timeout_secs=60.0)


def _save_some_ranks_behind(rank: int, root: str) -> None:
    """One rank calls ``dcp.async_save``, the others ``dcp.save``."""
    run = _Run(rank, root)
    options = run.options()
    if run.is_odd:
        failures = faults.failures_of(
            lambda: dcp.async_save(run.state, process_group=run.job.group, **options).result(timeout=60)  # type: ignore[union-attr]
        )
    else:
        failures = faults.failures_of(lambda: dcp.save(run.state, process_group=run.job.group, **options))
    assert "the function that saves" in str(failures[0])
    run.job.save("2")
    run.job.assert_loads("2")
    run.job.close()


def test_ranks_that_disagree_on_the_kind_of_save(tmp_path: Path, rank_pool: RankPools) -> None:
    """An asynchronous save on one rank and a synchronous one on the others is refused on all."""
    rank_pool(2).run(_save_some_ranks_behind, str(tmp_path), timeout_secs=60.0)


def _stage_what_fails(rank: int, root: str, what: str) -> None:
    run = _Run(rank, root)
    values: dict[str, Any] = {"w": torch.ones(3)} if what != "sparse" else run.state
    trackers = []
    if rank == 1 and what == "sparse":
        values = {**run.state, "extra": torch.eye(3).to_sparse()}
    if rank == 1 and what == "trackers":
        trackers.append(cnr.RowTracker(run.job.job.model))
        trackers.append(cnr.CNRSavePlanner(trackers[0]))  # type: ignore[arg-type]
    if what == "trackers":
        values = run.state
    if what == "untracked":
        values = run.state if rank == 0 else {"w": torch.ones(3)}
    began = time.monotonic()
    future: Any = dcp.async_save(values, process_group=run.job.group, **run.options())
    failures = faults.failures_of(lambda: future.result(timeout=60))
    assert time.monotonic() - began < MAX_SECS
    assert any(isinstance(failure, cnr.ConfigurationError) for failure in failures.values()), failures
    for tracker in trackers[:1]:
        tracker.close()
    run.job.save("2")
    run.job.assert_loads("2")
    run.job.close()


@pytest.mark.parametrize("what", ["sparse", "trackers", "untracked"])
def test_what_cannot_be_staged_on_one_rank_fails_on_all(tmp_path: Path, rank_pool: RankPools, what: str) -> None:
    """A sparse tensor, a second tracker, a state dict without the tables: no rank waits for one that has raised."""
    rank_pool(2).run(_stage_what_fails, str(tmp_path), what, timeout_secs=60.0)


def _save_by_own_policy(rank: int, root: str, is_async: bool) -> None:
    """Every rank has a policy of its own making, at another place in memory; and arguments that may differ."""
    own: Options = {"thread_count": 1 + rank, "pack_bytes": (1 + rank) << 20, "staging_bytes": (1 + rank) << 30}
    own |= {"cpu_share": 1.0 - 0.1 * rank, "timeout_secs": 100.0 + rank, "max_bytes_per_sec": 1e9 + rank}
    own |= {"progress": print if rank else None}
    places = [object() for _ in range(rank)]
    policy = _OwnPolicy(Since.HEAD)
    with SavingJob(root, torchrec_job, policy=policy, group=dist.new_group(backend="gloo"), **own) as job:
        for step in range(3):
            job.train()
            if is_async:
                job.async_save(step).result(timeout=60)
            else:
                job.save(step)
            job.assert_loads(step)
        assert cnr.read_checkpoint(job.path(2)).parent == job.path(1)
    del places


@pytest.mark.parametrize("is_async", [False, True])
def test_ranks_may_differ_in_how_they_work(tmp_path: Path, rank_pool: RankPools, is_async: bool) -> None:
    """Threads, sizes and bounds of each rank are its own; a policy without a text of its own is one policy."""
    rank_pool(2).run(_save_by_own_policy, str(tmp_path), is_async, timeout_secs=60.0)


def _save_across_a_compaction(rank: int, root: str, is_async: bool) -> None:
    with SavingJob(root, torchrec_job, policy=cnr.OneShot(), group=dist.new_group(backend="gloo")) as job:
        for step in range(2):
            job.train_and_save(step)
        if rank == 0:
            job.planner.resolve_last_save()
        dist.barrier()
        if rank == 1:
            cnr.compact(job.path(1))
            job.planner.resolve_last_save()
        dist.barrier()
        job.train()
        if is_async:
            job.async_save(2).result(timeout=60)
        else:
            job.save(2)
        job.assert_loads(2)
        assert cnr.read_checkpoint(job.path(2)).parent == job.path(1)


@pytest.mark.parametrize("is_async", [False, True])
def test_ranks_may_know_different_baselines(tmp_path: Path, rank_pool: RankPools, is_async: bool) -> None:
    """A compaction came between their looks at the last save: a delta is of the newest baseline that one knows."""
    rank_pool(2).run(_save_across_a_compaction, str(tmp_path), is_async, timeout_secs=60.0)

"""How many restores a checkpoint's state has been through: counted along saves and loads, and handed to the ranks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.jobs import SavingJob, load_into, save
from tests.support.models import state, torchrec_job, train
from tests.support.ranks import RankPools
from torchrec_cnr.saving.plug_in_messages import ShardData

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class _ResumedJob(SavingJob):
    """A job that starts afresh, as every process does, and saves deltas where it can."""

    def commit(self, name: str, quantization: cnr.Quantization | None = None) -> cnr.Checkpoint:
        """Train, and save."""
        self.train()
        save(self.job, self.path(name), self.planner, quantization=quantization)
        return cnr.read_checkpoint(self.path(name))

    def load(self, name: str, leave_out: str | None = None) -> None:
        """Load, but for the weight of one module."""
        target = state(self.job)
        if leave_out is not None:
            del target["model"][f"{leave_out}.weight"]
        load_into(target, self.path(name), tracker=self.tracker, allow_partial_load=leave_out is not None)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], _ResumedJob]]:
    """Starts jobs, and ends them."""
    with ExitStack() as started:
        yield lambda: started.enter_context(_ResumedJob(tmp_path))


def test_each_restore_is_counted_once(tmp_path: Path, start: Callable[[], _ResumedJob]) -> None:
    """Saves leave the count as it is, and each job that resumes from another's checkpoint adds one."""
    counts, before = [], None
    for resumption in range(3):
        training = start()
        if before is not None:
            training.load(before)
        for number in range(2):
            checkpoint = training.commit(f"{resumption}-{number}")
            assert (checkpoint.parent is None) == (before is None)
            counts.append(checkpoint.num_restores)
            before = f"{resumption}-{number}"
    assert counts == [0, 0, 1, 1, 2, 2]


def test_more_restores_than_expected_take_8_bits(tmp_path: Path, start: Callable[[], _ResumedJob]) -> None:
    """Where one restore is expected, tables take 2 bits until there was a second one, and 8 bits from then on."""
    quantization = cnr.ByExpectedRestores(1)
    bits = []
    for number in range(5):
        training = start()
        if number:
            training.load(f"step-{number - 1}")
        manifest = training.commit(f"step-{number}", quantization).manifest
        tables = [entry for entry in manifest.tensors.values() if entry.is_table]
        bits.append({shard.scheme.to_json()["bits"] for table in tables for shard in table.shards})
    assert bits == [{2}, {2}, {8}, {8}, {8}]


def test_a_fork_counts_from_the_checkpoint_that_was_loaded(tmp_path: Path, start: Callable[[], _ResumedJob]) -> None:
    """What a job went through before it loaded an older checkpoint is not in its tables any more."""
    first = start()
    first.commit("start")
    resumed = start()
    resumed.load("start")
    resumed.commit("resumed")
    again = start()
    again.load("resumed")
    assert again.commit("again").num_restores == 2
    again.load("start")
    fork = again.commit("fork")
    assert (fork.num_restores, fork.parent) == (1, str(tmp_path / "start"))
    first.load("start")  # the job that saved it
    assert first.commit("back").num_restores == 1


def test_a_load_that_fails_is_not_counted(tmp_path: Path, start: Callable[[], _ResumedJob]) -> None:
    """Before anything was read or in the middle of it: the count stays, and the next save is a baseline with it."""
    training = start()
    training.commit("0")
    training.load("0")
    checkpoint = training.commit("1")
    assert checkpoint.num_restores == 1
    (pack,) = checkpoint.manifest.packs
    faults.flip(tmp_path / "1" / pack.name, -1)
    with pytest.raises(CheckpointException, match="crc32c"):
        training.load("1")
    assert (training.tracker.num_restores, training.tracker.head) == (1, None)
    with pytest.raises(CheckpointException, match="no checkpoint was committed"):
        training.load("missing")
    after = training.commit("2")
    assert (after.num_restores, after.parent) == (1, None)


def test_a_save_that_fails_is_not_counted(tmp_path: Path, start: Callable[[], _ResumedJob]) -> None:
    """A save that never committed changes nothing about what the tables have been through."""
    training = start()
    training.commit("0")
    training.load("0")
    planner, writer = cnr.CNRSavePlanner(training.tracker), models.writer(tmp_path / "1")
    with faults.failing(planner, writer, "finish", "before", rank=0), pytest.raises(CheckpointException):
        dcp.save(state(training.job), storage_writer=writer, planner=planner)
    assert training.commit("2").num_restores == 1


def test_a_partial_load_is_a_restore_too(tmp_path: Path, start: Callable[[], _ResumedJob]) -> None:
    """Tables that hold values of several origins have been through as many restores as the most travelled of them."""
    training = start()
    training.commit("0")
    training.load("0")
    training.commit("1")

    fresh = start()
    fresh.load("1", leave_out="item")
    mixed = fresh.commit("mixed")
    assert (mixed.num_restores, mixed.parent) == (2, None)
    fresh.load("0", leave_out="item")
    assert fresh.commit("mixed again").num_restores == 2
    fresh.load("mixed", leave_out="item")
    assert fresh.commit("mixed thrice").num_restores == 3


def test_loads_and_saves_without_a_tracker_count_nothing(tmp_path: Path, start: Callable[[], _ResumedJob]) -> None:
    """Nobody is there to count: a save then says 0, and a tracker that is passed by keeps its count."""
    training = start()
    training.commit("0")
    training.load("0")
    reader = cnr.CNRStorageReader(tmp_path / "0")
    dcp.load(state(training.job), storage_reader=reader, planner=DefaultLoadPlanner())
    assert training.commit("1").num_restores == 1
    for number, planner in enumerate([DefaultSavePlanner(), cnr.CNRSavePlanner()]):
        path = tmp_path / f"without-{number}"
        dcp.save(state(training.job), storage_writer=models.writer(path), planner=planner)
        assert cnr.read_checkpoint(path).num_restores == 0


class _Watched(cnr.CNRSavePlanner):
    """Notes the counts that tracked shards are handed over with."""

    def __init__(self, tracker: cnr.RowTracker) -> None:
        super().__init__(tracker)
        self.counts: set[int] = set()

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        if isinstance(data, ShardData):
            self.counts.add(data.num_restores)
        return data


def _save_with_other_counts(rank: int, root: str) -> set[int]:
    job = torchrec_job(1)
    tracker = cnr.RowTracker(job.model)
    tracker.num_restores = 3 + rank
    train(job, 1)
    planner = _Watched(tracker)
    dcp.save(state(job), storage_writer=models.writer(f"{root}/0"), planner=planner)
    tracker.close()
    dist.barrier()
    return planner.counts


def test_all_ranks_encode_for_the_coordinators_count(tmp_path: Path, rank_pool: RankPools) -> None:
    """The count that the manifest states is the one that every rank chose its schemes by."""
    assert rank_pool(2).run(_save_with_other_counts, str(tmp_path)) == [{3}, {3}]
    assert cnr.read_checkpoint(tmp_path / "0").num_restores == 3

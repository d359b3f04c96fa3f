"""Phases that raise on a rank, and writers that race: every rank is told, and what comes next works."""

import itertools
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.faults import InjectedError
from tests.support.jobs import adagrad_job, assert_loads, save, saver
from tests.support.models import Job, differing, state, torchrec_job, train, whole
from tests.support.ranks import FORK_SERVER, RankPools

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CHILD_SECS = 60.0


# A rank that raises.


def _fail_to_open(rank: int, root: str) -> None:
    job = torchrec_job(1)
    tracker, planner = saver(job)
    cut = save(job, f"{root}/0", planner)
    writer, reader = models.writer(f"{root}/unused"), cnr.CNRStorageReader(f"{root}/0")
    place = f"{root}/1" if rank == 0 else "without-its-package://bucket/1"
    options: Any = {"checkpoint_id": place, "storage_writer": writer, "planner": planner}
    attempts = (
        lambda: dcp.save(state(job), **options),
        lambda: dcp.async_save(state(job), **options).result(timeout=30),
        lambda: dcp.load(state(job), checkpoint_id=place, storage_reader=reader),
    )
    for attempt in attempts:
        cause = faults.failures_of(attempt)[1]
        assert isinstance(cause, cnr.ConfigurationError)
        assert "without-its-package" in str(cause)
    end = save(job, f"{root}/2", planner)
    tracker.close()
    assert_loads(f"{root}/0", cut, torchrec_job)
    assert_loads(f"{root}/2", end, torchrec_job)


def test_a_place_that_one_rank_cannot_open_fails_on_all(tmp_path: Path, rank_pool: RankPools) -> None:
    """One host without the package of a file system, or its credentials: the other ranks do not wait for it."""
    rank_pool(2).run(_fail_to_open, str(tmp_path), timeout_secs=40.0)


def _fail_everywhere(rank: int, root: str, build: Callable[[int], Job]) -> None:
    job, target = build(1), build(2)
    tracker, planner = saver(job)
    save(job, f"{root}/0", planner)
    numbers = itertools.count(1)
    for phase, when, culprit in itertools.product(faults.PHASES, ("before", "after"), range(dist.get_world_size())):
        if phase in faults.COORDINATOR_PHASES and culprit != 0:
            continue
        train(job, next(numbers))
        path = f"{root}/{next(numbers)}"
        writer = models.writer(path)
        with faults.failing(planner, writer, phase, when, culprit), pytest.raises(CheckpointException) as raised:
            dcp.save(state(job), storage_writer=writer, planner=planner)
        causes = faults.causes(raised.value)
        assert set(causes) == {culprit}, (phase, when, culprit)
        assert isinstance(causes[culprit], InjectedError)
        assert str(causes[culprit]) == f"{phase} failed on rank {culprit}"
        is_committed = cnr.latest(root) == path
        assert is_committed == faults.has_committed(phase, when)
        train(job, next(numbers))
        path = f"{root}/{next(numbers)}"
        cut = save(job, path, planner)
        assert cnr.read_checkpoint(path).kind == "delta"
        assert differing(whole(state(target)), cut)
        assert differing(models.load(target, path), cut) == []
    tracker.close()


def test_every_rank_is_told_what_failed_in_which_phase(tmp_path: Path, rank_pool: RankPools) -> None:
    """Whatever phase raises on whatever rank, the cause reaches every rank, and the next save works."""
    rank_pool(2).run(_fail_everywhere, str(tmp_path), torchrec_job, timeout_secs=110.0)


def _raise_typed_errors(rank: int, root: str) -> None:
    job = torchrec_job(1)
    tracker, planner = saver(job)
    cut = save(job, f"{root}/0", planner)

    def causes_of(path: str, saved: dict[str, Any]) -> dict[int, BaseException]:
        with pytest.raises(CheckpointException) as raised:
            dcp.save(saved, storage_writer=models.writer(path), planner=planner)
        return faults.causes(raised.value)

    causes = causes_of(f"{root}/0", state(job))
    assert set(causes) == {0}  # the coordinator looks for all ranks
    assert isinstance(causes[0], cnr.CheckpointExistsError)
    assert f"{root}/0" in str(causes[0])

    without_tables = state(job)
    if rank == 1:
        del without_tables["model"]
    cause = causes_of(f"{root}/1", without_tables)[1]
    assert isinstance(cause, cnr.ConfigurationError)
    assert "not share its memory" in str(cause) or "state dict" in str(cause)

    in_the_way = Path(root, "a file")
    if rank == 0:
        in_the_way.touch()
    dist.barrier()
    for cause in causes_of(f"{in_the_way}/2", state(job)).values():
        assert isinstance(cause, cnr.StoreError)
        assert "a file" in str(cause)

    assert cnr.latest(root) == f"{root}/0"
    assert_loads(f"{root}/0", cut, torchrec_job)
    train(job, 1)
    end = save(job, f"{root}/3", planner)
    tracker.close()
    assert_loads(f"{root}/3", end, torchrec_job)


def test_typed_errors_reach_every_rank(tmp_path: Path, rank_pool: RankPools) -> None:
    """An error of ours arrives on all ranks as what it was, with its message, and the next save works."""
    rank_pool(2).run(_raise_typed_errors, str(tmp_path), timeout_secs=60.0)


def _fail_to_load(rank: int, root: str) -> None:
    job = torchrec_job(1)
    tracker, planner = saver(job)
    cut = save(job, f"{root}/0", planner)
    train(job, 1)
    with pytest.raises(CheckpointException) as raised:
        models.load(torchrec_job(2), f"{root}/nothing here")
    assert [type(cause) for cause in faults.causes(raised.value).values()] == [cnr.CheckpointNotFoundError] * 2
    pack = next(Path(root, "0").glob("*-1-0.safetensors"))
    dist.barrier()
    if rank == 0:
        pack.rename(f"{root}/hidden")
    dist.barrier()
    with pytest.raises(CheckpointException) as raised:
        models.load(torchrec_job(2), f"{root}/0")
    causes = faults.causes(raised.value)
    assert all(isinstance(cause, cnr.DamagedError) for cause in causes.values())
    assert any(pack.name in str(cause) for cause in causes.values())
    dist.barrier()
    if rank == 0:
        Path(root, "hidden").rename(pack)
    dist.barrier()
    assert_loads(f"{root}/0", cut, torchrec_job)
    end = save(job, f"{root}/1", planner)
    assert cnr.read_checkpoint(f"{root}/1").kind == "delta"
    tracker.close()
    assert_loads(f"{root}/1", end, torchrec_job)


def test_a_load_that_fails_tells_every_rank(tmp_path: Path, rank_pool: RankPools) -> None:
    """Nothing to load, or a missing pack: typed errors on every rank; a load of another job disturbs nothing."""
    rank_pool(2).run(_fail_to_load, str(tmp_path), timeout_secs=60.0)


# Two writers and one checkpoint id.


def _race(root: str, seed: int, barrier: Any, sender: Connection) -> None:
    """Save several times, without a lineage, to ids that another process uses at the same time; send who was how."""
    torch.set_num_threads(1)
    outcomes: list[Any] = []
    job = adagrad_job(seed)
    for number in range(_NUM_RACES):
        train(job, number)
        path = f"{root}/{number}"
        writer = models.writer(path)
        finish = writer.finish

        def meet_then_finish(*args: Any, finish: Callable[..., None] = finish, **kwargs: Any) -> None:
            barrier.wait(CHILD_SECS)
            finish(*args, **kwargs)

        faults.replace_method(writer, "finish", meet_then_finish)
        cut = whole(state(job))
        try:
            dcp.save(state(job), storage_writer=writer)
            outcomes.append(cut)
        except CheckpointException as error:
            outcomes.append([f"{type(cause).__name__}: {cause}" for cause in faults.causes(error).values()])
        barrier.wait(CHILD_SECS)
    sender.send_bytes(pickle.dumps(outcomes))


_NUM_RACES = 10


@pytest.mark.long
def test_of_two_writers_of_one_id_exactly_one_commits(tmp_path: Path) -> None:
    """Of two processes that save under one id at a time, one commits; the other is told that the checkpoint exists."""
    barrier = FORK_SERVER.Barrier(2)
    pipes = [FORK_SERVER.Pipe(duplex=False) for _ in range(2)]
    racers = [
        FORK_SERVER.Process(target=_race, args=(str(tmp_path), seed, barrier, sender), daemon=True)
        for seed, (_, sender) in enumerate(pipes)
    ]
    for racer, (_, sender) in zip(racers, pipes, strict=True):
        racer.start()
        sender.close()
    try:
        for receiver, _ in pipes:
            assert receiver.poll(CHILD_SECS), "a writer hangs"
        both = [pickle.loads(receiver.recv_bytes()) for receiver, _ in pipes]
    finally:
        for racer in racers:
            racer.kill()
            racer.join()
    for number, pair in enumerate(zip(*both, strict=True)):
        path = f"{tmp_path}/{number}"
        (winner,) = [outcome for outcome in pair if isinstance(outcome, dict)]
        (loser,) = [outcome for outcome in pair if isinstance(outcome, list)]
        assert len(loser) == 1
        assert loser[0].startswith("CheckpointExistsError")
        assert path in loser[0]
        assert_loads(path, winner, adagrad_job)

"""Reader state: a run that was killed, however often, has trained every sample exactly once in the end."""

import io
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage
from torchrec.distributed.train_pipeline.train_pipelines import StagedTrainPipeline

import torchrec_cnr as cnr
from tests.support import models
from tests.support.counted_samples import BATCH, PIPELINES, CountedSamples, NumberedSamples, Samples, batches_of
from tests.support.killing import in_child
from tests.support.ranks import RankPools

NUM_SAMPLES, WORLD_SIZE = 600, 2
KILLED_SECS = 5.0  # within which a rank that is to be killed is


def _reader(kind: str, rank: int) -> cnr.ReaderState[Samples]:
    match kind:
        case "function":
            return cnr.ReaderState(lambda first: batches_of(rank, WORLD_SIZE, NUM_SAMPLES, first))
        case "iterable":
            return cnr.ReaderState(list(batches_of(rank, WORLD_SIZE, NUM_SAMPLES)))
        case _:
            samples = NumberedSamples(rank, WORLD_SIZE, NUM_SAMPLES)
            return cnr.ReaderState(StatefulDataLoader(samples, batch_size=BATCH, collate_fn=Samples.of))


def _live(rank: int, root: str, group: str, pipeline: str, reader_kind: str, kill_after: int | None) -> list[int]:
    """Resume, and train to the end of the data, or until killed after so many microseconds: counts of samples."""
    dist.init_process_group(
        "gloo", init_method=f"file://{group}", rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=20)
    )
    job, reader = CountedSamples(NUM_SAMPLES), _reader(reader_kind, rank)
    tracker = cnr.RowTracker(job.model)
    state: dict[str, Any] = {"model": job.model.state_dict(), "reader": reader}
    manager = cnr.CheckpointManager(root, tracker, every_steps=2, keep=cnr.Keep(last=2))
    step = manager.restore(state) or 0
    dist.barrier()
    if kill_after is not None:
        threading.Timer(kill_after / 1e6, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    try:
        for _ in reader.train(job.pipeline(pipeline)):
            step += 1
            manager.async_save(step, state)
        manager.close()
    except (RuntimeError, cnr.SaveError, CheckpointException):
        if kill_after is not None:
            time.sleep(KILLED_SECS)  # the other rank was killed a moment before, and this one is about to be
        raise
    assert step == -(-NUM_SAMPLES // WORLD_SIZE // BATCH)
    return job.counts()


def _train_to_the_end(tmp_path: Path, pipeline: str, reader_kind: str, num_kills: int, seed: int) -> None:
    rng = random.Random(seed)
    counts: list[Any] = []
    with ThreadPoolExecutor(WORLD_SIZE) as threads:
        for life in range(num_kills + 1):
            kill_after = rng.randrange(500_000) if life < num_kills else None
            place = (str(tmp_path / "root"), str(tmp_path / f"group-{life}"))
            lives = [
                threads.submit(in_child, _live, rank, *place, pipeline, reader_kind, kill_after)
                for rank in range(WORLD_SIZE)
            ]
            ends = [life.result(timeout=100) for life in lives]
            assert kill_after is not None or all(isinstance(end, list) for end in ends)
            if all(isinstance(end, list) for end in ends):
                counts = [count for end in ends if isinstance(end, list) for count in end]
                break
    assert counts == [1] * NUM_SAMPLES


@pytest.mark.long
@pytest.mark.parametrize(
    ("pipeline", "reader_kind"),
    [("SparseDist", "loader"), ("SemiSync", "function")],
)
def test_every_sample_is_trained_once(tmp_path: Path, pipeline: str, reader_kind: str) -> None:
    """Killed twice at random moments, and resumed: no sample is missing, none was trained twice."""
    _train_to_the_end(tmp_path, pipeline, reader_kind, num_kills=2, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("reader_kind", ["loader", "function", "iterable"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_sample_is_trained_once_under_each_pipeline(tmp_path: Path, pipeline: str, reader_kind: str) -> None:
    """As above, with each pipeline, killed at moments that change from run to run."""
    _train_to_the_end(tmp_path, pipeline, reader_kind, num_kills=12, seed=random.randrange(10**9))


def _quotas(rank: int, pipeline_name: str) -> tuple[list[int], list[int]]:
    """Intervals of five batches: how many were trained in each, and the counts in the end."""
    job = CountedSamples(NUM_SAMPLES)
    reader, pipeline = _reader("function", rank), job.pipeline(pipeline_name)
    intervals = []
    while True:
        batches, num_trained = reader.quota(5), 0
        while True:
            try:
                pipeline.progress(batches)
            except StopIteration:
                break
            reader.trained()
            num_trained += 1
        if not num_trained:
            return intervals, job.counts()
        assert reader.num_in_flight == 0
        intervals.append(num_trained)
        if pipeline_name == "Base":
            pipeline.reset()  # it takes no other iterator before that


@pytest.mark.parametrize("pipeline", ["Base", "SparseDist", "SemiSync"])
def test_a_quota_leaves_nothing_in_flight(rank_pool: RankPools, pipeline: str) -> None:
    """The paper's way: a pipeline gets exactly so many batches, trains them all, and goes on with the next quota."""
    found = rank_pool(WORLD_SIZE).run(_quotas, pipeline)
    assert [intervals for intervals, _ in found] == [[5] * 15] * WORLD_SIZE
    assert [count for _, counts in found for count in counts] == [1] * NUM_SAMPLES


@pytest.mark.parametrize("reader_kind", ["function", "iterable", "loader"])
def test_quotas_go_on_after_a_load_and_after_a_pass(reader_kind: str) -> None:
    """A load in the same process moves the next quota; the quota after the last one of a pass begins another pass."""
    reader = _reader(reader_kind, 0)

    def taken(num_batches: int) -> list[list[int]]:
        found = []
        for batch in reader.quota(num_batches):
            found.append(batch.features.values().tolist())
            reader.trained()
        return found

    first = taken(3)
    saved = reader.state_dict()
    second = taken(4)
    reader.load_state_dict(saved)
    assert taken(4) == second
    num_batches = NUM_SAMPLES // WORLD_SIZE // BATCH
    assert len(taken(num_batches)) == num_batches - 7
    assert taken(3) == first
    assert len(taken(num_batches - 3)) == num_batches - 3
    assert taken(3) == []
    assert taken(3) == first


class _AheadPipeline:
    """Holds two batches when it trains one."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train a batch."""
        while len(self.held) < 3:
            self.held.append(next(dataloader_iter))
        return self.held.pop(0)


ITERATIONS: dict[str, Callable[[cnr.ReaderState[Any]], Iterator[Any]]] = {
    "iter": iter,
    "quota": lambda reader: reader.quota(8),
    "train": lambda reader: reader.train(_AheadPipeline()),
}


@pytest.mark.parametrize("iteration", ITERATIONS)
@pytest.mark.parametrize("reader_kind", ["function", "iterable", "loader"])
def test_an_iteration_ends_with_a_load(reader_kind: str, iteration: str) -> None:
    """Its next batches would be trained in the place of those that follow the position."""
    reader = _reader(reader_kind, 0)
    batches = ITERATIONS[iteration](reader)
    taken = [next(batches) for _ in range(3)]
    if iteration != "train":  # which reports them
        reader.trained(3)
    saved = reader.state_dict()
    taken += [next(batches) for _ in range(2)]
    reader.load_state_dict(saved)
    with pytest.raises(cnr.ConfigurationError, match="a position was loaded after this iteration began"):
        next(batches)
    assert reader.state_dict() == saved
    again = ITERATIONS[iteration](reader)
    ids = [batch.features.values().tolist() for batch in (next(again), next(again))]
    assert ids == [batch.features.values().tolist() for batch in taken[3:]]


def _save_positions(rank: int, path: str) -> None:
    reader = cnr.ReaderState(list(range(rank * 100, rank * 100 + 50)))
    batches = iter(reader)
    for _ in range(5 + rank):
        next(batches)
    reader.trained(3 + rank)
    dcp.save({"reader": reader}, storage_writer=models.writer(path))


def _load_positions(rank: int, path: str, divide: bool) -> list[int] | str:
    def reshard(states: Any, rank: int, world_size: int) -> Any:
        assert world_size == dist.get_world_size()
        return states[rank % len(states)]

    reader = cnr.ReaderState(list(range(rank * 100, rank * 100 + 50)), reshard=reshard if divide else None)
    state = {"reader": reader}
    try:
        dcp.load(state, storage_reader=cnr.CNRStorageReader(path), planner=cnr.CNRLoadPlanner())
    except cnr.StateMismatchError as error:
        return str(error)
    return list(reader)[:2]


@pytest.mark.parametrize("world_size", [1, 3])
def test_positions_of_other_ranks(tmp_path: Path, rank_pool: RankPools, world_size: int) -> None:
    """Each rank goes on where it was; more or fewer ranks need somebody to divide the positions, or are told so."""
    path = str(tmp_path / "0")
    rank_pool(2).run(_save_positions, path)
    assert rank_pool(2).run(_load_positions, path, False) == [[3, 4], [104, 105]]
    refused = rank_pool(world_size).run(_load_positions, path, False)
    assert all(f"saved by 2 ranks, and there are {world_size} now" in str(message) for message in refused)
    expected = [[3, 4], [104, 105], [203, 204]]
    assert rank_pool(world_size).run(_load_positions, path, True) == expected[:world_size]


def test_a_reader_has_the_length_of_its_loader() -> None:
    """That of a whole pass, wherever it resumes; without a length, it can still be listed."""
    reader = cnr.ReaderState(["a", "b", "c"])
    assert next(iter(reader)) == "a"
    reader.trained()
    resumed = cnr.ReaderState(["a", "b", "c"])
    resumed.load_state_dict(reader.state_dict())
    assert len(resumed) == 3
    assert list(resumed) == ["b", "c"]
    assert len(cnr.ReaderState(StatefulDataLoader(range(10), batch_size=4))) == 3
    for without in (lambda position: iter("abc"[position:]), iter("abc")):
        reader = cnr.ReaderState(without)
        assert list(reader) == ["a", "b", "c"]
        with pytest.raises(TypeError, match="len"):
            len(reader)


class _CPUStream(torch.cpu.Stream):
    """A stream for stages that run on CPUs: the pipeline asks each for its device."""

    device = torch.device("cpu")


def _staged() -> "StagedTrainPipeline[Tensor, Tensor]":
    """Return TorchRec's pipeline with two stages; it takes two batches ahead, and returns None if none is left."""
    stages = [PipelineStage("copy", torch.clone, _CPUStream()), PipelineStage("add", lambda x: x + 10, _CPUStream())]
    return StagedTrainPipeline(stages, compute_stream=_CPUStream())


def test_a_staged_pipeline_ends_without_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is trained once, also by a job that resumes while the pipeline holds batches."""
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)  # there is none on CPUs
    reader = cnr.ReaderState(torch.arange(5).split(1))
    trained = []
    for batch in reader.train(_staged()):
        trained.append(int(batch))
        if len(trained) == 2:
            position = reader.state_dict()
    assert trained == [10, 11, 12, 13, 14]
    resumed = cnr.ReaderState(torch.arange(5).split(1))
    resumed.load_state_dict(position)
    assert [int(batch) for batch in resumed.train(_staged())] == [12, 13, 14]


def test_what_was_trained_is_what_was_reported() -> None:
    """A position is that of the last batch reported, over passes; what was not handed out cannot be reported."""
    reader = cnr.ReaderState(["a", "b", "c"])
    beginning = reader.state_dict()
    with pytest.raises(cnr.ConfigurationError, match="1 batches cannot have been trained: 0 were returned"):
        reader.trained()
    assert list(reader) == ["a", "b", "c"]
    assert reader.state_dict() == beginning
    reader.trained(3)
    assert list(reader) == ["a", "b", "c"]
    reader.trained(2)
    again = cnr.ReaderState(["a", "b", "c"])
    again.load_state_dict(reader.state_dict())
    assert list(again) == ["c"]
    assert list(again) == ["a", "b", "c"]
    again.load_state_dict(beginning)
    assert list(again) == ["a", "b", "c"]


def test_batches_that_nobody_reports_are_noticed() -> None:
    """No pipeline holds so many: whoever forgets to report would train everything twice after a restart."""
    reader = cnr.ReaderState(range(1000))
    with pytest.raises(cnr.ConfigurationError, match=r"call trained\(\) after each step"):
        list(reader)


def _trained_samples(reader: "cnr.ReaderState[str]", num_epochs: int, num_steps: int) -> tuple[list[str], Any]:
    """Train epochs, as a script does, until some number of steps: what was trained, and the position then."""
    trained: list[str] = []
    for epoch in range(reader.num_passes, num_epochs):
        for batch in reader:
            reader.trained()
            trained.append(f"{epoch}{batch}")
            if len(trained) == num_steps:
                return trained, reader.state_dict()
    return trained, reader.state_dict()


@pytest.mark.parametrize("num_steps", range(10))
@pytest.mark.parametrize("loader", [lambda: ["a", "b", "c"], lambda: lambda first: iter("abc"[first:])])
def test_epochs_go_on_where_they_ended(loader: Callable[[], Any], num_steps: int) -> None:
    """Each epoch trains each batch once, also if the job ended after the last batch of an epoch."""
    whole, _ = _trained_samples(cnr.ReaderState(loader()), 3, 100)
    assert len(whole) == 9
    begun, position = _trained_samples(cnr.ReaderState(loader()), 3, num_steps) if num_steps else ([], None)
    resumed = cnr.ReaderState[str](loader())
    if position is not None:
        resumed.load_state_dict(position)
    assert resumed.num_passes == max(num_steps - 1, 0) // 3
    assert begun + _trained_samples(resumed, 3, 100)[0] == whole


def _loaded(saved: object) -> None:
    stream = io.BytesIO()
    torch.save(saved, stream)
    reader = cnr.ReaderState(["a", "b"])
    (name,) = reader.state_dict()
    try:
        reader.load_state_dict({name: stream.getvalue()})
    finally:
        assert list(reader) == ["a", "b"]


@pytest.mark.parametrize("position", [7, {"sampler": 3}, {"num_batches": "3"}, {"num_batches": -1}])
def test_a_position_of_another_kind_of_loader_is_refused(position: object) -> None:
    """The error says so, and the reader stays where it was."""
    with pytest.raises(cnr.StateMismatchError, match="another kind of loader"):
        _loaded({"num_passes": 0, "loader": position})


@pytest.mark.parametrize("saved", [7, {"loader": {"num_batches": 1}}, {"num_passes": -1, "loader": None}])
def test_what_is_no_position_is_refused(saved: object) -> None:
    """And the reader stays where it was."""
    with pytest.raises(cnr.DamagedError, match="has no number of passes"):
        _loaded(saved)

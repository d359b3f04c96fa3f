"""Lives of a job: programs of operations, and a dictionary that is assumed to be perfect.

A program is a list of operations; a dictionary holds what the job's state was at the cut of each committed checkpoint.
On gloo ranks a program is a list of segments: each is a group of ranks of its own, with another sharding and perhaps
another world size.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer
from torchrec.optim import RowWiseAdagrad

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.faults import InjectedError
from tests.support.models import Job, Whole, differing, state, torchrec_job, train, whole
from tests.support.ranks import RankPools

POLICIES: Mapping[str, cnr.Policy] = {
    "Full": cnr.Full(),
    "OneShot": cnr.OneShot(),
    "Consecutive": cnr.Consecutive(),
    "Compacted": cnr.Compacted(),
    "Intermittent": cnr.Intermittent(),
}

LOAD_PHASES = ("set_up_planner", "create_local_plan", "finish_plan", "resolve_tensor", "commit_tensor", "load_bytes")
SEGMENT_SECS = 100.0


@dataclass(frozen=True)
class Train:
    """Look up, backward, step."""

    seed: int


@dataclass(frozen=True)
class Backward:
    """Look up and backward, without a step: gradients wait, and add up."""

    seed: int


@dataclass(frozen=True)
class Step:
    """Let the optimizers use the gradients that wait."""


@dataclass(frozen=True)
class Evaluate:
    """Look up without training."""

    seed: int


@dataclass(frozen=True)
class Save:
    """Save under a new id, or, after a save that committed nothing, perhaps under its id."""

    policy: str
    is_retry: bool = False


@dataclass(frozen=True)
class FailedSave:
    """A save in which one phase fails on one rank."""

    policy: str
    phase: str
    when: str
    rank: int


@dataclass(frozen=True)
class Restart:
    """Throw everything away, build the model anew with other weights, and load a checkpoint, the latest if 0."""

    num_back: int


@dataclass(frozen=True)
class Rewind:
    """Load a checkpoint into the living job."""

    num_back: int


@dataclass(frozen=True)
class FailedLoad:
    """A load into the living job that fails on one rank, and leaves anything in it."""

    num_back: int
    phase: str
    rank: int


Operation = Train | Backward | Step | Evaluate | Save | FailedSave | Restart | Rewind | FailedLoad


@dataclass
class Life:
    """A job under test, and the perfect memory of its checkpoints.

    Attributes:
        root: Where it saves.
        build: Makes a job from a seed.
        committed: By checkpoint id, in the order of commits: all that the job held at the cut.
        num_saves: Saves tried, which names them.
        verify_untracked: Whether the tracker checks that it has missed nothing.
        is_on_head: Whether the job stands on a checkpoint for sure, so that a delta is due where a policy wants one.
        has_baseline: Whether the newest baseline is there for sure, on which ``OneShot`` bases its deltas.
    """

    root: str
    build: Callable[[int], Job]
    committed: dict[str, Whole] = field(default_factory=dict)
    num_saves: int = 0
    verify_untracked: bool = False
    job: Job = field(init=False)
    tracker: cnr.RowTracker = field(init=False)
    num_steps: int = field(init=False, default=0)
    is_on_head: bool = field(init=False, default=False)
    has_baseline: bool = field(init=False, default=True)
    failed_path: str | None = field(init=False, default=None)

    def start(self, num_back: int = 0) -> None:
        """Build a new job, and load a checkpoint if there is one."""
        self.job = self.build(len(self.committed) + 10 * self.num_saves)
        self.tracker = cnr.RowTracker(self.job.model, verify_untracked=self.verify_untracked)
        self.num_steps = -1
        self.is_on_head = False
        latest = cnr.latest(self.root)
        assert latest == (None if not self.committed else self._path(0))
        if latest is not None:
            self.load(num_back)

    def run(self, operation: Operation) -> None:
        """Do one operation, and check all that can be checked after it."""
        match operation:
            case Train(seed):
                train(self.job, seed)
                self.num_steps += 1
            case Backward(seed):
                models.backward(self.job, seed)
            case Step():
                models.step(self.job)
            case Evaluate(seed):
                with torch.no_grad():
                    self.job.model(self.job.batch(torch.Generator().manual_seed(seed)))
            case Save():
                self.save(operation)
            case FailedSave():
                self.failed_save(operation)
            case Restart(num_back):
                self.tracker.close()
                self.start(num_back)
            case Rewind(num_back) if self.committed:
                with torch.no_grad():
                    for parameter in self.job.model.parameters():
                        parameter.add_(0.37)  # no sum of steps of half the learning rate
                self.load(num_back)
            case FailedLoad() if self.committed:
                self.failed_load(operation)
            case _:
                pass

    def save(self, operation: Save) -> None:
        """Save, and remember."""
        path = self.failed_path if operation.is_retry and self.failed_path else self._next_path()
        cut = whole(self.state())
        planner = cnr.CNRSavePlanner(self.tracker, policy=POLICIES[operation.policy])
        dcp.save(self.state(), checkpoint_id=path, storage_writer=models.writer(path), planner=planner)
        self.committed[path] = cut
        self.failed_path = None
        checkpoint = cnr.read_checkpoint(path)
        if operation.policy == "Full":
            assert checkpoint.kind == "baseline"
        elif operation.policy != "Intermittent" and self.is_on_head:
            assert checkpoint.kind == "delta" or (operation.policy == "OneShot" and not self.has_baseline)
        self.is_on_head, self.has_baseline = True, self.has_baseline or checkpoint.kind == "baseline"
        assert cnr.latest(self.root) == path

    def failed_save(self, operation: FailedSave) -> None:
        """Save, be told of the failure, and find a checkpoint only where it came after the commit."""
        path = self._next_path()
        cut = whole(self.state())
        planner = cnr.CNRSavePlanner(self.tracker, policy=POLICIES[operation.policy])
        writer = models.writer(path)
        with (
            faults.failing(planner, writer, operation.phase, operation.when, operation.rank),
            pytest.raises(CheckpointException) as raised,
        ):
            dcp.save(self.state(), checkpoint_id=path, storage_writer=writer, planner=planner)
        assert [type(cause) for cause in faults.causes(raised.value).values()] == [InjectedError]
        if faults.has_committed(operation.phase, operation.when):
            self.committed[path] = cut
            self.is_on_head = True
        else:
            self.failed_path = path
        assert cnr.latest(self.root) == (self._path(0) if self.committed else None)

    def load(self, num_back: int) -> None:
        """Load into a job that holds something else, and compare all of it."""
        path = self._path(num_back)
        expected = self.committed[path]
        reader = self.state()["reader"]
        before = whole(self.state())
        tables = [fqn for fqn in expected if fqn.startswith("model.")]
        assert set(tables) <= set(differing(before, expected)), "the target must not hold already what is loaded"
        got = models.load(self.job, path, self.tracker, **dict.fromkeys(reader, 0))
        assert_same(got, expected)
        self.num_steps = got["reader.num_steps"]
        self.is_on_head = True

    def failed_load(self, operation: FailedLoad) -> None:
        """Load, and be told of the failure."""
        planner = cnr.CNRLoadPlanner(self.tracker)
        reader = cnr.CNRStorageReader(self._path(operation.num_back))
        with _failing_load(planner, operation), pytest.raises(CheckpointException) as raised:
            dcp.load(self.state(), storage_reader=reader, planner=planner)
        models.agree(self.job)
        self.is_on_head = False
        assert [type(cause) for cause in faults.causes(raised.value).values()] == [InjectedError]

    def state(self) -> dict[str, Any]:
        """What is saved of the job now."""
        return state(self.job, num_steps=self.num_steps, seen=[self.num_steps, "a batch"], nothing=None)

    def _path(self, num_back: int) -> str:
        paths = list(self.committed)
        return paths[-1 - num_back % len(paths)]

    def _next_path(self) -> str:
        self.num_saves += 1
        return f"{self.root}/step-{self.num_saves}"


@contextmanager
def _failing_load(planner: cnr.CNRLoadPlanner, operation: FailedLoad) -> Iterator[None]:
    """Have a phase of a load fail on one rank."""
    if faults.own_rank() == operation.rank:
        faults.replace_method(planner, operation.phase, faults.raising(operation.phase))
    yield


def assert_same(got: Whole, expected: Whole) -> None:
    """Everything is equal bit for bit; but row-wise state under another column sharding only in its mean over columns.

    Row-wise Adagrad keeps one value a row and column shard, so that its size changes with the sharding.
    """
    resized = [fqn for fqn in expected if fqn.endswith(".momentum1") and got[fqn].shape != expected[fqn].shape]
    rest = [fqn for fqn in differing(got, expected) if fqn not in resized]
    assert not rest, f"differ from the cut: {rest}"
    for fqn in resized:
        num_rows = min(len(got[fqn]), len(expected[fqn]))
        means = [values.double().view(-1, num_rows).mean(dim=0) for values in (got[fqn], expected[fqn])]
        torch.testing.assert_close(*means, rtol=1e-6, atol=0.0)


def operations(num_ranks: int, *, has_steps: bool) -> st.SearchStrategy[list[Operation]]:
    """Programs for one group of ranks: training, something else, more training, and so on."""
    seeds = st.integers(1, 10**6)
    policies, ranks, back = st.sampled_from(sorted(POLICIES)), st.integers(0, num_ranks - 1), st.integers(0, 4)
    deltas = st.sampled_from(["Consecutive", "Consecutive", "OneShot", "Intermittent"])
    trains = st.builds(Train, seeds)
    failed_saves = st.builds(
        FailedSave, deltas | policies, st.sampled_from(faults.PHASES), st.sampled_from(["before", "after"]), ranks
    )
    failed_loads = st.builds(FailedLoad, back, st.sampled_from(LOAD_PHASES), ranks)
    saves = st.builds(Save, deltas, st.booleans())
    steps = [st.builds(Backward, seeds), st.just(Step())] if has_steps else []
    # Each is as likely as its share of this list.
    kinds: list[st.SearchStrategy[Operation]] = [saves] * 6 + [failed_saves] * 3 + [st.builds(Restart, st.just(0))] * 3
    kinds += [st.builds(Save, policies, st.booleans()), st.builds(Restart, back), st.builds(Rewind, back)]
    kinds += [failed_loads, st.builds(Evaluate, seeds), *steps]
    actions = st.sampled_from(kinds).flatmap(lambda kind: kind)
    rounds = st.tuples(trains, actions) | st.tuples(trains, actions) | st.tuples(actions)
    programs = st.lists(rounds, min_size=6, max_size=12)
    return programs.map(lambda parts: [operation for part in parts for operation in part])


@dataclass(frozen=True)
class Segment:
    """A part of a life that one group of ranks lives.

    Attributes:
        sharding: One of `models.SHARDINGS`.
        num_back: Which checkpoint it starts from.
        operations: What it does then.
        fused: The tables' optimizer, the same in all segments.
        verify_untracked: Whether its tracker checks that it has missed nothing.
        life: What it is a part of.
    """

    sharding: str
    num_back: int
    operations: list[Any]
    fused: type[Optimizer] = RowWiseAdagrad
    verify_untracked: bool = False
    life: type[Life] = Life


def _live_segment(
    rank: int, root: str, segment: Segment, committed: dict[str, Whole], num_saves: int
) -> tuple[dict[str, Whole], int]:
    build = partial(torchrec_job, sharding=segment.sharding, fused=segment.fused)
    life = segment.life(root, build, committed, num_saves, segment.verify_untracked)
    life.start(segment.num_back)
    for operation in segment.operations:
        life.run(operation)
    life.tracker.close()
    return (life.committed if rank == 0 else {}), life.num_saves


def live_segments(rank_pool: RankPools, root: Path, program: list[tuple[int, Segment]]) -> None:
    """Live one segment after the other, each on so many ranks."""
    committed: dict[str, Whole] = {}
    num_saves = 0
    for world_size, segment in program:
        pool = rank_pool(world_size)
        results = pool.run(_live_segment, str(root), segment, committed, num_saves, timeout_secs=SEGMENT_SECS)
        committed, num_saves = results[0]

"""Random lives of a job: whatever happens between them, a checkpoint loads as the state at its cut, bit for bit.

A program is a list of operations; a dictionary, assumed to be perfect, holds what the job's state was at the cut of
each committed checkpoint. Hypothesis draws programs. They run in this process on torch's own tables, many and fast, and
on gloo ranks with sharded TorchRec tables, where a program is a list of segments: each is a group of ranks of its own,
with another sharding and perhaps another world size.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import SGD, Adagrad, Optimizer
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import KeyedOptimizerWrapper

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.faults import InjectedError
from tests.support.models import Job, Whole, differing, plain_job, state, torchrec_job, train, whole
from tests.support.ranks import RankPools

POLICIES: Mapping[str, cnr.Policy] = {
    "Full": cnr.Full(),
    "OneShot": cnr.OneShot(),
    "Consecutive": cnr.Consecutive(),
    "Compacted": cnr.Compacted(),
    "Intermittent": cnr.Intermittent(),
}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

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
                        parameter.add_(1.0)
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
            assert checkpoint.kind == "delta"
        self.is_on_head = True
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


def _live_plain(root: Path, optimizer: str, program: list[Operation], verify_untracked: bool) -> None:
    life = Life(str(root), lambda seed: plain_job(seed, optimizer), verify_untracked=verify_untracked)
    life.start()
    with ExitStack() as stack:
        stack.callback(lambda: life.tracker.close())
        for operation in [Save("Full"), *program, Save("Consecutive")]:
            life.run(operation)
        for num_back in range(len(life.committed)):
            life.run(Restart(num_back))


@pytest.mark.parametrize("optimizer", sorted(models.OPTIMIZERS))
@settings(max_examples=8, derandomize=True, phases=[Phase.generate])  # the slow test below shrinks what fails
@given(program=operations(1, has_steps=True), verify_untracked=st.booleans())
def test_every_checkpoint_of_a_plain_model_loads_as_its_cut(
    tmp_path_factory: pytest.TempPathFactory, optimizer: str, program: list[Operation], verify_untracked: bool
) -> None:
    """Whatever the order of training, saves, failures and loads, each checkpoint is the state at its cut."""
    _live_plain(tmp_path_factory.mktemp("life"), optimizer, program, verify_untracked)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", sorted(models.OPTIMIZERS))
@settings(max_examples=200)
@given(program=operations(1, has_steps=True), verify_untracked=st.booleans())
def test_many_lives_of_a_plain_model(
    tmp_path_factory: pytest.TempPathFactory, optimizer: str, program: list[Operation], verify_untracked: bool
) -> None:
    """As above, with many programs that change from run to run."""
    _live_plain(tmp_path_factory.mktemp("life"), optimizer, program, verify_untracked)


@dataclass(frozen=True)
class Segment:
    """A part of a life that one group of ranks lives.

    Attributes:
        sharding: One of `models.SHARDINGS`.
        fused: The tables' optimizer, the same in all segments.
        num_back: Which checkpoint it starts from.
        operations: What it does then.
        verify_untracked: Whether its tracker checks that it has missed nothing.
    """

    sharding: str
    fused: type[Optimizer]
    num_back: int
    operations: list[Operation]
    verify_untracked: bool = False


def _live_segment(
    rank: int, root: str, segment: Segment, committed: dict[str, Whole], num_saves: int
) -> tuple[dict[str, Whole], int]:
    life = Life(
        root,
        lambda seed: torchrec_job(seed, segment.sharding, fused=segment.fused),
        committed,
        num_saves,
        segment.verify_untracked,
    )
    life.start(segment.num_back)
    for operation in segment.operations:
        life.run(operation)
    life.tracker.close()
    return (life.committed if rank == 0 else {}), life.num_saves


def _live_torchrec(rank_pool: RankPools, root: Path, program: list[tuple[int, Segment]]) -> None:
    committed: dict[str, Whole] = {}
    num_saves = 0
    for world_size, segment in program:
        pool = rank_pool(world_size)
        results = pool.run(_live_segment, str(root), segment, committed, num_saves, timeout_secs=SEGMENT_SECS)
        committed, num_saves = results[0]
    for sharding, num_back in (("row", 0), ("column", 1), ("mixed", 2)):
        last = Segment(sharding, program[0][1].fused, num_back, [])
        rank_pool(2).run(_live_segment, str(root), last, committed, num_saves, timeout_secs=SEGMENT_SECS)


@st.composite
def segments(draw: st.DrawFn, world_sizes: list[int]) -> list[tuple[int, Segment]]:
    """Lives on changing groups of ranks, the first of which saves at least once."""
    found = []
    fused = draw(st.sampled_from([RowWiseAdagrad, RowWiseAdagrad, Adagrad, SGD]))
    for number in range(draw(st.integers(2, 4))):
        world_size = draw(st.sampled_from(world_sizes))
        program = draw(operations(world_size, has_steps=False))
        first: list[Operation] = [Train(1), Save("Consecutive")] if number == 0 else []
        sharding, num_back = draw(st.sampled_from(models.SHARDINGS)), draw(st.integers(0, 3))
        verify_untracked = draw(st.booleans())
        found.append((world_size, Segment(sharding, fused, num_back, first + program, verify_untracked)))
    return found


@settings(
    max_examples=7,
    derandomize=True,
    phases=[Phase.generate],  # a failure ends the group of ranks, so shrinking would take very long
    suppress_health_check=[HealthCheck.too_slow],
)
@given(program=segments([1, 2, 2]))
def test_every_checkpoint_of_a_sharded_model_loads_as_its_cut(
    tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPools, program: list[tuple[int, Segment]]
) -> None:
    """Sharding and world size may change at any link of a lineage, and whatever fails, fails on any rank."""
    _live_torchrec(rank_pool, tmp_path_factory.mktemp("life"), program)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@settings(max_examples=25, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
@given(program=segments([1, 2, 3]))
def test_many_lives_of_a_sharded_model(
    tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPools, part: int, program: list[tuple[int, Segment]]
) -> None:
    """As above, with many programs that change from run to run, and a third world size."""
    _live_torchrec(rank_pool, tmp_path_factory.mktemp("life"), program)


# What a program cannot say.


def _save(job: Job, tracker: cnr.RowTracker, path: str, policy: cnr.Policy) -> cnr.Checkpoint:
    planner = cnr.CNRSavePlanner(tracker, policy=policy)
    dcp.save(state(job), checkpoint_id=path, storage_writer=models.writer(path), planner=planner)
    return cnr.read_checkpoint(path)


def _num_rows_changed(before: Whole, after: Whole) -> int:
    tables = [fqn for fqn in before if fqn.endswith(".weight") and "over" not in fqn and "optim" not in fqn]
    assert len(tables) > 1
    return sum(int((before[fqn] != after[fqn]).any(dim=1).sum()) for fqn in tables if "fused" not in fqn)


def _train_in_flight(rank: int, root: str, build: Callable[[int], Job], fails: bool) -> None:
    job = build(1)
    tracker = cnr.RowTracker(job.model)
    _save(job, tracker, f"{root}/0", cnr.Consecutive())
    train(job, 1)
    cut = whole(state(job))
    writer = models.writer(f"{root}/1")
    written = writer.write_data

    def write_then_train(plan: Any, planner: Any) -> Any:
        results = written(plan, planner)
        train(job, 2)
        return results

    faults.replace_method(writer, "write_data", write_then_train)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    with ExitStack() as stack:
        if fails:
            stack.enter_context(faults.failing(planner, writer, "finish", "before", 0))
            stack.enter_context(pytest.raises(CheckpointException))
        dcp.save(state(job), checkpoint_id=f"{root}/1", storage_writer=writer, planner=planner)
    end = whole(state(job))
    delta = _save(job, tracker, f"{root}/2", cnr.Consecutive())
    tracker.close()
    before = whole(state(build(1))) if fails else cut
    assert delta.kind == "delta"
    assert delta.num_rows == _num_rows_changed(before, end)
    if not fails:
        assert_same(models.load(build(2), f"{root}/1"), cut)
    assert_same(models.load(build(3), f"{root}/2"), end)


@pytest.mark.parametrize("fails", [False, True], ids=["committed", "failed"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "sparse_adam"])
def test_rows_trained_while_a_save_is_in_flight_belong_to_the_next_delta(
    tmp_path: Path, optimizer: str, fails: bool
) -> None:
    """The cut is when the save begins; rows marked between it and the commit are in the next delta."""
    _train_in_flight(0, str(tmp_path), lambda seed: plain_job(seed, optimizer), fails)


@pytest.mark.parametrize("fails", [False, True], ids=["committed", "failed"])
def test_rows_trained_in_flight_belong_to_the_next_delta_on_ranks(
    tmp_path: Path, rank_pool: RankPools, fails: bool
) -> None:
    """As above, with sharded tables, on every rank."""
    rank_pool(2).run(_train_in_flight, str(tmp_path), torchrec_job, fails)


def _restore_then_one_shot(rank: int, root: str, build: Callable[[int], Job], policy: cnr.Policy) -> None:
    job = build(1)
    tracker = cnr.RowTracker(job.model)
    _save(job, tracker, f"{root}/baseline", policy)
    baseline = whole(state(job))
    train(job, 1)
    _save(job, tracker, f"{root}/first", policy)
    tracker.close()
    restored = build(2)
    tracker = cnr.RowTracker(restored.model)
    models.load(restored, f"{root}/first", tracker)
    train(restored, 2)
    end = whole(state(restored))
    second = _save(restored, tracker, f"{root}/second", policy)
    tracker.close()
    assert second.parent == f"{root}/baseline"
    assert second.num_rows == _num_rows_changed(baseline, end)
    assert_same(models.load(build(3), f"{root}/second"), end)


@pytest.mark.parametrize("policy", [cnr.OneShot(), cnr.Intermittent()], ids=["OneShot", "Intermittent"])
def test_a_one_shot_delta_after_a_restore_holds_rows_modified_before_it(tmp_path: Path, policy: cnr.Policy) -> None:
    """A delta of the baseline holds every row modified since, also those modified before a restore."""
    _restore_then_one_shot(0, str(tmp_path), plain_job, policy)


def test_a_one_shot_delta_after_a_restore_on_ranks(tmp_path: Path, rank_pool: RankPools) -> None:
    """As above, with sharded tables."""
    rank_pool(2).run(_restore_then_one_shot, str(tmp_path), torchrec_job, cnr.OneShot())


def _look_up_only(rank: int, root: str, build: Callable[[int], Job]) -> None:
    job = build(1)
    tracker = cnr.RowTracker(job.model)
    inputs = [job.batch(torch.Generator().manual_seed(seed)) for seed in range(2)]
    job.model.eval()
    job.model(inputs[0])
    job.model.train()
    with torch.no_grad():
        job.model(inputs[1])
    assert tracker.num_modified == 0
    train(job, 1)
    assert tracker.num_modified > 0
    tracker.close()


def test_looking_up_without_training_marks_nothing(tmp_path: Path, rank_pool: RankPools) -> None:
    """Evaluation and no_grad mark no row; training does."""
    _look_up_only(0, str(tmp_path), plain_job)
    rank_pool(2).run(_look_up_only, str(tmp_path), torchrec_job)


def _track_beside_others(rank: int, root: str) -> None:
    calls = {"before": 0, "after": 0}

    def counter(name: str) -> Callable[..., None]:
        def count(*args: Any) -> None:
            calls[name] += 1

        return count

    job = torchrec_job(1, "row", item_table="sequences")  # theirs takes equal names of tables for one
    model: Any = job.model
    model.module.ebc.register_post_lookup_tracker_fn(counter("before"))
    tracker = cnr.RowTracker(job.model)
    model.module.ec.register_post_lookup_tracker_fn(counter("after"))
    train(job, 1)
    assert calls == {"before": 1, "after": 1}
    _save(job, tracker, f"{root}/0", cnr.Consecutive())
    theirs = ModelDeltaTrackerTrec(job.model)
    train(job, 2)
    theirs.step()
    end = whole(state(job))
    assert sum(len(ids) for ids in theirs.get_unique_ids().values()) == tracker.num_modified > 0
    delta = _save(job, tracker, f"{root}/1", cnr.Consecutive())
    assert delta.kind == "delta"
    assert_same(models.load(torchrec_job(2, "row", item_table="sequences"), f"{root}/1"), end)
    tracker.close()
    train(job, 3)
    assert tracker.num_modified == 0


def test_lookup_trackers_of_others_keep_being_called(tmp_path: Path, rank_pool: RankPools) -> None:
    """A function registered for lookups works beside the row tracker, before or after it, TorchRec's own too."""
    rank_pool(2).run(_track_beside_others, str(tmp_path))


def test_gradients_that_wait_during_a_load_are_tracked(tmp_path: Path) -> None:
    """A step after a load, with gradients from before it, modifies rows that the next delta must hold."""
    job = plain_job(1)
    tracker = cnr.RowTracker(job.model)
    _save(job, tracker, f"{tmp_path}/0", cnr.Consecutive())
    models.backward(job, 1)
    models.load(job, f"{tmp_path}/0", tracker)
    models.step(job)
    end = whole(state(job))
    _save(job, tracker, f"{tmp_path}/1", cnr.Consecutive())
    tracker.close()
    assert_same(models.load(plain_job(2), f"{tmp_path}/1"), end)


@pytest.mark.parametrize("optimizer", ["adam", "sparse_adam", "momentum"])
def test_optimizer_state_that_appears_after_the_baseline_is_saved(tmp_path: Path, optimizer: str) -> None:
    """Optimizers make their state at the first step, perhaps after the first checkpoint; the next holds all of it."""
    job = plain_job(1, optimizer, fresh=True)
    tracker = cnr.RowTracker(job.model)
    _save(job, tracker, f"{tmp_path}/0", cnr.Consecutive())
    train(job, 1)
    end = whole(state(job))
    _save(job, tracker, f"{tmp_path}/1", cnr.Consecutive())
    tracker.close()
    assert_same(models.load(plain_job(2, optimizer), f"{tmp_path}/1"), end)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_table_that_is_used_as_a_matrix_too_is_saved_as_it_is(tmp_path: Path, optimizer: str) -> None:
    """Where a table's weight is also a layer's (tied), its gradient reaches rows that no lookup named."""
    torch.manual_seed(1)
    table, scores = nn.Embedding(30, 4), nn.Linear(4, 30, bias=False)
    scores.weight = table.weight
    model = nn.ModuleDict({"table": table, "scores": scores})
    optim = models.OPTIMIZERS[optimizer](model.parameters())
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    saved = {"table": table.state_dict()}
    dcp.save(saved, storage_writer=models.writer(tmp_path / "0"), planner=planner)
    before = table.weight.detach().clone()
    nn.functional.cross_entropy(scores(table(torch.tensor([3, 5]))), torch.tensor([1, 2])).backward()
    optim.step()
    assert int((table.weight != before).any(dim=1).sum()) == 30
    dcp.save(saved, storage_writer=models.writer(tmp_path / "1"), planner=planner)
    tracker.close()
    loaded = nn.Embedding(30, 4)
    target = {"table": loaded.state_dict()}
    dcp.load(target, storage_reader=cnr.CNRStorageReader(tmp_path / "1"), planner=cnr.CNRLoadPlanner())
    assert torch.equal(loaded.weight, table.weight)


def _load_weights_only(rank: int, root: str, build: Callable[[int], Job]) -> None:
    job = build(1)
    tracker = cnr.RowTracker(job.model)
    train(job, 1)
    _save(job, tracker, f"{root}/0", cnr.Consecutive())
    tracker.close()
    fresh = build(2)
    tracker = cnr.RowTracker(fresh.model)
    weights = {"model": fresh.model.state_dict()}
    planner = cnr.CNRLoadPlanner(tracker, allow_partial_load=True)
    dcp.load(weights, storage_reader=cnr.CNRStorageReader(f"{root}/0"), planner=planner)
    train(fresh, 2)
    end = whole(state(fresh))
    _save(fresh, tracker, f"{root}/1", cnr.Consecutive())
    tracker.close()
    assert_same(models.load(build(3), f"{root}/1"), end)


def test_a_save_after_a_load_of_the_weights_alone_holds_the_optimizer(tmp_path: Path, rank_pool: RankPools) -> None:
    """Fine-tuning loads weights and starts a fresh optimizer: its rows are not those of the loaded checkpoint."""
    rank_pool(2).run(_load_weights_only, str(tmp_path / "torchrec"), torchrec_job)


def test_a_save_after_a_load_of_plain_weights_alone_holds_the_optimizer(tmp_path: Path) -> None:
    """As above, for a ``torch.optim`` optimizer."""
    _load_weights_only(0, str(tmp_path), _adagrad_job)


def _adagrad_job(seed: int) -> Job:
    return plain_job(seed, "adagrad")


def _go_on_from_an_untracked_save(rank: int, root: str, build: Callable[[int], Job]) -> None:
    job = build(1)
    dcp.save(state(job), storage_writer=models.writer(f"{root}/0"))  # which tables there are, only names tell
    tracker = cnr.RowTracker(job.model)
    models.load(job, f"{root}/0", tracker)
    for number in (1, 2):
        train(job, number)
        _save(job, tracker, f"{root}/{number}", cnr.Consecutive())
    tracker.close()
    assert cnr.read_checkpoint(f"{root}/2").kind == "delta"
    end = whole(state(job))
    assert_same(models.load(build(3), f"{root}/2"), end)


def test_a_run_goes_on_from_a_save_without_a_tracker(tmp_path: Path, rank_pool: RankPools) -> None:
    """Its baseline knows less of tables and their state, so the first delta holds those whole, and loads."""
    _go_on_from_an_untracked_save(0, str(tmp_path / "plain"), _adagrad_job)
    rank_pool(2).run(_go_on_from_an_untracked_save, str(tmp_path / "torchrec"), torchrec_job)


def _more_ranks_than_rows(rank: int, root: str) -> None:
    def build(seed: int) -> Job:
        return torchrec_job(seed, "row", bag_rows=(37, 24, 1))

    job = build(1)
    tracker = cnr.RowTracker(job.model)
    for number in range(2):
        # By hand: fbgemm's kernels for CPUs read beyond a table without rows now and then.
        for shard in state(job)["model"]["ebc.embedding_bags.t2.weight"].local_shards():
            shard.tensor.data.add_(1.0)
        tracker.mark("ebc.embedding_bags.t2.weight", torch.tensor([0]))
        _save(job, tracker, f"{root}/{number}", cnr.Consecutive())
    end = whole(state(job))
    assert_same(models.load(build(2), f"{root}/1"), end)
    tracker.close()


def test_a_table_with_fewer_rows_than_ranks_is_saved(tmp_path: Path, rank_pool: RankPools) -> None:
    """Row-wise sharding of a small table leaves ranks without a row; their empty shards do not hinder a save."""
    rank_pool(2).run(_more_ranks_than_rows, str(tmp_path))


def _dense_kernel_model(seed: int, sharding: str) -> DistributedModelParallel:
    torch.manual_seed(seed)
    model = nn.Module()
    model.ebc = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t0", embedding_dim=8, num_embeddings=30, feature_names=["f0"])],
        device=torch.device("meta"),
    )
    sharder = EmbeddingBagCollectionSharder()
    world_size = torch.distributed.get_world_size()
    plan = construct_module_sharding_plan(
        model.ebc,
        {"t0": data_parallel() if sharding == "data" else row_wise(compute_kernel=EmbeddingComputeKernel.DENSE.value)},
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(torch.distributed.GroupMember.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],
    )


def _cut_between_backward_and_step(rank: int, root: str, optimizer: type[SGD | Adagrad], sharding: str) -> None:
    model = _dense_kernel_model(1, sharding)
    optim = optimizer(model.parameters(), lr=0.5)
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())

    def save(name: str) -> None:
        path = f"{root}/{name}"
        dcp.save({"model": model.state_dict()}, storage_writer=models.writer(path), planner=planner)

    save("0")
    ids = KeyedJaggedTensor.from_lengths_sync(["f0"], torch.arange(8) + 5 * rank, torch.full((4,), 2))
    model.module.ebc(ids).values().sum().backward()
    save("1")
    before = whole({"model": model.state_dict()})
    optim.step()
    end = whole({"model": model.state_dict()})
    assert differing(before, end)
    save("2")
    assert cnr.read_checkpoint(f"{root}/2").kind == "delta"
    tracker.close()
    target = _dense_kernel_model(2, sharding)
    loaded = {"model": target.state_dict()}
    dcp.load(loaded, storage_reader=cnr.CNRStorageReader(f"{root}/2"), planner=cnr.CNRLoadPlanner())
    assert_same(whole({"model": target.state_dict()}), end)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("sharding", ["row", "data"])
@pytest.mark.parametrize("optimizer", [SGD, Adagrad])
def test_a_cut_between_backward_and_step_of_a_dense_kernel(
    tmp_path: Path, rank_pool: RankPools, optimizer: type[SGD | Adagrad], sharding: str, world_size: int
) -> None:
    """Tables of a dense kernel are modified by the optimizer's step: rows whose step follows a cut are in the next.

    Replicated ones too, whose gradients come from the lookups of all ranks.
    """
    rank_pool(world_size).run(_cut_between_backward_and_step, str(tmp_path), optimizer, sharding)


def _save_state_of_a_dense_kernel(rank: int, root: str) -> None:
    model = _dense_kernel_model(1, "row")
    named = dict(model.named_parameters())
    optimizer = KeyedOptimizerWrapper(named, lambda parameters: Adagrad(parameters, lr=0.5))
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker)
    ids = KeyedJaggedTensor.from_lengths_sync(["f0"], torch.arange(8) + 5 * rank, torch.full((4,), 2))
    model.module.ebc(ids).values().sum().backward()
    optimizer.step()
    state_dict = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state_dict, storage_writer=models.writer(f"{root}/0"), planner=planner)
    assert "sum' is optimizer state of each rank's own rows, but is not sharded" in str(caught.value)
    apart = {"model": model.state_dict(), f"optim{rank}": optimizer.state_dict()}
    dcp.save(apart, storage_writer=models.writer(f"{root}/1"), planner=planner)
    tracker.close()


def test_state_that_ranks_have_under_one_name_is_refused(tmp_path: Path, rank_pool: RankPools) -> None:
    """A sharded table with a dense kernel has optimizer state that is not sharded: DCP would save that of one rank."""
    rank_pool(2).run(_save_state_of_a_dense_kernel, str(tmp_path))


def _save_other_sizes(rank: int, root: str) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.save(
            {"mine": torch.zeros(3 + rank)}, storage_writer=models.writer(f"{root}/0"), planner=cnr.CNRSavePlanner()
        )
    assert "has one size on rank 0 and another on rank 1" in str(caught.value)


def test_tensors_of_other_sizes_under_one_name_are_refused(tmp_path: Path, rank_pool: RankPools) -> None:
    """DCP itself would save the first."""
    rank_pool(2).run(_save_other_sizes, str(tmp_path))


def _rows(table: torch.Tensor, first: int, step: int) -> torch.Tensor:
    return torch.arange(first, len(table), step)


@pytest.mark.parametrize("quantization", [cnr.NoQuantization(), cnr.Asymmetric(8)], ids=["exact", "quantized"])
def test_tables_larger_than_a_pack(tmp_path: Path, quantization: cnr.Scheme) -> None:
    """Tables of many blocks and packs, with more rows than are looked at once, written and read by several threads."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"long": nn.EmbeddingBag(5_000_000, 1), "wide": nn.EmbeddingBag(150_000, 100)})
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    tables = {name: parameter.detach() for name, parameter in model.named_parameters()}
    baseline = {}
    for number, step in enumerate((None, 3)):
        for name, table in tables.items():
            if step is not None:
                rows = _rows(table, number, step)
                table[rows] += 1.0
                tracker.mark(name, rows)
        writer = models.writer(tmp_path / str(number), quantization=quantization, thread_count=3)
        dcp.save(model.state_dict(), storage_writer=writer, planner=planner)
        loaded = {name: torch.zeros_like(table) for name, table in tables.items()}
        reader = cnr.CNRStorageReader(tmp_path / str(number), thread_count=3)
        dcp.load(loaded, storage_reader=reader, planner=cnr.CNRLoadPlanner())
        for name, table in tables.items():
            got = loaded[name]
            if isinstance(quantization, cnr.NoQuantization):
                assert torch.equal(got, table)
            elif step is None:
                baseline[name] = got
                assert float((got - table).abs().max()) < 0.05
            else:
                is_modified = torch.zeros(len(table), dtype=torch.bool).index_fill(0, _rows(table, number, step), True)
                assert torch.equal(got[~is_modified], baseline[name][~is_modified])
                assert float((got - table).abs().max()) < 0.05
    tracker.close()
    assert cnr.read_checkpoint(tmp_path / "1").kind == "delta"
    assert len(cnr.read_checkpoint(tmp_path / "0").manifest.packs) > 1

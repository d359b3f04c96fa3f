"""Jobs that save, restore and train on while their lineages are compacted, and while files are removed behind them.

Random lives as in ``lives``, with two operations more, in one process and on gloo ranks with changing
sharding; and the one story that must hold, step by step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import torchrec_cnr as cnr
from tests.properties.lives import Evaluate, Life, Operation, Restart, Rewind, Save, Segment, Train, live_segments
from tests.support import faults, models
from tests.support.jobs import assert_loads, save
from tests.support.lineages import remove_all_but
from tests.support.models import differing, plain_job, train
from tests.support.ranks import RankPools
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.maintenance.compaction.compact import compact
from torchrec_cnr.maintenance.compaction.plan import plan_compaction

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PACK_BYTES = 1024
SEGMENT_SECS = 100.0
OPTIMIZERS = ("adagrad", "adam", "sgd")


@dataclass(frozen=True)
class Compact:
    """Compact a checkpoint, the latest if 0, down to one of its ancestors, the baseline's parent if 0."""

    num_back: int
    num_kept: int
    max_ratio: float
    self_contained: bool


@dataclass(frozen=True)
class Remove:
    """Remove all that a checkpoint, the latest if 0, does not need."""

    num_back: int


class CompactedLife(Life):
    """A life in which checkpoints are compacted and removed; each that is left must load as its cut at any time."""

    def run(self, operation: Operation | Compact | Remove) -> None:
        """Do one operation, on rank 0 if it is upkeep."""
        if not isinstance(operation, Compact | Remove):
            super().run(operation)
            return
        if not self.committed:
            return
        path = self._path(operation.num_back)
        if dist.is_initialized():
            dist.barrier()  # another rank may still look for the latest, which may go
        if faults.own_rank() == 0:
            _upkeep(path, operation)
        if dist.is_initialized():
            dist.barrier()
        if isinstance(operation, Remove):
            left = {checkpoint.store.url for checkpoint in read_lineage(path).checkpoints}
            self.committed = {path: cut for path, cut in self.committed.items() if path in left}
            self.is_on_head = self.has_baseline = False  # they may be gone: then a baseline is right


def _upkeep(path: str, operation: Compact | Remove) -> None:
    match operation:
        case Compact(_, num_kept, max_ratio, self_contained):
            lineage = read_lineage(path).checkpoints
            since = lineage[num_kept % len(lineage) - 1].store.url if num_kept % len(lineage) else None
            compact(path, since=since, max_ratio=max_ratio, self_contained=self_contained, pack_bytes=PACK_BYTES)
        case Remove():
            remove_all_but(path)


def operations(policies: Sequence[str]) -> st.SearchStrategy[list[Operation | Compact | Remove]]:
    """Programs: training and saving most of the time."""
    rounds = st.builds(
        lambda seed, policy: [Train(seed), Save(policy)], st.integers(1, 10**6), st.sampled_from(policies)
    )
    ratios = st.sampled_from([1.0, 1.2, 3.0])
    compacts = st.builds(
        Compact, st.sampled_from([0, 0, 0, 1, 2]), st.sampled_from([0, 0, 1, 2]), ratios, st.booleans()
    )
    others = st.one_of(
        st.builds(Remove, st.sampled_from([0, 0, 1])),
        st.builds(Restart, st.sampled_from([0, 0, 1, 2])),
        st.builds(Rewind, st.integers(0, 2)),
        st.builds(Evaluate, st.integers(1, 10**6)),
    )
    parts = rounds | rounds | compacts.map(lambda operation: [operation]) | others.map(lambda operation: [operation])
    return st.lists(parts, min_size=6, max_size=14).map(
        lambda parts: [operation for part in parts for operation in part]
    )


ALL_POLICIES = ("Compacted", "Compacted", "Consecutive", "OneShot", "Intermittent")


def _live(root: Path, optimizer: str, program: Sequence[Operation | Compact | Remove]) -> None:
    life = CompactedLife(str(root), lambda seed: plain_job(seed, optimizer))
    life.start()
    for operation in [Save("Full"), Train(1), Save("Compacted"), *program, Train(2), Save("Compacted")]:
        life.run(operation)
    for num_back in range(len(life.committed)):
        life.run(Restart(num_back))
    life.tracker.close()


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=12, derandomize=True, phases=[Phase.generate])  # the slow test below shrinks what fails
@given(program=operations(ALL_POLICIES))
def test_every_checkpoint_of_a_compacted_lineage_loads_as_its_cut(
    tmp_path_factory: pytest.TempPathFactory, optimizer: str, program: list[Operation | Compact | Remove]
) -> None:
    """Whatever is compacted and removed between saves of any policy, no row is lost, also by jobs that are restored."""
    _live(tmp_path_factory.mktemp("life"), optimizer, program)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=60)
@given(program=operations(ALL_POLICIES))
def test_many_lives_of_compacted_lineages(
    tmp_path_factory: pytest.TempPathFactory, optimizer: str, program: list[Operation | Compact | Remove]
) -> None:
    """As above, with many programs that change from run to run."""
    _live(tmp_path_factory.mktemp("life"), optimizer, program)


# On ranks


@st.composite
def segments(draw: st.DrawFn) -> list[tuple[int, Segment]]:
    """Lives on changing groups of ranks, the first of which saves at least once."""
    found = []
    for number in range(draw(st.integers(2, 3))):
        first: list[Operation | Compact | Remove] = [Train(1), Save("Compacted")] if number == 0 else []
        program = draw(operations(ALL_POLICIES))
        sharding, num_back = draw(st.sampled_from(models.SHARDINGS)), draw(st.integers(0, 1))
        segment = Segment(sharding, num_back, first + program, life=CompactedLife)
        found.append((draw(st.sampled_from([1, 2, 2])), segment))
    return found


def _live_on_ranks(rank_pool: RankPools, root: Path, program: list[tuple[int, Segment]]) -> None:
    ends = [(2, Segment(sharding, back, [], life=CompactedLife)) for sharding, back in (("row", 0), ("column", 1))]
    live_segments(rank_pool, root, [*program, *ends])


@settings(
    max_examples=5,
    derandomize=True,
    phases=[Phase.generate],  # a failure ends the group of ranks, so shrinking would take very long
    suppress_health_check=[HealthCheck.too_slow],
)
@given(program=segments())
def test_every_compacted_checkpoint_of_a_sharded_model_loads_as_its_cut(
    tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPools, program: list[tuple[int, Segment]]
) -> None:
    """Sharding and world size change between the links that are folded, and between these and the target."""
    _live_on_ranks(rank_pool, tmp_path_factory.mktemp("life"), program)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
@settings(max_examples=15, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
@given(program=segments())
def test_many_lives_of_compacted_sharded_models(
    tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPools, part: int, program: list[tuple[int, Segment]]
) -> None:
    """As above, with many programs that change from run to run."""
    _live_on_ranks(rank_pool, tmp_path_factory.mktemp("life"), program)


# The story


def test_a_job_goes_on_on_top_of_what_was_compacted(tmp_path: Path) -> None:
    """Neither the job nor one restored from its checkpoints notices that the lineage below was folded and removed."""
    job = plain_job(1, "adagrad")
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Compacted())
    for number in range(6):
        train(job, number)
        cut = save(job, tmp_path / str(number), planner)
    assert cnr.read_checkpoint(tmp_path / "5").parent == str(tmp_path / "4")
    plan = plan_compaction(tmp_path / "5", max_ratio=1.0)
    assert {use.pack.heat for use in plan.uses} == {0, 1, 2, 3}
    compact(tmp_path / "5", max_ratio=1.0, pack_bytes=PACK_BYTES)
    assert remove_all_but(str(tmp_path / "5")) == ["5"]
    assert_loads(str(tmp_path / "5"), cut)

    train(job, 6)
    cut = save(job, tmp_path / "6", planner)
    newest = cnr.read_checkpoint(tmp_path / "6")
    assert (newest.kind, newest.parent) == ("delta", str(tmp_path / "5"))
    assert newest.manifest.history.delta_bytes == (newest.manifest.pack_bytes,)
    assert_loads(str(tmp_path / "6"), cut)
    tracker.close()

    restored = plain_job(2, "adagrad")
    tracker = cnr.RowTracker(restored.model)
    assert differing(models.load(restored, str(tmp_path / "6"), tracker), cut) == []
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Compacted())
    train(restored, 7)
    cut = save(restored, tmp_path / "7", planner)
    assert cnr.read_checkpoint(tmp_path / "7").parent == str(tmp_path / "6")
    assert_loads(str(tmp_path / "7"), cut)
    tracker.close()


@pytest.mark.long
@pytest.mark.parametrize("policy", [cnr.OneShot(), cnr.Intermittent()])
@pytest.mark.parametrize("num_kept", [0, 1, 2])
@pytest.mark.parametrize("job_is", ["saving", "between saves", "restored"])
def test_deltas_of_the_baseline_after_a_compaction(
    tmp_path: Path, policy: cnr.Policy, num_kept: int, job_is: str
) -> None:
    """Of the baseline that a job knows, while that is there, or of the one that it finds: no row is lost."""
    job = plain_job(1, "adagrad")
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Compacted())
    for number in range(5):
        train(job, number)
        cut = save(job, tmp_path / str(number), planner)
    if job_is == "between saves":
        planner.resolve_last_save()
    compact(tmp_path / "4", since=tmp_path / str(num_kept - 1) if num_kept else None, max_ratio=1.0)
    if job_is == "saving":
        planner.resolve_last_save()
    if job_is == "restored":
        tracker.close()
        job = plain_job(2, "adagrad")
        tracker = cnr.RowTracker(job.model)
        assert differing(models.load(job, str(tmp_path / "4"), tracker), cut) == []
    planner = cnr.CNRSavePlanner(tracker, policy=policy)
    parents = []
    for number in (5, 6):
        train(job, number)
        cut = save(job, tmp_path / str(number), planner)
        parents.append(cnr.read_checkpoint(tmp_path / str(number)).parent)
        assert_loads(str(tmp_path / str(number)), cut)
    baseline = str(tmp_path / ("0" if num_kept or job_is == "between saves" else "4"))
    if policy == cnr.OneShot():
        assert parents == [baseline, baseline]
    assert set(parents) <= {baseline, None, str(tmp_path / "5")}
    remove_all_but(str(tmp_path / "4"))
    train(job, 7)
    cut = save(job, tmp_path / "7", planner)
    assert_loads(str(tmp_path / "7"), cut)
    tracker.close()


@pytest.mark.long
def test_policy_takes_a_baseline_where_nobody_compacts(tmp_path: Path) -> None:
    """After so many deltas; a compaction begins the count anew."""
    job = plain_job(1, "adagrad")
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Compacted(max_deltas=3))
    kinds = []
    for number in range(11):
        train(job, number)
        save(job, tmp_path / str(number), planner)
        kinds.append(cnr.read_checkpoint(tmp_path / str(number)).kind)
        if number == 5:
            compact(tmp_path / "5")
    tracker.close()
    assert [number for number, kind in enumerate(kinds) if kind == "baseline"] == [0, 4, 9]
    assert len(read_lineage(tmp_path / "8").checkpoints) == 4

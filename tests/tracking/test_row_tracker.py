"""What the tracker notices: writes of every kind, evictions, and lookups of several tables at once."""

import warnings
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import hypothesis
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from torch import Tensor, nn

import torchrec_cnr as cnr
from tests.support import models, zoo
from tests.support.models import Whole, differing
from tests.support.ranks import RankPools
from tests.support.zoo import Kind, ZooJob
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.tracking.hooks import Hooks
from torchrec_cnr.tracking.modified_rows import ModifiedRows
from torchrec_cnr.tracking.sharded_tables import KernelLookup, KernelMarks

CPU = torch.device("cpu")

SHARDED = Kind("EmbeddingBagCollection", "row_wise", "RowWiseAdagrad")
KINDS = {
    "fused": SHARDED,
    "columns": Kind("EmbeddingCollection", "column_wise", "Adagrad"),
    "data-parallel": Kind("EmbeddingBagCollection", "data_parallel", "Adagrad"),
    "plain": Kind("nn.EmbeddingBag, nn.Embedding", "data_parallel", "SGD"),
}


def _tables(job: ZooJob) -> list[Tensor]:
    return [parameter for name, parameter in sorted(job.model.named_parameters()) if zoo.is_table(name)]


def _reset_parameters(job: ZooJob) -> None:
    torch.manual_seed(7)
    for table in _tables(job):
        nn.init.uniform_(table)
    for parameter in job.model.parameters():
        dist.broadcast(parameter.detach(), 0) if not hasattr(parameter, "_in_backward_optimizers") else None


def _assign_a_row(job: ZooJob) -> None:
    with torch.no_grad():
        for table in _tables(job):
            table[:1] = 9.0


def _load_another_model(job: ZooJob) -> None:
    other = zoo.build(job.kind, seed=9)
    job.model.load_state_dict(other.model.state_dict())


def _load_another_optimizer(job: ZooJob) -> None:
    other = zoo.build(job.kind, seed=9)
    for seed in range(3):
        zoo.train(other, seed)
    job.optimizer.load_state_dict(other.optimizer.state_dict())


WRITES: dict[str, Callable[[ZooJob], None]] = {
    "reset_parameters": _reset_parameters,
    "an assignment": _assign_a_row,
    "load_state_dict of the model": _load_another_model,
    "load_state_dict of the optimizer": _load_another_optimizer,
}


def _write_between_saves(
    rank: int, root: str, kind: Kind, write: Callable[[ZooJob], None], after_restore: bool
) -> None:
    job = zoo.build(kind, seed=1)
    tracker = cnr.RowTracker(job.model)
    zoo.train(job, 1)
    zoo.save(job, tracker, f"{root}/0")
    if after_restore:
        zoo.load(job, f"{root}/0", tracker)
    before = zoo.tensors(job)
    write(job)
    assert differing(before, zoo.tensors(job))
    zoo.train(job, 2)
    end = zoo.tensors(job)
    assert zoo.save(job, tracker, f"{root}/1").kind == "delta"
    zoo.train(job, 3)
    assert zoo.save(job, tracker, f"{root}/2").num_rows < cnr.read_checkpoint(f"{root}/0").num_rows
    tracker.close()
    other = zoo.build(kind, seed=2)
    zoo.load(other, f"{root}/1")
    assert differing(zoo.tensors(other), end) == []


@pytest.mark.parametrize("after_restore", [False, True], ids=["running", "restored"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_writes_that_nobody_marked_are_saved(
    tmp_path: Path, rank_pool: RankPools, kind: Kind, write: Callable[[ZooJob], None], after_restore: bool
) -> None:
    """In mid-run and right after a load; the save after the next holds modified rows only, again."""
    if kind.optimizer == "SGD" and write is _load_another_optimizer:
        pytest.skip("this optimizer has no state")
    rank_pool(2).run(_write_between_saves, str(tmp_path), kind, write, after_restore)


def _load_onto_itself(rank: int, root: str, kind: Kind, trains: bool) -> None:
    job = zoo.build(kind, seed=1)
    tracker = cnr.RowTracker(job.model)
    zoo.train(job, 1)
    zoo.save(job, tracker, f"{root}/0")
    zoo.load(job, f"{root}/0", tracker)
    job.model.load_state_dict(job.model.state_dict())
    job.optimizer.load_state_dict(job.optimizer.state_dict())
    before = zoo.tensors(job)
    if trains:
        zoo.train(job, 2)
    num_changed = len(_changed_rows(before, zoo.tensors(job)))
    assert bool(num_changed) == trains
    assert zoo.save(job, tracker, f"{root}/1").num_rows == num_changed
    tracker.close()


def _changed_rows(before: Whole, after: Whole) -> list[tuple[str, int]]:
    tables = [name for name in after if name.startswith("model.") and zoo.is_table(name)]
    changed = {name: (before[name] != after[name]).any(dim=1).nonzero().squeeze(1).tolist() for name in tables}
    return [(name, row) for name, rows in changed.items() for row in rows]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_load_that_copies_onto_itself_modifies_nothing(
    tmp_path: Path, rank_pool: RankPools, kind: Kind, trains: bool
) -> None:
    """As DCP does with Stateful objects after a load: the next delta holds only what is trained afterwards."""
    rank_pool(2).run(_load_onto_itself, str(tmp_path), kind, trains)


def _write_and_mark(rank: int, root: str, kind: Kind) -> None:
    job = zoo.build(kind, seed=1)
    tracker = cnr.RowTracker(job.model)
    zoo.save(job, tracker, f"{root}/0")
    with torch.no_grad():
        for shard in tracker.shards:
            if shard.rows.box.offsets[0] == 0:
                shard.weight[0] = 9.0
    tracker.mark("t0", torch.tensor([0]))
    tracker.mark("t1", torch.tensor([0]))
    end = zoo.tensors(job)
    assert zoo.save(job, tracker, f"{root}/1").num_rows == 2
    tracker.close()
    other = zoo.build(kind, seed=2)
    zoo.load(other, f"{root}/1")
    assert differing(zoo.tensors(other), end) == []


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_rows_that_are_marked_after_their_write_are_all_that_is_saved(
    tmp_path: Path, rank_pool: RankPools, kind: Kind
) -> None:
    """Writes in place to tables of one kernel, whose rows are marked right after them."""
    rank_pool(2).run(_write_and_mark, str(tmp_path), kind)


def _mark_and_write(rank: int, root: str, kind: Kind, order: str) -> None:
    job = zoo.build(kind, seed=1)
    tracker = cnr.RowTracker(job.model)
    zoo.save(job, tracker, f"{root}/0")

    def mark() -> None:
        for table in ("t0", "t1"):
            tracker.mark(table, torch.tensor([0]))

    if order == "mark, restore, assign":
        mark()
        zoo.load(job, f"{root}/0", tracker)
        _assign_a_row(job)
    elif order == "mark, load":
        mark()
        _load_another_model(job)
    else:
        _load_another_model(job)
        mark()
    end = zoo.tensors(job)
    zoo.save(job, tracker, f"{root}/1")
    tracker.close()
    other = zoo.build(kind, seed=2)
    zoo.load(other, f"{root}/1")
    assert differing(zoo.tensors(other), end) == []


@pytest.mark.parametrize("order", ["mark, restore, assign", "mark, load", "load, mark"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_mark_hides_no_other_write(tmp_path: Path, rank_pool: RankPools, kind: Kind, order: str) -> None:
    """Rows that are written later, or by a load of the whole model, are saved too."""
    rank_pool(2).run(_mark_and_write, str(tmp_path), kind, order)


class _Unloadable:
    def state_dict(self) -> dict[str, int]:
        return {"step": 1}

    def load_state_dict(self, _: object) -> None:
        raise ArithmeticError("no")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["before the model", "then the model"])
def test_tables_are_what_they_hold_after_a_load_that_a_stateful_object_ended(tmp_path: Path, name: str) -> None:
    """DCP has written to the tables by then, so a delta of what was loaded holds all that was modified since."""
    writer, tables = models.writer(tmp_path / "unused"), [nn.ModuleDict({"a": nn.Embedding(12, 4)}) for _ in range(2)]
    for step, model in enumerate(tables):
        tracker = cnr.RowTracker(model)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=1.0)
        state = {"model": model, "optim": optimizer, name: _Unloadable()}
        if step:
            with pytest.raises(ArithmeticError):
                dcp.load(
                    state, storage_reader=cnr.CNRStorageReader(tmp_path / "0"), planner=cnr.CNRLoadPlanner(tracker)
                )
        model["a"](torch.tensor([step])).sum().backward()
        optimizer.step()
        planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
        dcp.save(state, checkpoint_id=tmp_path / str(step), storage_writer=writer, planner=planner)
        saved = [cnr.load_table(tmp_path / str(step), fqn) for fqn in ("model.a.weight", "optim.state.0.sum")]
        assert torch.equal(saved[0], model["a"].weight)
        assert torch.equal(saved[1], optimizer.state[model["a"].weight]["sum"])
        tracker.close()


def _mark_bad_rows(rank: int) -> None:
    job = zoo.build(SHARDED, seed=1)
    tracker = cnr.RowTracker(job.model)
    num_rows = 40
    for row in (num_rows, -1):
        with pytest.raises(
            cnr.ConfigurationError, match=f"t0': expected rows 0 to 39, got row {row}; nothing was marked"
        ):
            tracker.mark("t0", torch.tensor([1, row]))
    for rows in (torch.ones(num_rows, dtype=torch.bool), torch.tensor([0.5]), [1], []):
        with pytest.raises(cnr.ConfigurationError, match="expected a tensor of integers, got"):
            tracker.mark("t0", rows)  # type: ignore[arg-type]
    assert tracker.num_modified == 0
    tracker.mark("t0", torch.arange(num_rows))
    assert tracker.num_modified == num_rows // 2
    tracker.close()


def test_rows_that_no_table_has_are_not_marked(rank_pool: RankPools) -> None:
    """On every rank, whichever has the row's neighbours."""
    rank_pool(2).run(_mark_bad_rows)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_tracker_may_be_called_in_inference_mode(tmp_path: Path) -> None:
    """Where a model is made or restored for an evaluation, and trained afterwards."""
    model = nn.ModuleDict({"a": nn.Embedding(12, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.inference_mode():
        tracker = cnr.RowTracker(model, verify_untracked=True)
    planner, writer = cnr.CNRSavePlanner(tracker, policy=cnr.Compacted()), models.writer(tmp_path / "unused")
    for step in range(4):
        model["a"](torch.tensor([step])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / str(step), storage_writer=writer, planner=planner)
        with torch.inference_mode():
            planner.resolve_last_save()
        if step == 1:
            with torch.inference_mode():
                reader = cnr.CNRStorageReader(tmp_path / "1")
                dcp.load(model.state_dict(), storage_reader=reader, planner=cnr.CNRLoadPlanner(tracker))
                tracker.mark("a", torch.tensor([5]))
    assert cnr.read_checkpoint(tmp_path / "3").kind == "delta"
    assert torch.equal(cnr.load_table(tmp_path / "3", "a.weight"), model["a"].weight)
    tracker.close()


def test_ids_in_a_nested_tensor_are_marked() -> None:
    """Of rows of different lengths."""
    model = nn.Embedding(12, 4)
    tracker = cnr.RowTracker(model)
    ids = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([5])], layout=torch.jagged)
    model(ids).values().sum().backward()
    assert tracker.shards[0].rows.marked.nonzero().squeeze(1).tolist() == [1, 2, 5]
    tracker.close()


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_lookup_whose_output_a_hook_replaces_is_marked_by_the_step(max_norm: float | None) -> None:
    """A user's hook may return something else than a tensor."""
    model = nn.Embedding(12, 4, max_norm=max_norm)
    model.register_forward_hook(lambda _, __, output: (output, 1))
    tracker = cnr.RowTracker(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.tensor([1, 5]))[0].sum().backward()
    optimizer.step()
    assert tracker.shards[0].rows.marked.nonzero().squeeze(1).tolist() == [1, 5]
    tracker.close()


def test_functional_gradients_that_renormalise_rows_pass() -> None:
    """torch.func.grad trains no rows, but the lookup itself writes to some."""
    model = nn.Embedding(12, 4, max_norm=0.1)
    tracker = cnr.RowTracker(model)
    before = model.weight.detach().clone()

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return torch.as_tensor(torch.func.functional_call(model, weights, (torch.tensor([1]),)).sum())

    torch.func.grad(loss)(dict(model.named_parameters()))
    tracker.check_writes()
    is_changed = (model.weight != before).any(dim=1)
    assert is_changed.any()
    assert not (is_changed & ~tracker.shards[0].rows.marked).any()
    tracker.close()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("num_rows", [200, 40_000])  # of which int8 and int16 hold no bounds
def test_rows_of_any_integer_dtype_are_marked(num_rows: int, dtype: torch.dtype) -> None:
    """One row, too."""
    model = nn.ModuleDict({"a": nn.Embedding(num_rows, 1)})
    tracker = cnr.RowTracker(model)
    tracker.mark("a", torch.tensor([100, 3], dtype=dtype))
    tracker.mark("a", torch.tensor(5, dtype=dtype))
    assert tracker.shards[0].rows.marked.nonzero().squeeze(1).tolist() == [3, 5, 100]
    tracker.close()


def _evict(rank: int, root: str, module: str) -> None:
    job = zoo.build(Kind(module, "row_wise", "Adagrad"), seed=1)
    tracker = cnr.RowTracker(job.model)
    for seed in range(4):
        zoo.train(job, seed)
    zoo.save(job, tracker, f"{root}/0")
    marks = [shard.rows.marked.clone() for shard in tracker.shards]
    weights = [shard.weight.clone() for shard in tracker.shards]
    assert not any(bool(mark.any()) for mark in marks)
    job.model.train()
    num_evicted = 0
    for seed in range(4, 9):
        features = zoo.batch(job, seed)
        with torch.no_grad():  # nothing is trained: what changes was evicted
            job.model(features)
    for shard, before in zip(tracker.shards, weights, strict=True):
        is_changed = (shard.weight != before).any(dim=1)
        num_evicted += int(is_changed.sum())
        assert bool((shard.rows.marked | ~is_changed).all())
    assert num_evicted
    end = zoo.tensors(job)
    assert zoo.save(job, tracker, f"{root}/1").kind == "delta"
    tracker.close()
    other = zoo.build(Kind(module, "row_wise", "Adagrad"), seed=2)
    of_other = cnr.RowTracker(other.model)
    zoo.load(other, f"{root}/1", of_other)
    assert differing(zoo.tensors(other), end) == []
    of_other.close()


@pytest.mark.parametrize("module", ["ManagedCollisionEmbeddingBagCollection", "ManagedCollisionEmbeddingCollection"])
def test_rows_of_evicted_ids_are_modified(tmp_path: Path, rank_pool: RankPools, module: str) -> None:
    """Eviction resets rows without any training, and the delta holds them, with the id maps of the same moment."""
    rank_pool(2).run(_evict, str(tmp_path), module)


def _load_id_maps(rank: int, root: str, number: int) -> str:
    """Load a checkpoint, unless it is the first, and save the next one."""
    job = zoo.build(Kind("ManagedCollisionEmbeddingBagCollection", "row_wise", "Adagrad"), seed=1)
    tracker = cnr.RowTracker(job.model)
    try:
        if number:
            zoo.load(job, f"{root}/{number - 1}", tracker)
            ids = [buffer for name, buffer in job.model.named_buffers() if name.endswith("._mch_sorted_raw_ids")]
            assert len(ids) == 2
            assert all(bool((one.diff() >= 0).all()) and len(one.unique()) > 2 for one in ids)
        zoo.train(job, number)
        zoo.train(job, number + 10)
        zoo.save(job, tracker, f"{root}/{number}")
    except dcp.api.CheckpointException as error:
        return str(error)
    finally:
        tracker.close()
    return "works"


def test_an_id_map_is_not_divided_among_more_ranks(tmp_path: Path, rank_pool: RankPools) -> None:
    """Ids belong to ranks: a map of two ranks has no part for each of four, even if it was one of four before."""
    assert set(rank_pool(4).run(_load_id_maps, str(tmp_path), 0)) == {"works"}
    assert set(rank_pool(2).run(_load_id_maps, str(tmp_path), 1)) == {"works"}
    (message, *_) = rank_pool(4).run(_load_id_maps, str(tmp_path), 2)
    assert "StateMismatchError: id map of table 't0'" in message
    assert "load on the number of ranks that it was saved with, or on a divisor of that number" in message


@st.composite
def _lookups(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[list[int]]]]:
    """Rows of some tables, the table of each feature, and the ids of each feature and sample."""
    num_rows = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    features = [table for table in range(len(num_rows)) for _ in range(draw(st.integers(1, 2)))]
    batch = draw(st.integers(1, 3))
    ids = [
        [draw(st.lists(st.integers(0, num_rows[table] - 1), max_size=3)) for _ in range(batch)] for table in features
    ]
    return num_rows, features, ids


@hypothesis.given(lookup=_lookups(), dtype=st.sampled_from([torch.int64, torch.int32]), is_variable=st.booleans())
def test_a_lookup_marks_the_rows_of_its_tables(
    lookup: tuple[list[int], list[int], list[list[list[int]]]], dtype: torch.dtype, is_variable: bool
) -> None:
    """Tables of several features, features without ids or with batches of their own, and ids past the last bag."""
    num_rows, tables, ids = lookup
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    marks = KernelMarks.of(num_rows, [tables.count(table) for table in range(len(num_rows))], device)
    rows = [ModifiedRows(str(t), Box((0, 0), (n, 2)), CPU, marks.tables[t]) for t, n in enumerate(num_rows)]
    if is_variable:  # each feature drops as many samples as its number
        ids = [samples[: max(0, len(samples) - number)] for number, samples in enumerate(ids)]
    features = KernelLookup.of(
        nn.Identity(),
        torch.tensor([value for samples in ids for sample in samples for value in sample], dtype=dtype).to(device),
        torch.tensor([0, *accumulate(len(sample) for samples in ids for sample in samples)], dtype=dtype).to(device),
        batch_size_per_feature_per_rank=[[len(samples)] for samples in ids] if is_variable else None,
    )
    beyond = KernelLookup(
        torch.cat((features.ids, features.ids.new_tensor([10, 0]))), features.offsets, features.first_bags
    )
    for mark, one in ((marks.mark, features), (marks.mark_by_feature, features), (marks.mark, beyond)):
        marks.marked.zero_()
        mark(one)
        for table, of_table in enumerate(rows):
            of_feature = zip(tables, ids, strict=True)
            expected = {value for t, samples in of_feature for s in samples for value in s if t == table}
            assert set(of_table.marked.nonzero().squeeze(1).tolist()) == expected


def test_marks_of_tables_lie_side_by_side() -> None:
    """Each table has its own rows of a kernel's marks."""
    marks = KernelMarks.of([3, 2], [1, 2], CPU)
    assert [len(table) for table in marks.tables] == [3, 2]
    marks.tables[1].fill_(True)
    assert marks.marked[:5].tolist() == [False, False, False, True, True]


class _Counter(nn.Module):
    def count(self, by: int) -> int:
        return by


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_replaced_methods_come_back(order: tuple[int, int]) -> None:
    """Two trackers of one model may be closed in any order; each is called until then, and nothing stays behind."""
    module, calls = _Counter(), list[str]()
    hooks = [Hooks(), Hooks()]
    for name, one in zip("ab", hooks, strict=True):

        def around(original: Callable[[int], int], by: int, name: str = name) -> int:
            calls.append(name)
            return 2 * original(by)

        one.around(module, "count", around)
    assert (module.count(1), calls) == (4, ["b", "a"])
    hooks[order[0]].remove()
    calls.clear()
    assert (module.count(1), calls) == (2, ["ab"[order[1]]])
    hooks[order[1]].remove()
    calls.clear()
    assert (module.count(1), calls) == (1, [])


@pytest.mark.gpu
def test_marking_does_not_wait_for_the_device() -> None:
    """On a GPU, marking a lookup does not synchronise the host."""
    device = torch.device("cuda")
    marks = KernelMarks.of([100, 50], [2, 1], device)
    ids = torch.arange(48, device=device)
    features = KernelLookup(ids, torch.arange(0, 49, 2, device=device))
    torch.cuda.set_sync_debug_mode("error")
    try:
        marks.mark(features)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert marks.tables[0].nonzero().squeeze(1).tolist() == list(range(32))
    assert marks.tables[1].nonzero().squeeze(1).tolist() == list(range(32, 48))


def _num_synchronisations(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> int:
    """How often a step of training waits for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return len(found)


@pytest.mark.gpu
@pytest.mark.parametrize("sparse", [False, True])
def test_a_step_with_the_tracker_waits_no_more_often(sparse: bool) -> None:
    """On a GPU, a step synchronises the host as often as it does without the tracker."""
    model = nn.EmbeddingBag(1000, 8, mode="sum", sparse=sparse, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(64, device="cuda").view(-1, 2)
    _num_synchronisations(model, optimizer, ids)
    without = _num_synchronisations(model, optimizer, ids)
    tracker = cnr.RowTracker(model)
    assert _num_synchronisations(model, optimizer, ids) == without
    assert tracker.num_modified == 64
    tracker.close()

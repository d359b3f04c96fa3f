"""Id maps of managed collisions: a delta stores what has changed in them, and loads bring them back bit for bit."""

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.optim import SGD

import torchrec_cnr as cnr
from tests.support import models, zoo
from tests.support.ranks import RankPools
from tests.support.zoo import Kind
from tests.tracking.id_map_jobs import (
    EMPTY,
    HASHED,
    NAMES,
    NUM_ROWS,
    IdMapJob,
    IdMapModel,
    assert_equal,
    buffers,
    by_row,
    loaded,
    state,
    stored_rows,
    writer,
)
from torchrec_cnr.tracking.id_map_buffers import IdMapModule, positions_of_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),
]


IDS = st.lists(st.integers(0, 40), min_size=1, max_size=8)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("look up"), IDS),
        st.tuples(st.just("look up"), IDS),
        st.tuples(st.just("place"), st.integers(0, NUM_ROWS - 1), st.integers(0, 1000)),
        st.sampled_from(["save", "save", "save behind", "fail", "fail late", "restore"]),
    ),
    min_size=3,
    max_size=14,
)


def _live(root: Path, policy: cnr.Policy, operations: list[Any]) -> None:
    job = IdMapJob(root, policy)
    for operation in (*operations, "save"):
        match operation:
            case ("look up", ids):
                job.model.look_up(ids)
            case ("place", row, raw_id):
                job.model.place(row, raw_id)
            case "save" | "save behind":
                job.save(is_async=operation == "save behind")
                assert_equal(loaded(job.saved[-1][0]), job.saved[-1][1])
            case "fail":
                job.fail("write_data")
            case "fail late":
                job.fail("finish_plan")
            case "restore" if job.saved:
                job.restore()
                assert_equal(buffers(job.model), job.saved[-1][1])
    for path, content in job.saved:
        assert_equal(loaded(path), content)
    cnr.compact(job.saved[-1][0], max_ratio=1.0)
    assert_equal(loaded(job.saved[-1][0]), job.saved[-1][1])
    job.tracker.close()


@pytest.mark.parametrize("policy", [cnr.Consecutive(), cnr.OneShot()])
@given(operations=OPERATIONS)
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
def test_every_checkpoint_has_the_ids_of_its_moment(
    tmp_path_factory: pytest.TempPathFactory, policy: cnr.Policy, operations: list[Any]
) -> None:
    """Whatever came in and was evicted, with failed and asynchronous saves, restores and a compaction in between."""
    _live(tmp_path_factory.mktemp("run"), policy, operations)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [cnr.Consecutive(), cnr.OneShot(), cnr.Compacted()])
@given(operations=OPERATIONS)
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_every_checkpoint_of_many_has_the_ids_of_its_moment(
    tmp_path_factory: pytest.TempPathFactory, policy: cnr.Policy, operations: list[Any]
) -> None:
    """The same, more often."""
    _live(tmp_path_factory.mktemp("run"), policy, operations)


@given(first=st.lists(IDS, min_size=1, max_size=4), then=st.lists(IDS, max_size=3), places=st.integers(0, NUM_ROWS))
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
def test_a_delta_has_the_rows_whose_values_differ(
    tmp_path_factory: pytest.TempPathFactory, first: list[list[int]], then: list[list[int]], places: int
) -> None:
    """No more and no fewer of any buffer, although one new id moves all later values of a sorted map."""
    job = IdMapJob(tmp_path_factory.mktemp("run"), cnr.Consecutive())
    for ids in first:
        job.model.look_up(ids)
    assert set(stored_rows(job.save()).values()) == {None}
    for ids in then:
        job.model.look_up(ids)
    for row in range(places):
        job.model.place(row, row % 3)
    before, after = by_row(job.saved[-1][1]), by_row(buffers(job.model))
    expected = {name: sum(a != b for a, b in zip(before[name], after[name], strict=True)) for name in before}
    assert after["_mch_remapped_ids_mapping"] == list(range(NUM_ROWS))
    found = stored_rows(job.save())
    assert {name: NUM_ROWS if rows is None else sum(rows) for name, rows in found.items()} == expected
    job.tracker.close()


def test_a_failed_save_loses_no_value(tmp_path: Path) -> None:
    """What changed before it is in the next delta, with what has changed since."""
    job = IdMapJob(tmp_path, cnr.Consecutive())
    job.model.look_up([5, 6, 7])
    job.save()
    job.model.look_up([8])
    job.fail("write_data")
    job.model.look_up([9])
    checkpoint = job.save()
    assert checkpoint.kind == "delta"
    assert stored_rows(checkpoint)["_mch_sorted_raw_ids"] == [2]
    assert_equal(loaded(job.saved[-1][0]), buffers(job.model))
    job.tracker.close()


@pytest.mark.parametrize("policy", [cnr.Consecutive(), cnr.OneShot()])
def test_a_delta_after_a_restore_has_what_has_changed_since(tmp_path: Path, policy: cnr.Policy) -> None:
    """Or, if it is based on the baseline, also what deltas before the restore had."""
    job = IdMapJob(tmp_path, policy)
    job.model.look_up([5, 6, 7])
    job.save()
    job.model.look_up([8])
    job.save()
    job.restore()
    job.model.look_up([9])
    job.model.place(4, 4)
    found = stored_rows(job.save())
    assert found["_mch_sorted_raw_ids"] == [1 if policy == cnr.Consecutive() else 2]
    assert (found["_mch_remapped_ids_mapping"], found["_hash_zch_metadata"]) == ([0], [1])
    assert_equal(loaded(job.saved[-1][0]), job.saved[-1][1])
    job.tracker.close()


def test_an_asynchronous_save_has_the_ids_of_its_beginning(tmp_path: Path) -> None:
    """Also in a delta, of which only the values that have changed are copied."""
    job = IdMapJob(tmp_path, cnr.Consecutive())
    job.model.look_up([5, 6, 7])
    job.save(is_async=True)
    assert stored_rows(job.save(is_async=True))["_mch_sorted_raw_ids"] == [3]
    for path, content in job.saved:
        assert_equal(loaded(path), content)
    job.tracker.close()


def test_a_map_in_another_order_is_stored_as_it_is(tmp_path: Path) -> None:
    """If a sort would not bring it back. The checkpoints before and after it have it in the order of rows."""
    job = IdMapJob(tmp_path, cnr.Consecutive())
    job.model.look_up([5, 6, 7])
    job.save()
    ids = job.model.ids
    swapped = ids._mch_remapped_ids_mapping[[4, 3]].clone()  # rows without ids, which are never in this order
    assert int(ids._mch_sorted_raw_ids[3]) == int(ids._mch_sorted_raw_ids[4]) == EMPTY
    ids._mch_remapped_ids_mapping[3:5] = swapped
    assert positions_of_rows(ids._mch_sorted_raw_ids, ids._mch_remapped_ids_mapping) is None
    for _ in range(2):
        checkpoint = job.save()
        assert all(stored_rows(checkpoint)[name] in (None, [NUM_ROWS]) for name in NAMES)
        assert_equal(loaded(job.saved[-1][0]), buffers(job.model))
    ids._mch_remapped_ids_mapping[3:5] = swapped.flip(0)
    assert stored_rows(job.save())["_mch_counts"] in (None, [NUM_ROWS])
    job.model.look_up([1])
    assert stored_rows(job.save())["_mch_sorted_raw_ids"] == [1]
    assert_equal(loaded(job.saved[-1][0]), buffers(job.model))
    job.tracker.close()


@pytest.mark.parametrize("names", [("first", "second", "third", "fourth"), (*NAMES[:3], "fourth")])
def test_maps_under_other_names_are_stored_as_they_are(tmp_path: Path, names: tuple[str, ...]) -> None:
    """A load would not know that they must be sorted."""
    job = IdMapJob(tmp_path, cnr.Consecutive())
    tables = {name: value for name, value in job.model.state_dict().items() if "ids" not in name}

    def named() -> dict[str, Any]:
        return {
            "model": tables,
            "mine": {key: getattr(job.model.ids, name) for key, name in zip(names, NAMES, strict=True)},
        }

    for number, ids in enumerate(([5, 6, 7], [6], [1, 2])):
        job.model.look_up(ids)
        expected = buffers(job.model)
        dcp.save(named(), checkpoint_id=str(tmp_path / f"n{number}"), storage_writer=job.writer, planner=job.planner)
        for key, name in zip(names, NAMES, strict=True):
            assert torch.equal(cnr.load_table(tmp_path / f"n{number}", f"mine.{key}"), expected[name]), name
    job.tracker.close()


@pytest.mark.parametrize("policy", [cnr.Consecutive(), cnr.OneShot()])
@pytest.mark.parametrize("left_out", ["model.ids.", "model.ids._mch_counts", "model.hashed."])
def test_buffers_that_were_left_out_are_stored_whole_when_they_return(
    tmp_path: Path, policy: cnr.Policy, left_out: str
) -> None:
    """Without one of its buffers, a map is stored as it is, and the next checkpoint has the order of rows again."""
    job = IdMapJob(tmp_path, policy)
    job.model.look_up([5, 6, 7])
    job.save()
    job.model.look_up([8, 1])
    job.model.place(3, 9)
    left = {
        "model": {name: v for name, v in job.model.state_dict().items() if not f"model.{name}".startswith(left_out)}
    }
    dcp.save(left, checkpoint_id=str(tmp_path / "left"), storage_writer=job.writer, planner=job.planner)
    job.model.look_up([9])
    assert job.save().kind == "delta"
    assert_equal(loaded(job.saved[-1][0]), buffers(job.model))
    job.tracker.close()


def test_checkpoints_with_whole_sorted_maps_load(tmp_path: Path) -> None:
    """As versions before this one wrote them, in deltas, too; and a job goes on from them."""
    job = IdMapJob(tmp_path, cnr.Consecutive())
    job.tracker.id_map_modules = ()
    for number in range(3):
        job.model.look_up([5 * number, 5 * number + 1])
        job.model.place(number, 7)
        assert set(stored_rows(job.save()).values()) == {None}
    assert cnr.load_table(job.saved[-1][0], f"model.ids.{NAMES[0]}").tolist() == job.saved[-1][1][NAMES[0]].tolist()
    job.restore()
    assert_equal(buffers(job.model), job.saved[-1][1])
    for ids in ([1], [2, 3]):
        job.model.look_up(ids)
        checkpoint = job.save()
        assert checkpoint.kind == "delta"
        assert_equal(loaded(job.saved[-1][0]), buffers(job.model))
    assert stored_rows(checkpoint)[NAMES[0]] == [2]
    job.tracker.close()


def test_the_copies_are_dropped_by_close() -> None:
    """They take as much memory as the buffers."""
    tracker = cnr.RowTracker(IdMapModel())
    assert len(tracker.id_map_modules) == 2
    assert [buffer.name for buffer in tracker.id_map_modules[0].buffers] == list(NAMES)
    assert [buffer.name for buffer in tracker.id_map_modules[1].buffers] == list(HASHED)
    tracker.close()
    assert tracker.id_map_modules == ()


def test_values_of_any_dtype_are_compared_bit_by_bit() -> None:
    """A zero that changes its sign has changed, and a NaN that stays has not."""
    model = IdMapModel()
    model.hashed._hash_zch_metadata = torch.zeros(NUM_ROWS, 2)
    module = IdMapModule(model.hashed, model.hashed.output_size(), None)
    module.take()
    (metadata,) = (buffer for buffer in module.buffers if buffer.name == HASHED[1])
    assert bool(metadata.rows.marked.all())
    model.hashed._hash_zch_metadata[3, 1] = torch.nan
    for rows in (buffer.rows for buffer in module.buffers):
        rows.freeze()
    module.take()
    assert metadata.rows.marked.nonzero().tolist() == [[3]]
    metadata.rows.freeze()
    model.hashed._hash_zch_metadata[5, 0] = -0.0
    module.take()
    assert metadata.rows.marked.nonzero().tolist() == [[5]]


def test_no_id_map_is_touched_by_training_of_a_model_without_one(tmp_path: Path) -> None:
    """A model without managed collisions has nothing to compare."""
    model = nn.Sequential(nn.EmbeddingBag(NUM_ROWS, 2, sparse=True))
    tracker = cnr.RowTracker(model)
    assert tracker.id_map_modules == ()
    model(torch.tensor([[1]])).sum().backward()
    SGD(model.parameters(), lr=0.1).step()
    dcp.save(state(model), storage_writer=writer(tmp_path / "0"), planner=cnr.CNRSavePlanner(tracker))
    assert len(tracker.all_rows) == 1
    tracker.close()


def _save_replicas(rank: int, root: str, differ: bool, is_async: bool) -> list[dict[str, Any]]:
    """Save twice from ranks that have the whole maps; return what this rank had each time."""
    torch.manual_seed(0)
    job = IdMapJob(Path(root), cnr.Consecutive())
    for number in range(3):
        job.model.look_up([10 * number + (rank if differ and number == 1 else 5)])
        job.save(is_async=is_async)
    job.tracker.close()
    return [content for _, content in job.saved]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("differ", [False, True])
def test_replicas_that_differ_are_not_mixed(tmp_path: Path, rank_pool: RankPools, differ: bool, is_async: bool) -> None:
    """Two ranks that changed the same rows to other values store the map of one of them whole."""
    contents = rank_pool(2).run(_save_replicas, str(tmp_path), differ, is_async)
    checkpoints = [cnr.read_checkpoint(tmp_path / str(number)) for number in (1, 2, 3)]
    assert [checkpoint.kind for checkpoint in checkpoints] == ["baseline", "delta", "delta"]
    assert (stored_rows(checkpoints[1])["_mch_sorted_raw_ids"] is None) == differ
    for number, checkpoint in enumerate(checkpoints):
        found = loaded(checkpoint.store.url)
        differing = [models.differing(found, of_rank[number]) for of_rank in contents]
        assert [] in differing
        assert differ or differing == [[], []]


def _save_in_two_dimensions(rank: int, root: str) -> bool:
    job = zoo.build(Kind("ManagedCollisionEmbeddingBagCollection", "row_wise", "Adagrad", num_replicas=2), seed=1)
    tracker = cnr.RowTracker(job.model)
    for number in range(2):
        zoo.train(job, number)  # replicas are never synchronized: TorchRec expects MPZCH's modules there
        saved = zoo.save(job, tracker, f"{root}/{number}")
    tracker.close()
    assert saved.kind == "delta"
    entries = {fqn: entry for fqn, entry in saved.manifest.tensors.items() if "._mch_" in fqn}
    return len(entries) == 8 and all(entry.is_whole for entry in entries.values())


def test_maps_of_a_model_in_two_dimensions_are_stored_whole(tmp_path: Path, rank_pool: RankPools) -> None:
    """Each save has the map of one of its replicas, and not always of the same."""
    assert rank_pool(4).run(_save_in_two_dimensions, str(tmp_path)) == [True] * 4

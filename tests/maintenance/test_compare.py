"""Comparisons: what differs is what differs in the loaded values, found in bounded memory."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import torchrec_cnr as cnr
from tests.support import models, runs
from tests.support.ranks import RankPools
from torchrec_cnr.lineage.checkpoint import Lineage, read_lineage
from torchrec_cnr.maintenance.comparison import compare as compare_module
from torchrec_cnr.maintenance.comparison import row_distance
from torchrec_cnr.maintenance.comparison.compare import Comparison, Reshaped, compare
from torchrec_cnr.maintenance.comparison.row_distance import Movement, MovementMeter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

NAMES = ("step-1", "step-2", "step-3")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of three, a branch of two from its second, and a run of its own."""
    root = tmp_path_factory.mktemp("run")
    runs.save_run(root, NAMES)
    runs.save_run(root, ["branch-3", "branch-4"], load="step-2", seed=2)
    runs.save_run(root, ["other"], seed=3)
    return root


def _moved(before: Tensor, after: Tensor) -> tuple[int, Movement]:
    """Differing rows, and how far they moved, all at once and in plain torch."""
    before, after = (values.reshape(len(values) if values.dim() else 1, -1) for values in (before, after))
    differs = ~((before == after) | (before.isnan() & after.isnan())).all(1)
    first, second = before[differs].double(), after[differs].double()
    is_finite = first.isfinite().all(1) & second.isfinite().all(1)
    norms = first.norm(dim=1)
    has_norm = is_finite & (norms > 0)
    far = (second - first).norm(dim=1)[has_norm] / norms[has_norm]
    middle = far.sort().values[[(len(far) - 1) // 2, len(far) // 2]].mean().item() if len(far) else None
    return int(differs.sum()), Movement(
        len(far),
        far.mean().item() if len(far) else None,
        middle,
        far.max().item() if len(far) else None,
        int((is_finite & (norms == 0)).sum()),
        int((~is_finite).sum()),
    )


def _is_close(found: Movement, expected: Movement) -> bool:
    counts = ("num_measured", "num_from_zero", "num_not_finite")
    if any(getattr(found, count) != getattr(expected, count) for count in counts):
        return False
    if not found.num_measured:
        return (found.mean, found.median, found.max) == (None, None, None)
    pairs = [
        (found.mean, expected.mean, 1e-9),
        (found.median, expected.median, 2**-11),
        (found.max, expected.max, 1e-12),
    ]
    return all(a is not None and b is not None and math.isclose(a, b, rel_tol=tol) for a, b, tol in pairs)


@pytest.mark.long
@pytest.mark.parametrize("range_bytes", [1, 100, compare_module._RANGE_BYTES])
def test_differences_are_those_of_the_loaded_values(
    run: Path, monkeypatch: pytest.MonkeyPatch, range_bytes: int
) -> None:
    """Of every tensor, however few rows are read at once; and no more are."""
    monkeypatch.setattr(compare_module, "_RANGE_BYTES", range_bytes)
    read_rows, read = compare_module.read_rows, []

    def noted(lineage: Lineage, fqn: str, rows: range, *options: Any) -> Tensor:
        values = read_rows(lineage, fqn, rows, *options)
        read.append((values.numel() * values.element_size(), len(values) if values.dim() else 1))
        return values

    monkeypatch.setattr(compare_module, "read_rows", noted)
    told: list[tuple[int, int]] = []
    found = compare(run / "step-1", run / "step-3", progress=lambda done, total: told.append((done, total)))
    manifest = cnr.read_checkpoint(run / "step-3").manifest
    assert [tensor.fqn for tensor in found.tensors] == list(manifest.tensors)
    for tensor in found.tensors:
        before, after = (cnr.load_table(run / name, tensor.fqn) for name in ("step-1", "step-3"))
        num_differing, moved = _moved(before, after)
        assert tensor.num_differing == num_differing, tensor.fqn
        assert _is_close(tensor.movement, moved), tensor.fqn
        entry = manifest.tensors[tensor.fqn]
        assert (tensor.dtype, tensor.size, tensor.is_table) == (entry.dtype, entry.size, entry.is_table)
    bags = next(tensor for tensor in found.tensors if tensor.fqn == "model.bag.weight")
    assert 0 < bags.num_differing < bags.num_rows == 40
    assert all(num_bytes <= range_bytes or num_rows == 1 for num_bytes, num_rows in read)
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] == sum(num_bytes for num_bytes, _ in read) // 2


def test_a_checkpoint_is_the_same_as_itself(run: Path) -> None:
    """Nothing differs, and no row has moved."""
    found = compare(run / "step-3", run / "step-3")
    assert found.is_same
    assert (found.common, found.num_own_a, found.num_own_b) == (str(run / "step-3"), 0, 0)
    assert {tensor.num_differing for tensor in found.tensors} == {0}
    assert not compare(run / "step-1", run / "step-3").is_same


def test_what_they_stand_on_is_told(run: Path) -> None:
    """Forward and back on a chain, across branches, and between runs that have nothing in common."""

    def relation(a: str, b: str) -> tuple[str | None, int, int]:
        found = compare(run / a, run / b)
        return found.common and Path(found.common).name, found.num_own_a, found.num_own_b

    assert relation("step-1", "step-3") == ("step-1", 0, 2)
    assert relation("step-3", "step-1") == ("step-1", 2, 0)
    assert relation("step-3", "branch-4") == ("step-2", 1, 2)
    assert relation("step-3", "other") == (None, 3, 1)


def test_rows_stored_on_the_way_are_counted(run: Path) -> None:
    """Of tables, in the deltas from the first to the second; nothing where the second does not stand on the first."""

    def stored(a: str, b: str) -> dict[str, int | None]:
        return {tensor.fqn: tensor.num_stored for tensor in compare(run / a, run / b).tensors}

    fqn = "model.bag.weight"
    lineage = read_lineage(run / "step-3")
    rows = [checkpoint.manifest.tensors[fqn].num_stored_rows for checkpoint in lineage.checkpoints]
    assert rows[0] == 40
    assert 0 < rows[1] < 40
    assert stored("step-1", "step-3")[fqn] == rows[1] + rows[2]
    assert stored("step-2", "step-3")[fqn] == rows[2]
    assert stored("step-3", "step-3")[fqn] == 0
    assert set(stored("step-3", "branch-4").values()) == {None}
    assert {name for name, num in stored("step-1", "step-3").items() if num is not None} == {fqn, "model.item.weight"}


def _saved(tmp_path: Path, name: str, state: dict[str, Any]) -> Path:
    dcp.save(state, storage_writer=models.writer(tmp_path / name))
    return tmp_path / name


def test_other_sizes_and_names_are_listed(tmp_path: Path) -> None:
    """Tensors of another size or dtype, of one side only, and objects."""
    before = {"t": torch.zeros(3, 2), "d": torch.zeros(2), "x": torch.zeros(1), "o": 1, "p": "s", "q": 1}
    after = {"t": torch.zeros(4, 2), "d": torch.zeros(2).half(), "y": 2, "o": 2, "p": "s", "q": torch.ones(1)}
    a, b = _saved(tmp_path, "a", before), _saved(tmp_path, "b", after)
    found = compare(a, b)
    assert set(found.reshaped) == {
        Reshaped("t", (3, 2), "float32", (4, 2), "float32"),
        Reshaped("d", (2,), "float32", (2,), "float16"),
    }
    assert (found.only_in_a, found.only_in_b) == (("x",), ("y",))
    assert (found.objects, found.differing_objects) == (("o", "p"), ("o",))
    assert found.tensors == ()
    assert not found.is_same


def test_rows_without_a_distance_are_counted_apart(tmp_path: Path) -> None:
    """Rows of norm 0 before, and rows with NaN or infinity, differ; they are not in the mean. Bits decide."""
    nan, inf = math.nan, math.inf
    before = torch.tensor([[3.0, 4], [0, 0], [1, nan], [1, 1], [inf, 0], [2, 0], [0, 0], [5, 5]])
    after = torch.tensor([[3.0, 5], [0, 1], [1, nan], [nan, 1], [inf, 1], [-2, 0], [-0.0, 0], [5, 5]])
    a, b = _saved(tmp_path, "a", {"t": before}), _saved(tmp_path, "b", {"t": after})
    (tensor,) = compare(a, b).tensors
    assert tensor.num_differing == 6
    assert tensor.movement.num_measured == 2
    assert tensor.movement.mean == pytest.approx((0.2 + 2) / 2)
    assert tensor.movement.max == 2.0
    assert (tensor.movement.num_from_zero, tensor.movement.num_not_finite) == (2, 2)


def _compare_resharded(tmp_path: Path, rank_pool: RankPools, trained: bool) -> Comparison:
    names = [f"{trained}-{number}" for number in range(3)]
    args = (["row", "column", "table"], [True, trained, False], None)
    rank_pool(2).run(runs.save_sharded_run, str(tmp_path), names, *args)
    assert cnr.read_checkpoint(tmp_path / names[2]).kind == "delta"
    return compare(tmp_path / names[0], tmp_path / names[2])


def test_sharding_makes_no_difference(tmp_path: Path, rank_pool: RankPools) -> None:
    """Tables and their row-wise state are compared row by row, whatever their shards; and so is what was trained."""
    found = _compare_resharded(tmp_path, rank_pool, trained=False)
    assert {tensor.fqn: tensor.num_differing for tensor in found.tensors if tensor.num_differing} == {}
    assert found.is_same
    tables = {tensor.fqn: tensor for tensor in found.tensors if tensor.is_table}
    states = [tensor for tensor in found.tensors if tensor.fqn.endswith("momentum1")]
    assert len(tables) == len(states) == 4
    assert sorted(tensor.num_rows for tensor in states) == sorted(tensor.num_rows for tensor in tables.values())
    trained = _compare_resharded(tmp_path, rank_pool, trained=True)
    differing = {tensor.fqn: tensor.num_differing for tensor in trained.tensors}
    assert all(differing[fqn] > 0 for fqn in tables)
    assert all(differing[tensor.fqn] > 0 for tensor in states)
    assert any(differing[tensor.fqn] < tensor.num_rows for tensor in states)


# No negative zeros, which differ from others in bits alone.
numbers = (st.floats(-100, 100, width=16) | st.sampled_from([0.0, 1.0, math.nan, math.inf])).map(lambda x: x + 0.0)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@given(st.lists(st.tuples(*[numbers] * 4), min_size=1, max_size=40), st.integers(1, 7), dtypes)
def test_movement_is_that_of_all_rows_at_once(rows: list[tuple[float, ...]], num: int, dtype: torch.dtype) -> None:
    """Block by block, counts are exact, mean and maximum too but for rounding, and the median nearly."""
    values = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4).to(dtype)
    before, after = values[:, :2], values[:, 2:]
    meter = MovementMeter()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(row_distance, "_BLOCK_ELEMENTS", 5)
        for first, second in zip(before.chunk(num), after.chunk(num), strict=True):
            meter.add(first, second)
    num_differing, expected = _moved(before, after)
    assert meter.num_differing == num_differing
    assert _is_close(meter.movement(), expected)


def test_extreme_distances_are_numbers() -> None:
    """Distances that fp32, or even fp64, cannot hold are taken for the greatest of fp32."""
    meter = MovementMeter()
    meter.add(
        torch.tensor([[5e-324], [1e-300]], dtype=torch.float64), torch.tensor([[1e300], [1.0]], dtype=torch.float64)
    )
    greatest = torch.finfo(torch.float32).max
    assert meter.movement() == Movement(2, greatest, greatest, greatest, 0, 0)


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (0,), (0, 0)])
def test_nothing_has_not_moved(shape: tuple[int, ...]) -> None:
    """Tensors without elements do not differ."""
    meter = MovementMeter()
    meter.add(torch.zeros(shape), torch.zeros(shape))
    assert meter.num_differing == 0
    assert meter.movement() == Movement(0, None, None, None, 0, 0)


def test_a_store_in_memory_is_compared(tmp_path: Path) -> None:
    """Any fsspec file system will do, and two of different kinds."""
    runs.save_run(f"memory://{tmp_path}", NAMES[:2])
    runs.save_run(tmp_path, NAMES[:2])
    assert not compare(f"memory://{tmp_path}/step-1", f"memory://{tmp_path}/step-2").is_same
    found = compare(f"memory://{tmp_path}/step-2", tmp_path / "step-2")
    assert found.is_same
    assert found.common is None


def test_what_cannot_be_read_is_an_error(run: Path, tmp_path: Path) -> None:
    """Missing checkpoints and bad arguments raise what a load raises."""
    with pytest.raises(cnr.CheckpointNotFoundError):
        compare(run / "step-1", tmp_path)
    with pytest.raises(cnr.ConfigurationError, match="thread_count"):
        compare(run / "step-1", run / "step-2", thread_count=0)

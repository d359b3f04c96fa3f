"""Checkpoints of sharded jobs loaded into quantized TorchRec modules, in pieces and within a budget of memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrec_cnr as cnr
from tests.loading.quantized_models import (
    BAG_ROWS,
    BITS,
    DIM,
    SCHEMES,
    assert_serves,
    float_model,
    load,
    load_quantized,
    looked_up,
    quantized,
    save_checkpoint,
    save_lineage,
)
from tests.support.ranks import RankPools
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import Shard
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.quantization.fbgemm_rows import InferenceRow
from torchrec_cnr.reading import regions as regions_module
from torchrec_cnr.reading.plan import plan_fold
from torchrec_cnr.reading.regions import TensorRegion

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint2x4, torch.float16])
@pytest.mark.parametrize("scheme", ["exact", "4 bits"])
@pytest.mark.parametrize(
    "shardings", [["row", "row"], ["column", "column"], ["column", "row"], ["table", "mixed", "row"]], ids="-".join
)
def test_checkpoints_of_sharded_jobs_are_served(
    rank_pool: RankPools, tmp_path: Path, shardings: list[str], scheme: str, dtype: torch.dtype
) -> None:
    """However the checkpoints of a lineage were sharded, one process gets whole rows of the newest."""
    root = tmp_path / "run"
    model_saved = rank_pool(2).run(save_lineage, str(root), shardings, SCHEMES[scheme])[0]
    path = root / str(len(shardings) - 1)
    assert cnr.read_checkpoint(path).kind == "delta"
    if scheme == "exact":
        for table, rows in load(float_model(3), path).items():
            fqn = "model.ec.embeddings.t0.weight" if table == "item" else f"model.ebc.embedding_bags.{table}.weight"
            assert torch.equal(rows, model_saved[fqn])
    pieces = {"column", "mixed"} & set(shardings)
    takes_over = scheme == "4 bits" and not pieces and BITS[dtype] == 8
    assert_serves(quantized(float_model(2), dtype), path, dtype, takes_over)


def test_rows_in_pieces_are_read_in_windows(
    rank_pool: RankPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for ten rows as floats, tables in pieces are read in several turns, with the same outcome."""
    root = tmp_path / "run"
    rank_pool(2).run(save_lineage, str(root), ["column", "mixed"], cnr.Asymmetric(4))
    wanted = load_quantized(quantized(float_model(2), torch.qint8), root / "1")
    folds = []
    fold = regions_module.turns

    def counted(regions: Any) -> Any:
        folds.extend(fold(regions))
        return fold(regions)

    monkeypatch.setattr(regions_module, "FLOAT_BYTES", 10 * 4 * DIM)
    monkeypatch.setattr(regions_module, "_CHUNK_BYTES", 3 * 4 * DIM)
    monkeypatch.setattr("torchrec_cnr.loading.reader.turns", counted)
    got = load_quantized(quantized(float_model(3), torch.qint8), root / "1")
    assert all(torch.equal(got[table], rows) for table, rows in wanted.items())
    assert len(folds) > 9


def test_row_numbers_of_other_rows_are_not_read(rank_pool: RankPools, tmp_path: Path) -> None:
    """A region of few rows of a delta needs the blocks of row numbers that may have some of them, and no others."""
    rank_pool(2).run(save_lineage, str(tmp_path), ["column", "column"], cnr.NoQuantization())
    lineage = read_lineage(tmp_path / "1")
    fqn = "model.ebc.embedding_bags.t0.weight"
    blocks = []
    for box in (Box((0, 0), (BAG_ROWS[0], DIM)), Box((0, 0), (3, DIM)), Box((0, 0), (3, DIM // 2))):
        plan = plan_fold(lineage, [TensorRegion(fqn, box, torch.empty(box.sizes))])[-1]
        blocks.append(frozenset(plan.row_blocks))
    assert blocks[0] > blocks[1] > blocks[2] > frozenset()


@given(
    num_rows=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    num_cols=st.sampled_from([4, 16]),
    budget_rows=st.integers(1, 50),
)
@settings(deadline=None)
def test_turns_are_bounded(num_rows: list[int], num_cols: int, budget_rows: int) -> None:
    """Each row of a table in pieces is in one window, and no turn needs more floats than are allowed."""
    row = InferenceRow(num_cols, 8, num_cols + 4)
    targets = [torch.zeros(num, row.row_bytes, dtype=torch.uint8) for num in num_rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions_module, "FLOAT_BYTES", budget_rows * num_cols * 4)
        regions = [
            region
            for target in targets
            for box in [Box((0, 0), (len(target), num_cols))]
            for region in regions_module.inference_regions(
                "t", box, target, row, torch.float32, [_shard(len(target), num_cols // 2)]
            )
        ]
        turns = regions_module.turns(regions)
        for turn in turns:
            assert sum(region.box.num_rows for region in turn) <= budget_rows
    assert [region for turn in turns for region in turn] == regions
    for region in regions:
        assert isinstance(region, regions_module.PiecedRegion)
        region.target += 1
    assert all(bool((target == 1).all()) for target in targets)


def _shard(num_rows: int, num_cols: int) -> Shard:
    return Shard(Box((0, 0), (num_rows, num_cols)), cnr.NoQuantization(), 1, 0, ())


ODD_ROWS = torch.tensor(
    [
        [0.1] * DIM,
        [1e-9] * DIM,
        [-1 / 3] * (DIM - 1) + [-0.3333],
        [100.0, 100.01] * (DIM // 2),
        [1e5] * DIM,
        [-60_000.0, 60_000.0] * (DIM // 2),
        [0.0] * DIM,
        list(range(DIM)),
    ]
)
NOT_FINITE = torch.tensor([[float("nan")] + [1.0] * (DIM - 1), [1.0] * (DIM - 1) + [float("-inf")]])


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("scheme", ["exact", "8 bits", "3 bits", "2 bits", "half"])
def test_rows_that_codes_cannot_hold_do_no_harm(tmp_path: Path, scheme: str, dtype: torch.dtype) -> None:
    """Finite rows come within half a step of a range that fp16 holds; rows with NaN or infinity are NaN throughout."""
    trained, bits = float_model(1), BITS[dtype]
    with torch.no_grad():
        trained.ebc.embedding_bags["t0"].weight[: len(ODD_ROWS)] = ODD_ROWS
        trained.ebc.embedding_bags["t0"].weight[-2:] = NOT_FINITE
    path = save_checkpoint(tmp_path / "0", trained, SCHEMES[scheme])
    if scheme != "exact":
        assert cnr.read_checkpoint(path).num_exact_rows >= 5
    wanted = load(trained, path)["t0"]
    got = load_quantized(quantized(float_model(2), dtype), path)["t0"]
    if bits > 8:
        rounded = wanted.half().float() if bits == 16 else wanted
        torch.testing.assert_close(got, rounded, rtol=0, atol=0, equal_nan=True)
        return
    assert bool(got[-2:].isnan().all())
    low, high = wanted[:-2].amin(1, keepdim=True), wanted[:-2].amax(1, keepdim=True)
    spacing = torch.maximum(low.abs(), high.abs()) * 2.0**-10 + 2.0**-24
    step = ((high - low.clamp(max=65504.0)) + spacing) / (2**bits - 1) * 1.01 + 2.0**-24
    assert bool(((got[:-2] - wanted[:-2]).abs() <= step * 0.51 + spacing * 1.01).all())
    assert not bool((got[:-2] == looked_up(quantized(float_model(2), dtype))["t0"][:-2]).all())

"""Checkpoints loaded into quantized modules that TorchRec has sharded: what these then look up.

The expected values are those of the same quantized model without sharding, into which the same checkpoint was loaded.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed.quant_embedding import ShardedQuantEmbeddingCollection
from torchrec.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection

import torchrec_cnr as cnr
from tests.loading.quantized_models import (
    BAG_ROWS,
    DIM,
    SCHEMES,
    assert_serves,
    float_model,
    load,
    load_quantized,
    looked_up,
    quantized,
    refused,
    save_checkpoint,
    save_lineage,
    sharded,
    sharded_on_cpus,
)
from tests.serving.served_models import following, save_tables
from tests.support.ranks import RankPools
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.reading import regions as regions_module

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:Please use DTensor instead"),
]

SHARDINGS: Mapping[str, Mapping[str, str]] = {
    "table-wise": dict.fromkeys(("t0", "t1", "t2"), "table_wise"),
    "row-wise": dict.fromkeys(("t0", "t1", "t2"), "row_wise"),
    # TorchRec shards no EmbeddingCollection by columns on CPUs, and its table has the name t0, too.
    "column-wise": {"t0": "row_wise", "t1": "column_wise", "t2": "column_wise"},
}
BOXES: Mapping[str, list[list[Box]]] = {
    "table-wise": [[Box((0, 0), (rows, 8))] for rows in BAG_ROWS],
    "row-wise": [
        [Box((0, 0), (19, 8)), Box((19, 0), (18, 8))],
        [Box((0, 0), (12, 8)), Box((12, 0), (12, 8))],
        [Box((0, 0), (3, 8)), Box((3, 0), (2, 8))],
    ],
    "column-wise": [
        [Box((0, 0), (19, 8)), Box((19, 0), (18, 8))],
        [Box((0, 0), (24, 4)), Box((0, 4), (24, 4))],
        [Box((0, 0), (5, 4)), Box((0, 4), (5, 4))],
    ],
}
# TorchRec makes no sharded module of INT2 tables with fewer columns than 8, and none of FP16 and FP32 at all.
DTYPES = [torch.qint8, torch.quint4x2, torch.quint2x4]
CASES = [(kind, dtype) for kind in SHARDINGS for dtype in DTYPES if (kind, dtype) != ("column-wise", torch.quint2x4)]


@pytest.fixture(autouse=True, scope="module")
def _devices() -> Iterator[None]:
    with sharded_on_cpus():
        yield


def test_the_shards_are_those_of_torchrec() -> None:
    """Each box is found, so that the tests below load into more than one kernel."""
    for kind, expected in BOXES.items():
        model = sharded(1, torch.qint8, SHARDINGS[kind])
        assert isinstance(model.ebc, ShardedQuantEmbeddingBagCollection)
        assert isinstance(model.ec, ShardedQuantEmbeddingCollection)
        tables = {table.size: table for table in cnr.InferenceTables(model).tables}
        assert [[shard.box for shard in tables[rows, 8].shards] for rows in BAG_ROWS] == expected


@pytest.mark.parametrize("scheme", ["exact", "8 bits", "4 bits", "2 bits"])
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_sharded_tables_have_the_rows_of_unsharded_ones(
    tmp_path: Path, kind: str, dtype: torch.dtype, scheme: str
) -> None:
    """Whole rows become the same bytes; columns have scales of their own, and so are at least as near."""
    path = save_checkpoint(tmp_path / "0", float_model(1), SCHEMES[scheme])
    model, unsharded = sharded(2, dtype, SHARDINGS[kind]), quantized(float_model(3), dtype)
    if kind == "column-wise":
        assert_serves(model, path, dtype, takes_over=False)
        return
    before, expected, got = looked_up(model), load_quantized(unsharded, path), load_quantized(model, path)
    for table, rows in expected.items():
        assert torch.equal(got[table], rows)
        assert not torch.equal(before[table], rows)


def test_codes_of_the_same_columns_are_taken_over(
    tmp_path: Path, rank_pool: RankPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column shard takes over codes that a job saved with the same columns, and assembles other ones as floats."""
    whole = save_checkpoint(tmp_path / "whole", float_model(1), cnr.Asymmetric(8))
    columns = tmp_path / "columns"
    rank_pool(2).run(save_lineage, str(columns), ["column", "column"], cnr.Asymmetric(8))
    pieced: list[Any] = []
    finish = regions_module.PiecedRegion.finish
    monkeypatch.setattr(regions_module.PiecedRegion, "finish", lambda region: (pieced.append(region), finish(region)))
    load_quantized(sharded(2, torch.qint8, SHARDINGS["column-wise"]), whole)
    assert {region.fqn[-9:] for region in pieced} == {"t1.weight", "t2.weight"}
    assert {region.box.offsets for region in pieced} == {(0, 0), (0, 4)}
    pieced.clear()
    got = load_quantized(sharded(2, torch.qint8, SHARDINGS["column-wise"]), columns / "1")
    assert {region.box.num_cols for region in pieced} == {DIM}  # of the tables that are served by rows
    wanted = load(float_model(3), columns / "1")
    assert all(torch.equal(got[table], wanted[table]) for table in ("t1", "t2"))
    assert not any(torch.equal(got[table], wanted[table]) for table in ("t0", "item"))


def test_windows_begin_at_the_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of columns that are assembled in several windows have the same rows as in one."""
    path = save_checkpoint(tmp_path / "0", float_model(1), cnr.Asymmetric(4))
    expected = load_quantized(sharded(2, torch.qint8, SHARDINGS["column-wise"]), path)
    monkeypatch.setattr(regions_module, "FLOAT_BYTES", 5 * 4 * 4)
    got = load_quantized(sharded(3, torch.qint8, SHARDINGS["column-wise"]), path)
    assert all(torch.equal(got[table], rows) for table, rows in expected.items())


@pytest.mark.parametrize("kind", SHARDINGS)
def test_a_served_sharded_model_follows_a_job(tmp_path: Path, kind: str) -> None:
    """Deltas are applied to the shards in place, to the bytes that a load gives."""
    model, fresh = (sharded(seed, torch.qint8, SHARDINGS[kind]) for seed in (2, 3))
    last, kinds = None, []
    with following(model, tmp_path, allow_partial_load=True) as subscriber:
        for number in range(3):
            path = tmp_path / str(number)
            last = save_tables(path, number, cnr.Asymmetric(8), last, density=0.1)
            before = looked_up(model)
            applied = subscriber.update()
            assert applied is not None
            kinds.append(applied.kind)
            expected, got = load_quantized(fresh, path), looked_up(model)
            assert all(torch.equal(got[table], rows) for table, rows in expected.items())
            assert not all(torch.equal(got[table], rows) for table, rows in before.items())
    assert kinds == ["baseline", "delta", "delta"]


def test_shards_that_contain_scales_are_refused() -> None:
    """TorchRec divides the bytes of rows by columns if the scales are in them; such shards have no floats."""
    model = sharded(1, torch.qint8, SHARDINGS["column-wise"])
    for config in model.ebc.tbes_configs().values():
        for table in config.embedding_tables:
            if table.local_metadata.shard_offsets == [0, 4]:
                table.local_metadata.shard_offsets = [0, 8]
    with pytest.raises(cnr.ConfigurationError, match=r"table 't1' do not fill its 24 × 8 values: .*split_scale_bias"):
        cnr.InferenceTables(model)


def test_another_size_is_refused(tmp_path: Path) -> None:
    """A sharded table is compared by its whole size, and nothing is overwritten."""
    path = save_checkpoint(tmp_path / "0", float_model(1, (*BAG_ROWS[:2], 6)), cnr.Asymmetric(8))
    model = sharded(2, torch.qint8, SHARDINGS["row-wise"])
    message = refused(model, path, inference=cnr.InferenceTables(model))
    assert "'model.ebc.embedding_bags.t2.weight' (saved [6, 8], wanted [5, 8])" in message

"""Quantized checkpoints: values come back within the bound of their scheme, or exactly."""

import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

import torchrec_cnr as cnr
from tests.quantization.bounds import BITS, Table, assert_close
from tests.support import models
from torchrec_cnr.format.manifest import Shard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
WIDTHS = [1, 3, 5, 7, 64]


def _through(path: Path, values: Tensor, bits: int) -> Tensor:
    """Save a table with a tracker, and load it into another."""
    model, other = Table(values), Table(torch.full_like(values, -3.0))
    tracker = cnr.RowTracker(model)
    planner, writer = cnr.CNRSavePlanner(tracker), models.writer(path, quantization=cnr.Asymmetric(bits))
    dcp.save(model.state_dict(), storage_writer=writer, planner=planner)
    tracker.close()
    dcp.load(other.state_dict(), storage_reader=cnr.CNRStorageReader(path), planner=cnr.CNRLoadPlanner())
    return other.table.weight.detach()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bits", BITS)
def test_tables_of_any_width_come_back_within_the_bound(tmp_path: Path, bits: int, width: int) -> None:
    """Each element is within half a step of its row's scale, whatever the width, and is not what it was by chance."""
    torch.manual_seed(bits * width)
    values = torch.randn(50, width) * torch.logspace(-2, 3, 50)[:, None]
    got = _through(tmp_path / "0", values, bits)
    assert_close(got, values, bits)
    assert width == 1 or not torch.equal(got, values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 64])
@pytest.mark.parametrize("bits", BITS)
def test_tables_of_half_precision_come_back_within_the_bound(
    tmp_path: Path, bits: int, width: int, dtype: torch.dtype
) -> None:
    """Tables of fp16 and bf16 keep their dtype."""
    torch.manual_seed(bits)
    values = torch.randn(50, width).to(dtype)
    assert_close(_through(tmp_path / "0", values, bits), values, bits)


@pytest.mark.parametrize("bits", BITS)
def test_constant_rows_come_back(tmp_path: Path, bits: int) -> None:
    """A row of one value has no range: it comes back as fp16 holds it."""
    constants = torch.tensor([0.0, -0.0, 1.0, -2.5, 1 / 3, 1e-3, 60_000.0, 1e-7, 123.456])
    values = constants[:, None].expand(-1, 6).contiguous()
    got = _through(tmp_path / "0", values, bits)
    assert_close(got, values, bits)
    is_fp16 = constants == constants.half().float()
    assert int(is_fp16.sum()) >= 4
    assert torch.equal(got[is_fp16], values[is_fp16])


_FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True) | st.floats(-1, 1, width=32)


@pytest.mark.long
@settings(max_examples=60, derandomize=True)
@given(
    rows=hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 9)), elements=_FLOATS),
    bits=st.sampled_from(BITS),
)
def test_any_row_is_within_the_bound_or_exact(
    tmp_path_factory: pytest.TempPathFactory, rows: npt.NDArray[np.float32], bits: int
) -> None:
    """Whatever floats a row holds, NaN and infinity and the largest too: no silent wrong value."""
    values = torch.from_numpy(rows)
    got = _through(tmp_path_factory.mktemp("rows") / "0", values, bits)
    for row, came_back in zip(values, got, strict=True):
        if not torch.equal(row.view(torch.int32), came_back.view(torch.int32)):
            assert bool(row.isfinite().all())
            assert_close(came_back[None], row[None], bits)


@pytest.mark.parametrize("bits", BITS)
def test_what_a_scheme_cannot_represent_comes_back_exactly(
    tmp_path: Path, bits: int, caplog: pytest.LogCaptureFixture
) -> None:
    """NaN, infinity and values beyond fp16 are stored as they are and counted, in baselines and deltas."""
    torch.manual_seed(1)
    values = torch.randn(40, 8)
    odd = {3: float("nan"), 7: float("inf"), 8: float("-inf"), 20: 1e30, 21: -1e30, 39: -70_000.0}
    for row, value in odd.items():
        values[row, row % 8] = value
    values[30] = torch.tensor([0x7FC01234], dtype=torch.int32).view(torch.float32)
    odd_rows = [*odd, 30]
    model = Table(values)
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    with caplog.at_level(logging.WARNING, "torchrec_cnr"):
        for number in range(2):
            writer = models.writer(tmp_path / str(number), quantization=cnr.Asymmetric(bits))
            dcp.save(model.state_dict(), storage_writer=writer, planner=planner)
            tracker.mark("table", torch.tensor([0, *odd_rows]))
    assert [record.message for record in caplog.records if f" {len(odd_rows)} rows" in record.message]
    assert [cnr.read_checkpoint(tmp_path / str(number)).num_rows for number in range(2)] == [40, 1 + len(odd_rows)]
    tracker.close()
    for number in range(2):
        other = Table(torch.zeros(40, 8))
        reader = cnr.CNRStorageReader(tmp_path / str(number))
        dcp.load(other.state_dict(), storage_reader=reader, planner=cnr.CNRLoadPlanner())
        got = other.table.weight.detach()
        assert torch.equal(got[odd_rows].view(torch.int32), values[odd_rows].view(torch.int32))
        rest = torch.ones(40, dtype=torch.bool).index_fill(0, torch.tensor(odd_rows), False)
        assert_close(got[rest], values[rest], bits)


# Schemes of all kinds.

SCHEMES: list[cnr.Scheme] = [
    *(cnr.Symmetric(bits) for bits in (2, 3, 8)),
    *(cnr.Asymmetric(bits) for bits in (3, 4)),
    *(cnr.AdaptiveAsymmetric(bits, cnr.GreedySearch(10)) for bits in (2, 3)),
    cnr.AdaptiveAsymmetric.best(3),
    *(cnr.KMeans(bits) for bits in (2, 3)),
    cnr.HalfPrecision(),
    cnr.HalfPrecision(torch.bfloat16),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_load_gives_what_the_scheme_decodes(tmp_path: Path, scheme: cnr.Scheme) -> None:
    """Of a baseline and a delta, bit for bit, but for rows that codes cannot hold: they are as they were saved."""
    torch.manual_seed(1)
    model, wanted = Table(torch.randn(41, 27)), torch.empty(0)
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    modified = torch.tensor([0, 5, 7, 40])
    for number, rows in enumerate((torch.arange(41), modified)):
        values = model.table.weight.detach()
        values[rows] = torch.randn(len(rows), 27)
        values[7, 3] = torch.nan
        writer = models.writer(tmp_path / str(number), quantization=scheme)
        dcp.save(model.state_dict(), storage_writer=writer, planner=planner)
        tracker.mark("table", modified)
        encoded = scheme.encode(values, rows)
        assert encoded.exact.tolist() == [int((rows == 7).nonzero())]
        decoded = scheme.decode(encoded.codes, 27, torch.float32)
        decoded[encoded.exact] = values[rows][encoded.exact]
        wanted = decoded if number == 0 else wanted.index_copy(0, rows, decoded)
        other = Table(torch.zeros(41, 27))
        reader = cnr.CNRStorageReader(tmp_path / str(number))
        dcp.load(other.state_dict(), storage_reader=reader, planner=cnr.CNRLoadPlanner())
        got = other.table.weight.detach()
        assert torch.equal(got.view(torch.int32), wanted.view(torch.int32))
        assert not torch.equal(got[:7], values[:7])
        assert [shard.scheme for shard in _shards(tmp_path / str(number), "table.weight")] == [scheme]
    tracker.close()


def _shards(path: Path, fqn: str) -> tuple[Shard, ...]:
    return cnr.read_checkpoint(path).manifest.tensors[fqn].shards


def test_the_search_that_was_chosen_is_in_the_manifest(tmp_path: Path) -> None:
    """A save without a search chooses one by the rows that it stores, the same one each time, and says which."""
    torch.manual_seed(1)
    values, found = torch.randn(300, 64), []
    model = Table(values)
    for number in range(3):
        writer = models.writer(tmp_path / str(number), quantization={"*": cnr.AdaptiveAsymmetric(4)})
        dcp.save(model.state_dict(), storage_writer=writer)
        found += [shard.scheme for shard in _shards(tmp_path / str(number), "table.weight")]
        if number == 1:
            model = Table(torch.zeros(300, 64))
    assert found[0] == found[1] == cnr.AdaptiveAsymmetric(4).choose(lambda: values, 0)
    assert isinstance(found[0], cnr.AdaptiveAsymmetric)
    assert isinstance(found[0].search, cnr.LeastSquares)
    assert found[2] != found[0]


@pytest.mark.parametrize("scheme", [cnr.Asymmetric(8), cnr.AdaptiveAsymmetric(2), cnr.KMeans(4), cnr.ByErrorBudget(1)])
def test_codes_that_would_be_larger_are_not_used(tmp_path: Path, scheme: cnr.Quantization) -> None:
    """A table of one column is stored exactly, since a row's codes would take more room than its value."""
    torch.manual_seed(1)
    saved = {"narrow": torch.randn(20, 1), "wide": torch.randn(20, 64)}
    dcp.save(saved, storage_writer=models.writer(tmp_path / "0", quantization={"*": scheme}))
    target = {fqn: torch.zeros_like(value) for fqn, value in saved.items()}
    dcp.load(target, storage_reader=cnr.CNRStorageReader(tmp_path / "0"), planner=cnr.CNRLoadPlanner())
    assert torch.equal(target["narrow"], saved["narrow"])
    assert not torch.equal(target["wide"], saved["wide"])
    assert [shard.scheme for shard in _shards(tmp_path / "0", "narrow")] == [cnr.NoQuantization()]
    assert [shard.scheme for shard in _shards(tmp_path / "0", "wide")] != [cnr.NoQuantization()]


def test_rows_stored_exactly_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A writer warns of them once for each table, later saves tell at INFO, and another writer warns again."""
    saved = {fqn: torch.randn(20, 8) for fqn in ("a", "b", "c")}
    for fqn in ("a", "b"):
        saved[fqn][3, 3] = torch.nan
    levels = []
    with caplog.at_level(logging.INFO, "torchrec_cnr"):
        for _ in range(2):
            writer = models.writer(tmp_path / str(len(levels)), quantization={"*": cnr.Asymmetric(4)})
            for _ in range(3):
                caplog.clear()
                path = tmp_path / str(len(levels))
                dcp.save(saved, checkpoint_id=path, storage_writer=writer)
                told = [record for record in caplog.records if "stored exactly" in record.message]
                levels.append([(record.levelno, record.args[0]) for record in told if isinstance(record.args, tuple)])
    warned, told_of = ([(level, fqn) for fqn in ("a", "b")] for level in (logging.WARNING, logging.INFO))
    assert levels == [warned, told_of, told_of] * 2
    assert cnr.read_checkpoint(tmp_path / "0").manifest.num_exact_rows == 2

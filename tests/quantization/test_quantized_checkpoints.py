"""Quantized checkpoints, from save to load: how close tables come back, and what else comes back exactly.

The bound is worked out here in NumPy from the values alone: half a step of the row's scale, and what rounding scale and
bias to fp16 adds.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import torchrec_cnr as cnr
from tests.support import models
from tests.support.jobs import adagrad_job
from tests.support.models import Job, Whole, differing, plain_job, state, torchrec_job, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.format.manifest import Shard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

Floats = npt.NDArray[np.float64]

BITS = [8, 4, 2]
WIDTHS = [1, 3, 5, 7, 64]
# Half a unit in the last place of a value close to 1, which rounding to the dtype may add.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def bounds(values: Tensor, bits: int) -> Floats:
    """How far each element may be off: [num_rows, num_cols]."""
    rows = values.double().numpy()
    low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
    num_steps = 2**bits - 1
    scale = (high - low) / num_steps
    of_scale = num_steps * _half_spacing(scale)
    per_row = (scale / 2 + of_scale + _half_spacing(low)) * (1 + 1e-3)
    return np.asarray(per_row + ROUNDING[values.dtype] * np.abs(rows) + 2.0**-25)


def _half_spacing(values: Floats) -> Floats:
    """Half the distance between neighbours of fp16 about these values."""
    return np.asarray(
        np.maximum(2.0 ** np.floor(np.log2(np.maximum(np.abs(values), 2.0**-14))) * 2.0**-10, 2.0**-24) / 2
    )


def assert_close(got: Tensor, saved: Tensor, bits: int) -> None:
    """Every element is within its bound, and the table is of the same dtype."""
    assert got.dtype is saved.dtype
    error = np.abs(got.double().numpy() - saved.double().numpy())
    excess = error - bounds(saved, bits)
    worst = np.unravel_index(excess.argmax(), excess.shape)
    assert excess[worst] <= 0, f"element {worst} of row {saved[worst[0]]}: off by {error[worst]}"


class _Table(nn.Module):
    """One table of given values."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag.from_pretrained(values.clone(), freeze=False, mode="sum")


def _through(path: Path, values: Tensor, bits: int) -> Tensor:
    """Save a table with a tracker, and load it into another."""
    model, other = _Table(values), _Table(torch.full_like(values, -3.0))
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
    model = _Table(values)
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
        other = _Table(torch.zeros(40, 8))
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
    model, wanted = _Table(torch.randn(41, 27)), torch.empty(0)
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
        other = _Table(torch.zeros(41, 27))
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
    model = _Table(values)
    for number in range(3):
        writer = models.writer(tmp_path / str(number), quantization={"*": cnr.AdaptiveAsymmetric(4)})
        dcp.save(model.state_dict(), storage_writer=writer)
        found += [shard.scheme for shard in _shards(tmp_path / str(number), "table.weight")]
        if number == 1:
            model = _Table(torch.zeros(300, 64))
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


# Lineages.


def _tables(values: Whole) -> list[str]:
    return [fqn for fqn in values if fqn.startswith("model.") and ".over." not in fqn]


def _lineage(rank: int, root: str, build: Callable[[int], Job], bits: int, policy: cnr.Policy) -> None:
    """A baseline and two deltas; what is loaded of each is within the bound, or as an older one decodes it."""
    job = build(1)
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=policy)
    cuts, loaded = [], []
    for number in range(3):
        if number:
            train(job, number)
        cuts.append(whole(state(job, number=number)))
        writer = models.writer(f"{root}/{number}", quantization=cnr.Asymmetric(bits))
        dcp.save(state(job, number=number), storage_writer=writer, planner=planner)
        loaded.append(models.load(build(2 + number), f"{root}/{number}", number=-1))
    tracker.close()
    tables = _tables(cuts[0])
    assert len(tables) > 1
    num_modified = 0
    for number, (cut, got) in enumerate(zip(cuts, loaded, strict=True)):
        assert cnr.read_checkpoint(f"{root}/{number}").kind == ("delta" if number else "baseline")
        assert sorted(set(differing(got, cut)) - set(tables)) == [], "optimizer, dense part and values are exact"
        for fqn in tables:
            assert_close(got[fqn], cut[fqn], bits)
            is_modified = (cut[fqn] != cuts[0][fqn]).any(dim=1)
            assert torch.equal(got[fqn][~is_modified], loaded[0][fqn][~is_modified])
            num_modified += int(is_modified.sum())
    assert 0 < num_modified < 2 * sum(len(cuts[0][fqn]) for fqn in tables)


@pytest.mark.parametrize("policy", [cnr.Consecutive(), cnr.OneShot()], ids=["Consecutive", "OneShot"])
@pytest.mark.parametrize("bits", BITS)
def test_a_quantized_lineage_of_a_plain_model(tmp_path: Path, bits: int, policy: cnr.Policy) -> None:
    """Modified rows are within the bound of the cut; all others are exactly as the baseline decodes them."""
    _lineage(0, str(tmp_path), adagrad_job, bits, policy)


@pytest.mark.parametrize("bits", BITS)
def test_a_quantized_lineage_of_a_sharded_model(tmp_path: Path, rank_pool: RankPools, bits: int) -> None:
    """As above, with sharded tables on two ranks."""
    rank_pool(2).run(_lineage, str(tmp_path), torchrec_job, bits, cnr.Consecutive())


def test_the_scheme_may_change_from_link_to_link(tmp_path: Path) -> None:
    """Each checkpoint is decoded by its own scheme: rows keep the precision with which they were saved last."""
    torch.manual_seed(1)
    model = _Table(torch.randn(40, 8))
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    schemes: list[cnr.Scheme] = [cnr.Asymmetric(2), cnr.NoQuantization(), cnr.Asymmetric(8)]
    for number, scheme in enumerate(schemes):
        with torch.no_grad():
            model.table.weight[10 * number : 10 * number + 10] = torch.randn(10, 8)
        tracker.mark("table", torch.arange(10 * number, 10 * number + 10))
        writer = models.writer(tmp_path / str(number), quantization=scheme)
        dcp.save(model.state_dict(), storage_writer=writer, planner=planner)
    tracker.close()
    assert cnr.read_checkpoint(tmp_path / "2").kind == "delta"
    other = _Table(torch.zeros(40, 8))
    dcp.load(other.state_dict(), storage_reader=cnr.CNRStorageReader(tmp_path / "2"), planner=cnr.CNRLoadPlanner())
    got, saved = other.table.weight.detach(), model.table.weight.detach()
    assert torch.equal(got[10:20], saved[10:20])
    assert_close(got[20:30], saved[20:30], 8)
    for rows in (slice(0, 10), slice(30, 40)):
        assert_close(got[rows], saved[rows], 2)
        assert not torch.equal(got[rows], saved[rows])


def test_fewer_bits_take_fewer_bytes(tmp_path: Path) -> None:
    """A row of 64 elements takes 8, 4 and 2 bits an element and four bytes at most, and nothing else grows with it."""
    sizes = {}
    for bits in (None, *BITS):
        model = _Table(torch.randn(1000, 64))
        scheme = cnr.NoQuantization() if bits is None else cnr.Asymmetric(bits)
        path = tmp_path / str(bits)
        dcp.save(model.state_dict(), storage_writer=models.writer(path, quantization={"*": scheme}))
        sizes[bits] = sum(file.stat().st_size for file in path.iterdir())
        assert cnr.read_checkpoint(path).num_bytes == sizes[bits]
    for bits, size in sizes.items():
        row_bytes = 256 if bits is None else 64 * bits // 8 + 4
        least_bytes = row_bytes if bits is None else row_bytes - 2  # scale and bias are packed
        assert 1000 * least_bytes < size < 1000 * row_bytes + 3_000


# Which tensors are quantized.


def test_patterns_choose_schemes_for_any_tensor(tmp_path: Path) -> None:
    """A mapping sets schemes by FQN, tables or not; the first match wins, and what none matches is exact."""
    job = plain_job(1, "adagrad", dims=(8, 8))
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    schemes: Mapping[str, cnr.Scheme] = {
        "*.bag.weight": cnr.Asymmetric(4),
        "*optimizer.state.0.sum": cnr.Asymmetric(8),
        "model.over.weight": cnr.Asymmetric(2),
        "model.*": cnr.NoQuantization(),
        "*.item.weight": cnr.Asymmetric(2),  # comes too late
    }
    bits = {"model.bag.weight": 4, "all_optimizer.state.0.sum": 8, "model.over.weight": 2}
    for number in range(3):
        train(job, number)
        cut = whole(state(job))
        writer = models.writer(tmp_path / str(number), quantization=schemes)
        dcp.save(state(job), storage_writer=writer, planner=planner)
        got = models.load(_wide_job(), str(tmp_path / str(number)))
        assert set(differing(got, cut)) == set(bits)
        for fqn, num_bits in bits.items():
            assert_close(got[fqn], cut[fqn], num_bits)
    tracker.close()


def _wide_job() -> Job:
    return plain_job(9, "adagrad", dims=(8, 8))


def test_what_a_scheme_does_not_know_is_exact(tmp_path: Path) -> None:
    """A pattern may match integers, fp64 and scalars: they come back as they were."""
    saved: dict[str, Any] = {
        "int64": torch.arange(6).view(2, 3),
        "float64": torch.randn(2, 3, dtype=torch.float64),
        "bool": torch.tensor([True, False]),
        "value": 1.5,
    }
    writer = models.writer(tmp_path / "0", quantization={"*": cnr.Asymmetric(4)})
    dcp.save(saved, storage_writer=writer, planner=cnr.CNRSavePlanner())
    target = {fqn: torch.zeros_like(value) if isinstance(value, Tensor) else None for fqn, value in saved.items()}
    dcp.load(target, storage_reader=cnr.CNRStorageReader(tmp_path / "0"), planner=cnr.CNRLoadPlanner())
    assert differing(whole(target), whole(saved)) == []


@pytest.mark.parametrize("shape", [(), (7,), (0, 4), (3, 0), (2, 3, 5), (1, 1)])
def test_tensors_of_any_shape_can_be_quantized(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Scalars, vectors, empty tensors and more than two dimensions keep their shape."""
    torch.manual_seed(1)
    saved = {"value": torch.randn(shape)}
    writer = models.writer(tmp_path / "0", quantization={"*": cnr.Asymmetric(8)})
    dcp.save(saved, storage_writer=writer, planner=cnr.CNRSavePlanner())
    target = {"value": torch.full(shape, -3.0)}
    dcp.load(target, storage_reader=cnr.CNRStorageReader(tmp_path / "0"), planner=cnr.CNRLoadPlanner())
    assert target["value"].shape == shape
    if saved["value"].numel():
        rows = len(saved["value"]) if shape else 1
        assert_close(target["value"].reshape(rows, -1), saved["value"].reshape(rows, -1), 8)


# What others read.


def _codes_in_packs(path: Path, fqn: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint's packs that are named after an FQN."""
    found: dict[str, Tensor] = {}
    for pack in path.glob("*.safetensors"):
        found |= {name: tensor for name, tensor in safetensors.torch.load_file(pack).items() if name.startswith(fqn)}
    return found


@pytest.mark.parametrize("width", [5, 64])
@pytest.mark.parametrize("bits", BITS)
def test_fbgemm_decodes_the_bytes_in_a_pack(tmp_path: Path, bits: int, width: int) -> None:
    """The codes are FBGEMM's fused rows: its operator makes of them, bit for bit, what a load gives."""
    torch.manual_seed(1)
    model = _Table(torch.randn(40, width))
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    modified = torch.tensor([2, 3, 39])
    for number in range(2):
        writer = models.writer(tmp_path / str(number), quantization=cnr.Asymmetric(bits))
        dcp.save(model.state_dict(), storage_writer=writer, planner=planner)
        tracker.mark("table", modified)
        with torch.no_grad():
            model.table.weight[modified] = torch.randn(3, width)
    tracker.close()
    for number, rows in enumerate((torch.arange(40), modified)):
        other = _Table(torch.zeros(40, width))
        reader = cnr.CNRStorageReader(tmp_path / str(number))
        dcp.load(other.state_dict(), storage_reader=reader, planner=cnr.CNRLoadPlanner())
        found = _codes_in_packs(tmp_path / str(number), "table.weight").values()
        (codes,) = [codes for codes in found if codes.dim() == 2]
        assert codes.dtype is torch.uint8
        assert len(codes) == len(rows)
        decoded = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(codes, bits)[:, :width]
        assert torch.equal(decoded, other.table.weight.detach()[rows])
        assert not torch.equal(decoded, model.table.weight.detach()[rows])


@pytest.mark.parametrize("planner", [None, DefaultSavePlanner, cnr.CNRSavePlanner], ids=["none", "DCP's", "ours"])
def test_the_writer_alone_saves_a_baseline(tmp_path: Path, planner: type[DefaultSavePlanner] | None) -> None:
    """Dropped into an existing ``dcp.save``: each save is a baseline, and all of it comes back."""
    job = adagrad_job(1)
    for number in range(2):
        train(job, number)
        cut = whole(state(job))
        path = str(tmp_path / str(number))
        dcp.save(state(job), storage_writer=models.writer(path), planner=None if planner is None else planner())
        assert cnr.read_checkpoint(path).kind == "baseline"
        for load_planner in (DefaultLoadPlanner(), cnr.CNRLoadPlanner()):
            target = state(adagrad_job(2))
            assert differing(whole(target), cut)
            dcp.load(target, storage_reader=cnr.CNRStorageReader(path), planner=load_planner)
            assert differing(whole(target), cut) == []


def _drop_in(rank: int, root: str, sharding: str) -> None:
    """A writer and reader dropped into a script with DCP's planners; later, a tracker."""
    job = torchrec_job(1, sharding)
    train(job, 1)
    cut = whole(state(job))
    dcp.save(state(job), storage_writer=models.writer(f"{root}/0", quantization=cnr.Asymmetric(4)))
    got = _load_by_default(f"{root}/0", sharding)
    tables = _tables(cut)
    assert set(differing(got, cut)) == set(tables), "tables are known by their names"
    for fqn in tables:
        assert_close(got[fqn], cut[fqn], 4)

    tracked = torchrec_job(3, sharding)
    tracker = cnr.RowTracker(tracked.model)
    restored = models.load(tracked, f"{root}/0", tracker)
    assert differing(restored, got) == []
    train(tracked, 2)
    end = whole(state(tracked))
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    dcp.save(state(tracked), storage_writer=models.writer(f"{root}/1"), planner=planner)
    tracker.close()
    assert cnr.read_checkpoint(f"{root}/1").kind == "delta"
    assert differing(models.load(torchrec_job(4, sharding), f"{root}/1"), end) == []
    assert differing(_load_by_default(f"{root}/1", sharding), end) == []


def _load_by_default(path: str, sharding: str) -> Whole:
    """Load with DCP's planner, where it can: it fails in lists of optimizers when ranks have different keys."""
    job = torchrec_job(5, sharding)
    if sharding in ("table", "mixed"):
        return models.load(job, path)
    dcp.load(state(job), storage_reader=cnr.CNRStorageReader(path))
    return whole(state(job))


@pytest.mark.parametrize("sharding", models.SHARDINGS)
def test_writer_and_reader_dropped_into_a_torchrec_script(tmp_path: Path, rank_pool: RankPools, sharding: str) -> None:
    """With DCP's own planners a save is a quantized baseline; a tracker that comes later makes deltas of it."""
    rank_pool(2).run(_drop_in, str(tmp_path), sharding)


def _nested(job: Job) -> dict[str, Any]:
    return state(job, epoch=3, names=["a", "b"])


def test_loading_by_keys_without_a_target(tmp_path: Path) -> None:
    """DCP makes tensors and values from the checkpoint alone: of a whole lineage, or of the keys asked for."""
    job = adagrad_job(1)
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    for number in range(2):
        train(job, number)
        writer = models.writer(tmp_path / str(number))
        dcp.save(_nested(job), storage_writer=writer, planner=planner)
    tracker.close()
    assert cnr.read_checkpoint(tmp_path / "1").kind == "delta"
    everything = _load_state_dict_from_keys(storage_reader=cnr.CNRStorageReader(tmp_path / "1"))
    assert differing(whole(everything), whole(_nested(job))) == []
    some = _load_state_dict_from_keys(
        {"model.bag.weight", "reader.epoch"}, storage_reader=cnr.CNRStorageReader(tmp_path / "1")
    )
    assert set(some) == {"model", "reader"}
    assert torch.equal(some["model"]["bag.weight"], job.model.state_dict()["bag.weight"])
    assert some["reader"] == {"epoch": 3}


def _by_keys_on_ranks(rank: int, root: str) -> Whole:
    job = torchrec_job(1)
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    for number in range(2):
        train(job, number)
        dcp.save(_nested(job), storage_writer=models.writer(f"{root}/{number}"), planner=planner)
    tracker.close()
    return whole(_nested(job))


def test_loading_a_sharded_lineage_by_keys_in_one_process(tmp_path: Path, rank_pool: RankPools) -> None:
    """What ranks saved in shards, row-wise optimizer state too, is whole tensors to a process that has no group."""
    expected = rank_pool(2).run(_by_keys_on_ranks, str(tmp_path))[0]
    got = _load_state_dict_from_keys(storage_reader=cnr.CNRStorageReader(tmp_path / "1"))
    assert differing(whole(got), expected) == []

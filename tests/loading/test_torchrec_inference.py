"""Checkpoints loaded into quantized TorchRec modules: what these then look up.

What is expected is said by two float models: one that the same checkpoint was loaded into, and that one quantized by
TorchRec. Where the codes of a checkpoint fit into the module, its rows are the first one's, bit for bit; elsewhere they
are within a step of both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchrec.quant
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.tbe.cache.kv_embedding_ops_inference import KVEmbeddingInference
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import SGD
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, KeyedJaggedTensor
from torchrec.inference.modules import quantize_embeddings, quantize_inference_model, shard_quant_model
from torchrec.modules.embedding_configs import DataType
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection
from torchrec.quant.embedding_modules import quant_prep_enable_quant_state_dict_split_scale_bias_for_types

import torchrec_cnr as cnr
from tests.support import models
from tests.support.faults import causes
from tests.support.models import TorchRecModel, state, torchrec_job, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import Shard
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.loading import torchrec_inference
from torchrec_cnr.quantization import fused_bits
from torchrec_cnr.quantization.fbgemm_rows import InferenceRow
from torchrec_cnr.reading import inference_regions
from torchrec_cnr.reading.plan import plan_fold
from torchrec_cnr.reading.regions import TensorRegion
from torchrec_cnr.storage import pack_writer

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]

Rows = dict[str, Tensor]

BITS: Mapping[torch.dtype, int] = {
    torch.qint8: 8,
    torch.quint4x2: 4,
    torch.quint2x4: 2,
    torch.float16: 16,
    torch.float32: 32,
}
SCHEMES: Mapping[str, cnr.Scheme] = {
    "exact": cnr.NoQuantization(),
    "8 bits": cnr.Asymmetric(8),
    "4 bits": cnr.AdaptiveAsymmetric(4),
    "3 bits": cnr.Symmetric(3),
    "2 bits": cnr.AdaptiveAsymmetric(2),
    "k-means": cnr.KMeans(4),
    "half": cnr.HalfPrecision(),
}
BAG_ROWS, ITEM_ROWS, DIM = (37, 24, 5), 29, 8


def float_model(seed: int) -> TorchRecModel:
    """A model as ``torchrec_job`` has one, in one process and of random weights."""
    torch.manual_seed(seed)
    model = TorchRecModel(BAG_ROWS, "t0").to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def quantized(model: nn.Module, dtype: torch.dtype, **options: Any) -> nn.Module:
    """A copy whose collections of both kinds are quantized by TorchRec."""
    return quantize_embeddings(
        model,
        dtype,
        inplace=False,
        additional_qconfig_spec_keys=[EmbeddingCollection],
        additional_mapping={EmbeddingCollection: QuantEmbeddingCollection},
        **options,
    )


def look_up(model: nn.Module, ids: Callable[[int], Tensor]) -> tuple[Any, Any]:
    """One id of each table a sample."""
    num_samples = len(ids(1))
    bags = {f"f{i}": ids(rows) for i, rows in enumerate(BAG_ROWS)}
    features = KeyedJaggedTensor.from_lengths_sync(
        list(bags), torch.cat(list(bags.values())), torch.ones(num_samples * len(bags), dtype=torch.int64)
    )
    items = KeyedJaggedTensor.from_lengths_sync(["item"], ids(ITEM_ROWS), torch.ones(num_samples, dtype=torch.int64))
    return model.ebc(features), model.ec(items)["item"].values()


def looked_up(model: nn.Module) -> Rows:
    """Every row of every table, looked up by itself."""
    with torch.no_grad():
        bags, items = look_up(model, lambda num_rows: torch.arange(max(BAG_ROWS)) % num_rows)
    return {f"t{i}": bags[f"f{i}"][:rows] for i, rows in enumerate(BAG_ROWS)} | {"item": items[:ITEM_ROWS]}


def fit(model: nn.Module, seed: int) -> None:
    """Modify a few rows of every table, and the dense layer."""
    generator = torch.Generator().manual_seed(seed)
    bags, items = look_up(model, lambda num_rows: torch.randint(num_rows, (4,), generator=generator))
    loss = model.over(torch.cat((bags.values(), items), dim=1)).sum() + (bags.values() ** 2).sum() + (items**2).sum()
    loss.backward()
    SGD(model.parameters(), lr=0.2).step()
    model.zero_grad()


def load(model: nn.Module, path: str | Path, **options: Any) -> Rows:
    """Load what a model has of a checkpoint, and look all rows up."""
    planner = cnr.CNRLoadPlanner(**{"allow_partial_load": True} | options)
    dcp.load({"model": model.state_dict()}, storage_reader=cnr.CNRStorageReader(path), planner=planner)
    return looked_up(model)


def load_quantized(model: nn.Module, path: str | Path, **options: Any) -> Rows:
    """Load a checkpoint into a quantized model, and look all rows up."""
    return load(model, path, inference=cnr.InferenceTables(model), **options)


def refused(model: nn.Module, path: str | Path, **options: Any) -> str:
    """Why a load is refused, which is the wrong state's fault and leaves the model as it is."""
    before = looked_up(model)
    with pytest.raises(CheckpointException) as raised:
        load(model, path, **options)
    error = causes(raised.value)[0]
    assert isinstance(error, cnr.StateMismatchError)
    assert all(torch.equal(rows, before[table]) for table, rows in looked_up(model).items())
    return str(error)


def assert_serves(model: nn.Module, path: str | Path, dtype: torch.dtype, takes_over: bool) -> None:
    """A quantized model of other rows has, after the load, those of the checkpoint.

    Args:
        model: The quantized model.
        path: The checkpoint.
        dtype: What its tables are.
        takes_over: Whether they have the checkpoint's very values.
    """
    trained = float_model(101)
    wanted, bits = load(trained, path), BITS[dtype]
    by_torchrec = looked_up(quantized(trained, dtype))
    before, got = looked_up(model), load_quantized(model, path)
    assert got.keys() == wanted.keys()
    for table, rows in got.items():
        if bits > 8:
            assert torch.equal(rows, by_torchrec[table])
        elif takes_over:
            assert torch.equal(rows, wanted[table])
        step = step_of(wanted[table], bits)
        assert bool(((rows - wanted[table]).abs() < step).all())
        assert bool(((rows - by_torchrec[table]).abs() < step * 1.1).all())
        assert bool(((before[table] - wanted[table]).abs() > step).any())
    assert torch.equal(model.over.weight, trained.over.weight)


def step_of(rows: Tensor, bits: int) -> Tensor:
    """[n, 1]: the distance of codes that reach from the least to the greatest value, or a bound for fp16."""
    if bits > 8:
        return torch.full_like(rows[:, :1], 0.01)
    return (rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True)) / (2**bits - 1)


@dataclass(frozen=True)
class Saved:
    """A baseline and two deltas of one model.

    Attributes:
        scheme: Of the tables.
        paths: The checkpoints, oldest first.
    """

    scheme: cnr.Scheme
    paths: tuple[Path, ...]


@pytest.fixture(scope="module", params=SCHEMES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A lineage by every scheme."""
    root, scheme = tmp_path_factory.mktemp("run"), SCHEMES[request.param]
    model = float_model(1)
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    writer = models.writer(root / "0", quantization=scheme)
    paths = tuple(root / str(number) for number in range(3))
    for number, path in enumerate(paths):
        if number:
            fit(model, number)
        dcp.save({"model": model.state_dict()}, checkpoint_id=str(path), storage_writer=writer, planner=planner)
    tracker.close()
    return Saved(scheme, paths)


@pytest.mark.parametrize("dtype", BITS)
def test_quantized_model_serves_a_lineage(saved: Saved, dtype: torch.dtype) -> None:
    """Whatever the scheme, a baseline and its deltas come back: bit for bit where codes fit, else within a step."""
    assert [cnr.read_checkpoint(path).kind for path in saved.paths] == ["baseline", "delta", "delta"]
    bits = fused_bits(saved.scheme)
    model = quantized(float_model(2), dtype)
    for path in (saved.paths[0], saved.paths[2]):
        assert_serves(model, path, dtype, takes_over=bits is not None and bits <= BITS[dtype] <= 8)


def test_later_loads_bring_the_newest_rows(saved: Saved) -> None:
    """A model that serves is brought up to date by loading the head into it once more: to what a fresh one gets."""
    model, fresh = quantized(float_model(2), torch.qint8), quantized(float_model(3), torch.qint8)
    old = load_quantized(model, saved.paths[0])
    new, wanted = load_quantized(model, saved.paths[2]), load_quantized(fresh, saved.paths[2])
    assert all(torch.equal(new[table], wanted[table]) for table in wanted)
    assert not any(torch.equal(new[table], old[table]) for table in wanted)


def _checkpoint(path: Path, model: nn.Module, scheme: cnr.Quantization) -> Path:
    dcp.save({"model": model.state_dict()}, storage_writer=models.writer(path, quantization=scheme))
    return path


def _serve(rank: int, path: str) -> Rows:
    return load_quantized(quantized(float_model(2 + rank), torch.quint4x2), path)


def test_every_rank_of_a_group_gets_all_rows(rank_pool: RankPools, tmp_path: Path) -> None:
    """Ranks that load together, each into a model of its own, get the same."""
    path = _checkpoint(tmp_path / "0", float_model(1), cnr.Asymmetric(8))
    wanted = load_quantized(quantized(float_model(2), torch.quint4x2), path)
    for got in rank_pool(2).run(_serve, str(path)):
        assert all(torch.equal(got[table], rows) for table, rows in wanted.items())


def test_predictions_are_those_of_the_trained_model(tmp_path: Path) -> None:
    """Pools of several rows and the dense layer on top: a model with the checkpoint's codes predicts what was saved."""
    trained, model = float_model(1), quantized(float_model(2), torch.qint8)
    path = _checkpoint(tmp_path / "0", trained, cnr.AdaptiveAsymmetric(4))
    load(trained, path)
    ids = {f"f{i}": torch.arange(8) % rows for i, rows in enumerate(BAG_ROWS)}
    bags = KeyedJaggedTensor.from_lengths_sync(
        list(ids), torch.cat(list(ids.values())), torch.full((12,), 2, dtype=torch.int64)
    )
    items = KeyedJaggedTensor.from_lengths_sync(["item"], torch.arange(8), torch.full((4,), 2, dtype=torch.int64))
    with torch.no_grad():
        wanted, before = trained((bags, items)), model((bags, items))
        load_quantized(model, path)
        torch.testing.assert_close(model((bags, items)), wanted)
    assert not torch.allclose(before, wanted)


def test_every_table_may_have_bits_of_its_own(tmp_path: Path) -> None:
    """Tables of one collection differ in width, as ``per_table_weight_dtype`` says."""
    trained = float_model(1)
    path = _checkpoint(tmp_path / "0", trained, cnr.Asymmetric(4))
    wanted = load(trained, path)
    model = quantized(float_model(2), torch.qint8, per_table_weight_dtype={"t1": torch.quint2x4, "t2": torch.float32})
    got = load_quantized(model, path)
    assert [table for table in wanted if not torch.equal(got[table], wanted[table])] == ["t1"]
    assert bool(((got["t1"] - wanted["t1"]).abs() < step_of(wanted["t1"], 2)).all())


@pytest.mark.parametrize("dtype", BITS)
def test_scale_and_bias_may_be_apart(tmp_path: Path, dtype: torch.dtype) -> None:
    """State dicts with ``weight_qscale`` and ``weight_qbias`` show the same memory, which is written as a whole."""
    path = _checkpoint(tmp_path / "0", float_model(1), cnr.Asymmetric(2))
    other = float_model(2)
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types(other, [EmbeddingBagCollection, EmbeddingCollection])
    model = quantized(other, dtype)
    assert ("ebc.embedding_bags.t0.weight_qscale" in model.state_dict()) == (BITS[dtype] <= 8)
    assert_serves(model, path, dtype, takes_over=True)


def test_model_made_by_quantize_inference_model_is_loaded(tmp_path: Path) -> None:
    """Its state dict has tensors of the kernels, too, which are none of a checkpoint's business."""
    path = _checkpoint(tmp_path / "0", float_model(1), cnr.Asymmetric(8))
    model = quantize_inference_model(float_model(2))
    assert "ebc.tbes.0.weights_tys" in model.state_dict()
    assert_serves(model, path, torch.qint8, takes_over=True)


def test_collection_made_without_floats_is_loaded(tmp_path: Path) -> None:
    """A quantized collection need not be made from a float one; its tables may stand under any key."""
    trained = float_model(1)
    path = _checkpoint(tmp_path / "0", trained, cnr.Asymmetric(4))
    wanted = load(trained, path)
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}",
            embedding_dim=DIM,
            num_embeddings=rows,
            feature_names=[f"f{i}"],
            data_type=DataType.INT4,
        )
        for i, rows in enumerate(BAG_ROWS)
    ]
    ebc = torchrec.quant.EmbeddingBagCollection(tables, is_weighted=False, device=torch.device("cpu"))
    planner = cnr.CNRLoadPlanner(inference=cnr.InferenceTables(ebc), allow_partial_load=True)
    keys = {f"ebc.{key}": value for key, value in ebc.state_dict().items()}
    dcp.load({"model": keys}, storage_reader=cnr.CNRStorageReader(path), planner=planner)
    ids = torch.cat([torch.arange(max(BAG_ROWS)) % rows for rows in BAG_ROWS])
    got = ebc(KeyedJaggedTensor.from_lengths_sync(["f0", "f1", "f2"], ids, torch.ones_like(ids)))
    for i, rows in enumerate(BAG_ROWS):
        assert torch.equal(got[f"f{i}"][:rows], wanted[f"t{i}"])


def test_load_without_anything_left_out_need_not_be_partial(tmp_path: Path) -> None:
    """A checkpoint of the model alone fits a quantized one key by key."""
    path = _checkpoint(tmp_path / "0", float_model(1), cnr.Asymmetric(8))
    model = quantized(float_model(2), torch.qint8)
    got = load_quantized(model, path, allow_partial_load=False)
    assert all(torch.equal(got[table], rows) for table, rows in load(float_model(3), path).items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["exact", "4 bits"])
def test_tables_may_be_of_half_precision(tmp_path: Path, scheme: str, dtype: torch.dtype) -> None:
    """Codes of fp16 and bf16 tables are taken over, too: only rounding to the table's dtype is left out."""
    trained, model = float_model(1), quantized(float_model(2), torch.qint8)
    trained.ebc.to(dtype)
    trained.ec.to(dtype)
    path = _checkpoint(tmp_path / "0", trained, SCHEMES[scheme])
    planner = cnr.CNRLoadPlanner()
    dcp.load({"model": trained.state_dict()}, storage_reader=cnr.CNRStorageReader(path), planner=planner)
    wanted = trained.ebc.embedding_bags["t0"].weight.detach()
    got = load_quantized(model, path)["t0"]
    if scheme == "4 bits":
        assert torch.equal(got.to(dtype), wanted)
    assert bool(((got - wanted.float()).abs() < step_of(wanted.float(), 8)).all())


def _save_lineage(rank: int, root: str, shardings: list[str], scheme: cnr.Scheme) -> models.Whole:
    """A baseline, and a delta under each further sharding, of a few rows a block; returns the model saved last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_writer, "BLOCK_BYTES", 6 * 4 * DIM)
        return _save_checkpoints(root, shardings, scheme)


def _save_checkpoints(root: str, shardings: list[str], scheme: cnr.Scheme) -> models.Whole:
    for number, sharding in enumerate(shardings):
        job = torchrec_job(number, sharding)
        tracker = cnr.RowTracker(job.model)
        if number:
            models.load(job, f"{root}/{number - 1}", tracker, step=0)
        train(job, number)
        dcp.save(
            state(job, step=number),
            checkpoint_id=f"{root}/{number}",
            storage_writer=models.writer(root, quantization=scheme),
            planner=cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive()),
        )
        tracker.close()
    return whole({"model": job.model.state_dict()})


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
    model_saved = rank_pool(2).run(_save_lineage, str(root), shardings, SCHEMES[scheme])[0]
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
    rank_pool(2).run(_save_lineage, str(root), ["column", "mixed"], cnr.Asymmetric(4))
    wanted = load_quantized(quantized(float_model(2), torch.qint8), root / "1")
    folds = []
    fold = inference_regions.turns

    def counted(regions: Any) -> Any:
        folds.extend(fold(regions))
        return fold(regions)

    monkeypatch.setattr(inference_regions, "FLOAT_BYTES", 10 * 4 * DIM)
    monkeypatch.setattr(inference_regions, "_CHUNK_BYTES", 3 * 4 * DIM)
    monkeypatch.setattr("torchrec_cnr.loading.reader.turns", counted)
    got = load_quantized(quantized(float_model(3), torch.qint8), root / "1")
    assert all(torch.equal(got[table], rows) for table, rows in wanted.items())
    assert len(folds) > 9


def test_row_numbers_of_other_rows_are_not_read(rank_pool: RankPools, tmp_path: Path) -> None:
    """A region of few rows of a delta needs the blocks of row numbers that may have some of them, and no others."""
    rank_pool(2).run(_save_lineage, str(tmp_path), ["column", "column"], cnr.NoQuantization())
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
        patch.setattr(inference_regions, "FLOAT_BYTES", budget_rows * num_cols * 4)
        regions = [
            region
            for target in targets
            for region in inference_regions.inference_regions(
                "t", target, row, torch.float32, [_shard(len(target), num_cols // 2)]
            )
        ]
        turns = inference_regions.turns(regions)
        for turn in turns:
            assert sum(region.box.num_rows for region in turn) <= budget_rows
    assert [region for turn in turns for region in turn] == regions
    for region in regions:
        assert isinstance(region, inference_regions.PiecedRegion)
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
    path = _checkpoint(tmp_path / "0", trained, SCHEMES[scheme])
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


_VALUES = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(
    values=hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=_VALUES),
    bits=st.sampled_from([2, 4, 8]),
)
@settings(deadline=None)
def test_rows_of_values_are_within_half_a_step(values: npt.NDArray[np.float32], bits: int) -> None:
    """Any finite value that fp16's scale and bias reach is off by half a step of its row at most."""
    values = np.tile(values, (1, 8 // bits))
    row = InferenceRow(values.shape[1], bits, values.shape[1] * bits // 8 + 7)
    rows = row.of_values(torch.from_numpy(values))
    scale, bias = np.hsplit(_ends(rows), 2)
    got = bias + scale * _codes(rows, row)
    is_finite = np.isfinite(values).all(axis=1)
    assert np.isnan(got[~is_finite]).all()
    reached = values[is_finite].astype(np.float64).clip(-65504.0)
    least = reached.min(axis=1, keepdims=True, initial=65504.0)
    reached = np.minimum(reached, least + 65504.0 * (2**bits - 1))
    assert (np.abs(got[is_finite] - reached) <= scale[is_finite] / 2 * (1 + 1e-6)).all()
    assert not rows[:, -3:].any()


@given(data=st.data(), bits=st.sampled_from([2, 3, 4, 8]), to_bits=st.sampled_from([2, 4, 8]))
@settings(deadline=None)
def test_codes_taken_over_stand_for_the_same_values(data: st.DataObject, bits: int, to_bits: int) -> None:
    """Fused rows of any bytes, in as many bits or more, have the scale, bias and codes that they had."""
    row = InferenceRow(num_cols := 8 // to_bits * data.draw(st.integers(1, 40)), to_bits, num_cols * to_bits // 8 + 9)
    assert row.takes_over(bits) == (bits <= to_bits)
    if not row.takes_over(bits):
        return
    codes = torch.from_numpy(
        data.draw(hnp.arrays(np.uint8, (3, cnr.Asymmetric(bits).row_bytes(num_cols, torch.float32))))
    )
    rows = row.of_codes(codes, bits)
    wanted = np.unpackbits(codes.numpy(), axis=1, bitorder="little")[:, : num_cols * bits]
    np.testing.assert_array_equal(_codes(rows, row), wanted.reshape(3, num_cols, bits) @ (1 << np.arange(bits)))
    assert torch.equal(rows[:, :4], codes[:, -4:])


def _codes(rows: Tensor, row: InferenceRow) -> npt.NDArray[np.int64]:
    packed = rows.numpy()[:, 4 : 4 + row.num_cols * row.bits // 8]
    split = np.unpackbits(packed, axis=1, bitorder="little").reshape(len(rows), row.num_cols, row.bits)
    return np.asarray(split @ (1 << np.arange(row.bits)))


def _ends(rows: Tensor) -> npt.NDArray[np.float64]:
    """[n, 2]: scale and bias."""
    return rows.numpy()[:, :4].copy().view(np.float16).astype(np.float64)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint4x2, torch.quint2x4])
def test_layout_is_that_of_the_kernels(dtype: torch.dtype) -> None:
    """Fused rows that FBGEMM makes, taken over, are byte for byte what TorchRec puts into its kernels."""
    trained, bits = float_model(1), BITS[dtype]
    weight = trained.ebc.embedding_bags["t0"].weight.detach()
    fused = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(weight, bits)
    model = quantized(trained, dtype)
    table = cnr.InferenceTables(model).find(model.state_dict()["ebc.embedding_bags.t0.weight"])
    assert table is not None
    assert torch.equal(table.row.of_codes(fused, bits), table.rows)


def test_trackers_learn_nothing(tmp_path: Path) -> None:
    """A tracker of the model in training keeps its head, its marks and its count of restores."""
    trained = float_model(1)
    tracker = cnr.RowTracker(trained)
    planner, writer = cnr.CNRSavePlanner(tracker), models.writer(tmp_path / "0")
    dcp.save({"model": trained.state_dict()}, storage_writer=writer, planner=planner)
    fit(trained, 1)
    dcp.save({"model": trained.state_dict()}, checkpoint_id=str(tmp_path / "1"), storage_writer=writer, planner=planner)
    fit(trained, 2)

    def known() -> tuple[Any, ...]:
        marks = [(shard.rows.marked.tolist(), shard.rows.since_baseline.tolist()) for shard in tracker.shards]
        return tracker.head, tracker.pending, tracker.num_restores, marks

    before = known()
    assert tracker.num_modified
    load_quantized(quantized(float_model(2), torch.qint8), tmp_path / "1")
    assert known() == before
    with pytest.raises(cnr.ConfigurationError, match="without the tracker"):
        cnr.CNRLoadPlanner(tracker, inference=cnr.InferenceTables(quantized(trained, torch.qint8)))
    tracker.close()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A uint8 target is loaded only as a known table of the right size; messages say the way out."""
    path = _checkpoint(tmp_path / "0", float_model(1), cnr.Asymmetric(8))
    model = quantized(float_model(2), torch.quint4x2)
    for options in ({}, {"inference": cnr.InferenceTables(quantized(float_model(3), torch.quint4x2))}):
        message = refused(model, path, **options)
        assert "embedding_bags.t0.weight' (saved float32, wanted uint8)" in message
        assert "CNRLoadPlanner(inference=InferenceTables(model))" in message
    larger = quantized(TorchRecModel((37, 24, 6), "t0").to_empty(device="cpu"), torch.qint8)
    with pytest.raises(CheckpointException) as raised:
        load_quantized(larger, path)
    assert "'model.ebc.embedding_bags.t2.weight' (saved [5, 8], wanted [6, 8])" in str(causes(raised.value)[0])


def test_table_that_is_not_in_the_checkpoint_is_refused(tmp_path: Path) -> None:
    """Also of a partial load: a table that nobody knows under its name would keep its old rows, unseen."""
    path = _checkpoint(tmp_path / "0", float_model(1), cnr.Asymmetric(8))
    model = quantized(float_model(2), torch.quint4x2)
    planner = cnr.CNRLoadPlanner(inference=cnr.InferenceTables(model), allow_partial_load=True)
    with pytest.raises(CheckpointException) as raised:
        dcp.load({"modle": model.state_dict()}, storage_reader=cnr.CNRStorageReader(path), planner=planner)
    assert isinstance(causes(raised.value)[0], cnr.StateMismatchError)
    assert "4 quantized, and not in the checkpoint: 'modle.ebc.embedding_bags.t0.weight'" in str(
        causes(raised.value)[0]
    )


def _virtual() -> nn.Module:
    model = quantized(float_model(1), torch.qint8)
    model.ebc._emb_modules[0] = KVEmbeddingInference.__new__(KVEmbeddingInference)  # no CPU build has more of it
    return model


def _reversed() -> nn.Module:
    model = quantized(float_model(1), torch.qint8)
    model.ebc._emb_modules[0].reverse_qparam = True
    return model


UNKNOWN: Mapping[str, Callable[[], nn.Module]] = {
    "TorchRecModel has no quantized table": lambda: float_model(1),
    "ebc is a ShardedQuantEmbeddingBagCollection": lambda: shard_quant_model(
        quantize_inference_model(float_model(1)), world_size=2, compute_device="cpu"
    )[0],
    "ebc: table 't0' is on meta": lambda: quantized(TorchRecModel(BAG_ROWS, "t0"), torch.qint8),
    "ebc has virtual tables": _virtual,
    "ebc does not have fp16 scale and bias in front": _reversed,
}


@pytest.mark.parametrize("message", UNKNOWN)
def test_models_that_cannot_be_loaded_are_refused(message: str) -> None:
    """What is no quantized table in the memory of one process is refused by name."""
    model = UNKNOWN[message]()
    with pytest.raises(cnr.ConfigurationError, match=message):
        cnr.InferenceTables(model)


def test_unknown_data_types_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """FBGEMM has more data types than are known here."""
    model = quantized(float_model(1), torch.qint8)
    monkeypatch.delitem(torchrec_inference._BITS, SparseType.INT8)
    with pytest.raises(cnr.ConfigurationError, match="INT8, INT4, INT2, FP16 and FP32 can be loaded"):
        cnr.InferenceTables(model)

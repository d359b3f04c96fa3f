"""Checkpoints loaded into quantized TorchRec modules: what these then look up.

What is expected is said by two float models: one that the same checkpoint was loaded into, and that one quantized by
TorchRec. Where the codes of a checkpoint fit into the module, its rows are the first one's, bit for bit; elsewhere they
are within a step of both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchrec.quant
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.tbe.cache.kv_embedding_ops_inference import KVEmbeddingInference
from torch import nn
from torch.optim import SGD
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, KeyedJaggedTensor
from torchrec.inference.modules import quantize_inference_model, shard_quant_model
from torchrec.modules.embedding_configs import DataType
from torchrec.quant.embedding_modules import quant_prep_enable_quant_state_dict_split_scale_bias_for_types

import torchrec_cnr as cnr
from tests.loading.quantized_models import (
    BAG_ROWS,
    BITS,
    DIM,
    SCHEMES,
    Rows,
    assert_serves,
    float_model,
    load,
    load_quantized,
    look_up,
    quantized,
    refused,
    save_checkpoint,
    step_of,
)
from tests.support import models
from tests.support.faults import failure_of
from tests.support.models import TorchRecModel
from tests.support.ranks import RankPools
from torchrec_cnr.loading import torchrec_inference
from torchrec_cnr.quantization import fused_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]


def fit(model: nn.Module, seed: int) -> None:
    """Modify a few rows of every table, and the dense layer."""
    generator = torch.Generator().manual_seed(seed)
    bags, items = look_up(model, lambda num_rows: torch.randint(num_rows, (4,), generator=generator))
    loss = model.over(torch.cat((bags.values(), items), dim=1)).sum() + (bags.values() ** 2).sum() + (items**2).sum()
    loss.backward()
    SGD(model.parameters(), lr=0.2).step()
    model.zero_grad()


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


def _serve(rank: int, path: str) -> Rows:
    return load_quantized(quantized(float_model(2 + rank), torch.quint4x2), path)


def test_every_rank_of_a_group_gets_all_rows(rank_pool: RankPools, tmp_path: Path) -> None:
    """Ranks that load together, each into a model of its own, get the same."""
    path = save_checkpoint(tmp_path / "0", float_model(1), cnr.Asymmetric(8))
    wanted = load_quantized(quantized(float_model(2), torch.quint4x2), path)
    for got in rank_pool(2).run(_serve, str(path)):
        assert all(torch.equal(got[table], rows) for table, rows in wanted.items())


def test_predictions_are_those_of_the_trained_model(tmp_path: Path) -> None:
    """Pools of several rows and the dense layer on top: a model with the checkpoint's codes predicts what was saved."""
    trained, model = float_model(1), quantized(float_model(2), torch.qint8)
    path = save_checkpoint(tmp_path / "0", trained, cnr.AdaptiveAsymmetric(4))
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
    path = save_checkpoint(tmp_path / "0", trained, cnr.Asymmetric(4))
    wanted = load(trained, path)
    model = quantized(float_model(2), torch.qint8, per_table_weight_dtype={"t1": torch.quint2x4, "t2": torch.float32})
    got = load_quantized(model, path)
    assert [table for table in wanted if not torch.equal(got[table], wanted[table])] == ["t1"]
    assert bool(((got["t1"] - wanted["t1"]).abs() < step_of(wanted["t1"], 2)).all())


@pytest.mark.parametrize("dtype", BITS)
def test_scale_and_bias_may_be_apart(tmp_path: Path, dtype: torch.dtype) -> None:
    """State dicts with ``weight_qscale`` and ``weight_qbias`` show the same memory, which is written as a whole."""
    path = save_checkpoint(tmp_path / "0", float_model(1), cnr.Asymmetric(2))
    other = float_model(2)
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types(other, [EmbeddingBagCollection, EmbeddingCollection])
    model = quantized(other, dtype)
    assert ("ebc.embedding_bags.t0.weight_qscale" in model.state_dict()) == (BITS[dtype] <= 8)
    assert_serves(model, path, dtype, takes_over=True)


def test_model_made_by_quantize_inference_model_is_loaded(tmp_path: Path) -> None:
    """Its state dict has tensors of the kernels, too, which are none of a checkpoint's business."""
    path = save_checkpoint(tmp_path / "0", float_model(1), cnr.Asymmetric(8))
    model = quantize_inference_model(float_model(2))
    assert "ebc.tbes.0.weights_tys" in model.state_dict()
    assert_serves(model, path, torch.qint8, takes_over=True)


def test_collection_made_without_floats_is_loaded(tmp_path: Path) -> None:
    """A quantized collection need not be made from a float one; its tables may stand under any key."""
    trained = float_model(1)
    path = save_checkpoint(tmp_path / "0", trained, cnr.Asymmetric(4))
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
    path = save_checkpoint(tmp_path / "0", float_model(1), cnr.Asymmetric(8))
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
    path = save_checkpoint(tmp_path / "0", trained, SCHEMES[scheme])
    planner = cnr.CNRLoadPlanner()
    dcp.load({"model": trained.state_dict()}, storage_reader=cnr.CNRStorageReader(path), planner=planner)
    wanted = trained.ebc.embedding_bags["t0"].weight.detach()
    got = load_quantized(model, path)["t0"]
    if scheme == "4 bits":
        assert torch.equal(got.to(dtype), wanted)
    assert bool(((got - wanted.float()).abs() < step_of(wanted.float(), 8)).all())


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
    with pytest.raises(cnr.ConfigurationError, match="without a tracker"):
        cnr.CNRLoadPlanner(tracker, inference=cnr.InferenceTables(quantized(trained, torch.qint8)))
    tracker.close()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A uint8 target is loaded only as a known table of the right size; messages say the way out."""
    path = save_checkpoint(tmp_path / "0", float_model(1), cnr.Asymmetric(8))
    model = quantized(float_model(2), torch.quint4x2)
    for options in ({}, {"inference": cnr.InferenceTables(quantized(float_model(3), torch.quint4x2))}):
        message = refused(model, path, **options)
        assert "embedding_bags.t0.weight' (saved float32, wanted uint8)" in message
        assert "CNRLoadPlanner(inference=InferenceTables(model))" in message
    larger = quantized(float_model(2, (*BAG_ROWS[:2], 6)), torch.qint8)
    message = refused(larger, path, inference=cnr.InferenceTables(larger))
    assert "'model.ebc.embedding_bags.t2.weight' (saved [5, 8], wanted [6, 8])" in message


def test_table_that_is_not_in_the_checkpoint_is_refused(tmp_path: Path) -> None:
    """Also of a partial load: a table that nobody knows under its name would keep its old rows, unseen."""
    path = save_checkpoint(tmp_path / "0", float_model(1), cnr.Asymmetric(8))
    model = quantized(float_model(2), torch.quint4x2)
    planner = cnr.CNRLoadPlanner(inference=cnr.InferenceTables(model), allow_partial_load=True)
    state, storage_reader = {"modle": model.state_dict()}, cnr.CNRStorageReader(path)
    error = failure_of(lambda: dcp.load(state, storage_reader=storage_reader, planner=planner))
    assert isinstance(error, cnr.StateMismatchError)
    assert "4 quantized and not in the checkpoint: 'modle.ebc.embedding_bags.t0.weight'" in str(error)


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
    # Without the setting that the tests of sharded models use, TorchRec leaves the tables on the meta device.
    "ebc: table 't0' is on meta; only tables on the CPU": lambda: shard_quant_model(
        quantize_inference_model(float_model(1)), world_size=2, compute_device="cpu"
    )[0],
    "ebc: table 't0' is on meta": lambda: quantized(TorchRecModel(BAG_ROWS, "t0"), torch.qint8),
    "ebc has virtual tables": _virtual,
    "ebc: expected fp16 scale and bias in front of each row": _reversed,
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

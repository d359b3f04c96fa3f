"""TorchRec models, quantized and not, loaded and looked up."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed.global_settings import get_propogate_device, set_propogate_device
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.inference.modules import quantize_embeddings, shard_quant_model
from torchrec.quant.embedding_modules import (
    EmbeddingCollection as QuantEmbeddingCollection,
)
from torchrec.quant.embedding_modules import (
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types,
)

import torchrec_cnr as cnr
from tests.support import models
from tests.support.faults import failure_of
from tests.support.models import TorchRecModel, state, torchrec_job, train, whole
from torchrec_cnr.storage import pack_writer

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


def float_model(seed: int, bag_rows: tuple[int, ...] = BAG_ROWS) -> TorchRecModel:
    """A model as ``torchrec_job`` has one, in one process and of random weights."""
    torch.manual_seed(seed)
    model = TorchRecModel(bag_rows, "t0").to_empty(device="cpu")
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


def sharded(seed: int, dtype: torch.dtype, sharding_types: Mapping[str, str]) -> nn.Module:
    """A quantized model whose tables TorchRec has sharded over two CPU devices of this process, by their names."""
    model = float_model(seed)
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types(model, [EmbeddingBagCollection, EmbeddingCollection])
    constraints = {
        table: ParameterConstraints([sharding_type], ["quant"], min_partition=DIM // 2)
        for table, sharding_type in sharding_types.items()
    }
    result, _ = shard_quant_model(
        quantized(model, dtype), 2, compute_device="cpu", sharding_device="cpu", constraints=constraints
    )
    return result


@contextmanager
def sharded_on_cpus() -> Iterator[None]:
    """Without this, TorchRec puts the tables and features of sharded quantized modules on other devices than asked."""
    before = get_propogate_device()
    set_propogate_device(True)
    yield
    set_propogate_device(before)


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


def load(model: nn.Module, path: str | Path, **options: Any) -> Rows:
    """Load what a model has of a checkpoint, and look all rows up."""
    planner = cnr.CNRLoadPlanner(**{"allow_partial_load": True} | options)
    dcp.load({"model": model.state_dict()}, storage_reader=cnr.CNRStorageReader(path), planner=planner)
    return looked_up(model)


def load_quantized(model: nn.Module, path: str | Path, **options: Any) -> Rows:
    """Load a checkpoint into a quantized model, and look all rows up."""
    return load(model, path, inference=cnr.InferenceTables(model), **options)


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


def refused(model: nn.Module, path: str | Path, **options: Any) -> str:
    """Why a load is refused, which is the wrong state's fault and leaves the model as it is."""
    before = looked_up(model)
    error = failure_of(lambda: load(model, path, **options))
    assert isinstance(error, cnr.StateMismatchError)
    assert all(torch.equal(rows, before[table]) for table, rows in looked_up(model).items())
    return str(error)


def save_checkpoint(path: Path, model: nn.Module, scheme: cnr.Quantization) -> Path:
    """Save a model in one process."""
    dcp.save({"model": model.state_dict()}, storage_writer=models.writer(path, quantization=scheme))
    return path


def save_lineage(rank: int, root: str, shardings: list[str], scheme: cnr.Scheme) -> models.Whole:
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

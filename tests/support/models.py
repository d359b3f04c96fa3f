"""Small models with tables: built, trained, and looked at as a whole.

A ``Job`` is a model with its optimizers. ``plain_job`` has torch's own tables and one ``torch.optim`` optimizer,
``torchrec_job`` has sharded TorchRec tables with fused optimizers beside a dense part, on the ranks of the present gloo
group. ``state`` is what a training script passes to DCP, and ``whole`` what all ranks hold of it, as plain tensors that
share no memory with it: the perfect model that a checkpoint is compared with.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import torchrec_cnr as cnr
from torchrec_cnr.storage.row_log import RowLog

Whole = dict[str, Any]

OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.5),
    "momentum": lambda parameters: SGD(parameters, lr=0.5, momentum=0.5),
    "decay": lambda parameters: SGD(parameters, lr=0.5, weight_decay=0.01),
    "adagrad": lambda parameters: Adagrad(parameters, lr=0.5),
    "rowwise_adagrad": lambda parameters: RowWiseAdagrad(parameters, lr=0.5),
    "adam": lambda parameters: Adam(parameters, lr=0.05),
    "sparse_adam": lambda parameters: SparseAdam(list(parameters), lr=0.05),
}
_TABLES_ONLY = ("rowwise_adagrad", "sparse_adam")
SHARDINGS = ("row", "table", "column", "mixed")

_BAG_ROWS, _ITEM_ROWS, _DIM = (37, 24, 5), 29, 8
_BATCH, _IDS = 4, 2  # samples a batch, ids a feature


@dataclass(eq=False)
class Job:
    """A model in training.

    Attributes:
        model: The model, sharded already.
        optimizers: Those that are no part of the model.
        batch: Makes the model's input from a generator.
    """

    model: nn.Module
    optimizers: Mapping[str, Optimizer]
    batch: Callable[[torch.Generator], Any]


class PlainModel(nn.Module):
    """Two tables of torch's own, and a dense layer."""

    def __init__(self, rows: tuple[int, int], dims: tuple[int, int], sparse: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(rows[0], dims[0], mode="sum", sparse=sparse)
        self.item = nn.Embedding(rows[1], dims[1], sparse=sparse)
        self.over = nn.Linear(sum(dims), 1)

    def forward(self, ids: tuple[Tensor, Tensor]) -> Tensor:
        """[batch, 1]."""
        looked_up = torch.cat((self.bag(ids[0]), self.item(ids[1])), dim=1)
        return torch.as_tensor(self.over(looked_up))


class TorchRecModel(nn.Module):
    """Three pooled tables, one of sequences, and a dense layer."""

    def __init__(self, bag_rows: tuple[int, ...], item_table: str) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=f"t{i}", embedding_dim=_DIM, num_embeddings=rows, feature_names=[f"f{i}"])
                for i, rows in enumerate(bag_rows)
            ],
            device=torch.device("meta"),
        )
        self.ec = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name=item_table, embedding_dim=_DIM, num_embeddings=_ITEM_ROWS, feature_names=["item"])
            ],
            device=torch.device("meta"),
        )
        self.over = nn.Linear(_DIM * (len(bag_rows) + 1), 1)

    def forward(self, features: tuple[KeyedJaggedTensor, KeyedJaggedTensor]) -> Tensor:
        """[batch, 1]."""
        items = self.ec(features[1])["item"].values().view(_BATCH, _IDS, _DIM).sum(dim=1)
        return torch.as_tensor(self.over(torch.cat((self.ebc(features[0]).values(), items), dim=1)))


def plain_job(
    seed: int,
    optimizer: str = "sgd",
    *,
    rows: tuple[int, int] = (40, 12),
    dims: tuple[int, int] = (4, 3),
    sparse: bool = False,
    fresh: bool = False,
) -> Job:
    """A model with an ``nn.EmbeddingBag``, an ``nn.Embedding`` and a dense layer, of random weights.

    Args:
        seed: Of the weights.
        optimizer: A key of `OPTIMIZERS`, for the tables, and for the dense layer where it can.
        rows: Of the two tables.
        dims: Of the two tables.
        sparse: Whether gradients of tables are sparse.
        fresh: Leave state out that an optimizer makes at its first step.
    """
    torch.manual_seed(seed)
    model = PlainModel(rows, dims, sparse or optimizer == "sparse_adam")
    tables = [*model.bag.parameters(), *model.item.parameters()]
    dense = list(model.over.parameters())
    if optimizer in _TABLES_ONLY:
        optimizers = {"tables": OPTIMIZERS[optimizer](tables), "dense": OPTIMIZERS["adagrad"](dense)}
    else:
        optimizers = {"all": OPTIMIZERS[optimizer]([*tables, *dense])}

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        bags = torch.randint(0, rows[0], (_BATCH, _IDS), generator=generator)
        return bags, torch.randint(0, rows[1], (_BATCH,), generator=generator)

    job = Job(model, optimizers, batch)
    if not fresh:
        _make_lazy_state(job)
    return job


def torchrec_job(
    seed: int,
    sharding: str = "mixed",
    *,
    fused: type[Optimizer] = RowWiseAdagrad,
    bag_rows: tuple[int, ...] = _BAG_ROWS,
    item_table: str = "t0",
) -> Job:
    """A TorchRec model under DistributedModelParallel, on the ranks of the present group.

    Args:
        seed: Of the weights; each rank draws its own.
        sharding: One of `SHARDINGS`.
        fused: The tables' optimizer, fused into their backward.
        bag_rows: Of the pooled tables, which are ``t0``, ``t1`` and so on.
        item_table: Name of the table of sequences; as it is, the same as that of a pooled one.
    """
    torch.manual_seed(1000 * seed + dist.get_rank())
    model = TorchRecModel(bag_rows, item_table)
    apply_optimizer_in_backward(fused, [*model.ebc.parameters(), *model.ec.parameters()], {"lr": 0.5})
    dense = list(model.over.parameters())
    plan = {
        "ebc": _module_plan(model.ebc, model.ebc.embedding_bags, EmbeddingBagCollectionSharder(), sharding),
        "ec": _module_plan(model.ec, model.ec.embeddings, EmbeddingCollectionSharder(), sharding),
    }
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.GroupMember.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan),
        sharders=[EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()],
    )

    def batch(generator: torch.Generator) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
        rows = {f"f{i}": rows for i, rows in enumerate(bag_rows)}
        return _features(rows, generator), _features({"item": _ITEM_ROWS}, generator)

    return Job(sharded, {"dense": Adagrad(dense, lr=0.5)}, batch)


def _module_plan(module: nn.Module, names: Iterable[str], sharder: Any, sharding: str) -> Any:
    world_size = dist.get_world_size()
    kinds: Mapping[str, Callable[[int], ParameterShardingGenerator]] = {
        "row": lambda _: row_wise(),
        "table": lambda i: table_wise(rank=i % world_size),
        "column": lambda _: column_wise(ranks=[0, world_size - 1]),
    }
    order = ["row", "column", "table"] if sharding == "mixed" else [sharding]
    return construct_module_sharding_plan(
        module,
        {name: kinds[order[i % len(order)]](i) for i, name in enumerate(names)},
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
        sharder=sharder,
    )


def _features(rows: Mapping[str, int], generator: torch.Generator) -> KeyedJaggedTensor:
    ids = [torch.randint(0, num, (_BATCH * _IDS,), generator=generator) for num in rows.values()]
    lengths = torch.full((_BATCH * len(rows),), _IDS)
    return KeyedJaggedTensor.from_lengths_sync(list(rows), torch.cat(ids), lengths)


def _make_lazy_state(job: Job) -> None:
    """Have optimizers make their state, with a step that changes nothing, as loading into it needs it."""
    before = [parameter.detach().clone() for parameter in job.model.parameters()]
    backward(job, seed=0)
    for optimizer in job.optimizers.values():
        optimizer.step()
        optimizer.zero_grad()
        for states in optimizer.state.values():
            for value in states.values():
                if isinstance(value, Tensor):
                    value.zero_()
    with torch.no_grad():
        for parameter, value in zip(job.model.parameters(), before, strict=True):
            parameter.copy_(value)


def backward(job: Job, seed: int) -> None:
    """Look up a random batch and run its backward; a fused optimizer then has modified its rows."""
    generator = torch.Generator().manual_seed(1000 * seed + (dist.get_rank() if dist.is_initialized() else 0))
    out = job.model(job.batch(generator))
    (out * torch.randn(out.shape, generator=generator)).sum().backward()


def step(job: Job) -> None:
    """Let the optimizers use the gradients."""
    for optimizer in job.optimizers.values():
        optimizer.step()
        optimizer.zero_grad()


def train(job: Job, seed: int) -> None:
    """Train one random batch; ranks draw different ones."""
    backward(job, seed)
    step(job)


def state(job: Job, **reader: Any) -> dict[str, Any]:
    """What is saved of a job: model, optimizers, and plain values such as the place of a data reader."""
    found: dict[str, Any] = {"model": job.model.state_dict(), "reader": reader}
    found |= {f"{name}_optimizer": _optimizer_state(optimizer) for name, optimizer in job.optimizers.items()}
    if isinstance(job.model, DistributedModelParallel):
        found["fused"] = job.model.fused_optimizer.state_dict()
    return found


def _optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer with strings for keys, since DCP does not load values below other keys."""
    found = optimizer.state_dict()
    return {**found, "state": {str(number): dict(states) for number, states in found["state"].items()}}


def whole(state_dict: Mapping[str, Any]) -> Whole:
    """Everything that all ranks hold of a state dict, by FQN: whole tensors, copied, and plain values."""
    mine = {fqn: _pieces(value) for fqn, value in flatten_state_dict(dict(state_dict))[0].items()}
    of_ranks: list[Any] = [mine]
    if dist.is_initialized():
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
    found: Whole = {}
    for of_rank in of_ranks:
        for fqn, piece in of_rank.items():
            if not isinstance(piece, _Pieces):
                found[fqn] = piece
                continue
            tensor = found.setdefault(fqn, torch.zeros(piece.size, dtype=piece.dtype))
            for offsets, values in piece.shards:
                place = tuple(slice(first, first + n) for first, n in zip(offsets, values.shape, strict=True))
                tensor[place] = values
    return found


@dataclass(frozen=True, eq=False)
class _Pieces:
    """What one rank holds of a tensor."""

    size: torch.Size
    dtype: torch.dtype
    shards: list[tuple[list[int], Tensor]]


def _pieces(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        shards = [(list(shard.metadata.shard_offsets), shard.tensor.clone()) for shard in value.local_shards()]
        return _Pieces(value.size(), value.dtype, shards)
    if isinstance(value, DTensor):
        local: Any = value.to_local()
        held = zip(local.local_offsets(), local.local_shards(), strict=False) if local.numel() else ()
        return _Pieces(value.size(), value.dtype, [(list(offsets), shard.clone()) for offsets, shard in held])
    if isinstance(value, Tensor):
        return _Pieces(value.shape, value.dtype, [([0] * value.dim(), value.detach().clone())])
    return value


def differing(first: Whole, second: Whole) -> list[str]:
    """FQNs of what is not the same, bit for bit, or only on one side."""
    return sorted(fqn for fqn in {*first, *second} if not _is_same(first.get(fqn), second.get(fqn)))


def _is_same(first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return type(first) is type(second) and bool(first == second)
    if first.dtype is not second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8))


def writer(path: str | os.PathLike[str], **options: Any) -> cnr.CNRStorageWriter:
    """A writer that does not wait for the disk, since no test pulls the plug."""
    return cnr.CNRStorageWriter(path, **{"sync_files": False} | options)


def save_behind(
    state_dict: dict[str, Any],
    path: str,
    writer: cnr.CNRStorageWriter,
    planner: cnr.CNRSavePlanner,
    *,
    group: dist.ProcessGroup | None = None,
    executor: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
) -> "Future[Any]":
    """Begin a save with the stock ``dcp.async_save``."""
    future = async_save(
        state_dict,
        checkpoint_id=path,
        storage_writer=writer,
        planner=planner,
        process_group=group,
        async_checkpointer_type=executor,
    )
    assert isinstance(future, Future)  # as it is with the writer for a stager
    return future


def agree(job: Job) -> None:
    """Give every rank rank 0's replicated tensors, which they no longer agree in after a load that failed."""
    if dist.is_initialized():
        for value in flatten_state_dict(state(job))[0].values():
            if type(value) is Tensor or isinstance(value, nn.Parameter):
                dist.broadcast(value.detach(), 0)


def load(
    job: Job,
    path: str,
    tracker: cnr.RowTracker | None = None,
    *,
    row_log: RowLog | None = None,
    thread_count: int = 1,
    **reader: Any,
) -> Whole:
    """Load a checkpoint into a job, and return all that it then holds.

    Tensors are those of the live job, not of the state dict that was loaded.
    """
    target = state(job, **reader)
    storage_reader = cnr.CNRStorageReader(path, thread_count=thread_count, row_log=row_log)
    dcp.load(target, storage_reader=storage_reader, planner=cnr.CNRLoadPlanner(tracker))
    for name, optimizer in job.optimizers.items():
        _take_values(optimizer, target[f"{name}_optimizer"]["state"])
    values = {fqn: value for fqn, value in whole(target).items() if not isinstance(value, Tensor)}
    return whole(state(job, **reader)) | values


def _take_values(optimizer: Optimizer, loaded: Mapping[str, Mapping[str, Any]]) -> None:
    """Give an optimizer what is no tensor, such as the number of steps; tensors were loaded in place."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, states in loaded.items():
        own = optimizer.state[parameters[int(number)]]
        own.update({name: value for name, value in states.items() if not isinstance(value, Tensor)})

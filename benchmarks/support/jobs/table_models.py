"""TorchRec tables as in a job: sharded table by table over the ranks, with row-wise Adagrad in their backward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_cnr.format.manifest_json import forget

SAMPLED_EVERY = 97
CHUNK_ROWS = 1 << 16  # rows per lookup when many rows are modified
CPU = torch.device("cpu")


@contextmanager
def one_rank(folder: Path, device: torch.device = CPU) -> Iterator[None]:
    """Create a process group of only this process, for the duration of the context; with NCCL if there is a GPU."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/group", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class TableSizes:
    """The number and sizes of tables.

    Attributes:
        num_tables: Number of tables in one ``EmbeddingBagCollection``.
        num_rows: Rows per table.
        dim: Values per row.
    """

    num_tables: int
    num_rows: int
    dim: int

    def __str__(self) -> str:
        tables = "a table" if self.num_tables == 1 else f"{self.num_tables} tables"
        return f"{tables} of {self.num_rows:,} × {self.dim} fp32 with row-wise Adagrad"


class TableModel:
    """A model that consists only of tables. The process group must exist.

    Attributes:
        sizes: The sizes of its tables.
        device: The device of its tables.
        sharded: The model in ``DistributedModelParallel``.
    """

    def __init__(self, sizes: TableSizes, seed: int = 0, device: torch.device = CPU) -> None:
        torch.manual_seed(seed)
        self.sizes = sizes
        self.device = device
        self._names = [f"t{index}" for index in range(sizes.num_tables)]
        tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=name, embedding_dim=sizes.dim, num_embeddings=sizes.num_rows, feature_names=[f"f_{name}"]
                )
                for name in self._names
            ],
        )
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.05})
        self._num_ranks = dist.get_world_size()
        plan = construct_module_sharding_plan(
            tables,
            {name: table_wise(rank=index % self._num_ranks) for index, name in enumerate(self._names)},
            local_size=self._num_ranks,
            world_size=self._num_ranks,
            device_type=device.type,
        )
        self.sharded = DistributedModelParallel(
            nn.Sequential(tables),
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=device,
            plan=ShardingPlan({"0": plan}),
        )

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint contains; its tensors are the live ones."""
        return {"model": self.sharded.state_dict(), "optim": self.sharded.fused_optimizer.state_dict()}

    def tables(self) -> list[Tensor]:
        """Return the live values of each table. Only for one rank."""
        return [table.local_shards()[0].tensor for table in self.sharded.state_dict().values()]

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the live optimizer state as plain tensors, by name. Only for one rank."""
        states = self.sharded.fused_optimizer.state_dict()["state"]
        return {
            f"{name}.{key}": value.local_shards()[0].tensor
            for name, values in states.items()
            for key, value in values.items()
        }

    def clear(self) -> None:
        """Clear all rows and the cache of manifests, as in a new process."""
        forget()
        for table in self.tables():
            table.zero_()

    def sampled_rows(self) -> Tensor:
        """Return a copy of some rows of every table."""
        return torch.cat([table[::SAMPLED_EVERY] for table in self.tables()])

    def save(self, writer: StorageWriter, planner: SavePlanner | None = None) -> None:
        """Call ``dcp.save`` as a job does; torch does not mark it as exported."""
        dcp.save(self.state(), storage_writer=writer, planner=planner)  # type: ignore[attr-defined]

    def load(self, reader: StorageReader, planner: LoadPlanner | None = None) -> None:
        """Call ``dcp.load`` for the live tables; torch does not mark it as exported, either."""
        dcp.load(self.state(), storage_reader=reader, planner=planner)  # type: ignore[attr-defined]

    def batch(self, ids: Sequence[Tensor], ids_per_sample: int = 1) -> KeyedJaggedTensor:
        """Return a batch that looks up ids of each table.

        Args:
            ids: The ids for each table, int64 [N], with the same N for all.
            ids_per_sample: Number of consecutive ids that are pooled.
        """
        values = torch.cat(list(ids))
        lengths = torch.full((len(values) // ids_per_sample,), ids_per_sample, dtype=torch.int64, device=values.device)
        return KeyedJaggedTensor([f"f_{name}" for name in self._names], values, lengths=lengths)

    def step(self, batch: KeyedJaggedTensor) -> None:
        """Run forward and backward, which includes the optimizer."""
        self.sharded(batch).wait().values().sum().backward()

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of all later steps."""
        optimizer = self.sharded.fused_optimizer
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()  # hands the rate to the tables

    def modify(self, share: float) -> None:
        """Train once on each row of a random share of every table's rows. Each of several ranks takes its part."""
        num_rows = round(share * self.sizes.num_rows / self._num_ranks)
        rows = [torch.randperm(self.sizes.num_rows, device=self.device)[:num_rows] for _ in self._names]
        for chunks in zip(*(table_rows.split(CHUNK_ROWS) for table_rows in rows), strict=True):
            if len(chunks[0]):
                self.step(self.batch(chunks))


def num_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

"""A table with zero-collision hashing: a managed-collision module gives each raw id a row, and evicts old ids.

The optimizer is SGD: on CPUs, FBGEMM cannot reset the state of row-wise Adagrad, which an eviction does.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter
from torch.optim import SGD
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection, MCHEvictionPolicy, MCHManagedCollisionModule
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.support.jobs.table_models import CPU

_FEATURE, _TABLE = "f", "t"
_HOUR = 500_000
_LARGEST_ID = (1 << 62) - 1
_COUNT_EXPONENT = 1.2  # counts of ids are distributed like a Pareto variable with this exponent
_IDS_FQNS = ("_managed_collision_collection.", "hashed.")


class ZchModel:
    """A table, sharded by rows over one rank, whose rows belong to raw ids. The process group must exist.

    Attributes:
        sharded: The model in ``DistributedModelParallel``.
    """

    def __init__(self, num_rows: int, dim: int, policy: Callable[[], MCHEvictionPolicy], steps: int) -> None:
        torch.manual_seed(0)
        self._num_rows, self._steps = num_rows, steps
        config = EmbeddingBagConfig(name=_TABLE, embedding_dim=dim, num_embeddings=num_rows, feature_names=[_FEATURE])
        tables = EmbeddingBagCollection(device=torch.device("meta"), tables=[config])
        apply_optimizer_in_backward(SGD, tables.parameters(), {"lr": 0.05})
        ids = MCHManagedCollisionModule(
            zch_size=num_rows, device=CPU, eviction_policy=policy(), eviction_interval=steps
        )
        module = ManagedCollisionEmbeddingBagCollection(tables, ManagedCollisionCollection({_TABLE: ids}, [config]))
        sharder = ManagedCollisionEmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(
            module, {_TABLE: row_wise()}, local_size=1, world_size=1, device_type="cpu", sharder=sharder
        )
        self.sharded = DistributedModelParallel(
            nn.Sequential(module),
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=CPU,
            plan=ShardingPlan({"0": plan}),
            sharders=[sharder],
        )
        self._fill()

    @property
    def ids(self) -> Any:
        """The sharded managed-collision module."""
        return next(module for module in self.sharded.modules() if isinstance(module, MCHManagedCollisionModule))

    def _fill(self) -> None:
        """Give all rows but the last one ids, with counts and times of earlier steps."""
        ids = self.ids
        raw_ids = torch.randint(_LARGEST_ID, (self._num_rows - 1,)).sort().values
        rows = torch.randperm(self._num_rows - 1)
        counts = torch.rand(self._num_rows - 1).clamp_(min=1e-6).pow_(-1 / _COUNT_EXPONENT).long()
        ids._mch_sorted_raw_ids[:-1] = raw_ids
        ids._mch_remapped_ids_mapping[:-1] = rows
        ids._mch_counts[:-1] = counts
        ids._current_iter_tensor[:] = 100 * self._steps
        if hasattr(ids, "_mch_last_access_iter"):
            ids._mch_last_access_iter[:-1] = torch.randint(100 * self._steps, (self._num_rows - 1,))

    def modify(self, share: float, new_share: float) -> None:
        """Train a share of the rows, each in a random step; a part of them are rows of ids that come in.

        Ids come in, and others are evicted, in the last step.
        """
        num_ids = round(share * self._num_rows)
        num_new = round(new_share * num_ids)
        known = self.ids._mch_sorted_raw_ids[torch.randperm(self._num_rows - 1)[: num_ids - num_new]]
        coming = torch.randint(_LARGEST_ID, (num_new,))
        batches = torch.cat((known, coming))[torch.randperm(num_ids)].chunk(self._steps)
        for batch in batches:
            self._step(batch)
        for batch in coming.chunk(len(batches)) if num_new else ():
            self._step(batch)  # now these ids have rows of their own

    def _step(self, raw_ids: Tensor) -> None:
        features = KeyedJaggedTensor([_FEATURE], raw_ids, lengths=torch.ones(len(raw_ids), dtype=torch.int64))
        pooled, _ = self.sharded(features)
        pooled.wait().values().sum().backward()

    def save(self, writer: StorageWriter, planner: SavePlanner, *, with_ids: bool) -> None:
        """Call ``dcp.save`` of the table and its optimizer state, with or without the buffers of the ids."""
        _save(self.sharded, writer, planner, with_ids=with_ids)


class HashedModel:
    """A table whose rows belong to raw ids by their hash (MPZCH), with the hour of the last use of each row.

    The kernels that look ids up need a GPU, so the buffers are written to as they would.

    Attributes:
        sharded: The model, which is not sharded.
    """

    def __init__(self, num_rows: int, dim: int, hours: int) -> None:
        torch.manual_seed(0)
        self._num_rows, self._hours = num_rows, hours
        self._ids = HashZchManagedCollisionModule(num_rows, CPU, total_num_buckets=1)
        self._ids._hash_zch_identities.data.copy_(torch.randint(_LARGEST_ID, (num_rows, 1)))
        self._ids._hash_zch_metadata = torch.randint(_HOUR - 100, _HOUR, (num_rows, 1), dtype=torch.int32)
        self._table = nn.EmbeddingBag(num_rows, dim, sparse=True)
        self._optimizer = SGD(self._table.parameters(), lr=0.05)
        self.sharded = nn.ModuleDict({"table": self._table, "hashed": self._ids})

    def modify(self, share: float, new_share: float) -> None:
        """Train a share of the rows, in the present hours; a part of them are rows of ids that come in."""
        rows = torch.randperm(self._num_rows)[: round(share * self._num_rows)]
        new_rows = rows[: round(new_share * len(rows))]
        self._ids._hash_zch_identities.data[new_rows] = torch.randint(_LARGEST_ID, (len(new_rows), 1))
        hours = torch.randint(_HOUR, _HOUR + self._hours, (len(rows), 1), dtype=torch.int32)
        self._ids._hash_zch_metadata[rows] = hours
        self._table(rows[:, None]).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self, writer: StorageWriter, planner: SavePlanner, *, with_ids: bool) -> None:
        """Call ``dcp.save`` of the table, with or without the buffers of the ids."""
        _save(self.sharded, writer, planner, with_ids=with_ids)


def _save(model: nn.Module, writer: StorageWriter, planner: SavePlanner, *, with_ids: bool) -> None:
    fqns = [fqn for fqn in model.state_dict() if with_ids or not any(part in fqn for part in _IDS_FQNS)]
    state = {"model": {fqn: value for fqn, value in model.state_dict().items() if fqn in fqns}}
    dcp.save(state, storage_writer=writer, planner=planner)  # type: ignore[attr-defined]

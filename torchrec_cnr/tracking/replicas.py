"""2-D parallel models (``DMPCollection``): replicas of each shard, whose values are averaged now and then.

Each replica marks what it trains. A synchronisation modifies, on every replica, the rows that any of them trained since
the one before, so these are exchanged at that moment, and all replicas mark the union. Between two synchronisations
replicas differ, in values and in marks: a save there stores their shards whole, because only one of them is stored.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.types import ShardingEnv2D, ShardingStrategy

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.tracking.hooks import Hooks, modules_below
from torchrec_cnr.tracking.tracked_tables import TrackedShard


def track_replicas(model: nn.Module, hooks: Hooks, shards: Sequence[TrackedShard]) -> "Replicas | None":
    """What has to be known of a model's replicas, if it has any that are synchronised behind the optimizer.

    Raises:
        ConfigurationError: It has, but cannot be tracked, as where parameters are sharded further between replicas
            (``FULLY_SHARDED``).
    """
    for _, module in modules_below(model):
        if isinstance(module, DMPCollection):
            return Replicas(module, hooks, shards)
    if any(isinstance(getattr(module, "_env", None), ShardingEnv2D) for _, module in modules_below(model)):
        raise ConfigurationError("tables of a 2-D parallel model are tracked with it: pass the DMPCollection itself")
    return None


class Replicas:
    """What this rank's replicas have trained since they were last synchronised."""

    def __init__(self, model: DMPCollection, hooks: Hooks, shards: Sequence[TrackedShard]) -> None:
        if any(context.sharding_strategy is ShardingStrategy.FULLY_SHARDED for context in model._ctxs):
            raise ConfigurationError(
                "DMPCollection with ShardingStrategy.FULLY_SHARDED cannot be tracked: its tables are not in memory "
                "between steps; use ShardingStrategy.DEFAULT, or save it without a tracker"
            )
        self._group = model._default_ctx.replica_pg
        if any(context.replica_pg is not self._group for context in model._submodule_ctxs):
            raise ConfigurationError(
                "DMPCollection with submodule_configs cannot be tracked: its modules have replicas of their own; save "
                "it without a tracker"
            )
        self._shards = shards
        self._has_maps = any(context.hash_zch_modules for context in model._ctxs)
        # Rows that were cut since the last synchronisation, and those marked before it and not cut yet.
        self._cut = [torch.zeros_like(shard.rows.marked) for shard in shards]
        self._synchronised = [torch.zeros_like(shard.rows.marked) for shard in shards]
        hooks.around(model, "sync", self._synchronise)

    @property
    def num_modified(self) -> int:
        """Rows that are marked here, and not by their shards."""
        held = (~shard.rows.marked & rows for shard, rows in zip(self._shards, self._synchronised, strict=True))
        return sum(int(rows.count_nonzero()) for rows in held)

    def before_cut(self) -> None:
        """Have all marks with the shards; those since the last synchronisation, the next one modifies again."""
        for shard, cut, synchronised in zip(self._shards, self._cut, self._synchronised, strict=True):
            cut |= shard.rows.marked
            shard.rows.mark_where(synchronised)
            synchronised.zero_()

    def restored(self) -> None:
        """All replicas hold what was loaded."""
        for mask in (*self._cut, *self._synchronised):
            mask.zero_()

    def _synchronise(self, sync: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        for shard in self._shards:
            shard.check_writes()
        sync(*args, **kwargs)
        for shard, cut, synchronised in zip(self._shards, self._cut, self._synchronised, strict=True):
            rows = shard.rows
            if self._has_maps:  # ids may have moved to other rows
                rows.mark_all()
            modified, since_baseline, frozen = self._united(cut | rows.marked, rows.since_baseline, rows.frozen)
            synchronised |= modified
            cut.zero_()
            rows.marked.zero_()
            rows.unite(since_baseline, frozen)
            shard.accept_writes()

    def _united(self, *masks: Tensor | None) -> Tensor:
        """The rows that any replica has in each mask.

        Replicas need not have all of them, as where a save has failed on one: each exchanges the same, at once.
        """
        like = next(mask for mask in masks if mask is not None)
        united = torch.stack([torch.zeros_like(like) if mask is None else mask for mask in masks]).to(torch.uint8)
        dist.all_reduce(united, dist.ReduceOp.MAX, group=self._group)
        return united.bool()

"""2-D parallel models (``DMPCollection``): replicas of each shard, whose values are averaged from time to time.

Each replica marks the rows that it trains. A synchronization modifies, on every replica, all rows that any replica has
trained since the previous one. So the replicas exchange their marks at that moment, and all mark the union. Between two
synchronizations, replicas differ in values and in marks. A save then stores the shards whole, because it stores only
one of the replicas.
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
    """Track a model's replicas, if it has any that are synchronized after the optimizer's step.

    Raises:
        ConfigurationError: The model has replicas that cannot be tracked, for example because parameters are also
            sharded between replicas (``FULLY_SHARDED``).
    """
    for _, module in modules_below(model):
        if isinstance(module, DMPCollection):
            return Replicas(module, hooks, shards)
    if any(isinstance(getattr(module, "_env", None), ShardingEnv2D) for _, module in modules_below(model)):
        raise ConfigurationError("tables of a 2-D parallel model are tracked with the model: pass the DMPCollection")
    return None


class Replicas:
    """The rows that this rank has trained since its replicas were last synchronized."""

    def __init__(self, model: DMPCollection, hooks: Hooks, shards: Sequence[TrackedShard]) -> None:
        if any(context.sharding_strategy is ShardingStrategy.FULLY_SHARDED for context in model._ctxs):
            raise ConfigurationError(
                "DMPCollection with ShardingStrategy.FULLY_SHARDED cannot be tracked, because its tables are not in "
                "memory between steps: use ShardingStrategy.DEFAULT, or save it without a tracker"
            )
        self._group = model._default_ctx.replica_pg
        if any(context.replica_pg is not self._group for context in model._submodule_ctxs):
            raise ConfigurationError(
                "DMPCollection with submodule_configs cannot be tracked, because its modules have replicas of their "
                "own: save it without a tracker"
            )
        self._shards = shards
        self._has_maps = any(context.hash_zch_modules for context in model._ctxs)
        # Rows frozen since the last synchronization, and rows marked before it that are not frozen yet.
        self._cut = [torch.zeros_like(shard.rows.marked) for shard in shards]
        self._synchronised = [torch.zeros_like(shard.rows.marked) for shard in shards]
        hooks.around(model, "sync", self._synchronise)

    @property
    def num_modified(self) -> int:
        """Number of rows that are marked here, and not by their shards."""
        masks = (~shard.rows.marked & rows for shard, rows in zip(self._shards, self._synchronised, strict=True))
        return sum(int(rows.count_nonzero()) for rows in masks)

    def before_cut(self) -> None:
        """Add all marks to the shards. Rows trained since the last synchronization are kept for the next one."""
        for shard, cut, synchronised in zip(self._shards, self._cut, self._synchronised, strict=True):
            cut |= shard.rows.marked
            shard.rows.mark_where(synchronised)
            synchronised.zero_()

    def restored(self) -> None:
        """Clear all marks after a load, because all replicas hold what was loaded."""
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
        """Return, for each mask, the rows of all replicas.

        A replica may lack some of the masks, for example after a save that failed on it alone. To match the collectives
        of the others, it exchanges zeros instead.
        """
        example = next(mask for mask in masks if mask is not None)
        united_masks = torch.stack([torch.zeros_like(example) if mask is None else mask for mask in masks]).to(
            torch.uint8
        )
        dist.all_reduce(united_masks, dist.ReduceOp.MAX, group=self._group)
        return united_masks.bool()

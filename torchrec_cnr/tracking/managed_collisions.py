"""Managed collisions (zero-collision hashing): rows whose ids are evicted are reset, and so modified.

The id maps themselves are buffers of the model. A checkpoint stores them from the same snapshot, and a delta only what
has changed in them (``id_map_buffers``).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn
from torchrec.distributed.mc_embedding_modules import BaseShardedManagedCollisionEmbeddingCollection
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection
from torchrec.modules.mc_modules import ManagedCollisionModule, MCHManagedCollisionModule

from torchrec_cnr.errors import StateMismatchError
from torchrec_cnr.tracking.hooks import Hooks, modules_below
from torchrec_cnr.tracking.id_map_buffers import IdMapModule
from torchrec_cnr.tracking.tracked_tables import TrackedShard, accounting


def track_evictions(model: nn.Module, hooks: Hooks, shards: Sequence[TrackedShard]) -> None:
    """Mark the rows of evicted ids. TorchRec offers no hook for the method that resets them."""
    for path, module in modules_below(model):
        if not isinstance(module, BaseShardedManagedCollisionEmbeddingCollection):
            continue
        prefix = f"{path}._embedding_module.".removeprefix(".")
        shards_by_table = {
            shard.rows.name.split(".")[-1]: shard for shard in shards if shard.rows.name.startswith(prefix)
        }
        hooks.around(module, "_evict", partial(_evict, shards_by_table))


def _evict(
    shards_by_table: Mapping[str, TrackedShard], evict: Callable[[object], None], evicted: Mapping[str, Tensor | None]
) -> None:
    """Call the method that resets the rows of evicted ids, and mark these rows. Shards are keyed by table name."""
    rows = {shards_by_table[table]: rows for table, rows in evicted.items() if rows is not None}
    with accounting(list(shards_by_table.values())):
        evict(evicted)
        for shard, local_rows in rows.items():
            shard.rows.mark(local_rows)


def find_id_maps(model: nn.Module) -> Sequence[IdMapModule]:
    """Return the managed-collision modules of a model."""
    modules = (module for _, module in modules_below(model) if isinstance(module, ManagedCollisionModule))
    return [
        IdMapModule(
            module,
            module.output_size(),
            tuple(module._mch_metadata) if isinstance(module, MCHManagedCollisionModule) else None,
        )
        for module in modules
    ]


class IdMaps:
    """The id maps of a model, which a load assembles from those of other ranks.

    TorchRec sorts them again only in ``load_state_dict``, and finds no id in a map that is not sorted. An in-place load
    also overwrites how the map is divided among ranks. The next checkpoint would then describe the division of the old
    ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._maps = [
            (path, table, collisions, collisions._output_segments_tensor.clone())
            for path, module in modules_below(model)
            if isinstance(module, ShardedManagedCollisionCollection)
            for table, collisions in module._managed_collision_modules.items()
            if isinstance(collisions, MCHManagedCollisionModule)
        ]

    def restored(self) -> None:
        """Sort the maps after a load.

        Raises:
            StateMismatchError: A map has to be divided at a place where it was not divided when it was saved.
        """
        for path, table, collisions, segments in self._maps:
            try:
                collisions.validate_state()
            except AssertionError as error:
                raise StateMismatchError(
                    f"id map of table {table!r} in {path or 'the model'}: {error}; load on the number of ranks that it "
                    "was saved with, or on a divisor of that number"
                ) from error
            collisions._output_segments_tensor.copy_(segments)

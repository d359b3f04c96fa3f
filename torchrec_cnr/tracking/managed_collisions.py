"""Managed collisions (zero-collision hashing): rows whose ids are evicted are reset, and so modified.

The id maps themselves are buffers of the model, saved whole with every checkpoint, and so from the same cut.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn
from torchrec.distributed.mc_embedding_modules import BaseShardedManagedCollisionEmbeddingCollection
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from torchrec_cnr.errors import StateMismatchError
from torchrec_cnr.tracking.hooks import Hooks, modules_below
from torchrec_cnr.tracking.tracked_tables import TrackedShard, accounting


def track_evictions(model: nn.Module, hooks: Hooks, shards: Sequence[TrackedShard]) -> None:
    """Mark the rows of evicted ids. What resets them, TorchRec offers no hook for."""
    for path, module in modules_below(model):
        if not isinstance(module, BaseShardedManagedCollisionEmbeddingCollection):
            continue
        below = f"{path}._embedding_module.".removeprefix(".")
        of_table = {shard.rows.name.split(".")[-1]: shard for shard in shards if shard.rows.name.startswith(below)}
        hooks.around(module, "_evict", partial(_evict, of_table))


def _evict(
    of_table: Mapping[str, TrackedShard], evict: Callable[[object], None], evicted: Mapping[str, Tensor | None]
) -> None:
    """Called in the place of a method that resets the rows of evicted ids; with shards by the names of their tables."""
    rows = {of_table[table]: rows for table, rows in evicted.items() if rows is not None}
    with accounting(list(of_table.values())):
        evict(evicted)
        for shard, local in rows.items():
            shard.rows.mark(local)


class IdMaps:
    """The id maps of a model, which a load puts together from those of other ranks.

    TorchRec sorts them again in ``load_state_dict`` only, and finds no id in a map that is out of order. It also takes
    over how the map was divided, where this is loaded in place: then the next checkpoint would tell of the old ranks.
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
        """The maps were loaded: sort them.

        Raises:
            StateMismatchError: Ranks have parts of a map that was not divided there when it was saved.
        """
        for path, table, collisions, segments in self._maps:
            try:
                collisions.validate_state()
            except AssertionError as error:
                raise StateMismatchError(
                    f"id map of table {table!r} in {path or 'the model'}: {error}; load under the number of ranks that "
                    "it was saved with, or one that divides it"
                ) from error
            collisions._output_segments_tensor.copy_(segments)

"""Id maps of a served model: a delta has some of their values, in the order of the table's rows.

The module keeps them sorted by raw id. So an update brings a copy of them into the order of rows, writes the rows of
the links into it, sorts it again, and replaces the served maps by it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from torchrec_cnr.loading.id_maps import order_of, sorted_maps
from torchrec_cnr.serving.model_tensors import ModelTensor
from torchrec_cnr.sharding import ShardKey
from torchrec_cnr.tracking.id_map_buffers import ROW_NUMBERS, SORTED_IDS, positions_of_rows


@dataclass(frozen=True, eq=False)
class ServedIdMaps:
    """The sorted id maps of a model.

    Attributes:
        members: For each shard with raw ids, all shards that are sorted with it.
        served: The served values of all of these shards.
        new: Their new values, in the order of rows until :meth:`sort`.
    """

    members: Mapping[ShardKey, Sequence[ShardKey]]
    served: Mapping[ShardKey, Tensor]
    new: dict[ShardKey, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, targets: Sequence[ModelTensor]) -> "ServedIdMaps":
        """Return the id maps among the tensors of a model."""
        members: dict[ShardKey, list[ShardKey]] = {}
        for ids_fqn, fqns in sorted_maps([target.fqn for target in targets]).items():
            for target in targets:
                if target.fqn in fqns:
                    members.setdefault((ids_fqn, target.box.offsets), []).append(target.key)
        keys = {key for shards in members.values() for key in shards}
        return cls(members, {target.key: target.tensor for target in targets if target.key in keys})

    def __contains__(self, key: ShardKey) -> bool:
        return key in self.served

    def in_row_order(self, key: ShardKey) -> Tensor | None:
        """Return a copy of the served values of a shard, in the order of rows; None if it has no such order."""
        ids = next(ids for ids, shards in self.members.items() if key in shards)
        numbers = ids[0].removesuffix(SORTED_IDS) + ROW_NUMBERS, ids[1]
        if ids not in self.served or numbers not in self.served:
            return None
        positions = positions_of_rows(self.served[ids], self.served[numbers])
        return None if positions is None else self.served[key].index_select(0, positions)

    def sort(self) -> None:
        """Sort the new values."""
        for ids, shards in self.members.items():
            if ids in self.new and (order := order_of(self.new[ids])) is not None:
                for values in [self.new[key] for key in shards if key in self.new]:
                    values.copy_(values.index_select(0, order.to(values.device)))

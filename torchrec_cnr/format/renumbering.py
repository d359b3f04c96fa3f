"""Renumbering: the parts of a manifest with their blobs put elsewhere, and what was shared still shared."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torchrec_cnr.format.manifest import Shard, TensorEntry
from torchrec_cnr.format.row_sets import Blob, RowBlock, RowSet


def moved_block(block: RowBlock, place: Callable[[Blob], Blob]) -> RowBlock:
    """A block of row numbers with its code put elsewhere."""
    if block.blob is None:
        return block
    return RowBlock(block.coding, block.first, block.span, block.num_rows, place(block.blob))


@dataclass
class Renumbering:
    """Gives every blob another place.

    Attributes:
        blob: The place of a blob.
    """

    blob: Callable[[Blob], Blob]
    _row_sets: dict[int, tuple[RowSet, RowSet]] = field(default_factory=dict)

    def rows(self, rows: RowSet) -> RowSet:
        """One object for what was one object."""
        found = self._row_sets.get(id(rows))
        if found is None:  # kept with what it came from, whose id would be another's otherwise
            found = self._row_sets[id(rows)] = (rows, RowSet(tuple(map(self._block, rows.blocks))))
        return found[1]

    def _block(self, block: RowBlock) -> RowBlock:
        return moved_block(block, self.blob)

    def shard(self, shard: Shard) -> Shard:
        """A shard, its row set included."""
        rows, blobs = self.rows(shard.rows), tuple(map(self.blob, shard.blobs))
        return Shard(shard.box, rows, blobs, shard.scheme, shard.table_box)

    def tensor(self, entry: TensorEntry) -> TensorEntry:
        """A tensor's shards."""
        return replace(entry, shards=tuple(map(self.shard, entry.shards)))

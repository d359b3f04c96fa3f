"""Copying: the live rows of victims go into new packs, and so does what stays as it is but lies in one.

What is in memory at a time is bounded: tables are gone through window of rows by window, and no more than a few blocks
are being filled, however many shards and ages of rows there are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import DTYPES, Shard, TensorEntry
from torchrec_cnr.format.renumbering import Renumbering
from torchrec_cnr.format.row_sets import Blob, RowBlock, RowSet
from torchrec_cnr.maintenance.compaction.live_rows import LiveRows, Piece, live_rows, pieces_of, windows
from torchrec_cnr.maintenance.compaction.new_packs import NewPacks, RowGroupKey, RowLayout
from torchrec_cnr.maintenance.compaction.plan import CompactionPlan
from torchrec_cnr.maintenance.compaction.row_groups import CACHE_BYTES, BlobCache, CodedBlock, Group
from torchrec_cnr.quantization import NoQuantization
from torchrec_cnr.storage.pack_reader import PackReader

_MAX_WAITING = 6  # of a tensor's blocks that are being filled, counted in full ones


@dataclass(eq=False)
class _Moved:
    """A new shard: what it is like, the last shard that it takes rows from, their blobs' sizes, what was written."""

    group: Group
    kind: RowGroupKey
    behind: int = 0
    source_bytes: int = 0
    blocks: list[tuple[RowBlock, Blob]] = field(default_factory=list)

    @property
    def box(self) -> Box:
        """Where it lies; for row-wise optimizer state, in its table."""
        return self.group.shard.table_box or self.group.shard.box

    def ends_within(self, window: Box) -> bool:
        """Whether windows behind this one have no rows of it."""
        return self.box.first_row + self.box.num_rows <= window.first_row + window.num_rows


class Copying:
    """Works out what a new manifest holds, and writes what of that is new.

    Args:
        plan: The compaction.
        packs: Where to.
        reader: Reads the packs that there are.
    """

    def __init__(self, plan: CompactionPlan, packs: NewPacks, reader: PackReader) -> None:
        self._plan = plan
        self._packs = packs
        self._reader = reader
        self._where = plan.newest.store.url
        self._row_sets: dict[RowSet, RowSet] = {}
        self._copied: dict[Blob, Blob] = {}

    def run(self) -> tuple[Mapping[str, TensorEntry], Mapping[str, Blob]]:
        """Copy everything: the tensors and objects of the new manifest."""
        self._copy_blobs()
        tensors = {fqn: self._tensor(fqn, entry) for fqn, entry in self._plan.flat.tensors.items()}
        return tensors, {fqn: self._place(blob) for fqn, blob in self._plan.flat.objects.items()}

    def _copy_blobs(self) -> None:
        """Copy what victims hold that stays as it is: tensors that are not folded, objects, row numbers of others."""
        wanted: dict[str, tuple[Blob, RowLayout | None]] = {}
        for fqn, blob in self._plan.flat.objects.items():
            wanted[f"object '{fqn}'"] = (blob, None)
        for fqn, entry in self._plan.flat.tensors.items():
            for piece in pieces_of(fqn, entry):
                if entry.folded is None:
                    typed = _typed(entry.dtype, entry.shards[piece.shard], piece.rows.num_rows, piece.blob.num_bytes)
                    wanted[piece.key] = (piece.blob, typed)
                elif piece.rows.blob is not None and self._stays(piece):
                    wanted[f"rows of {piece.key}"] = (piece.rows.blob, None)
        keys = {blob: key for key, (blob, _) in wanted.items() if blob.pack in self._plan.victims}
        for key, data in self._reader.read((key, blob) for blob, key in keys.items()):
            blob, typed = wanted[key]
            # A copy of its own: what was read is a view of all that was read with it.
            self._copied[blob] = self._packs.add(self._packs.kind_of(blob), key, data.copy(), typed)

    def _place(self, blob: Blob) -> Blob:
        """Where a blob that stays as it is will lie."""
        return self._copied.get(blob, blob)

    def _stays(self, piece: Piece) -> bool:
        """Whether the rows of a folded tensor's piece stay where they are."""
        is_live = self._plan.num_live[piece.fqn, piece.shard, piece.number] > 0
        return is_live and piece.blob.pack not in self._plan.victims

    def _tensor(self, fqn: str, entry: TensorEntry) -> TensorEntry:
        """A tensor, with new shards for what is moved."""
        if entry.folded is None:
            return Renumbering(self._place).tensor(entry)
        pieces = pieces_of(fqn, entry)
        taken = self._taken(fqn, entry, [piece for piece in pieces if piece.blob.pack in self._plan.victims])
        new = list({id(shard): shard for shard in taken.values()}.values())
        num_parts = len({shard.box.offsets[1:] for shard in new})  # of a row, in shards of other columns
        for window in windows(self._plan.flat.row_space(entry), num_parts) if new else ():
            self._move_window(fqn, pieces, window, taken)
            for shard in new:
                if shard.ends_within(window):
                    self._write(fqn, shard, shard.group.flush())
        return replace(entry, shards=tuple(self._shards(entry, pieces, new)))

    def _move_window(self, fqn: str, pieces: Sequence[Piece], window: Box, taken: Mapping[int, _Moved]) -> None:
        found: dict[int, tuple[_Moved, list[LiveRows]]] = {}
        for live in live_rows(pieces, window, self._reader, f"{self._where}: tensor {fqn!r}", is_filled=False):
            if len(live.rows) and live.piece.blob.pack in self._plan.victims:
                shard = taken[live.piece.shard]
                found.setdefault(id(shard), (shard, []))[1].append(live)
        for shard, rows in found.values():
            self._write(fqn, shard, shard.group.add(rows))
            self._limit_waiting(fqn, taken)

    def _limit_waiting(self, fqn: str, taken: Mapping[int, _Moved]) -> None:
        """Write the fullest block before it is full where many are being filled."""
        groups = {id(shard.group): shard for shard in taken.values()}
        fullest = max(groups.values(), key=lambda shard: shard.group.fill)
        if sum(shard.group.fill for shard in groups.values()) > _MAX_WAITING:
            self._write(fqn, fullest, fullest.group.flush())

    def _taken(self, fqn: str, entry: TensorEntry, pieces: Sequence[Piece]) -> dict[int, _Moved]:
        """Which new shard takes the rows of each old one, by the old one's index: at any time, each needs a blob."""
        cache = BlobCache(self._reader)
        by_kind: dict[object, _Moved] = {}
        moved: dict[int, _Moved] = {}
        for piece in pieces:
            if piece.shard in moved:
                continue
            shard, kind = entry.shards[piece.shard], self._packs.kind_of(piece.blob)
            is_partial = (fqn, piece.shard) in self._plan.partial
            key = piece.shard if is_partial else (shard.place, shard.scheme, kind)
            if key not in by_kind or by_kind[key].source_bytes + piece.blob.num_bytes > CACHE_BYTES:
                group = Group(shard, entry.dtype, self._block_rows(entry, piece), cache, self._where)
                by_kind[key] = _Moved(group, kind)
            moved[piece.shard] = by_kind[key]
            moved[piece.shard].source_bytes += piece.blob.num_bytes
            moved[piece.shard].behind = piece.shard
        return moved

    def _block_rows(self, entry: TensorEntry, piece: Piece) -> int:
        """As many rows as a table's blocks have, so that its state has them too, and row numbers are shared."""
        dtype = entry.dtype if entry.table is None else self._plan.flat.tensors[entry.table].dtype
        return max(1, self._packs.block_bytes // max(1, piece.place.num_cols * DTYPES[dtype].itemsize))

    def _write(self, fqn: str, shard: _Moved, blocks: Iterator[CodedBlock]) -> None:
        for block in blocks:
            name = f"{fqn}{list(shard.group.shard.box.offsets)}/{len(shard.blocks)}"
            rows = self._packs.add_rows(shard.kind, f"{name}/rows", block.rows)
            data = block.data(shard.group.tail_bytes)
            typed = _typed(shard.group.dtype, shard.group.shard, len(block), data.nbytes)
            shard.blocks.append((rows, self._packs.add(shard.kind, name, data, typed)))

    def _shards(self, entry: TensorEntry, pieces: Sequence[Piece], moved: Sequence[_Moved]) -> Iterator[Shard]:
        """Old shards without what is dead or was moved, and each new one behind the last that it took rows from."""
        stay: dict[int, list[Piece]] = {}
        for piece in pieces:
            if self._stays(piece):
                stay.setdefault(piece.shard, []).append(piece)
        for index, shard in enumerate(entry.shards):
            if index in stay:
                rows = self._row_set([self._rows(piece.rows) for piece in stay[index]])
                yield replace(shard, rows=rows, blobs=tuple(piece.blob for piece in stay[index]))
            for new in moved:
                if new.behind == index and new.blocks:
                    rows = self._row_set([rows for rows, _ in new.blocks])
                    yield replace(new.group.shard, rows=rows, blobs=tuple(blob for _, blob in new.blocks))

    def _rows(self, rows: RowBlock) -> RowBlock:
        return rows if rows.blob is None else replace(rows, blob=self._place(rows.blob))

    def _row_set(self, blocks: Sequence[RowBlock]) -> RowSet:
        """One object for shards that share all blocks."""
        rows = RowSet(tuple(blocks))
        return self._row_sets.setdefault(rows, rows)


def _typed(dtype: str, shard: Shard, num_rows: int, num_bytes: int) -> RowLayout | None:
    """What rows of a shard are in a pack, if they are stored as values, and not split."""
    is_plain = num_bytes == num_rows * shard.box.num_cols * DTYPES[dtype].itemsize
    has_values = is_plain and isinstance(shard.scheme, NoQuantization)
    return (dtype, (num_rows, *shard.box.sizes[1:])) if has_values else None

"""What the packs of a lineage are worth: how much of each a load still sees. Row numbers are all that is read."""

from collections.abc import Mapping
from dataclasses import dataclass

from torchrec_cnr.lineage import Checkpoint
from torchrec_cnr.maintenance.flattening import Flat
from torchrec_cnr.maintenance.liveness import live_rows, pieces_of, windows
from torchrec_cnr.manifest import Pack
from torchrec_cnr.pack_reader import PackReader
from torchrec_cnr.row_sets import RowBlock

PieceKey = tuple[str, int, int]  # FQN, index of the shard, number of the blob


@dataclass(frozen=True)
class PackUse:
    """What a pack of a lineage is worth.

    Attributes:
        pack: The pack.
        live_bytes: What of it a load still sees.
        written_ns: When the newest of its rows was stored first, Unix time in nanoseconds.
    """

    pack: Pack
    live_bytes: int
    written_ns: int

    @property
    def dead_bytes(self) -> int:
        """What of it a load reads in vain, or never."""
        return self.pack.num_bytes - self.live_bytes

    @property
    def moved_bytes(self) -> int:
        """What is copied if the pack is rewritten; of one without live rows, nothing."""
        return self.live_bytes - self.pack.header_bytes


def survey(
    newest: Checkpoint, flat: Flat, reader: PackReader, is_filled: bool
) -> tuple[dict[PieceKey, int], frozenset[tuple[str, int]]]:
    """Count live rows, window by window.

    Args:
        newest: The newest checkpoint of the lineage.
        flat: All that the lineage holds.
        reader: Reads the packs of ``flat``.
        is_filled: Whether every row must be stored.

    Returns:
        Live rows of each piece of the folded tensors; and the shards, by FQN and index, with rows that were overwritten
        in some columns only.

    Raises:
        DamagedError: Row numbers are not what was committed, or a row is nowhere stored.
        StoreError: A pack cannot be read.
    """
    num_live: dict[PieceKey, int] = {}
    partial: set[tuple[str, int]] = set()
    for fqn, entry in flat.tensors.items():
        if entry.folded is None:
            continue
        pieces = pieces_of(fqn, entry)
        num_live |= {(fqn, piece.shard, piece.number): 0 for piece in pieces}
        for window in windows(flat.row_space(entry)):
            for found in live_rows(pieces, window, reader, f"{newest.store.url}: tensor {fqn!r}", is_filled):
                num_live[fqn, found.piece.shard, found.piece.number] += len(found.rows)
                if found.is_partial:
                    partial.add((fqn, found.piece.shard))
    return num_live, frozenset(partial)


def uses_of(flat: Flat, num_live: Mapping[PieceKey, int]) -> tuple[PackUse, ...]:
    """What each pack of ``flat`` is worth, from :func:`survey`'s counts."""
    live = [float(pack.header_bytes) for pack in flat.packs]
    for blob in flat.objects.values():
        live[blob.pack] += blob.num_bytes
    row_shares: dict[RowBlock, float] = {}  # shared by a table and its state: they live while any does
    for fqn, entry in flat.tensors.items():
        for piece in pieces_of(fqn, entry):
            share = num_live.get((fqn, piece.shard, piece.number), piece.rows.num_rows) / piece.rows.num_rows
            live[piece.blob.pack] += share * piece.blob.num_bytes
            if piece.rows.blob is not None:
                before = row_shares.get(piece.rows, 0.0)
                row_shares[piece.rows] = max(before, share)
                live[piece.rows.blob.pack] += (row_shares[piece.rows] - before) * piece.rows.blob.num_bytes
    uses = zip(flat.packs, live, flat.written_ns, strict=True)
    return tuple(PackUse(pack, round(num_bytes), written_ns) for pack, num_bytes, written_ns in uses)

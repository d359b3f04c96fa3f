"""How ``write`` replaces a manifest: a compaction that leaves every choice to its caller.

What a load would overwrite is left out, blobs in some packs are copied into packs of the replacement's own, and all
others stay where they are.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.coverage import Coverage
from torchrec_cnr.format.manifest import CheckpointRef, History, Manifest, Pack, Shard, TensorEntry
from torchrec_cnr.format.manifest import replacement_name as name_of_replacement
from torchrec_cnr.format.row_sets import Blob, CodedRows, RowBlock, RowNumbers, RowSet, decode_row_numbers
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_lineage, relative_path
from torchrec_cnr.storage.pack_reader import PackReader
from torchrec_cnr.storage.pack_writer import PackWriter
from torchrec_cnr.storage.store import Store


@dataclass(frozen=True)
class _Kept:
    """Blocks of a shard that are not dead."""

    link: Checkpoint
    shard: Shard
    blocks: tuple[tuple[RowBlock, Blob], ...]


def replace_manifest(folder: Path, base: str | None = None, moved: Collection[str] = ()) -> Manifest:
    """Fold a checkpoint's lineage into it.

    Args:
        folder: The checkpoint.
        base: Name of the checkpoint beside it that stays its parent; None to fold the baseline, too.
        moved: Names of packs whose blobs are copied.
    """
    checkpoints = read_lineage(folder).checkpoints
    *below, newest = checkpoints
    first = 0 if base is None else 1 + [link.store.path.rpartition("/")[2] for link in checkpoints].index(base)
    links = checkpoints[first:]
    kept = {fqn: list(_kept(links, fqn)) for fqn, entry in newest.manifest.tensors.items()}
    files = _Files(newest, moved, f"f01d{newest.manifest_sha256[:12]}")
    for shards in kept.values():
        for part in shards:
            for rows, blob in part.blocks:
                files.take(part.link, *([blob] if rows.blob is None else [rows.blob, blob]))
    for blob in newest.manifest.objects.values():
        files.take(newest, blob)
    packs = files.finish()
    parent = None
    if base is not None:
        parent = CheckpointRef(str(relative_path(newest.store, below[first - 1].store.url)), below[first - 1].sha256)
    manifest = replace(
        newest.manifest,
        created_ns=newest.created_ns + 10**18,  # newer than any child: only manifest.json is compared
        save_id=files.save_id,
        parent=parent,
        world_size=1,
        writer="tests.golden",
        replaces=newest.manifest_sha256,
        packs=packs,
        tensors={fqn: _entry(newest.manifest.tensors[fqn], kept[fqn], files) for fqn in kept},
        objects={fqn: files.place(newest, blob) for fqn, blob in newest.manifest.objects.items()},
    )
    below_bytes = None if base is None else below[first - 1].manifest.history
    num_bytes = manifest.blob_bytes
    history = (
        History(num_bytes)
        if below_bytes is None
        else replace(below_bytes, delta_bytes=(*below_bytes.delta_bytes, num_bytes))
    )
    manifest = replace(manifest, history=history)
    name = name_of_replacement(newest.manifest_sha256)
    newest.store.put_new(name, manifest_json.dumps(manifest)[0], files.save_id)
    return manifest


def _kept(links: Iterable[Checkpoint], fqn: str) -> Iterable[_Kept]:
    """What of a tensor is not dead, oldest first."""
    shards: list[tuple[Checkpoint, Shard]] = []
    *_, newest = links
    for link in reversed(list(links)):
        shards += ((link, shard) for shard in reversed(link.manifest.tensors[fqn].shards))
        if link.manifest.tensors[fqn].is_whole:
            break
    head = newest.manifest.tensors[fqn]
    if head.is_whole:
        return [_Kept(newest, shard, tuple(_blocks(shard))) for shard in head.shards]
    size = head.size if head.table is None else newest.manifest.tensors[head.table].size
    coverage = Coverage(Box.whole(size), [shard.table_box or shard.box for _, shard in shards if shard.blobs])
    found = []
    for link, shard in shards:
        place = shard.table_box or shard.box
        alive = [pair for pair in _blocks(shard) if not coverage.parts(place, _numbers(link, pair[0])).all()]
        for rows, _ in _blocks(shard):
            coverage.add(place, _numbers(link, rows))
        if alive:
            found.append(_Kept(link, shard, tuple(alive)))
    return reversed(found)


def _blocks(shard: Shard) -> Iterable[tuple[RowBlock, Blob]]:
    return zip(shard.rows.blocks, shard.blobs, strict=True) if shard.blobs else ()


def _numbers(link: Checkpoint, rows: RowBlock) -> RowNumbers | slice:
    if rows.coding == "all" or rows.blob is None:
        return slice(rows.first, rows.first + rows.span)
    data = _bytes(link, rows.blob)
    return decode_row_numbers(CodedRows(rows.coding, rows.first, rows.span, data), rows.num_rows, "row block")


def _bytes(link: Checkpoint, blob: Blob) -> bytes:
    ((_, data),) = PackReader(link.store, link.manifest.packs, 1).read([("blob", blob)])
    return data.tobytes()


def _entry(entry: TensorEntry, kept: list[_Kept], files: "_Files") -> TensorEntry:
    """The tensor as the replacement has it."""
    shards = []
    for part in kept:
        blocks = (
            replace(rows, blob=None if rows.blob is None else files.place(part.link, rows.blob))
            for rows, _ in part.blocks
        )
        codes = tuple(files.place(part.link, blob) for _, blob in part.blocks)
        shards.append(replace(part.shard, rows=RowSet(tuple(blocks)), blobs=codes))
    return replace(entry, shards=tuple(shards), folded=None if entry.is_whole else entry.places)


class _Files:
    """The packs of a replacement, and where blobs of a lineage are in them."""

    def __init__(self, newest: Checkpoint, moved: Collection[str], save_id: str) -> None:
        self.save_id = save_id
        self._newest = newest
        self._moved = moved
        self._writer = PackWriter(newest.store, f"{save_id}-0", 1)
        self._copies: dict[tuple[str, str, int], int] = {}  # directory, file and offset of what is copied
        self._others: dict[Pack, None] = {}
        self._packs: tuple[Pack, ...] = ()
        self._blobs: tuple[Blob, ...] = ()

    def take(self, link: Checkpoint, *blobs: Blob) -> None:
        """Blobs will be used."""
        for blob in blobs:
            pack = self._pack(link, blob)
            if pack.name not in self._moved:
                self._others.setdefault(pack)
            elif (key := (str(pack.directory), pack.name, blob.offset)) not in self._copies:
                data = np.frombuffer(_bytes(link, blob), dtype=np.uint8)
                self._copies[key] = self._writer.add(f"{len(self._copies)}", "uint8", data.shape, data)

    def finish(self) -> tuple[Pack, ...]:
        """Write the copies; all packs."""
        own, self._blobs = self._writer.finish()
        self._writer.close()
        self._packs = (*own, *self._others)
        return self._packs

    def place(self, link: Checkpoint, blob: Blob) -> Blob:
        """Where a blob is."""
        pack = self._pack(link, blob)
        number = self._copies.get((str(pack.directory), pack.name, blob.offset))
        return replace(blob, pack=self._packs.index(pack)) if number is None else self._blobs[number]

    def _pack(self, link: Checkpoint, blob: Blob) -> Pack:
        """A blob's pack as the replacement names it."""
        pack = link.manifest.packs[blob.pack]
        store: Store = link.store if pack.directory is None else link.store.at(pack.directory)
        return replace(pack, directory=relative_path(self._newest.store, store.url))


def used_packs(manifest: Manifest) -> Mapping[str, set[str]]:
    """Names of packs by directory; ``""`` is its own."""
    found: dict[str, set[str]] = {}
    for pack in manifest.packs:
        found.setdefault(pack.directory or "", set()).add(pack.name)
    return found

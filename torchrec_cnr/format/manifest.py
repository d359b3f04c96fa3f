"""The manifest: the one object that describes a checkpoint and, by being there, commits it.

This module has values only. ``manifest_json`` writes and reads them as JSON; docs/reference/format.md specifies each
field. A pack of rows that streamed through Kafka is a pack like any other, with its place in the topic (``LogRange``).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from torchrec_cnr.format.blob_bytes import exact_row_bytes
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.row_sets import Blob, RowBlock, RowSet
from torchrec_cnr.quantization import Scheme


@dataclass(frozen=True)
class LogRange:
    """A pack in a log, cut into records of one size but the last.

    Attributes:
        topic: The log.
        partition: Of the log.
        first: Offset of its first record.
        last: Offset of its last; records of others may lie between them.
        part_bytes: Size of each record but the last, which has what is left.
        key: What the keys of its records begin with, in a log that keeps the last record of each key; None if they are
            the pack's name.
    """

    topic: str
    partition: int
    first: int
    last: int
    part_bytes: int
    key: str | None = None

    def __str__(self) -> str:
        return f"topic {self.topic!r} partition {self.partition} offsets {self.first} to {self.last}"

    def num_parts(self, num_bytes: int) -> int:
        """How many records a pack of that size has."""
        return -(-num_bytes // self.part_bytes)


MANIFEST_FILE = "manifest.json"
PACK_SUFFIX = ".safetensors"
UNCOMMITTED_SUFFIX = ".uncommitted.json"  # of a manifest that waits for its marker

CheckpointKind = Literal["baseline", "delta"]

_DTYPE_NAMES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES}


@dataclass(frozen=True)
class Pack:
    """A data file: a safetensors header, then blobs without holes.

    Attributes:
        name: File name within its directory.
        num_bytes: Size of the file.
        header_bytes: Size of the safetensors header, its length field included.
        header_crc32c: Its digest.
        directory: Of another checkpoint, relative to this one's; None for this one's own.
        written_ns: When the newest of its rows was stored first, Unix time in nanoseconds; None for the commit's.
        heat: How often its rows were stored lately, when they were stored first, from 0 to 3.
        log: Where it lies if it is no file.
    """

    name: str
    num_bytes: int
    header_bytes: int
    header_crc32c: int
    directory: str | None = None
    written_ns: int | None = None
    heat: int = 0
    log: LogRange | None = None

    @property
    def is_own_file(self) -> bool:
        """Whether it is a file of the checkpoint's own directory."""
        return self.directory is None and self.log is None


@dataclass(frozen=True)
class Shard:
    """Stored rows of one box of a tensor.

    Attributes:
        box: Where the shard lies in its tensor.
        rows: Which rows of the box are stored; shards that share it have equal ones.
        blobs: The codes of each block of rows.
        scheme: How its rows are quantized; each rank decides for its own shards.
        table_box: For row-wise optimizer state, the box of the table shard that it belongs to.
    """

    box: Box
    rows: RowSet
    blobs: tuple[Blob, ...]
    scheme: Scheme
    table_box: Box | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every row of the box is stored."""
        return self.box.num_cols == 0 or (
            all(block.coding == "all" for block in self.rows.blocks) and self.rows.num_rows == self.box.num_rows
        )

    def bytes_behind_codes(self, dtype: torch.dtype) -> Iterator[int]:
        """Of each blob, what it has behind the codes of its rows: exact rows, or less than nothing if it is split."""
        row_bytes = self.scheme.row_bytes(self.box.num_cols, dtype)
        blobs = zip(self.blobs, self.rows.blocks, strict=False)  # there are none where there are no columns
        return (blob.num_bytes - block.num_rows * row_bytes for blob, block in blobs)

    @property
    def place(self) -> "Place":
        """Where it lies."""
        return Place(self.box, self.table_box)


@dataclass(frozen=True)
class Place:
    """Where a shard lies.

    Attributes:
        box: In its tensor.
        table_box: For row-wise optimizer state, in its table.
    """

    box: Box
    table_box: Box | None = None


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the state dict.

    Attributes:
        dtype: Name of its torch dtype, such as ``float32``.
        size: Its global size.
        shards: The stored rows. Where boxes overlap, what comes later overwrites what came before.
        is_table: Whether it is an embedding table.
        table: For row-wise optimizer state (one value a row), the FQN of its table.
        folded: Where boxes of ``shards`` overlap, because they come from several checkpoints or are parts of a delta's
            rows, how the tensor is sharded: boxes that fill it exactly. None where those of ``shards`` do that.
    """

    dtype: str
    size: tuple[int, ...]
    shards: tuple[Shard, ...]
    is_table: bool = False
    table: str | None = None
    folded: tuple[Place, ...] | None = None

    @property
    def places(self) -> tuple[Place, ...]:
        """How it is sharded: boxes that fill it exactly."""
        return tuple(shard.place for shard in self.shards) if self.folded is None else self.folded

    @property
    def sharding(self) -> "Sequence[Shard | Place]":
        """What has the boxes of :attr:`places`."""
        return self.shards if self.folded is None else self.folded

    @property
    def is_whole(self) -> bool:
        """Whether every row is stored, as the manifest alone tells, so that no older checkpoint is needed."""
        return self.folded is None and all(shard.is_whole for shard in self.shards)

    @property
    def num_stored_rows(self) -> float:
        """Rows that are stored; a row whose columns are in several shards counts as its share of them."""
        width = Box.whole(self.size).num_cols or 1
        return sum(shard.rows.num_rows * (shard.box.num_cols / width) for shard in self.shards)


@dataclass(frozen=True)
class CheckpointRef:
    """Another checkpoint, named so that a replaced one is noticed.

    Attributes:
        path: Its place; relative to the referring checkpoint in a manifest, a full path or URL elsewhere.
        sha256: Digest of its manifest.
    """

    path: str
    sha256: str


@dataclass(frozen=True)
class History:
    """Bytes in packs of a lineage since its baseline, from which policies decide.

    Attributes:
        baseline_bytes: Of the baseline.
        delta_bytes: Of each delta on top of it, in the order in which they were saved.
    """

    baseline_bytes: int
    delta_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """One committed checkpoint.

    Attributes:
        created_ns: Unix time of the commit, in nanoseconds; grows along a lineage.
        checkpoint_id: Last part of the checkpoint's path when it was saved.
        save_id: Unique to the save that wrote it; begins the name of each of its packs.
        parent: What must be loaded first, or None for a baseline.
        replaces: Digest of another manifest in its directory, of the same state, that it replaces; or None.
        policy: Name of the policy that decided.
        history: Of the lineage, up to and with this checkpoint.
        num_restores: Restores from a checkpoint that the saved state has been through.
        world_size: Number of ranks that saved.
        writer: Name and version of the software that wrote it.
        packs: The data files.
        tensors: By FQN.
        objects: Non-tensor items by FQN, each one blob as written by ``torch.save``.
        paths: The keys and indices that lead to each FQN in the nested state dict.
    """

    created_ns: int
    checkpoint_id: str
    save_id: str
    parent: CheckpointRef | None
    policy: str
    history: History
    num_restores: int
    world_size: int
    writer: str
    packs: tuple[Pack, ...]
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, Blob] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    replaces: str | None = None

    @property
    def kind(self) -> CheckpointKind:
        """``baseline`` or ``delta``."""
        return "delta" if self.parent else "baseline"

    @cached_property
    def row_sets(self) -> tuple[RowSet, ...]:
        """The row sets of all shards, each once, in the order of the shards."""
        return tuple(self._numbered_row_sets[0])

    @property
    def row_set_numbers(self) -> Mapping[int, int]:
        """The place of each shard's row set among them, by the object's identity: comparing long ones takes time."""
        return self._numbered_row_sets[1]

    @cached_property
    def _numbered_row_sets(self) -> tuple[dict[RowSet, int], dict[int, int]]:
        shards = (shard for entry in self.tensors.values() for shard in entry.shards)
        numbers: dict[RowSet, int] = {}
        objects = {id(shard.rows): shard.rows for shard in shards}
        return numbers, {key: numbers.setdefault(rows, len(numbers)) for key, rows in objects.items()}

    @cached_property
    def row_block_names(self) -> Mapping[RowBlock, str]:
        """What messages call each coded block of row numbers; row sets may share blocks."""
        names: dict[RowBlock, str] = {}
        for index, rows in enumerate(self.row_sets):
            for number, block in enumerate(rows.blocks):
                if block.blob is not None:
                    names.setdefault(block, f"row set {index} block {number}")
        return names

    @property
    def pack_bytes(self) -> int:
        """Bytes in packs of its own directory."""
        return sum(pack.num_bytes for pack in self.packs if pack.is_own_file)

    @property
    def blob_bytes(self) -> int:
        """Bytes of its blobs, wherever they lie: what a load reads of it."""
        return sum(blob.num_bytes for blob in self.unnamed_blobs())

    @property
    def num_rows(self) -> int:
        """Rows of tables that are stored; a row whose columns are in several shards counts as its share of them."""
        return round(sum(entry.num_stored_rows for entry in self.tensors.values() if entry.is_table))

    @property
    def num_exact_rows(self) -> int:
        """Rows stored exactly because codes cannot represent them; one in several shards counts in each."""
        return sum(
            max(0, num_bytes) // exact_row_bytes(shard.box.num_cols, DTYPES[entry.dtype].itemsize)
            for entry in self.tensors.values()
            for shard in entry.shards
            for num_bytes in shard.bytes_behind_codes(DTYPES[entry.dtype])
        )

    def blobs(self) -> Iterator[tuple[str, Blob]]:
        """Every blob, once, with a name for messages."""
        for fqn, entry in self.tensors.items():
            for index, shard in enumerate(entry.shards):
                for number, blob in enumerate(shard.blobs):
                    yield f"{name_of(fqn, entry, index)} block {number}", blob
        known: set[Blob] = set()  # row sets may share blobs
        for index, rows in enumerate(self.row_sets):
            for number, block in enumerate(rows.blocks):
                if block.blob is not None and block.blob not in known:
                    known.add(block.blob)
                    yield f"row set {index} block {number}", block.blob
        for fqn, blob in self.objects.items():
            yield f"object '{fqn}'", blob

    def unnamed_blobs(self) -> list[Blob]:
        """Every blob, once; faster than with names."""
        codes = [blob for entry in self.tensors.values() for shard in entry.shards for blob in shard.blobs]
        row_codes = [block.blob for rows in self.row_sets for block in rows.blocks if block.blob is not None]
        return [*codes, *dict.fromkeys(row_codes), *self.objects.values()]


def name_of(fqn: str, entry: TensorEntry, index: int) -> str:
    """What messages call a shard: by its box, and by its number where boxes may be there more than once."""
    which = "" if entry.folded is None else f" shard {index}"
    return f"blob '{fqn}' box {list(entry.shards[index].box.offsets)}{which}"


def replacement_name(sha256: str) -> str:
    """The file, beside ``manifest.json``, of the manifest that replaces the one with this digest."""
    return f"manifest-{sha256}.json"


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

    def rows(self, row_set: RowSet) -> RowSet:
        """One object for what was one object."""
        found = self._row_sets.get(id(row_set))
        if found is None:  # kept with what it came from, whose id would be another's otherwise
            found = self._row_sets[id(row_set)] = (
                row_set,
                RowSet(tuple([moved_block(block, self.blob) for block in row_set.blocks])),
            )
        return found[1]

    def shard(self, shard: Shard) -> Shard:
        """A shard, its row set included."""
        rows, blobs = self.rows(shard.rows), tuple(map(self.blob, shard.blobs))
        return Shard(shard.box, rows, blobs, shard.scheme, shard.table_box)

    def tensor(self, entry: TensorEntry) -> TensorEntry:
        """A tensor's shards."""
        return replace(entry, shards=tuple(map(self.shard, entry.shards)))

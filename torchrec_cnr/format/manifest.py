"""The manifest, which describes a checkpoint. The checkpoint is committed as soon as its manifest exists.

This module has only values. ``manifest_json`` converts them to JSON and back; docs/reference/format.md specifies
each field.
A pack whose rows are in a Kafka topic differs from other packs only by its place in the topic (``LogRange``).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from torchrec_cnr.format.blob_bytes import exact_row_bytes
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.row_sets import Blob, RowBlock, RowSet
from torchrec_cnr.quantization import Scheme, Transformed


@dataclass(frozen=True)
class LogRange:
    """The place of a pack in a Kafka topic, where it is divided into records of equal size, except the last one.

    Attributes:
        topic: Name of the topic.
        partition: Number of the partition.
        first: Offset of its first record.
        last: Offset of its last record. Records of other packs may be between the two.
        part_bytes: Bytes of each record except the last, which has the remaining bytes.
        key: Prefix of the keys of its records, in a compacted topic, which keeps the last record of each key. None if
            the keys begin with the pack's name.
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
        """Return the number of records of a pack of ``num_bytes`` bytes."""
        return -(-num_bytes // self.part_bytes)


MANIFEST_FILE = "manifest.json"
PACK_SUFFIX = ".safetensors"
UNCOMMITTED_SUFFIX = ".uncommitted.json"  # of a manifest that has no commit record yet

CheckpointKind = Literal["baseline", "delta"]

_DTYPE_NAMES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES}


@dataclass(frozen=True)
class Pack:
    """A data file: a safetensors header, then blobs without gaps between them.

    Attributes:
        name: File name within its directory.
        num_bytes: Size of the file, in bytes.
        header_bytes: Size of the safetensors header with its length field, in bytes.
        header_crc32c: CRC-32C of the header.
        directory: Directory of another checkpoint, relative to this checkpoint's; None for this checkpoint's own.
        written_ns: When the newest of its rows was first stored, Unix time in nanoseconds; None for the commit time.
        heat: How often its rows had been in recent deltas when they were first stored, from 0 (cold) to 3 (hot).
        log: Its place in a Kafka topic; None if it is a file.
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
        """Return whether it is a file in the checkpoint's own directory."""
        return self.directory is None and self.log is None


def own_bytes(packs: Iterable[Pack]) -> int:
    """Return the bytes of the data files that a save wrote, to the checkpoint's directory and to a Kafka topic.

    Files in the directories of older checkpoints are not counted, although the checkpoint uses their transforms.
    """
    return sum(pack.num_bytes for pack in packs if pack.directory is None)


@dataclass(frozen=True)
class StoredTransform:
    """The transform of a shard's rows.

    Attributes:
        blob: The transform without its basis, compressed. Shards may share one.
        basis: Its basis, if it has one. It may be in the data files of an older checkpoint.
        num_exact: The number of exact rows in each blob of the shard, which its size does not show.
    """

    blob: Blob
    basis: Blob | None
    num_exact: tuple[int, ...]

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """Its one or two blobs."""
        return (self.blob,) if self.basis is None else (self.blob, self.basis)


@dataclass(frozen=True)
class Shard:
    """The stored rows of one shard of a tensor.

    Attributes:
        box: The shard region: its offsets and sizes in the tensor.
        rows: The stored rows of the shard. Shards with the same rows share one object.
        blobs: The codes of each block of rows.
        scheme: The quantization scheme of its rows. Each rank chooses it for its own shards.
        table_box: For row-wise optimizer state, the box of the table shard that it belongs to.
        transform: For the scheme ``Transformed``, the transform of the rows.
    """

    box: Box
    rows: RowSet
    blobs: tuple[Blob, ...]
    scheme: Scheme
    table_box: Box | None = None
    transform: StoredTransform | None = None

    @property
    def transform_blobs(self) -> tuple[Blob, ...]:
        """The blobs of its transform, which other shards may share; none without a transform."""
        return () if self.transform is None else self.transform.blobs

    @property
    def transform_parts(self) -> dict[str, Blob]:
        """These blobs by their SHA-256 in hexadecimal, by which transforms of several checkpoints are compared."""
        digests = (self.scheme.digest, self.scheme.basis) if isinstance(self.scheme, Transformed) else ()
        return {digest: blob for digest, blob in zip(digests, self.transform_blobs, strict=False) if digest}

    @property
    def is_whole(self) -> bool:
        """Return whether every row of the box is stored."""
        return self.box.num_cols == 0 or (
            all(block.coding == "all" for block in self.rows.blocks) and self.rows.num_rows == self.box.num_rows
        )

    def num_exact(self, dtype: torch.dtype) -> Iterator[int]:
        """Yield the number of exact rows of each blob."""
        if self.transform is not None:
            yield from self.transform.num_exact
            return
        row_bytes, exact_bytes = self.scheme.row_bytes(self.box.num_cols, dtype), self.exact_row_bytes(dtype)
        blobs = zip(self.blobs, self.rows.blocks, strict=False)  # a shard without columns has blocks but no blobs
        for blob, block in blobs:
            yield max(0, blob.num_bytes - block.num_rows * row_bytes) // exact_bytes  # less than 0 for a split blob

    def exact_row_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of an exact row of this shard."""
        return exact_row_bytes(self.box.num_cols, dtype.itemsize)

    @property
    def place(self) -> "Place":
        """The regions of the shard in its tensor and table."""
        return Place(self.box, self.table_box)


@dataclass(frozen=True)
class Place:
    """The place of a shard.

    Attributes:
        box: Its region in its tensor.
        table_box: For row-wise optimizer state, its region in its table.
    """

    box: Box
    table_box: Box | None = None


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the state dict.

    Attributes:
        dtype: Name of its torch dtype, such as ``float32``.
        size: Its global size.
        shards: The stored rows. Where boxes overlap, rows of later shards overwrite those of earlier ones.
        is_table: Whether it is an embedding table.
        table: For row-wise optimizer state (one value per row), the FQN of its table.
        folded: The sharding of the tensor, as boxes that fill it exactly, if the boxes of ``shards`` overlap. They
            overlap if they come from several checkpoints, or are parts of a delta's rows. None if the boxes of
            ``shards`` fill the tensor exactly.
    """

    dtype: str
    size: tuple[int, ...]
    shards: tuple[Shard, ...]
    is_table: bool = False
    table: str | None = None
    folded: tuple[Place, ...] | None = None

    @property
    def places(self) -> tuple[Place, ...]:
        """The sharding of the tensor: boxes that fill it exactly."""
        return tuple(shard.place for shard in self.shards) if self.folded is None else self.folded

    @property
    def sharding(self) -> "Sequence[Shard | Place]":
        """Objects with the boxes of :attr:`places`, without creating a ``Place`` for each."""
        return self.shards if self.folded is None else self.folded

    @property
    def is_whole(self) -> bool:
        """Return whether this manifest alone shows that every row is stored, so that no older checkpoint is needed."""
        return self.folded is None and all(shard.is_whole for shard in self.shards)

    @property
    def num_stored_rows(self) -> float:
        """The number of stored rows; a row that is divided by columns counts in each shard as its share of columns."""
        width = Box.whole(self.size).num_cols or 1
        return sum(shard.rows.num_rows * (shard.box.num_cols / width) for shard in self.shards)


@dataclass(frozen=True)
class CheckpointRef:
    """A reference to another checkpoint that detects whether it was replaced.

    Attributes:
        path: Its path: relative to the referring checkpoint in a manifest, otherwise a full path or URL.
        sha256: SHA-256 of its manifest.
    """

    path: str
    sha256: str


@dataclass(frozen=True)
class History:
    """The sizes of the checkpoints since the last baseline, from which policies decide.

    Attributes:
        baseline_bytes: Bytes in data files of the baseline.
        delta_bytes: Bytes in data files of each delta since the baseline, in the order in which they were saved.
    """

    baseline_bytes: int
    delta_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The description of one committed checkpoint.

    Attributes:
        created_ns: Unix time of the commit, in nanoseconds; increases along a checkpoint chain.
        checkpoint_id: Last part of the checkpoint's path when it was saved.
        save_id: Unique id of the save that wrote it; the names of its packs begin with it.
        parent: The checkpoint that must be loaded first, or None for a baseline.
        replaces: Digest of the manifest that it replaces, which is in its directory and has the same state; or None.
        policy: Name of the policy that chose between baseline and delta.
        history: Sizes of the checkpoints since the baseline, including this one.
        num_restores: Number of restores of the training before this save.
        world_size: Number of ranks that saved.
        writer: Name and version of the software that wrote it.
        packs: The data files.
        tensors: The tensors, by FQN.
        objects: Non-tensor items by FQN, each as one blob that ``torch.save`` wrote.
        paths: For each FQN, the keys and indices that lead to it in the nested state dict.
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
        """The kind of the checkpoint: ``baseline`` or ``delta``."""
        return "delta" if self.parent else "baseline"

    @cached_property
    def row_sets(self) -> tuple[RowSet, ...]:
        """The row sets of all shards, each once, in the order of the shards."""
        return tuple(self._numbered_row_sets[0])

    @property
    def row_set_numbers(self) -> Mapping[int, int]:
        """The index in :attr:`row_sets` of each shard's row set, by its ``id()``: comparing long row sets is slow."""
        return self._numbered_row_sets[1]

    @cached_property
    def _numbered_row_sets(self) -> tuple[dict[RowSet, int], dict[int, int]]:
        shards = (shard for entry in self.tensors.values() for shard in entry.shards)
        numbers: dict[RowSet, int] = {}
        objects = {id(shard.rows): shard.rows for shard in shards}
        return numbers, {key: numbers.setdefault(rows, len(numbers)) for key, rows in objects.items()}

    @cached_property
    def row_block_names(self) -> Mapping[RowBlock, str]:
        """The name in messages of each coded block of row numbers; row sets may share blocks."""
        names: dict[RowBlock, str] = {}
        for name, rows in zip(self._row_set_names, self.row_sets, strict=True):
            for number, block in enumerate(rows.blocks):
                if block.blob is not None:
                    names.setdefault(block, f"{name} block {number}")
        return names

    @cached_property
    def _row_set_names(self) -> list[str]:
        """The name in messages of each row set, by the first shard that has it."""
        names: dict[int, str] = {}
        for fqn, entry in self.tensors.items():
            for index, shard in enumerate(entry.shards):
                names.setdefault(self.row_set_numbers[id(shard.rows)], f"row numbers of {name_of(fqn, entry, index)}")
        return [names[index] for index in range(len(self.row_sets))]

    @property
    def pack_bytes(self) -> int:
        """The bytes of the packs in its own directory."""
        return sum(pack.num_bytes for pack in self.packs if pack.is_own_file)

    @property
    def blob_bytes(self) -> int:
        """The bytes of all its blobs, in any directory or topic, which a load of it reads."""
        return sum(blob.num_bytes for blob in self.unnamed_blobs())

    @property
    def num_rows(self) -> int:
        """The number of stored table rows; a row divided by columns counts in each shard as its share of columns."""
        return round(sum(entry.num_stored_rows for entry in self.tensors.values() if entry.is_table))

    @property
    def num_exact_rows(self) -> int:
        """The number of exact rows, which codes cannot represent; a row in several shards counts in each."""
        return sum(
            num_exact
            for entry in self.tensors.values()
            for shard in entry.shards
            for num_exact in shard.num_exact(DTYPES[entry.dtype])
        )

    def blobs(self) -> Iterator[tuple[str, Blob]]:
        """Yield every blob once, with its name for messages."""
        for fqn, entry in self.tensors.items():
            for index, shard in enumerate(entry.shards):
                for number, blob in enumerate(shard.blobs):
                    yield f"{name_of(fqn, entry, index)} block {number}", blob
        yielded: set[Blob] = set()  # shards may share transforms, and row sets blobs
        for fqn, entry in self.tensors.items():
            for index, shard in enumerate(entry.shards):
                for what, blob in zip(("transform", "basis"), shard.transform_blobs, strict=False):
                    if blob not in yielded:
                        yielded.add(blob)
                        yield f"{what} of {name_of(fqn, entry, index)}", blob
        for name, rows in zip(self._row_set_names, self.row_sets, strict=True):
            for number, block in enumerate(rows.blocks):
                if block.blob is not None and block.blob not in yielded:
                    yielded.add(block.blob)
                    yield f"{name} block {number}", block.blob
        for fqn, blob in self.objects.items():
            yield f"object '{fqn}'", blob

    def unnamed_blobs(self) -> list[Blob]:
        """Return every blob once, without names, which is faster."""
        shards = [shard for entry in self.tensors.values() for shard in entry.shards]
        codes = [blob for shard in shards for blob in shard.blobs]
        transforms = dict.fromkeys(blob for shard in shards for blob in shard.transform_blobs)
        row_codes = [block.blob for rows in self.row_sets for block in rows.blocks if block.blob is not None]
        return [*codes, *transforms, *dict.fromkeys(row_codes), *self.objects.values()]


def name_of(fqn: str, entry: TensorEntry, index: int) -> str:
    """Return the name of a shard for messages: its region, and its number if several shards may have this region."""
    suffix = "" if entry.folded is None else f" shard {index}"
    return f"tensor '{fqn}' region {list(entry.shards[index].box.offsets)}{suffix}"


def replacement_name(sha256: str) -> str:
    """Return the name of the file, next to ``manifest.json``, that replaces the manifest with this digest."""
    return f"manifest-{sha256}.json"


def moved_block(block: RowBlock, place: Callable[[Blob], Blob]) -> RowBlock:
    """Return a block of row numbers whose code is in the blob that ``place`` returns."""
    if block.blob is None:
        return block
    return RowBlock(block.coding, block.first, block.span, block.num_rows, place(block.blob))


@dataclass
class Renumbering:
    """A mapping that moves every blob of shards, row sets and tensors.

    Attributes:
        blob: Returns the new place of a blob.
    """

    blob: Callable[[Blob], Blob]
    _row_sets: dict[int, tuple[RowSet, RowSet]] = field(default_factory=dict)

    def rows(self, row_set: RowSet) -> RowSet:
        """Return a moved row set. The same object always has the same result, so shards still share row sets."""
        original_and_moved = self._row_sets.get(id(row_set))
        if original_and_moved is None:  # the original is kept, too, so that no other object can get its id
            original_and_moved = self._row_sets[id(row_set)] = (
                row_set,
                RowSet(tuple([moved_block(block, self.blob) for block in row_set.blocks])),
            )
        return original_and_moved[1]

    def shard(self, shard: Shard) -> Shard:
        """Return a moved shard, with its row set."""
        rows, blobs = self.rows(shard.rows), tuple(map(self.blob, shard.blobs))
        return Shard(shard.box, rows, blobs, shard.scheme, shard.table_box, self.transform(shard.transform))

    def transform(self, transform: StoredTransform | None) -> StoredTransform | None:
        """Return a moved transform."""
        if transform is None:
            return None
        basis = None if transform.basis is None else self.blob(transform.basis)
        return replace(transform, blob=self.blob(transform.blob), basis=basis)

    def tensor(self, entry: TensorEntry) -> TensorEntry:
        """Return a tensor with moved shards."""
        return replace(entry, shards=tuple(map(self.shard, entry.shards)))

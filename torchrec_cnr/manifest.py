"""The manifest: the one object that describes a checkpoint and, by being there, commits it.

Values only; what they look like as JSON, and the checks that make reading them safe, are in ``manifest_json``. The
words are those of docs/glossary.md, the meaning of each field is specified in docs/format.md.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from torchrec_cnr.rows import Box, Coding
from torchrec_cnr.schemes import Scheme, exact_row_bytes

FORMAT = "torchrec_cnr"
VERSION = 2
FILE_NAME = "manifest.json"

# How a checkpoint names another: '../' first, then plain names.
PARENT_PATH = re.compile(r"(\.\./)+(?!\.\.?(/|$))[^/\\\x00-\x1f]+(/(?!\.\.?(/|$))[^/\\\x00-\x1f]+)*")

Kind = Literal["baseline", "delta"]

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


@dataclass(frozen=True)
class Pack:
    """A data file: a safetensors header, then blobs without holes.

    Attributes:
        name: File name within the checkpoint's directory.
        num_bytes: Size of the file.
        header_bytes: Size of the safetensors header, its length field included.
        header_crc32c: Its digest.
    """

    name: str
    num_bytes: int
    header_bytes: int
    header_crc32c: int


@dataclass(frozen=True)
class Blob:
    """A range of bytes in a pack.

    Attributes:
        pack: Index into the manifest's packs.
        offset: First byte, counted from the start of the file.
        num_bytes: Length.
        crc32c: Digest of the bytes.
    """

    pack: int
    offset: int
    num_bytes: int
    crc32c: int


@dataclass(frozen=True)
class RowBlock:
    """Consecutive members of a row set, coded; see ``rows.CodedRows``."""

    coding: Coding
    first: int
    span: int
    blob: Blob


@dataclass(frozen=True)
class RowSet:
    """The modified rows of one shard, shared by a table and the optimizer state of its rows.

    Attributes:
        num_rows: Number of members.
        block_rows: Members in a block; the last block may have fewer.
        blocks: The members in increasing order, numbered within the shard's box.
    """

    num_rows: int
    block_rows: int
    blocks: tuple[RowBlock, ...]


@dataclass(frozen=True)
class Shard:
    """The stored rows of one box of a tensor.

    Attributes:
        box: Where the shard lies in its tensor.
        row_set: Index into the manifest's row sets, or None where every row of the box is stored.
        block_rows: Rows in a blob; the last blob may have fewer.
        blobs: The rows' codes, in order.
        scheme: How its rows are quantized; each rank decides for its own shards.
        table_box: For row-wise optimizer state, the box of the table shard that it belongs to.
    """

    box: Box
    row_set: int | None
    block_rows: int
    blobs: tuple[Blob, ...]
    scheme: Scheme
    table_box: Box | None = None


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the state dict.

    Attributes:
        dtype: Name of its torch dtype, such as ``float32``.
        size: Its global size.
        shards: Boxes that fill it exactly, each with the rows stored of it.
        is_table: Whether it is an embedding table.
        table: For row-wise optimizer state (one value a row), the FQN of its table.
    """

    dtype: str
    size: tuple[int, ...]
    shards: tuple[Shard, ...]
    is_table: bool = False
    table: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every row is stored, so that no older checkpoint is needed."""
        return all(shard.row_set is None for shard in self.shards)


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
        policy: Name of the policy that decided.
        history: Of the lineage, up to and with this checkpoint.
        num_restores: Restores from a checkpoint that the saved state has been through.
        world_size: Number of ranks that saved.
        writer: Name and version of the software that wrote it.
        packs: The data files.
        row_sets: Sets of modified rows.
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
    row_sets: tuple[RowSet, ...]
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, Blob] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """``baseline`` or ``delta``."""
        return "delta" if self.parent else "baseline"

    @property
    def pack_bytes(self) -> int:
        """Bytes in packs."""
        return sum(pack.num_bytes for pack in self.packs)

    @property
    def num_rows(self) -> int:
        """Rows of tables that are stored; a row whose columns are in several shards counts as its share of them."""
        return round(sum(self._stored_rows(entry) for entry in self.tensors.values() if entry.is_table))

    def _stored_rows(self, entry: TensorEntry) -> float:
        width = Box.whole(entry.size).num_cols or 1
        return sum(self._num_rows(shard) * (shard.box.num_cols / width) for shard in entry.shards)

    def _num_rows(self, shard: Shard) -> int:
        return shard.box.num_rows if shard.row_set is None else self.row_sets[shard.row_set].num_rows

    @property
    def num_exact_rows(self) -> int:
        """Rows stored exactly because codes cannot represent them; one in several shards counts in each."""
        return sum(
            self._exact_rows(shard, DTYPES[entry.dtype])
            for entry in self.tensors.values()
            for shard in entry.shards
            if shard.blobs
        )

    def _exact_rows(self, shard: Shard, dtype: torch.dtype) -> int:
        num_cols = shard.box.num_cols
        num_bytes = sum(blob.num_bytes for blob in shard.blobs)
        num_bytes -= self._num_rows(shard) * shard.scheme.row_bytes(num_cols, dtype)
        return num_bytes // exact_row_bytes(num_cols, dtype.itemsize)

    def blobs(self) -> Iterator[tuple[str, Blob]]:
        """Every blob with a name for messages."""
        for fqn, entry in self.tensors.items():
            for shard in entry.shards:
                for number, blob in enumerate(shard.blobs):
                    yield f"blob '{fqn}' box {list(shard.box.offsets)} block {number}", blob
        for index, row_set in enumerate(self.row_sets):
            for number, block in enumerate(row_set.blocks):
                yield f"row set {index} block {number}", block.blob
        for fqn, blob in self.objects.items():
            yield f"object '{fqn}'", blob


@dataclass(frozen=True)
class Head:
    """The checkpoint that a running job stands on: what its next save may be a delta of.

    Attributes:
        lineage: From the baseline to the newest checkpoint, by full path.
        created_ns: Time of the newest one's commit.
        history: Of the lineage.
        num_restores: Restores that the newest one's state has been through.
    """

    lineage: tuple[CheckpointRef, ...]
    created_ns: int
    history: History
    num_restores: int

    @property
    def ref(self) -> CheckpointRef:
        """The newest checkpoint."""
        return self.lineage[-1]

    @property
    def baseline(self) -> CheckpointRef:
        """The one that all deltas stand on."""
        return self.lineage[0]

    @classmethod
    def of(cls, manifest: Manifest, lineage: tuple[CheckpointRef, ...]) -> "Head":
        """The head that ``manifest``, at the end of ``lineage``, is."""
        return cls(lineage, manifest.created_ns, manifest.history, manifest.num_restores)

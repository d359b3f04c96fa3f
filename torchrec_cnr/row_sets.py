"""Row sets: which rows of a shard are stored, block by block, and where the code of their numbers lies."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torchrec_cnr.rows import Coding


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
    """The numbers of the rows in a blob.

    Attributes:
        coding: ``all`` for consecutive rows, else how ``blob`` is to be read; see ``rows.CodedRows``.
        first: The smallest.
        span: Largest - smallest + 1.
        num_rows: How many.
        blob: Their code; None for consecutive rows.
    """

    coding: Coding | Literal["all"]
    first: int
    span: int
    num_rows: int
    blob: Blob | None


@dataclass(frozen=True)
class RowSet:
    """The stored rows of one shard, shared by a table and the optimizer state of its rows.

    Attributes:
        blocks: The rows in increasing order, numbered within the shard's box.
    """

    blocks: tuple[RowBlock, ...]

    def __hash__(self) -> int:
        """Of little of the first block: there are many row sets, and most of them differ there."""
        if not self.blocks:
            return 0
        first = self.blocks[0]
        place = None if first.blob is None else (first.blob.pack, first.blob.offset)
        return hash((len(self.blocks), first.num_rows, place))

    @classmethod
    def all(cls, num_rows: int, block_rows: int) -> "RowSet":
        """Rows from the first on, in blocks of one size but the last."""
        starts = range(0, num_rows, block_rows)
        sizes = (min(block_rows, num_rows - start) for start in starts)
        return cls(tuple(RowBlock("all", start, size, size, None) for start, size in zip(starts, sizes, strict=True)))

    @cached_property
    def num_rows(self) -> int:
        """Number of members."""
        return sum(block.num_rows for block in self.blocks)

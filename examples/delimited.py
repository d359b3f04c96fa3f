"""A parser of delimited text to NumPy columns, block by block, without a loop over lines.

A click log has millions of lines. ``np.flatnonzero`` finds the beginning and the end of each field in seconds, while
``csv`` or ``np.loadtxt`` take minutes. ``read_blocks`` yields one ``LineBlock`` per few megabytes of text, and its
columns are parsed only on demand. Between blocks, only the incomplete last line is kept.
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 4 << 20
NEWLINE = ord("\n")

Int64Array = NDArray[np.int64]
BytesArray = NDArray[np.bytes_]
Floats = NDArray[np.float32]


class DataError(Exception):
    """The data has not the given format. The message is one line, for the user who gave the path."""


@dataclass(frozen=True, eq=False)
class LineBlock:
    """Whole lines of a file, with the positions of their fields.

    Attributes:
        source: The file's path, for messages.
        first_line: Number of the block's first line in the file, counted from 1.
        text: The bytes of the lines, uint8 [num_bytes].
        starts, ends: The positions of the fields, int64 [num_lines, num_fields]. Field ``f`` of line ``i`` is
            ``text[starts[i, f]:ends[i, f]]``.
    """

    source: Path
    first_line: int
    text: NDArray[np.uint8]
    starts: Int64Array
    ends: Int64Array

    def __len__(self) -> int:
        return len(self.starts)

    def strings(self, field: int) -> BytesArray:
        """Return a column as bytes [num_lines], padded with zeros to its longest value."""
        starts, ends = self.starts[:, field], self.ends[:, field]
        width = max(int((ends - starts).max()), 1)
        at = starts[:, None] + np.arange(width)
        inside = at < ends[:, None]
        letters = np.where(inside, self.text[np.minimum(at, len(self.text) - 1)], 0).astype(np.uint8)
        return letters.view(f"S{width}")[:, 0]

    def ints(self, field: int, missing: int | None = None) -> Int64Array:
        """Return a column as int64 [num_lines]; ``missing``, if given, replaces an empty field."""
        return self._numbers(field, np.int64, "a whole number", missing).astype(np.int64)

    def floats(self, field: int) -> Floats:
        """Return a column as float32 [num_lines]."""
        return self._numbers(field, np.float64, "a number", None).astype(np.float32)

    def _numbers(self, field: int, dtype: type[np.generic], expected: str, missing: int | None) -> NDArray[np.generic]:
        words = self.strings(field)
        if missing is not None:
            words = np.where(words == b"", str(missing).encode(), words)
        try:
            return words.astype(dtype)
        except (ValueError, OverflowError):
            line, word = _first_not_number(words, dtype)
        raise DataError(
            f"{self.source}: line {self.first_line + line}, field {field + 1}: expected {expected}, got {word!r}"
        )


def _first_not_number(words: BytesArray, dtype: type[np.generic]) -> tuple[int, str]:
    for line, word in enumerate(words):
        try:
            np.array([word]).astype(dtype)
        except (ValueError, OverflowError):
            return line, word.decode("ascii", "replace")
    raise AssertionError("a column that does not convert has a word that does not convert")


def read_blocks(path: Path, delimiter: str, num_fields: int, header: str | None = None) -> Iterator[LineBlock]:
    """Yield the lines of a text file (``.gz`` too) after its header, in order.

    Args:
        path: The file.
        delimiter: The separator of fields: one character, or ``::``.
        num_fields: The number of fields that each line must have.
        header: The expected first line; None for a file without a header.
    """
    first_line = 1
    for raw in _whole_lines(path):
        text = raw.replace(b"\r\n", b"\n")
        if first_line == 1 and header is not None:
            found, _, text = text.partition(b"\n")
            if found.decode("utf-8", "replace").strip() != header:
                shown = found[:80].decode("utf-8", "replace")
                raise DataError(f"{path}: line 1: expected the header {header!r}, got {shown!r}")
            first_line = 2
        if text:
            block = split_lines(path, first_line, text, delimiter, num_fields)
            yield block
            first_line += len(block)
    if first_line <= (1 if header is None else 2):
        raise DataError(f"{path}: expected at least one interaction, found none")


def split_lines(source: Path, first_line: int, text: bytes, delimiter: str, num_fields: int) -> LineBlock:
    """Find the fields of whole lines; every line must have ``num_fields`` of them."""
    if len(delimiter) > 1:  # MovieLens' "::" never occurs inside its numeric fields
        text, delimiter = text.replace(delimiter.encode(), b"\t"), "\t"
    letters = np.frombuffer(text, dtype=np.uint8)
    ends = np.flatnonzero((letters == ord(delimiter)) | (letters == NEWLINE))
    newlines = np.flatnonzero(letters[ends] == NEWLINE)
    fields_in_line = np.diff(newlines, prepend=-1)
    wrong = np.flatnonzero(fields_in_line != num_fields)
    if len(wrong):
        line = int(wrong[0])
        got = int(fields_in_line[line])
        raise DataError(f"{source}: line {first_line + line}: expected {num_fields} fields, got {got}")
    starts = np.concatenate(([0], ends[:-1] + 1))
    return LineBlock(source, first_line, letters, starts.reshape(-1, num_fields), ends.reshape(-1, num_fields))


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the file's bytes in blocks that end with a line."""
    rest = b""
    try:
        with _open(path) as file:
            while block := file.read(BLOCK_BYTES):
                lines, newline, rest_of_block = block.rpartition(b"\n")
                if newline:
                    yield rest + lines + newline
                    rest = rest_of_block
                else:
                    rest += block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: not a complete gzip file: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    if rest:
        yield rest + b"\n"


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]  # GzipFile is a BinaryIO in all but its declared type
    return path.open("rb")

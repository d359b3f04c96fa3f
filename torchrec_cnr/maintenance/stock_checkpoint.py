"""A checkpoint in DCP's own format: where its values lie, and how rows of them are read."""

import errno
import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_cnr.errors import DamagedError, StoreError
from torchrec_cnr.maintenance.contents import Chunk
from torchrec_cnr.pickles import load_state
from torchrec_cnr.stores import Bytes, Store

_ARCHIVE = b"PK\x03\x04"  # what a file of torch.save begins with


@dataclass(frozen=True)
class Extent:
    """Bytes of a file.

    Attributes:
        file: Its name in the checkpoint's directory.
        start: The first.
        num_bytes: How many.
    """

    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class StockChunk:
    """Rows of a tensor, and where they lie.

    Attributes:
        chunk: The rows.
        size: Of the whole tensor.
        extent: The bytes that have them, perhaps among others.
        stride: Of the rows in these bytes, in elements; None where they are row after row and nothing else.
        first: Element in these bytes that is theirs first.
    """

    chunk: Chunk
    size: tuple[int, ...]
    extent: Extent
    stride: tuple[int, ...] | None = None
    first: int = 0


@dataclass(frozen=True)
class StockCheckpoint:
    """What a checkpoint in DCP's own format holds.

    Attributes:
        store: Its directory.
        chunks: All rows of all tensors.
        objects: By FQN, what ``torch.save`` wrote.
        paths: The keys and indices that lead to each FQN in the nested state dict.
    """

    store: Store
    chunks: tuple[StockChunk, ...]
    objects: Mapping[str, Extent]
    paths: Mapping[str, tuple[str | int, ...]]

    def read(self, found: StockChunk) -> Tensor:
        """The values of rows, on the host.

        Raises:
            DamagedError: The file is shorter, or bytes are no bools.
            StoreError: It cannot be read.
        """
        chunk = found.chunk
        if not chunk.num_bytes:
            return torch.empty(chunk.box.sizes, dtype=chunk.dtype)
        data = torch.from_numpy(self._bytes(found.extent))
        if chunk.dtype is torch.bool and bool((data > 1).any()):
            raise DamagedError(f"{self.store.url}/{found.extent.file}: {chunk.fqn!r} has bytes that are no bools")
        values = data.view(chunk.dtype)
        if found.stride is None:
            return values.view(chunk.box.sizes)
        return values.as_strided(chunk.box.sizes, found.stride, found.first)

    def read_object(self, fqn: str) -> io.BytesIO:
        """An object as ``torch.save`` wrote it.

        Raises:
            DamagedError: The file is shorter, or holds something else there.
            StoreError: It cannot be read.
        """
        extent = self.objects[fqn]
        data = self._bytes(extent).tobytes()
        where = f"{self.store.url}/{extent.file}: object {fqn!r}"
        if not data.startswith(_ARCHIVE):
            raise DamagedError(f"{where}: not what torch.save wrote")
        try:
            load_state(data)
        except pickle.UnpicklingError:
            pass  # it may need types that are to be registered: whoever stores it says so
        except Exception as error:  # bytes that are no pickle may make the unpickler raise anything
            raise DamagedError(f"{where} cannot be read ({error})") from error
        return io.BytesIO(data)

    def _bytes(self, extent: Extent) -> Bytes:
        with missing_is_damage():
            data = self.store.read_array(extent.file, extent.start, extent.start + extent.num_bytes)
        if len(data) != extent.num_bytes:
            raise DamagedError(
                f"{self.store.url}/{extent.file}: truncated: {extent.num_bytes} bytes wanted from {extent.start}, "
                f"{len(data)} of them there"
            )
        return data


@contextmanager
def missing_is_damage() -> Iterator[None]:
    """Files that the metadata names must be there."""
    try:
        yield
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise
        raise DamagedError(f"a file that the metadata names is missing: {error}") from error

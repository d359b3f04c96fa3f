"""A checkpoint in DCP's own format: finds its values in the files, and reads rows of them.

Opening a checkpoint compares its metadata with its files and reads no values. Each chunk of a tensor is a
``torch.save`` archive within a file. The archive is loaded to the device ``meta``, which only finds where its values
begin. So rows can then be read separately, however large the chunk is.
"""

import errno
import io
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from torchrec_cnr.errors import CNRError, ConfigurationError, DamagedError, StoreError
from torchrec_cnr.format.blob_bytes import Bytes
from torchrec_cnr.format.boxes import Box, fills
from torchrec_cnr.format.manifest import DTYPES
from torchrec_cnr.format.safe_pickle import ARCHIVE_BEGIN, check_archive, load_state
from torchrec_cnr.maintenance.dcp_import.dcp_metadata import METADATA_FILE, read_dcp_metadata
from torchrec_cnr.maintenance.export.contents import Chunk, split_rows
from torchrec_cnr.storage.store import Store


@dataclass(frozen=True)
class Extent:
    """A range of bytes in a file.

    Attributes:
        file: The name of the file in the checkpoint's directory.
        start: The offset of the first byte.
        num_bytes: The number of bytes.
    """

    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class DCPChunk:
    """Rows of a tensor, and the place of their values.

    Attributes:
        chunk: The rows.
        size: The size of the whole tensor.
        extent: The bytes that contain the values, perhaps with others.
        stride: The stride of the values in these bytes, in elements; None if the bytes are exactly the values in order.
        first: The index of the first element in these bytes.
    """

    chunk: Chunk
    size: tuple[int, ...]
    extent: Extent
    stride: tuple[int, ...] | None = None
    first: int = 0


@dataclass(frozen=True)
class DCPCheckpoint:
    """The contents of a checkpoint in DCP's own format.

    Attributes:
        store: The directory of the checkpoint.
        chunks: All rows of all tensors.
        objects: The bytes of each object, as ``torch.save`` wrote them, by FQN.
        paths: The keys and indices that lead to each FQN in the nested state dict.
    """

    store: Store
    chunks: tuple[DCPChunk, ...]
    objects: Mapping[str, Extent]
    paths: Mapping[str, tuple[str | int, ...]]

    def read(self, found: DCPChunk) -> Tensor:
        """Read the values of rows. Return them as a tensor on the CPU.

        Raises:
            DamagedError: The file is truncated, or a byte is not a valid bool.
            StoreError: The file cannot be read.
        """
        chunk = found.chunk
        if not chunk.num_bytes:
            return torch.empty(chunk.box.sizes, dtype=chunk.dtype, device="cpu")
        data = torch.from_numpy(self._bytes(found.extent))
        if chunk.dtype is torch.bool and bool((data > 1).any()):
            raise DamagedError(f"{self.store.url}/{found.extent.file}: {chunk.fqn!r} has bytes that are not bools")
        values = data.view(chunk.dtype)
        if found.stride is None:
            return values.view(chunk.box.sizes)
        return values.as_strided(chunk.box.sizes, found.stride, found.first)

    def read_object(self, fqn: str) -> io.BytesIO:
        """Read an object. Return its bytes as ``torch.save`` wrote them.

        Raises:
            DamagedError: The file is truncated, or contains something else at this place.
            StoreError: The file cannot be read.
        """
        extent = self.objects[fqn]
        data = self._bytes(extent).tobytes()
        where = f"{self.store.url}/{extent.file}: object {fqn!r}"
        if not data.startswith(ARCHIVE_BEGIN):
            raise DamagedError(f"{where}: not an object from torch.save")
        try:
            load_state(data)
        except pickle.UnpicklingError:
            pass  # it may need types that must be registered; the writer that stores it reports this
        except Exception as error:  # invalid bytes may make the unpickler raise anything
            raise DamagedError(f"{where} cannot be read ({error})") from error
        return io.BytesIO(data)

    def _bytes(self, extent: Extent) -> Bytes:
        with missing_is_damage():
            data = self.store.read_array(extent.file, extent.start, extent.start + extent.num_bytes)
        if len(data) != extent.num_bytes:
            raise DamagedError(
                f"{self.store.url}/{extent.file}: truncated: expected {extent.num_bytes} bytes from {extent.start}, "
                f"got {len(data)}"
            )
        return data


@contextmanager
def missing_is_damage() -> Iterator[None]:
    """Turn the error of a missing file into a ``DamagedError``, since the metadata names the file."""
    try:
        yield
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise
        raise DamagedError(f"a file that the metadata names is missing: {error}") from error


def read_dcp_checkpoint(source: str | os.PathLike[str]) -> DCPCheckpoint:
    """Find the contents of a checkpoint in DCP's own format, without reading values.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        ConfigurationError: It has tensors that cannot be stored, or was written with extensions.
        DamagedError: It contradicts itself, or its metadata needs other classes than DCP's.
        StoreError: It cannot be read.
    """
    store = Store.open(source)
    metadata = read_dcp_metadata(store)
    try:
        return _opened(store, metadata)
    except CNRError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError) as error:  # values in a pickle may be of any type
        raise DamagedError(
            f"{store.url}/{METADATA_FILE}: invalid metadata ({type(error).__name__}: {error})"
        ) from error


def _opened(store: Store, metadata: Metadata) -> DCPCheckpoint:
    fqns = set(metadata.state_dict_metadata)
    if any(type(fqn) is not str for fqn in fqns):
        raise DamagedError(f"{store.url}/{METADATA_FILE}: names that are not strings")
    stored_chunks: list[tuple[Chunk, tuple[int, ...], _StorageInfo]] = []
    chunks: list[DCPChunk] = []
    objects: dict[str, Extent] = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            info = _info(store, metadata, MetadataIndex(fqn))
            objects[fqn] = Extent(info.relative_path, info.offset, info.length)
            continue
        if not isinstance(entry, TensorStorageMetadata):
            raise DamagedError(f"{store.url}/{METADATA_FILE}: {fqn!r} is neither a tensor nor an object")
        size, boxes, dtype = _checked(store, fqn, entry)
        if 0 in size:
            chunks.append(DCPChunk(Chunk(fqn, Box.whole(size), dtype), size, Extent("", 0, 0)))
            continue
        for box in boxes:
            info = _info(store, metadata, MetadataIndex(fqn, box.offsets))
            stored_chunks.append((Chunk(fqn, box, dtype), size, info))
    stored_chunks.sort(key=lambda item: (item[2].relative_path, item[2].offset))
    for name, file_chunks in groupby(stored_chunks, key=lambda item: item[2].relative_path):
        chunks += _open_chunks(store, name, list(file_chunks))
    return DCPCheckpoint(store, tuple(chunks), objects, _paths(store, metadata, fqns))


def _checked(store: Store, fqn: str, entry: TensorStorageMetadata) -> tuple[tuple[int, ...], list[Box], torch.dtype]:
    """Return the size, the regions of non-empty chunks, and the dtype of a tensor, after checking them."""
    size, dtype = tuple(map(int, entry.size)), entry.properties.dtype
    if dtype not in DTYPES.values():
        raise ConfigurationError(
            f"{store.url}: tensor {fqn!r} of {dtype} cannot be stored; omit it, or convert it to another dtype"
        )
    boxes = [Box(tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))) for chunk in entry.chunks]
    boxes = [box for box in boxes if 0 not in box.sizes]
    is_negative = min((0, *size, *(number for box in boxes for number in (*box.offsets, *box.sizes)))) < 0
    if is_negative or not (0 in size or fills(size, boxes)):
        raise DamagedError(
            f"{store.url}/{METADATA_FILE}: the chunks of {fqn!r} do not fill its size {list(size)} exactly"
        )
    return size, boxes, dtype


def _info(store: Store, metadata: Metadata, index: MetadataIndex) -> _StorageInfo:
    """Return the place of an item, which must be in a file of the checkpoint's own directory."""
    info = metadata.storage_data[index]
    if not isinstance(info, _StorageInfo) or min(info.offset, info.length) < 0:
        raise DamagedError(f"{store.url}/{METADATA_FILE}: the place of {index.fqn!r} is missing or invalid")
    if info.transform_descriptors:
        raise ConfigurationError(
            f"{store.url}: {index.fqn!r} was written with extensions ({', '.join(info.transform_descriptors)}); load "
            "it with dcp.load, and save it without extensions"
        )
    if not info.relative_path or "/" in info.relative_path or info.relative_path in (".", ".."):
        raise DamagedError(
            f"{store.url}/{METADATA_FILE}: {index.fqn!r} must be in a file of the same directory (got "
            f"{info.relative_path!r})"
        )
    return info


def _paths(store: Store, metadata: Metadata, fqns: set[str]) -> dict[str, tuple[str | int, ...]]:
    paths = {fqn: tuple(path) for fqn, path in (metadata.planner_data or {}).items() if fqn in fqns}
    for fqn, path in paths.items():
        if not path or type(path[0]) is not str or any(type(key) not in (str, int) for key in path):
            raise DamagedError(f"{store.url}/{METADATA_FILE}: {fqn!r} has no path of keys and indices (got {path!r})")
    return paths


def _open_chunks(
    store: Store, name: str, stored_chunks: Sequence[tuple[Chunk, tuple[int, ...], _StorageInfo]]
) -> list[DCPChunk]:
    """Find the values of chunks in one file."""
    chunks: list[DCPChunk] = []
    with missing_is_damage(), store.open_file(name) as file:
        for chunk, size, info in stored_chunks:
            where = f"{store.url}/{name}: {chunk.fqn!r} at byte {info.offset}"
            try:
                view: Any = _create_file_view(file, info.offset, info.length)
                check_archive(_Part(file, info.offset, info.length))
                view.seek(0)
                tensor: Any = torch.load(view, map_location="meta", weights_only=True)
            except OSError as error:
                raise StoreError(f"cannot read {where}: {error}") from error
            except Exception as error:  # invalid bytes may make the unpickler raise anything
                raise DamagedError(f"{where}: not a tensor from torch.save ({type(error).__name__})") from error
            chunks += _located(where, chunk, size, info, tensor)
    return chunks


class _Part(io.RawIOBase):
    """A range of a file, as a file. torch's own view cannot seek relative to its end."""

    def __init__(self, file: IO[bytes], start: int, num_bytes: int) -> None:
        super().__init__()
        self._file = file
        self._start = start
        self._num_bytes = num_bytes
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._num_bytes}[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        num_left = max(0, self._num_bytes - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(num_left if size < 0 else min(size, num_left))
        self._at += len(data)
        return data


def _located(where: str, chunk: Chunk, size: tuple[int, ...], info: _StorageInfo, tensor: Any) -> list[DCPChunk]:
    """Return the places of a chunk's values, in parts that fit into memory; one part if they are not contiguous."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        raise DamagedError(f"{where}: not a dense tensor")
    if tensor.dtype is not chunk.dtype or tuple(tensor.shape) != chunk.box.sizes:
        raise DamagedError(
            f"{where}: expected {list(chunk.box.sizes)} of {chunk.dtype}, got {list(tensor.shape)} of {tensor.dtype}"
        )
    storage: Any = tensor.untyped_storage()
    itemsize, first_element, start = chunk.dtype.itemsize, int(tensor.storage_offset()), int(storage._checkpoint_offset)
    span = 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    if (first_element + span) * itemsize > storage.nbytes() or start + storage.nbytes() > info.length:
        raise DamagedError(f"{where}: truncated before the end of its values")
    if tensor.numel() * itemsize > storage.nbytes():  # a small file could require any amount of memory
        raise DamagedError(f"{where}: overlapping values ({storage.nbytes()} bytes for {tensor.numel()} values)")
    if not tensor.is_contiguous():
        extent = Extent(info.relative_path, info.offset + start, (first_element + span) * itemsize)
        return [DCPChunk(chunk, size, extent, tensor.stride(), first_element)]
    start += info.offset + first_element * itemsize
    parts: list[DCPChunk] = []
    for part in split_rows(chunk, chunk.box.num_cols * itemsize):
        parts.append(DCPChunk(part, size, Extent(info.relative_path, start, part.num_bytes)))
        start += part.num_bytes
    return parts

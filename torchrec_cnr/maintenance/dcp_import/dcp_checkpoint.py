"""A checkpoint in DCP's own format: where its values are, and how rows of them are read.

Metadata and files are compared when it is opened, and no values are read. Each chunk of a tensor is a ``torch.save``
archive somewhere in a file. It is opened on the device ``meta``, which reads no values but tells where they begin, so
that rows can then be read by themselves, however large the chunk is.
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
class DCPChunk:
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
class DCPCheckpoint:
    """What a checkpoint in DCP's own format holds.

    Attributes:
        store: Its directory.
        chunks: All rows of all tensors.
        objects: By FQN, what ``torch.save`` wrote.
        paths: The keys and indices that lead to each FQN in the nested state dict.
    """

    store: Store
    chunks: tuple[DCPChunk, ...]
    objects: Mapping[str, Extent]
    paths: Mapping[str, tuple[str | int, ...]]

    def read(self, found: DCPChunk) -> Tensor:
        """The values of rows, on the host.

        Raises:
            DamagedError: The file is shorter, or bytes are no bools.
            StoreError: It cannot be read.
        """
        chunk = found.chunk
        if not chunk.num_bytes:
            return torch.empty(chunk.box.sizes, dtype=chunk.dtype, device="cpu")
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
        if not data.startswith(ARCHIVE_BEGIN):
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


def read_dcp_checkpoint(source: str | os.PathLike[str]) -> DCPCheckpoint:
    """Learn what a checkpoint in DCP's own format holds, and where. No values are read.

    Raises:
        CheckpointNotFoundError: There is none.
        ConfigurationError: It has tensors that cannot be stored, or was written through extensions.
        DamagedError: It contradicts itself, or its metadata needs more than DCP's classes.
        StoreError: It cannot be read.
    """
    store = Store.open(source)
    metadata = read_dcp_metadata(store)
    try:
        return _opened(store, metadata)
    except CNRError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError) as error:  # what a pickle says may be of any type
        raise DamagedError(
            f"{store.url}/{METADATA_FILE}: no sound metadata ({type(error).__name__}: {error})"
        ) from error


def _opened(store: Store, metadata: Metadata) -> DCPCheckpoint:
    known = set(metadata.state_dict_metadata)
    if any(type(fqn) is not str for fqn in known):
        raise DamagedError(f"{store.url}/{METADATA_FILE}: names that are no strings")
    wanted: list[tuple[Chunk, tuple[int, ...], _StorageInfo]] = []
    chunks: list[DCPChunk] = []
    objects: dict[str, Extent] = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            info = _info(store, metadata, MetadataIndex(fqn))
            objects[fqn] = Extent(info.relative_path, info.offset, info.length)
            continue
        if not isinstance(entry, TensorStorageMetadata):
            raise DamagedError(f"{store.url}/{METADATA_FILE}: {fqn!r} is neither tensor nor object")
        size, boxes, dtype = _checked(store, fqn, entry)
        if 0 in size:
            chunks.append(DCPChunk(Chunk(fqn, Box.whole(size), dtype), size, Extent("", 0, 0)))
            continue
        for box in boxes:
            info = _info(store, metadata, MetadataIndex(fqn, box.offsets))
            wanted.append((Chunk(fqn, box, dtype), size, info))
    wanted.sort(key=lambda item: (item[2].relative_path, item[2].offset))
    for name, of_file in groupby(wanted, key=lambda item: item[2].relative_path):
        chunks += _open_chunks(store, name, list(of_file))
    return DCPCheckpoint(store, tuple(chunks), objects, _paths(store, metadata, known))


def _checked(store: Store, fqn: str, entry: TensorStorageMetadata) -> tuple[tuple[int, ...], list[Box], torch.dtype]:
    """Size, boxes with elements, and dtype of a tensor."""
    size, dtype = tuple(map(int, entry.size)), entry.properties.dtype
    if dtype not in DTYPES.values():
        raise ConfigurationError(
            f"{store.url}: tensor {fqn!r} of {dtype} cannot be stored; leave it out, or convert it"
        )
    boxes = [Box(tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))) for chunk in entry.chunks]
    boxes = [box for box in boxes if 0 not in box.sizes]
    negative = min((0, *size, *(number for box in boxes for number in (*box.offsets, *box.sizes)))) < 0
    if negative or not (0 in size or fills(size, boxes)):
        raise DamagedError(
            f"{store.url}/{METADATA_FILE}: the chunks of {fqn!r} do not fill its size {list(size)} exactly"
        )
    return size, boxes, dtype


def _info(store: Store, metadata: Metadata, index: MetadataIndex) -> _StorageInfo:
    """Where an item lies: in a file of the checkpoint's own directory."""
    info = metadata.storage_data[index]
    if not isinstance(info, _StorageInfo) or min(info.offset, info.length) < 0:
        raise DamagedError(f"{store.url}/{METADATA_FILE}: it does not say where {index.fqn!r} lies")
    if info.transform_descriptors:
        raise ConfigurationError(
            f"{store.url}: {index.fqn!r} was written through extensions ({', '.join(info.transform_descriptors)}): "
            "dcp.load it, and save it without"
        )
    if not info.relative_path or "/" in info.relative_path or info.relative_path in (".", ".."):
        raise DamagedError(
            f"{store.url}/{METADATA_FILE}: {index.fqn!r} lies in {info.relative_path!r}, no file beside it"
        )
    return info


def _paths(store: Store, metadata: Metadata, known: set[str]) -> dict[str, tuple[str | int, ...]]:
    paths = {fqn: tuple(path) for fqn, path in (metadata.planner_data or {}).items() if fqn in known}
    for fqn, path in paths.items():
        if not path or type(path[0]) is not str or any(type(key) not in (str, int) for key in path):
            raise DamagedError(f"{store.url}/{METADATA_FILE}: {fqn!r} has no path of keys and indices, but {path!r}")
    return paths


def _open_chunks(
    store: Store, name: str, wanted: Sequence[tuple[Chunk, tuple[int, ...], _StorageInfo]]
) -> list[DCPChunk]:
    """Find the values of chunks that lie in one file."""
    found: list[DCPChunk] = []
    with missing_is_damage(), store.open_file(name) as file:
        for chunk, size, info in wanted:
            where = f"{store.url}/{name}: {chunk.fqn!r} at byte {info.offset}"
            try:
                view: Any = _create_file_view(file, info.offset, info.length)
                check_archive(_Part(file, info.offset, info.length))
                view.seek(0)
                opened: Any = torch.load(view, map_location="meta", weights_only=True)
            except OSError as error:
                raise StoreError(f"cannot read {where}: {error}") from error
            except Exception as error:  # bytes that are no pickle may make the unpickler raise anything
                raise DamagedError(f"{where}: no tensor that torch.save wrote ({type(error).__name__})") from error
            found += _located(where, chunk, size, info, opened)
    return found


class _Part(io.RawIOBase):
    """A range of a file, as a file; torch's own does not find its end when it is asked to."""

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
        left = max(0, self._num_bytes - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


def _located(where: str, chunk: Chunk, size: tuple[int, ...], info: _StorageInfo, opened: Any) -> list[DCPChunk]:
    """Rows of a chunk, divided so that each part can be held. Where rows do not follow one another, it stays whole."""
    if not isinstance(opened, Tensor) or opened.layout is not torch.strided:
        raise DamagedError(f"{where}: no dense tensor")
    if opened.dtype is not chunk.dtype or tuple(opened.shape) != chunk.box.sizes:
        raise DamagedError(
            f"{where}: {list(opened.shape)} of {opened.dtype}, expected {list(chunk.box.sizes)} of {chunk.dtype}"
        )
    storage: Any = opened.untyped_storage()
    itemsize, first, start = chunk.dtype.itemsize, int(opened.storage_offset()), int(storage._checkpoint_offset)
    span = 1 + sum((length - 1) * step for length, step in zip(opened.shape, opened.stride(), strict=True))
    if (first + span) * itemsize > storage.nbytes() or start + storage.nbytes() > info.length:
        raise DamagedError(f"{where}: it ends before its values do")
    if opened.numel() * itemsize > storage.nbytes():  # a small file could ask for any amount of memory
        raise DamagedError(f"{where}: {storage.nbytes()} bytes for {opened.numel()} values, which overlap")
    if not opened.is_contiguous():
        extent = Extent(info.relative_path, info.offset + start, (first + span) * itemsize)
        return [DCPChunk(chunk, size, extent, opened.stride(), first)]
    start += info.offset + first * itemsize
    parts: list[DCPChunk] = []
    for part in split_rows(chunk, chunk.box.num_cols * itemsize):
        parts.append(DCPChunk(part, size, Extent(info.relative_path, start, part.num_bytes)))
        start += part.num_bytes
    return parts

"""Exports to one file in the format of ``torch.save``: a pickle of the nested state dict, and the bytes of the tensors.

Such a file is a zip archive without compression. For each tensor, the pickle names the record that contains its bytes.
So the pickle is written first, with placeholders for tensors, and then the records, row by row. ``torch.save`` can
reserve space for bytes that are written later (``skip_data``). But then the checksums in the archive are wrong, and
other readers of zip archives report corruption.
"""

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import IO, Any

import torch
from torch import UntypedStorage
from torch.distributed.checkpoint._traverse import set_element
from torch.storage import TypedStorage

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.maintenance.export.contents import Chunk, Contents, bytes_of
from torchrec_cnr.maintenance.export.destination import Written, new_file
from torchrec_cnr.storage.files import Stream

_ALIGNMENT = 64  # of records, as in torch.save
_HEADER_BYTES = 30 + 20 + 4  # of a record: fixed part, 64-bit sizes, and the beginning of the padding
_MAX_PLACES = 1 << 20  # the total length of all lists of a state dict
_MAX_DEPTH = 64
_PATHS = "the paths of the checkpoint"
_FOLDER = "archive"  # torch.load accepts any name

_STORAGE_TYPES: Mapping[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}


def write_torch(contents: Contents, out: str | os.PathLike[str]) -> Written:
    """Write a file that ``torch.load(weights_only=True)`` reads as the nested state dict."""
    _check_paths(list(contents.paths.values()))
    nested: dict[str, Any] = {}
    for fqn, value in contents.objects().items():
        set_element(nested, contents.paths[fqn], value)
    for fqn, tensor in contents.tensors.items():
        set_element(nested, contents.paths[fqn], _LaterTensor(tensor))
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(nested)
    with new_file(out) as stream, closing(_Archive(stream)) as archive:
        archive.put("data.pkl", pickled.getvalue())
        archive.put("byteorder", b"little")
        archive.put("version", b"3\n")
        for number, storage in pickler.storages.items():
            archive.put(f"data/{number}", bytes(storage))
        numbers = {fqn: number for number, fqn in pickler.fqns.items()}
        for fqn, parts in groupby(contents.read(numbers), lambda part: part[0].fqn):
            with archive.record(f"data/{numbers[fqn]}") as record:
                for _, values in parts:
                    record.write(bytes_of(values).data)
    return stream.store, (stream.name,), ()


def _check_paths(paths: Sequence[Sequence[str | int]]) -> None:
    """Refuse paths that contradict one another, or that imply lists far longer than their contents."""
    if any(len(path) > _MAX_DEPTH for path in paths):
        raise DamagedError(f"{_PATHS} lead through more than {_MAX_DEPTH} keys; use another checkpoint")
    lengths: dict[tuple[str | int, ...], int] = {}  # the length of each list; 0 for a dictionary
    for path in paths:
        for depth, key in enumerate(path):
            length, prefix = (key + 1 if isinstance(key, int) else 0), tuple(path[:depth])
            known_length = lengths.setdefault(prefix, length)
            if (known_length == 0) != (length == 0):
                raise DamagedError(
                    f"{_PATHS} have {list(prefix)} as a list and as a dictionary; use another checkpoint"
                )
            lengths[prefix] = max(known_length, length)
    item_paths = {tuple(path) for path in paths}
    if len(item_paths) < len(paths) or item_paths & lengths.keys():
        raise DamagedError(f"{_PATHS} lead to several items in one place; use another checkpoint")
    if sum(lengths.values()) > _MAX_PLACES:
        raise DamagedError(f"{_PATHS} lead into lists of more than {_MAX_PLACES} places; use another checkpoint")


@dataclass(frozen=True)
class _LaterTensor:
    """The placeholder in the state dict for a tensor that is read later."""

    whole: Chunk


@dataclass(frozen=True)
class _LaterStorage:
    """The placeholder for the storage of such a tensor."""

    whole: Chunk


class _Pickler(pickle.Pickler):
    """Pickles like ``torch.save``, and numbers the records that will contain the bytes of tensors.

    Attributes:
        fqns: The FQN of the tensor to read, by record number.
        storages: The storage of tensors within objects, by record number.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=2)  # the one that the weights-only unpickler reads
        self.fqns: dict[int, str] = {}
        self.storages: dict[int, UntypedStorage] = {}

    def reducer_override(self, value: Any) -> Any:
        """Pickle a placeholder like a tensor that is a view of its whole storage."""
        if not isinstance(value, _LaterTensor):
            return NotImplemented
        size = value.whole.box.sizes
        stride = torch.empty(size, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (_LaterStorage(value.whole), 0, size, stride, False, OrderedDict())

    def persistent_id(self, value: Any) -> Any:
        """Return what the pickle contains for a storage: its type, record, device, and number of elements."""
        number = len(self.fqns) + len(self.storages)
        if isinstance(value, _LaterStorage):
            self.fqns[number] = value.whole.fqn
            dtype = value.whole.dtype
            return "storage", _STORAGE_TYPES[dtype], str(number), "cpu", value.whole.num_bytes // dtype.itemsize
        if isinstance(value, TypedStorage):
            self.storages[number] = value._untyped_storage.cpu()
            return "storage", getattr(torch, value._pickle_storage_type()), str(number), "cpu", value._size()
        return None


class _Archive:
    """A zip archive that is written sequentially."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._zip = zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED)

    @contextmanager
    def record(self, name: str) -> Iterator[IO[bytes]]:
        """Yield a file to write a record. Its bytes begin at a multiple of 64, to align memory-mapped tensors."""
        info = zipfile.ZipInfo(f"{_FOLDER}/{name}")
        padding = -(self._stream.num_bytes + _HEADER_BYTES + len(info.filename)) % _ALIGNMENT
        info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        with self._zip.open(info, "w", force_zip64=True) as file:
            yield file

    def put(self, name: str, data: bytes) -> None:
        """Write a record from bytes in memory."""
        with self.record(name) as file:
            file.write(data)

    def close(self) -> None:
        """Write the list of records, without which the file is not a valid archive."""
        self._zip.close()

"""Writing packs: the data files of a checkpoint.

A pack is a safetensors file of bounded size. It is assembled in memory and written once, with one request. Blobs of
wider elements come first, so that every tensor in it is aligned without padding.
"""

import json
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from awscrt import checksums
from torch.profiler import record_function

from torchrec_cnr.arguments import check_count
from torchrec_cnr.format.blob_bytes import Bytes
from torchrec_cnr.format.manifest import PACK_SUFFIX, Pack
from torchrec_cnr.format.row_sets import Blob, UnplacedBlob
from torchrec_cnr.storage.files import Buffer
from torchrec_cnr.storage.row_log import PackTarget
from torchrec_cnr.storage.store import Store
from torchrec_cnr.throttling import CpuThrottle

PACK_BYTES = 16 << 20
BLOCK_BYTES = 8 << 20
BUFFER_BYTES = 64 << 20

SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def crc32c(data: Bytes | bytes, before: int = 0) -> int:
    """Return the CRC-32C (Castagnoli) of a buffer, continued from ``before``, the CRC of the bytes before the buffer.

    AWS's implementation processes 64 bytes per step on processors that can, and releases the GIL.
    """
    return int(checksums.crc32c(data, before))


@dataclass(frozen=True, eq=False)
class _Part:
    """A blob that waits to be written into a pack; ``number`` is the number that ``PackWriter.add`` returned."""

    number: UnplacedBlob
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Bytes


class PackWriter:
    """Fills packs with blobs and writes each when it is full, up to ``thread_count`` at once.

    Args:
        store: Where to write packs: a directory or a log.
        prefix: Prefix of their names.
        thread_count: Number of packs written at the same time.
        pack_bytes: Size in bytes at which a pack is full.
        buffer_bytes: Largest total size in bytes of all packs being filled. Above it, the fullest pack is written.

    Attributes:
        pace: Throttle that rests after each blob; None for no throttling.
        wait_secs: Seconds that the caller has waited for packs to be written.
        upload_secs: Seconds that all threads together took to write packs.
    """

    def __init__(
        self,
        store: PackTarget,
        prefix: str,
        thread_count: int,
        pack_bytes: int = PACK_BYTES,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.pace: CpuThrottle | None = None
        self._store = store
        self._prefix = prefix
        self._pack_bytes = pack_bytes
        self._buffer_bytes = buffer_bytes
        self._thread_count = thread_count
        self._threads = ThreadPoolExecutor(thread_count, thread_name_prefix="cnr-write")
        self._writes: deque[Future[_WrittenPack]] = deque()
        self._parts: dict[tuple[int, int], list[_Part]] = {}
        self._filled_bytes: dict[tuple[int, int], int] = {}
        self._num_blobs = 0
        self._packs: list[Pack] = []
        self._blobs: dict[UnplacedBlob, Blob] = {}
        self.wait_secs = 0.0
        self.upload_secs = 0.0

    def add(
        self, name: str, dtype: str, shape: tuple[int, ...], data: Bytes, heat: int = 0, age: int = 0
    ) -> UnplacedBlob:
        """Add a blob to a pack; its bytes must not change afterwards.

        Args:
            name: Name of the tensor in the pack's header.
            dtype: Type of its elements, by torch's name.
            shape: Shape of the tensor.
            data: Bytes of the tensor.
            heat: Heat of its rows. Only blobs of the same heat and age share a pack.
            age: Age of its rows.

        Returns:
            The number of the blob. :meth:`finish` returns the blobs in the order of their numbers.
        """
        kind = (heat, age)
        if self._filled_bytes.get(kind, 0) + data.nbytes > self._pack_bytes:
            self._write_pack(kind)
        if sum(self._filled_bytes.values()) + data.nbytes > self._buffer_bytes and self._filled_bytes:
            self._write_pack(max(self._filled_bytes, key=lambda kind: self._filled_bytes[kind]))
        blob = UnplacedBlob(self._num_blobs)
        self._num_blobs += 1
        self._parts.setdefault(kind, []).append(_Part(blob, name, SAFETENSORS[dtype], shape, data))
        self._filled_bytes[kind] = self._filled_bytes.get(kind, 0) + data.nbytes
        if self.pace is not None:
            self.pace.rest()
        return blob

    def flush(self) -> None:
        """Write all packs that are being filled, and wait until they are written."""
        for kind in list(self._parts):
            self._write_pack(kind)
        while self._writes:
            self._take_written()

    def end_pack(self, target: PackTarget) -> None:
        """Write the pack of rows without heat or age to a separate target, even if it is not full."""
        self._write_pack((0, 0), target)

    def finish(self) -> tuple[tuple[Pack, ...], tuple[Blob, ...]]:
        """Write the remaining packs, wait, and return all packs of this rank and all blobs by number."""
        self.flush()
        return tuple(self._packs), tuple(blob for _, blob in sorted(self._blobs.items()))

    @property
    def block_bytes(self) -> int:
        """Number of bytes of values that a blob should hold; quantized, they take a quarter of that or less."""
        return min(BLOCK_BYTES, 2 * self._pack_bytes)

    def close(self) -> None:
        """Stop the threads; drop packs that no thread has begun to write."""
        self._threads.shutdown(cancel_futures=True)

    def _write_pack(self, kind: tuple[int, int], target: PackTarget | None = None) -> None:
        parts = self._parts.pop(kind, [])
        if not parts:
            return
        del self._filled_bytes[kind]
        while len(self._writes) >= self._thread_count:
            self._take_written()
        index = len(self._packs) + len(self._writes)
        stem = f"{self._prefix}-{index}"
        self._writes.append(self._threads.submit(_write_pack, target or self._store, stem, index, parts, kind[0]))

    def _take_written(self) -> None:
        began = time.monotonic()
        written_pack = self._writes.popleft().result()
        self.wait_secs += time.monotonic() - began
        self.upload_secs += written_pack.secs
        self._packs.append(written_pack.pack)
        self._blobs.update(written_pack.blobs)


@dataclass(frozen=True)
class _WrittenPack:
    """A written pack, the blobs in it by number, and the seconds that the write took."""

    pack: Pack
    blobs: Mapping[UnplacedBlob, Blob]
    secs: float


def _write_pack(store: PackTarget, stem: str, index: int, parts: list[_Part], heat: int) -> _WrittenPack:
    began = time.monotonic()
    parts = sorted(parts, key=lambda part: -_ITEM_BYTES[part.dtype])
    tensors = ((part.name, part.dtype, part.shape, part.data.nbytes) for part in parts)
    header = safetensors_header(tensors, {"format": "torchrec_cnr"})
    blobs = {}
    offset = len(header)
    for part in parts:
        blobs[part.number] = Blob(index, offset, part.data.nbytes, crc32c(part.data))
        offset += part.data.nbytes
    name = f"{stem}{PACK_SUFFIX}"
    with record_function("torchrec_cnr.upload"):
        content: list[Buffer] = [header, *(part.data.data for part in parts)]
        log = store.put(name, content)
        if isinstance(store, Store) and store.copies is not None:
            store.copies.put(f"{store.url}/{name}", content)
    pack = Pack(name, offset, len(header), crc32c(header), heat=heat, log=log)
    return _WrittenPack(pack, blobs, time.monotonic() - began)


def safetensors_header(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors header: its length, then JSON, padded with spaces to a multiple of eight bytes.

    Args:
        tensors: Name, dtype by safetensors' name, shape, and size in bytes of each tensor, in the order of the file. A
            duplicate name gets a tilde.
        metadata: Metadata of the file.
    """
    entries: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, dtype, shape, num_bytes in tensors:
        start, end = end, end + num_bytes
        while name in entries:
            name += "~"
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check_thread_count(thread_count: int) -> None:
    """Raise ``ConfigurationError`` unless the value is a valid number of threads."""
    check_count("thread_count", thread_count, least=1)


def check_pack_bytes(pack_bytes: int) -> None:
    """Raise ``ConfigurationError`` unless the value is a valid size of packs: from 1 KiB to 1 GiB."""
    check_count("pack_bytes", pack_bytes, 1 << 10, 1 << 30)

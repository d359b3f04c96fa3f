"""Packs: the data files of a checkpoint.

A pack is a safetensors file of bounded size, put together in memory and written once, with one request. Blobs of wider
elements come first, so that every tensor in it is aligned without padding. Reading goes the other way: the blobs wanted
of a pack are joined into spans, a span is one request, and no byte is handed on before its blob's digest was checked.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import google_crc32c

from torchrec_cnr.errors import ConfigurationError, DamagedError, StoreError
from torchrec_cnr.manifest import Blob, Pack
from torchrec_cnr.stores import Bytes, Store

PACK_BYTES = 16 << 20
BLOCK_BYTES = 8 << 20
BUFFER_BYTES = 64 << 20
_SPAN_BYTES = 16 << 20
_SPAN_GAP_BYTES = 256 << 10
_GAP_DIVISOR = 8  # of the bytes wanted in a span, its gaps may add this part
_FREE_GAP_BYTES = 4 << 10

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


def crc32c(data: Bytes | bytes) -> int:
    """Castagnoli's CRC of a buffer."""
    return int(google_crc32c.extend(0, data))


@dataclass(frozen=True, eq=False)
class _Part:
    """A blob on its way into a pack; ``number`` is what ``PackWriter.add`` returned."""

    number: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Bytes


class PackWriter:
    """Fills packs with blobs and writes each when it is full, up to ``thread_count`` at once.

    Args:
        store: Where to.
        prefix: Begins their names.
        thread_count: Packs written at once.
        pack_bytes: When one is full.
        buffer_bytes: Of all packs being filled. If that is exceeded, the fullest is written as it is.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        thread_count: int,
        pack_bytes: int = PACK_BYTES,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._pack_bytes = pack_bytes
        self._buffer_bytes = buffer_bytes
        self._thread_count = thread_count
        self._threads = ThreadPoolExecutor(thread_count, thread_name_prefix="cnr-write")
        self._writes: deque[Future[tuple[Pack, list[tuple[int, Blob]]]]] = deque()
        self._parts: dict[tuple[int, int], list[_Part]] = {}
        self._filled_bytes: dict[tuple[int, int], int] = {}
        self._num_blobs = 0
        self._packs: list[Pack] = []
        self._blobs: dict[int, Blob] = {}

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: Bytes, heat: int = 0, age: int = 0) -> int:
        """Take a blob; its bytes must not change afterwards.

        Args:
            heat: Of its rows. Only blobs of one heat and age share a pack.
            age: Of its rows.

        Returns:
            Its number among the blobs that :meth:`finish` returns.
        """
        kind = (heat, age)
        if self._filled_bytes.get(kind, 0) + data.nbytes > self._pack_bytes:
            self._write_pack(kind)
        if sum(self._filled_bytes.values()) + data.nbytes > self._buffer_bytes and self._filled_bytes:
            self._write_pack(max(self._filled_bytes, key=lambda kind: self._filled_bytes[kind]))
        number = self._num_blobs
        self._num_blobs += 1
        self._parts.setdefault(kind, []).append(_Part(number, name, SAFETENSORS[dtype], shape, data))
        self._filled_bytes[kind] = self._filled_bytes.get(kind, 0) + data.nbytes
        return number

    def flush(self) -> None:
        """Write what there is, and wait for it."""
        for kind in list(self._parts):
            self._write_pack(kind)
        while self._writes:
            self._take_written()

    def finish(self) -> tuple[tuple[Pack, ...], tuple[Blob, ...]]:
        """Write what is left and wait: all packs of this rank, and all blobs by number."""
        self.flush()
        return tuple(self._packs), tuple(self._blobs[number] for number in range(self._num_blobs))

    @property
    def block_bytes(self) -> int:
        """How many bytes of values a blob should hold; quantized, they take a quarter of that or less."""
        return min(BLOCK_BYTES, 2 * self._pack_bytes)

    def close(self) -> None:
        """Stop the threads; packs that are not being written yet are dropped."""
        self._threads.shutdown(cancel_futures=True)

    def _write_pack(self, kind: tuple[int, int]) -> None:
        parts = self._parts.pop(kind, [])
        if not parts:
            return
        del self._filled_bytes[kind]
        while len(self._writes) >= self._thread_count:
            self._take_written()
        index = len(self._packs) + len(self._writes)
        self._writes.append(
            self._threads.submit(_write_pack, self._store, f"{self._prefix}-{index}", index, parts, kind[0])
        )

    def _take_written(self) -> None:
        pack, blobs = self._writes.popleft().result()
        self._packs.append(pack)
        self._blobs.update(blobs)


def _write_pack(
    store: Store, stem: str, index: int, parts: list[_Part], heat: int
) -> tuple[Pack, list[tuple[int, Blob]]]:
    parts = sorted(parts, key=lambda part: -_ITEM_BYTES[part.dtype])
    tensors = ((part.name, part.dtype, part.shape, part.data.nbytes) for part in parts)
    header = safetensors_header(tensors, {"format": "torchrec_cnr"})
    blobs = []
    end = len(header)
    for part in parts:
        blobs.append((part.number, Blob(index, end, part.data.nbytes, crc32c(part.data))))
        end += part.data.nbytes
    name = f"{stem}.safetensors"
    store.put(name, [header, *(part.data.data for part in parts)])
    return Pack(name, end, len(header), crc32c(header), heat=heat), blobs


def safetensors_header(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """A safetensors header: its length, then JSON, filled up with blanks to a multiple of eight bytes.

    Args:
        tensors: Name, dtype as safetensors calls it, shape, and size in bytes of each, in their order in the file. A
            name that was there before gets a tilde.
        metadata: What is said of the file.
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


@dataclass(frozen=True)
class Span:
    """A range of one pack that is read with one request.

    Attributes:
        pack: Index into the manifest's packs.
        start: First byte.
        stop: Byte behind the last.
        blobs: The wanted blobs in it, each with its key, by offset.
    """

    pack: int
    start: int
    stop: int
    blobs: tuple[tuple[str, Blob], ...]


def plan_spans(wanted: Sequence[tuple[str, Blob]]) -> list[Span]:
    """Join blobs that lie close together; every blob is in exactly one span. Keys name the blobs in errors.

    A gap between two blobs is read too, to save a request: if it is a small part of what is wanted around it, so that
    gaps never make a load much longer, or if it is so short that it costs nothing.
    """
    spans: list[Span] = []
    wanted_bytes = gap_bytes = 0  # of the last span
    for key, blob in sorted(wanted, key=lambda item: (item[1].pack, item[1].offset, item[1].num_bytes)):
        stop = blob.offset + blob.num_bytes
        last = spans[-1] if spans else None
        if last is not None and last.pack == blob.pack and stop - last.start <= _SPAN_BYTES:
            gap = max(0, blob.offset - last.stop)
            allowed = min(_SPAN_GAP_BYTES, (wanted_bytes + blob.num_bytes) // _GAP_DIVISOR - gap_bytes)
            if gap <= max(allowed, _FREE_GAP_BYTES):
                spans[-1] = Span(last.pack, last.start, max(stop, last.stop), (*last.blobs, (key, blob)))
                wanted_bytes, gap_bytes = wanted_bytes + blob.num_bytes, gap_bytes + gap
                continue
        spans.append(Span(blob.pack, blob.offset, stop, ((key, blob),)))
        wanted_bytes, gap_bytes = blob.num_bytes, 0
    return spans


def read_spans(
    store: Store, packs: Sequence[Pack], spans: Sequence[Span], thread_count: int
) -> Iterator[tuple[str, Bytes]]:
    """Read spans, a few ahead of the caller, and yield each blob's key and verified bytes.

    Raises:
        DamagedError: A pack is missing, truncated or altered.
        StoreError: A pack cannot be read for another reason.
    """
    with ThreadPoolExecutor(thread_count, thread_name_prefix="cnr-read") as threads:
        waiting = deque(spans)
        reads: deque[Future[list[tuple[str, Bytes]]]] = deque()
        try:
            while waiting or reads:
                while waiting and len(reads) <= thread_count:
                    span = waiting.popleft()
                    reads.append(threads.submit(_read_span, store, packs[span.pack], span))
                yield from reads.popleft().result()
        finally:
            for read in reads:
                read.cancel()


def _read_span(store: Store, pack: Pack, span: Span) -> list[tuple[str, Bytes]]:
    store = store if pack.directory is None else store.at(pack.directory)
    where = f"{store.url}/{pack.name}"
    try:
        buffer = store.read_array(pack.name, span.start, span.stop)
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise DamagedError(f"{where}: the pack is missing; use another checkpoint") from error
        raise
    if len(buffer) != span.stop - span.start:
        raise DamagedError(
            f"{where}: truncated: bytes {span.start} to {span.stop} wanted, {len(buffer)} of them there; "
            "use another checkpoint"
        )
    found = []
    for key, blob in span.blobs:
        content = buffer[blob.offset - span.start : blob.offset - span.start + blob.num_bytes]
        actual = crc32c(content)
        if actual != blob.crc32c:
            raise DamagedError(
                f"{where}: {key}: crc32c is {actual:#010x}, the manifest says {blob.crc32c:#010x}; "
                "use another checkpoint"
            )
        found.append((key, content))
    return found


class PackReader:
    """Reads blobs of one checkpoint. Of every pack that it reads from, it checks the header too, once.

    A load does not need the safetensors headers, but other readers of packs do.
    """

    def __init__(self, store: Store, packs: Sequence[Pack], thread_count: int) -> None:
        self._store = store
        self._packs = packs
        self._thread_count = thread_count
        self._checked: set[int] = set()

    def read(self, *turns: Iterable[tuple[str, Blob]]) -> Iterator[tuple[str, Bytes]]:
        """Yield each blob's key and verified bytes: turn by turn, those of one in their order in the packs.

        Raises:
            DamagedError: A pack is missing, truncated or altered.
            StoreError: A pack cannot be read for another reason.
        """
        wanted = [list(turn) for turn in turns]
        touched = {blob.pack for turn in wanted for _, blob in turn} - self._checked
        headers = {f"header of {_path(self._packs[index])}": self._header(index) for index in touched}
        wanted[:1] = [[*headers.items(), *wanted[0]]] if wanted else []
        spans = [span for turn in wanted for span in plan_spans(turn)]
        for key, data in read_spans(self._store, self._packs, spans, self._thread_count):
            if key not in headers:
                yield key, data
        self._checked |= touched

    def _header(self, index: int) -> Blob:
        pack = self._packs[index]
        return Blob(index, 0, pack.header_bytes, pack.header_crc32c)


def _path(pack: Pack) -> str:
    """Packs of several directories may have one name."""
    return pack.name if pack.directory is None else f"{pack.directory}/{pack.name}"


def check_thread_count(thread_count: int) -> None:
    """Refuse what is no number of threads.

    Raises:
        ConfigurationError: It is less than 1.
    """
    if thread_count < 1:
        raise ConfigurationError(f"'thread_count' must be at least 1 (got {thread_count})")


def check_pack_bytes(pack_bytes: int) -> None:
    """Refuse packs that are no files, or that would not fit in memory.

    Raises:
        ConfigurationError: It is less than 1 KiB or more than 1 GiB.
    """
    if not 1 << 10 <= pack_bytes <= 1 << 30:
        raise ConfigurationError(f"'pack_bytes' must be from 1024 to 1073741824 (got {pack_bytes})")

"""Reading packs: the blobs wanted of one are joined into spans, and a span is one request.

No byte is handed on before its blob's digest was checked. Digests are worked out while a span is read, piece by piece:
to go through it once more would take longer, as it is larger than what a processor keeps at hand.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torchrec_cnr.errors import ConfigurationError, DamagedError, StoreError
from torchrec_cnr.format.blob_bytes import Bytes
from torchrec_cnr.format.manifest import Pack
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.storage.pack_writer import crc32c
from torchrec_cnr.storage.store import Store

_SPAN_BYTES = 16 << 20
_SPAN_GAP_BYTES = 256 << 10
_GAP_DIVISOR = 8  # of the bytes wanted in a span, its gaps may add this part
_FREE_GAP_BYTES = 4 << 10

Prepare = Callable[[str, Bytes], Bytes]


def unprepared(key: str, data: Bytes) -> Bytes:
    """A blob as it was read."""
    return data


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


class SpanDigests:
    """The crc32c of each blob in a span, worked out while its bytes arrive.

    Args:
        span: Where the blobs lie, by offset; some may overlap.

    Attributes:
        found: The digest of each blob, as far as the bytes that have come.
    """

    def __init__(self, span: Span) -> None:
        self.found = [0] * len(span.blobs)
        self._bounds = [(blob.offset, blob.offset + blob.num_bytes) for _, blob in span.blobs]
        self._place = span.start
        self._num_done = 0  # of the blobs, from the first on

    def extend(self, piece: Bytes) -> None:
        """Take the bytes that come next."""
        place, end = self._place, self._place + len(piece)
        for number in range(self._num_done, len(self._bounds)):
            start, stop = self._bounds[number]
            if start >= end:
                break
            if stop > place:
                self.found[number] = crc32c(piece[max(0, start - place) : stop - place], self.found[number])
        while self._num_done < len(self._bounds) and self._bounds[self._num_done][1] <= end:
            self._num_done += 1
        self._place = end


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
    store: Store, packs: Sequence[Pack], spans: Sequence[Span], thread_count: int, prepare: Prepare = unprepared
) -> Iterator[tuple[str, Bytes]]:
    """Read spans, a few ahead of the caller, and yield each blob's key and verified bytes.

    Args:
        store: Of the checkpoint.
        packs: Its packs.
        spans: What to read.
        thread_count: Threads that read.
        prepare: What becomes of each blob, by its key, in the thread that has read it.

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
                    reads.append(threads.submit(_read_span, store, packs[span.pack], span, prepare))
                yield from reads.popleft().result()
        finally:
            for read in reads:
                read.cancel()


def _read_span(store: Store, pack: Pack, span: Span, prepare: Prepare) -> list[tuple[str, Bytes]]:
    store = store if pack.directory is None else store.at(pack.directory)
    where = place_of(store, pack)
    digests = SpanDigests(span)
    try:
        if pack.log is not None:
            buffer = _read_log(store, pack, span)
            digests.extend(buffer)
        else:
            buffer = store.read_array(pack.name, span.start, span.stop, digests.extend)
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
    for (key, blob), actual in zip(span.blobs, digests.found, strict=True):
        if actual != blob.crc32c:
            raise DamagedError(
                f"{where}: {key}: crc32c is {actual:#010x}, the manifest says {blob.crc32c:#010x}; "
                "use another checkpoint"
            )
        start = blob.offset - span.start
        found.append((key, prepare(key, buffer[start : start + blob.num_bytes])))
    return found


def place_of(store: Store, pack: Pack) -> str:
    """Where a pack lies, for messages: its path or URL, or its records in a log.

    Args:
        store: Its directory, or of the checkpoint that has it in a log.
        pack: The pack.
    """
    return f"{store.url}/{pack.name}" if pack.log is None else f"{store.url}: {pack.name} in {pack.log}"


def _read_log(store: Store, pack: Pack, span: Span) -> Bytes:
    assert pack.log is not None
    if store.row_log is None:
        raise ConfigurationError(
            f"{store.url}: {pack.name}: its rows lie in the topic {pack.log.topic!r} of Kafka; pass "
            f"KafkaRows(bootstrap, {pack.log.topic!r}) as 'row_log', or on the command line "
            f"--kafka HOST:PORT/{pack.log.topic}"
        )
    store.bandwidth.wait(span.stop - span.start)
    try:
        return store.row_log.read(pack.name, pack.num_bytes, pack.log, span.start, span.stop)
    except (DamagedError, StoreError) as error:
        raise type(error)(f"{place_of(store, pack)}: {error}") from error


class PackReader:
    """Reads blobs of one checkpoint. Of every pack that it reads from, it checks the header too, once.

    A load does not need the safetensors headers, but other readers of packs do.
    """

    def __init__(self, store: Store, packs: Sequence[Pack], thread_count: int) -> None:
        self._store = store
        self._packs = packs
        self._thread_count = thread_count
        self._checked: set[int] = set()

    def read(
        self, *turns: Iterable[tuple[str, Blob]], prepare: Prepare = unprepared
    ) -> Generator[tuple[str, Bytes], None, None]:
        """Yield each blob's key and verified bytes: turn by turn, those of one in the order in which packs have them.

        Turns are of keys and blobs. The rest is as in :func:`read_spans`. The threads run until the generator is used
        up or closed. Close it if a variable refers to it, because after an error a traceback may refer to that.
        """
        wanted = [list(turn) for turn in turns]
        touched = {blob.pack for turn in wanted for _, blob in turn} - self._checked
        headers = {f"header of {_path(self._packs[index])}": self._header(index) for index in touched}
        wanted[:1] = [[*headers.items(), *wanted[0]]] if wanted else []

        def prepared(key: str, data: Bytes) -> Bytes:
            return data if key in headers else prepare(key, data)

        spans = [span for turn in wanted for span in sorted(plan_spans(turn), key=self._place)]
        for key, data in read_spans(self._store, self._packs, spans, self._thread_count, prepared):
            if key not in headers:
                yield key, data
        self._checked |= touched

    def _place(self, span: Span) -> tuple[int, str, int, int]:
        """Packs in files in their order, then those in logs in the order in which they lie there."""
        log = self._packs[span.pack].log
        return (0, "", 0, span.pack) if log is None else (1, log.topic, log.partition, log.first)

    def _header(self, index: int) -> Blob:
        pack = self._packs[index]
        return Blob(index, 0, pack.header_bytes, pack.header_crc32c)


def _path(pack: Pack) -> str:
    """Packs of several directories may have one name."""
    return pack.name if pack.directory is None else f"{pack.directory}/{pack.name}"

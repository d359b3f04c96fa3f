"""Reading packs: close blobs of a pack are joined into spans, and each span is read with one request.

A blob is returned only after its digest was checked. Digests are computed piece by piece while a span arrives. A span
is larger than a processor's cache, so a second pass over it would take longer.
"""

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torchrec_cnr.errors import ConfigurationError, DamagedError, StoreError
from torchrec_cnr.format.blob_bytes import Bytes
from torchrec_cnr.format.manifest import Pack
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.storage.local_copies import LocalCopies
from torchrec_cnr.storage.pack_writer import crc32c
from torchrec_cnr.storage.store import Store

_SPAN_BYTES = 16 << 20
_SPAN_GAP_BYTES = 256 << 10
_GAP_DIVISOR = 8  # the gaps of a span may have this fraction of its wanted bytes: one eighth
_FREE_GAP_BYTES = 4 << 10
_QUICK_BYTES = 1 << 20  # of local files: to hand them to threads takes longer than to read them
# A header is always checked if at least a half of the pack's blobs is wanted, or 16 times the bytes of the header.
_MOST_PART, _HEADER_PART = 2, 16

Prepare = Callable[[str, Bytes], Bytes]


def unprepared(key: str, data: Bytes) -> Bytes:
    """Return a blob as it was read."""
    return data


@dataclass(frozen=True)
class Span:
    """A range of one pack that is read with one request.

    Attributes:
        pack: Index into the manifest's packs.
        start: Offset of the first byte.
        stop: Offset after the last byte.
        blobs: The wanted blobs in the range, each with its key, sorted by offset.
    """

    pack: int
    start: int
    stop: int
    blobs: tuple[tuple[str, Blob], ...]


class SpanDigests:
    """The crc32c of each blob in a span, computed while the bytes of the span arrive.

    Args:
        span: The span, whose blobs are sorted by offset; some may overlap.

    Attributes:
        found: The digest of each blob, of the bytes that have arrived.
    """

    def __init__(self, span: Span) -> None:
        self.found = [0] * len(span.blobs)
        self._bounds = [(blob.offset, blob.offset + blob.num_bytes) for _, blob in span.blobs]
        self._place = span.start
        self._num_done = 0  # number of blobs that are complete, from the first on

    def extend(self, piece: Bytes) -> None:
        """Process the next bytes of the span."""
        position, end = self._place, self._place + len(piece)
        for index in range(self._num_done, len(self._bounds)):
            start, stop = self._bounds[index]
            if start >= end:
                break
            if stop > position:
                self.found[index] = crc32c(piece[max(0, start - position) : stop - position], self.found[index])
        while self._num_done < len(self._bounds) and self._bounds[self._num_done][1] <= end:
            self._num_done += 1
        self._place = end


def plan_spans(wanted: Sequence[tuple[str, Blob]]) -> list[Span]:
    """Join blobs that are close together; every blob is in exactly one span. Keys name the blobs in errors.

    The gap between two blobs is read too, if that is worth a saved request. The gap must either be very short, or be a
    small part of the wanted bytes around it, so that gaps never make a load much longer.
    """
    spans: list[Span] = []
    wanted_bytes = gap_bytes = 0  # of the last span
    for key, blob in sorted(wanted, key=lambda item: (item[1].pack, item[1].offset, item[1].num_bytes)):
        stop = blob.offset + blob.num_bytes
        last_span = spans[-1] if spans else None
        if last_span is not None and last_span.pack == blob.pack and stop - last_span.start <= _SPAN_BYTES:
            gap = max(0, blob.offset - last_span.stop)
            allowed = min(_SPAN_GAP_BYTES, (wanted_bytes + blob.num_bytes) // _GAP_DIVISOR - gap_bytes)
            if gap <= max(allowed, _FREE_GAP_BYTES):
                spans[-1] = Span(
                    last_span.pack, last_span.start, max(stop, last_span.stop), (*last_span.blobs, (key, blob))
                )
                wanted_bytes, gap_bytes = wanted_bytes + blob.num_bytes, gap_bytes + gap
                continue
        spans.append(Span(blob.pack, blob.offset, stop, ((key, blob),)))
        wanted_bytes, gap_bytes = blob.num_bytes, 0
    return spans


def read_spans(
    store: Store, packs: Sequence[Pack], spans: Sequence[Span], thread_count: int, prepare: Prepare = unprepared
) -> Iterator[tuple[str, Bytes]]:
    """Read spans, a few ahead of the caller, and yield each blob's key and verified bytes.

    A single span, and a few small ones of local files, are read in this thread.

    Args:
        store: Store of the checkpoint.
        packs: The checkpoint's packs.
        spans: The spans to read.
        thread_count: Number of threads that read.
        prepare: Called with the key and bytes of each blob, in the thread that has read it; returns the bytes to yield.

    Raises:
        DamagedError: A pack is missing, truncated or altered.
        StoreError: A pack cannot be read for another reason.
    """
    is_quick = store.is_local and sum(span.stop - span.start for span in spans) <= _QUICK_BYTES
    if len(spans) == 1 or (is_quick and all(packs[span.pack].log is None for span in spans)):
        for span in spans:
            yield from _read_span(store, packs[span.pack], span, prepare)
        return
    with ThreadPoolExecutor(thread_count, thread_name_prefix="cnr-read") as threads:
        waiting = deque(spans)
        futures: deque[Future[list[tuple[str, Bytes]]]] = deque()
        try:
            while waiting or futures:
                while waiting and len(futures) <= thread_count:
                    span = waiting.popleft()
                    futures.append(threads.submit(_read_span, store, packs[span.pack], span, prepare))
                yield from futures.popleft().result()
        finally:
            for future in futures:
                future.cancel()


def _read_span(store: Store, pack: Pack, span: Span, prepare: Prepare) -> list[tuple[str, Bytes]]:
    store = store if pack.directory is None else store.at(pack.directory)
    copies, where = None if pack.log is not None else store.copies, place_of(store, pack)
    buffer = None if copies is None else _copied(copies, where, span)
    if buffer is None:
        buffer = _stored(store, pack, span)
        if copies is not None:
            copies.fill(where, span.start, buffer)
    blobs = ((key, buffer[blob.offset - span.start :][: blob.num_bytes]) for key, blob in span.blobs)
    return [(key, prepare(key, data)) for key, data in blobs]


def _copied(copies: LocalCopies, where: str, span: Span) -> Bytes | None:
    """Read a span from a local copy; return None if a blob there does not have its digest."""
    digests = SpanDigests(span)
    buffer = copies.read(where, span.start, span.stop, digests.extend)
    if buffer is None or digests.found != [blob.crc32c for _, blob in span.blobs]:
        return None
    copies.used(buffer.nbytes)
    return buffer


def _stored(store: Store, pack: Pack, span: Span) -> Bytes:
    """Read a span from the store, and check the digests of its blobs."""
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
            raise DamagedError(f"{where}: the data file is missing; use another checkpoint") from error
        raise
    if len(buffer) != span.stop - span.start:
        raise DamagedError(
            f"{where}: truncated: expected bytes {span.start} to {span.stop}, got {len(buffer)} bytes; "
            "use another checkpoint"
        )
    for (key, blob), actual in zip(span.blobs, digests.found, strict=True):
        if actual != blob.crc32c:
            raise DamagedError(
                f"{where}: {key}: corrupt: crc32c is {actual:#010x}, the manifest says {blob.crc32c:#010x}; "
                "use another checkpoint"
            )
    return buffer


def place_of(store: Store, pack: Pack) -> str:
    """Return where a pack is, for messages: its path or URL, or its records in a log.

    Args:
        store: Directory of the pack, or of the checkpoint if the pack is in a log.
        pack: The pack.
    """
    return f"{store.url}/{pack.name}" if pack.log is None else f"{store.url}: {pack.name} in {pack.log}"


def _read_log(store: Store, pack: Pack, span: Span) -> Bytes:
    assert pack.log is not None
    if store.row_log is None:
        raise ConfigurationError(
            f"{store.url}: {pack.name}: its rows are in the Kafka topic {pack.log.topic!r}; pass "
            f"KafkaRows(bootstrap, {pack.log.topic!r}) as 'row_log', or on the command line "
            f"--kafka HOST:PORT/{pack.log.topic}"
        )
    store.bandwidth.wait(span.stop - span.start)
    try:
        return store.row_log.read(pack.name, pack.num_bytes, pack.log, span.start, span.stop)
    except (DamagedError, StoreError) as error:
        raise type(error)(f"{place_of(store, pack)}: {error}") from error


class PackReader:
    """Reads blobs of one checkpoint, and checks the header of each pack when it first reads from that pack.

    A load does not need the safetensors headers, but other readers of packs do.

    Args:
        store: The checkpoint.
        packs: Its packs.
        thread_count: Number of threads that read.
        checks_headers: If False, headers are checked only of packs of which more than a small part is read: a header
            would be a large part of what a load of a few rows reads.
    """

    def __init__(self, store: Store, packs: Sequence[Pack], thread_count: int, *, checks_headers: bool = True) -> None:
        self._checks_headers = checks_headers
        self._store = store
        self._packs = packs
        self._thread_count = thread_count
        self._checked: set[int] = set()
        self._wanted_bytes = Counter[int]()

    def read(
        self, *turns: Iterable[tuple[str, Blob]], prepare: Prepare = unprepared
    ) -> Generator[tuple[str, Bytes], None, None]:
        """Yield each blob's key and verified bytes: turn by turn, and within a turn in the order of the packs.

        Each turn is an iterable of keys and blobs. The rest is as in :func:`read_spans`. The threads run until the
        generator is exhausted or closed. Close it if a variable refers to it, because the traceback of an error may
        keep that variable alive.
        """
        blobs_by_turn = [list(turn) for turn in turns]
        for blob in (blob for turn in blobs_by_turn for _, blob in turn):
            self._wanted_bytes[blob.pack] += blob.num_bytes
        touched_packs = {index for index in self._wanted_bytes if self._is_header_due(index)}
        headers = {f"header of {_path(self._packs[index])}": self._header(index) for index in touched_packs}
        blobs_by_turn[:1] = [[*headers.items(), *blobs_by_turn[0]]] if blobs_by_turn else []

        def prepared(key: str, data: Bytes) -> Bytes:
            return data if key in headers else prepare(key, data)

        spans = [span for turn in blobs_by_turn for span in sorted(plan_spans(turn), key=self._place)]
        for key, data in read_spans(self._store, self._packs, spans, self._thread_count, prepared):
            if key not in headers:
                yield key, data
        self._checked |= touched_packs

    def _place(self, span: Span) -> tuple[int, str, int, int]:
        """Return a sort key: packs in files by index, then packs in logs by their position in the log."""
        log = self._packs[span.pack].log
        return (0, "", 0, span.pack) if log is None else (1, log.topic, log.partition, log.first)

    def _is_header_due(self, index: int) -> bool:
        pack, num_bytes = self._packs[index], self._wanted_bytes[index]
        is_most = self._checks_headers or _MOST_PART * num_bytes >= pack.num_bytes - pack.header_bytes
        return index not in self._checked and (is_most or _HEADER_PART * pack.header_bytes <= num_bytes)

    def _header(self, index: int) -> Blob:
        pack = self._packs[index]
        return Blob(index, 0, pack.header_bytes, pack.header_crc32c)


def _path(pack: Pack) -> str:
    """Return the path of a pack, since packs in several directories may have one name."""
    return pack.name if pack.directory is None else f"{pack.directory}/{pack.name}"

"""Digests of a span: found while it is read, whatever the pieces, and whatever lies between its blobs."""

from dataclasses import dataclass
from itertools import count, pairwise

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.format.blob_bytes import Bytes
from torchrec_cnr.format.manifest import Pack
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.storage import local_files
from torchrec_cnr.storage.pack_reader import Span, SpanDigests, read_spans
from torchrec_cnr.storage.pack_writer import crc32c
from torchrec_cnr.storage.store import Store

numbers = count()
piece_sizes = st.integers(1, 70)


@dataclass(frozen=True)
class Case:
    """A file, and a span of it."""

    data: bytes
    span: Span

    def content(self, blob: Blob) -> bytes:
        """What is in a blob."""
        return self.data[blob.offset : blob.offset + blob.num_bytes]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Blobs with gaps between them, side by side, one in another, twice the same, or without bytes."""
    data = draw(st.binary(min_size=1, max_size=200))
    places = st.integers(0, len(data))
    bounds = sorted(sorted(pair) for pair in draw(st.lists(st.tuples(places, places), min_size=1, max_size=6)))
    blobs = [Blob(0, start, stop - start, crc32c(data[start:stop])) for start, stop in bounds]
    stop = max(stop for _, stop in bounds)
    return Case(data, Span(0, bounds[0][0], stop, tuple((f"blob {n}", blob) for n, blob in enumerate(blobs))))


def _store(factory: pytest.TempPathFactory, protocol: str) -> Store:
    name = f"span-digests-{next(numbers)}"
    store = Store.open(f"memory://{name}" if protocol == "memory" else factory.getbasetemp() / name, sync_files=False)
    store.make()
    return store


def _read(store: Store, case: Case, data: bytes, piece_bytes: int) -> list[tuple[str, bytes]]:
    """The blobs of a span, of a file that holds ``data``."""
    store.put("pack", [data])
    packs = [Pack("pack", len(case.data), 0, 0)]
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(local_files, "_PIECE_BYTES", piece_bytes)
        return [(key, content.tobytes()) for key, content in read_spans(store, packs, [case.span], 1)]


@hypothesis.given(cases(), st.lists(st.integers(0, 200)))
def test_pieces_make_no_difference(case: Case, cuts: list[int]) -> None:
    """However a span is cut into pieces, the digests are those of the blobs."""
    digests = SpanDigests(case.span)
    whole = np.frombuffer(case.data, dtype=np.uint8)[case.span.start : case.span.stop]
    for start, stop in pairwise(sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})):
        digests.extend(whole[start:stop])
    assert digests.found == [crc32c(case.content(blob)) for _, blob in case.span.blobs]


@pytest.mark.parametrize("protocol", ["local", "memory"])
@hypothesis.given(case=cases(), piece_bytes=piece_sizes)
def test_blobs_are_found(protocol: str, tmp_path_factory: pytest.TempPathFactory, case: Case, piece_bytes: int) -> None:
    """Every blob of a span comes back, whole, from a file that is read in pieces and from one that is not."""
    found = _read(_store(tmp_path_factory, protocol), case, case.data, piece_bytes)
    assert found == [(key, case.content(blob)) for key, blob in case.span.blobs]


@pytest.mark.parametrize("protocol", ["local", "memory"])
@hypothesis.given(case=cases(), piece_bytes=piece_sizes, place=st.integers(0, 199), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_in_every_blob_and_in_no_gap(
    protocol: str, tmp_path_factory: pytest.TempPathFactory, case: Case, piece_bytes: int, place: int, bit: int
) -> None:
    """The error names the first blob that holds the bit; where none does, nothing is wrong with what is read."""
    place %= len(case.data)
    data = bytearray(case.data)
    data[place] ^= 1 << bit
    holders = [key for key, blob in case.span.blobs if blob.offset <= place < blob.offset + blob.num_bytes]
    store = _store(tmp_path_factory, protocol)
    if holders:
        with pytest.raises(DamagedError, match=f"pack: {holders[0]}: corrupt: crc32c is 0x"):
            _read(store, case, bytes(data), piece_bytes)
    else:
        found = _read(store, case, bytes(data), piece_bytes)
        assert found == [(key, case.content(blob)) for key, blob in case.span.blobs]


@pytest.mark.parametrize("protocol", ["local", "memory"])
@hypothesis.given(case=cases(), piece_bytes=piece_sizes, place=st.integers(0, 199))
def test_a_file_cut_short_is_told_from_a_changed_one(
    protocol: str, tmp_path_factory: pytest.TempPathFactory, case: Case, piece_bytes: int, place: int
) -> None:
    """What is missing is said, before any digest that cannot be right."""
    start, stop = case.span.start, case.span.stop
    hypothesis.assume(start < stop)
    place %= stop
    found = f"truncated: expected bytes {start} to {stop}, got {max(0, place - start)} bytes"
    with pytest.raises(DamagedError, match=found):
        _read(_store(tmp_path_factory, protocol), case, case.data[:place], piece_bytes)


@hypothesis.given(st.binary(max_size=200), st.tuples(st.integers(0, 210), st.integers(0, 210)), piece_sizes)
def test_pieces_are_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, bounds: tuple[int, int], piece_bytes: int
) -> None:
    """Each byte is seen once, in order, and is there when it is seen."""
    store, seen = _store(tmp_path_factory, "local"), bytearray()

    def see(piece: Bytes) -> None:
        assert 0 < len(piece) <= piece_bytes
        seen.extend(piece)

    store.put("file", [data])
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(local_files, "_PIECE_BYTES", piece_bytes)
        array = store.read_array("file", min(bounds), max(bounds), see)
    assert bytes(seen) == array.tobytes() == data[min(bounds) : max(bounds)]

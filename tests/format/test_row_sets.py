"""Boxes, and the coding of row numbers."""

import itertools
import math
import tracemalloc
from dataclasses import replace
from typing import Literal

import hypothesis
import numpy as np
import pytest
import zstandard
from hypothesis import strategies as st

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.format import blob_bytes, row_sets
from torchrec_cnr.format.boxes import Box, fills
from torchrec_cnr.format.row_sets import CodedRows, RowNumbers, decode_row_numbers, encode_row_numbers

MAX_ROW = 2**62  # the largest integer that a manifest holds
FRAME_BYTES = 18  # what zstd adds to a small block, at most
ENTROPY_FACTOR = 1.25


def _compressed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=True).compress(data)


@st.composite
def _rows(draw: st.DrawFn) -> RowNumbers:
    """Strictly increasing rows: dense, sparse, or with gaps of any size."""
    largest = draw(st.sampled_from([0, 1, 7, 255, 256, 257, 65_536, 2**24, 2**40, MAX_ROW]))
    members = draw(st.sets(st.integers(0, largest), min_size=1, max_size=60))
    run = draw(st.integers(0, 600))
    start = draw(st.integers(0, largest))
    return np.array(sorted(members | set(range(start, start + run))), dtype=np.int64)


# Row sets


@hypothesis.given(_rows())
def test_rows_come_back(rows: RowNumbers) -> None:
    """Decoding gives the rows that were encoded, whatever lies between them."""
    coded = encode_row_numbers(rows)
    assert (coded.first, coded.span) == (rows[0], rows[-1] - rows[0] + 1)
    decoded = decode_row_numbers(coded, len(rows), "here")
    assert decoded.dtype == np.int64
    assert decoded.tolist() == rows.tolist()


@pytest.mark.parametrize("first", [0, 1, 12_345_678])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 9, 255, 256, 257, 100_000])
def test_a_full_range_costs_next_to_nothing(first: int, num_rows: int) -> None:
    """Consecutive rows, as when all are modified, come back and take a few bytes."""
    rows = np.arange(first, first + num_rows, dtype=np.int64)
    coded = encode_row_numbers(rows)
    assert decode_row_numbers(coded, num_rows, "here").tolist() == rows.tolist()
    assert len(coded.data) <= FRAME_BYTES + num_rows // 4000


@pytest.mark.parametrize(
    ("rows", "span"),
    [
        ([5], 1),
        ([5, 6], 2),
        ([0, 256], 257),
        ([0, 257], 258),
        ([0, 65_536], 65_537),
        ([0, 65_537], 65_538),
        ([0, 2**62], 2**62 + 1),
    ],
)
def test_gaps_take_the_fewest_whole_bytes(rows: list[int], span: int) -> None:
    """A gap's width follows from the span, at and beyond each power of 256."""
    expected = {1: 1, 2: 1, 257: 1, 258: 2, 65_537: 2, 65_538: 3, 2**62 + 1: 8}[span]
    largest = max(span - 2, 0).to_bytes(expected, "little") * (len(rows) - 1)
    coded = CodedRows("gaps", rows[0], span, _compressed(largest))
    assert decode_row_numbers(coded, len(rows), "here").tolist() == rows
    with pytest.raises(DamagedError):
        decode_row_numbers(replace(coded, data=_compressed(largest + b"\0" * (len(rows) - 1 or 1))), len(rows), "here")


@pytest.mark.parametrize("density", [0.001, 0.003, 0.01, 0.03, 0.1, 0.26, 0.5, 0.7, 0.9])
def test_random_rows_are_coded_near_their_entropy(density: float) -> None:
    """Random rows of density p take at most 1.25 times H(p)/p bits a row, plus a frame; no code takes less than 1."""
    num_rows = 400_000
    rows = np.flatnonzero(np.random.default_rng(1).random(num_rows) < density)
    entropy = -(density * math.log2(density) + (1 - density) * math.log2(1 - density)) * num_rows / 8
    assert 0.97 * entropy <= len(encode_row_numbers(rows).data) <= ENTROPY_FACTOR * entropy + FRAME_BYTES


def test_almost_full_blocks_take_a_fraction_of_a_bit() -> None:
    """Where nearly all rows are modified, a row takes less than .15 bits."""
    rows = np.flatnonzero(np.random.default_rng(1).random(400_000) < 0.99)
    assert len(encode_row_numbers(rows).data) * 8 < 0.15 * len(rows)


@hypothesis.given(_rows())
def test_the_smaller_coding_is_taken(rows: RowNumbers) -> None:
    """No other coding would have been smaller, unless the rows are so sparse that a bitmap is not tried."""
    span = int(rows[-1] - rows[0]) + 1
    hypothesis.assume(span <= 64 * len(rows))
    mask = np.zeros(span, dtype=np.bool_)
    mask[rows - rows[0]] = True
    bitmap = zstandard.ZstdCompressor(level=1).compress(np.packbits(mask, bitorder="little").tobytes())
    assert len(encode_row_numbers(rows).data) <= len(bitmap)


@hypothesis.given(_rows(), st.data())
def test_damaged_codes_are_refused_or_decode_validly(rows: RowNumbers, data: st.DataObject) -> None:
    """Whatever bytes stand for a code, decoding gives strictly increasing rows of the stated span, or a typed error."""
    coded = encode_row_numbers(rows)
    code = bytearray(coded.data)
    for _ in range(data.draw(st.integers(1, 3))):
        code[data.draw(st.integers(0, len(code) - 1))] ^= data.draw(st.integers(1, 255))
    _decodes_validly_or_fails(replace(coded, data=bytes(code)), len(rows))


@hypothesis.given(
    st.sampled_from(["bitmap", "gaps"]),
    st.integers(0, 100),
    st.integers(1, 80),
    st.integers(1, 80),
    st.binary(max_size=90),
)
def test_foreign_codes_are_refused_or_decode_validly(
    coding: str, first: int, span: int, num_rows: int, code: bytes
) -> None:
    """Any well compressed code is refused unless it is one of that many rows of that span."""
    _decodes_validly_or_fails(
        CodedRows("gaps" if coding == "gaps" else "bitmap", first, span, _compressed(code)), num_rows
    )


def _decodes_validly_or_fails(coded: CodedRows, num_rows: int) -> None:
    try:
        rows = decode_row_numbers(coded, num_rows, "here").tolist()
    except DamagedError:
        return
    assert len(rows) == num_rows
    assert (rows[0], rows[-1]) == (coded.first, coded.first + coded.span - 1)
    assert all(a < b for a, b in itertools.pairwise(rows))


GOOD = encode_row_numbers(np.array([3, 4, 7, 12]))  # a bitmap of two bytes


@pytest.mark.parametrize(
    ("coded", "num_rows"),
    [
        pytest.param(replace(GOOD, data=b""), 4, id="nothing"),
        pytest.param(replace(GOOD, data=GOOD.data[:-1]), 4, id="truncated"),
        pytest.param(replace(GOOD, data=b"no zstd frame"), 4, id="foreign"),
        pytest.param(GOOD, 3, id="more rows"),
        pytest.param(GOOD, 5, id="fewer rows"),
        pytest.param(replace(GOOD, span=9), 4, id="a row behind the span"),
        pytest.param(replace(GOOD, span=16), 4, id="no row at the end of the span"),
        pytest.param(replace(GOOD, span=17), 4, id="a longer span"),
        pytest.param(replace(GOOD, span=2**61), 4, id="a span beyond memory"),
        pytest.param(CodedRows("bitmap", 0, 9, _compressed(b"\xfe\x01")), 8, id="no row at the start of the span"),
        pytest.param(CodedRows("bitmap", 0, 8, _compressed(b"\xff\0")), 8, id="a byte too many"),
        pytest.param(CodedRows("gaps", 0, 10, _compressed(b"\2\4")), 3, id="gaps short of the span"),
        pytest.param(CodedRows("gaps", 0, 8, _compressed(b"\2\4")), 3, id="gaps beyond the span"),
        pytest.param(CodedRows("gaps", 0, 2, _compressed(b"")), 1, id="one row, a span of two"),
        pytest.param(
            CodedRows("bitmap", 0, 8, zstandard.ZstdCompressor(write_content_size=False).compress(b"\xff")),
            8,
            id="no stated size",
        ),
        pytest.param(CodedRows("bitmap", 0, 8, _compressed(b"\xff") + b"more"), 8, id="bytes behind the frame"),
        pytest.param(CodedRows("bitmap", 0, 8, _compressed(b"\xff") * 2), 8, id="two frames"),
        pytest.param(CodedRows("gaps", 0, 1, _compressed(b"") + b"more"), 1, id="bytes behind a frame of nothing"),
        pytest.param(CodedRows("gaps", 0, 1, _compressed(b"")[:-1]), 1, id="a truncated frame of nothing"),
        pytest.param(CodedRows("gaps", 0, 1, _compressed(b"")[:-3] + b"\x0b\0\0\0"), 1, id="a frame of one byte"),
    ],
)
def test_each_kind_of_damage_is_refused(coded: CodedRows, num_rows: int) -> None:
    """A code that is not exactly what a writer makes is refused with an error that names the block."""
    with pytest.raises(DamagedError, match="row set 7"):
        decode_row_numbers(coded, num_rows, "row set 7")


def test_gaps_that_overflow_are_refused() -> None:
    """Gaps whose sum passes 2^64 do not come back as negative rows."""
    span = 2**57
    gaps = np.array([2**62 - 1] * 3 + [2**62 + span - 2], dtype="<u8")
    planes = gaps.view(np.uint8).reshape(4, 8).T
    coded = CodedRows("gaps", 0, span, _compressed(np.ascontiguousarray(planes).tobytes()))
    with pytest.raises(DamagedError):
        decode_row_numbers(coded, 5, "here")


MOST_ROWS = 1 << 24  # that a code may be of
HOSTILE_BYTES, MOST_BYTES = 16 << 10, 1 << 25  # of a code, and of memory until it is refused


@pytest.mark.parametrize(
    ("coding", "span", "num_bytes"),
    [
        ("gaps", 1 << 60, 8 * (MOST_ROWS - 1)),
        ("gaps", MOST_ROWS + 1, 3 * (MOST_ROWS - 1)),
        ("bitmap", 1 << 30, 1 << 27),
    ],
    ids=["gaps of eight bytes", "gaps of three bytes", "bitmap"],
)
def test_a_small_code_of_many_rows_is_refused_in_little_memory(
    coding: Literal["gaps", "bitmap"], span: int, num_bytes: int
) -> None:
    """A code of a few KB that unpacks to 128 MiB, as its size says, is looked at before there is room for its rows."""
    coded = CodedRows(coding, 0, span, _compressed(bytes(num_bytes)))
    assert len(coded.data) < HOSTILE_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError, match="strictly increasing"):
            decode_row_numbers(coded, MOST_ROWS, "here")
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("coding", ["gaps", "bitmap"])
def test_a_code_that_is_gone_through_in_pieces(
    monkeypatch: pytest.MonkeyPatch, coding: Literal["gaps", "bitmap"]
) -> None:
    """Rows of a large code come back, and one that is cut, or has more behind it, is refused, as of a small one."""
    monkeypatch.setattr(blob_bytes, "_MAX_WHOLE_BYTES", 0)
    monkeypatch.setattr(row_sets, "_PIECE_BYTES", 1000)
    rows = np.flatnonzero(np.random.default_rng(1).random(60_000) < 0.1)
    rows[-1] = rows[0] + 99_999  # so that gaps take several bytes, and pieces end within a plane
    span = int(rows[-1] - rows[0]) + 1
    mask = np.zeros(span, dtype=np.bool_)
    mask[rows - rows[0]] = True
    planes = np.diff(rows).astype("<u4") - 1
    gaps = planes.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3].T
    content = gaps.tobytes() if coding == "gaps" else np.packbits(mask, bitorder="little").tobytes()
    coded = CodedRows(coding, int(rows[0]), span, _compressed(content))
    assert decode_row_numbers(coded, len(rows), "here").tolist() == rows.tolist()
    for data in (coded.data[:-1], coded.data + b"x", coded.data * 2, b"", b"no frame", _compressed(content + b"\0")):
        with pytest.raises(DamagedError, match="here: row numbers"):
            decode_row_numbers(replace(coded, data=data), len(rows), "here")


@pytest.mark.parametrize(("window_log", "is_good"), [(23, True), (24, False)])
def test_a_large_code_needs_no_large_window(window_log: int, is_good: bool) -> None:
    """A code of more than 16 MiB may need a window of 8 MiB, as every decoder has it, and no larger one."""
    span, num_rows = 8 * (17 << 20), 1 << 22
    mask = np.zeros(span // 8, np.uint8)
    mask[-(num_rows // 8) :] = 255
    mask[-(num_rows // 8) - 1], mask[0] = 0, 1
    mask[-1] = 255 - 2  # the last row, and one less before it
    parameters = zstandard.ZstdCompressionParameters(
        window_log=window_log, compression_level=1, write_content_size=True
    )
    code = zstandard.ZstdCompressor(compression_params=parameters).compress(mask.tobytes())
    coded = CodedRows("bitmap", 5, span, code)
    if is_good:
        rows = decode_row_numbers(coded, num_rows, "here")
        assert (len(rows), int(rows[0]), int(rows[-1])) == (num_rows, 5, 5 + span - 1)
    else:
        with pytest.raises(DamagedError, match="here: row numbers do not decompress"):
            decode_row_numbers(coded, num_rows, "here")


def test_the_code_of_one_row_is_a_frame() -> None:
    """It is empty; what decoders skip has no content either, and is no frame of a code."""
    for data, is_good in [(_compressed(b""), True), (b"\x50\x2a\x4d\x18" + bytes(4), False), (b"", False)]:
        coded = CodedRows("gaps", 7, 1, data)
        if is_good:
            assert decode_row_numbers(coded, 1, "here").tolist() == [7]
        else:
            with pytest.raises(DamagedError, match="here: row numbers"):
                decode_row_numbers(coded, 1, "here")


# Boxes

SIZE = (3, 4)
ALL_BOXES = [
    Box((row, col), (rows, cols))
    for row, col, rows, cols in itertools.product(range(4), range(5), range(4), range(5))
    if row + rows <= 3 and col + cols <= 4
]
a_box = st.sampled_from(ALL_BOXES)


def _cells(box: Box) -> set[tuple[int, ...]]:
    ranges = (range(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
    return set(itertools.product(*ranges))


@hypothesis.given(a_box, a_box)
def test_intersection_is_that_of_the_cells(first: Box, second: Box) -> None:
    """The common box has exactly the cells that both have, and is None where they have none."""
    common = first.intersect(second)
    assert (_cells(common) if common else set()) == _cells(first) & _cells(second)
    assert common == second.intersect(first)


@hypothesis.given(a_box, a_box)
def test_slices_find_the_box_in_its_origin(first: Box, outer: Box) -> None:
    """A box indexes a tensor that holds another one at the cells that are its own."""
    inner = first.intersect(outer)
    if inner is None:
        return
    numbers = np.arange(12).reshape(SIZE)
    held = numbers[outer.slices(Box.whole(SIZE))]
    assert held[inner.slices(outer)].tolist() == numbers[inner.slices(Box.whole(SIZE))].tolist()


@pytest.mark.long
@hypothesis.settings(max_examples=300)
@hypothesis.given(st.lists(a_box, max_size=5), st.data())
def test_boxes_fill_a_tensor_as_their_cells_do(boxes: list[Box], data: st.DataObject) -> None:
    """``fills`` is true if each cell is in exactly one box, whatever the order."""
    if data.draw(st.booleans()):  # most random boxes leave holes: cut the tensor up instead
        boxes = _cut(data, Box.whole(SIZE))
        if data.draw(st.booleans()):
            boxes[data.draw(st.integers(0, len(boxes) - 1))] = data.draw(a_box)
    boxes = data.draw(st.permutations(boxes))
    cells = [cell for box in boxes for cell in _cells(box)]
    assert fills(SIZE, boxes) == (len(cells) == len(set(cells)) == 12)


def _cut(data: st.DataObject, box: Box) -> list[Box]:
    """Cut a box along a random line, and its parts again."""
    dim = data.draw(st.integers(0, 1))
    if box.sizes[dim] < 2 or data.draw(st.booleans()):
        return [box]
    at = data.draw(st.integers(1, box.sizes[dim] - 1))
    offsets, first, second = list(box.offsets), list(box.sizes), list(box.sizes)
    offsets[dim] += at
    first[dim], second[dim] = at, box.sizes[dim] - at
    return [*_cut(data, Box(box.offsets, tuple(first))), *_cut(data, Box(tuple(offsets), tuple(second)))]


@pytest.mark.parametrize(
    ("size", "boxes", "expected"),
    [
        ((), [Box((), ())], True),
        ((), [], False),
        ((), [Box((), ())] * 2, False),
        ((0, 4), [], True),
        ((0, 4), [Box((0, 0), (0, 4))], True),
        ((2,), [Box((0,), (2,)), Box((2,), (0,))], True),
        ((2,), [Box((0, 0), (2, 1))], False),
        ((2,), [Box((1,), (2,))], False),
        ((2**40, 2**20), [Box((0, 0), (2**39, 2**20)), Box((2**39, 0), (2**39, 2**20))], True),
        pytest.param((2,), [Box((0,), (2,)), Box((0, 0), (0, 1))], False, id="empty, of other dimensions"),
        pytest.param((2,), [Box((0,), (2,)), Box((3,), (0,))], False, id="empty, outside"),
    ],
)
def test_boxes_of_any_dimensions_fill(size: tuple[int, ...], boxes: list[Box], expected: bool) -> None:
    """Scalars, empty tensors, empty boxes and huge ones are told like others."""
    assert fills(size, boxes) == expected


@pytest.mark.parametrize("dim", [0, 1])
def test_many_boxes_are_compared_quickly(dim: int) -> None:
    """A table of 20,000 row shards, or column shards, is checked without comparing each with each."""
    size = (20_000, 8) if dim == 0 else (8, 20_000)
    boxes = [Box((n, 0), (1, 8)) if dim == 0 else Box((0, n), (8, 1)) for n in range(20_000)]
    assert fills(size, boxes)
    assert not fills(size, [*boxes[:-1], boxes[0]])


def test_boxes_divide_eight_dimensions_at_most() -> None:
    """Each dimension more doubles the corners of a box, and tensors have only so many."""
    for num, is_good in ((8, True), (9, False)):
        halves = [Box(corner, (1,) * num) for corner in itertools.product((0, 1), repeat=num)]
        assert fills((2,) * num, halves) == is_good


@pytest.mark.parametrize(
    ("sizes", "num_rows", "num_cols"), [((), 1, 1), ((5,), 5, 1), ((5, 3, 2), 5, 6), ((0, 3), 0, 3), ((3, 0), 3, 0)]
)
def test_rows_and_columns_of_a_box(sizes: tuple[int, ...], num_rows: int, num_cols: int) -> None:
    """A row is one index of the first dimension; a scalar is one row of one element."""
    box = Box.whole(sizes)
    assert (box.num_rows, box.num_cols) == (num_rows, num_cols)

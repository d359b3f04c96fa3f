"""Coverage: which rows of a box are stored, compared with a plain array of all elements."""

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st

from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.coverage import Coverage
from torchrec_cnr.format.row_sets import RowNumbers

TABLE = (12, 7)
Elements = npt.NDArray[np.bool_]


@st.composite
def _boxes(draw: st.DrawFn, within: Box | None = None) -> Box:
    """A box of the table, or of a box of it; some have no rows or no columns."""
    within = Box.whole(TABLE) if within is None else within
    edges = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in within.sizes]
    offsets = tuple(first + start for first, (start, _) in zip(within.offsets, edges, strict=True))
    return Box(offsets, tuple(stop - start for start, stop in edges))


@st.composite
def _rows(draw: st.DrawFn, box: Box) -> RowNumbers | slice:
    """Rows of a box, by their numbers in it: consecutive, or any."""
    numbers = st.integers(0, box.num_rows)
    if draw(st.booleans()):
        return slice(*sorted((draw(numbers), draw(numbers))))
    return np.array(sorted(draw(st.sets(numbers.filter(lambda row: row < box.num_rows)))) if box.num_rows else [], int)


def _elements(box: Box, rows: RowNumbers | slice) -> Elements:
    """What of the table these rows of a box are."""
    found = np.zeros(TABLE, dtype=np.bool_)
    found[box.slices(Box.whole(TABLE))][rows] = True
    return found


@pytest.mark.long
@hypothesis.settings(max_examples=400)
@hypothesis.given(st.data())
def test_coverage_is_that_of_an_array(data: st.DataObject) -> None:
    """After any shards were added, rows are covered if all of their elements in the box are, and holes are found."""
    box = data.draw(_boxes())
    boxes = data.draw(st.lists(_boxes(), max_size=5))
    asked = data.draw(_boxes(box))
    coverage, stored = Coverage(box, [*boxes, asked]), np.zeros(TABLE, dtype=np.bool_)
    for added in boxes:
        rows = data.draw(_rows(added))
        coverage.add(added, rows)
        stored |= _elements(added, rows)
        numbers = data.draw(_rows(asked))
        wanted = stored[asked.slices(Box.whole(TABLE))][numbers]
        assert coverage.parts(asked, numbers).all(axis=0).tolist() == wanted.all(axis=1).tolist()
        holes = np.flatnonzero(~stored[box.slices(Box.whole(TABLE))].all(axis=1))
        assert coverage.first_hole() == (box.offsets[0] + holes[0] if len(holes) else None)


@hypothesis.given(st.data())
def test_what_lies_outside_covers_nothing(data: st.DataObject) -> None:
    """Shards beside, above and below a box leave it as it was."""
    box = Box((4, 3), (4, 2))
    others = [other for other in data.draw(st.lists(_boxes(), max_size=8)) if other.intersect(box) is None]
    coverage = Coverage(box, others)
    for other in others:
        coverage.add(other, slice(0, other.num_rows))
        coverage.add(other, np.arange(other.num_rows))
    assert coverage.first_hole() == 4
    assert coverage.parts(box, slice(0, 4)).all(axis=0).tolist() == [False] * 4


def test_all_columns_of_a_row_are_needed() -> None:
    """A row of which one column is missing is a hole, until that is stored, too."""
    left, right = Box((0, 0), (3, 6)), Box((0, 6), (3, 1))
    coverage = Coverage(Box((0, 0), (3, 7)), [left, right])
    coverage.add(left, slice(0, 3))
    coverage.add(right, np.array([0, 2]))
    assert coverage.parts(Box((0, 0), (3, 7)), slice(0, 3)).all(axis=0).tolist() == [True, False, True]
    assert coverage.first_hole() == 1
    coverage.add(right, np.array([1]))
    assert coverage.first_hole() is None


def test_vectors_and_scalars_have_one_column() -> None:
    """State of a row, and what has no dimensions at all, is covered as a table of one column is."""
    vector = Coverage(Box((2,), (3,)), [Box((0,), (4,))])
    vector.add(Box((0,), (4,)), slice(0, 4))
    assert vector.parts(Box((2,), (3,)), slice(0, 3)).all(axis=0).tolist() == [True, True, False]
    assert vector.first_hole() == 4
    scalar = Coverage(Box((), ()), [])
    assert scalar.first_hole() == 0
    scalar.add(Box((), ()), slice(0, 1))
    assert scalar.first_hole() is None


def test_dimensions_from_the_third_on_are_not_divided() -> None:
    """Of a cube, rows and columns are counted: a shard has all of what lies behind them."""
    cube = Coverage(Box((0, 0, 0), (2, 4, 5)), [Box((0, 2, 0), (2, 2, 5))])
    cube.add(Box((0, 2, 0), (2, 2, 5)), slice(0, 2))
    assert cube.parts(Box((0, 2, 0), (2, 2, 5)), slice(0, 2)).all(axis=0).tolist() == [True, True]
    assert cube.first_hole() == 0

"""What report pages are made of: numbers as people read them, and fewer points for the same picture."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_cnr.cli.report.plots import thin
from torchrec_cnr.human_text import (
    UNITS,
    bytes_text,
    count_text,
    duration_text,
    full_checkpoints_text,
    instant_text,
    name_text,
    relation_text,
    share_text,
)

SEC = 10**9


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(999), "999 B"),
        (bytes_text(1_000), "1.00 KB"),
        (bytes_text(999_499), "999 KB"),
        (bytes_text(999_500), "1.00 MB"),
        (bytes_text(1 << 62), "4.61 EB"),
        (bytes_text(10**22), "10,000 EB"),
        (full_checkpoints_text(1.2), "1.20x a full checkpoint"),
        (full_checkpoints_text(0.25), "0.250x a full checkpoint"),
        (full_checkpoints_text(0.9996), "1.00x a full checkpoint"),
        (full_checkpoints_text(1_234.5), "1,234x a full checkpoint"),
        (full_checkpoints_text(0), "0x a full checkpoint"),
        (full_checkpoints_text(1e-9), "under 0.001x a full checkpoint"),
        (relation_text(100, 1_320), "13.2x smaller"),
        (relation_text(210, 200), "1.05x larger"),
        (relation_text(1_000, 1_004), "same size"),
        (relation_text(0, 1_000) + relation_text(1_000, 0), ""),
        (relation_text(100, 1_320, "a full one"), "13.2x smaller than a full one"),
        (relation_text(1_000, 999, "a full one"), "as large as a full one"),
        (share_text(0.123), "12.3 %"),
        (share_text(1.0), "100 %"),
        (count_text(1, "delta"), "1 delta"),
        (count_text(2_000, "delta"), "2,000 deltas"),
        (instant_text(1_762_000_000 * SEC + 1), "2025-11-01 12:26:40 UTC"),
        (instant_text(0), "1970-01-01 00:00:00 UTC"),
        (instant_text(1 << 62), "2116-02-20 23:53:38 UTC"),
        (duration_text(0), "less than a second"),
        (duration_text(SEC), "1 second"),
        (duration_text(3_600 * SEC), "1 hour"),
        (duration_text(3_601 * SEC), "1 hour"),
        (duration_text((2 * 86_400 + 3_600) * SEC), "2 days 1 hour"),
        (name_text("step-5 é 好 🙂"), "step-5 é 好 🙂"),
        (name_text("a\nb\u202ec\udc80"), "a\\nb\\u202ec\\udc80"),
    ],
)
def test_numbers_are_written_for_people(text: str, expected: str) -> None:
    """Few digits, and the unit that needs them."""
    assert text == expected


@given(st.integers(1, 1 << 62))
def test_size_is_right_to_three_digits(num_bytes: int) -> None:
    """Whatever the size, its text says it to half a percent, in at most three digits."""
    number, unit = bytes_text(num_bytes).split()
    assert float(number) * 1_000 ** UNITS.index(unit) == pytest.approx(num_bytes, rel=0.0051)
    assert len(re.sub(r"\D", "", number)) <= 3


@given(st.text(st.characters(codec=None)))
def test_name_prints_in_one_line(name: str) -> None:
    """What is shown of a name prints, is UTF-8, and is the name itself where that prints."""
    shown = name_text(name)
    assert shown.isprintable()
    assert shown.encode().decode() == shown
    assert not name.isprintable() or shown == name


points = st.lists(st.tuples(st.integers(0, 400), st.integers(-50, 50)), min_size=1, max_size=300)


@given(points, st.integers(1, 30))
def test_thinning_keeps_what_is_seen(points: list[tuple[int, int]], num_columns: int) -> None:
    """In each column the first, last, lowest and highest points stay; all stay where they are few."""
    xs, ys = np.array(sorted(points), np.float64).T
    kept = thin(xs, ys, num_columns)
    assert list(kept) == sorted(set(kept))
    assert len(kept) <= max(4 * num_columns, len(points) if len(points) <= 4 * num_columns else 0)
    if len(points) <= 4 * num_columns:
        assert len(kept) == len(points)
    width = (xs[-1] - xs[0]) / num_columns or 1.0
    columns = np.minimum(np.floor((xs - xs[0]) / width), num_columns - 1)
    for column in {*columns, *(columns[kept])}:
        everyone, some = np.flatnonzero(columns == column), kept[columns[kept] == column]
        assert {everyone[0], everyone[-1]} <= set(some)
        assert ys[some].min() == ys[everyone].min()
        assert ys[some].max() == ys[everyone].max()


def test_thinning_makes_many_points_few() -> None:
    """A million points become at most four a column."""
    xs = np.arange(1e6)
    kept = thin(xs, np.sin(xs), 400)
    assert 1_000 < len(kept) <= 1_600

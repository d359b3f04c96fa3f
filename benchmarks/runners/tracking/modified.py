"""The rows that training modifies, in each interval and since the first: real data, any file, the paper's curve.

A row is modified if a sample has its id. Shares are relative to the rows that the whole stream modifies, so that they
can be compared with those of Check-N-Run: 26 % in half an hour, 52 % in eleven times that (NSDI '22, section 3.2).
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.plots.modified import PLOT
from benchmarks.support.data.clicks import CLICKS
from benchmarks.support.jobs.policy_runs import FIRST_SHARE, GROWTH, modified_rows
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Setup
from torchrec_cnr.format.coverage import Mask

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from click_data import open_stream
from samples import Stream, table_rows
from synthetic_clicks import SyntheticClicks

NUM_INTERVALS = 11  # the paper reports the modified rows after this number of intervals
INTERVALS = (0.01, 0.02, 0.05, 0.08)  # lengths of intervals, as shares of the samples
MAX_SAMPLES, MADE_UP_SAMPLES, NUM_QUICK_SAMPLES = 20_000_000, 2_000_000, 20_000
NUM_ROWS, NUM_QUICK_ROWS = 1_000_000, 20_000  # rows of the generator
HASHED_ROWS = 1 << 24


@dataclass(frozen=True)
class Curve:
    """Rows modified in intervals of one length, as shares of all rows.

    Attributes:
        each: Share modified in each interval.
        since: Share modified from the beginning of the first interval to the end of each interval.
    """

    each: NDArray[np.float64]
    since: NDArray[np.float64]

    @classmethod
    def of(cls, masks: Iterator[Mask]) -> "Curve":
        """Compute the curve from masks of the rows that each interval modifies, bool [num_rows]."""
        each, since, modified = [], [], None
        for mask in masks:
            modified = mask if modified is None else modified | mask
            each.append(mask.mean())
            since.append(modified.mean())
        return cls(np.array(each), np.array(since))

    def row(self, name: str, interval: str) -> tuple[str, ...]:
        """Return a row of the table."""
        last = min(NUM_INTERVALS, len(self.since)) - 1
        spread = f"{100 * self.each.min():.1f} to {100 * self.each.max():.1f}"
        later = f"{100 * self.since[last]:.1f} after {last + 1}"
        known = 100 * float((self.each / self.since)[len(self.since) // 5 :].mean())
        return (name, interval, f"{len(self.each)}", f"{100 * self.each.mean():.1f}", spread, f"{known:.1f}", later)


def run(setup: Setup) -> Report:
    """Count the rows that a stream modifies, and those that the generator of other benchmarks modifies."""
    name, stream = _stream(setup)
    setup.say(f"reading {name}")
    ids = _row_numbers(stream, NUM_QUICK_SAMPLES if setup.quick else MAX_SAMPLES)
    curves: dict[str, Curve] = {}
    rows: list[tuple[str, ...]] = []
    for share in INTERVALS:
        length = max(1, round(share * len(ids)))
        setup.say(f"intervals of {length:,} samples")
        curve = Curve.of(_masks(ids, length))
        curves[f"{100 * share:g} %"] = curve
        rows.append(curve.row(name, f"{length:,} samples, {100 * share:g} %"))
    num_rows = NUM_QUICK_ROWS if setup.quick else NUM_ROWS
    generated = Curve.of(modified_rows(num_rows, 4 * NUM_INTERVALS))
    rows.append(generated.row("the paper's curve", "half an hour"))
    found = generated.since
    expected = FIRST_SHARE + GROWTH * np.log(np.arange(1, len(found) + 1))
    columns = (
        "rows of",
        "interval",
        "intervals",
        "modified in each, %",
        "from, to",
        "of those so far, %",
        "since the first, %",
    )
    return Report(
        title=f"rows that {len(ids):,} samples of {name} modify, of {int(ids.max()) + 1:,} in all",
        notes=(
            "Shares are of all rows that the whole stream modifies, of all its features together; of the rows",
            "modified so far, they are means without the first fifth.",
            f"The generator draws rows so that i intervals modify {FIRST_SHARE} + {GROWTH} ln i of them.",
        ),
        figures=(
            Figure("modified in an interval, by the generator", 100 * generated.each.mean(), "%"),
            Figure(f"in {NUM_INTERVALS} intervals", 100 * found[NUM_INTERVALS - 1], "%"),
            Figure("farthest from the curve, in 44 intervals", 100 * float(np.abs(found - expected).max()), "points"),
        ),
        tables=(Table(columns, tuple(rows)),),
        plot={
            "stream": name,
            "stream_since": {share: curve.since.tolist() for share, curve in curves.items()},
            "paper_since": found.tolist(),
        },
    )


def _stream(setup: Setup) -> tuple[str, Stream]:
    """Return the stream of the given file, or of real clicks if they are present, or of synthetic ones."""
    if setup.data is not None:
        return f"{setup.data[1].name}", open_stream(setup.data[0], setup.data[1], seed=0)
    if CLICKS.exists():
        return "real news clicks", open_stream("clicks", CLICKS, seed=0)
    return "made-up clicks", SyntheticClicks(seed=0)


def _row_numbers(stream: Stream, most: int) -> NDArray[np.int64]:
    """Return the rows of samples in time order, int64 [N, ids per sample], numbered consecutively over all tables."""
    parts: list[NDArray[np.int64]] = []
    num_read = 0
    is_endless = isinstance(stream, SyntheticClicks)
    for block in stream.samples(0) if is_endless else stream.one_pass():  # type: ignore[attr-defined]  # files have it
        parts.append(table_rows(block.ids, HASHED_ROWS))
        num_read += len(block)
        if num_read >= (min(most, MADE_UP_SAMPLES) if is_endless else most):
            break
    hashed = np.concatenate(parts)[:most]
    numbers = np.empty_like(hashed)
    first = column = 0
    for feature in stream.features:
        own = slice(column, column + feature.num_ids)
        distinct, inverse = np.unique(hashed[:, own], return_inverse=True)
        numbers[:, own] = inverse.reshape(len(hashed), -1) + first
        first, column = first + len(distinct), own.stop
    return numbers


def _masks(ids: NDArray[np.int64], length: int) -> Iterator[Mask]:
    """Yield masks of the rows that each complete interval modifies."""
    for first in range(0, len(ids) - length + 1, length):
        mask = np.zeros(int(ids.max()) + 1, dtype=np.bool_)
        mask[ids[first : first + length].ravel()] = True
        yield mask


BENCHMARK = Benchmark(
    run, "rows that training modifies, in each interval and since the first; --data gives your own file", plot=PLOT
)

"""The distances that rows move between checkpoints, and the bits that storing them as residuals would take.

The rows are those of the model that ``accuracy`` trains, with checkpoints at even distances. At each checkpoint, the
modified rows are compared with their values at the one before, and stored for readers of residuals
(``benchmarks.support.residuals``) with several numbers of bits. The readers know the initial values of all rows, as
from a seed. The same rows are also transform-coded (``benchmarks.support.transformed_rows``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.plots.movement import PLOT
from benchmarks.support.data.click_model import ClickModel
from benchmarks.support.data.clicks import BATCH_CLICKS, TABLES, Clicks, batches, read_clicks, trained_on
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.residuals import SCALE_AND_BIAS_BITS, STEP_BITS, ResidualReader, Tally
from benchmarks.support.rounds import Setup
from benchmarks.support.transformed_rows import TransformedRows, TransformTally

DIM, SMALL_DIM = 64, 16
SHARES = (0.01, 0.05, 0.1)  # shares of the clicks between two checkpoints
BITS = (2, 4, 8)
TRANSFORMED_BITS = (3, 4)  # whose error transform-coded rows have
WARM_UP = 0.2  # share of the clicks whose checkpoints do not count
NUM_CLICKS, NUM_QUICK_CLICKS, NUM_ALL_CLICKS = 2_000_000, 20 * BATCH_CLICKS, 2_988_181
QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
KNOWN, NEW = "modified before", "modified first"
BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0)  # bounds of movement between classes of rows that were touched before
NEW_CLASS = len(BOUNDS) + 1
ALL_CLASSES, KNOWN_CLASSES = range(NEW_CLASS + 1), range(NEW_CLASS)
MORE = f"more than {BOUNDS[-1]:.0%}"


@dataclass
class Course:
    """Measurements at the checkpoints of a run, after its warm-up.

    Attributes:
        dim: Number of columns of the tables.
        share: Share of the clicks between two checkpoints.
        num_checkpoints: Number of checkpoints that count.
        movement: For each table and ``KNOWN`` or ``NEW``, the movement of each modified row, as float32 arrays.
        tallies: For each of ``BITS`` and each of ``ALL_CLASSES``, the counts of stored rows.
        untouched: For each table, the share of its rows that no click touched until the end.
        transformed: For each table and each of ``TRANSFORMED_BITS``, the counts of transform-coded rows.
    """

    dim: int
    share: float
    num_checkpoints: int = 0
    movement: dict[tuple[str, str], list[NDArray[np.float32]]] = field(default_factory=dict)
    tallies: dict[tuple[int, int], Tally] = field(default_factory=dict)
    untouched: dict[str, float] = field(default_factory=dict)
    transformed: dict[tuple[str, int], TransformTally] = field(default_factory=dict)

    def tally(self, bits: int, classes: Iterable[int] = ALL_CLASSES) -> Tally:
        """Return the counts of rows of these classes together, in one code."""
        found = (self.tallies.get((bits, number), Tally(self.dim)) for number in classes)
        return sum(found, Tally(self.dim))

    def transform_tally(self, bits: int) -> TransformTally:
        """Return the counts of the transform-coded rows of all tables together."""
        found = (tally for (_, own_bits), tally in self.transformed.items() if own_bits == bits)
        return sum(found, TransformTally())

    def share_of(self, number: int) -> float:
        """Return the share of the rows of a class in all modified rows."""
        return self.tally(BITS[0], (number,)).num_rows / max(1, self.tally(BITS[0]).num_rows)


def run(setup: Setup) -> Report:
    """Train once for each distance between checkpoints, and measure the rows at each checkpoint."""
    num_clicks = NUM_QUICK_CLICKS if setup.quick else NUM_ALL_CLICKS if setup.all_cases else NUM_CLICKS
    setup.say("reading clicks")
    clicks = read_clicks(num_clicks)
    dims = (SMALL_DIM,) if setup.quick else (DIM, SMALL_DIM) if setup.all_cases else (DIM,)
    courses = []
    for dim in dims:
        for share in SHARES:
            setup.say(f"{dim} columns, a checkpoint each {share:.0%} of {len(clicks):,} clicks")
            courses.append(follow(clicks, dim, share))
    return _report(len(clicks), courses)


def follow(clicks: Clicks, dim: int, share: float) -> Course:
    """Train a model on all clicks, and measure its rows at each checkpoint."""
    trained = batches(clicks, 0, len(clicks), 0)
    model = ClickModel(clicks.num_rows(), dim, 0)
    tables = [_FollowedTable(name, table) for name, table in zip(TABLES, model.tables, strict=True)]
    course = Course(dim, share)
    due = {round(number * share * len(trained)) for number in range(1, round(1 / share) + 1)}
    for step, batch in enumerate(trained, 1):
        model.train(batch)
        for table, lookup in zip(tables, batch.lookups, strict=True):
            table.modified[lookup.rows] = True
        if step in due:
            counts = step > WARM_UP * len(trained)
            course.num_checkpoints += counts
            for table in tables:
                table.checkpoint(course if counts else None)
    course.untouched = {table.name: 1 - float(table.touched.float().mean()) for table in tables}
    return course


class _FollowedTable:
    """A table, with its values at the checkpoint before and its readers of residuals.

    Attributes:
        name: One of ``TABLES``.
        modified: A mask of the rows modified since the checkpoint before, bool [num_rows].
        touched: A mask of the rows touched until the checkpoint before, bool [num_rows].
    """

    def __init__(self, name: str, values: Tensor) -> None:
        self.name = name
        self.modified = torch.zeros(len(values), dtype=torch.bool)
        self.touched = self.modified.clone()
        self._values = values
        self._before = values.clone()
        self._readers = {bits: ResidualReader(values, bits) for bits in BITS}
        self._transformed = {bits: TransformedRows(bits) for bits in TRANSFORMED_BITS}

    def checkpoint(self, course: Course | None) -> None:
        """Store the modified rows, and record their movement in ``course`` unless it is None."""
        rows = self.modified.nonzero().squeeze(1)
        is_new = ~self.touched[rows]
        moved = movement(self._values[rows], self._before[rows])
        classes = torch.where(is_new, NEW_CLASS, torch.bucketize(moved, torch.tensor(BOUNDS)))
        for bits, reader in self._readers.items():
            for number in ALL_CLASSES:
                tally = reader.store(self._values, rows[classes == number])
                if course is not None:
                    course.tallies[bits, number] = course.tallies.get((bits, number), Tally(course.dim)) + tally
        for bits, transformed in self._transformed.items():
            stored = transformed.store(self._values, rows)
            if course is not None:
                earlier = course.transformed.get((self.name, bits), TransformTally())
                course.transformed[self.name, bits] = earlier + stored
        if course is not None:
            for kind, is_kind in ((KNOWN, ~is_new), (NEW, is_new)):
                course.movement.setdefault((self.name, kind), []).append(moved[is_kind].numpy())
        self.touched |= self.modified
        self._before[self.modified] = self._values[self.modified]
        self.modified.zero_()


def movement(rows: Tensor, before: Tensor) -> Tensor:
    """Return the norm of each row's change, divided by the norm of the row, float32 [n]; 0 for unchanged rows."""
    moved = (rows - before).norm(dim=1)
    return torch.where(moved == 0, moved, moved / rows.norm(dim=1))


def _report(num_clicks: int, courses: Sequence[Course]) -> Report:
    figures = []
    for course in (found for found in courses if found.dim == courses[0].dim):
        for bits in BITS:
            tally = course.tally(bits)
            what = f"{bits} bits, each {course.share:.0%}: bits of residuals, steps told, of the plain code's"
            figures.append(Figure(what, tally.told_bits / _plain_bits(bits, course.dim), "×"))
        for bits in TRANSFORMED_BITS:
            what = f"error of {bits} bits, each {course.share:.0%}: bits of transform-coded rows, of uniform codes'"
            share = course.transform_tally(bits).bits / _plain_bits(bits, course.dim)
            figures.append(Figure(what, share, "×", at_most=1.0))
    untouched = ", ".join(f"{name} {share:.1%}" for name, share in courses[0].untouched.items())
    num_exact = sum(tally.num_exact for course in courses for tally in course.tallies.values())
    return Report(
        title=f"what rows move between checkpoints, {num_clicks:,} {trained_on()}",
        notes=(
            f"One run each; checkpoints of its first {WARM_UP:.0%} do not count. A row moved by ||x - y|| / ||x||, x",
            "being the row and y what it was at the checkpoint before. Only modified rows count.",
            f"Rows that no click touched until the end, and that need no bytes: {untouched}.",
            "Residuals: a row less what a reader has, in whole steps of its own plain code, Asymmetric(bits); bits are",
            "entropies of order 0, with a flag a row for 'all zero'. Without steps, a reader would have to know them;",
            f"'steps told' adds {STEP_BITS} bits to each row that is not zero. A plain row has {SCALE_AND_BIAS_BITS}",
            f"bits of scale and bias. Rows that plain codes store exactly, and that are left out: {num_exact:,}.",
            "Errors are squared errors of all modified rows, as a part of those of the plain code.",
            "Transform-coded rows have the mean l2 error of AdaptiveAsymmetric, and the bytes of files, with those of",
            "transforms that checkpoints after the first ones learned. They need nothing of the checkpoint before.",
        ),
        figures=tuple(figures),
        tables=(
            _movement_table(courses),
            _bits_table(courses),
            _classes_table(courses),
            _transforms_table(courses),
        ),
        plot={
            "courses": [_drawn(course) for course in courses if course.dim == courses[0].dim],
            "plain": {str(bits): _plain_bits(bits, courses[0].dim) for bits in BITS},
        },
    )


def _plain_bits(bits: int, dim: int) -> float:
    """Return the bits per element of a plain row."""
    return bits + SCALE_AND_BIAS_BITS / dim


def _drawn(course: Course) -> dict[str, Any]:
    """Return the values that the plot shows of a course."""
    ranges = [f"{low:.0%} to {high:.0%}" for low, high in pairwise(BOUNDS)]
    names = [f"up to {BOUNDS[0]:.0%}", *ranges, MORE, NEW]
    return {
        "share": course.share,
        "moved": {name: course.share_of(number) for number, name in enumerate(names)},
        "residuals": {str(bits): course.tally(bits).told_bits for bits in BITS},
    }


def _movement_table(courses: Sequence[Course]) -> Table:
    lines = []
    for course in courses:
        place = f"{course.dim}", f"{course.share:.0%}"
        for (name, kind), parts in course.movement.items():
            moved = np.concatenate(parts)
            if len(moved):
                cells = (f"{value:.2%}" for value in np.quantile(moved, QUANTILES))
                lines.append((*place, f"{name}, {kind}", f"{len(moved) / course.num_checkpoints:,.0f}", *cells))
    columns = ("columns", "each", "rows", "a checkpoint", "median", "90 %", "99 %", "99.9 %", "most")
    return Table(columns, tuple(lines))


def _bits_table(courses: Sequence[Course]) -> Table:
    lines = []
    for course in courses:
        for bits in BITS:
            for what, classes in (("all modified", ALL_CLASSES), (KNOWN, KNOWN_CLASSES), (NEW, (NEW_CLASS,))):
                tally = course.tally(bits, classes)
                if tally.num_rows == 0:
                    continue
                plain = _plain_bits(bits, course.dim)
                cells = (plain, tally.code_bits, tally.residual_bits, tally.told_bits)
                error = tally.squared_error / tally.plain_squared_error
                place = f"{course.dim}", f"{course.share:.0%}", f"{bits}", what
                lines.append((*place, *(f"{cell:.2f}" for cell in cells), f"{tally.zero_share:.1%}", f"{error:.3f}"))
    columns = (
        "columns",
        "each",
        "bits",
        "rows",
        "plain, bits an element",
        "its codes' entropy",
        "residuals",
        "steps told",
        "zero rows",
        "error",
    )
    return Table(columns, tuple(lines))


def _classes_table(courses: Sequence[Course]) -> Table:
    """Return a table of the bits of residuals by the movement of rows, with a separate code for each class."""
    lines = []
    names = [*(f"up to {bound:.0%}" for bound in BOUNDS), MORE]
    for course in courses:
        for number, name in enumerate(names):
            tallies = [course.tally(bits, (number,)) for bits in BITS]
            share = course.share_of(number)
            cells = (f"{tally.told_bits:.2f}" if tally.num_rows else "–" for tally in tallies)
            lines.append((f"{course.dim}", f"{course.share:.0%}", name, f"{share:.1%}", *cells))
    told = (f"{bits} bits, steps told" for bits in BITS)
    return Table(("columns", "each", "touched before, moved", "of all modified", *told), tuple(lines))


def _transforms_table(courses: Sequence[Course]) -> Table:
    lines = []
    for course in courses:
        for (name, bits), tally in course.transformed.items():
            cells = (f"{_plain_bits(bits, course.dim):.2f}", f"{tally.bits:.2f}", f"{tally.num_bases}")
            lines.append((f"{course.dim}", f"{course.share:.0%}", f"{bits}", name, *cells, f"{tally.error:.3f}"))
    columns = ("columns", "each", "error of bits", "rows", "uniform, bits an element", "transformed", "bases", "error")
    return Table(columns, tuple(lines))


BENCHMARK = Benchmark(
    run,
    "distances that rows move between checkpoints, and the bytes that storing residuals would take",
    is_long=True,
    plot=PLOT,
)

"""A run of 2,000 checkpoints with rows modified as in Check-N-Run: bytes written, kept and restored, by policy.

``Compacted`` runs for real, with saves, compactions and prunes in a file system in memory. The bytes of the other
policies are computed for the same rows: codes by the number of rows, row numbers by coding them for real.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

import torchrec_cnr as cnr
from benchmarks.plots.policies import PLOT
from benchmarks.support.jobs.policy_runs import DIM, RunTable, Step, modified_rows, saved, simulated
from benchmarks.support.jobs.table_models import one_rank
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Setup
from torchrec_cnr.format.row_sets import encode_row_numbers

OURS = "Compacted"
SCHEME = cnr.Asymmetric(4)
NUM_ROWS, NUM_QUICK_ROWS = 400_000, 4_000
NUM_CHECKPOINTS, NUM_QUICK_CHECKPOINTS = 2_000, 12
PACK_BYTES = 512 << 10  # for a model of 16 MB, in the same proportion as 16 MiB for a model of 512 MB
MIN_REDUCTION, MAX_CAPACITY, MAX_RESTORE = 2.6, 1.6, 1.2


@dataclass
class Course:
    """The results of a policy for each checkpoint, as multiples of a full checkpoint at the same quantization.

    Attributes:
        written: Bytes written for it, including its compaction.
        capacity: The most bytes in the store, from the commit until the replaced files were removed.
        restore: Bytes that a load of it reads after its compaction.
        fresh: Bytes that a load of it reads before its compaction.
    """

    written: list[float] = field(default_factory=list)
    capacity: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)

    def extend(self, steps: Iterable[Step], full_bytes: int) -> None:
        """Add the next checkpoints."""
        for step in steps:
            self.written.append(step.written / full_bytes)
            self.capacity.append(step.capacity / full_bytes)
            self.restore.append(step.restore / full_bytes)
            self.fresh.append(step.fresh / full_bytes)

    def summary(self) -> dict[str, float]:
        """Return the mean of ``written``, and the greatest of each of the others."""
        return {
            "written": float(np.mean(self.written)),
            "capacity": max(self.capacity),
            "restore": max(self.restore),
            "fresh": max(self.fresh),
        }

    def row(self, name: str) -> tuple[str, ...]:
        """Return a row of the table."""
        written, *others = self.summary().values()
        return (name, *(f"{value:,.2f}" for value in (written, 1 / written, *others)))


def run(setup: Setup) -> Report:
    """Run all policies on the same rows."""
    num_rows = NUM_QUICK_ROWS if setup.quick else NUM_ROWS
    num_checkpoints = NUM_QUICK_CHECKPOINTS if setup.quick else NUM_CHECKPOINTS
    with one_rank(setup.folder):
        compacted, full_bytes = _compacted(setup, num_rows, num_checkpoints)
    courses = {OURS: compacted}
    for policy in (cnr.Full(), cnr.OneShot(), cnr.Intermittent(), cnr.Consecutive()):
        name = type(policy).__name__
        setup.say(f"{name}: {num_checkpoints:,} checkpoints by their bytes")
        courses[name] = Course()
        steps = simulated(policy, full_bytes, modified_rows(num_rows, num_checkpoints), _coded_bytes)
        courses[name].extend(steps, full_bytes)
    found = compacted.summary()
    columns = ("policy", "written a checkpoint", "less than full by", "capacity", "restore", "before compaction")
    return Report(
        title=f"{num_checkpoints:,} checkpoints of a table of {num_rows:,} × {DIM} with row-wise state, 4 bits",
        notes=(
            f"All as x a full checkpoint at the same bit width, {full_bytes:,} bytes; capacity, restores at most.",
            "One checkpoint is kept. Capacity counts the moment when the new one is there and the old one still is.",
            "Compacted was run for real, with compaction's bytes and all manifests; the others by their bytes.",
        ),
        figures=(
            Figure("written by Compacted, less than full by", 1 / found["written"], "×", at_least=MIN_REDUCTION),
            Figure("capacity, at its most", found["capacity"], "×", at_most=MAX_CAPACITY),
            Figure("restore of a checkpoint, at its most", found["restore"], "×", at_most=MAX_RESTORE),
        ),
        tables=(Table(columns, tuple(course.row(name) for name, course in courses.items())),),
        plot={"ours": OURS, "policies": {name: course.summary() for name, course in courses.items()}},
    )


def _compacted(setup: Setup, num_rows: int, num_checkpoints: int) -> tuple[Course, int]:
    course, full_bytes = Course(), 0
    tables, masks = [RunTable.random(num_rows)], ((mask,) for mask in modified_rows(num_rows, num_checkpoints))
    for number, step in enumerate(saved(tables, cnr.Compacted(), SCHEME, masks, PACK_BYTES)):
        full_bytes = full_bytes or step.kept
        course.extend([step], full_bytes)
        if number % 100 == 0:
            setup.say(f"Compacted: {number:,} of {num_checkpoints:,} checkpoints")
    return course, full_bytes


def _coded_bytes(rows: NDArray[np.int64]) -> int:
    return len(encode_row_numbers(rows).data)


BENCHMARK = Benchmark(
    run,
    "bytes written, kept and restored over 2,000 checkpoints, by policy; takes half an hour",
    is_long=True,
    plot=PLOT,
)

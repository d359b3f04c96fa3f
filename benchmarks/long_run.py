"""A run of 2,000 checkpoints whose rows are modified as Check-N-Run's were: bytes written, kept and restored by policy.

How often a row is modified is drawn once: rates whose logarithms are even, up to the rate that makes the first delta
hold 26 % of the rows. Rows modified in i intervals are then .26 + .105 ln i of all, the curve fitted to the paper's
figures. ``Compacted`` is run for real, with saves, compactions and prunes in a file system in memory. The bytes of the
other policies follow from the same rows: codes by their number, row numbers coded for real.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import fsspec
import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import torchrec_cnr as cnr
from benchmarks.long_run_plot import draw
from benchmarks.models import one_rank
from benchmarks.report import Figure, Report, Table
from benchmarks.rounds import Setup
from torchrec_cnr.coverage import Mask
from torchrec_cnr.maintenance.retention import Keep
from torchrec_cnr.maintenance.upkeep import Upkeep
from torchrec_cnr.manifest import History
from torchrec_cnr.modified import ModifiedRows, Since
from torchrec_cnr.rows import Box, encode_rows
from torchrec_cnr.tracked import TrackedRows, TrackedShard

DIM, SCHEME = 64, cnr.Asymmetric(4)
FIRST_SHARE, GROWTH = 0.26, 0.105
NUM_ROWS, NUM_QUICK_ROWS = 400_000, 4_000
NUM_CHECKPOINTS, NUM_QUICK_CHECKPOINTS = 2_000, 12
PACK_BYTES = 512 << 10  # of a model of 16 MB: as 16 MiB are of one of 512 MB
MIN_REDUCTION, MAX_CAPACITY, MAX_RESTORE = 2.6, 1.6, 1.2
ROOT = "memory://long-run"
EULER_GAMMA = 0.5772156649


@dataclass
class Course:
    """What a policy came to, checkpoint by checkpoint; all in full checkpoints, quantized alike.

    Attributes:
        written: Bytes written for it, its compaction included.
        capacity: Most that lay in the store, from the commit until what it replaced was removed.
        restore: What a load of it reads, once it was compacted.
        fresh: What a load of it reads before that.
    """

    written: list[float] = field(default_factory=list)
    capacity: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)

    def row(self, name: str) -> tuple[str, ...]:
        """A row of the table."""
        mean = float(np.mean(self.written))
        numbers = (mean, 1 / mean, max(self.capacity), max(self.restore), max(self.fresh))
        return (name, *(f"{value:,.2f}" for value in numbers))


def run(setup: Setup) -> Report:
    """Run all policies on the same rows."""
    num_rows = NUM_QUICK_ROWS if setup.quick else NUM_ROWS
    num_checkpoints = NUM_QUICK_CHECKPOINTS if setup.quick else NUM_CHECKPOINTS
    with one_rank(setup.folder):
        compacted, full_bytes = _compacted(setup, num_rows, num_checkpoints)
    courses = {"Compacted": compacted}
    for policy in (cnr.Full(), cnr.OneShot(), cnr.Intermittent(), cnr.Consecutive()):
        name = type(policy).__name__
        setup.say(f"{name}: {num_checkpoints:,} checkpoints by their bytes")
        courses[name] = _simulated(policy, num_rows, num_checkpoints, full_bytes)
    if setup.plots is not None:
        draw(courses, setup.plots / "policies.svg")
    reduction = len(compacted.written) / sum(compacted.written)
    columns = ("policy", "written a checkpoint", "less than full by", "capacity", "restore", "before compaction")
    return Report(
        title=f"{num_checkpoints:,} checkpoints of a table of {num_rows:,} × {DIM} with row-wise state, 4 bits",
        notes=(
            f"All in full checkpoints of as many bits, of {full_bytes:,} bytes; capacity and restores at their most.",
            "One checkpoint is kept. Capacity counts the moment when the new one is there and the old one still is.",
            "Compacted was run for real, with compaction's bytes and all manifests; the others by their bytes.",
        ),
        figures=(
            Figure("written by Compacted, less than full by", reduction, "×", at_least=MIN_REDUCTION),
            Figure("capacity, at its most", max(compacted.capacity), "models", at_most=MAX_CAPACITY),
            Figure("restore of a kept head, at its most", max(compacted.restore), "models", at_most=MAX_RESTORE),
        ),
        tables=(Table(columns, tuple(course.row(name) for name, course in courses.items())),),
    )


def modified_rows(num_rows: int, num_checkpoints: int) -> Iterator[Mask]:
    """Which rows each interval modifies, bool [num_rows]; the same whenever it is called."""
    generator = np.random.default_rng(0)
    fastest = math.exp(FIRST_SHARE / GROWTH - EULER_GAMMA)
    rates = fastest * np.exp(-(np.arange(num_rows) + 0.5) / num_rows / GROWTH)
    chances = generator.permutation(-np.expm1(-rates))
    for _ in range(num_checkpoints):
        yield generator.random(num_rows) < chances


def _compacted(setup: Setup, num_rows: int, num_checkpoints: int) -> tuple[Course, int]:
    rows = ModifiedRows("table", Box((0, 0), (num_rows, DIM)), torch.device("cpu"))
    table, state = torch.randn(num_rows, DIM) * 0.05, torch.rand(num_rows)
    tracked = TrackedRows([TrackedShard(rows, table, lambda: [state])])
    planner = cnr.CNRSavePlanner(tracked, policy=cnr.Compacted())
    writer = cnr.CNRStorageWriter(ROOT, quantization=SCHEME, pack_bytes=PACK_BYTES)
    upkeep = Upkeep(ROOT, Keep(last=1), compacts=True, pack_bytes=PACK_BYTES)
    course, full_bytes = Course(), 0
    for number, mask in enumerate(modified_rows(num_rows, num_checkpoints)):
        rows.mark_where(torch.from_numpy(mask))
        path = f"{ROOT}/step-{number}"
        before = _stored_bytes()
        save({"table": table, "state": state}, checkpoint_id=path, storage_writer=writer, planner=planner)
        full_bytes = full_bytes or _stored_bytes()
        course.fresh.append(cnr.plan_compaction(path).bytes_before / full_bytes)
        written_bytes, capacity_bytes = _stored_bytes() - before, _stored_bytes()
        is_done = False
        while not is_done:
            before = _stored_bytes()
            is_done = upkeep.compact_some(cnr.read_checkpoint(path))
            written_bytes += _stored_bytes() - before
            capacity_bytes = max(capacity_bytes, _stored_bytes())
            upkeep.prune()
        compacted = cnr.read_checkpoint(path)
        course.written.append(written_bytes / full_bytes)
        course.capacity.append(capacity_bytes / full_bytes)
        course.restore.append((compacted.manifest.blob_bytes + compacted.manifest_bytes) / full_bytes)
        if number % 100 == 0:
            setup.say(f"Compacted: {number:,} of {num_checkpoints:,} checkpoints")
    return course, full_bytes


def _stored_bytes() -> int:
    return int(fsspec.filesystem("memory").du(ROOT))


def _simulated(policy: cnr.Policy, num_rows: int, num_checkpoints: int, full_bytes: int) -> Course:
    """Bytes alone: a row costs what it does in a full checkpoint, and its number what coding gives."""
    course = Course()
    since_baseline = np.zeros(num_rows, dtype=np.bool_)
    history: History | None = None
    kept_bytes = 0
    for mask in modified_rows(num_rows, num_checkpoints):
        since = Since.EVER if history is None else policy.decide(history)
        since_baseline = np.zeros_like(mask) if since is Since.EVER else since_baseline | mask
        stored = since_baseline if since is Since.BASELINE else mask
        own_bytes = full_bytes
        if since is not Since.EVER:
            numbers = encode_rows(np.flatnonzero(stored))
            own_bytes = round(full_bytes * stored.mean()) + len(numbers.data)
        baseline_bytes = full_bytes if since is Since.BASELINE else kept_bytes
        needed_bytes = own_bytes + (0 if since is Since.EVER else baseline_bytes)
        course.written.append(own_bytes / full_bytes)
        course.capacity.append((max(kept_bytes, needed_bytes - own_bytes) + own_bytes) / full_bytes)
        course.restore.append(needed_bytes / full_bytes)
        course.fresh.append(needed_bytes / full_bytes)
        history = _extended(history, since, own_bytes)
        kept_bytes = needed_bytes
    return course


def _extended(history: History | None, since: Since, num_bytes: int) -> History:
    if history is None or since is Since.EVER:
        return History(num_bytes)
    return History(history.baseline_bytes, (*history.delta_bytes, num_bytes))

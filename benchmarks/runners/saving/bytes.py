"""The bytes of a delta on disk, relative to the same state saved by DCP's own writer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemWriter

import torchrec_cnr as cnr
from benchmarks.support.jobs.table_models import TableModel, TableSizes, num_bytes, one_rank
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Setup

SHARE = 0.26  # share of rows that are modified between two checkpoints
SCHEMES: Mapping[str, cnr.Scheme] = {
    "2 bits": cnr.AdaptiveAsymmetric(2),
    "4 bits": cnr.AdaptiveAsymmetric(4),
    "8 bits": cnr.Asymmetric(8),
    "exact": cnr.NoQuantization(),
}
TARGETS = {"4 bits": 20.0}  # size of DCP's checkpoint, divided by that of the delta
FULL, QUICK = TableSizes(1, 1_000_000, 64), TableSizes(1, 2_000, 64)


@dataclass(frozen=True)
class _Sizes:
    """Bytes of the checkpoints of one scheme, and of the delta's row numbers."""

    baseline: int
    delta: int
    row_sets: int


def run(setup: Setup) -> Report:
    """Save a baseline and a delta with each scheme, and the whole state with DCP's own writer."""
    sizes = QUICK if setup.quick else FULL
    num_modified = sizes.num_tables * round(SHARE * sizes.num_rows)
    with one_rank(setup.folder):
        model = TableModel(sizes)
        setup.say("saving the whole state with plain DCP")
        model.save(FileSystemWriter(setup.folder / "plain-dcp"))
        plain_bytes = num_bytes(setup.folder / "plain-dcp")
        found = {name: _save(model, setup, name) for name in SCHEMES}
    rows = [
        (
            name,
            f"{sizes.baseline:,}",
            f"{sizes.delta:,}",
            f"{sizes.delta / num_modified:.2f}",
            f"{8 * sizes.row_sets / num_modified:.3f}",
        )
        for name, sizes in found.items()
    ]
    smaller = [
        Figure(
            f"delta, {name}, smaller than plain DCP", plain_bytes / found[name].delta, "×", at_least=TARGETS.get(name)
        )
        for name in SCHEMES
    ]
    entropy = _entropy(SHARE) / SHARE
    over_entropy = [8 * sizes.row_sets / num_modified / entropy for sizes in found.values()]
    columns = ("scheme", "baseline bytes", "delta bytes", "bytes a modified row", "of these its number, bits")
    return Report(
        title=f"bytes on disk of {sizes}, {100 * SHARE:g} % of the rows modified at random",
        notes=(
            f"Bytes are those of all files of a checkpoint; that of plain DCP has {plain_bytes:,}.",
            f"The numbers of the modified rows have an entropy of H(p)/p = {entropy:.3f} bits a row.",
        ),
        figures=(*smaller, Figure("bits of a row's number, over their entropy", max(over_entropy), "×")),
        tables=(Table(columns, tuple(rows)),),
    )


def _save(model: TableModel, setup: Setup, name: str) -> _Sizes:
    """Save a baseline, then a delta of the rows that training has modified since."""
    setup.say(f"saving a baseline and a delta, {name}")
    tracker = cnr.RowTracker(model.sharded)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.OneShot())
    baseline, delta = setup.folder / name / "baseline", setup.folder / name / "delta"
    model.save(cnr.CNRStorageWriter(baseline, quantization=SCHEMES[name]), planner)
    model.modify(SHARE)
    model.save(cnr.CNRStorageWriter(delta, quantization=SCHEMES[name]), planner)
    tracker.close()
    return _Sizes(num_bytes(baseline), num_bytes(delta), _row_set_bytes(delta))


def _row_set_bytes(path: Path) -> int:
    row_sets = cnr.read_checkpoint(path).manifest.row_sets
    return sum(block.blob.num_bytes for rows in row_sets for block in rows.blocks if block.blob is not None)


def _entropy(share: float) -> float:
    """Return the entropy in bits of a binary variable with this probability."""
    return -share * math.log2(share) - (1 - share) * math.log2(1 - share)


BENCHMARK = Benchmark(run, "bytes of a delta on disk at 2, 4 and 8 bits, relative to DCP's own writer")

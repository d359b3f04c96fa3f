"""Compaction of gigabytes: its memory, and its speed relative to a copy of the same files."""

import os
import shutil
from pathlib import Path

import torchrec_cnr as cnr
from benchmarks.support.jobs.table_models import TableModel, TableSizes, num_bytes, one_rank
from benchmarks.support.process_memory import peak_mib
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report
from benchmarks.support.rounds import Candidate, Setup, interleave, ratios, round_name, times_table

SHARE = 0.26
MAX_MIB, MIN_SPEED = 512, 0.5
FULL, QUICK = TableSizes(2, 2_000_000, 64), TableSizes(2, 2_000, 64)
NUM_DELTAS, NUM_QUICK_DELTAS = 15, 3
NUM_ROUNDS, NUM_QUICK_ROUNDS = 3, 1
COPY_BYTES = 16 << 20


def run(setup: Setup) -> Report:
    """Merge a chain of exact rows into one checkpoint, with all rows copied, alternately with a copy of its files."""
    sizes = QUICK if setup.quick else FULL
    num_deltas = NUM_QUICK_DELTAS if setup.quick else NUM_DELTAS
    num_rounds = NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS
    lineage = setup.folder / "lineage"
    with one_rank(setup.folder):
        setup.say(f"making {sizes} and {num_deltas} deltas")
        delta_bytes = _make_lineage(sizes, lineage, num_deltas)
    head, copy = lineage / f"step-{num_deltas}", setup.folder / "copy"

    def compact() -> None:
        cnr.compact(head, self_contained=True)

    def undo(_: int = 0) -> None:
        for path in [*head.glob("manifest-*.json"), *(p for p in head.glob("*.safetensors") if p not in own)]:
            path.unlink()
        shutil.rmtree(copy, ignore_errors=True)
        os.sync()

    own = set(head.glob("*.safetensors"))
    candidates = {
        "compaction": Candidate(before=undo, run=lambda _: compact()),
        "copy": Candidate(before=undo, run=lambda _: _copy(lineage, copy)),
    }
    timings = interleave(candidates, num_rounds, lambda number: setup.say(round_name(number, num_rounds)))
    undo()
    compaction_mib = peak_mib(compact)
    speeds = ratios(timings, "copy", "compaction")
    return Report(
        title=f"compaction of {delta_bytes / 1e9:.2f} GB of exact deltas of {sizes}",
        notes=(
            f"{num_deltas} deltas of {100 * SHARE:g} % of the rows and their baseline, folded into a checkpoint that",
            "uses none of their files. The copy is of the same files, by one thread, and forced to disk as well.",
        ),
        figures=(
            Figure("peak memory of the compaction", compaction_mib, "MiB", at_most=MAX_MIB),
            Figure.over_rounds("its speed, of that of the copy", speeds, "×", at_least=MIN_SPEED),
        ),
        tables=(times_table("what", timings),),
    )


def _make_lineage(sizes: TableSizes, folder: Path, num_deltas: int) -> int:
    """Save a baseline and deltas, and return the bytes of the deltas."""
    model = TableModel(sizes)
    tracker = cnr.RowTracker(model.sharded)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Compacted())
    for number in range(num_deltas + 1):
        if number:
            model.modify(SHARE)
        model.save(cnr.CNRStorageWriter(folder / f"step-{number}", sync_files=False), planner)
    tracker.close()
    return sum(num_bytes(folder / f"step-{number}") for number in range(1, num_deltas + 1))


def _copy(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*.*")):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as file, place.open("wb") as copy:
                shutil.copyfileobj(file, copy, COPY_BYTES)
                copy.flush()
                os.fsync(copy.fileno())


BENCHMARK = Benchmark(
    run, "speed of compacting gigabytes of deltas, relative to a copy of the files, and its memory", is_long=True
)

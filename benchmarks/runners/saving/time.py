"""The time to save a delta and to load a checkpoint chain, relative to DCP's own writer and reader."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import torchrec_cnr as cnr
from benchmarks.support.jobs.table_models import TableModel, TableSizes, one_rank
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report
from benchmarks.support.rounds import Candidate, Setup, Timings, interleave, ratios, round_name, times_table

SHARE = 0.26  # share of rows that are modified between two checkpoints
DCP = "plain DCP"
SCHEMES: Mapping[str, cnr.Scheme] = {"4 bits": cnr.AdaptiveAsymmetric(4), "exact": cnr.NoQuantization()}
SAVE_TARGETS = {"4 bits": 3.0}  # time of DCP's own save, divided by ours
MAX_LOAD_ERROR = 0.1
MAX_LOAD_TIMES = 1.3  # time of our load, divided by that of DCP's own
FULL, QUICK = TableSizes(2, 2_000_000, 64), TableSizes(2, 2_000, 64)
NUM_ROUNDS, NUM_QUICK_ROUNDS = 5, 1

Save = Callable[[Path], object]


def run(setup: Setup) -> Report:
    """Time saves with and without forcing files to disk, then loads."""
    sizes = QUICK if setup.quick else FULL
    num_rounds = NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS
    with one_rank(setup.folder):
        setup.say(f"making {sizes}")
        model = TableModel(sizes)
        synced = _time_saves(model, setup, num_rounds, sync_files=True)
        cached = _time_saves(model, setup, num_rounds, sync_files=False)
        loads = _time_loads(model, setup, num_rounds)
    return Report(
        title=f"time to save and to load {sizes}, {100 * SHARE:g} % of the rows modified",
        notes=(
            f"{num_rounds} rounds after a warm-up. In each round all had their turn; a ratio is that within a round.",
            "Rows were modified by training. Before each save all dirty pages of the machine were written out.",
            "Files are forced to disk, which is the default, except where sync_files=False is said: there it is the",
            "processor and the page cache that count, not the disk.",
            "Tables were cleared before each load, and compared afterwards with what had been saved.",
            "Loads go into a tracked model, and read files just written, so mostly from the page cache.",
        ),
        figures=(
            *_save_figures(synced, ""),
            *_save_figures(cached, ", sync_files=False", has_targets=False),
            *_load_figures(loads),
        ),
        tables=(
            times_table("save", synced),
            times_table("save, sync_files=False", cached),
            times_table("load", loads),
        ),
    )


def _time_saves(model: TableModel, setup: Setup, num_rounds: int, sync_files: bool) -> Timings:
    """Time saves; each round trains, then saves the whole state, a delta and a baseline."""
    folder = setup.folder / f"saves-{sync_files}"
    plain = _plain_save(model, sync_files)
    candidates = {DCP: _candidate(folder / "plain-dcp", plain, is_kept=False)}
    trackers = {name: cnr.RowTracker(model.sharded) for name in SCHEMES}
    for name, scheme in SCHEMES.items():
        setup.say(f"saving the baseline of all deltas, {name}")
        planner = cnr.CNRSavePlanner(trackers[name], policy=cnr.Consecutive())
        delta = _our_save(model, scheme, planner, sync_files)
        delta(folder / name / "baseline")
        candidates[_delta(name)] = _candidate(folder / name, delta, is_kept=True)
        baseline = _our_save(model, scheme, cnr.CNRSavePlanner(), sync_files)
        candidates[f"baseline, {name}"] = _candidate(folder / f"{name} baselines", baseline, is_kept=False)

    def train(number: int) -> None:
        setup.say(f"saving, sync_files={sync_files}: {round_name(number, num_rounds)}")
        model.modify(SHARE)

    timings = interleave(candidates, num_rounds, train)
    for tracker in trackers.values():
        tracker.close()
    shutil.rmtree(folder)
    return timings


def _time_loads(model: TableModel, setup: Setup, num_rounds: int) -> Timings:
    """Time loads; each round loads the whole state, and a baseline with a delta."""
    folder = setup.folder / "loads"
    tracker = cnr.RowTracker(model.sharded)
    planners = {name: cnr.CNRSavePlanner(cnr.RowTracker(model.sharded), policy=cnr.OneShot()) for name in SCHEMES}
    for step, share in (("baseline", 0.0), ("delta", SHARE)):
        model.modify(share)
        for name, scheme in SCHEMES.items():
            setup.say(f"saving what will be loaded: {step}, {name}")
            _our_save(model, scheme, planners[name], sync_files=True)(folder / name / step)
    _plain_save(model, sync_files=True)(folder / "plain-dcp")
    saved = model.sampled_rows()

    def candidate(load: Callable[[], object]) -> Candidate:
        return Candidate(
            before=lambda number: model.clear(), run=lambda number: load(), after=lambda number: _check(model, saved)
        )

    def lineage(path: Path) -> Candidate:
        return candidate(lambda: model.load(cnr.CNRStorageReader(path), cnr.CNRLoadPlanner(tracker)))

    candidates = {DCP: candidate(lambda: model.load(FileSystemReader(folder / "plain-dcp")))}
    candidates |= {_lineage(name): lineage(folder / name / "delta") for name in SCHEMES}
    return interleave(candidates, num_rounds, lambda number: setup.say(f"loading: {round_name(number, num_rounds)}"))


def _check(model: TableModel, saved: Tensor) -> None:
    """Check that a load was complete: the error of 4 bits is less than a tenth of the norm."""
    error = float((model.sampled_rows() - saved).norm() / saved.norm())
    if error > MAX_LOAD_ERROR:
        raise RuntimeError(f"what was loaded is not what was saved: the rows differ by {error:.1%} of their norm")


def _plain_save(model: TableModel, sync_files: bool) -> Save:
    return lambda path: model.save(FileSystemWriter(path, sync_files=sync_files))


def _our_save(model: TableModel, scheme: cnr.Scheme, planner: cnr.CNRSavePlanner, sync_files: bool) -> Save:
    return lambda path: model.save(cnr.CNRStorageWriter(path, quantization=scheme, sync_files=sync_files), planner)


def _candidate(folder: Path, save: Save, is_kept: bool) -> Candidate:
    return Candidate(
        run=lambda number: save(folder / str(number)),
        before=lambda number: os.sync(),
        after=lambda number: None if is_kept else shutil.rmtree(folder / str(number)),
    )


def _save_figures(timings: Timings, condition: str, has_targets: bool = True) -> list[Figure]:
    return [
        Figure.over_rounds(
            f"save of a delta, {name}, faster than plain DCP{condition}",
            ratios(timings, DCP, _delta(name)),
            "×",
            at_least=SAVE_TARGETS.get(name) if has_targets else None,
        )
        for name in SCHEMES
    ]


def _load_figures(timings: Timings) -> list[Figure]:
    return [
        Figure.over_rounds(
            f"load of baseline and delta, {name}, as long as plain DCP",
            ratios(timings, _lineage(name), DCP),
            "×",
            at_most=MAX_LOAD_TIMES,
        )
        for name in SCHEMES
    ]


def _delta(name: str) -> str:
    return f"delta, {name}"


def _lineage(name: str) -> str:
    return f"baseline and delta, {name}"


BENCHMARK = Benchmark(
    run, "time to save a delta and to load a checkpoint chain, relative to DCP's own writer and reader"
)

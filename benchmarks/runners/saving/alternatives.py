"""A comparison with the usual alternatives: stall, time to save and to restore, and memory, as tables grow.

Training modifies a quarter of the rows before each round. The alternatives are ``torch.save`` of the state, DCP's own
``save`` and ``async_save``, and deltas written by hand. The latter contain the rows that TorchRec's
``ModelDeltaTracker`` returns, with their optimizer state, and are written by ``torch.save`` after a full checkpoint.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from benchmarks.plots.alternatives import PLOT
from benchmarks.support.jobs.save_methods import DCP, DCP_ASYNC, OURS, OWN_DELTAS, TORCH_SAVE, SaveMethod, save_methods
from benchmarks.support.jobs.table_models import TableModel, TableSizes, one_rank
from benchmarks.support.process_memory import peak_mib
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table, number, quartiles
from benchmarks.support.rounds import Candidate, Setup, Timings, interleave, ratios, round_name

SHARE = 0.26  # share of rows that are modified between two checkpoints
DIM = 16  # so that 64 million rows and a copy of them fit into 24 GiB
MILLIONS, ALL_MILLIONS = (1, 4, 16), (1, 4, 16, 64)
NUM_QUICK_ROWS = 4_000
NUM_ROUNDS, NUM_QUICK_ROUNDS = 3, 1
MAX_LOAD_ERROR = 0.1
PHASES = ("stall", "save", "restore")


def run(setup: Setup) -> Report:
    """Measure everything at every size."""
    num_rounds = NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS
    millions = ALL_MILLIONS if setup.all_cases else MILLIONS
    sizes = (NUM_QUICK_ROWS,) if setup.quick else tuple(million * 1_000_000 for million in millions)
    timings: dict[int, Mapping[str, Timings]] = {}
    memory: dict[int, Mapping[str, float]] = {}
    for num_rows in sizes:
        with one_rank(setup.folder):
            timings[num_rows], memory[num_rows] = _measured(setup, num_rows, num_rounds)
        (setup.folder / "group").unlink(missing_ok=True)
    return Report(
        title=f"saves and restores of a table of rows × {DIM} fp32 with row-wise Adagrad, 26 % modified by training",
        notes=(
            f"{num_rounds} rounds after a warm-up at each size, all in turns. A stall ends when training may go on, a",
            "save when the checkpoint is there: in the page cache, for no file is forced to disk. A restore of deltas",
            "loads the whole state that they stand on, too. Restored rows were compared with what was saved.",
            "Ours has 4 bits a value, the others are exact. Memory is the peak of a save beyond the state, ours",
            "that of an asynchronous one, with the staged rows, whose memory is kept from one save to the next.",
        ),
        figures=tuple(_figures(timings, memory)),
        tables=(*(_times(phase, timings) for phase in PHASES), _memory(memory)),
        plot=_drawn(sizes[-1], timings[sizes[-1]], memory[sizes[-1]]),
    )


def _measured(setup: Setup, num_rows: int, num_rounds: int) -> tuple[Mapping[str, Timings], Mapping[str, float]]:
    folder = setup.folder / str(num_rows)
    setup.say(f"making a table of {num_rows:,} rows")
    model = TableModel(TableSizes(1, num_rows, DIM))
    methods = save_methods(model, folder)
    memory: dict[str, float] = {}

    def before_round(number: int) -> None:
        setup.say(f"{num_rows:,} rows: saves, {round_name(number, num_rounds)}")
        model.modify(SHARE)

    stalls = interleave({name: _stalling(method) for name, method in methods.items()}, num_rounds, before_round)
    saves = interleave({name: _whole(method) for name, method in methods.items()}, num_rounds, before_round)
    for name, method in methods.items():
        setup.say(f"{num_rows:,} rows: memory of {name}")
        model.modify(SHARE)
        memory[name] = peak_mib(lambda method=method: (method.begin(), method.finish()))  # type: ignore[misc]  # bound now
        memory[name] += method.held_bytes / 2**20
    _close(methods, folder)
    methods = save_methods(model, folder)
    model.modify(SHARE)
    saved = model.sampled_rows()
    for method in methods.values():
        method.begin()
        method.finish()
    restores = interleave(
        {name: _restored(model, method, saved) for name, method in methods.items() if name != DCP_ASYNC},
        num_rounds,
        lambda number: setup.say(f"{num_rows:,} rows: restores, {round_name(number, num_rounds)}"),
    )
    _close(methods, folder)
    return {"stall": stalls, "save": saves, "restore": restores}, memory


def _close(methods: Mapping[str, SaveMethod], folder: Path) -> None:
    for method in methods.values():
        method.close()
    shutil.rmtree(folder)


def _stalling(method: SaveMethod) -> Candidate:
    return Candidate(
        run=lambda number: method.begin(), before=lambda number: os.sync(), after=lambda number: method.finish()
    )


def _whole(method: SaveMethod) -> Candidate:
    def act(number: int) -> None:
        method.begin()
        method.finish()

    return Candidate(run=act, before=lambda number: os.sync())


def _restored(model: TableModel, method: SaveMethod, saved: Tensor) -> Candidate:
    def check(number: int) -> None:
        error = float((model.sampled_rows() - saved).norm() / saved.norm())
        if error > MAX_LOAD_ERROR:
            raise RuntimeError(f"what was restored is not what was saved: the rows differ by {error:.1%} of their norm")

    return Candidate(run=lambda number: method.restore(), before=lambda number: model.clear(), after=check)


def _figures(timings: Mapping[int, Mapping[str, Timings]], memory: Mapping[int, Mapping[str, float]]) -> list[Figure]:
    figures = []
    for num_rows, phases in timings.items():
        for phase, found in phases.items():
            for other in (name for name in found if name != OURS):
                what = f"{phase}, {other}, of ours, {num_rows:,} rows"
                figures.append(Figure.over_rounds(what, ratios(found, other, OURS), "×"))
        for other in (TORCH_SAVE, DCP, DCP_ASYNC, OWN_DELTAS):
            what = f"memory, {other}, of ours, {num_rows:,} rows"
            figures.append(Figure(what, memory[num_rows][other] / max(1.0, memory[num_rows][OURS]), "×"))
    return figures


def _drawn(num_rows: int, phases: Mapping[str, Timings], memory: Mapping[str, float]) -> dict[str, Any]:
    """Return the values that the plot shows: seconds and MiB at one size."""
    values = {
        phase: {name: median(took.secs for took in taken) for name, taken in found.items()}
        for phase, found in phases.items()
    }
    return {"ours": OURS, "rows": num_rows, "columns": DIM, "share": SHARE, "values": {**values, "memory": memory}}


def _times(phase: str, timings: Mapping[int, Mapping[str, Timings]]) -> Table:
    def cell(found: Timings, name: str) -> str:
        low, middle, high = (1e3 * value for value in quartiles([took.secs for took in found[name]]))
        return f"{number(middle)} ({number(low)} to {number(high)})"

    names = list(next(iter(timings.values()))[phase])
    rows = tuple((name, *(cell(phases[phase], name) for phases in timings.values())) for name in names)
    return Table((f"{phase}, ms", *(f"{num_rows:,} rows" for num_rows in timings)), rows)


def _memory(memory: Mapping[int, Mapping[str, float]]) -> Table:
    names = list(next(iter(memory.values())))
    rows = tuple((name, *(number(found[name]) for found in memory.values())) for name in names)
    return Table(("memory, MiB", *(f"{num_rows:,} rows" for num_rows in memory)), rows)


BENCHMARK = Benchmark(
    run,
    "stalls, saves, restores and memory as tables grow; also torch.save, DCP, hand-written deltas",
    is_long=True,
    plot=PLOT,
)

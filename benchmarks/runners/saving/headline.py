"""The figures of the README: bytes of a checkpoint, stall, save, restore and memory, against plain DCP.

A quarter of the rows is modified by training before each save. Exact rows and 4 bits are measured alike, beside plain
``dcp.save`` and ``dcp.async_save``, and beside deltas written by hand from TorchRec's ``ModelDeltaTracker``. Bytes of
transform-coded rows depend on values: for them, the rows of a trained table are repeated. All others are random.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torchrec_cnr as cnr
from benchmarks.plots.headline import PLOT
from benchmarks.support.data.click_model import Head
from benchmarks.support.data.clicks import trained_on
from benchmarks.support.data.tiled_rows import tiled, trained_table
from benchmarks.support.jobs.save_methods import (
    DCP,
    DCP_ASYNC,
    OWN_DELTAS,
    DCPAsyncSave,
    DCPSave,
    Ours,
    OwnDeltas,
    SaveMethod,
)
from benchmarks.support.jobs.table_models import TableModel, TableSizes, num_bytes, one_rank
from benchmarks.support.process_memory import peak_mib
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report
from benchmarks.support.rounds import Candidate, Setup, Timings, interleave, round_name
from torchrec_cnr.quantization import Quantization

SHARE = 0.26  # of the rows is modified between two checkpoints
DIM = 64
ROWS, QUICK_ROWS = (500_000, 2_000_000, 8_000_000), (2_000, 4_000)
NUM_ROUNDS, NUM_QUICK_ROUNDS = 5, 1
EXACT, EIGHT, FOUR, TWO, TRANSFORMED = "exact", "8-bit", "4-bit", "2-bit", "transform-coded, error of 4-bit"
TRAINED_HEAD: Head = "DCN-v2"  # the model whose rows are repeated
SCHEMES: Mapping[str, Quantization] = {
    EXACT: cnr.NoQuantization(),
    EIGHT: cnr.Asymmetric(8),
    FOUR: cnr.AdaptiveAsymmetric(4),
    TWO: cnr.AdaptiveAsymmetric(2),
    TRANSFORMED: cnr.TransformCoded(cnr.AdaptiveAsymmetric(4)),
}


def run(setup: Setup) -> Report:
    """Measure all sizes; bytes, whole saves, restores and memory at the largest."""
    figures: list[Figure] = []
    all_rows = QUICK_ROWS if setup.quick else ROWS
    for num_rows in all_rows:
        with one_rank(setup.folder):
            figures += _measured(setup, TableSizes(1, num_rows, DIM), is_largest=num_rows == all_rows[-1])
        (setup.folder / "group").unlink(missing_ok=True)
    return Report(
        title=f"{TableSizes(1, all_rows[-1], DIM)}, {100 * SHARE:g} % of the rows modified before each save",
        notes=(
            f"{NUM_ROUNDS} rounds after a warm-up, all methods in turns, one thread. A stall ends when training may go",
            "on; a save ends when the checkpoint is in the page cache (no file is forced to disk). A restore loads the",
            "whole state, for a delta from its baseline and the delta. Memory is the peak of a save beyond the state.",
            f"Transform-coded: with the values of the readers' table of {TRAINED_HEAD}, trained on {trained_on()}.",
        ),
        figures=tuple(figures),
    )


def _measured(setup: Setup, sizes: TableSizes, is_largest: bool) -> list[Figure]:
    setup.say(f"making {sizes}")
    models = _Models(TableModel(sizes), TableModel(sizes))
    num_rounds = NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS
    folder = setup.folder / str(sizes.num_rows)
    folder.mkdir()
    methods = _methods(models, folder)

    def before_round(number: int) -> None:
        setup.say(f"{sizes.num_rows:,} rows: {round_name(number, num_rounds)}")
        models.modify()

    def timed(kind: str, candidates: Mapping[str, Candidate]) -> list[Figure]:
        return _figures(kind, interleave(candidates, num_rounds, before_round), sizes.num_rows)

    figures = timed("stall", {name: _stall(methods[name]) for name in methods})
    if is_largest:
        figures += timed("save", {name: _save(methods[name]) for name in methods})
        figures += _bytes_and_memory(setup, models, methods, folder)
        restored = [name for name in methods if name != DCP_ASYNC]
        figures += timed("restore", {name: _restore(models, methods[name]) for name in restored})
    for name, method in methods.items():
        if name != FOUR or not is_largest:
            method.close()
    shutil.rmtree(folder)
    return figures


@dataclass(frozen=True)
class _Models:
    """Two models of the same sizes, since one tracker of a model saves at a time."""

    model: TableModel
    quantized: TableModel

    def modify(self) -> None:
        """Train both."""
        self.model.modify(SHARE)
        self.quantized.modify(SHARE)

    def set_trained(self, is_quick: bool) -> None:
        """Set all rows of the quantized model to those of a trained table, repeated, and let no step change them."""
        [table] = self.quantized.tables()
        table.copy_(tiled(trained_table(TRAINED_HEAD, "readers", is_quick).rows, len(table)))
        self.quantized.set_learning_rate(0)  # its steps count as training, but add the same direction to all rows

    def clear(self) -> None:
        """Set all rows of both to zero."""
        self.model.clear()
        self.quantized.clear()


def _methods(models: _Models, folder: Path) -> dict[str, SaveMethod]:
    model = models.model
    return {
        EXACT: Ours(model, folder / EXACT, SCHEMES[EXACT]),
        FOUR: Ours(models.quantized, folder / FOUR, SCHEMES[FOUR]),
        DCP: DCPSave(model, folder / "dcp"),
        DCP_ASYNC: DCPAsyncSave(model, folder / "dcp-async"),
        OWN_DELTAS: OwnDeltas(model, folder / "own"),
    }


def _bytes_and_memory(setup: Setup, models: _Models, methods: dict[str, SaveMethod], folder: Path) -> list[Figure]:
    """Save once more by each method; at 8 and 2 bits and transform-coded, bytes only."""
    memory: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for name, method in methods.items():
        setup.say(f"memory of {name}")
        _save_whole(method)  # so that one round of training is in the next, as in all others
        models.modify()
        memory[name] = peak_mib(partial(_save_whole, method)) + method.held_bytes / 2**20
        sizes[name] = _last_bytes(folder, name)
    methods[FOUR].close()
    for name in (EIGHT, TWO, TRANSFORMED):
        setup.say(f"bytes of {name}")
        if name == TRANSFORMED:
            models.set_trained(setup.quick)
        other = Ours(models.quantized, folder / name, SCHEMES[name])
        models.modify()
        _save_whole(other)
        sizes[name] = _last_bytes(folder, name)
        other.close()
    found = [Figure(f"bytes, {name}", float(size), "bytes") for name, size in sizes.items()]
    return found + [Figure(f"memory, {name}", value, "MiB") for name, value in memory.items()]


def _last_bytes(folder: Path, name: str) -> int:
    """Return the bytes of the last checkpoint of a method, which is a delta if the method writes deltas."""
    if name == OWN_DELTAS:
        return (folder / "own" / "delta.pt").stat().st_size
    if name in SCHEMES:
        return num_bytes(Path(str(cnr.latest(folder / name))))
    return num_bytes(folder / ("dcp" if name == DCP else "dcp-async"))


def _figures(kind: str, timings: Timings, num_rows: int) -> list[Figure]:
    return [
        Figure.over_rounds(f"{kind}, {name}, {num_rows:,} rows", [1e3 * took.secs for took in taken], "ms")
        for name, taken in timings.items()
    ]


def _stall(method: SaveMethod) -> Candidate:
    return Candidate(run=lambda _: method.begin(), before=lambda _: os.sync(), after=lambda _: method.finish())


def _save(method: SaveMethod) -> Candidate:
    return Candidate(run=lambda _: _save_whole(method), before=lambda _: os.sync())


def _save_whole(method: SaveMethod) -> None:
    method.begin()
    method.finish()


def _restore(models: _Models, method: SaveMethod) -> Candidate:
    return Candidate(run=lambda _: method.restore(), before=lambda _: models.clear())


BENCHMARK = Benchmark(
    run,
    "figures of the README: bytes, stall, save, restore, memory, exact and 4-bit, against plain DCP",
    is_long=True,
    plot=PLOT,
)

"""Asynchronous saves: how long training stands still, what they take in memory, and how many a minute can be taken."""

import gc
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import torchrec_cnr as cnr
from benchmarks.models import TableModel, TableSizes, one_rank
from benchmarks.peak_memory import peak_mib, resident_mib
from benchmarks.report import Figure, Report
from benchmarks.rounds import Candidate, Setup, Timings, interleave, ratios, round_name, times_table

SHARE = 0.26  # of the rows is modified between two checkpoints
SCHEMES: Mapping[str, cnr.Scheme] = {
    "4 bits": cnr.Asymmetric(4),
    "4 bits adaptive": cnr.AdaptiveAsymmetric(4),
    "exact": cnr.NoQuantization(),
}
STOCK = "stock, whole state"
FULL, QUICK = TableSizes(2, 2_000_000, 64), TableSizes(2, 2_000, 64)
NUM_ROUNDS, NUM_QUICK_ROUNDS = 7, 1
NUM_SAVES, NUM_QUICK_SAVES = 200, 4
MIN_STALL_RATIO, MAX_MIB, MIN_RATE_RATIO = 5.0, 256, 6.0


def run(setup: Setup) -> Report:
    """Measure memory, then compare stalls and rates with the stock writer's."""
    sizes = QUICK if setup.quick else FULL
    num_rounds = NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS
    with one_rank(setup.folder):
        setup.say(f"making {sizes}")
        model = TableModel(sizes)
        memory = _memory(model, setup)
        saves: dict[str, Stock | Lineage] = {STOCK: Stock(model, setup.folder / "stock")}
        for name, scheme in SCHEMES.items():
            saves[name] = Lineage(TableModel(sizes), setup.folder / name, scheme, SHARE)
        rates = time_saves(saves, setup, num_rounds, waits=True)
        stalls = time_saves(saves, setup, num_rounds, waits=False)
    return Report(
        title=f"asynchronous saves of {sizes}, {100 * SHARE:g} % of the rows modified",
        notes=(
            f"{num_rounds} rounds after a warm-up, all in turns; each time, random rows were marked as modified.",
            "A stall is the time until dcp.async_save returns; for the rate, it is until the save is committed, when",
            "the next one begins. The stock writer saves these tables as plain tensors, since its stager cannot copy",
            "TorchRec's; it writes one file. No file is forced to disk.",
        ),
        figures=(*_stall_figures(stalls), *_rate_figures(rates), *memory),
        tables=(
            times_table("stall", stalls),
            times_table("save, until committed", rates),
        ),
    )


class Lineage:
    """Deltas of a model, saved behind training."""

    def __init__(self, model: TableModel, folder: Path, scheme: cnr.Scheme, share: float) -> None:
        self._model = model
        self._folder = folder
        self._share = share
        self._tracker = cnr.RowTracker(model.sharded)
        self._planner = cnr.CNRSavePlanner(self._tracker, policy=cnr.Consecutive())
        self._writer = cnr.CNRStorageWriter(folder, quantization=scheme, sync_files=False)
        self._num_saves = 0
        self._begin(dcp.save)  # type: ignore[attr-defined]  # torch does not mark it as exported

    def modify(self) -> None:
        """Mark rows as modified."""
        sizes = self._model.sizes
        for index in range(sizes.num_tables):
            rows = torch.randperm(sizes.num_rows)[: round(self._share * sizes.num_rows)]
            self._tracker.mark(f"t{index}", rows)

    def save(self) -> "Future[Any]":
        """Begin a save."""
        future: Future[Any] = self._begin(dcp.async_save)  # type: ignore[attr-defined]
        return future

    def _begin(self, how: Callable[..., Any]) -> Any:
        self._num_saves += 1
        place = self._folder / str(self._num_saves)
        return how(self._model.state(), checkpoint_id=place, storage_writer=self._writer, planner=self._planner)

    def close(self) -> None:
        """Remove what was saved."""
        self._writer.close()
        self._tracker.close()
        shutil.rmtree(self._folder)


class Stock:
    """Saves of the whole state by DCP's own writer."""

    def __init__(self, model: TableModel, folder: Path) -> None:
        self._model = model
        self._folder = folder

    def modify(self) -> None:
        """Everything is saved anyway; the save before is removed."""
        if self._folder.exists():
            shutil.rmtree(self._folder)

    def save(self) -> "Future[Any]":
        """Begin a save."""
        state = {f"t{index}": table for index, table in enumerate(self._model.tables())}
        optimizer = self._model.sharded.fused_optimizer.state_dict()["state"]
        for name, values in optimizer.items():
            state |= {f"{name}.{key}": value.local_shards()[0].tensor for key, value in values.items()}
        writer = FileSystemWriter(self._folder, sync_files=False)
        future: Future[Any] = dcp.async_save(state, storage_writer=writer)  # type: ignore[assignment, attr-defined]
        return future

    def close(self) -> None:
        """Remove what was saved."""
        shutil.rmtree(self._folder)


def time_saves(saves: "Mapping[str, Stock | Lineage]", setup: Setup, num_rounds: int, *, waits: bool) -> Timings:
    """Time each kind of save until it returns, or until it is committed."""
    saving: dict[str, Future[Any]] = {}

    def candidate(name: str, lineage: Stock | Lineage) -> Candidate:
        def before(number: int) -> None:
            lineage.modify()
            os.sync()

        def begin(number: int) -> None:
            saving[name] = lineage.save()
            if waits:
                saving[name].result()

        return Candidate(run=begin, before=before, after=lambda number: saving[name].result())

    candidates = {name: candidate(name, lineage) for name, lineage in saves.items()}
    what = "until committed" if waits else "stalls"
    return interleave(candidates, num_rounds, lambda number: setup.say(f"{what}: {round_name(number, num_rounds)}"))


def _stall_figures(stalls: Timings) -> list[Figure]:
    return [
        Figure.over_rounds(
            f"stall, {name}, shorter than the stock", ratios(stalls, STOCK, name), "×", at_least=MIN_STALL_RATIO
        )
        for name in SCHEMES
    ]


def _rate_figures(rates: Timings) -> list[Figure]:
    return [
        Figure.over_rounds(
            f"saves a minute, {name}, of the stock's",
            ratios(rates, STOCK, name),
            "×",
            at_least=MIN_RATE_RATIO if name == "4 bits" else None,
        )
        for name in SCHEMES
    ]


def _memory(model: TableModel, setup: Setup) -> list[Figure]:
    """The peak of each of many saves, beyond the rows that they stage, and how far memory grows over all of them."""
    num_saves = NUM_QUICK_SAVES if setup.quick else NUM_SAVES
    lineage = Lineage(model, setup.folder / "memory", SCHEMES["4 bits"], SHARE)
    peaks, residents = [], []
    staged_bytes = 0
    gc.collect()
    before_mib = resident_mib()
    for number in range(num_saves):
        if number % 20 == 0:
            setup.say(f"memory: {number} of {num_saves} saves")
        lineage.modify()
        saved: dict[int, Any] = {}

        def save(number: int = number, saved: dict[int, Any] = saved) -> None:
            saved[number] = lineage.save().result()

        peak_mib(save)
        staged_bytes = max(staged_bytes, saved[number].phases[0].staged_bytes)
        peaks.append(resident_mib("VmHWM") - before_mib)
        residents.append(resident_mib())
    lineage.close()
    half = num_saves // 2
    return [
        Figure("rows staged by a save", staged_bytes / 2**20, "MiB"),
        Figure(
            f"memory beyond those and the state, at its most in {num_saves} saves",
            max(0.0, max(peaks) - staged_bytes / 2**20),
            "MiB",
            at_most=MAX_MIB,
        ),
        Figure(
            "of it, growth from the first half of the saves to the second",
            max(0.0, max(residents[half:]) - max(residents[:half])),
            "MiB",
        ),
    ]

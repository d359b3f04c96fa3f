"""Asynchronous saves: the stall of training, their memory, and the number of saves per minute."""

import gc
from typing import Any

from benchmarks.support.jobs.async_saves import DCP, FULL, QUICK, SCHEMES, SHARE, DCPSaves, Lineage, time_saves
from benchmarks.support.jobs.table_models import TableModel, one_rank
from benchmarks.support.process_memory import peak_mib, resident_mib
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report
from benchmarks.support.rounds import Setup, Timings, ratios, times_table

NUM_ROUNDS, NUM_QUICK_ROUNDS = 7, 1
NUM_SAVES, NUM_QUICK_SAVES = 200, 4
MIN_STALL_RATIO, MAX_MIB, MIN_RATE_RATIO = 5.0, 256, 6.0


def run(setup: Setup) -> Report:
    """Measure memory, then compare stalls and rates with those of DCP's own writer."""
    sizes = QUICK if setup.quick else FULL
    num_rounds = NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS
    with one_rank(setup.folder):
        setup.say(f"making {sizes}")
        model = TableModel(sizes)
        memory = _memory(model, setup)
        saves: dict[str, DCPSaves | Lineage] = {DCP: DCPSaves(model, setup.folder / "plain-dcp")}
        for name, scheme in SCHEMES.items():
            saves[name] = Lineage(TableModel(sizes), setup.folder / name, scheme, SHARE)
        rates = time_saves(saves, setup, num_rounds, waits=True)
        stalls = time_saves(saves, setup, num_rounds, waits=False)
    return Report(
        title=f"asynchronous saves of {sizes}, {100 * SHARE:g} % of the rows modified",
        notes=(
            f"{num_rounds} rounds after a warm-up, all in turns; each time, random rows were marked as modified.",
            "A stall is the time until dcp.async_save returns; for the rate, it is until the save is committed, when",
            "the next one begins. Plain DCP saves these tables as plain tensors, since its stager cannot copy",
            "TorchRec's; it writes one file. No file is forced to disk.",
        ),
        figures=(*_stall_figures(stalls), *_rate_figures(rates), *memory),
        tables=(
            times_table("stall", stalls),
            times_table("save, until committed", rates),
        ),
    )


def _stall_figures(stalls: Timings) -> list[Figure]:
    return [
        Figure.over_rounds(
            f"stall, {name}, shorter than plain DCP", ratios(stalls, DCP, name), "×", at_least=MIN_STALL_RATIO
        )
        for name in SCHEMES
    ]


def _rate_figures(rates: Timings) -> list[Figure]:
    return [
        Figure.over_rounds(
            f"saves a minute, {name}, of plain DCP's",
            ratios(rates, DCP, name),
            "×",
            at_least=MIN_RATE_RATIO if name == "4 bits" else None,
        )
        for name in SCHEMES
    ]


def _memory(model: TableModel, setup: Setup) -> list[Figure]:
    """Measure the peak of each of many saves, beyond the staged rows, and the growth of memory over all of them."""
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


BENCHMARK = Benchmark(
    run, "stalls, rate and memory of asynchronous saves, relative to DCP's own writer and stager", is_long=True
)

"""Training with asynchronous saves: the example's throughput, relative to the same training without saves."""

import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table, number
from benchmarks.support.rounds import Setup, round_name

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "train_dlrm.py"
EVERY = 20  # steps between two saves
NUM_STEPS, NUM_QUICK_STEPS = 320, 40
NUM_ROUNDS, NUM_QUICK_ROUNDS = 5, 1
MIN_RATIO = 0.9
LIMIT_SECS = 600.0
NONE, ASYNC, SYNC = "none", "asynchronous", "synchronous"


def run(setup: Setup) -> Report:
    """Run the example alternately without saves, with asynchronous saves, and with saves that training waits for."""
    num_steps = NUM_QUICK_STEPS if setup.quick else NUM_STEPS
    num_rounds = NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS
    ways: Mapping[str, Sequence[str]] = {
        NONE: ("--every", str(num_steps + 1)),
        ASYNC: ("--every", str(EVERY), "--async"),
        SYNC: ("--every", str(EVERY)),
    }
    if setup.quick:
        small = ("--num-rows", "1000", "--batch-size", "64")
        ways = {name: (*ways[name], *small) for name in (NONE, ASYNC)}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(1, num_rounds + 1):
        setup.say(round_name(round_number, num_rounds))
        first = round_number % len(ways)
        for name in [*ways, *ways][first : first + len(ways)]:
            rates[name].append(_rate(setup.folder / "run", num_steps, ways[name]))
    return Report(
        title=f"training of examples/train_dlrm.py on 2 ranks while a 4-bit delta is saved every {EVERY} steps",
        notes=(
            f"{num_rounds} rounds of {num_steps} steps, each a run of its own, in turns; the first 20 do not count.",
            "Ranks, the saves behind them and the reading of made-up clicks share the cores of this machine.",
        ),
        figures=tuple(
            Figure.over_rounds(
                f"steps a second with {name} saves, of those with none",
                [rate / alone for rate, alone in zip(rates[name], rates[NONE], strict=True)],
                "×",
                at_least=MIN_RATIO if name == ASYNC else None,
            )
            for name in rates
            if name != NONE
        ),
        tables=(
            Table(
                ("saves", "steps a second"),
                tuple((name, number(statistics.median(found))) for name, found in rates.items()),
            ),
        ),
    )


def _rate(root: Path, num_steps: int, options: Sequence[str]) -> float:
    """Run the example, and return the steps per second that it prints."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(SCRIPT), "--root", str(root), "--steps", str(num_steps), *options]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECS,
        check=False,
    )
    shutil.rmtree(root, ignore_errors=True)
    found = re.search(r"^([\d.]+) steps per second$", done.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return float(found[1])


BENCHMARK = Benchmark(run, "loss of training throughput by asynchronous saves, on 2 ranks of the example", is_long=True)

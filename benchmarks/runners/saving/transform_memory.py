"""The memory of a save that transform-codes a large table, beyond the table, in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.data.click_model import Head
from benchmarks.support.data.clicks import trained_on
from benchmarks.support.data.tiled_rows import trained_table
from benchmarks.support.jobs.large_save import NUM_FIRST_ROWS, RULES
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report
from benchmarks.support.rounds import Setup

ROOT = Path(__file__).parents[3]
DIM = 64
NUM_ROWS, NUM_QUICK_ROWS = (4 << 30) // (4 * DIM), 50_000
HEADS: tuple[Head, ...] = ("dot products", "DCN-v2")
TABLE = "readers"
MAX_MIB = 64
LIMIT_SECS = 1800


def run(setup: Setup) -> Report:
    """Save a table of each model with each rule, each in a new process."""
    num_rows = NUM_QUICK_ROWS if setup.quick else NUM_ROWS
    size = f"a table of {4 * DIM * num_rows / 1e9:.2g} GB"
    figures = []
    for head in HEADS:
        setup.say(f"training {TABLE}, {head}")
        rows = setup.folder / "rows.npy"
        np.save(rows, trained_table(head, TABLE, setup.quick).rows.numpy())
        for rule in RULES:
            setup.say(f"saving {size}, {head}, {rule}")
            found = _saved(rows, num_rows, rule, setup.folder / "saves")
            name = rule if found["is_transformed"] or rule == "AdaptiveAsymmetric(4)" else f"{rule}, not transformed"
            figures.append(Figure(f"{head}, {name}: {size}", found["table"], "MiB", at_most=MAX_MIB))
            figures.append(Figure(f"{head}, {name}: the first save of the process", found["first"], "MiB"))
    return Report(
        title=f"peak memory of saves of {size}, {num_rows:,} × {DIM} fp32",
        notes=(
            f"Rows of tables trained on {trained_on()}, repeated with noise. The highest resident size during a",
            "synchronous save to local files, less that before it, in a process that does nothing else. It has saved",
            f"{NUM_FIRST_ROWS:,} rows before, which loads the kernels: that is the first save.",
        ),
        figures=tuple(figures),
    )


def _saved(rows: Path, num_rows: int, rule: str, folder: Path) -> dict[str, Any]:
    """Save a table in a new process, and return what it has printed."""
    job = [f"--rows={rows}", f"--num-rows={num_rows}", f"--rule={rule}", f"--folder={folder}"]
    command = [sys.executable, "-m", "benchmarks.support.jobs.large_save", *job]
    folder.mkdir()
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=LIMIT_SECS, check=False
    )
    shutil.rmtree(folder)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


BENCHMARK = Benchmark(run, "memory that a save of transform-coded rows takes beyond a table of 4 GB", is_long=True)

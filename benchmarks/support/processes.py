"""A benchmark in its own process, whose memory does not change the figures of the next, and jobs on several ranks."""

import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.report import Report
from benchmarks.support.rounds import Setup

_ROOT = Path(__file__).resolve().parents[2]
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Progress:
    """A callback that prints a line for each stage on stderr, with the seconds since ``started``."""

    name: str
    started: float

    def __call__(self, text: str) -> None:
        print(f"  {time.monotonic() - self.started:4.0f} s  {self.name}: {text}", file=sys.stderr, flush=True)


class BenchmarkError(Exception):
    """The process of a benchmark ended without a report; it has printed the reason."""


def run_alone(run: Callable[[Setup], Report], setup: Setup) -> Report:
    """Run a benchmark in a new process, which ends with this one.

    Raises:
        BenchmarkError: The benchmark failed.
    """
    receiver, sender = _SPAWN.Pipe(duplex=False)
    process = _SPAWN.Process(target=_answer, args=(sender, run, setup), daemon=True)
    process.start()
    sender.close()
    try:
        report: Report = receiver.recv()
    except EOFError as error:
        process.join()
        raise BenchmarkError(f"its process ended with status {process.exitcode}") from error
    finally:
        process.terminate()
        process.join()
    return report


def results_of_job(module: str, num_ranks: int, options: Sequence[str], limit_secs: float) -> Any:
    """Run a job by torchrun, with one thread for each rank, and return what it prints last, which is JSON.

    Args:
        module: Its name in ``benchmarks.support.jobs``.
        num_ranks: Number of gloo ranks.
        options: Its options.
        limit_secs: Seconds that it may take.

    Raises:
        RuntimeError: The job failed.
        subprocess.TimeoutExpired: It took too long.
    """
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [sys.executable, "-m", *launcher, "-m", f"benchmarks.support.jobs.{module}", *options]
    done = subprocess.run(
        command,
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit_secs,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _answer(sender: Connection, run: Callable[[Setup], Report], setup: Setup) -> None:
    # torch, torchrec and DCP print warnings about future changes on every run.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    torch.set_num_threads(setup.num_threads)
    sender.send(run(setup))

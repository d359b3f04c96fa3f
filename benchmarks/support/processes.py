"""A benchmark in its own process, so that the memory that one leaves does not change the figures of the next."""

import logging
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from benchmarks.support.report import Report
from benchmarks.support.rounds import Setup

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


def _answer(sender: Connection, run: Callable[[Setup], Report], setup: Setup) -> None:
    # torch, torchrec and DCP print warnings about future changes on every run.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    torch.set_num_threads(setup.num_threads)
    sender.send(run(setup))

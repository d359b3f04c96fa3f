"""Candidates that are timed alternately, so that other load of the machine affects all of them."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.support.report import Table, quartiles


@dataclass(frozen=True)
class Setup:
    """The setup of a benchmark.

    Attributes:
        folder: An empty folder for its files; it is removed afterwards.
        quick: Whether to use small sizes, only to try the benchmark.
        num_threads: Number of torch's threads.
        say: A callback that takes a line about the progress.
        all_cases: Whether to measure cases that take long and have no target, too.
        kafka: ``host:port`` of a broker to use, or None to start one.
        s3: URL in a bucket to use, or None to start a server.
        data: Format and path of a file of interactions to read, or None.
    """

    folder: Path
    quick: bool
    num_threads: int
    say: Callable[[str], None]
    all_cases: bool = False
    kafka: str | None = None
    s3: str | None = None
    data: tuple[str, Path] | None = None


def _nothing(number: int) -> None:
    pass


@dataclass(frozen=True)
class Candidate:
    """An operation to time. Its functions are called with the number of the round, which is 0 for the warm-up.

    Attributes:
        run: The function to time.
        before: Called before ``run``, and not timed.
        after: Called after ``run``, and not timed.
    """

    run: Callable[[int], object]
    before: Callable[[int], object] = _nothing
    after: Callable[[int], object] = _nothing


class Taken(NamedTuple):
    """The time that an operation took.

    Attributes:
        secs: Elapsed seconds.
        processor_secs: Processor seconds of all threads of this process; other processes do not count.
    """

    secs: float
    processor_secs: float


Timings = Mapping[str, Sequence[Taken]]


def interleave(
    candidates: Mapping[str, Candidate], num_rounds: int, before_round: Callable[[int], object] = _nothing
) -> Timings:
    """Time every candidate once per round, after a warm-up, so that each round is a comparison by itself.

    The order changes from round to round, so that no candidate always runs after the same other one.

    Returns:
        The times of all rounds, by candidate.
    """
    taken: dict[str, list[Taken]] = {name: [] for name in candidates}
    names = list(candidates)
    for number in range(num_rounds + 1):
        before_round(number)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            candidate = candidates[name]
            candidate.before(number)
            gc.collect()
            start, processor_start = time.perf_counter(), time.process_time()
            candidate.run(number)
            took = Taken(time.perf_counter() - start, time.process_time() - processor_start)
            candidate.after(number)
            if number > 0:
                taken[name].append(took)
    return taken


def ratios(timings: Timings, dividend: str, divisor: str) -> list[float]:
    """Return the time of one candidate divided by that of another, for each round."""
    return [a.secs / b.secs for a, b in zip(timings[dividend], timings[divisor], strict=True)]


def processor_ratios(timings: Timings, dividend: str, divisor: str) -> list[float]:
    """Return :func:`ratios` of processor time, for operations that neither wait nor use several threads."""
    return [a.processor_secs / b.processor_secs for a, b in zip(timings[dividend], timings[divisor], strict=True)]


def times_table(heading: str, timings: Timings, num_steps: int = 1) -> Table:
    """Return a table of the milliseconds of each candidate, per round or per step of a round."""
    rows = []
    for name, taken in timings.items():
        low, median, high = (1e3 * value / num_steps for value in quartiles([took.secs for took in taken]))
        processor = 1e3 * quartiles([took.processor_secs for took in taken])[1] / num_steps
        rows.append((name, f"{median:,.1f}", f"{low:,.1f} to {high:,.1f}", f"{processor:,.1f}"))
    return Table((heading, "median ms", "quartiles", "processor ms"), tuple(rows))


def round_name(number: int, num_rounds: int) -> str:
    """Return the name of a round for progress lines."""
    return f"round {number} of {num_rounds}" if number else "warm-up"

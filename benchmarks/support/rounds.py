"""Candidates timed in turns: whatever else the machine does meanwhile, it does to all of them."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.support.report import Table, quartiles


@dataclass(frozen=True)
class Setup:
    """What every benchmark is given.

    Attributes:
        folder: An empty folder for its files; it is removed afterwards.
        quick: Sizes to try a benchmark out, whose figures mean nothing.
        num_threads: Of torch.
        say: Takes a line on what goes on.
        plots: Where plots go, if they are wanted.
        all_cases: Whether to measure also what takes long and has no target of its own.
        kafka: ``host:port`` of a broker, if there is one already.
        s3: URL of a place in a bucket, if there is one already.
        data: Format and path of a file of interactions, if there is one to be read.
    """

    folder: Path
    quick: bool
    num_threads: int
    say: Callable[[str], None]
    plots: Path | None = None
    all_cases: bool = False
    kafka: str | None = None
    s3: str | None = None
    data: tuple[str, Path] | None = None


def _nothing(number: int) -> None:
    pass


@dataclass(frozen=True)
class Candidate:
    """Something to be timed. Its functions are called with the number of the round, 0 being the warm-up.

    Attributes:
        run: What is timed.
        before: Done before, and not timed.
        after: Done afterwards, and not timed.
    """

    run: Callable[[int], object]
    before: Callable[[int], object] = _nothing
    after: Callable[[int], object] = _nothing


class Taken(NamedTuple):
    """Time that something took.

    Attributes:
        secs: By the clock.
        processor_secs: Of all threads of this process; work of other processes does not count.
    """

    secs: float
    processor_secs: float


Timings = Mapping[str, Sequence[Taken]]


def interleave(
    candidates: Mapping[str, Candidate], num_rounds: int, before_round: Callable[[int], object] = _nothing
) -> Timings:
    """Time every candidate once a round, after a warm-up, so that each round is a comparison of its own.

    The order changes from round to round: nobody always comes after the same other one.

    Returns:
        What each round took, by candidate.
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
    """How many times as long one candidate took as another, in each round."""
    return [a.secs / b.secs for a, b in zip(timings[dividend], timings[divisor], strict=True)]


def processor_ratios(timings: Timings, dividend: str, divisor: str) -> list[float]:
    """As :func:`ratios`, by processor time: for what neither waits nor shares its work among threads."""
    return [a.processor_secs / b.processor_secs for a, b in zip(timings[dividend], timings[divisor], strict=True)]


def times_table(heading: str, timings: Timings, num_steps: int = 1) -> Table:
    """Milliseconds of each candidate, or of each of the steps that a round of it has."""
    rows = []
    for name, taken in timings.items():
        low, median, high = (1e3 * value / num_steps for value in quartiles([took.secs for took in taken]))
        processor = 1e3 * quartiles([took.processor_secs for took in taken])[1] / num_steps
        rows.append((name, f"{median:,.1f}", f"{low:,.1f} to {high:,.1f}", f"{processor:,.1f}"))
    return Table((heading, "median ms", "quartiles", "processor ms"), tuple(rows))


def round_name(number: int, num_rounds: int) -> str:
    """For progress."""
    return f"round {number} of {num_rounds}" if number else "warm-up"

"""The registry of benchmarks, read from the folder of runners."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path

from benchmarks.plots.style import Plot
from benchmarks.support.report import Report
from benchmarks.support.rounds import Setup

RUNNERS = Path(__file__).parents[1] / "runners"


@dataclass(frozen=True)
class Benchmark:
    """A benchmark. Each module in a folder of ``runners`` defines one at its end, as ``BENCHMARK``.

    Attributes:
        run: Measures, and returns a report.
        description: A line of ``--help`` about the measured values.
        is_long: Whether it takes minutes, so that it runs only if it is named or with ``--full``.
        plot: The plot of its report, or None if it has none.
    """

    run: Callable[[Setup], Report]
    description: str
    is_long: bool = False
    plot: Plot | None = None


def find_benchmarks(folder: Path = RUNNERS) -> Mapping[str, Benchmark]:
    """Import all runners, and return their benchmarks by name, in the order of their paths.

    Raises:
        ValueError: Two files have the same name.
        TypeError: A module has no ``BENCHMARK``.
    """
    benchmarks: dict[str, Benchmark] = {}
    for path in sorted(folder.glob("*/[!_]*.py")):
        name = path.stem.rstrip("_").replace("_", "-")
        module = import_module(".".join(path.relative_to(folder.parents[1]).with_suffix("").parts))
        benchmark: object = getattr(module, "BENCHMARK", None)
        if not isinstance(benchmark, Benchmark):
            raise TypeError(f"{path}: expected BENCHMARK to be a Benchmark, got {benchmark!r}")
        if name in benchmarks:
            raise ValueError(f"{path}: another benchmark is named {name!r} too; rename one of the files")
        benchmarks[name] = benchmark
    return benchmarks


def help_text(benchmarks: Mapping[str, Benchmark]) -> str:
    """Return the benchmarks by folder, each with its description and a star if it is long, as text."""
    lines = []
    for group, names in groupby(benchmarks, lambda name: benchmarks[name].run.__module__.split(".")[-2]):
        lines.append(f"{group}:")
        for name in names:
            benchmark = benchmarks[name]
            lines.append(f"  {name:12} {'*' if benchmark.is_long else ' '} {benchmark.description}")
    return "\n".join(lines)

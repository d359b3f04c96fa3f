"""The report of a benchmark: figures, each with its target if it has one, and tables of the measured values."""

import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy")


@dataclass(frozen=True)
class Figure:
    """A measured number.

    Attributes:
        what: Name of the figure.
        value: The number; the median if there were several rounds.
        unit: The unit, such as ``×``.
        low: First quartile of the rounds, or None if there was only one.
        high: Third quartile of the rounds, or None if there was only one.
        at_least: Lower bound as a target, if there is one.
        at_most: Upper bound as a target, if there is one.
    """

    what: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    at_least: float | None = None
    at_most: float | None = None

    @classmethod
    def over_rounds(
        cls,
        what: str,
        values: Sequence[float],
        unit: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> "Figure":
        """Create a figure from the values of all rounds."""
        low, median, high = quartiles(values)
        return cls(what, median, unit, low, high, at_least, at_most)

    @property
    def is_met(self) -> bool | None:
        """Return whether the target is met, or None if there is no target."""
        if self.at_least is not None:
            return self.value >= self.at_least
        return None if self.at_most is None else self.value <= self.at_most

    def cells(self, is_judged: bool) -> tuple[str, str, str, str]:
        """Return name, measured value and target, and whether the target is met (empty if not ``is_judged``)."""
        spread = "" if self.low is None or self.high is None else f" ({number(self.low)} to {number(self.high)})"
        target = ""
        if self.at_least is not None:
            target = f"at least {number(self.at_least)} {self.unit}"
        if self.at_most is not None:
            target = f"at most {number(self.at_most)} {self.unit}"
        verdict = {True: "met", False: "NOT MET", None: ""}[self.is_met if is_judged else None]
        return self.what, f"{number(self.value)} {self.unit}{spread}", target, verdict


@dataclass(frozen=True)
class Table:
    """A table of the values from which figures are computed.

    Attributes:
        columns: The headings.
        rows: The rows, with a cell for each heading.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Report:
    """The result of a benchmark.

    Attributes:
        title: Title, in one line.
        notes: Lines about the method and its limits.
        figures: The figures.
        tables: The values from which the figures are computed.
        plot: The values that the plot shows and the figures lack, as JSON values with strings as keys; None if there
            are none.
    """

    title: str
    notes: tuple[str, ...]
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...] = ()
    plot: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values; without ``plot`` if it is None."""
        content = asdict(self) | {"figures": [asdict(figure) | {"is_met": figure.is_met} for figure in self.figures]}
        return {key: value for key, value in content.items() if value is not None}


def text_of(name: str, report: Report, is_judged: bool) -> str:
    """Format a report; if ``is_judged``, show whether targets are met."""
    lines = [f"== {name}: {report.title}", *(f"   {note}" for note in report.notes)]
    for table in report.tables:
        lines += ["", *_aligned([table.columns, *table.rows])]
    if report.figures:
        heading = ("what", "measured", "target", "")
        lines += ["", *_aligned([heading, *(figure.cells(is_judged) for figure in report.figures)])]
    return "\n".join([*lines, ""])


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return first quartile, median and third quartile."""
    low, median, high = statistics.quantiles([*values, *values] if len(values) == 1 else values, method="inclusive")
    return low, median, high


def number(value: float) -> str:
    """Format a number with four significant digits, or all digits of a whole number."""
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def machine(folder: Path) -> dict[str, str]:
    """Return a description of the machine and of the versions of packages."""
    memory_gib = psutil.virtual_memory().total / 2**30
    disks = [disk for disk in psutil.disk_partitions(all=True) if folder.is_relative_to(disk.mountpoint)]
    disk = max(disks, key=lambda disk: len(disk.mountpoint), default=None)
    return {
        "machine": f"{psutil.cpu_count()} cores, {_processor()}, {memory_gib:.0f} GiB of memory",
        "files": f"{disk.fstype} on {disk.device}" if disk else "unknown",
        "versions": ", ".join([f"Python {platform.python_version()}", *_versions(PACKAGES)]),
        "load": f"{psutil.getloadavg()[0]:.1f} processes wanted a core before the start",
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _versions(packages: Iterable[str]) -> list[str]:
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:  # only one of the two fbgemm packages is installed
            continue
    return found


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Format rows as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]

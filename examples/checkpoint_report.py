"""A report on the sizes of a run's checkpoints, as the lines of a table and as a picture.

It is read only from the manifests on disk, so a resumed run also reports the checkpoints of the runs before it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint_places import is_committed, step_path, steps_on_disk
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

import torchrec_cnr as cnr
from torchrec_cnr.format.manifest import DTYPES

COLORS = {"baseline": "#06366b", "delta": "#0b6bcb"}
GREY, RED = "#57606a", "#b01020"
UNITS = ("B", "KB", "MB", "GB", "TB")
TABLE_HEAD = "   step  kind           rows stored       bytes  vs full fp32"


@dataclass(frozen=True)
class Record:
    """The sizes of one committed checkpoint.

    Attributes:
        step: The training step after which it was saved.
        kind: ``baseline`` or ``delta``.
        num_rows: Number of table rows that it stores.
        all_rows: Number of rows of all tables.
        num_bytes: Bytes of all its files.
        full_bytes: Bytes of a full fp32 checkpoint of the same state.
    """

    step: int
    kind: str
    num_rows: int
    all_rows: int
    num_bytes: int
    full_bytes: int

    @property
    def ratio(self) -> float:
        """The size of a full fp32 checkpoint, divided by the size of this one."""
        return self.full_bytes / self.num_bytes

    def line(self) -> str:
        """Return the record as a line of the table with the head ``TABLE_HEAD``."""
        share = self.num_rows / self.all_rows
        return (
            f"{self.step:>7}  {self.kind:<8}  {self.num_rows:>9,} {share:>7.1%}  {human_bytes(self.num_bytes):>10}"
            f"  {self.ratio:>11.1f}x"
        )


@dataclass(frozen=True)
class Resume:
    """The point at which one run ended and another one continued.

    Attributes:
        step: Step of the checkpoint that was loaded.
        world_size: Number of ranks of the resumed run.
        killed_save: Step of the save in which the earlier run was killed, or None if it was not killed in a save.
    """

    step: int
    world_size: int
    killed_save: int | None


def read_records(root: Path) -> list[Record]:
    """Read the records of the committed checkpoints under ``root``, ordered by step."""
    steps = [step for step in steps_on_disk(root) if is_committed(step_path(root, step))]
    return [read_record(root, step) for step in steps]


def read_record(root: Path, step: int) -> Record:
    """Read the record of a committed checkpoint."""
    checkpoint = cnr.read_checkpoint(step_path(root, step))
    tensors = checkpoint.manifest.tensors.values()
    return Record(
        step=step,
        kind=checkpoint.kind,
        num_rows=checkpoint.num_rows,
        all_rows=sum(entry.size[0] for entry in tensors if entry.is_table),
        num_bytes=checkpoint.num_bytes,
        full_bytes=sum(math.prod(entry.size) * DTYPES[entry.dtype].itemsize for entry in tensors),
    )


def summary(records: Sequence[Record]) -> str:
    """Return one line about all checkpoints together."""
    stored = sum(record.num_bytes for record in records)
    full = sum(record.full_bytes for record in records)
    return (
        f"{len(records)} checkpoints take {human_bytes(stored)}; full fp32 checkpoints would take"
        f" {human_bytes(full)}, {full / stored:.1f} times as much"
    )


def ranks(num: int) -> str:
    """Format a number of ranks."""
    return "1 rank" if num == 1 else f"{num} ranks"


def human_bytes(num_bytes: float) -> str:
    """Format a number of bytes in the largest unit in which it is at least 1."""
    power = min(int(math.log10(max(num_bytes, 1)) // 3), len(UNITS) - 1)
    return f"{num_bytes / 1000**power:.{2 if power else 0}f} {UNITS[power]}"


def draw_report(png: Path, records: Sequence[Record], resumes: Sequence[Resume], title: str) -> None:
    """Draw the bytes of each checkpoint and of a full one, and mark where a run was resumed."""
    figure = Figure(figsize=(max(8.0, 0.55 * len(records) + 2), 5.2), layout="constrained")
    axes = figure.subplots()
    axes.margins(x=0.02)
    axes.set_ylim(0, 1.12 * max(max(record.full_bytes, record.num_bytes) for record in records))
    _draw_bars(axes, records)
    for resume in resumes:
        _draw_resume(axes, records, resume)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value).replace(".00", "")))
    axes.set_xticks(range(len(records)), [str(record.step) for record in records])
    axes.set_xlabel("checkpoint after step")
    axes.set_ylabel("bytes written")
    axes.set_title(f"{title}\n{summary(records)}", fontsize=10, loc="left")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0.88), fontsize=10, frameon=False)
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=130)


def _draw_bars(axes: Axes, records: Sequence[Record]) -> None:
    for kind, color in COLORS.items():
        at = [place for place, record in enumerate(records) if record.kind == kind]
        axes.bar(at, [records[place].num_bytes for place in at], 0.7, color=color, label=kind)
    axes.plot(range(len(records)), [record.full_bytes for record in records], "--", color=GREY)
    full = (
        f"a full fp32 checkpoint: {human_bytes(records[0].full_bytes)}; above the bars: how many times smaller they are"
    )
    _write(axes, full, (0, records[0].full_bytes), (0, 6), color=GREY)
    for place, record in enumerate(records):
        _write(axes, f"{record.ratio:.1f}x", (place, record.num_bytes), (0, 3), ha="center")


def _draw_resume(axes: Axes, records: Sequence[Record], resume: Resume) -> None:
    place = sum(record.step <= resume.step for record in records) - 0.5
    axes.axvline(place, ymax=0.75, color=RED, linestyle=":", linewidth=1.8)
    killed = "" if resume.killed_save is None else f"killed in the save of step {resume.killed_save},\n"
    text = f"{killed}resumed from step {resume.step} on {ranks(resume.world_size)}"
    _write(axes, text, (place, 0.72 * axes.get_ylim()[1]), (6, 0), color=RED, va="top")


def _write(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], *, color: str = "black", **align: Any
) -> None:
    """Write text next to a point of the axes, at an offset in points."""
    axes.annotate(text, at, xytext=offset, textcoords="offset points", fontsize=10, color=color, **align)

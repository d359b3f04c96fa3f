"""The style of the plots: one palette, large text, labels instead of legends; and the function that writes a plot.

A plot is 720 pixels wide, and its text is so large that it has nine pixels on a phone, where the plot is 360 wide. The
background is transparent. Each color has a second one for dark pages, which the SVG chooses by itself.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 720  # pixels
TEXT_SIZE = 18  # pixels
_BEYOND = 0.2  # of the axes, for pieces of bars that are not to scale

TEXT, OTHER, FAINT = "#57606a", "#8c959f", "#d0d7de"  # text and axes; bars and lines of others; grids
OURS = "#0b6bcb"
TINTS = {"exact": "#06366b", "8": "#084f96", "4": OURS, "3": "#3585d8", "2": "#6aa5e8"}  # by bits
DARK = {
    TEXT: "#a5afba",
    OTHER: "#7d8590",
    FAINT: "#3d444d",
    OURS: "#58a6ff",
    TINTS["exact"]: "#b4d9ff",
    TINTS["8"]: "#86c0ff",
    TINTS["3"]: "#4489d8",
    TINTS["2"]: "#2f6cb0",
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "torchrec_cnr",
    "font.sans-serif": ["DejaVu Sans"],  # a viewer without it takes its own
    "font.size": TEXT_SIZE,
    "text.color": TEXT,
    "axes.edgecolor": TEXT,
    "axes.facecolor": "none",
    "axes.labelcolor": TEXT,
    "axes.labelsize": TEXT_SIZE,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.titlesize": TEXT_SIZE,
    "axes.titleweight": "bold",
    "figure.constrained_layout.hspace": 0.08,
    "figure.constrained_layout.wspace": 0.06,
    "figure.facecolor": "none",
    "figure.labelsize": TEXT_SIZE,
    "grid.color": FAINT,
    "lines.linewidth": 2.5,
    "lines.markersize": 8,
    "xtick.color": TEXT,
    "xtick.labelsize": TEXT_SIZE,
    "ytick.color": TEXT,
    "ytick.labelsize": TEXT_SIZE,
}


@dataclass(frozen=True)
class Plot:
    """A plot of a benchmark's report.

    Attributes:
        name: Name of its file, such as ``hero.svg``.
        height: Height in pixels.
        draw: Draws the plot into an empty figure, from the report as ``Report.to_json`` returns it.
    """

    name: str
    height: int
    draw: Callable[[Mapping[str, Any], Figure], None]

    def write(self, report: Mapping[str, Any], path: Path) -> None:
        """Draw a report, and write the SVG; the same report gives the same bytes.

        Raises:
            KeyError: The report lacks a value that the plot shows.
        """
        with style.context(_STYLE, after_reset=True):
            figure = Figure(figsize=(WIDTH / 72, self.height / 72), layout="constrained")
            self.draw(report, figure)
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_for_pages(text.getvalue()))


class Bar(NamedTuple):
    """A horizontal bar: the name left of it, its value, the text right of it, and its color."""

    name: str
    value: float
    text: str
    color: str


def draw_bars(axes: Axes, bars: Sequence[Bar], end: float | None = None) -> None:
    """Draw bars, the first at the top, without an axis of values.

    Args:
        axes: The axes to draw into.
        bars: The bars.
        end: The greatest value that is drawn to scale. A longer bar has a gap, and a piece beyond it. None draws all
            bars to scale.
    """
    longest = max(bar.value for bar in bars)
    if end is None or longest <= end:
        end = width = longest
    else:
        width = end * (1 + _BEYOND)
    for place, bar in enumerate(bars):
        is_cut = bar.value > end
        pieces = [(0.0, end), (end + 0.4 * (width - end), width)] if is_cut else [(0.0, bar.value)]
        for left, right in pieces:
            axes.barh(place, right - left, left=left, color=bar.color, height=0.72)
        axes.annotate(bar.text, (pieces[-1][1], place), (6, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, width)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def label_lines(axes: Axes, labels: Sequence[tuple[float, str, str]], gap: float) -> None:
    """Write a label right of the axes for each line, moved up where two would overlap.

    Args:
        axes: The axes, with their limits.
        labels: The value at the end of the line, the text, and the color.
        gap: The least distance of two labels, as a share of the axes' height.
    """
    low, high = axes.get_ylim()
    at = -gap
    for value, text, color in sorted(labels, key=lambda label: (label[0] - low) / (high - low)):
        at = max(at + gap, (value - low) / (high - low))
        axes.annotate(text, (1, at), (8, 0), "axes fraction", "offset points", color=color, va="center")


def _for_pages(svg: str) -> str:
    """Return an SVG with its size in pixels, without metadata, and with the colors for dark pages."""
    svg = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', svg)
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    head, mark, rest = svg.partition("<defs>")
    return f"{head}<style>@media (prefers-color-scheme: dark){{{rules}}}</style>\n {mark}{rest}"

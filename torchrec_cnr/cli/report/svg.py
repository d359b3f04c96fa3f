"""Converts a matplotlib figure to inline SVG: with the page's colours, text as text, and ids that are unique in a page.

Figures are drawn with the light colours of ``PALETTE``. In the page, these become CSS variables. So the same plot also
works in dark mode, and is printed in black on white.
"""

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

from matplotlib import style
from matplotlib.figure import Figure

# Each colour has a contrast to the paper of at least 4.5 (text) or 3 (markers). All must differ: an SVG colour is
# mapped back to its role.
PALETTE: Mapping[str, tuple[str, str]] = {  # role: on light paper, on dark paper
    "paper": ("#ffffff", "#161b22"),
    "ink": ("#1c2128", "#e6edf3"),
    "quiet": ("#57606a", "#9aa4af"),
    "grid": ("#e3e7eb", "#2b323b"),
    "baseline": ("#1f4fb4", "#7aa5ff"),
    "delta": ("#b85c00", "#f2a65a"),
    "compaction": ("#a3168c", "#ee82dc"),
    "level": ("#0f7a6c", "#4fc9b7"),
}
LIGHT = {role: light for role, (light, _) in PALETTE.items()}
_SETTINGS: dict[Any, Any] = {  # matplotlib types the keys as a literal of all settings
    "svg.fonttype": "none",
    "svg.hashsalt": "torchrec_cnr",  # the same figure gives the same bytes
    "font.family": "DejaVu Sans",  # wider than most fonts: text that fits in it also fits in the page's font
    "font.size": 12,
    "text.color": LIGHT["ink"],
    "axes.labelcolor": LIGHT["quiet"],
    "axes.edgecolor": LIGHT["quiet"],
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 1.0,
    "xtick.color": LIGHT["quiet"],
    "xtick.major.pad": 9,  # keeps the labels below the lowest label of the vertical axis
    "ytick.color": LIGHT["quiet"],
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 12,
    "figure.facecolor": "none",
}
_FONT = re.compile(r"font-family: [^;]*;? ?")
_LINK = re.compile(r"url\(#")
_COLORS = re.compile("|".join(LIGHT.values()))
_VARIABLES = {light: f"var(--{role})" for role, light in LIGHT.items()}


@contextmanager
def page_style() -> Iterator[None]:
    """Let figures that are made within the context look like the page, whatever matplotlib's settings are."""
    with style.context(_SETTINGS, after_reset=True):
        yield


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """Return a figure as an ``<svg>`` element without a size of its own, which the page scales.

    Args:
        figure: The figure, made within ``page_style``.
        name: A prefix, in letters, for all ids of the figure. It must be unique in the page.
        label: A description of the figure for screen readers.
    """
    file = io.StringIO()
    with page_style():
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith("}metadata") or child.find("{*}style") is not None:  # CSS applies page-wide
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.partition("}")[2]  # inline SVG needs no namespace
        element.attrib = {key.partition("}")[2] or key: value for key, value in element.attrib.items()}
        _adopt(element, name)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _adopt(element: ElementTree.Element, name: str) -> None:
    """Make an element use the page's colours and fonts, and the prefixed ids of its figure."""
    attributes = element.attrib
    if "id" in attributes:
        attributes["id"] = f"{name}-{attributes['id']}"
    if "href" in attributes:
        attributes["href"] = attributes["href"].replace("#", f"#{name}-")
    if "clip-path" in attributes:
        attributes["clip-path"] = _LINK.sub(f"url(#{name}-", attributes["clip-path"])
    if "style" in attributes:
        style = _FONT.sub("", attributes["style"])
        attributes["style"] = _COLORS.sub(lambda found: _VARIABLES[found.group()], style)
    if element.tail is not None:
        element.tail = "\n"

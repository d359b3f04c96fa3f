"""A matplotlib figure as SVG that belongs into a page: colours of the page, text as text, ids that clash with no other.

Figures are drawn with the light colours of ``PALETTE``. In the page these become CSS variables, so that the same plot
also has dark colours, and black ink on white paper when it is printed.
"""

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

from matplotlib import style
from matplotlib.figure import Figure

# A colour for each role, with a contrast to the paper of at least 4.5 (text) or 3 (marks). No two may be the same.
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
_SETTINGS: dict[Any, Any] = {  # matplotlib types keys as one literal of all there are
    "svg.fonttype": "none",
    "svg.hashsalt": "torchrec_cnr",  # the same figure gives the same bytes
    "font.family": "DejaVu Sans",  # as wide as fonts get: what fits with it fits with that of the page
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
    "xtick.major.pad": 9,  # labels stay below that of the origin on the other axis
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
    """Figures made within look like the page, whatever the settings of the machine are."""
    with style.context(_SETTINGS, after_reset=True):
        yield


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """An ``<svg>`` element without a size of its own, to be scaled by the page.

    Args:
        figure: Made within ``page_style``.
        name: Letters that begin all ids within; no other figure of the page has it.
        label: What the figure shows, for those who cannot see it.
    """
    file = io.StringIO()
    with page_style():
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith("}metadata") or child.find("{*}style") is not None:  # rules would hold page-wide
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.partition("}")[2]  # within a page, names of SVG need no namespace
        element.attrib = {key.partition("}")[2] or key: value for key, value in element.attrib.items()}
        _adopt(element, name)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _adopt(element: ElementTree.Element, name: str) -> None:
    """Let an element refer to the page's colours and fonts, and to ids of its own figure."""
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

"""The style of the plots, and how they are written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure


@contextmanager
def svg_figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of this size in inches, written as SVG afterwards: the same bytes for the same figures."""
    with mpl.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "torchrec_cnr",
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    ):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})

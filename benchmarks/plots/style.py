"""The style of the plots, and the function that writes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure


@contextmanager
def svg_figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Yield a figure of this size in inches, then write it as SVG, with the same bytes for the same content."""
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

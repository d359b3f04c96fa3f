"""The report of a run's checkpoints: one HTML file that needs no network, no script and no other file.

The template in ``templates`` combines the text from ``findings`` with the plots from ``plots``, and escapes the text. A
content security policy in the page forbids everything that is not in the file.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from torchrec_cnr.cli.report import findings, plots
from torchrec_cnr.cli.report.svg import PALETTE, inline_svg
from torchrec_cnr.human_text import bytes_text, instant_text, name_text, number_text
from torchrec_cnr.maintenance.run_history import KeptCheckpoint, RunHistory

MAX_LINES = 50  # in the table of kept checkpoints
BEGINNING = b"<!DOCTYPE html>"  # every page begins with this, which identifies older pages


@dataclass(frozen=True)
class _Plot:
    """A plot of the page, with ``text`` as its caption. ``absence`` is shown instead if there is nothing to plot."""

    name: str
    title: str
    draw: Callable[[RunHistory], Figure]
    text: Callable[[RunHistory], str]
    is_empty: Callable[[RunHistory], bool]
    absence: str


_PLOTS = (
    _Plot(
        "written",
        "Written by each checkpoint",
        plots.draw_written,
        findings.on_written,
        lambda history: all(event.kind == "prune" for event in history.events),
        "Nothing has been written yet.",
    ),
    _Plot(
        "cumulative",
        "Written so far",
        plots.draw_cumulative,
        findings.on_cumulative,
        lambda history: all(event.kind == "prune" for event in history.events),
        "Nothing has been written yet.",
    ),
    _Plot(
        "capacity",
        "Bytes kept over time",
        plots.draw_capacity,
        findings.on_capacity,
        lambda history: not history.events,
        "No events are known.",
    ),
    _Plot(
        "restores",
        "Restore cost of each checkpoint",
        plots.draw_restores,
        findings.on_restores,
        lambda history: all(event.restore_bytes is None for event in history.events),
        "The bytes that a load reads are unknown for all checkpoints.",
    ),
    _Plot(
        "modified",
        "Rows modified in each delta",
        plots.draw_modified,
        findings.on_modified,
        lambda history: all(event.modified_share is None for event in history.of_kind("delta")),
        "There are no deltas yet. This plot will show the share of rows that each of them stores.",
    ),
)


def render(history: RunHistory) -> str:
    """Return the report as the text of an HTML file in UTF-8. The same history always gives the same text."""
    newest, older = history.newest_first[:MAX_LINES], history.newest_first[MAX_LINES:]
    is_empty = not history.events and not history.kept
    environment = Environment(
        loader=PackageLoader("torchrec_cnr.cli.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        palette=PALETTE,
        root=name_text(history.root),
        is_empty=is_empty,
        span="" if is_empty else findings.span(history),
        totals=findings.totals(history),
        notes=findings.notes(history),
        model=None if history.model_bytes is None else bytes_text(history.model_bytes),
        panels=[] if is_empty else [_panel(plot, history) for plot in _PLOTS],
        kinds=findings.totals_by_kind(history),
        kept=[_line(checkpoint, history.restore_models_of(checkpoint)) for checkpoint in newest],
        older=findings.on_older(older) if older else None,
    )


def _panel(plot: _Plot, history: RunHistory) -> dict[str, str | None]:
    """Return the values of a plot for the template; ``svg`` is None if there is nothing to draw."""
    if plot.is_empty(history):
        return {"name": plot.name, "title": plot.title, "text": plot.absence, "svg": None}
    text = plot.text(history)
    svg = inline_svg(plot.draw(history), plot.name, f"{plot.title}. {text}")
    return {"name": plot.name, "title": plot.title, "text": text, "svg": Markup(svg)}


def _line(checkpoint: KeptCheckpoint, restore_models: float | None) -> dict[str, str | bool | None]:
    """Return the values of a kept checkpoint for the template."""
    restore = "–" if checkpoint.restore_bytes is None else bytes_text(checkpoint.restore_bytes)
    return {
        "name": name_text(checkpoint.name),
        "kind": checkpoint.kind,
        "is_compacted": checkpoint.is_compacted,
        "created": instant_text(checkpoint.created_ns),
        "size": bytes_text(checkpoint.num_bytes),
        "parent": None if checkpoint.parent is None else name_text(checkpoint.parent),
        "restore": restore if restore_models is None else f"{restore} ({number_text(restore_models)}x)",
    }

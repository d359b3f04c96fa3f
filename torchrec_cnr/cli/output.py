"""Output: text for people or JSON for programs on stdout; progress bars and errors on stderr.

Text is laid out for the width of the terminal. If stdout is not a terminal, lines are never wrapped, since another
program may read them. Names come from stores and may contain any characters. They are shown as ``Text``, not as
markup, with escapes for characters that do not print. Long dotted names of state dicts are broken at their dots.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from torchrec_cnr import progress
from torchrec_cnr.human_text import name_text

_ENDLESS = 100_000  # columns
_GAP = 2  # spaces between columns


def stdout() -> Console:
    """Return the console for text on stdout."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _ENDLESS
    return console


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON document. Integers are exact, and characters outside ASCII are escaped."""
    typer.echo(json.dumps(value, indent=2))


def print_error(message: str) -> None:
    """Print an error as one line on stderr."""
    line = Text.assemble(("cnr: error:", "bold red"), " ", name_text(" ".join(message.split())))
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


@contextmanager
def progress_bar(what: str, is_wanted: bool = True) -> Iterator[progress.Progress]:
    """Show a progress bar on stderr within the context, if stderr is a terminal. It disappears at the end.

    Yields:
        The progress callback, which takes the amount done and the total.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(None), TaskProgressColumn(), TimeRemainingColumn())
    is_shown = is_wanted and console.is_terminal
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=not is_shown) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def grid(*columns: str) -> Table:
    """Return a table without lines. The columns whose heading begins with ``>`` contain numbers, aligned right."""
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    for column in columns:
        is_number = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if is_number else "left", no_wrap=is_number)
    return table


def bare_grid(*columns: str) -> Table:
    """Return a table without headings. Only its last column is wrapped."""
    table = grid()
    table.show_header = False
    for column in columns:
        table.add_column(column, no_wrap=column != columns[-1], overflow="fold")
    return table


def print_columns(
    console: Console, columns: Mapping[str, Sequence[RenderableType]], expendable: Sequence[str] = ()
) -> None:
    """Print a table without its empty columns. If the terminal is too narrow, leave out further columns, and name them.

    A table also fits if a ``Dotted`` name must be broken after its dots.

    Args:
        console: Where to print.
        columns: The cells of each column, by heading as in :func:`grid`.
        expendable: The headings of the columns that may be left out, the least important first.
    """
    shown = {heading: cells for heading, cells in columns.items() if any(map(str, cells))}
    hidden: list[str] = []
    for left_out in (None, *expendable):
        if left_out is not None and shown.pop(left_out, None) is not None:
            hidden.append(left_out.lstrip(">"))
        table = grid(*shown)
        for row in zip(*shown.values(), strict=True):
            table.add_row(*row)
        widths = [_width(console, [heading.lstrip(">"), *cells]) for heading, cells in shown.items()]
        if sum(widths) + _GAP * (len(widths) - 1) <= console.width:
            break
    console.print(table)
    if hidden:
        console.print(Text(f"a wider terminal also shows: {', '.join(hidden)}", "dim"))


def _width(console: Console, cells: Sequence[RenderableType]) -> int:
    """Return the least width of a column, in which only ``Dotted`` names are broken."""
    options = console.options.update(width=_ENDLESS)
    sizes = [(cell, Measurement.get(console, options, cell)) for cell in cells]
    return max(size.minimum if isinstance(cell, Dotted) else size.maximum for cell, size in sizes)


def name_cell(value: str, style: str = "") -> Text:
    """Return a name from a store as a cell. If it is too long for its column, it continues on the next line."""
    return Text(name_text(value), style, overflow="fold")


def heading(text: str, note: str = "") -> Text:
    """Return the heading of a table, with a note that applies to the whole table."""
    return Text.assemble(("\n" + text, "bold"), (f"  {note}" if note else "", "dim"))


def print_left_out(console: Console, num: int, noun: str) -> None:
    """Print how many items were not shown, if any."""
    if num:
        console.print(f"… {num:,} more {noun}; --all shows them")


@dataclass(frozen=True)
class Dotted:
    """A name in a column, broken after a dot if it is too long.

    Attributes:
        name: The name.
        style: The style, in rich's syntax.
    """

    name: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the name in lines of at most the column's width."""
        text = "\n".join(_lines(name_text(self.name), options.max_width))
        yield Text(text, self.style, overflow="fold")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the length of the longest line if the name is broken after each dot, and that of the whole name."""
        name = name_text(self.name)
        return Measurement(max(map(len, _lines(name, 1))), len(name) or 1)


def _lines(name: str, width: int) -> Iterator[str]:
    line = ""
    parts = name.split(".")
    for number, part in enumerate(parts, 1):
        piece = part if number == len(parts) else f"{part}."
        if line and len(line) + len(piece) > width:
            yield line
            line = "  "  # continues the line above
        line += piece
    yield line


def common_prefix(names: Sequence[str]) -> str:
    """Return the common beginning of several names, up to and including a dot; "" for a single name."""
    if len(names) < 2:
        return ""
    first, last = (name.split(".")[:-1] for name in (min(names), max(names)))
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(f"{part}." for part, _ in shared)

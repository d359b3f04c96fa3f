"""Output: text for people and JSON for programs on stdout; progress bars and errors on stderr.

Text is laid out for the width of the terminal. Where stdout is no terminal, lines are as long as they need to be, so
that the input of another program is never wrapped. Names come from stores and may hold anything: they are shown as
``Text``, never as markup, with escapes for characters that do not print. Long dotted names, as state dicts have them,
are broken at their dots.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from torchrec_cnr import progress
from torchrec_cnr.human_text import name_text

_ENDLESS = 100_000  # columns


def stdout() -> Console:
    """Where text for people goes."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _ENDLESS
    return console


def print_json(value: Mapping[str, Any]) -> None:
    """One document. Integers are exact, and what is not ASCII is escaped."""
    typer.echo(json.dumps(value, indent=2))


def print_error(message: str) -> None:
    """One line on stderr."""
    line = Text.assemble(("cnr: error:", "bold red"), " ", name_text(" ".join(message.split())))
    Console(stderr=True, highlight=False).print(line, soft_wrap=True)


@contextmanager
def progress_bar(what: str, is_wanted: bool = True) -> Iterator[progress.Progress]:
    """A bar on stderr for as long as something takes, if that is a terminal; gone afterwards.

    Yields:
        What to tell how many of how many are done.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(None), TaskProgressColumn(), TimeRemainingColumn())
    is_shown = is_wanted and console.is_terminal
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=not is_shown) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def grid(*columns: str) -> Table:
    """A table without lines. A heading that begins with ``>`` has numbers below it: they end at its end."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        is_number = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if is_number else "left", no_wrap=is_number)
    return table


def bare_grid(*columns: str) -> Table:
    """A table without headings; its last column is wrapped where it has to be."""
    table = grid()
    table.show_header = False
    for column in columns:
        table.add_column(column, no_wrap=column != columns[-1], overflow="fold")
    return table


def name_cell(value: str, style: str = "") -> Text:
    """A name from a store; where it is too long for its column, it goes on in the next line."""
    return Text(name_text(value), style, overflow="fold")


def heading(text: str, note: str = "") -> Text:
    """What stands above a table, with what holds for all of it."""
    return Text.assemble(("\n" + text, "bold"), (f"  {note}" if note else "", "dim"))


def print_left_out(console: Console, num: int, noun: str) -> None:
    """Say that there is more, if there is."""
    if num:
        console.print(f"… {num:,} more {noun}; --all shows them")


@dataclass(frozen=True)
class Dotted:
    """A name in a column; where it is too long, it is broken after a dot.

    Attributes:
        name: The name.
        style: Of rich.
    """

    name: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lines of at most the column's width."""
        text = "\n".join(_lines(name_text(self.name), options.max_width))
        yield Text(text, self.style, overflow="fold")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """From its longest part to all of it."""
        parts = name_text(self.name).split(".")
        return Measurement(max(map(len, parts)) + 1, len(name_text(self.name)) or 1)


def _lines(name: str, width: int) -> Iterator[str]:
    line = ""
    parts = name.split(".")
    for number, part in enumerate(parts, 1):
        piece = part if number == len(parts) else f"{part}."
        if line and len(line) + len(piece) > width:
            yield line
            line = "  "  # what belongs to the line above
        line += piece
    yield line


def common_prefix(names: Sequence[str]) -> str:
    """What several names begin with, up to and with a dot; nothing for a single name."""
    if len(names) < 2:
        return ""
    first, last = (name.split(".")[:-1] for name in (min(names), max(names)))
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(f"{part}." for part, _ in shared)

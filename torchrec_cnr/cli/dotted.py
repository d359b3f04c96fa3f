"""Names with dots, as state dicts have them: long, much alike, and to be broken where they have their joints."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from torchrec_cnr.quantities import name_text


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

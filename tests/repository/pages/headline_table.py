"""The table of measured figures in the README.

``python -m tests.repository.pages.headline_table`` writes it from ``docs/benchmarks/headline.json``, which ``python -m
benchmarks headline --json docs/benchmarks/headline.json --plots docs/images`` measures. ``python -m benchmarks --redraw
docs/benchmarks/headline.json --plots docs/images`` draws the picture again from the same file.
"""

import json
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.repository.marks import between
from torchrec_cnr.human_text import bytes_text

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
FIGURES = ROOT / "docs" / "benchmarks" / "headline.json"
MAX_LINE = 120  # characters
MARKS = ("<!-- figures: begin -->", "<!-- figures: end -->")


def with_table(page: str, content: Mapping[str, Any]) -> str:
    """Return a page with the table of these figures between its marks."""
    return between(page, MARKS, table(content).strip())


def table(content: Mapping[str, Any]) -> str:
    """Return the table, with the machine and the command under it."""
    report = content["headline"]
    values = {figure["what"]: figure["value"] for figure in report["figures"]}
    spreads = {figure["what"]: (figure["low"], figure["high"]) for figure in report["figures"]}
    num_rows = max(int(found[1].replace(",", "")) for what in values if (found := re.search(r"([\d,]+) rows$", what)))
    size = f", {num_rows:,} rows"
    rows = [
        ("bytes of a checkpoint", "bytes, dcp.save", "bytes, {}", bytes_text),
        (
            "training waits for an asynchronous save",
            f"stall, dcp.async_save{size}",
            f"stall, {{}}{size}",
            _secs_text,
        ),
        (
            "asynchronous save until it is committed",
            f"save, dcp.async_save{size}",
            f"save, {{}}{size}",
            _secs_text,
        ),
        ("restore", f"restore, dcp.save{size}", f"restore, {{}}{size}", _secs_text),
        ("peak memory of an asynchronous save of a delta", "memory, dcp.async_save", "memory, {}", _mib_text),
    ]
    lines = ["", "| | plain DCP | exact | 4-bit |", "|---|---|---|---|"]
    for title, plain, ours, text in rows:
        cells = [text(values[plain]) + _spread_text(spreads[plain], text)]
        cells += [_cell(values, spreads, plain, ours.format(name), text) for name in ("exact", "4-bit")]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    title = report["title"].partition(", ")
    waits = _secs_text(values[f"stall, dcp.save{size}"])
    lines += [
        "",
        _wrapped(
            f"Training waits {waits} for plain DCP's synchronous `dcp.save`, which is less than for its asynchronous "
            f"one. Measured on {title[0]}; {title[2]}; {content['machine']['machine']}. "
            "No file is forced to disk (`sync_files=False`). A manager always forces them, so its saves also wait for "
            "the disk. Values are medians; where quartiles differ by over 2 ×, they are given, too. Parentheses give "
            "the factor relative to plain DCP, unless the quartiles overlap."
        ),
        "Command: `python -m benchmarks headline`.",
        "",
    ]
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, MAX_LINE, break_long_words=False, break_on_hyphens=False)


def _cell(
    values: Mapping[str, float],
    spreads: Mapping[str, tuple[float | None, float | None]],
    plain: str,
    ours: str,
    text: Callable[[float], str],
) -> str:
    """Return one of our values, and how many times less it is than that of plain DCP if this is certain."""
    least, most = spreads[plain][0], spreads[ours][1]
    is_certain = least is None or most is None or most < least
    factor = f" ({values[plain] / values[ours]:#.3g}\u00a0×)" if is_certain else ""
    return f"{text(values[ours])}{_spread_text(spreads[ours], text)}{factor}"


def _spread_text(spread: tuple[float | None, float | None], text: Callable[[float], str]) -> str:
    """Return the quartiles, if one is more than twice the other."""
    low, high = spread
    return f", varies from {text(low)} to {text(high)}" if low and high and high > 2 * low else ""


def _secs_text(millis: float) -> str:
    return f"{millis:.0f} ms" if millis < 1000 else f"{millis / 1000:.2f} s"


def _mib_text(mib: float) -> str:
    return bytes_text(round(mib * 2**20))


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(), json.loads(FIGURES.read_text())))

"""Numbers, times and names as people read them.

Three digits are enough to compare by. Names come from a store that anybody may have written to: what does not print, or
turns the direction of writing, is shown as an escape.
"""

import re
from dataclasses import MISSING, fields
from datetime import UTC, datetime
from typing import Any

_CREDENTIALS = re.compile(r"://[^/]*@")
_MAX_URL_CHARS = 60
_CLOCKS_NS = 60_000_000_000  # by as much, clocks of machines may differ
UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB")
_SECS = (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1))


def number_text(value: float) -> str:
    """Three digits, or all of those before the point: ``0.0123``, ``1.20``, ``12.0``, ``1,234``."""
    if value == 0:
        return "0"
    if value < 0.0005:
        return "under 0.001"
    if value < 0.9995:
        return f"{value:.3f}"
    return f"{value:,.0f}" if value >= 99.5 else f"{value:#.3g}"


def count_text(num: int, noun: str) -> str:
    """A count and its noun, to which an s is put where it takes one: ``1 delta``, ``2,000 deltas``."""
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {noun}s"


def bytes_unit(num_bytes: float) -> tuple[str, int]:
    """The unit that a size needs few digits in, and its bytes."""
    power = 0
    while power < len(UNITS) - 1 and num_bytes / 1000**power >= 999.5:
        power += 1
    return UNITS[power], 1000**power


def bytes_text(num_bytes: int) -> str:
    """A size in decimal units: ``0 B``, ``12.3 MB``."""
    unit, one = bytes_unit(num_bytes)
    return f"{num_bytes:,} B" if one == 1 else f"{number_text(num_bytes / one)} {unit}"


def models_text(models: float) -> str:
    """A size in models: ``1.20 models``."""
    return f"{number_text(models)} models"


def share_text(share: float) -> str:
    """A part of a whole, in percent."""
    return f"{number_text(100 * share)} %"


def percent_text(share: float) -> str:
    """A part of a whole in a column of such: ``4.0%``, with one digit behind each point."""
    return f"{share:.1%}" if share == 0 or share >= 0.0005 else "<0.1%"


def ratio_text(ratio: float) -> str:
    """Three digits, however small it is: ``0.00312``, ``1.20``, ``1,234``."""
    return f"{ratio:,.0f}" if ratio >= 99.5 else f"{ratio:#.3g}"


def instant(at_ns: int) -> datetime:
    """A Unix time in nanoseconds, to the second, in UTC."""
    return datetime.fromtimestamp(at_ns // 1_000_000_000, UTC)


def instant_text(at_ns: int) -> str:
    """A time, to the second, in UTC: ``2026-11-20 14:03:21 UTC``."""
    return f"{instant(at_ns):%Y-%m-%d %H:%M:%S} UTC"


def duration_text(num_ns: int) -> str:
    """How long, in the two largest units: ``3 days 4 hours``."""
    secs = num_ns // 1_000_000_000
    words: list[str] = []
    for noun, one in _SECS:
        num, secs = divmod(secs, one)
        if num or words:
            words.append(count_text(num, noun) if num else "")
    return " ".join(filter(None, words[:2])) or "less than a second"


def age_text(num_ns: int) -> str:
    """How long ago, in one unit of a column: ``12 s``, ``3 min``, ``5 h``, ``10 d``; ``in 5 h`` if that is to come."""
    if num_ns <= -_CLOCKS_NS:
        return f"in {age_text(-num_ns)}"
    secs = max(0, num_ns) // 1_000_000_000
    for unit, one, most in (("s", 1, 120), ("min", 60, 120 * 60), ("h", 3_600, 48 * 3_600)):
        if secs < most:
            return f"{secs // one} {unit}"
    return f"{secs // 86_400:,} d"


def name_text(name: str) -> str:
    """A name with escapes for what does not print, such as line breaks, lone surrogates and marks of direction."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)


def url_text(url: str) -> str:
    """A path or URL on one short line: its end if it is long, and neither the user nor the query of a URL."""
    if "://" in url:
        url = _CREDENTIALS.sub("://", url).partition("?")[0]
    text = name_text(url)
    return text if len(text) <= _MAX_URL_CHARS else f"…{text[1 - _MAX_URL_CHARS :]}"


def given_text(value: Any, *shown: str) -> str:
    """The expression that makes a dataclass's value, without arguments that are the default, unless they are named.

    Args:
        value: An instance of a dataclass.
        shown: Fields that are there even if they are the default.
    """
    given = []
    for field in fields(value):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.repr and (field.name in shown or getattr(value, field.name) != default):
            given.append(f"{field.name}={getattr(value, field.name)!r}")
    return f"{type(value).__name__}({', '.join(given)})"

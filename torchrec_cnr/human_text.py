"""Numbers, times and names formatted for people.

Numbers have three significant digits, which is enough to compare them. Names come from a store to which others may
write, so characters that do not print, or that change the direction of text, are escaped.
"""

import re
from dataclasses import MISSING, fields
from datetime import UTC, datetime
from typing import Any

_CREDENTIALS = re.compile(r"://[^/]*@")
_MAX_URL_CHARS = 60
_CLOCKS_NS = 60_000_000_000  # the clocks of machines may differ by this much
UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB")
_SECS = (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1))


def number_text(value: float) -> str:
    """Format a number with three significant digits, or all before the point: ``0.012``, ``1.20``, ``1,234``."""
    if value == 0:
        return "0"
    if value < 0.0005:
        return "under 0.001"
    if value < 0.9995:
        return f"{value:.3f}"
    return f"{value:,.0f}" if value >= 99.5 else f"{value:#.3g}"


def count_text(num: int, noun: str) -> str:
    """Format a count and its noun, in the plural unless the count is one: ``1 delta``, ``2,000 deltas``."""
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {noun}s"


def bytes_unit(num_bytes: float) -> tuple[str, int]:
    """Return the largest unit in which a size is at least 1, and the bytes of this unit."""
    power = 0
    while power < len(UNITS) - 1 and num_bytes / 1000**power >= 999.5:
        power += 1
    return UNITS[power], 1000**power


def bytes_text(num_bytes: int) -> str:
    """Format a size in decimal units: ``0 B``, ``12.3 MB``."""
    unit, unit_bytes = bytes_unit(num_bytes)
    return f"{num_bytes:,} B" if unit_bytes == 1 else f"{number_text(num_bytes / unit_bytes)} {unit}"


def full_checkpoints_text(times: float) -> str:
    """Format a size as a multiple of that of a full checkpoint: ``1.20x a full checkpoint``."""
    return f"{number_text(times)}x a full checkpoint"


def relation_text(num_bytes: int, other_bytes: int, other: str = "") -> str:
    """Compare a size with another one: ``13.2x smaller``, ``1.05x larger`` or ``same size``; ``""`` if one is 0.

    Args:
        num_bytes: The size.
        other_bytes: The size to compare it with.
        other: What has the other size, for a text such as ``13.2x smaller than full fp32 checkpoints``.
    """
    if not num_bytes or not other_bytes:
        return ""
    ratio = number_text(max(num_bytes, other_bytes) / min(num_bytes, other_bytes))
    if ratio == number_text(1):
        return f"as large as {other}" if other else "same size"
    relation = f"{ratio}x {'smaller' if num_bytes < other_bytes else 'larger'}"
    return f"{relation} than {other}" if other else relation


def share_text(share: float) -> str:
    """Format a fraction in percent: ``4.00 %``."""
    return f"{number_text(100 * share)} %"


def percent_text(share: float) -> str:
    """Format a fraction in percent for a column, with one digit after the point: ``4.0%``."""
    return f"{share:.1%}" if share == 0 or share >= 0.0005 else "<0.1%"


def ratio_text(ratio: float) -> str:
    """Format a ratio with three significant digits, also if it is small: ``0.00312``, ``1.20``, ``1,234``."""
    return f"{ratio:,.0f}" if ratio >= 99.5 else f"{ratio:#.3g}"


def instant(at_ns: int) -> datetime:
    """Convert a Unix time in nanoseconds to a ``datetime`` in UTC, truncated to seconds."""
    return datetime.fromtimestamp(at_ns // 1_000_000_000, UTC)


def instant_text(at_ns: int) -> str:
    """Format a Unix time in nanoseconds, to the second: ``2026-11-20 14:03:21 UTC``."""
    return f"{instant(at_ns):%Y-%m-%d %H:%M:%S} UTC"


def duration_text(num_ns: int) -> str:
    """Format a duration in nanoseconds in its two largest units: ``3 days 4 hours``."""
    secs = num_ns // 1_000_000_000
    words: list[str] = []
    for noun, unit_secs in _SECS:
        num_units, secs = divmod(secs, unit_secs)
        if num_units or words:
            words.append(count_text(num_units, noun) if num_units else "")
    return " ".join(filter(None, words[:2])) or "less than a second"


def age_text(num_ns: int) -> str:
    """Format an age in nanoseconds in one unit: ``12 s``, ``3 min``, ``5 h``, ``10 d``; ``in 5 h`` for the future."""
    if num_ns <= -_CLOCKS_NS:
        return f"in {age_text(-num_ns)}"
    secs = max(0, num_ns) // 1_000_000_000
    for unit, unit_secs, max_secs in (("s", 1, 120), ("min", 60, 120 * 60), ("h", 3_600, 48 * 3_600)):
        if secs < max_secs:
            return f"{secs // unit_secs} {unit}"
    return f"{secs // 86_400:,} d"


def name_text(name: str) -> str:
    """Escape characters that do not print, such as line breaks, lone surrogates and marks of text direction."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)


def url_text(url: str) -> str:
    """Format a path or URL as one short line: the end of a long one, without the user and the query of a URL."""
    if "://" in url:
        url = _CREDENTIALS.sub("://", url).partition("?")[0]
    text = name_text(url)
    return text if len(text) <= _MAX_URL_CHARS else f"…{text[1 - _MAX_URL_CHARS :]}"


def given_text(value: Any, *shown: str) -> str:
    """Format an instance of a dataclass as the expression that creates it, without arguments that equal the default.

    Args:
        value: An instance of a dataclass.
        shown: Fields to include even if they equal the default.
    """
    arguments = []
    for field in fields(value):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.repr and (field.name in shown or getattr(value, field.name) != default):
            arguments.append(f"{field.name}={getattr(value, field.name)!r}")
    return f"{type(value).__name__}({', '.join(arguments)})"

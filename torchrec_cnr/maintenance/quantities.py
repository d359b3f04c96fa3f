"""Sizes, times and names as people read them.

Names come from a store that anybody may have written to: what does not print is shown as an escape.
"""

from datetime import UTC, datetime

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB")


def bytes_text(num_bytes: int) -> str:
    """A size in decimal units, with three digits: ``0 B``, ``12.3 MB``."""
    power = 0
    while power < len(_UNITS) - 1 and num_bytes / 1000**power >= 999.5:
        power += 1
    if power == 0:
        return f"{num_bytes} B"
    value = num_bytes / 1000**power
    return f"{value:#.3g}".rstrip(".") + f" {_UNITS[power]}"


def count_text(num: int, noun: str) -> str:
    """A count and its noun, to which an s is put where it takes one: ``1 delta``, ``2,000 deltas``."""
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {noun}s"


def instant(at_ns: int) -> datetime:
    """A Unix time in nanoseconds, to the second, in UTC."""
    return datetime.fromtimestamp(at_ns // 10**9, UTC)


def instant_text(at_ns: int) -> str:
    """A time, to the minute, in UTC: ``2026-11-20 14:03``."""
    return f"{instant(at_ns):%Y-%m-%d %H:%M}"


def name_text(name: str) -> str:
    """A name with escapes for what does not print, such as line breaks and lone surrogates."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)

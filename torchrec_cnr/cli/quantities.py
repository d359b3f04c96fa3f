"""Quantities on the command line, as people write them: ``2.5e9`` or ``400M`` rows, ``26%``, ``30m``.

Each function takes the name of the option, which its error repeats.
"""

import re
from decimal import Decimal

from torchrec_cnr.arguments import MAX_SECS
from torchrec_cnr.errors import ConfigurationError

_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\+?\d{1,2})?)([kKMGBT]?)", re.ASCII)
_GROUPED = re.compile(r"\d{1,3}(?:(?:,\d{3})+|(?:_\d{3})+)", re.ASCII)
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_SHARE = re.compile(r"((?:\d+(?:\.\d+)?|\.\d+)(?:[eE]-?\d{1,2})?) ?(%?)", re.ASCII)
_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|m|h|d|w)", re.ASCII)
_DURATIONS = re.compile(rf"(?:{_DURATION.pattern} ?)+", re.ASCII)
_SECS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604_800}


def parse_count(option: str, text: str, most: int) -> int:
    """Parse a count such as ``1e9``, ``2.5e9``, ``400M`` or ``1,000,000``.

    Raises:
        ConfigurationError: It is not a whole number from 1 to ``most``.

    Examples:
        >>> parse_count("--rows", "2.5e9", 10**15)
        2500000000
    """
    found = _COUNT.fullmatch(re.sub("[,_]", "", text) if _GROUPED.fullmatch(text) else text)
    value = Decimal(found[1]) * _FACTORS[found[2].upper()] if found is not None else Decimal(0)
    if not 1 <= value <= most or value != value.to_integral_value():
        examples = "64 or 128" if most <= 10**6 else "400, 1e9, 2.5e9 or 400M"
        raise ConfigurationError(
            f"{option} must be a whole number from 1 to {most:,}, such as {examples} (got {text!r})"
        )
    return int(value)


def parse_table(option: str, text: str, most_rows: int, most_cols: int) -> tuple[int, int]:
    """Parse the size of a table such as ``1e9x64``; return its numbers of rows and of columns.

    Raises:
        ConfigurationError: It is not ``ROWSxDIM``, or a number is out of bounds.
    """
    parts = re.split("[x×]", text)
    if len(parts) != 2 or not all(parts):
        raise ConfigurationError(f"{option} must be ROWSxDIM, such as 400Mx64 (got {text!r})")
    return parse_count(f"{option}: ROWS", parts[0], most_rows), parse_count(f"{option}: DIM", parts[1], most_cols)


def parse_share(option: str, text: str) -> float:
    """Parse a share such as ``0.26``, ``26%`` or ``1e-3``.

    Raises:
        ConfigurationError: It is not a number more than 0 and at most 1.
    """
    found = _SHARE.fullmatch(text)
    value = float(found[1]) / (100 if found[2] else 1) if found is not None else 0.0
    if not 0 < value <= 1:
        raise ConfigurationError(
            f"{option} must be a share such as 0.26 or 26%, more than 0 and at most 1 (got {text!r})"
        )
    return value


def parse_secs(option: str, text: str) -> float:
    """Parse a duration such as ``90s``, ``30m``, ``1h30m``, ``7d`` or ``2w``; return its seconds.

    Raises:
        ConfigurationError: It is not a duration, or it is 0 or more than 31 years.
    """
    parts = _DURATION.findall(text) if _DURATIONS.fullmatch(text) else []
    value = sum(float(number) * _SECS[unit] for number, unit in parts)
    if not 0 < value <= MAX_SECS:
        raise ConfigurationError(f"{option} must be a time such as 90s, 30m, 1h30m, 7d or 2w (got {text!r})")
    return value

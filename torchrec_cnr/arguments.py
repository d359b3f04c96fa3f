"""Checks of arguments, which raise a ``ConfigurationError`` that names the argument."""

import math
from collections.abc import Sequence
from numbers import Integral, Real

from torchrec_cnr.errors import ConfigurationError


def check_count(name: str, value: object, least: int = 0, most: int | None = None) -> None:
    """Raise a ``ConfigurationError`` if ``value`` is not a whole number within the bounds."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not (is_whole and least <= int(value) and (most is None or int(value) <= most)):  # type: ignore[call-overload]
        bounds = f"a whole number, at least {least}" if most is None else f"a whole number from {least} to {most}"
        raise ConfigurationError(f"{name!r} must be {bounds} (got {value!r})")


# Threads and the operating system refuse to wait for much longer times. This is 31 years.
MAX_SECS = 1e9


def check_secs(name: str, value: object) -> None:
    """Raise a ``ConfigurationError`` if ``value`` is not a time in seconds, above 0 and at most ``MAX_SECS``."""
    check_positive(name, value, most=MAX_SECS)


def check_positive(name: str, value: object, most: float = math.inf) -> None:
    """Raise a ``ConfigurationError`` if ``value`` is not a finite number above 0 and at most ``most``."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and 0 < float(value) < math.inf and float(value) <= most):  # type: ignore[arg-type]
        bound = "" if most == math.inf else f", and at most {most:g}"
        raise ConfigurationError(f"{name!r} must be a number more than 0{bound} (got {value!r})")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise a ``ConfigurationError`` if ``value`` is not one of the choices."""
    if value not in choices:
        raise ConfigurationError(f"{name!r} must be one of {', '.join(map(repr, choices))} (got {value!r})")


def check_type(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raise a ``ConfigurationError`` if ``value`` is not of the given type, which ``expected`` describes in words."""
    if not isinstance(value, kind):
        got = f"{type(value).__name__} {str(value)[:40]!r}"
        raise ConfigurationError(f"{name!r} must be {expected} (got {got})")


def check_callable(name: str, value: object) -> None:
    """Raise a ``ConfigurationError`` if ``value`` is neither callable nor None."""
    if value is not None and not callable(value):
        raise ConfigurationError(f"{name!r} must be a function, or None (got {value!r})")


def check_patterns(name: str, value: object) -> None:
    """Raise a ``ConfigurationError`` if ``value`` is neither a list or tuple of texts, nor None."""
    expected = "a list of patterns of FQNs"
    check_type(name, value, (list, tuple, type(None)), expected)
    assert isinstance(value, list | tuple | None)
    for pattern in value or ():
        check_type(name, pattern, str, expected)

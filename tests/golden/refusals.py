"""What ``reader`` and ``transformed`` raise where a checkpoint breaks a MUST of docs/reference/format.md."""

from typing import NoReturn


class Refused(Exception):
    """The checkpoint breaks a MUST."""


def refuse(why: str) -> NoReturn:
    """Raise."""
    raise Refused(why)


def check(holds: bool, why: str) -> None:
    """Refuse what does not hold."""
    if not holds:
        refuse(why)

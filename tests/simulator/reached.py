"""What schedules of a family must reach: a family in which something never happens would check nothing about it."""

from collections import Counter
from collections.abc import Iterable

_ALWAYS = ("=== put manifest of ", "restored ", " is killed: ", "*** fails: ", "the answer is lost", "is done late: ")
_UNMANAGED = ("*** the power fails", "*** the disk is full", "*** the clock of ", "serves ")
_REACHED = {
    "saves": _UNMANAGED,
    "async saves": _UNMANAGED,
    "upkeep": (*_UNMANAGED, "pruned: ", "compacts ", "=== remove manifest of ", "read sim://"),
    "two jobs": (*_UNMANAGED, "=== remove manifest of "),
    "managed": ("forks from ", "goes back to ", ".abandoned", " is removed", "dead or not", "=== remove manifest of "),
}


def reached(trace: Iterable[str], family: str) -> Counter[str]:
    """Return 1 for each of the family's phrases that a trace has, and 0 for the others."""
    text = "\n".join(trace)
    return Counter({phrase: int(phrase in text) for phrase in (*_ALWAYS, *_REACHED[family])})

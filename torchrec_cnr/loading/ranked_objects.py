"""Ranked names: those of objects that each rank has one of, such as the position of its data reader.

DCP keeps one of the objects that ranks save under one name. So each has a name of its own, which says of how many ranks
it is, and a load by another number of ranks finds all of them.
"""

import re
from collections.abc import Collection

_NAME = re.compile(r"(?P<before>(?:.*\.)?)rank_(?P<rank>\d{1,9})_of_(?P<world_size>[1-9]\d{0,8})")


def ranked_name(rank: int, world_size: int) -> str:
    """The last part of such a name."""
    return f"rank_{rank}_of_{world_size}"


def saved_by_others(fqn: str, saved: Collection[str]) -> tuple[str, ...]:
    """The names under which another number of ranks has saved what one rank wants, by rank; none if it is there itself.

    Args:
        fqn: What is wanted.
        saved: All names in the checkpoint.
    """
    own = _NAME.fullmatch(fqn)
    if own is None or fqn in saved:
        return ()
    for name in saved:
        found = _NAME.fullmatch(name)
        if found and found["before"] == own["before"] and int(found["world_size"]) <= len(saved):
            world_size = int(found["world_size"])
            names = tuple(own["before"] + ranked_name(rank, world_size) for rank in range(world_size))
            if all(name in saved for name in names):
                return names
    return ()

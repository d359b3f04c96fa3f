"""What a kernel is told of a search, in numbers that compiled code reads."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

COVERING, MIRRORED, GREEDY, LEAST_SQUARES = range(4)
SCALE_AND_BIAS_BYTES = 4  # of a row: two fp16 values behind its codes
CLOSING_ROUNDS = 3  # almost every range is closed after one; the third tells whether the second was


class SearchPlan(NamedTuple):
    """How a range is searched.

    Attributes:
        method: ``COVERING``: from the least to the greatest value. ``MIRRORED``: as far to both sides of zero as the
            greatest magnitude. ``GREEDY`` and ``LEAST_SQUARES``: the search that the fields below belong to.
        num_bins: Of the greedy search: a step cuts this part of the range off.
        num_steps: Of the greedy search: how many steps.
        cuts: float32 [num_cuts]. Of least squares: parts of the range to cut off; each pair (below, above) is a start.
        rounds: Rounds from each start.
        kept: How many of the ranges found go on.
        polish: Further rounds of these.
    """

    method: int
    num_bins: int
    num_steps: int
    cuts: npt.NDArray[Any]
    rounds: int
    kept: int
    polish: int


def search_plan(method: int, **settings: Any) -> SearchPlan:
    """A plan of a method with its settings; the others' settings are left empty."""
    empty: dict[str, Any] = {
        "num_bins": 0,
        "num_steps": 0,
        "cuts": np.empty(0, np.float32),
        "rounds": 0,
        "kept": 0,
        "polish": 0,
    }
    return SearchPlan(method, **(empty | settings))

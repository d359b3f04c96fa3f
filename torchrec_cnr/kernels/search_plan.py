"""The search for the range of a row, as numbers that compiled code can read."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

COVERING, MIRRORED, GREEDY, LEAST_SQUARES = range(4)
SCALE_AND_BIAS_BYTES = 4  # per row: two fp16 values after its codes
CLOSING_ROUNDS = 3  # almost every range is closed after one round; the third shows whether the second closed it


class SearchPlan(NamedTuple):
    """A method to find a range, with its settings.

    Attributes:
        method: ``COVERING``: the range from the least to the greatest value. ``MIRRORED``: a range symmetric about
            zero, up to the largest absolute value. ``GREEDY`` and ``LEAST_SQUARES``: a search with the settings below.
        num_bins: Greedy search: the number of bins of the range; a step cuts off one.
        num_steps: Greedy search: the number of steps.
        cuts: Least squares: fractions of the range to cut off, float32 [num_cuts]. Each pair (below, above) is a start.
        rounds: Least squares: the number of rounds from each start.
        kept: Least squares: the number of best ranges with which the search continues.
        polish: Least squares: the number of further rounds for these ranges.
    """

    method: int
    num_bins: int
    num_steps: int
    cuts: npt.NDArray[Any]
    rounds: int
    kept: int
    polish: int


def search_plan(method: int, **settings: Any) -> SearchPlan:
    """Return a plan of a method with its settings; the settings of other methods are 0 or empty."""
    empty: dict[str, Any] = {
        "num_bins": 0,
        "num_steps": 0,
        "cuts": np.empty(0, np.float32),
        "rounds": 0,
        "kept": 0,
        "polish": 0,
    }
    return SearchPlan(method, **(empty | settings))

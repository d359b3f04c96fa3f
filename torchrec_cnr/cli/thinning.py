"""Fewer points for the same picture.

A line of many points looks the same if, in each column of the picture, only the first, last, lowest and highest point
are kept (M4 aggregation, Jugel et al., VLDB 2014). So a plot stays small however long a run was, and no extreme is
lost.
"""

import numpy as np
from numpy.typing import NDArray


def thin(xs: NDArray[np.float64], ys: NDArray[np.float64], num_columns: int) -> NDArray[np.intp]:
    """Which points to draw: all, where they are few, else at most four in each column.

    Args:
        xs: [N], not decreasing.
        ys: [N].
        num_columns: Into which the span of ``xs`` is divided.

    Returns:
        Indices of points, strictly increasing.
    """
    if len(xs) <= 4 * num_columns:
        return np.arange(len(xs))
    span = xs[-1] - xs[0]
    columns = ((xs - xs[0]) * (num_columns / span)).astype(np.intp) if span else np.zeros(len(xs), np.intp)
    columns = np.minimum(columns, num_columns - 1)
    starts = np.flatnonzero(np.diff(columns, prepend=-1))
    ends = np.append(starts[1:], len(xs)) - 1
    by_height = np.lexsort((ys, columns))  # columns stay where they are, and begin with their lowest point
    return np.unique(np.concatenate((starts, ends, by_height[starts], by_height[ends])))

"""Confidence intervals of the difference between two kinds of runs, each repeated with several seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval.

    Attributes:
        mean: The mean of the differences.
        half_width: Half the width of the confidence interval around it, by Student's t distribution.
        spread: The standard deviation of the differences.
    """

    mean: float
    half_width: float
    spread: float

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.mean + self.half_width


def relative_change(values: Sequence[float], bases: Sequence[float]) -> Interval:
    """Return the relative difference of values from their bases, in percent.

    Args:
        values: One value for each seed.
        bases: The values to compare with, for the same seeds.

    Raises:
        ValueError: There are fewer than two values, or not as many bases as values.
    """
    changes = [100 * (value / base - 1) for value, base in zip(values, bases, strict=True)]
    if len(changes) < 2:
        raise ValueError("an interval needs two pairs or more")
    spread = stdev(changes)
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(changes) - 1))
    return Interval(fmean(changes), quantile * spread / len(changes) ** 0.5, spread)


def num_seeds_for(half_width: float, spread: float) -> int:
    """Return about how many seeds are needed for a confidence interval of this half width."""
    return max(2, round((NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * spread / half_width) ** 2))

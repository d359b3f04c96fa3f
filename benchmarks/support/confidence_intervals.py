"""What runs that were done several times, each with another seed, tell of a difference between two kinds of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean, and how far off it may be.

    Attributes:
        mean: Of the differences.
        half_width: Of the confidence interval around it, by Student's t distribution.
        spread: Standard deviation of the differences.
    """

    mean: float
    half_width: float
    spread: float

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half_width


def relative_change(values: Sequence[float], bases: Sequence[float]) -> Interval:
    """How many per cent values are above those that they are paired with.

    Args:
        values: One for each seed.
        bases: Of the same seeds.

    Raises:
        ValueError: There are less than two, or not as many bases as values.
    """
    changes = [100 * (value / base - 1) for value, base in zip(values, bases, strict=True)]
    if len(changes) < 2:
        raise ValueError("an interval needs two pairs or more")
    spread = stdev(changes)
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(changes) - 1))
    return Interval(fmean(changes), quantile * spread / len(changes) ** 0.5, spread)


def num_seeds_for(half_width: float, spread: float) -> int:
    """About how many seeds make a confidence interval this narrow."""
    return max(2, round((NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * spread / half_width) ** 2))

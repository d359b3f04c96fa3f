"""Searches for the range of a row that codes cover best: settings, as frozen values, and the ladders to choose from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.kernels.search_plan import GREEDY, LEAST_SQUARES, SearchPlan, search_plan

_MAX_BINS = 10_000
MAX_CUTS = 64
_MAX_ROUNDS = 1_000


def _check_whole(name: str, value: int, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ConfigurationError(f"{name!r} must be a whole number from {least} to {most} (got {value!r})")


@dataclass(frozen=True)
class GreedySearch:
    """The search of Check-N-Run (section 5.2), with scale and bias rounded to fp16 before each is judged.

    Each step tries to cut one bin off the low end of the range and one off the high end, and keeps what has the smaller
    error; the best range met on the way wins. PyTorch's ``choose_qparams_optimized`` is another one of its kind.

    Attributes:
        num_bins: Into how many bins the range from least to greatest value is divided.
        ratio: The part of the range that is searched at most.

    Raises:
        ConfigurationError: One of them cannot be.
    """

    num_bins: int = 25
    ratio: float = 1.0
    name: ClassVar[str] = "greedy"

    def __post_init__(self) -> None:
        _check_whole("num_bins", self.num_bins, 1, _MAX_BINS)
        if type(self.ratio) not in (int, float) or not 0.0 < self.ratio <= 1.0:
            raise ConfigurationError(f"'ratio' must be above 0 and at most 1 (got {self.ratio!r})")

    @property
    def plan(self) -> SearchPlan:
        """For the kernels: the last bin is never cut."""
        num_steps = min(round(self.num_bins * self.ratio), self.num_bins - 1)
        return search_plan(GREEDY, num_bins=self.num_bins, num_steps=num_steps)

    def to_json(self) -> dict[str, Any]:
        """As the manifest records it."""
        return {"name": self.name, "num_bins": self.num_bins, "ratio": repr(float(self.ratio))}


@dataclass(frozen=True)
class LeastSquares:
    """Alternating least squares: the nearest codes for a range, then the range that fits these codes best, and so on.

    With codes fixed, the best scale and bias are the linear regression of the values on them; with scale and bias
    fixed, the best codes are the nearest. This finds the nearest local optimum, so it begins from several ranges: every
    pair of ``cuts``, one from below and one from above. Lloyd's algorithm ("Least squares quantization in PCM", IEEE
    Transactions on Information Theory 28(2), 1982), with levels held at even distances.

    Attributes:
        cuts: Parts of the range from least to greatest value, each from 0 to below .5.
        rounds: Rounds from each start.
        kept: How many of the best ranges then go on.
        polish: Further rounds of these.

    Raises:
        ConfigurationError: One of them cannot be.
    """

    cuts: tuple[float, ...]
    rounds: int = 1
    kept: int = 2
    polish: int = 2
    name: ClassVar[str] = "least_squares"

    def __post_init__(self) -> None:
        cuts: Any = self.cuts  # whatever was given
        is_tuple = isinstance(cuts, tuple) and 1 <= len(cuts) <= MAX_CUTS
        if not is_tuple or not all(type(cut) in (int, float) and 0.0 <= cut < 0.5 for cut in cuts):
            got = str(cuts)[:80]
            raise ConfigurationError(f"'cuts' must be a tuple of 1 to {MAX_CUTS} parts from 0 to below .5 (got {got})")
        _check_whole("rounds", self.rounds, 1, _MAX_ROUNDS)
        _check_whole("kept", self.kept, 1, MAX_CUTS)
        _check_whole("polish", self.polish, 0, _MAX_ROUNDS)

    @property
    def plan(self) -> SearchPlan:
        """For the kernels."""
        cuts = np.array(self.cuts, np.float32)
        return search_plan(LEAST_SQUARES, cuts=cuts, rounds=self.rounds, kept=self.kept, polish=self.polish)

    def to_json(self) -> dict[str, Any]:
        """As the manifest records it."""
        cuts = [repr(float(cut)) for cut in self.cuts]
        return {"name": self.name, "cuts": cuts, "rounds": self.rounds, "kept": self.kept, "polish": self.polish}


Search = GreedySearch | LeastSquares


def _ladder(*thirds: float) -> tuple[LeastSquares, ...]:
    """Least squares in steps of cost, about 4, 11, 15, 22, 32 and 66 passes over a row; the last one is the best.

    They lie on the front of what was tried (numbers of cuts, rounds, kept and polish, over widths from 16 to 128 and
    four distributions): no cheaper search among these had a smaller error than any of them.
    """
    most = thirds[-1]
    sixths = tuple(round(most * number / 5, 4) for number in range(6))
    halves = (0.0, round(most / 2, 4), most)
    return (
        LeastSquares((0.0,), kept=1, polish=2),
        LeastSquares(halves, kept=1, polish=1),
        LeastSquares(halves, kept=2, polish=2),
        LeastSquares(thirds, kept=2, polish=2),
        LeastSquares(thirds, kept=4, polish=3),
        LeastSquares(sixths, kept=6, polish=4),
    )


# By bits: the fewer codes, the more it pays to cut off the ends of a row.
LADDERS: Mapping[int, tuple[LeastSquares, ...]] = {
    2: _ladder(0.0, 0.1, 0.2, 0.3),
    3: _ladder(0.0, 0.05, 0.1, 0.15),
    4: _ladder(0.0, 0.033, 0.067, 0.1),
    8: _ladder(0.0, 0.002, 0.004, 0.006),
}

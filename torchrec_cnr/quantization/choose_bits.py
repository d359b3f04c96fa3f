"""Rules that choose a scheme for every shard, from the expected number of restores or from an error budget.

A restore replaces trained rows by decoded ones, and training continues from these. The loss by quantization therefore
grows with the number of restores, and a job that hardly ever restores can use few bits (Check-N-Run, section 5.3).
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.quantization.scheme import NoQuantization, Sample, Scheme, is_quantizable
from torchrec_cnr.quantization.uniform import BITS, AdaptiveAsymmetric, Asymmetric, relative_error

_MAX_RESTORES = ((1, 2), (3, 3), (20, 4))  # pairs (most restores, bits); 8 bits for more restores


def expected_restores(failures_per_node_hour: float, num_nodes: int, job_hours: float) -> float:
    """Return the expected number of restores of a job, which has to restore whenever one of its nodes fails.

    Args:
        failures_per_node_hour: Probability that a node fails within an hour.
        num_nodes: Number of nodes of the job.
        job_hours: Length of the training, in hours.

    Raises:
        ConfigurationError: An argument is negative, infinite or not a number.

    Examples:
        >>> cnr.expected_restores(failures_per_node_hour=0.001, num_nodes=16, job_hours=120)
        1.92
    """
    _check_count("failures_per_node_hour", failures_per_node_hour)
    _check_count("num_nodes", num_nodes)
    _check_count("job_hours", job_hours)
    return failures_per_node_hour * num_nodes * job_hours


@dataclass(frozen=True)
class ByExpectedRestores:
    """A rule that chooses the bits per element by the expected number of restores.

    It chooses 2 bits for up to one restore, 3 bits for up to three, 4 bits for up to twenty, and 8 bits for more. The
    checkpoints record how often a job was restored (``CNRLoadPlanner`` with the tracker, ``CNRSavePlanner``). Once
    there have been more restores than expected, all further saves use 8 bits.

    Attributes:
        num_restores: The expected number of restores; see ``expected_restores``.

    Raises:
        ConfigurationError: ``num_restores`` is negative, infinite or not a number.

    Examples:
        >>> rule = cnr.ByExpectedRestores(num_restores=10)
        >>> rule.choose(lambda: torch.randn(100, 64), num_restores=0).bits
        4
        >>> rule.choose(lambda: torch.randn(100, 64), num_restores=11)
        Asymmetric(bits=8)
    """

    num_restores: float

    def __post_init__(self) -> None:
        _check_count("num_restores", self.num_restores)

    def supports(self, dtype: torch.dtype) -> bool:
        """Return whether uniform schemes support ``dtype``."""
        return is_quantizable(dtype)

    def choose(self, sample: Sample, num_restores: int) -> Scheme:
        """Return an ``AdaptiveAsymmetric`` scheme of 2 to 4 bits, or ``Asymmetric`` with 8 bits."""
        first, last = self.choices()
        return (last if num_restores > self.num_restores else first).choose(sample, num_restores)

    def choices(self) -> tuple[Scheme, Scheme]:
        """Return its choice for up to the expected number of restores, and its choice for more; without a search."""
        fitting = [bits for most, bits in _MAX_RESTORES if self.num_restores <= most]
        return _with(fitting[0] if fitting else BITS[-1]), _with(BITS[-1])


@dataclass(frozen=True)
class ByErrorBudget:
    """A rule that chooses the fewest bits per element with which the error of all restores is within a budget.

    The error of one restore is the sum of the squared errors of a sample of rows, divided by the sum of their squared
    values. The errors of all restores add up. If not even 8 bits are within the budget, rows are stored exactly. With
    the default budget the rule usually chooses the bits that ``ByExpectedRestores`` chooses, as measured.

    Attributes:
        num_restores: The expected number of restores. Once there have been as many, the actual number plus one counts.
        budget: The largest sum of the relative squared errors of all restores.

    Raises:
        ConfigurationError: An attribute is negative, infinite or not a number.

    Examples:
        >>> rule = cnr.ByErrorBudget(num_restores=10, budget=0.1)
        >>> rule.choose(lambda: torch.randn(100, 64), num_restores=0).bits
        4
        >>> rule.choose(lambda: torch.randn(100, 64), num_restores=50)
        Asymmetric(bits=8)
    """

    num_restores: float
    budget: float = 0.1

    def __post_init__(self) -> None:
        _check_count("num_restores", self.num_restores)
        _check_count("budget", self.budget)

    def supports(self, dtype: torch.dtype) -> bool:
        """Return whether uniform schemes support ``dtype``."""
        return is_quantizable(dtype)

    def choose(self, sample: Sample, num_restores: int) -> Scheme:
        """Return the scheme with the fewest bits that is within the budget."""
        rows = sample()
        restores = max(self.num_restores, num_restores + 1)
        for bits in BITS:
            scheme = _with(bits).choose(lambda: rows, num_restores)
            error = relative_error(scheme, rows)
            if error is None:  # the sample has only zeros or exact rows, but rows outside it may have other values
                return _with(BITS[-1])
            if restores * error <= self.budget:
                return scheme
        return NoQuantization()

    def choices(self) -> tuple[Scheme, ...]:
        """Return the schemes that it may choose or try, without a search, except ``NoQuantization``."""
        return tuple(map(_with, BITS))


def _with(bits: int) -> Scheme:
    return Asymmetric(bits) if bits == 8 else AdaptiveAsymmetric(bits)


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise ConfigurationError(f"{name!r} must be a number, 0 or more (got {value!r})")

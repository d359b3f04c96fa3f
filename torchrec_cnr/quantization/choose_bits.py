"""Rules that choose a scheme for every shard: by how often its error will be taken on, or by how large it may get.

A restore puts decoded rows in the place of trained ones, and training goes on from there. What a job loses by
quantization therefore grows with the number of its restores, and a job that hardly ever restores can use few bits
(Check-N-Run, section 5.3).
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.quantization.scheme import NoQuantization, Sample, Scheme, is_quantizable
from torchrec_cnr.quantization.uniform import BITS, AdaptiveAsymmetric, Asymmetric, relative_error

_MAX_RESTORES = ((1, 2), (3, 3), (20, 4))  # up to so many restores, so many bits; 8 bits beyond


def expected_restores(failures_per_node_hour: float, num_nodes: int, job_hours: float) -> float:
    """How many restores a job has to expect: any node that fails stops all of it.

    Args:
        failures_per_node_hour: Probability that a node fails within an hour.
        num_nodes: Nodes of the job.
        job_hours: Length of the training, in hours.

    Raises:
        ConfigurationError: A number is negative or none.
    """
    _check_count("failures_per_node_hour", failures_per_node_hour)
    _check_count("num_nodes", num_nodes)
    _check_count("job_hours", job_hours)
    return failures_per_node_hour * num_nodes * job_hours


@dataclass(frozen=True)
class ByExpectedRestores:
    """Bits by the expected number of restores: up to one 2 bits, up to three 3, up to twenty 4, beyond that 8.

    The lineage counts its restores (``CNRLoadPlanner`` with the tracker, ``CNRSavePlanner``). Once there were more than
    expected, 8 bits are used from then on.

    Attributes:
        num_restores: How many are expected; see ``expected_restores``.

    Raises:
        ConfigurationError: It is negative or no number.
    """

    num_restores: float

    def __post_init__(self) -> None:
        _check_count("num_restores", self.num_restores)

    def supports(self, dtype: torch.dtype) -> bool:
        """What uniform schemes support."""
        return is_quantizable(dtype)

    def choose(self, sample: Sample, num_restores: int) -> Scheme:
        """Adaptive with 2 to 4 bits, from least to greatest value with 8."""
        first, last = self.choices()
        return (last if num_restores > self.num_restores else first).choose(sample, num_restores)

    def choices(self) -> tuple[Scheme, Scheme]:
        """What it chooses as long as there were no more restores than expected, and after that; without a search."""
        fitting = [bits for most, bits in _MAX_RESTORES if self.num_restores <= most]
        return _with(fitting[0] if fitting else BITS[-1]), _with(BITS[-1])


@dataclass(frozen=True)
class ByErrorBudget:
    """The fewest bits for each table whose error stays within a budget after all restores.

    The error of one restore is the squared error of a sample of rows over their squared values, and restores add up.
    Where not even 8 bits stay within the budget, rows are stored exactly. The default budget is what makes the usual
    choice of bits by restores come out (an observation, not a theorem).

    Attributes:
        num_restores: How many are expected; once there were as many, those there were and the next one count.
        budget: What the relative squared errors of all restores together may reach.

    Raises:
        ConfigurationError: One of them is negative or no number.
    """

    num_restores: float
    budget: float = 0.1

    def __post_init__(self) -> None:
        _check_count("num_restores", self.num_restores)
        _check_count("budget", self.budget)

    def supports(self, dtype: torch.dtype) -> bool:
        """What uniform schemes support."""
        return is_quantizable(dtype)

    def choose(self, sample: Sample, num_restores: int) -> Scheme:
        """The scheme with the fewest bits that stays within the budget."""
        rows = sample()
        restores = max(self.num_restores, num_restores + 1)
        for bits in BITS:
            scheme = _with(bits).choose(lambda: rows, num_restores)
            error = relative_error(scheme, rows)
            if error is None:  # no row of the sample tells anything, and others may be there
                return _with(BITS[-1])
            if restores * error <= self.budget:
                return scheme
        return NoQuantization()

    def choices(self) -> tuple[Scheme, ...]:
        """What it may choose or try but for storing rows exactly, without a search."""
        return tuple(map(_with, BITS))


def _with(bits: int) -> Scheme:
    return Asymmetric(bits) if bits == 8 else AdaptiveAsymmetric(bits)


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise ConfigurationError(f"{name!r} must be a number, 0 or more (got {value!r})")

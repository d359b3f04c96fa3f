"""Learning the transform of a table's rows from a sample of them: its basis, its step, and its tables.

Components are rounded to nearest after they were moved a little towards zero, by the more the rarer the multiples
farther from zero are: these take more bits (Sullivan, "Efficient Scalar Quantization of Exponential and Laplacian
Random Variables", IEEE Transactions on Information Theory 42(5), 1996). The step is smaller in return. Readers need not
know of it.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from torchrec_cnr.kernels.cpu import Floats, Numbers
from torchrec_cnr.kernels.cpu.row_transform import MOST
from torchrec_cnr.kernels.cpu.symbol_coder import NUM_CLASSES, SCALE_BITS
from torchrec_cnr.quantization.row_transform import Basis, RowTransform, bits_of, classes_of, energies_of, num_bits_of
from torchrec_cnr.quantization.symbol_tables import NUM_SPREADS, spreads

_PRIOR_ROWS = 16  # how many rows the spread that is expected of a class counts as, beside its rows in the sample
_NEAR_SPREADS = 3  # how many tables on either side of the expected one are tried
_SEARCH_ROUNDS = (16, 10, 10)  # of the search for a step: without a dead zone, and twice with one
_ZONE, MAX_ZONE = 0.1, 0.35  # steps by which a component is moved towards zero, if its spread is one step; at most
_NUM_GROUPS = 16  # of rows with similar norms
_TYPICAL = 16  # times the median error: rows with more are left out of means
_NUM_DEVIATIONS = 2  # standard deviations of a sample's mean that are put down to chance
_MARGIN = 0.985  # of the mean error that is asked, so that rows outside of the sample meet it, and those of later saves


def are_typical(norms: Floats, errors: Floats) -> npt.NDArray[np.bool_]:
    """Return which rows of a sample are typical, bool [n]: finite, with an error that is not many times the median.

    A single huge row, which the sample may have by chance, would otherwise allow errors of the size of all other rows.

    Args:
        norms: float64 [n], the l2 norms of the rows; not finite for those with NaN or infinity.
        errors: float64 [n], the l2 norms of the rows' errors by another scheme; 0 for rows that it stores exactly.
    """
    is_finite = np.isfinite(norms)
    has_small_error = errors <= _TYPICAL * _median(errors[is_finite & (errors > 0)])
    is_small = norms <= _TYPICAL * _median(norms[is_finite & (norms > 0)])
    chosen: npt.NDArray[np.bool_] = is_finite & has_small_error & (is_small | (errors > 0))
    return chosen


def _median(values: Floats) -> float:
    return float(np.median(values)) if len(values) else 0.0


@dataclass(frozen=True, eq=False)
class ErrorLimit:
    """The errors that the rows of a sample may have: those of another scheme, on average.

    Attributes:
        errors: float64 [n], the l2 norms of the rows' errors by the other scheme.
        relative_errors: float64 [n], the same divided by the norms of their rows, times a factor that is allowed.
        inverse_norms: float64 [n], 1 / norm of each row; 0 for a row of zeros.
    """

    errors: Floats
    relative_errors: Floats
    inverse_norms: Floats

    @classmethod
    def of(cls, norms: Floats, errors: Floats, max_relative: float) -> "ErrorLimit":
        """Return the limit for n >= 1 rows.

        Args:
            norms: float64 [n], the l2 norms of the rows, finite.
            errors: float64 [n], the l2 norms of the rows' errors by the other scheme.
            max_relative: How many times its mean of relative errors is allowed.
        """
        inverse_norms = np.divide(1, norms, out=np.zeros(len(norms)), where=norms > 0)
        return cls(errors, max_relative * errors * inverse_norms, inverse_norms)

    @cached_property
    def mean(self) -> float:
        """The largest mean l2 norm of errors."""
        return float(self.errors.mean())

    def holds(self, errors: Floats) -> bool:
        """Return whether the means of errors, float64 [n], are a little below the limit."""
        return self.part_of(errors) <= _MARGIN

    def part_of(self, errors: Floats) -> float:
        """Return which part of the limit the means of errors, float64 [n], are: the larger part of the two."""
        relative_mean = float((errors * self.inverse_norms).mean())
        return max(float(errors.mean()) / self.mean, relative_mean / float(self.relative_errors.mean()))

    def may_hold(self, errors: Floats) -> bool:
        """Return whether errors, float64 [n], exceed the limit by no more than chance explains."""
        excesses = errors - self.errors, errors * self.inverse_norms - self.relative_errors
        return all(excess.mean() <= _NUM_DEVIATIONS * excess.std() / len(excess) ** 0.5 for excess in excesses)


def learned(rows: Floats, limit: ErrorLimit, basis: Basis | None) -> RowTransform:
    """Return a transform for rows like those of a sample.

    Args:
        rows: float64 [n, num_cols], finite; n >= 1.
        limit: The errors that are wanted, above 0.
        basis: The basis; None for the columns themselves.
    """
    num_cols = rows.shape[1]
    components = rows if basis is None else basis.components_of(rows)
    zones, step = np.zeros(num_cols), 0.0
    for num_rounds in _SEARCH_ROUNDS:
        bounds = (step / 2, 1.1 * step) if step else _bounds(components, limit)
        step = _largest_step(components, limit, zones, bounds, num_rounds)
        numbers = _rounded(components, step, zones)
        spreads_now = np.sqrt(np.square(numbers).mean(0))
        next_zones = np.minimum(MAX_ZONE, _ZONE / np.maximum(spreads_now, 1e-9))
        zones, used_zones = next_zones, zones
    whole = np.clip(numbers, -MOST, MOST).astype(np.int16)
    first_class = _first_class(whole)
    classes = classes_of(whole, first_class)
    frequencies, choices = _class_frequencies(classes), _choices(whole, classes)
    return RowTransform(num_cols, step, basis, first_class, frequencies, choices, used_zones)


def _bounds(components: Floats, limit: ErrorLimit) -> tuple[float, float]:
    norms = np.linalg.norm(components, axis=1)
    return limit.mean / components.shape[1] ** 0.5 / 4, 2 * max(limit.mean, float(norms.max()))


def _rounded(components: Floats, step: float, zones: Floats) -> Floats:
    """Return components in whole steps."""
    scaled = components / step
    return np.rint(scaled - np.copysign(zones, scaled))


def _largest_step(
    components: Floats, limit: ErrorLimit, zones: Floats, bounds: tuple[float, float], num_rounds: int
) -> float:
    """Return the largest step, of those that a search tries, with errors within the limit."""
    low, high = bounds
    for _ in range(num_rounds):
        middle = float(np.sqrt(low * high))
        errors = np.linalg.norm(components - _rounded(components, middle, zones) * middle, axis=1)
        if limit.holds(errors):
            low = middle
        else:
            high = middle
    return float(low)


def expected_bits(components: Floats, step: float) -> float:
    """Return about how many bits a value takes: the rate of Gaussian components whose spread depends on the row's norm.

    Args:
        components: float64 [n, num_cols].
        step: The step whose errors are allowed.
    """
    order = np.argsort(np.square(components).sum(1))
    groups = np.array_split(components[order], min(_NUM_GROUPS, len(components)))
    return float(np.mean([0.5 * np.log2(1 + 12 * np.square(group).mean(0) / step**2).mean() for group in groups]))


def _first_class(numbers: Numbers) -> int:
    """Return the first class such that the classes of the sample are in the middle, or begin with that of 0."""
    bits = num_bits_of(energies_of(numbers))
    return max(0, int(np.median(bits)) - NUM_CLASSES // 2)


def _class_frequencies(classes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """Return frequencies that add up to 4096, at least 1 each."""
    counts = np.bincount(classes, minlength=NUM_CLASSES)
    frequencies = 1 + ((1 << SCALE_BITS) - NUM_CLASSES) * counts // counts.sum()
    frequencies[frequencies.argmax()] += (1 << SCALE_BITS) - frequencies.sum()
    result: npt.NDArray[np.uint16] = frequencies.astype(np.uint16)
    return result


def _choices(numbers: Numbers, classes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the table of each class and component, uint8 [16, num_cols].

    The spread of a component in a class is that of the class's rows in the sample, and of what all rows let expect. Of
    the tables about this spread, that with the fewest bits for the sample is taken.
    """
    squares = numbers.astype(np.float64) ** 2
    energies = squares.sum(1)
    shares = squares.sum(0) / max(1.0, energies.sum())
    known = np.flatnonzero(np.bincount(classes, minlength=NUM_CLASSES))
    choices = np.zeros((NUM_CLASSES, numbers.shape[1]), np.uint8)
    for number in range(NUM_CLASSES):
        nearest = int(known[np.abs(known - number).argmin()])
        own = classes == nearest
        count, factor = int(own.sum()), 2.0 ** (number - nearest)
        expected = shares * energies[own].mean() * factor
        variances = (squares[own].sum(0) * factor + _PRIOR_ROWS * expected) / (count + _PRIOR_ROWS)
        places = _nearest_spreads(np.sqrt(variances))
        sample = numbers[own] if number == nearest else numbers[:0]
        choices[number] = _best_near(sample, places)
    return choices


def _nearest_spreads(wanted: Floats) -> npt.NDArray[np.int64]:
    known = np.log2(spreads())
    distances = np.abs(np.log2(np.maximum(wanted, 1e-9))[:, None] - known)
    places: npt.NDArray[np.int64] = distances.argmin(1)
    return places


def _best_near(numbers: Numbers, places: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return for each component the table that takes the fewest bits, of those near a spread."""
    offsets = range(-_NEAR_SPREADS, _NEAR_SPREADS + 1)
    tables = [kind + np.clip(places + offset, 0, NUM_SPREADS - 1) for kind in (0, NUM_SPREADS) for offset in offsets]
    if not len(numbers):
        return places.astype(np.uint8)
    costs = [bits_of(numbers, np.broadcast_to(table, numbers.shape)).sum(0) for table in tables]
    # A component that is 0 in the whole sample fits all small spreads alike; the expected one is not the least.
    best = np.argmin([cost + 0.5 * abs(offset) for cost, offset in zip(costs, [*offsets, *offsets], strict=True)], 0)
    chosen: npt.NDArray[np.uint8] = np.stack(tables)[best, np.arange(len(places))].astype(np.uint8)
    return chosen

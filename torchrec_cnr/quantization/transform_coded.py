"""Transform-coded rows: components in the basis of a table, as multiples of one step, entropy-coded.

``TransformCoded`` is what users ask for: a rule that learns a ``RowTransform`` from a sample of a shard's rows, at the
error of another scheme. It chooses that scheme itself where the transform would not be smaller. The other scheme may
also be what ``ByExpectedRestores`` or ``ByErrorBudget`` chooses. ``Transformed`` is the scheme of a shard with a
transform.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrec_cnr import kernels
from torchrec_cnr.errors import ConfigurationError, DamagedError
from torchrec_cnr.kernels.cpu import Floats, Numbers
from torchrec_cnr.quantization.choose_bits import ByErrorBudget, ByExpectedRestores
from torchrec_cnr.quantization.learned_transform import (
    ErrorLimit,
    are_typical,
    expected_bits,
    learned,
)
from torchrec_cnr.quantization.packed_rows import least_bytes
from torchrec_cnr.quantization.row_transform import Basis, RowTransform, basis_bytes, transform_bytes
from torchrec_cnr.quantization.scheme import (
    Encoded,
    RowCodes,
    Sample,
    Scheme,
    all_rows,
    is_quantizable,
    positions,
)
from torchrec_cnr.quantization.uniform import AdaptiveAsymmetric, Asymmetric, Symmetric, row_errors

MAX_COLS = 512  # of a table that is transformed: a basis has as many values as the square of its columns
_MIN_GAIN = 0.98  # a transform must take at most this part of the other scheme's bytes
_MAX_RELATIVE = 2.0  # times the mean relative error of rows by the other scheme that is allowed
_LEAST_PART = 0.6  # of the error that is asked: below, a known transform takes about a bit too much for each value
_LEAST_ERROR = 1e-30  # of a table that is transformed: float32 cannot hold the reciprocals of much smaller steps
_PARTS_BYTES = 1_000  # of the data file and the manifest for a transform and its basis, besides their own bytes
_POSITION_BYTES = 4  # of an exact row, besides its values
_DRIFT = 1.1  # times the bits that rows took when a basis was learned, or would take with a new one: it is replaced
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Transformed(RowCodes):
    """The scheme of rows that a transform turns into whole numbers. ``TransformCoded`` makes it.

    Its codes are these numbers, two bytes each. In a data file they are entropy-coded.

    Attributes:
        digest: SHA-256 of the transform, in hexadecimal.
        basis: SHA-256 of its basis; None if it has none.
        transform: The transform; None in a manifest, until it has been read.

    Raises:
        ConfigurationError: A digest is not a SHA-256 in hexadecimal.

    Examples:
        >>> from torchrec_cnr.quantization import Transformed
        >>> table = torch.randn(2_000, 2) @ torch.randn(2, 64)  # rows in two directions
        >>> scheme = cnr.TransformCoded().choose(lambda: table, num_restores=0)
        >>> isinstance(scheme, Transformed), scheme.row_bytes(64, torch.float32)
        (True, 128)
    """

    digest: str
    basis: str | None = None
    transform: RowTransform | None = field(default=None, compare=False, repr=False)
    name: ClassVar[str] = "transformed"

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of what must be stored for it: the transform, and its basis, if it has one."""
        return (self.digest,) if self.basis is None else (self.digest, self.basis)

    def __post_init__(self) -> None:
        for digest in self.digests:
            if not _DIGEST.fullmatch(str(digest)):
                raise ConfigurationError(f"a digest must be a SHA-256 in hexadecimal (got {str(digest)[:80]!r})")

    @classmethod
    def by(cls, transform: RowTransform) -> "Transformed":
        """Return the scheme of a transform."""
        return cls(transform.digest, None if transform.basis is None else transform.basis.digest.hex(), transform)

    def with_data(self, data: bytes, basis: Basis | None, num_cols: int, where: str) -> "Transformed":
        """Return the scheme with its transform, from the bytes of this that were stored, and from its basis.

        Raises:
            DamagedError: The bytes are not those of this transform, or it is of other rows.
        """
        transform = RowTransform.parsed(data, basis, where)
        basis_digest = None if basis is None else basis.digest.hex()
        if (transform.digest, basis_digest, transform.num_cols) != (self.digest, self.basis, num_cols):
            raise DamagedError(f"{where}: corrupt: not the transform of its rows; use another checkpoint")
        return replace(self, transform=transform)

    @property
    def known(self) -> RowTransform:
        """The transform.

        Raises:
            ConfigurationError: It has not been read.
        """
        if self.transform is None:
            raise ConfigurationError(f"the transform {self.digest[:12]} was not read; use with_data")
        return self.transform

    def row_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Return the bytes of a row's numbers."""
        return 2 * num_cols

    def tail_bytes(self, num_cols: int, dtype: torch.dtype) -> int:
        """Return 0: all of a row is entropy-coded."""
        return 0

    def encode(self, table: Tensor, rows: Tensor | None = None) -> Encoded:
        """Round the components of rows to multiples of the step, on the device of the rows."""
        codes, is_exact = self._numbers(table, all_rows(table) if rows is None else rows)
        return Encoded(codes, positions(is_exact))

    def encode_without_waiting(self, table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Round as ``encode`` does; the mask of the exact rows is returned on the device."""
        return self._numbers(table, rows, are_checked=True)

    def numbers_of(self, table: Tensor, rows: Tensor, is_exact: npt.NDArray[np.bool_]) -> Callable[[int, int], Numbers]:
        """Return a function that rounds some of the rows as ``encode`` does, in the thread that calls it.

        Args:
            table: [num_rows, num_cols], on the host; the elements of a row are contiguous.
            rows: The numbers of the rows, int64 [n].
            is_exact: bool [n], in which it writes which rows are exact.

        Returns:
            A function of two positions in ``rows``, that returns the numbers from one to the other, int16
            [stop - start, num_cols].
        """
        known = self.known
        transform = kernels.rows_transformer(table, rows, known.wide_basis, known.step, known.zones, is_exact)

        def numbers_of(start: int, stop: int) -> Numbers:
            numbers = np.empty((stop - start, table.shape[1]), np.int16)
            transform(start, stop, numbers)
            return numbers

        return numbers_of

    def _numbers(self, table: Tensor, rows: Tensor, are_checked: bool = False) -> tuple[Tensor, Tensor]:
        transform = self.known
        numbers, is_exact = kernels.transform_rows(
            table, rows, transform.wide_basis, transform.step, transform.zones, are_checked
        )
        return numbers.view(torch.uint8), is_exact

    def decode_into(self, codes: Tensor, positions: Tensor, first_col: int, target: Tensor, rows: Tensor) -> None:
        """Compute rows from their components, rounded once to fp32 and then to the target's dtype."""
        numbers, transform = codes.contiguous().view(torch.int16), self.known
        kernels.restore_rows(numbers, positions, transform.wide_basis, transform.step, first_col, target, rows)

    def to_json(self) -> dict[str, Any]:
        """Return ``{"name": "transformed", "digest": ..., "basis": ...}``."""
        return {"name": self.name, "digest": self.digest, "basis": self.basis}


@dataclass(frozen=True)
class TransformCoded:
    """A rule that codes the rows of a shard in a basis of their own, at the error of another scheme.

    Rows of trained tables are close to a subspace of few dimensions. They are transformed into the basis of their
    principal components, all components are rounded to multiples of one step, and entropy-coded. The step is chosen so
    that the mean l2 error of a sample is not larger than that of ``error_of``. The error of each row is at most 0.85
    steps times the root of its number of columns. If neither the basis nor the columns themselves take less space so,
    the shard is stored by ``error_of``, and so is a table of more than 512 columns.

    If ``error_of`` is a rule, each save meets the error of the scheme that the rule chooses for the sample and the
    number of restores so far. If the rule chooses ``NoQuantization``, rows are stored exactly.

    docs/concepts/quantization.md says what was measured of accuracy after restores.

    Attributes:
        error_of: The scheme whose error is met: ``AdaptiveAsymmetric``, ``Asymmetric`` or ``Symmetric``; or the rule
            that chooses it: ``ByExpectedRestores`` or ``ByErrorBudget``.

    Raises:
        ConfigurationError: ``error_of`` is another scheme or rule.

    Examples:
        >>> rule = cnr.TransformCoded(error_of=cnr.AdaptiveAsymmetric(bits=4))
        >>> writer = cnr.CNRStorageWriter("run", quantization=rule)
        >>> metadata = dcp.save(state, checkpoint_id="run/step-3", storage_writer=writer, planner=planner)
        >>> cnr.load_table("run/step-3", "model.users.weight").shape
        torch.Size([1000, 16])
    """

    error_of: AdaptiveAsymmetric | Asymmetric | Symmetric | ByExpectedRestores | ByErrorBudget = field(
        default_factory=lambda: AdaptiveAsymmetric(bits=4)
    )

    def __post_init__(self) -> None:
        known = AdaptiveAsymmetric | Asymmetric | Symmetric | ByExpectedRestores | ByErrorBudget
        if not isinstance(self.error_of, known):
            raise ConfigurationError(
                f"'error_of' must be a uniform scheme, ByExpectedRestores or ByErrorBudget (got {self.error_of!r})"
            )

    def supports(self, dtype: torch.dtype) -> bool:
        """Return whether uniform schemes support ``dtype``."""
        return is_quantizable(dtype)

    def choose(self, sample: Sample, num_restores: int) -> Scheme:
        """Return a scheme with a transform that it learns from the sample, or ``error_of``, or what this chooses."""
        rows = sample()
        other = self.error_of.choose(lambda: rows, num_restores)
        return self.choose_for(rows, other, other.row_bytes(rows.shape[1], rows.dtype), len(rows), None)

    def choose_for(
        self, sample: Tensor, other: Scheme, other_bytes: float, num_rows: int, known: RowTransform | None
    ) -> Scheme:
        """Return the scheme of a shard: one with a transform, or ``other``.

        A known transform is used as it is while the sample keeps the error with it, and the error is not far smaller
        than what is asked. Otherwise it gets another step, if that takes fewer bytes or its error is too large. A new
        basis is tried when rows take a tenth more bits than when the old one was learned, or than they can be
        expected to take with a new one. It must be worth its bytes.

        Args:
            sample: Some of the rows to store, [n, num_cols].
            other: The choice of ``error_of`` for the sample.
            other_bytes: The bytes that a row takes by it.
            num_rows: How many rows are stored.
            known: A transform that is stored already, or whose basis is; None if there is none.
        """
        rows, num_cols = sample.cpu(), sample.shape[1]
        found = _limit_of(rows, other) if num_cols <= MAX_COLS else None
        if found is None:
            return other
        limit, chosen = found
        fitting = known if known is not None and known.num_cols == num_cols else None
        candidates = _Sample(rows, chosen, rows.double().numpy()[chosen], limit, num_rows).candidates(fitting)
        best = min(candidates, key=lambda each: each.num_bytes)
        return best.scheme if best.num_bytes <= _MIN_GAIN * other_bytes and best.is_right else other

    def choose_known(self, sample: Tensor, other: Scheme, known: RowTransform) -> Transformed | None:
        """Return the scheme of a shard whose rows are encoded before training continues: a known transform, or None.

        Training waits for this. So it measures errors only, on the device of the sample. If it returns None, a
        transform should be learned in the background.

        Args:
            sample: As for ``choose_for``.
            other: As for ``choose_for``.
            known: The transform that was learned last. If its ``bits_per_value`` is 0, another should be learned.
        """
        is_usable = known.num_cols == sample.shape[1] and known.bits_per_value > 0
        found = _limit_of(sample, other) if is_usable else None
        if found is None:
            return None
        limit, chosen = found
        scheme = Transformed.by(known)
        errors = row_errors(scheme, sample).cpu().numpy()[chosen]
        return scheme if limit.may_hold(errors) and limit.part_of(errors) >= _LEAST_PART else None


def _limit_of(rows: Tensor, other: Scheme) -> tuple[ErrorLimit, npt.NDArray[np.int64]] | None:
    """Return the limit of errors by another scheme, and the positions of the rows that it is of: the typical ones.

    If there are no such rows, or no errors, return None.
    """
    norms, errors = torch.stack((rows.double().norm(dim=1), row_errors(other, rows))).cpu().numpy()
    chosen = are_typical(norms, errors).nonzero()[0]
    if not len(chosen):
        return None
    limit = ErrorLimit.of(norms[chosen], errors[chosen], _MAX_RELATIVE)
    return (limit, chosen) if limit.mean >= _LEAST_ERROR else None


def has_drifted(known: RowTransform, row_bytes: float) -> bool:
    """Return whether rows take a tenth more bytes than when a basis was learned.

    If it is not known how many they took then, return True.
    """
    return row_bytes > _DRIFT * known.bits_per_value * known.num_cols / 8


def bytes_of_rows(known: RowTransform, numbers: Numbers, exact_share: float, itemsize: int) -> float:
    """Return the mean bytes of rows.

    Args:
        known: Their transform.
        numbers: int16 [n, num_cols], those of some of the rows; n >= 1.
        exact_share: The share of rows that are stored exactly.
        itemsize: The bytes of a value of these.
    """
    num_bits = known.num_bits(numbers) / len(numbers)
    return num_bits / 8 + exact_share * (known.num_cols * itemsize + _POSITION_BYTES)


def _own_bytes(transform: RowTransform) -> int:
    """Return the bytes that a checkpoint needs to store a transform, without its basis."""
    return transform_bytes(transform.num_cols) + _PARTS_BYTES


@dataclass(frozen=True)
class _Candidate:
    """A scheme with a transform.

    Attributes:
        scheme: The scheme.
        row_bytes: The bytes of a row of the sample.
        num_bytes: The same, with the row's share in what must be stored besides the rows.
        is_right: Whether the errors of the sample are within the limit.
        error_part: The errors of the sample, as a part of the limit.
    """

    scheme: Transformed
    row_bytes: float
    num_bytes: float
    is_right: bool
    error_part: float


@dataclass(frozen=True, eq=False)
class _Sample:
    """Some of the rows to store.

    Attributes:
        rows: [n, num_cols].
        chosen: int64 [k], the positions of the rows to learn from: typical rows without NaN or infinity.
        values: float64 [k, num_cols], these rows.
        limit: The errors that are allowed of these.
        num_rows: How many rows are stored.
    """

    rows: Tensor
    chosen: npt.NDArray[np.int64]
    values: Floats
    limit: ErrorLimit
    num_rows: int

    def candidates(self, known: RowTransform | None) -> list[_Candidate]:
        """Return transforms to choose from: a known one, if it still fits, or what can replace it."""
        if known is None:
            return [self._learned(None), *self._with_new_basis(None, _MIN_GAIN)]
        kept = self._candidate(known, 0 if known.is_stored else _own_bytes(known))
        are_longer = has_drifted(known, kept.row_bytes)
        has_similar_error = _LEAST_PART <= kept.error_part <= 1 / _LEAST_PART
        if kept.is_right and has_similar_error and not are_longer:
            # A compaction joins its rows with older ones: it wins if it is about as good.
            found = [replace(kept, num_bytes=_MIN_GAIN * kept.num_bytes)]
        else:
            found = [kept] if kept.is_right and not are_longer else []
            found.append(self._learned(None))
            if known.basis is not None:
                # At another error, rows take other bits, also if they have not drifted.
                bits = known.bits_per_value if has_similar_error and not are_longer else 0.0
                found.append(self._learned(known.basis, bits))
        return [*found, *self._with_new_basis(known.basis, _MIN_GAIN if are_longer else 1 / _DRIFT)]

    def _with_new_basis(self, known: Basis | None, most: float) -> list[_Candidate]:
        """Return a transform with a new basis, if it can be expected to need at most this part of the bits."""
        basis = Basis.principal(self.values)
        step = self.limit.mean * (12 / self.values.shape[1]) ** 0.5
        components = self.values if known is None else known.components_of(self.values)
        if expected_bits(basis.components_of(self.values), step) > most * expected_bits(components, step):
            return []
        return [self._learned(basis, part_bytes=basis_bytes(self.values.shape[1]))]

    def _learned(self, basis: Basis | None, bits_per_value: float = 0.0, part_bytes: int = 0) -> _Candidate:
        """Return a transform with a step and tables for these rows; ``part_bytes`` are those of a new basis."""
        transform = replace(learned(self.values, self.limit, basis), bits_per_value=bits_per_value)
        return self._candidate(transform, part_bytes + _own_bytes(transform))

    def _candidate(self, transform: RowTransform, part_bytes: int) -> _Candidate:
        scheme, (num_rows, num_cols) = Transformed.by(transform), self.rows.shape
        encoded = scheme.encode(self.rows)
        numbers, exact_share = encoded.codes.view(torch.int16).numpy(), len(encoded.exact) / num_rows
        row_bytes = bytes_of_rows(transform, numbers, exact_share, self.rows.element_size())
        if transform.bits_per_value == 0:
            scheme = Transformed.by(replace(transform, bits_per_value=8 * row_bytes / num_cols))
        num_bytes = row_bytes + (part_bytes + least_bytes(self.num_rows)) / max(1, self.num_rows)
        errors = row_errors(scheme, self.rows, encoded).numpy()[self.chosen]
        return _Candidate(scheme, row_bytes, num_bytes, self.limit.may_hold(errors), self.limit.part_of(errors))

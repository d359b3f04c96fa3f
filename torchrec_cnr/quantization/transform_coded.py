"""Transform-coded rows: components in the basis of a table, as multiples of one step, entropy-coded.

``TransformCoded`` is what users ask for: a rule that learns a ``RowTransform`` from a sample of a shard's rows, at the
error of another scheme. It chooses that scheme itself where the transform would not be smaller. ``Transformed`` is the
scheme of a shard with a transform.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torchrec_cnr import kernels
from torchrec_cnr.errors import ConfigurationError, DamagedError
from torchrec_cnr.quantization.row_transform import (
    Basis,
    RowTransform,
    basis_bytes,
    learned,
    principal_components,
)
from torchrec_cnr.quantization.scheme import (
    Encoded,
    RowCodes,
    Sample,
    Scheme,
    all_rows,
    is_quantizable,
    positions,
)
from torchrec_cnr.quantization.uniform import AdaptiveAsymmetric, Asymmetric, Symmetric, mean_error

MAX_COLS = 512  # of a table that is transformed: a basis has as many values as the square of its columns
_MIN_GAIN = 0.98  # a transform must take at most this part of the other scheme's bytes
_DRIFT = 1.1  # a new basis is learned when rows take this many times the bits that they took when the old one was
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

    def __post_init__(self) -> None:
        for digest in (self.digest,) if self.basis is None else (self.digest, self.basis):
            if not _DIGEST.fullmatch(str(digest)):
                raise ConfigurationError(f"a digest must be a SHA-256 in hexadecimal (got {str(digest)[:80]!r})")

    @classmethod
    def by(cls, transform: RowTransform) -> "Transformed":
        """Return the scheme of a transform."""
        return cls(transform.digest, None if transform.basis is None else transform.basis.digest.hex(), transform)

    def with_data(self, data: bytes, basis: bytes | None, num_cols: int, where: str) -> "Transformed":
        """Return the scheme with its transform, from the bytes of this and of its basis that were stored.

        Raises:
            DamagedError: The bytes are not those of this transform, or it is of other rows.
        """
        own_basis = None if basis is None else Basis.parsed(basis, num_cols, where)
        transform = RowTransform.parsed(data, own_basis, where)
        own_digest = None if own_basis is None else own_basis.digest.hex()
        if (transform.digest, own_digest, transform.num_cols) != (self.digest, self.basis, num_cols):
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
        """Round the components of rows to multiples of the step. Rows on other devices are first copied to the host."""
        row_numbers = all_rows(table) if rows is None else rows
        numbers, is_exact = kernels.transform_rows(table, row_numbers, self.known.wide_basis, self.known.step)
        return Encoded(numbers.view(torch.uint8), positions(is_exact))

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

    Trained tables occupy few directions. Their rows are transformed into the basis of their principal components, all
    components are rounded to multiples of one step, and entropy-coded. The step is chosen so that the mean l2 error of
    a sample is not larger than that of ``error_of``. The error of each row is at most half a step times the root of its
    number of columns. If neither the basis nor the columns themselves take less space so, the shard is stored by
    ``error_of``.

    docs/concepts/quantization.md says what was measured of accuracy after restores.

    Attributes:
        error_of: The scheme whose error is met: ``AdaptiveAsymmetric``, ``Asymmetric`` or ``Symmetric``.

    Raises:
        ConfigurationError: ``error_of`` is another scheme.

    Examples:
        >>> rule = cnr.TransformCoded(error_of=cnr.AdaptiveAsymmetric(bits=4))
        >>> writer = cnr.CNRStorageWriter("run", quantization=rule)
        >>> metadata = dcp.save(state, checkpoint_id="run/step-3", storage_writer=writer, planner=planner)
        >>> cnr.load_table("run/step-3", "model.users.weight").shape
        torch.Size([1000, 16])
    """

    error_of: AdaptiveAsymmetric | Asymmetric | Symmetric = field(default_factory=lambda: AdaptiveAsymmetric(bits=4))

    def __post_init__(self) -> None:
        if not isinstance(self.error_of, AdaptiveAsymmetric | Asymmetric | Symmetric):
            raise ConfigurationError(f"'error_of' must be a uniform scheme (got {self.error_of!r})")

    def supports(self, dtype: torch.dtype) -> bool:
        """Return whether uniform schemes support ``dtype``."""
        return is_quantizable(dtype)

    def choose(self, sample: Sample, num_restores: int) -> Scheme:
        """Return a scheme with a transform that it learns from the sample, or ``error_of``."""
        rows = sample()
        return self.choose_for(rows, num_restores, len(rows), None)

    def choose_for(self, sample: Tensor, num_restores: int, num_rows: int, known: RowTransform | None) -> Scheme:
        """Return the scheme of a shard.

        A known transform is used as it is while the sample keeps the error with it. Otherwise it gets another step. A
        new basis is learned when rows take a tenth more bits than when the old one was, and must be worth its bytes.

        Args:
            sample: Some of the rows to store, [n, num_cols].
            num_restores: The number of restores of the training so far.
            num_rows: How many rows are stored.
            known: A transform that is stored already; None if there is none.
        """
        rows = sample.cpu()
        other = self.error_of.choose(lambda: rows, num_restores)
        error, num_cols = mean_error(other, rows), rows.shape[1]
        values = rows.double().numpy()
        values = values[np.isfinite(values).all(1)]
        if not 0 < error < np.inf or not len(values) or num_cols > MAX_COLS:
            return other
        found = [] if known is None else [_of(rows, known)]
        has_drifted = known is None or found[0].num_bytes > _DRIFT * known.bits_per_value * num_cols / 8
        if has_drifted or mean_error(found[0].scheme, rows) > error:
            bases = [None] if known is None or known.basis is None else [None, known.basis]
            found = [_of(rows, learned(values, error, basis)) for basis in bases]
        extra_bytes = basis_bytes(num_cols) / max(1, num_rows)  # for each row
        if has_drifted:
            new = _of(rows, learned(values, error, principal_components(values)))
            if new.num_bytes + extra_bytes < min(each.num_bytes for each in found):
                found = [replace(new, num_bytes=new.num_bytes + extra_bytes)]
        best = min(found, key=lambda each: each.num_bytes)
        is_better = best.num_bytes <= _MIN_GAIN * other.row_bytes(num_cols, rows.dtype)
        return best.scheme if is_better and mean_error(best.scheme, rows) <= error else other


@dataclass(frozen=True)
class _Candidate:
    """A scheme with a transform, and the bytes of a row of the sample."""

    scheme: Transformed
    num_bytes: float


def _of(rows: Tensor, transform: RowTransform) -> _Candidate:
    numbers = Transformed.by(transform).encode(rows).codes.view(torch.int16).numpy()
    num_bits = transform.num_bits(numbers) / max(1, len(rows))
    if transform.bits_per_value == 0:
        transform = replace(transform, bits_per_value=num_bits / transform.num_cols)
    return _Candidate(Transformed.by(transform), num_bits / 8)

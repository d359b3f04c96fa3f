"""The bytes of a baseline and of a delta, by kind, and the number of their data files.

Row layouts are those of the schemes, or measured. Manifests, headers of data files, and transforms with their bases are
not counted: together they are less than a thousandth of a checkpoint of some gigabytes.
"""

import math
from dataclasses import dataclass, replace

from torchrec_cnr.policies import separates_heat
from torchrec_cnr.quantization import AdaptiveAsymmetric, Asymmetric, Scheme, Symmetric
from torchrec_cnr.sizing.inputs import DTYPE, Sizing, Table
from torchrec_cnr.storage.pack_writer import BLOCK_BYTES, PACK_BYTES
from torchrec_cnr.tracking.modified_rows import MAX_HEAT

# The share of a row's tail that is left after compression, as measured: see docs/design/006-split-blobs.md.
_PACKED_VALUES = {"none": 3.4 / 4, "half": 1.3 / 2}  # by the name of the scheme
_PACKED_SCALES = 2.65 / 4
_ENTROPY_CODED = 0.95  # of codes, as measured: see docs/design/014-entropy-coded-codes.md
# The bytes per row number after compactions, which store rows of each heat and age separately. Also measured.
_COMPACTED_NUMBER_BYTES = 1.26


@dataclass(frozen=True)
class CheckpointBytes:
    """The bytes of a checkpoint.

    Attributes:
        num_bytes: All bytes.
        codes: The bytes of codes, or of values if these are stored exactly.
        scale_and_bias: The bytes of the scale and bias of each row.
        optimizer_state: The bytes of the row-wise optimizer state.
        row_numbers: The bytes of row numbers; 0 for a baseline, which stores all rows.
    """

    num_bytes: int
    codes: int
    scale_and_bias: int
    optimizer_state: int
    row_numbers: int


def checkpoint_bytes(sizing: Sizing, share: float | None = None) -> CheckpointBytes:
    """Return the bytes of a baseline, or of a delta.

    Args:
        sizing: The model.
        share: The share of the rows that the delta contains, more than 0 and at most 1; None for a baseline.

    Examples:
        >>> checkpoint_bytes(Sizing((Table(1_000_000, 64),))).codes
        32000000
    """
    stored = 1.0 if share is None else share
    codes = scales = 0.0
    for table in sizing.tables:
        of_codes, of_scales = _table_row_bytes(sizing, table)
        codes += stored * table.num_rows * of_codes
        scales += stored * table.num_rows * of_scales
    num_rows = stored * sizing.num_rows
    state = 0.0 if sizing.state is None else num_rows * sum(_row_bytes(sizing.state, 1))
    numbers = 0.0 if share is None else num_rows * row_number_bits(share) / 8
    parts = [round(num_bytes) for num_bytes in (codes, scales, state, numbers)]
    return CheckpointBytes(sum(parts), *parts)


def _table_row_bytes(sizing: Sizing, table: Table) -> tuple[float, float]:
    """Return the bytes per row of codes or values, and of scale and bias; if they were measured, all as codes."""
    if table.row_bytes is not None:
        return table.row_bytes, 0.0
    return _row_bytes(sizing.scheme_of(table), table.num_cols)


def _row_bytes(scheme: Scheme, num_cols: int) -> tuple[float, float]:
    """Return the bytes per row of codes or values, and of scale and bias."""
    if isinstance(scheme, Symmetric | Asymmetric | AdaptiveAsymmetric) and scheme.entropy_coded:
        codes, scales = _row_bytes(replace(scheme, entropy_coded=False), num_cols)
        return _ENTROPY_CODED * codes, scales
    tail_bytes = scheme.tail_bytes(num_cols, DTYPE)
    head_bytes = scheme.row_bytes(num_cols, DTYPE) - tail_bytes
    if scheme.name in _PACKED_VALUES:
        return head_bytes + _PACKED_VALUES[scheme.name] * tail_bytes, 0.0
    return head_bytes, _PACKED_SCALES * tail_bytes


def row_number_bits(share: float) -> float:
    """Return the bits per row number of a delta: the entropy H(p)/p, which the codings of row numbers nearly reach.

    Args:
        share: The share p of the rows that the delta contains, more than 0 and at most 1.

    Examples:
        >>> round(row_number_bits(0.26), 2)
        3.18
    """
    if share >= 1:
        return 0.0
    return -math.log2(share) - (1 - share) / share * math.log1p(-share) / math.log(2)


def compacted_row_number_bytes(sizing: Sizing) -> int:
    """Return the bytes of the row numbers of all rows after compactions."""
    return round(_COMPACTED_NUMBER_BYTES * sizing.num_rows)


def num_files(sizing: Sizing, share: float | None = None) -> int:
    """Return the number of data files of a baseline or a delta, over all ranks. Each is one request to write.

    The arguments are those of :func:`checkpoint_bytes`.
    """
    stored = 1.0 if share is None else share
    # Rows of different heat are in different files.
    num_partial = MAX_HEAT if share is not None and separates_heat(sizing.policy) else 0
    full = sum(stored * table.num_rows / _file_rows(sizing, table) for table in sizing.tables)
    return sizing.num_ranks * (math.ceil(full / sizing.num_ranks) + num_partial)


def _file_rows(sizing: Sizing, table: Table) -> int:
    """Return the number of rows that a data file holds: as many whole blocks as fit, at least one."""
    block_rows = max(1, BLOCK_BYTES // (table.num_cols * DTYPE.itemsize))
    row_bytes = sum(_table_row_bytes(sizing, table)) + (0 if sizing.state is None else sum(_row_bytes(sizing.state, 1)))
    return block_rows * max(1, math.floor(PACK_BYTES / (block_rows * row_bytes)))

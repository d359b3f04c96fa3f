"""The inputs of an estimate: the tables of a model, and how its checkpoints are saved."""

import math
from dataclasses import dataclass, field

import torch

from torchrec_cnr.arguments import check_count, check_positive, check_secs, check_type
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.policies import Compacted, Policy, check_policy
from torchrec_cnr.quantization import AdaptiveAsymmetric, NoQuantization, Scheme

# Check-N-Run's measured curve: 26 % of the rows are modified in one interval, and 52 % in eleven.
FIRST_SHARE, GROWTH = 0.26, 0.105
DTYPE = torch.float32  # of tables and of their optimizer state
MAX_ROWS = 10**15
MAX_COLS = 10**6


@dataclass(frozen=True)
class Table:
    """The size of an embedding table.

    Attributes:
        num_rows: The number of rows.
        num_cols: The number of values per row.
        row_bytes: The bytes of a row, with scale and bias, as an average that was measured. The size of transform-coded
            rows depends on their values. None if the scheme determines it.

    Raises:
        ConfigurationError: A number is less than 1, or too large, or ``row_bytes`` is not more than 0.

    Examples:
        >>> Table(1_000_000, 64).num_cols
        64
    """

    num_rows: int
    num_cols: int
    row_bytes: float | None = None

    def __post_init__(self) -> None:
        check_count("num_rows", self.num_rows, 1, MAX_ROWS)
        check_count("num_cols", self.num_cols, 1, MAX_COLS)
        if self.row_bytes is not None:
            check_positive("row_bytes", self.row_bytes)


@dataclass(frozen=True)
class Sizing:
    """A model of fp32 tables with row-wise optimizer state, and how its checkpoints are saved.

    Attributes:
        tables: The tables. Ranks share their rows evenly.
        modified: The share of the rows that are modified in one interval, more than 0 and at most 1.
        scheme: The quantization scheme of the tables without ``row_bytes``.
        state: The scheme of the row-wise optimizer state, which is one fp32 value per row; None if there is no state.
        interval_secs: The seconds between two checkpoints.
        policy: The policy. If it is ``Compacted``, the checkpoint chain is compacted after each save.
        num_ranks: The number of ranks.
        keep_last: The number of newest checkpoints that are kept.
        save_secs: The seconds within which a save should be written.
        run_secs: The length of the run in seconds.
        is_on_gpu: Whether the tables are on GPUs.

    Raises:
        ConfigurationError: An attribute is out of bounds.

    Examples:
        >>> Sizing((Table(1_000_000, 64),), modified=0.1).num_saves
        1440
    """

    tables: tuple[Table, ...]
    modified: float = FIRST_SHARE
    scheme: Scheme = field(default_factory=lambda: AdaptiveAsymmetric(4))
    state: Scheme | None = field(default_factory=NoQuantization)
    interval_secs: float = 1800.0
    policy: Policy = field(default_factory=Compacted)
    num_ranks: int = 1
    keep_last: int = 3
    save_secs: float = 300.0
    run_secs: float = 30 * 86400.0
    is_on_gpu: bool = False

    def __post_init__(self) -> None:
        check_type("tables", self.tables, tuple, "a tuple of Table")
        if not self.tables:
            raise ConfigurationError("'tables' must contain at least one Table (got none)")
        check_positive("modified", self.modified, most=1.0)
        check_secs("interval_secs", self.interval_secs)
        check_secs("save_secs", self.save_secs)
        check_secs("run_secs", self.run_secs)
        check_policy(self.policy)
        check_count("num_ranks", self.num_ranks, least=1)
        check_count("keep_last", self.keep_last, least=1)

    @property
    def num_rows(self) -> int:
        """The number of rows of all tables."""
        return sum(table.num_rows for table in self.tables)

    @property
    def rank_rows(self) -> int:
        """The number of rows of one rank, rounded up."""
        return -(-self.num_rows // self.num_ranks)

    @property
    def num_saves(self) -> int:
        """The number of checkpoints of the run, at least 1."""
        return max(1, math.floor(self.run_secs / self.interval_secs))

    @property
    def value_bytes(self) -> int:
        """The bytes of all values in fp32, with the optimizer state."""
        state_bytes = 0 if self.state is None else DTYPE.itemsize
        return sum(table.num_rows * (table.num_cols * DTYPE.itemsize + state_bytes) for table in self.tables)

    def scheme_of(self, table: Table) -> Scheme:
        """Return the scheme of a table: ``NoQuantization`` if codes would be no smaller than values, as in a save."""
        fits = self.scheme.row_bytes(table.num_cols, DTYPE) < table.num_cols * DTYPE.itemsize
        return self.scheme if fits else NoQuantization()

    def modified_in(self, num_intervals: int) -> float:
        """Return the share of the rows that several intervals modify together.

        This is the curve ``0.26 + 0.105 ln i`` that Check-N-Run measured, scaled to the share of one interval.

        Args:
            num_intervals: The number of intervals, at least 1.
        """
        return min(1.0, self.modified * (1 + GROWTH / FIRST_SHARE * math.log(num_intervals)))

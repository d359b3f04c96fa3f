"""Modified rows: which rows of the shards on this rank have changed, and since which checkpoint.

The life of a modified row::

    mark ──> marked ──freeze──> frozen ──commit──> modified since the baseline
               ^                   │
               └─────rollback──────┘

``freeze`` is the cut of a save: rows marked later belong to the next one. ``commit`` follows when the save's manifest
is in the store, ``rollback`` when it is not. One bool a row for each of the three sets, on the table's own device:
marking is then one ``index_fill_``, which no other representation came near (a set of row numbers grows without bound).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from weakref import WeakSet

import torch
from torch import Tensor

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.manifest import Head
from torchrec_cnr.rows import Box

_WINDOW_ROWS = 1 << 22  # rows whose numbers are worked out at once: 32 MiB as int64


class Since(Enum):
    """What the rows of a save were modified since, and so what its checkpoint is a delta of."""

    EVER = "ever"
    BASELINE = "baseline"
    HEAD = "head"


class ModifiedRows:
    """The modified rows of one shard of a table.

    Attributes:
        name: FQN of the table in its model, for messages.
        box: The shard's place in the table.
        marked: bool [num_rows]. Modified since the last cut.
        frozen: bool [num_rows], or None. Cut off for the save in flight.
        since_baseline: bool [num_rows]. In committed deltas since the baseline.
    """

    def __init__(self, name: str, box: Box, device: torch.device) -> None:
        self.name = name
        self.box = box
        self.marked = self._empty(device)
        self.frozen: Tensor | None = None
        self.since_baseline = self._empty(device)

    def _empty(self, device: torch.device) -> Tensor:
        return torch.zeros(self.box.num_rows, dtype=torch.bool, device=device)

    def mark(self, rows: Tensor) -> None:
        """Mark rows, numbered within the box; int [N], any order, repeats allowed."""
        self.marked.index_fill_(0, rows.long(), True)

    def mark_all(self) -> None:
        """Mark every row."""
        self.marked.fill_(True)

    def freeze(self) -> None:
        """Cut: what is marked becomes frozen, and nothing is marked."""
        self.frozen = self.marked.clone()
        self.marked.zero_()

    def commit(self, is_baseline: bool) -> None:
        """The frozen rows are in a committed checkpoint."""
        if self.frozen is None:
            return
        if is_baseline:
            self.since_baseline.zero_()
        else:
            self.since_baseline |= self.frozen
        self.frozen = None

    def rollback(self) -> None:
        """The frozen rows are in no checkpoint: they are marked again, beside those marked meanwhile."""
        if self.frozen is not None:
            self.marked |= self.frozen
            self.frozen = None

    def restore(self) -> None:
        """The table was overwritten from a checkpoint: nothing is modified."""
        self.frozen = None
        self.marked.zero_()
        self.since_baseline.zero_()

    def select(self, since: Since) -> "RowMask":
        """The frozen rows modified since then.

        Raises:
            ConfigurationError: Nothing is frozen.
        """
        if self.frozen is None:
            raise ConfigurationError(f"table {self.name!r}: no save is in flight")
        return RowMask(self.frozen if since is Since.HEAD else self.frozen | self.since_baseline)


@dataclass(frozen=True, eq=False)
class RowMask:
    """A set of rows of one shard.

    Attributes:
        mask: bool [num_rows].
    """

    mask: Tensor

    def __len__(self) -> int:
        return int(self.mask.count_nonzero())

    def blocks(self, block_rows: int) -> Iterator[Tensor]:
        """The members in increasing order, as int64 [block_rows] on the mask's device; the last may be shorter.

        Row numbers are worked out window by window, so that memory is bounded whatever the size of the shard.
        """
        rest = torch.empty(0, dtype=torch.int64, device=self.mask.device)
        for start in range(0, len(self.mask), _WINDOW_ROWS):
            found = self.mask[start : start + _WINDOW_ROWS].nonzero().squeeze(1) + start
            rest = torch.cat((rest, found)) if len(rest) else found
            num_whole = len(rest) // block_rows * block_rows
            yield from rest[:num_whole].split(block_rows) if num_whole else ()
            rest = rest[num_whole:]
        if len(rest):
            yield rest


@dataclass(frozen=True, eq=False)
class TrackedShard:
    """A shard of a table whose modified rows are known.

    Attributes:
        rows: Its modified rows.
        weight: Its values [num_rows, num_cols], shared with the model.
        state: The optimizer state of its rows, each [num_rows, ...], shared with the optimizer.
        is_state_replaceable: Whether the optimizer may put other tensors in its place, all of whose rows are then new.
    """

    rows: ModifiedRows
    weight: Tensor
    state: Callable[[], Sequence[Tensor]]
    is_state_replaceable: bool = False


@dataclass(frozen=True)
class Pending:
    """A save whose fate is not known yet.

    Attributes:
        path: Full path of its checkpoint.
        save_id: The save.
    """

    path: str
    save_id: str


_all_tracked: "WeakSet[TrackedRows]" = WeakSet()


class TrackedRows:
    """All shards of tables on this rank, and the checkpoint that their marks relate to.

    Attributes:
        shards: The shards.
        head: The checkpoint that ``marked`` rows were modified since, or None: then only a baseline is right.
        pending: The save in flight, once its rows were handed out.
        num_restores: Restores from a checkpoint that the tables have been through.
    """

    def __init__(self, shards: Sequence[TrackedShard]) -> None:
        self.shards = tuple(shards)
        self.head: Head | None = None
        self.pending: Pending | None = None
        self.num_restores = 0
        _all_tracked.add(self)

    @property
    def num_modified(self) -> int:
        """Rows marked on this rank since the last cut."""
        return sum(int(shard.rows.marked.count_nonzero()) for shard in self.shards)

    def freeze(self) -> None:
        """Cut every shard at once."""
        for shard in self.shards:
            shard.rows.freeze()

    def commit(self, head: Head) -> None:
        """The save in flight became ``head``."""
        for shard in self.shards:
            shard.rows.commit(is_baseline=len(head.lineage) == 1)
        self.head, self.pending = head, None

    def rollback(self) -> None:
        """The save in flight failed."""
        for shard in self.shards:
            shard.rows.rollback()
        self.pending = None

    def forget(self) -> None:
        """The tables are about to be overwritten: until :meth:`restore`, only a baseline is right."""
        self.head = self.pending = None

    def restore(self, head: Head) -> None:
        """The tables hold what ``head`` holds; ``since_baseline`` was set by whoever loaded it."""
        self.head, self.pending = head, None
        self.num_restores = head.num_restores + 1

    def restore_partly(self, head: Head) -> None:
        """The tables hold some of what ``head`` holds: they have been through its restores, and this one."""
        self.num_restores = max(self.num_restores, head.num_restores + 1)


def forget_overwritten(targets: Iterable[Tensor]) -> None:
    """Tensors are about to be loaded: whoever tracks one of them knows its rows no longer.

    A load planner that has the tracker restores it afterwards. Any other load, with DCP's own planner say, would
    otherwise leave rows that are modified and not marked, and the next delta would lack them.
    """
    storages = {target.untyped_storage().data_ptr() for target in targets if target.numel()}
    for tracked in _all_tracked:
        tensors = (tensor for shard in tracked.shards for tensor in (shard.weight, *shard.state()))
        if any(tensor.untyped_storage().data_ptr() in storages for tensor in tensors):
            tracked.forget()

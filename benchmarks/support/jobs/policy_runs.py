"""Runs of a policy: checkpoints of tables with given modified rows, saved for real or computed by their bytes.

The rate at which each row is modified is drawn once. The logarithms of the rates are uniform, up to the rate with which
the first delta contains 26 % of the rows. The share of rows modified in i intervals is then .26 + .105 ln i, the curve
fitted to the figures of Check-N-Run (NSDI '22, section 3.2).
"""

import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import fsspec
import numpy as np
import torch
from fsspec.implementations.memory import MemoryFileSystem
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

import torchrec_cnr as cnr
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.coverage import Mask
from torchrec_cnr.format.manifest import History
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.maintenance.background_upkeep import Upkeep
from torchrec_cnr.maintenance.pruning.retention import Keep
from torchrec_cnr.policies import Since
from torchrec_cnr.quantization import Quantization
from torchrec_cnr.tracking.modified_rows import ModifiedRows
from torchrec_cnr.tracking.tracked_tables import TrackedRows, TrackedShard

DIM = 64
FULL_ROW_BYTES = 4 * DIM + 4  # in fp32, with row-wise optimizer state
FIRST_SHARE, GROWTH = 0.26, 0.105
EXACT = cnr.NoQuantization()
EULER_GAMMA = 0.5772156649


@dataclass(frozen=True, eq=False)
class RunTable:
    """A table with its row-wise optimizer state.

    Attributes:
        name: The name of the table.
        rows: float32 [num_rows, DIM].
        state: float32 [num_rows].
    """

    name: str
    rows: Tensor
    state: Tensor

    @classmethod
    def random(cls, num_rows: int) -> "RunTable":
        """Return a table of random rows, the same in each call."""
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(num_rows, DIM, generator=generator) * 0.05
        return cls("table", rows, torch.rand(num_rows, generator=generator))

    @property
    def num_bytes(self) -> int:
        """The bytes of the rows and their state."""
        return self.rows.nbytes + self.state.nbytes

    def states(self) -> list[Tensor]:
        """Return the optimizer state, as trackers ask for it."""
        return [self.state]


@dataclass(frozen=True)
class Step:
    """Bytes of one checkpoint of a run that keeps the last checkpoint.

    Attributes:
        written: Bytes written for it, including its compaction.
        capacity: The most bytes in the store, from the commit until the replaced files were removed.
        kept: Bytes in the store afterwards.
        restore: Bytes that a load of it reads after its compaction.
        fresh: Bytes that a load of it reads before its compaction.
    """

    written: int
    capacity: int
    kept: int
    restore: int
    fresh: int


def modified_rows(num_rows: int, num_checkpoints: int) -> Iterator[Mask]:
    """Yield masks of the rows that each interval modifies, bool [num_rows]; each call yields the same masks."""
    generator = np.random.default_rng(0)
    chances = generator.permutation(_chances(num_rows))
    for _ in range(num_checkpoints):
        yield generator.random(num_rows) < chances


def _chances(num_rows: int) -> NDArray[np.float64]:
    """Return the probability of each row that an interval modifies it, float64 [num_rows], decreasing."""
    fastest = math.exp(FIRST_SHARE / GROWTH - EULER_GAMMA)
    return -np.expm1(-fastest * np.exp(-(np.arange(num_rows) + 0.5) / num_rows / GROWTH))


def least_written(dead_share: float) -> float:
    """Return about what a perfect compaction would write for each checkpoint, as a share of a full one.

    It would know the probability of each row, and store rows of equal probability in files of their own. A row modified
    with probability p is rewritten after n intervals without a change, so p / (1 - (1 - p)^n) of it is written for each
    checkpoint, and n times as much is kept. The best n for each p are those that share one price of kept bytes.

    Args:
        dead_share: The bytes of dead rows that it may keep, as a share of those of live ones.
    """
    chances = _chances(2_000)[:, None]
    intervals = np.unique(np.geomspace(1, 10_000, 400).round())
    written = chances / -np.expm1(intervals * np.log1p(-chances))
    dead = intervals * written - 1
    cheapest, dearest = 1e-6, 1e6
    for _ in range(50):
        price = math.sqrt(cheapest * dearest)
        best = np.argmin(written + price * dead, axis=1)[:, None]
        is_enough = np.take_along_axis(dead, best, 1).mean() <= dead_share
        cheapest, dearest = (cheapest, price) if is_enough else (price, dearest)
    return float(np.take_along_axis(written, best, 1).mean())


def saved(
    tables: Sequence[RunTable],
    policy: cnr.Policy,
    scheme: Quantization,
    masks: Iterable[Sequence[Mask]],
    pack_bytes: int,
    state_scheme: cnr.Scheme = EXACT,
) -> Iterator[Step]:
    """Save, compact and prune for real, into a file system in memory.

    Args:
        tables: The tables of the model.
        policy: The policy; with ``Compacted``, the run is compacted after each save.
        scheme: The scheme of the tables, or a rule that chooses it.
        masks: For each interval, a mask for each table of the rows that it modifies, bool [num_rows].
        pack_bytes: Approximate size of data files, in bytes.
        state_scheme: The scheme of the optimizer state.
    """
    root = f"memory://run-{uuid.uuid4().hex}"
    quantization = {"*.state": state_scheme, "*": scheme}
    writer = cnr.CNRStorageWriter(root, quantization=quantization, pack_bytes=pack_bytes)
    does_compact = isinstance(policy, cnr.Compacted)
    max_ratio = policy.max_ratio if isinstance(policy, cnr.Compacted) else 1.0
    upkeep = Upkeep(root, Keep(last=1), does_compact, max_ratio, pack_bytes)
    run = _Run(tables, policy)
    for number, own_masks in enumerate(masks):
        run.mark(own_masks)
        path = f"{root}/step-{number}"
        before = _stored_bytes(root)
        save(run.state, checkpoint_id=path, storage_writer=writer, planner=run.planner)
        written, capacity = _stored_bytes(root) - before, _stored_bytes(root)
        fresh = _restore_bytes(path)
        is_done = not does_compact
        while not is_done:
            before = _stored_bytes(root)
            is_done = upkeep.compact_some(cnr.read_checkpoint(path))
            written += _stored_bytes(root) - before
            capacity = max(capacity, _stored_bytes(root))
            upkeep.prune()
        upkeep.prune()
        yield Step(written, capacity, _stored_bytes(root), _restore_bytes(path), fresh)
    fsspec.filesystem("memory").rm(root, recursive=True)


class _Run:
    """Tables with their optimizer state, in a run of checkpoints."""

    def __init__(self, tables: Sequence[RunTable], policy: cnr.Policy) -> None:
        device = torch.device("cpu")
        self._rows = [ModifiedRows(table.name, Box.whole(tuple(table.rows.shape)), device) for table in tables]
        self.state = {table.name: table.rows for table in tables}
        self.state |= {f"{table.name}.state": table.state for table in tables}
        shards = [TrackedShard(rows, table.rows, table.states) for rows, table in zip(self._rows, tables, strict=True)]
        self.planner = cnr.CNRSavePlanner(TrackedRows(shards), policy=policy)

    def mark(self, masks: Sequence[Mask]) -> None:
        """Mark the rows of each table that its mask says."""
        for rows, mask in zip(self._rows, masks, strict=True):
            rows.mark_where(torch.from_numpy(mask))


def _stored_bytes(root: str) -> int:
    folder = root.removeprefix("memory:/") + "/"  # `du` would look through all files for each file
    return sum(file.size for path, file in MemoryFileSystem.store.items() if path.startswith(folder))


def _restore_bytes(path: str) -> int:
    return sum(found.manifest.blob_bytes + found.manifest_bytes for found in read_lineage(path).checkpoints)


def simulated(
    policy: cnr.Policy, full_bytes: int, masks: Iterable[Mask], number_bytes: Callable[[NDArray[np.int64]], int]
) -> Iterator[Step]:
    """Compute the bytes of checkpoints: a row takes as much in a delta as in a full checkpoint, plus its number.

    Args:
        policy: The policy, which must not need compaction.
        full_bytes: Bytes of a full checkpoint.
        masks: Masks of the rows that each interval modifies, bool [num_rows].
        number_bytes: Returns the bytes that row numbers, int64 [k], take.
    """
    since_baseline = np.zeros(0, dtype=np.bool_)
    history: History | None = None
    kept = 0
    for mask in masks:
        since = Since.EVER if history is None else policy.decide(history)
        since_baseline = np.zeros_like(mask) if since is Since.EVER else since_baseline | mask
        stored = since_baseline if since is Since.BASELINE else mask
        own = full_bytes
        if since is not Since.EVER:
            own = round(full_bytes * stored.mean()) + number_bytes(np.flatnonzero(stored))
        below = full_bytes if since is Since.BASELINE else kept
        needed = own + (0 if since is Since.EVER else below)
        yield Step(own, max(kept, needed - own) + own, needed, needed, needed)
        history = _extended(history, since, own)
        kept = needed


def _extended(history: History | None, since: Since, num_bytes: int) -> History:
    if history is None or since is Since.EVER:
        return History(num_bytes)
    return History(history.baseline_bytes, (*history.delta_bytes, num_bytes))

"""The plan of a compaction: which data files of a lineage are rewritten, and how many bytes that copies and saves.

The trainer does not take part in a compaction. Its next delta names its parent as before, and loads find the new
manifest in the parent's directory. A compaction that dies leaves files that no checkpoint uses.

Files are chosen by benefit and cost, as in log-structured file systems (Rosenblum and Ousterhout, SOSP '91). The
benefit is the space that is freed, times how long it is likely to remain free: old rows are seldom overwritten soon.
The cost is the bytes to copy. Age counts by its square root, the best of the functions tried on Check-N-Run's workload.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torchrec_cnr.arguments import check_count
from torchrec_cnr.errors import CheckpointNotFoundError, DamagedError
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.human_text import bytes_text, count_text, url_text
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_lineage
from torchrec_cnr.lineage.other_roots import lies_in_other_root
from torchrec_cnr.maintenance.compaction.live_rows import (
    MergedChain,
    PackUse,
    Piece,
    live_transforms,
    merge,
    survey,
    uses_of,
)
from torchrec_cnr.policies import MAX_RATIO, check_max_ratio
from torchrec_cnr.storage.pack_reader import PackReader, place_of
from torchrec_cnr.storage.pack_writer import check_thread_count
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store

_NUM_NAMED = 5  # ancestors that a message lists


@dataclass(frozen=True)
class CompactionPlan:
    """The plan of a compaction. Print it as a dry run, and pass it to :func:`execute` to do it.

    Attributes:
        run: The checkpoints to merge, oldest first.
        parent: The checkpoint that they are based on; None if the oldest of them is the baseline.
        merged: The contents of all of them.
        uses: How much of each of their data files is live.
        num_live: The number of live rows of each blob, by the key of its piece.
        partial: The shards, by FQN and index, with rows that were overwritten in some of their columns only.
        rewritten: The indices of the data files whose live rows are copied.
        max_ratio: The bytes that a restore may read after the compaction, per byte that it needs.
        empties_log: Whether everything that is in Kafka is copied.

    Examples:
        >>> plan = cnr.plan_compaction("run/step-2")
        >>> [checkpoint.kind for checkpoint in plan.run]
        ['baseline', 'delta']
        >>> plan.live_bytes <= plan.bytes_after <= plan.bytes_before
        True
    """

    run: tuple[Checkpoint, ...]
    parent: Checkpoint | None
    merged: MergedChain
    uses: tuple[PackUse, ...]
    num_live: Mapping[str, int]
    partial: frozenset[tuple[str, int]]
    rewritten: frozenset[int]
    max_ratio: float
    empties_log: bool = False

    @property
    def newest(self) -> Checkpoint:
        """Return the checkpoint that gets a new manifest."""
        return self.run[-1]

    @property
    def is_needed(self) -> bool:
        """Return whether the compaction would change anything."""
        return bool(self.rewritten) or len(self.run) > 1

    @property
    def is_enough(self) -> bool:
        """Return whether no further compaction is needed after this one."""
        return self.bytes_after <= self.max_ratio * self.live_bytes

    @property
    def live_bytes(self) -> int:
        """Return the bytes that a load needs: those of the newest version of every row, and of the rest."""
        return sum(use.live_bytes for use in self.uses)

    @property
    def bytes_before(self) -> int:
        """Return the bytes of all data files that a restore reads now."""
        return sum(use.pack.num_bytes for use in self.uses)

    @property
    def moved_bytes(self) -> int:
        """Return the bytes to copy."""
        return sum(self.uses[number].moved_bytes for number in self.rewritten)

    @property
    def bytes_after(self) -> int:
        """Return the bytes of all data files that a restore reads afterwards.

        Row numbers that are in another file than their rows count as live.
        """
        return self.bytes_before - sum(self.uses[number].dead_bytes for number in self.rewritten)

    @property
    def transforms(self) -> Mapping[Blob, str]:
        """Return the blobs of the transforms that live rows have, with names for messages."""
        return live_transforms(self.merged, self.num_live)

    def restricted(self, max_moved_bytes: int) -> "CompactionPlan":
        """Return a part of the plan that copies at most ``max_moved_bytes``, or one file."""
        return replace(self, rewritten=_rewritten(self, max_moved_bytes, self_contained=False))

    def stays(self, piece: Piece) -> bool:
        """Return whether the new manifest uses a piece in its present file: it has live rows and is not moved."""
        return self.num_live[piece.key] > 0 and piece.blob.pack not in self.rewritten

    def moves(self, piece: Piece) -> bool:
        """Return whether the live rows of a piece are copied to new files."""
        return self.num_live[piece.key] > 0 and piece.blob.pack in self.rewritten

    @cached_property
    def _interval_ns(self) -> int:
        """Return the time between the two newest sets of rows, in nanoseconds."""
        now_ns = self.newest.created_ns
        return now_ns - max((use.written_ns for use in self.uses if use.written_ns < now_ns), default=now_ns - 1)

    def age(self, use: PackUse) -> float:
        """Return the age of a data file's rows, in intervals between checkpoints."""
        return max(0, self.newest.created_ns - use.written_ns) / self._interval_ns

    def __repr__(self) -> str:
        merged = f"merges {count_text(len(self.run), 'checkpoint')}" if self.is_needed else "nothing to compact"
        files = f"rewrites {len(self.rewritten):,} of {count_text(len(self.uses), 'file')}"
        copied = f"copies {bytes_text(self.moved_bytes)}"
        return f"CompactionPlan({merged}, {files}, {copied}, {url_text(self.newest.store.url)})"

    def __str__(self) -> str:
        if not self.is_needed:
            return f"{self.newest.store.url}: nothing to compact"
        models = (
            f"{self.bytes_before / max(1, self.live_bytes):.2f}x → {self.bytes_after / max(1, self.live_bytes):.2f}x"
        )
        return (
            f"{self.newest.store.url}: merges {count_text(len(self.run), 'checkpoint')} into one; rewrites "
            f"{len(self.rewritten)} of {count_text(len(self.uses), 'file')} ({self.moved_bytes:,} bytes copied); "
            f"restore read amplification: {models}"
        )


def plan_compaction(
    path: str | os.PathLike[str] | Store,
    *,
    since: str | os.PathLike[str] | None = None,
    max_ratio: float = MAX_RATIO,
    max_moved_bytes: int | None = None,
    self_contained: bool = False,
    empties_log: bool = False,
    row_log: RowLog | None = None,
    thread_count: int = 2,
) -> CompactionPlan:
    """Plan how to merge a checkpoint chain, or its newest deltas, into one checkpoint. This reads only row numbers.

    Data of checkpoints under another root is always copied, so that the new manifest does not need that root.

    Args:
        path: The newest checkpoint to merge, as a path or fsspec URL.
        since: An ancestor, which becomes the parent. Only newer checkpoints are merged. None merges the whole chain.
        max_ratio: The bytes that a restore may read afterwards, per byte that it needs; at least 1, by default 1.16.
            A smaller ratio copies more.
        max_moved_bytes: Copy at most this many bytes, or one file. The next compaction continues. In between, files
            that are no longer needed can be pruned, so that less additional space is needed at a time.
        self_contained: Copy everything from other checkpoints' directories and from Kafka, so that the checkpoint needs
            only its own directory.
        row_log: The Kafka topic that contains the rows of deltas, if they are not in files (``KafkaRows``).
        empties_log: Copy everything from Kafka, because a topic deletes its records after some time.
        thread_count: Number of requests in flight at the same time. Each takes up to 16 MiB of memory.

    Raises:
        ConfigurationError: An argument is out of its range.
        CheckpointNotFoundError: ``since`` is not an ancestor of ``path``.
        DamagedError, VersionError, StoreError: The chain cannot be read.

    Examples:
        >>> cnr.plan_compaction("run/step-2", max_ratio=1).is_needed
        True
    """
    check_max_ratio(max_ratio)
    if max_moved_bytes is not None:
        check_count("max_moved_bytes", max_moved_bytes)
    check_thread_count(thread_count)
    lineage = read_lineage(Store.open(path, row_log=row_log)).checkpoints
    parent, run = _split(lineage, since)
    merged = merge(run)
    _check_sizes(run[-1].store, merged)
    reader = PackReader(run[-1].store, merged.packs, thread_count)
    num_live, partial = survey(run[-1], merged, reader, is_filled=parent is None)
    plan = CompactionPlan(
        run=run,
        parent=parent,
        merged=merged,
        uses=uses_of(merged, num_live),
        num_live=num_live,
        partial=partial,
        rewritten=frozenset(),
        max_ratio=max_ratio,
        empties_log=empties_log,
    )
    most_bytes = math.inf if max_moved_bytes is None else max_moved_bytes
    return replace(plan, rewritten=_rewritten(plan, most_bytes, self_contained))


def _check_sizes(store: Store, merged: MergedChain) -> None:
    """Raise a ``DamagedError`` for missing or truncated data files, before a survey that may take long."""
    files = {directory: store.at(directory or ".").listing().files for directory in {p.directory for p in merged.packs}}
    for pack in merged.packs:
        if pack.log is not None:
            continue
        num_bytes = files[pack.directory].get(pack.name)
        if num_bytes == pack.num_bytes:
            continue
        found = f"truncated: expected {pack.num_bytes} bytes, got {num_bytes}"
        if num_bytes is None:
            found = "the data file is missing"
        raise DamagedError(f"{place_of(store.at(pack.directory or '.'), pack)}: {found}; use another checkpoint")


def _split(
    lineage: Sequence[Checkpoint], since: str | os.PathLike[str] | None
) -> tuple[Checkpoint | None, tuple[Checkpoint, ...]]:
    if since is None:
        return None, tuple(lineage)
    since_store = Store.open(since)
    for index, checkpoint in enumerate(lineage[:-1]):
        if checkpoint.store.path == since_store.path and checkpoint.store.is_beside(since_store):
            return checkpoint, tuple(lineage[index + 1 :])
    ancestor_urls = [checkpoint.store.url for checkpoint in reversed(lineage[:-1])]
    more = f" and {len(ancestor_urls) - _NUM_NAMED} more" if len(ancestor_urls) > _NUM_NAMED else ""
    raise CheckpointNotFoundError(
        f"{since_store.url} is not an ancestor of {lineage[-1].store.url}; its ancestors are "
        f"{', '.join(ancestor_urls[:_NUM_NAMED]) or 'none'}{more}"
    )


def _rewritten(plan: CompactionPlan, max_moved_bytes: float, self_contained: bool) -> frozenset[int]:
    """Return the indices of the data files to rewrite.

    These are all files that must be, such as those of other roots or without live rows. Then come those with the best
    ratio of benefit and cost, until a restore reads few enough bytes.
    """
    uses = plan.uses
    rewritten = {
        number
        for number, use in enumerate(uses)
        if use.moved_bytes == 0
        or (self_contained and not use.pack.is_own_file)
        or lies_in_other_root(use.pack)
        or (plan.empties_log and use.pack.log is not None)
    }
    excess_bytes = (
        plan.bytes_before - plan.max_ratio * plan.live_bytes - sum(uses[number].dead_bytes for number in rewritten)
    )
    moved_bytes = sum(uses[number].moved_bytes for number in rewritten)
    chosen = []
    for number in sorted((n for n in range(len(uses)) if n not in rewritten), key=lambda n: -_merit(plan, uses[n])):
        if excess_bytes <= 0 or (moved_bytes and moved_bytes + uses[number].moved_bytes > max_moved_bytes):
            break
        if uses[number].dead_bytes > 0:
            chosen.append(number)
            excess_bytes -= uses[number].dead_bytes
            moved_bytes += uses[number].moved_bytes
    for number in reversed(chosen):
        if excess_bytes + uses[number].dead_bytes <= 0:  # files that were chosen later free enough without this one
            chosen.remove(number)
            excess_bytes += uses[number].dead_bytes
    return frozenset(rewritten.union(chosen))


def _merit(plan: CompactionPlan, use: PackUse) -> float:
    live_share = use.live_bytes / use.pack.num_bytes
    return (1 - live_share) * math.sqrt(plan.age(use) + 0.5) / max(live_share, 1e-9)

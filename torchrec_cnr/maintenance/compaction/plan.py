"""The plan of a compaction: which files of a lineage are victims, and what folding its checkpoints into one comes to.

The trainer takes no part in a compaction: its next delta names its parent as before, and finds the new manifest in the
parent's directory. A compaction that dies leaves files that nobody uses.

Which files to choose is what log-structured stores have long known (Rosenblum and Ousterhout, SOSP '91): by benefit and
cost. Benefit is the room that is freed, and how long it is likely to stay free: old rows are seldom overwritten soon.
Its cost is what must be copied. The root of the age was the best of those tried on the curve of Check-N-Run.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torchrec_cnr.arguments import check_count
from torchrec_cnr.errors import CheckpointNotFoundError, DamagedError
from torchrec_cnr.human_text import bytes_text, count_text, url_text
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_lineage
from torchrec_cnr.lineage.other_roots import lies_in_other_root
from torchrec_cnr.maintenance.compaction.live_rows import Flat, PackUse, Piece, flatten, survey, uses_of
from torchrec_cnr.policies import MAX_RATIO, check_max_ratio
from torchrec_cnr.storage.pack_reader import PackReader, place_of
from torchrec_cnr.storage.pack_writer import check_thread_count
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store

_NUM_NAMED = 5  # ancestors in a message


@dataclass(frozen=True)
class CompactionPlan:
    """What a compaction would do.

    Attributes:
        run: The checkpoints that become one, oldest first.
        parent: The one they stand on, or None where their oldest is the lineage's baseline.
        flat: All that they hold.
        uses: Of each of their packs.
        num_live: Live rows of each blob of rows, by the key of its piece.
        partial: Shards, by FQN and index, some of whose rows were overwritten in some columns only.
        victims: Which packs' live rows are copied, by index.
        max_ratio: How much a restore may read in the end, of what it needs.
        empties_log: Whether all that lies in a log is copied.
    """

    run: tuple[Checkpoint, ...]
    parent: Checkpoint | None
    flat: Flat
    uses: tuple[PackUse, ...]
    num_live: Mapping[str, int]
    partial: frozenset[tuple[str, int]]
    victims: frozenset[int]
    max_ratio: float
    empties_log: bool = False

    @property
    def newest(self) -> Checkpoint:
        """The checkpoint that gets a new manifest."""
        return self.run[-1]

    @property
    def is_needed(self) -> bool:
        """Whether it would change anything."""
        return bool(self.victims) or len(self.run) > 1

    @property
    def is_enough(self) -> bool:
        """Whether nothing is left to do afterwards."""
        return self.bytes_after <= self.max_ratio * self.live_bytes

    @property
    def live_bytes(self) -> int:
        """What a load sees: about as much as all of it takes that was ever stored, stored once."""
        return sum(use.live_bytes for use in self.uses)

    @property
    def bytes_before(self) -> int:
        """Of all files that a restore needs now."""
        return sum(use.pack.num_bytes for use in self.uses)

    @property
    def moved_bytes(self) -> int:
        """What is copied."""
        return sum(self.uses[number].moved_bytes for number in self.victims)

    @property
    def bytes_after(self) -> int:
        """Of all files that a restore needs afterwards; row numbers in other files than their rows count as live."""
        return self.bytes_before - sum(self.uses[number].dead_bytes for number in self.victims)

    def restricted(self, max_moved_bytes: int) -> "CompactionPlan":
        """A part of the plan that copies no more than that, or one file."""
        return replace(self, victims=_victims(self, max_moved_bytes, self_contained=False))

    def stays(self, piece: Piece) -> bool:
        """Whether the new manifest uses a piece of a folded tensor where it is: it has live rows, and is not moved."""
        return self.num_live[piece.key] > 0 and piece.blob.pack not in self.victims

    @cached_property
    def _interval_ns(self) -> int:
        """Time between the newest rows and those before."""
        now_ns = self.newest.created_ns
        return now_ns - max((use.written_ns for use in self.uses if use.written_ns < now_ns), default=now_ns - 1)

    def age(self, use: PackUse) -> float:
        """Of a pack's rows, in intervals between checkpoints."""
        return max(0, self.newest.created_ns - use.written_ns) / self._interval_ns

    def __repr__(self) -> str:
        merged = f"merges {count_text(len(self.run), 'checkpoint')}" if self.is_needed else "nothing to compact"
        files = f"rewrites {len(self.victims):,} of {count_text(len(self.uses), 'file')}"
        copied = f"copies {bytes_text(self.moved_bytes)}"
        return f"CompactionPlan({merged}, {files}, {copied}, {url_text(self.newest.store.url)})"

    def __str__(self) -> str:
        if not self.is_needed:
            return f"{self.newest.store.url}: nothing to compact"
        models = (
            f"{self.bytes_before / max(1, self.live_bytes):.2f} to {self.bytes_after / max(1, self.live_bytes):.2f}"
        )
        return (
            f"{self.newest.store.url}: {len(self.run)} checkpoints become one; {len(self.victims)} of {len(self.uses)} "
            f"files are rewritten, {self.moved_bytes:,} bytes of them copied; what a restore reads goes from {models} "
            "times what it needs"
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
    """Work out how to fold a lineage, or the newest deltas of it, into one checkpoint. Reads row numbers only.

    What lies with checkpoints of another root is always copied, so that the new manifest needs no file there.

    Args:
        path: The newest checkpoint of those that become one.
        since: One of its ancestors, which becomes its parent; None folds the lineage down to its baseline.
        max_ratio: How much a restore may read in the end, of what it needs, at least 1. The less, the more is copied.
        max_moved_bytes: Copy no more than that, or one file: what is left to do, the next compaction does. Meanwhile
            files that are no longer needed can be pruned, so that less room is taken at a time.
        self_contained: Copy all that lies in other checkpoints' directories or in a log, too, so that these are needed
            no more.
        row_log: The log that rows of deltas went to, if they did: ``KafkaRows``.
        empties_log: Copy all that lies in a log, which forgets it one day, whatever is needed of it.
        thread_count: Requests in flight at once. Each takes up to 16 MiB of memory.

    Raises:
        ConfigurationError: An argument cannot work.
        CheckpointNotFoundError: ``since`` is no ancestor of ``path``.
        DamagedError, VersionError, StoreError: The lineage cannot be read.
    """
    check_max_ratio(max_ratio)
    if max_moved_bytes is not None:
        check_count("max_moved_bytes", max_moved_bytes)
    check_thread_count(thread_count)
    lineage = read_lineage(Store.open(path, row_log=row_log)).checkpoints
    parent, run = _split(lineage, since)
    flat = flatten(run)
    _check_sizes(run[-1].store, flat)
    reader = PackReader(run[-1].store, flat.packs, thread_count)
    num_live, partial = survey(run[-1], flat, reader, is_filled=parent is None)
    plan = CompactionPlan(
        run=run,
        parent=parent,
        flat=flat,
        uses=uses_of(flat, num_live),
        num_live=num_live,
        partial=partial,
        victims=frozenset(),
        max_ratio=max_ratio,
        empties_log=empties_log,
    )
    most = math.inf if max_moved_bytes is None else max_moved_bytes
    return replace(plan, victims=_victims(plan, most, self_contained))


def _check_sizes(store: Store, flat: Flat) -> None:
    """Refuse packs that are not there in full: a table may be as large as a manifest says, and take as long."""
    files = {directory: store.at(directory or ".").listing().files for directory in {p.directory for p in flat.packs}}
    for pack in flat.packs:
        num_bytes = files[pack.directory].get(pack.name, 0)
        if pack.log is None and num_bytes != pack.num_bytes:
            raise DamagedError(
                f"{place_of(store.at(pack.directory or '.'), pack)}: truncated: expected {pack.num_bytes} bytes, got "
                f"{num_bytes}; use another checkpoint"
            )


def _split(
    lineage: Sequence[Checkpoint], since: str | os.PathLike[str] | None
) -> tuple[Checkpoint | None, tuple[Checkpoint, ...]]:
    if since is None:
        return None, tuple(lineage)
    wanted = Store.open(since)
    for number, checkpoint in enumerate(lineage[:-1]):
        if checkpoint.store.path == wanted.path and checkpoint.store.is_beside(wanted):
            return checkpoint, tuple(lineage[number + 1 :])
    below = [checkpoint.store.url for checkpoint in reversed(lineage[:-1])]
    more = f" and {len(below) - _NUM_NAMED} more" if len(below) > _NUM_NAMED else ""
    raise CheckpointNotFoundError(
        f"{wanted.url} is not below {lineage[-1].store.url}, which stands on "
        f"{', '.join(below[:_NUM_NAMED]) or 'nothing'}{more}"
    )


def _victims(plan: CompactionPlan, max_moved_bytes: float, self_contained: bool) -> frozenset[int]:
    """Packs of other roots or without live rows, and the best others, until the rest is small enough."""
    uses = plan.uses
    victims = {
        number
        for number, use in enumerate(uses)
        if use.moved_bytes == 0
        or (self_contained and not use.pack.is_own_file)
        or lies_in_other_root(use.pack)
        or (plan.empties_log and use.pack.log is not None)
    }
    excess = plan.bytes_before - plan.max_ratio * plan.live_bytes - sum(uses[number].dead_bytes for number in victims)
    moved_bytes = sum(uses[number].moved_bytes for number in victims)
    chosen = []
    for number in sorted((n for n in range(len(uses)) if n not in victims), key=lambda n: -_merit(plan, uses[n])):
        if excess <= 0 or (moved_bytes and moved_bytes + uses[number].moved_bytes > max_moved_bytes):
            break
        if uses[number].dead_bytes > 0:
            chosen.append(number)
            excess -= uses[number].dead_bytes
            moved_bytes += uses[number].moved_bytes
    for number in reversed(chosen):
        if excess + uses[number].dead_bytes <= 0:  # what came behind it has freed enough without it
            chosen.remove(number)
            excess += uses[number].dead_bytes
    return frozenset(victims.union(chosen))


def _merit(plan: CompactionPlan, use: PackUse) -> float:
    share = use.live_bytes / use.pack.num_bytes
    return (1 - share) * math.sqrt(plan.age(use) + 0.5) / max(share, 1e-9)

"""The plan of a prune: what will be removed, in which order, and what is kept and why. Its text is a dry run.

It is computed from a catalog without I/O. These will be removed:

- each checkpoint that is not kept, see ``kept``: its manifests, and its packs, except those that others use;
- packs that no checkpoint uses any more, in directories of checkpoints that are kept or were pruned before;
- what saves and compactions that died have left: in a directory with a manifest, or with a lease that has run out.

Everything else is kept: files of other names, and directories that are not recognised as ours. A directory with a lease
in force is left alone entirely.
"""

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torchrec_cnr.arguments import check_count
from torchrec_cnr.errors import ConfigurationError, StoreError
from torchrec_cnr.format.manifest import MANIFEST_FILE, PACK_SUFFIX
from torchrec_cnr.human_text import bytes_text, count_text, instant_text, name_text, url_text
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.maintenance import journal
from torchrec_cnr.maintenance.catalog import Catalog, Entry, read_catalog, total_bytes
from torchrec_cnr.maintenance.file_names import (
    in_order,
    is_beside_packs,
    is_pack,
    is_temporary,
    is_uncommitted,
    log_bytes,
    packs_of,
    save_id,
    written_bytes,
)
from torchrec_cnr.maintenance.journal import Journal, PrunedCheckpoint
from torchrec_cnr.maintenance.pruning.kept import Kept, Needs, find_kept, lease_text, needed_by
from torchrec_cnr.maintenance.pruning.retention import Keep, check_keep
from torchrec_cnr.maintenance.restore_bytes import all_restore_bytes
from torchrec_cnr.storage.leases import is_lease
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Removal:
    """What goes from one directory.

    Attributes:
        entry: The directory.
        files: Names, in the order in which they are removed.
        pruned: What the journal tells of the checkpoint, if that goes; or None.
        takes_directory: Whether nothing is left in it, and it goes, too.
        loading: Checkpoints that stay, and needed something of this before they were compacted: who has begun to load
            one of them then still does.
    """

    entry: Entry
    files: tuple[str, ...]
    pruned: PrunedCheckpoint | None
    takes_directory: bool
    loading: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return sum(self.entry.files[name] for name in self.files)

    @property
    def is_dead_save(self) -> bool:
        """Whether it is all that a save that died has left."""
        return self.takes_directory and bool(self.files) and self.entry.checkpoint is None

    def __str__(self) -> str:
        if self.pruned is not None:
            what = f"{self.pruned.kind} of {instant_text(self.pruned.created_ns)}"
        elif self.is_dead_save:
            what = f"{count_text(len(self.files), 'file')} of a save that died"
        elif self.files:
            what = f"{count_text(len(self.files), 'file')} that nothing uses"
        else:
            what = "empty directory"
        return f"{name_text(self.entry.name)}: {what}, {bytes_text(self.num_bytes)}"


@dataclass(frozen=True)
class PrunePlan:
    """What a prune will do.

    Attributes:
        catalog: What there is.
        keep: What was asked for.
        now_ns: Unix time for which it was made, in nanoseconds.
        removals: What goes, in the order in which it goes: checkpoints, newest first, then what nothing uses.
        stays: Every directory of which something stays, and why.
        folds_journal: Whether the journal's files become one.
        is_now_given: Whether the caller gave ``now_ns``. Otherwise the execution asks the store for the time.
    """

    catalog: Catalog
    keep: Keep
    now_ns: int
    removals: tuple[Removal, ...]
    stays: Mapping[str, tuple[str, ...]]
    folds_journal: bool
    is_now_given: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.removals or self.folds_journal or self.catalog.journal.abandoned)

    @cached_property
    def pruned(self) -> tuple[PrunedCheckpoint, ...]:
        """The checkpoints that go, newest first."""
        return tuple(removal.pruned for removal in self.removals if removal.pruned is not None)

    @cached_property
    def died(self) -> tuple[str, ...]:
        """Directories of saves that died, that go."""
        return tuple(removal.entry.name for removal in self.removals if removal.is_dead_save)

    @cached_property
    def told(self) -> Journal:
        """What the journal is told before anything goes, by which the next prune recognises what is left of it."""
        return Journal(self.pruned, frozenset(self.died))

    @cached_property
    def freed_bytes(self) -> int:
        """Bytes of all files that go."""
        return sum(removal.num_bytes for removal in self.removals)

    @cached_property
    def left_bytes(self) -> int:
        """Bytes of all files that stay in the root and its directories, the journal's not counted."""
        there = total_bytes(self.catalog.entries.values()) + sum(self.catalog.files.values())
        return there - self.freed_bytes

    def __repr__(self) -> str:
        removed = f"removes {count_text(len(self.pruned), 'checkpoint')}, frees {bytes_text(self.freed_bytes)}"
        return f"PrunePlan({removed}, leaves {bytes_text(self.left_bytes)}, {url_text(self.catalog.root.url)})"

    def __str__(self) -> str:
        lines = [f"{name_text(self.catalog.root.url)}: keep {self.keep}"]
        lines += [f"  goes   {removal}" for removal in self.removals]
        lines += [f"  stays  {name_text(name)}: {'; '.join(reasons)}" for name, reasons in self.stays.items()]
        gone = count_text(len(self.pruned), "checkpoint")
        lines.append(f"{gone} to remove, {bytes_text(self.freed_bytes)} to free, {bytes_text(self.left_bytes)} left")
        return "\n".join(lines)


_NUM_NAMED = 3  # files in a reason


def plan_prune(
    root: str | os.PathLike[str] | Catalog,
    keep: Keep | None = None,
    *,
    row_log: RowLog | None = None,
    now_ns: int | None = None,
) -> PrunePlan:
    """Work out what to remove.

    Checkpoints under other roots that stand on ones here are not seen: the tag tells that their save gave its parent.

    Args:
        root: A directory of checkpoints, path or fsspec URL; or its catalog, from which everything is worked out.
        keep: Which checkpoints are wanted; by default the last three, and those that are tagged.
        row_log: The log that rows of deltas went to, if they did: ``KafkaRows``. It tells what was committed; none is
            removed from it. Without it, what it may have committed stays. A catalog was read with it.
        now_ns: Unix time in nanoseconds by which leases have run out or not; by default the present.

    Raises:
        ConfigurationError: There are checkpoints, and none of them would be kept; or there is no such log.
        StoreError: The root cannot be listed, or the log does not answer in time.
    """
    check_keep(keep)
    if now_ns is not None:
        check_count("now_ns", now_ns)
    if row_log is not None and not row_log.open(may_make=False):  # it would say of no save that it was committed
        raise ConfigurationError(
            f"'row_log': there is no topic {row_log.topic!r}; pass the one that rows went to, or None"
        )
    catalog = root if isinstance(root, Catalog) else read_catalog(root, row_log=row_log)
    keep = Keep() if keep is None else keep
    plan_ns = _present_ns(catalog.root) if now_ns is None else now_ns
    plan = _Planner(catalog, find_kept(catalog, keep, plan_ns), plan_ns).plan(keep)
    return replace(plan, is_now_given=now_ns is not None)


def _present_ns(root: Store) -> int:
    """Return the time by the store's clock, or by this machine's if the store does not tell: a plan removes nothing."""
    try:
        return root.now_ns()
    except StoreError as error:
        logger.info("pruning is planned by this machine's clock, since the store does not tell the time: %s", error)
        return time.time_ns()


def record_of(
    catalog: Catalog, entry: Entry, checkpoint: Checkpoint, restore_bytes: int | None, removed_ns: int
) -> PrunedCheckpoint:
    """What the journal tells of a checkpoint once it is removed."""
    saved = checkpoint.committed
    parent = None if saved.parent is None else catalog.name_of(checkpoint.store.at(saved.parent.path))
    packs = packs_of(checkpoint) | {name for name in entry.files if is_pack(name)}
    replacements = checkpoint.manifests[1:]
    return PrunedCheckpoint(
        name=entry.name,
        created_ns=checkpoint.created_ns,
        kind=saved.kind,
        num_bytes=written_bytes(saved, entry.files),
        num_rows=saved.num_rows,
        num_table_rows=sum(tensor.size[0] for tensor in saved.tensors.values() if tensor.is_table),
        parent=parent if saved.parent is None or parent is not None else saved.parent.path,
        restore_bytes=restore_bytes,
        removed_ns=removed_ns,
        save_ids=tuple(sorted({save_id(name) for name in packs})),
        compactions=tuple((new.created_ns, written_bytes(new, entry.files)) for new in replacements),
        log_bytes=log_bytes(saved),
    )


@dataclass(frozen=True)
class _Planner:
    """What a plan is worked out from."""

    catalog: Catalog
    staying: Kept
    now_ns: int

    def plan(self, keep: Keep) -> PrunePlan:
        going = [name for name in reversed(list(self.catalog.checkpoints)) if name not in self.staying.reasons]
        order = dict.fromkeys((*going, *self.catalog.entries))
        found = {name: self.removal(self.catalog.entries[name]) for name in order}
        removals = tuple(removal for removal in found.values() if removal is not None)
        reasons = {name: tuple(self.reasons(entry, found[name])) for name, entry in self.catalog.entries.items()}
        stays = {name: texts for name, texts in reasons.items() if texts}
        folds = len(self.catalog.journal.files) + any(removal.files for removal in removals) >= journal.NUM_FOLDED
        return PrunePlan(self.catalog, keep, self.now_ns, removals, stays, folds)

    # What goes from one directory.

    def removal(self, entry: Entry) -> Removal | None:
        """What goes from a directory; None if nothing does."""
        if entry.name in self.staying.untouched:
            return None
        files = in_order(name for name in self.own_files(entry) if not self.is_used(entry, name))
        is_kept = entry.name in self.staying.reasons
        is_emptied = len(files) == len(entry.files) and not entry.directories and not is_kept
        takes_directory = is_emptied and (bool(files) or (self.was_ours(entry) and entry.store.has_directories))
        if not files and not takes_directory:
            return None
        pruned = None
        if not is_kept and entry.checkpoint is not None:
            pruned = record_of(self.catalog, entry, entry.checkpoint, self.restore_bytes[entry.name], self.now_ns)
        return Removal(entry, files, pruned, takes_directory, self.loading(entry, files))

    def is_used(self, entry: Entry, name: str) -> bool:
        """Whether a file is a pack that somebody needs."""
        return (entry.name, name) in self.staying.needs.packs

    def own_files(self, entry: Entry) -> Iterator[str]:
        """The files that a directory has on account of us, but for those that its checkpoint has if it stays."""
        if entry.checkpoint is None:
            yield from self.leftovers(entry)
            return
        packs, is_kept = packs_of(entry.checkpoint), entry.name in self.staying.reasons
        for name in entry.files:
            is_dead = is_pack(name) or name in packs or is_temporary(name) or is_lease(name)
            if is_dead or (not is_kept and is_beside_packs(name)):
                yield name

    def leftovers(self, entry: Entry) -> Iterator[str]:
        """What is left of a checkpoint that was pruned, or of a save that died."""
        has_died = any(is_lease(name) for name in entry.files)
        if (not has_died and not self.was_ours(entry)) or self.may_be_committed(entry):
            return
        known = self.known_packs(entry)
        for name in entry.files:
            is_dead = is_beside_packs(name) or (has_died and is_pack(name))
            if known.get(name, math.inf if is_dead else -math.inf) > self.staying.horizon_ns:
                yield name

    def may_be_committed(self, entry: Entry) -> bool:
        """Whether a marker may say so, in a log that was not looked at."""
        return self.catalog.root.row_log is None and any(is_uncommitted(name) for name in entry.files)

    def was_ours(self, entry: Entry) -> bool:
        """Whether the journal tells of a directory."""
        return entry.name in self.catalog.journal.died or entry.name in self.pruned_before

    def known_packs(self, entry: Entry) -> dict[str, int]:
        """The packs that are left of checkpoints that were pruned from a directory, with the time of their commit."""
        before = self.pruned_before.get(entry.name, ())
        created_ns = {save_id: checkpoint.created_ns for checkpoint in before for save_id in checkpoint.save_ids}
        packs = (name for name in entry.files if name.endswith(PACK_SUFFIX))
        return {name: created_ns[save_id(name)] for name in packs if save_id(name) in created_ns}

    @cached_property
    def pruned_before(self) -> dict[str, list[PrunedCheckpoint]]:
        """What the journal tells, by directory."""
        found: dict[str, list[PrunedCheckpoint]] = {}
        for checkpoint in self.catalog.journal.pruned:
            found.setdefault(checkpoint.name, []).append(checkpoint)
        return found

    def loading(self, entry: Entry, files: tuple[str, ...]) -> tuple[str, ...]:
        """Who may load something of what goes by a manifest that was replaced."""
        packs = {(entry.name, name) for name in files}
        return tuple(
            name
            for name, needs in self.needs_before.items()
            if (MANIFEST_FILE in files and entry.name in needs.checkpoints) or not packs.isdisjoint(needs.packs)
        )

    @cached_property
    def needs_before(self) -> dict[str, Needs]:
        """What checkpoints that stay have needed so far, of those that were compacted, or stand on one that was."""
        compacted: set[str] = set()
        for name, checkpoint in self.catalog.checkpoints.items():
            if checkpoint.is_compacted or self.catalog.parent(checkpoint) in compacted:
                compacted.add(name)
        return {name: needed_by(self.catalog, [name], [name]) for name in self.staying.reasons if name in compacted}

    @cached_property
    def restore_bytes(self) -> Mapping[str, int | None]:
        """What a load of each checkpoint reads."""
        return all_restore_bytes(self.catalog)

    # Why what is left stays.

    def reasons(self, entry: Entry, removal: Removal | None) -> Iterator[str]:
        """Why a directory stays, or some of its files do."""
        if entry.name in self.staying.reasons:
            yield from self.staying.reasons[entry.name]
        elif entry.problem is not None:
            yield f"cannot be read: {name_text(str(entry.problem))}"
        elif entry.is_link:
            yield "a link"
        elif leases := entry.leases(self.now_ns):
            yield lease_text(leases[0], self.now_ns)
        elif entry.checkpoint is None and self.may_be_committed(entry):
            yield "a marker in Kafka may have committed it: pass rows=KafkaRows(…) or --kafka to find out"
        else:
            yield from self.reasons_of_files(entry, set(removal.files if removal else ()))

    def reasons_of_files(self, entry: Entry, going: set[str]) -> Iterator[str]:
        left = [name for name in entry.files if name not in going]
        users = [self.staying.needs.packs[entry.name, name] for name in left if self.is_used(entry, name)]
        yield from dict.fromkeys(f"its packs are used by {name_text(user)}" for user in users)
        known = self.known_packs(entry) if entry.checkpoint is None else {}
        unused = [name for name in left if not self.is_used(entry, name)]
        if not known.keys().isdisjoint(unused):
            yield "a checkpoint that cannot be read may need its packs"
        others = [*(name for name in unused if name not in known), *(f"{name}/" for name in entry.directories)]
        if others and len(others) == len(entry.files) + len(entry.directories):
            yield "not recognised"
        elif others:
            more = "" if len(others) <= _NUM_NAMED else f" and {len(others) - _NUM_NAMED} more"
            yield f"not recognised: {', '.join(map(name_text, others[:_NUM_NAMED]))}{more}"
        elif not (entry.files or entry.directories) and not going:
            yield "empty"

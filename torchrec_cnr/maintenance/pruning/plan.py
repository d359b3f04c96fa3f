"""The plan of a prune: what will be removed, in which order, and what is kept and why. Its text is a dry run.

It is computed from a catalog without I/O. These will be removed:

- each checkpoint that is not kept, see ``kept``: its manifests, and its data files, except those that others use;
- data files that no checkpoint uses any more, in directories of checkpoints that are kept or were pruned before;
- files of saves and compactions that died, in a directory with a manifest or with an expired lease.

Everything else is kept: files with other names, and directories that are not recognised as ours. In a directory with a
lease in force, nothing is removed.
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
from torchrec_cnr.lineage import journal
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.lineage.journal import Journal, PrunedCheckpoint
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
from torchrec_cnr.maintenance.pruning.kept import Kept, Needs, find_kept, lease_text, needed_by
from torchrec_cnr.maintenance.pruning.retention import Keep, check_keep
from torchrec_cnr.maintenance.restore_bytes import all_restore_bytes
from torchrec_cnr.storage.leases import is_lease
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Removal:
    """The files that will be removed from one directory.

    Attributes:
        entry: The directory.
        files: The names of the files, in the order in which they are removed.
        pruned: The journal's record of the checkpoint, if the checkpoint will be removed; or None.
        takes_directory: Whether nothing is left in the directory, so that it will be removed, too.
        loading: The kept checkpoints that needed some of these files before they were compacted. A load of one of them
            that began before the compaction still needs the files.
    """

    entry: Entry
    files: tuple[str, ...]
    pruned: PrunedCheckpoint | None
    takes_directory: bool
    loading: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the files."""
        return sum(self.entry.files[name] for name in self.files)

    @property
    def is_dead_save(self) -> bool:
        """Return whether the directory contains only what a save that died has left."""
        return self.takes_directory and bool(self.files) and self.entry.checkpoint is None

    def __str__(self) -> str:
        if self.pruned is not None:
            what = f"{self.pruned.kind} of {instant_text(self.pruned.created_ns)}"
        elif self.is_dead_save:
            what = f"{count_text(len(self.files), 'file')} of a save that died"
        elif self.files:
            what = f"{count_text(len(self.files), 'file')} that no checkpoint needs"
        else:
            what = "empty directory"
        return f"{name_text(self.entry.name)}: {what}, {bytes_text(self.num_bytes)}"


@dataclass(frozen=True)
class PrunePlan:
    """The plan of a prune. Print it as a dry run, and pass it to :func:`execute` to remove what it lists.

    Attributes:
        catalog: The contents of the root.
        keep: The retention rules.
        now_ns: The time for which the plan was made, in nanoseconds since 1970.
        removals: What will be removed, in this order: checkpoints, newest first, then files that nothing uses.
        stays: Why something is kept, for each directory in which something is kept: checkpoints, oldest first, then
            other directories by name.
        folds_journal: Whether the files of the journal will be merged into one.
        is_now_given: Whether the caller passed ``now_ns``. Otherwise the execution asks the store for the time.

    Examples:
        >>> plan = cnr.plan_prune("run", cnr.Keep(last=1))
        >>> plan.is_empty
        True
        >>> plan.stays["step-1"]
        ('needed by step-2',)
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
        """Return whether there is nothing to do."""
        return not (self.removals or self.folds_journal or self.catalog.journal.abandoned)

    @cached_property
    def pruned(self) -> tuple[PrunedCheckpoint, ...]:
        """Return the checkpoints that will be removed, newest first."""
        return tuple(removal.pruned for removal in self.removals if removal.pruned is not None)

    @cached_property
    def died(self) -> tuple[str, ...]:
        """Return the directories of saves that died, which will be removed."""
        return tuple(removal.entry.name for removal in self.removals if removal.is_dead_save)

    @cached_property
    def told(self) -> Journal:
        """Return what to record in the journal before the first removal.

        If this prune dies, the next one recognises by this record what is left.
        """
        return Journal(self.pruned, frozenset(self.died))

    @cached_property
    def freed_bytes(self) -> int:
        """Return the bytes of all files that will be removed."""
        return sum(removal.num_bytes for removal in self.removals)

    @cached_property
    def left_bytes(self) -> int:
        """Return the bytes of all files that are kept in the root and its directories, without the journal."""
        present_bytes = total_bytes(self.catalog.entries.values()) + sum(self.catalog.files.values())
        return present_bytes - self.freed_bytes

    def __repr__(self) -> str:
        removal_text = f"removes {count_text(len(self.pruned), 'checkpoint')}, frees {bytes_text(self.freed_bytes)}"
        return f"PrunePlan({removal_text}, keeps {bytes_text(self.left_bytes)}, {url_text(self.catalog.root.url)})"

    def __str__(self) -> str:
        lines = [f"{name_text(self.catalog.root.url)}: keep {self.keep}"]
        lines += [f"  remove  {removal}" for removal in self.removals]
        lines += [f"  keep    {name_text(name)}: {'; '.join(reasons)}" for name, reasons in self.stays.items()]
        pruned_text = count_text(len(self.pruned), "checkpoint")
        lines.append(
            f"removes {pruned_text}, frees {bytes_text(self.freed_bytes)}, keeps {bytes_text(self.left_bytes)}"
        )
        return "\n".join(lines)


_NUM_NAMED = 3  # files that a reason lists
_FOREIGN = "not a checkpoint"


def plan_prune(
    root: str | os.PathLike[str] | Catalog,
    keep: Keep | None = None,
    *,
    row_log: RowLog | None = None,
    now_ns: int | None = None,
) -> PrunePlan:
    """Plan a prune: compute what to remove and what to keep, without removing anything.

    Checkpoints under other roots that are based on one here are not seen. Their saves have tagged it, which keeps it.

    Args:
        root: A directory of checkpoints, as a path or fsspec URL; or its catalog, if you have read one.
        keep: The retention rules. By default, the newest three checkpoints and those with a tag are kept.
        row_log: The Kafka topic that contains the rows of deltas, if they are not in files (``KafkaRows``). It shows
            which checkpoints were committed; nothing is removed from it. Without it, every checkpoint is kept whose
            commit record may be in Kafka. If you pass a catalog, read that with the same topic.
        now_ns: The time in nanoseconds since 1970 at which leases are checked for expiry. By default, now.

    Raises:
        ConfigurationError: There are checkpoints and none of them would be kept, or there is no such topic.
        StoreError: The root cannot be listed, or Kafka does not answer in time.

    Examples:
        >>> print(cnr.plan_prune("run", cnr.Keep(last=1)))
        /.../run: keep the newest, those with a tag
          keep    step-1: needed by step-2
          keep    step-2: newest
        removes 0 checkpoints, frees 0 B, keeps ... KB
    """
    check_keep(keep)
    if now_ns is not None:
        check_count("now_ns", now_ns)
    if row_log is not None and not row_log.open(may_make=False):  # without the topic, no save would seem committed
        raise ConfigurationError(
            f"'row_log': there is no topic {row_log.topic!r}; pass the topic that contains the rows, or None"
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
    """Return the journal's record of a checkpoint that is removed."""
    committed = checkpoint.committed
    parent = None if committed.parent is None else catalog.name_of(checkpoint.store.at(committed.parent.path))
    packs = packs_of(checkpoint) | {name for name in entry.files if is_pack(name)}
    replacements = checkpoint.manifests[1:]
    return PrunedCheckpoint(
        name=entry.name,
        created_ns=checkpoint.created_ns,
        kind=committed.kind,
        num_bytes=written_bytes(committed, entry.files),
        num_rows=committed.num_rows,
        num_table_rows=checkpoint.num_table_rows,
        parent=parent if committed.parent is None or parent is not None else committed.parent.path,
        restore_bytes=restore_bytes,
        removed_ns=removed_ns,
        save_ids=tuple(sorted({save_id(name) for name in packs})),
        compactions=tuple(
            (replacement.created_ns, written_bytes(replacement, entry.files)) for replacement in replacements
        ),
        log_bytes=log_bytes(committed),
    )


@dataclass(frozen=True)
class _Planner:
    """The inputs of a plan, and the computations on them."""

    catalog: Catalog
    staying: Kept
    now_ns: int

    def plan(self, keep: Keep) -> PrunePlan:
        pruned_names = [name for name in reversed(list(self.catalog.checkpoints)) if name not in self.staying.reasons]
        order = dict.fromkeys((*pruned_names, *self.catalog.entries))
        removals_by_name = {name: self.removal(self.catalog.entries[name]) for name in order}
        removals = tuple(removal for removal in removals_by_name.values() if removal is not None)
        oldest_first = dict.fromkeys((*self.catalog.checkpoints, *self.catalog.entries))
        reasons = {
            name: tuple(self.reasons(self.catalog.entries[name], removals_by_name[name])) for name in oldest_first
        }
        stays = {name: texts for name, texts in reasons.items() if texts}
        folds = len(self.catalog.journal.files) + any(removal.files for removal in removals) >= journal.NUM_FOLDED
        return PrunePlan(self.catalog, keep, self.now_ns, removals, stays, folds)

    # Removals from one directory

    def removal(self, entry: Entry) -> Removal | None:
        """Return what will be removed from a directory; None if nothing will."""
        if entry.name in self.staying.untouched:
            return None
        files = in_order(name for name in self.own_files(entry) if not self.is_used(entry, name))
        is_kept = entry.name in self.staying.reasons
        is_emptied = len(files) == len(entry.files) and not entry.directories and not is_kept
        takes_directory = is_emptied and (bool(files) or (self.was_ours(entry) and entry.store.is_local))
        if not files and not takes_directory:
            return None
        pruned = None
        if not is_kept and entry.checkpoint is not None:
            pruned = record_of(self.catalog, entry, entry.checkpoint, self.restore_bytes[entry.name], self.now_ns)
        return Removal(entry, files, pruned, takes_directory, self.loading(entry, files))

    def is_used(self, entry: Entry, name: str) -> bool:
        """Return whether a file is a data file that a kept checkpoint needs."""
        return (entry.name, name) in self.staying.needs.packs

    def own_files(self, entry: Entry) -> Iterator[str]:
        """Yield the files of a directory that are ours, except those of a checkpoint that is kept."""
        if entry.checkpoint is None:
            yield from self.leftovers(entry)
            return
        packs, is_kept = packs_of(entry.checkpoint), entry.name in self.staying.reasons
        for name in entry.files:
            is_dead = is_pack(name) or name in packs or is_temporary(name) or is_lease(name)
            if is_dead or (not is_kept and is_beside_packs(name)):
                yield name

    def leftovers(self, entry: Entry) -> Iterator[str]:
        """Yield the files that are left of a pruned checkpoint, or of a save that died."""
        has_died = any(is_lease(name) for name in entry.files)
        if (not has_died and not self.was_ours(entry)) or self.may_be_committed(entry):
            return
        known_packs = self.known_packs(entry)
        for name in entry.files:
            is_dead = is_beside_packs(name) or (has_died and is_pack(name))
            if known_packs.get(name, math.inf if is_dead else -math.inf) > self.staying.horizon_ns:
                yield name

    def may_be_committed(self, entry: Entry) -> bool:
        """Return whether a commit record for it may be in a Kafka topic that was not read."""
        return self.catalog.root.row_log is None and any(is_uncommitted(name) for name in entry.files)

    def was_ours(self, entry: Entry) -> bool:
        """Return whether the journal has a record of a directory."""
        return entry.name in self.catalog.journal.died or entry.name in self.pruned_before

    def known_packs(self, entry: Entry) -> dict[str, int]:
        """Return the data files that are left of pruned checkpoints in a directory, with the times of their commits."""
        records = self.pruned_before.get(entry.name, ())
        created_ns = {save_id: checkpoint.created_ns for checkpoint in records for save_id in checkpoint.save_ids}
        packs = (name for name in entry.files if name.endswith(PACK_SUFFIX))
        return {name: created_ns[save_id(name)] for name in packs if save_id(name) in created_ns}

    @cached_property
    def pruned_before(self) -> dict[str, list[PrunedCheckpoint]]:
        """Return the journal's records, by directory."""
        records: dict[str, list[PrunedCheckpoint]] = {}
        for checkpoint in self.catalog.journal.pruned:
            records.setdefault(checkpoint.name, []).append(checkpoint)
        return records

    def loading(self, entry: Entry, files: tuple[str, ...]) -> tuple[str, ...]:
        """Return the kept checkpoints that a load may still read by a replaced manifest, which needs these files."""
        packs = {(entry.name, name) for name in files}
        return tuple(
            name
            for name, needs in self.needs_before.items()
            if (MANIFEST_FILE in files and entry.name in needs.checkpoints) or not packs.isdisjoint(needs.packs)
        )

    @cached_property
    def needs_before(self) -> dict[str, Needs]:
        """Return what each kept checkpoint needs by any of its manifests, if it or an ancestor was compacted."""
        compacted: set[str] = set()
        for name, checkpoint in self.catalog.checkpoints.items():
            if checkpoint.is_compacted or self.catalog.parent(checkpoint) in compacted:
                compacted.add(name)
        return {name: needed_by(self.catalog, [name], [name]) for name in self.staying.reasons if name in compacted}

    @cached_property
    def restore_bytes(self) -> Mapping[str, int | None]:
        """Return the bytes that a load of each checkpoint reads."""
        return all_restore_bytes(self.catalog)

    # Reasons for keeping

    def reasons(self, entry: Entry, removal: Removal | None) -> Iterator[str]:
        """Yield the reasons why a directory, or some of its files, are kept."""
        if entry.name in self.staying.reasons:
            yield from self.staying.reasons[entry.name]
        elif entry.problem is not None:
            yield f"cannot be read: {name_text(str(entry.problem))}"
        elif entry.is_link:
            yield "a link"
        elif leases := entry.leases(self.now_ns):
            yield lease_text(leases[0], self.now_ns)
        elif entry.checkpoint is None and self.may_be_committed(entry):
            yield "may be committed in Kafka: pass row_log=KafkaRows(…) or --kafka to check"
        else:
            yield from self.reasons_of_files(entry, set(removal.files if removal else ()))

    def reasons_of_files(self, entry: Entry, going: set[str]) -> Iterator[str]:
        left_names = [name for name in entry.files if name not in going]
        users = [self.staying.needs.packs[entry.name, name] for name in left_names if self.is_used(entry, name)]
        yield from dict.fromkeys(f"its data files are used by {name_text(user)}" for user in users)
        known_packs = self.known_packs(entry) if entry.checkpoint is None else {}
        unused = [name for name in left_names if not self.is_used(entry, name)]
        if not known_packs.keys().isdisjoint(unused):
            yield "a checkpoint that cannot be read may need its data files"
        unrecognised = [
            *(name for name in unused if name not in known_packs),
            *(f"{name}/" for name in entry.directories),
        ]
        if unrecognised and len(unrecognised) == len(entry.files) + len(entry.directories):
            is_unfinished = any(name.endswith(PACK_SUFFIX) for name in entry.files)
            yield "unfinished; no lease of a save: was its manifest removed by hand?" if is_unfinished else _FOREIGN
        elif unrecognised:
            more = "" if len(unrecognised) <= _NUM_NAMED else f" and {len(unrecognised) - _NUM_NAMED} more"
            yield f"not recognised: {', '.join(map(name_text, unrecognised[:_NUM_NAMED]))}{more}"
        elif not (entry.files or entry.directories) and not going:
            yield "empty"

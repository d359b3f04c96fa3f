"""The execution of a prune plan. If it dies at any point, everything that is kept can still be loaded.

    1. It writes a file to the journal that lists what will be removed. If that fails, nothing is removed.
    2. It removes checkpoints one by one, each before its parent. Right before each, it checks whether the checkpoint is
       needed by now. It is, if there is a lease, a new file in its directory such as a tag, or a new checkpoint that is
       based on it. If so, the checkpoint is kept, with all that it needs.
    3. In a directory, it removes ``manifest.json`` first, so that no partial checkpoint is left; then all other files.
    4. It removes unused files in other directories. Then it replaces its journal file with one that lists what was
       removed. If the journal has many files, it merges them into one.

If a file cannot be removed, the others are still removed. The next plan includes it again.
"""

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from threading import Lock

from torchrec_cnr.errors import CheckpointNotFoundError, CNRError, StoreError
from torchrec_cnr.format.manifest import MANIFEST_FILE, PACK_SUFFIX
from torchrec_cnr.human_text import bytes_text, count_text, name_text
from torchrec_cnr.lineage import journal
from torchrec_cnr.lineage.abandoned import marked_name
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_checkpoint
from torchrec_cnr.lineage.journal import Journal, Prune
from torchrec_cnr.maintenance.pruning.kept import PackPath, lease_text, needed_by
from torchrec_cnr.maintenance.pruning.plan import PrunePlan, Removal
from torchrec_cnr.progress import Progress
from torchrec_cnr.storage.leases import in_force, is_lease
from torchrec_cnr.storage.store import NOT_THERE, Store, is_clock

_NUM_THREADS = 8


@dataclass(frozen=True)
class PruneResult:
    """The result of a prune.

    Attributes:
        removed: The names of the removed checkpoints, newest first.
        freed_bytes: The bytes of the removed files.
        failed: The directories in which something was not removed, with the reasons.
        refused: Those directories of ``failed`` in which the store failed to remove a file. In the others, something
            needs the files by now.

    Examples:
        >>> checkpoint = cnr.compact("run/step-2", self_contained=True)
        >>> result = cnr.execute(cnr.plan_prune("run", cnr.Keep(last=1)))
        >>> result.removed, result.failed
        (('step-1',), {})
    """

    removed: tuple[str, ...]
    freed_bytes: int
    failed: Mapping[str, tuple[str, ...]]
    refused: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        summary = f"removed {count_text(len(self.removed), 'checkpoint')}, freed {bytes_text(self.freed_bytes)}"
        return f"PruneResult({summary}, {len(self.failed):,} failed)" if self.failed else f"PruneResult({summary})"

    def __str__(self) -> str:
        lines = [f"removed {count_text(len(self.removed), 'checkpoint')}, freed {bytes_text(self.freed_bytes)}"]
        lines += [
            f"  not removed  {name_text(name)}: {name_text('; '.join(reasons))}"
            for name, reasons in self.failed.items()
        ]
        return "\n".join(lines)


def run_prune(plan: PrunePlan, *, progress: Progress | None = None) -> PruneResult:
    """Remove what a plan lists, except what is needed by now.

    Args:
        plan: The plan.
        progress: Called with the number of files that are done, and the total.

    Raises:
        StoreError: The store does not report the time, the journal cannot be written, or the kept files cannot be
            forced to disk. Nothing was removed.
    """
    now_ns = plan.now_ns if plan.is_now_given or not plan.removals else plan.catalog.root.now_ns()
    directory = plan.catalog.root.at(journal.DIRECTORY)
    planned_name = (
        journal.write_file(directory, plan.told, plan.now_ns) if any(r.files for r in plan.removals) else None
    )
    removed = {removal.entry.name for removal in plan.removals if removal.pruned is not None}
    for name, entry in plan.catalog.entries.items():  # kept checkpoints must be durable before any removal
        if removed and entry.checkpoint is not None and name not in removed:
            _force_names(entry.store)
    num_files, num_done = sum(len(removal.files) for removal in plan.removals), 0
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="cnr-prune") as threads:
        execution = _Execution(plan, now_ns, threads)
        for removal in plan.removals:
            execution.remove(removal)
            num_done += len(removal.files)
            if progress is not None:
                progress(num_done, num_files)
    try:
        _tidy_journal(directory, plan, execution.done, planned_name)
        _tidy_root(plan, execution.removed)
    except StoreError as error:
        execution.refuse(journal.DIRECTORY, error)
    failed = {name: tuple(reasons) for name, reasons in execution.failed.items()}
    return PruneResult(tuple(execution.removed), execution.freed_bytes, failed, frozenset(execution.refused))


def _force_names(store: Store) -> None:
    """Force the names of a checkpoint's files to disk, unless another prune has removed it since the plan was made."""
    try:
        store.force_names()
    except StoreError as error:
        if error.errno not in NOT_THERE:
            raise


def _tidy_journal(directory: Store, plan: PrunePlan, done: Journal, planned_name: str | None) -> None:
    """Replace the record of what was planned with that of what was done, and merge the files if there are many."""
    old_journal = plan.catalog.journal
    written_names: tuple[str, ...] = ()
    if planned_name is not None:
        is_recorded = done.prunes or done.pruned
        written_names = (journal.write_file(directory, done, plan.now_ns),) if is_recorded else ()
        directory.remove(planned_name)
    for name in old_journal.abandoned:
        directory.remove(name)
    if plan.folds_journal:
        pruned, prunes = old_journal.pruned + done.pruned, old_journal.prunes + done.prunes
        merged_journal = Journal(pruned, old_journal.died | done.died, prunes, old_journal.files + written_names)
        journal.fold_files(directory, merged_journal, plan.now_ns)


def _tidy_root(plan: PrunePlan, removed: Collection[str]) -> None:
    """Remove the marks of abandoned checkpoints that no longer exist, and clock files that a killed prune has left."""
    catalog = plan.catalog
    for file in catalog.files:
        name = marked_name(file)
        if is_clock(file) or (name is not None and (name in removed or name not in catalog.entries)):
            catalog.root.remove(file)


class _Execution:
    """The state of an execution: what was removed so far, and what must not be removed any more."""

    def __init__(self, plan: PrunePlan, now_ns: int, threads: ThreadPoolExecutor) -> None:
        self.removed: list[str] = []
        self.failed: dict[str, list[str]] = {}
        self.refused: set[str] = set()
        self.freed_bytes = 0
        self._touched: list[str] = []  # directories from which a file was removed
        self._may_be_gone: list[str] = []  # checkpoints whose removal failed, perhaps only because the answer was lost
        self._plan = plan
        self._now_ns = now_ns
        self._threads = threads
        self._wanted: dict[str, str] = {}  # checkpoints that are kept contrary to the plan, and why
        self._wanted_packs: set[PackPath] = set()
        self._counting = Lock()
        entries = plan.catalog.entries.items()
        self._known = {name for name, entry in entries if entry.checkpoint is not None or entry.problem is not None}

    @property
    def done(self) -> Journal:
        """Return what to record in the journal at the end; nothing, if no file can have been removed."""
        gone_names = {*self.removed, *self._may_be_gone}
        pruned = tuple(checkpoint for checkpoint in self._plan.pruned if checkpoint.name in gone_names)
        if not self._touched:
            return Journal(pruned)
        died = frozenset(self._plan.died).intersection(self._touched)
        return Journal(pruned, died, (Prune(self._plan.now_ns, self._touched[0], self.freed_bytes),))

    def fail(self, name: str, reason: str) -> None:
        """Record why something in a directory is not removed."""
        self.failed.setdefault(name, []).append(reason)

    def refuse(self, name: str, error: CNRError) -> None:
        """Record that the store failed to remove something in a directory."""
        self.refused.add(name)
        self.fail(name, str(error))

    def remove(self, removal: Removal) -> None:
        """Remove what the plan lists for one directory, unless it is needed by now."""
        store, name = removal.entry.store, removal.entry.name
        reason = self._why_not(removal)
        if reason is None and removal.pruned is not None:
            reason = self._remove_file(removal, MANIFEST_FILE)
            if reason is not None:
                self._may_be_gone.append(name)
        if reason is not None:
            self.fail(name, reason)
            if removal.pruned is not None:
                self._want([name], f"needed by {name_text(name)}, which is kept", loading=True)
            return
        if removal.pruned is not None:
            self.removed.append(name)
        self._remove_files(removal)
        if removal.takes_directory:
            try:
                store.remove_directory()
            except StoreError as error:
                self.refuse(name, error)

    def _remove_files(self, removal: Removal) -> None:
        """Remove all files but the manifest. Data files are removed in any order; leases only if nothing has failed."""
        name = removal.entry.name
        files = [file for file in removal.files if file != MANIFEST_FILE]
        unwanted = [file for file in files if (name, file) not in self._wanted_packs]
        if len(unwanted) < len(files):
            self.fail(name, "its data files are needed by a checkpoint that is kept after all")
        for are_packs, group in groupby(unwanted, key=lambda file: file.endswith(PACK_SUFFIX)):
            if are_packs:
                reasons = list(self._threads.map(partial(self._remove_file, removal), group))
            else:
                reasons = [None if self._is_sign(name, file) else self._remove_file(removal, file) for file in group]
            for reason in filter(None, reasons):
                self.fail(name, reason)

    def _is_sign(self, name: str, file: str) -> bool:
        """Return whether a file is the lease by which the next prune recognises the files that were not removed."""
        return is_lease(file) and name in self.failed

    def _remove_file(self, removal: Removal, file: str) -> str | None:
        """Remove a file. Return None, or why it could not be removed."""
        try:
            removal.entry.store.remove(file, is_durable=file == MANIFEST_FILE)
        except StoreError as error:
            self.refused.add(removal.entry.name)
            return str(error)
        with self._counting:
            self.freed_bytes += removal.entry.files[file]
            if removal.entry.name not in self._touched[-1:]:
                self._touched.append(removal.entry.name)
        return None

    # Checks right before a removal

    def _why_not(self, removal: Removal) -> str | None:
        """Return why something must not be removed any more, or None."""
        name = removal.entry.name
        try:
            names = removal.entry.store.names()
            reason = self._why_leased(name, names) or self._why_changed(removal, names)
            reason = reason or self._why_loading(removal.loading)
            if reason is not None or removal.pruned is None:
                return reason
            self._take_in_newcomers()  # after the leases, because a save releases its lease once it has committed
            return self._wanted.get(name)
        except CNRError as error:
            self.refused.add(name)
            return f"cannot tell whether something needs it: {error}"

    def _why_leased(self, name: str, names: list[str]) -> str | None:
        leases = in_force(self._plan.catalog.root.at(name), names, self._now_ns)
        return lease_text(leases[0], self._now_ns) if leases else None

    def _why_changed(self, removal: Removal, names: list[str]) -> str | None:
        """Return which files are new in a directory that would be emptied: a tag, a save or a compaction."""
        new_names = sorted({*names} - {*removal.entry.files, *removal.entry.directories})
        if removal.entry.name == journal.DIRECTORY:  # a checkpoint may have this name, too
            new_names = [name for name in new_names if not journal.is_journal_file(name)]
        if not new_names or (removal.pruned is None and removal.entry.checkpoint is not None):
            return None
        self._known.discard(removal.entry.name)  # it may contain another checkpoint now
        more = "" if len(new_names) == 1 else f" and {len(new_names) - 1} more"
        return f"{name_text(new_names[0])}{more} appeared after the plan was made"

    def _why_loading(self, loading: tuple[str, ...]) -> str | None:
        for name in loading:
            reason = self._why_leased(name, self._plan.catalog.root.at(name).names())
            if reason is not None:
                return f"{name_text(name)}, which used it before it was compacted, is {reason}"
        return None

    def _take_in_newcomers(self) -> None:
        """Keep what is needed by checkpoints that were committed since the catalog was read."""
        root = self._plan.catalog.root
        listing = root.listing()
        for name in {*listing.directories, *listing.links} - self._known:
            names = root.at(name).names()
            if MANIFEST_FILE not in names:
                continue
            try:
                checkpoint = read_checkpoint(root.at(name))
            except CheckpointNotFoundError:  # another process has removed it
                continue
            self._known.add(name)
            self._want_all_of(checkpoint, f"needed by {name_text(name)}, which was committed after the plan was made")

    def _want_all_of(self, newcomer: Checkpoint, reason: str) -> None:
        catalog = self._plan.catalog
        for manifest in newcomer.manifests:
            view = replace(newcomer, manifest=manifest)
            self._wanted_packs.update(catalog.uses(view))
            parent = catalog.parent(view)
            self._want([] if parent is None else [parent], reason)

    def _want(self, names: list[str], reason: str, loading: bool = False) -> None:
        needs = needed_by(self._plan.catalog, names, names if loading else ())
        self._wanted = {**dict.fromkeys(needs.checkpoints, reason), **self._wanted}
        self._wanted_packs.update(needs.packs)

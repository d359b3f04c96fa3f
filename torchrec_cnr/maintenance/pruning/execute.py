"""The execution of a prune plan: whatever it has done when it dies, what is kept can be loaded.

    1. The journal gets a file that tells what will be removed. If that fails, nothing is removed.
    2. Checkpoints go one by one, each before its parent. Right before, it is looked whether somebody wants it after
       all: whether there is a lease, anything new in its directory, such as a tag, or a checkpoint that was committed
       meanwhile. If so it stays, with all that it needs.
    3. Of a directory, ``manifest.json`` goes first, so that there is no checkpoint any more; then all others.
    4. What nobody uses in the other directories goes; then the journal gets a file that tells what was removed, in the
       place of the first, and its files become one, if there are many.

A file that cannot be removed stops nothing else; the next plan has it again.
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
from torchrec_cnr.lineage.abandoned import marked_name
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_checkpoint
from torchrec_cnr.maintenance import journal
from torchrec_cnr.maintenance.journal import Journal, Prune
from torchrec_cnr.maintenance.pruning.kept import PackPath, lease_text, needed_by, saves_stand_on
from torchrec_cnr.maintenance.pruning.plan import PrunePlan, Removal
from torchrec_cnr.progress import Progress
from torchrec_cnr.storage.leases import holds, in_force, is_lease
from torchrec_cnr.storage.store import Store, is_clock

_NUM_THREADS = 8


@dataclass(frozen=True)
class PruneResult:
    """What a prune has done.

    Attributes:
        removed: Names of the checkpoints that are gone, newest first.
        freed_bytes: Bytes of the files that were removed.
        failed: By directory, why something in it was not removed.
        refused: Those of them in which the store did not do what it was asked; in the others, somebody needs it now.
    """

    removed: tuple[str, ...]
    freed_bytes: int
    failed: Mapping[str, tuple[str, ...]]
    refused: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        done = f"{count_text(len(self.removed), 'checkpoint')} removed, {bytes_text(self.freed_bytes)} freed"
        return f"PruneResult({done}, {len(self.failed):,} failed)" if self.failed else f"PruneResult({done})"

    def __str__(self) -> str:
        lines = [f"{count_text(len(self.removed), 'checkpoint')} removed, {bytes_text(self.freed_bytes)} freed"]
        lines += [f"  not removed  {name_text(name)}: {name_text('; '.join(why))}" for name, why in self.failed.items()]
        return "\n".join(lines)


def run_prune(plan: PrunePlan, *, progress: Progress | None = None) -> PruneResult:
    """Remove what a plan says, but for what is wanted by now; ``progress`` is told of files.

    Raises:
        StoreError: The store does not tell the time, the journal cannot be written, or what is kept not be made
            durable: nothing was removed.
    """
    now_ns = plan.now_ns if plan.is_now_given or not plan.removals else plan.catalog.root.now_ns()
    directory = plan.catalog.root.at(journal.DIRECTORY)
    planned = journal.write_file(directory, plan.told, plan.now_ns) if any(r.files for r in plan.removals) else None
    removed = {removal.entry.name for removal in plan.removals if removal.pruned is not None}
    for name, entry in plan.catalog.entries.items():  # what is kept is durable before anything is removed
        if removed and entry.checkpoint is not None and name not in removed:
            entry.store.force_names()
    num_files, num_done = sum(len(removal.files) for removal in plan.removals), 0
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="cnr-prune") as threads:
        execution = _Execution(plan, now_ns, threads)
        for removal in plan.removals:
            execution.remove(removal)
            num_done += len(removal.files)
            if progress is not None:
                progress(num_done, num_files)
    try:
        _tidy_journal(directory, plan, execution.done, planned)
        _tidy_root(plan, execution.removed)
    except StoreError as error:
        execution.refuse(journal.DIRECTORY, error)
    failed = {name: tuple(reasons) for name, reasons in execution.failed.items()}
    return PruneResult(tuple(execution.removed), execution.freed_bytes, failed, frozenset(execution.refused))


def _tidy_journal(directory: Store, plan: PrunePlan, done: Journal, planned: str | None) -> None:
    """What was done takes the place of what was planned; then the files become one, if there are many."""
    known = plan.catalog.journal
    written: tuple[str, ...] = ()
    if planned is not None:
        is_told = done.prunes or done.pruned
        written = (journal.write_file(directory, done, plan.now_ns),) if is_told else ()
        directory.remove(planned)
    for name in known.abandoned:
        directory.remove(name)
    if plan.folds_journal:
        pruned, prunes = known.pruned + done.pruned, known.prunes + done.prunes
        now = Journal(pruned, known.died | done.died, prunes, known.files + written)
        journal.fold_files(directory, now, plan.now_ns)


def _tidy_root(plan: PrunePlan, removed: Collection[str]) -> None:
    """Remove the marks of abandoned checkpoints that are gone, and what a killed prune has left of its clock."""
    catalog = plan.catalog
    for file in catalog.files:
        name = marked_name(file)
        if is_clock(file) or (name is not None and (name in removed or name not in catalog.entries)):
            catalog.root.remove(file)


class _Execution:
    """What was done so far, and what must not be done any more."""

    def __init__(self, plan: PrunePlan, now_ns: int, threads: ThreadPoolExecutor) -> None:
        self.removed: list[str] = []
        self.failed: dict[str, list[str]] = {}
        self.refused: set[str] = set()
        self.freed_bytes = 0
        self._touched: list[str] = []  # directories of which a file went
        self._may_be_gone: list[str] = []  # checkpoints whose removal failed: perhaps only its answer was lost
        self._plan = plan
        self._now_ns = now_ns
        self._threads = threads
        self._wanted: dict[str, str] = {}  # checkpoints that stay after all, and why
        self._wanted_packs: set[PackPath] = set()
        self._counting = Lock()
        entries = plan.catalog.entries.items()
        self._known = {name for name, entry in entries if entry.checkpoint is not None or entry.problem is not None}

    @property
    def done(self) -> Journal:
        """What the journal is told in the end: nothing, if no file can have gone."""
        gone = {*self.removed, *self._may_be_gone}
        pruned = tuple(checkpoint for checkpoint in self._plan.pruned if checkpoint.name in gone)
        if not self._touched:
            return Journal(pruned)
        died = frozenset(self._plan.died).intersection(self._touched)
        return Journal(pruned, died, (Prune(self._plan.now_ns, self._touched[0], self.freed_bytes),))

    def fail(self, name: str, reason: str) -> None:
        """Note why something in a directory stays."""
        self.failed.setdefault(name, []).append(reason)

    def refuse(self, name: str, error: CNRError) -> None:
        """Note that the store did not remove something in a directory."""
        self.refused.add(name)
        self.fail(name, str(error))

    def remove(self, removal: Removal) -> None:
        """Remove what goes from one directory."""
        store, name = removal.entry.store, removal.entry.name
        reason = self._why_not(removal)
        if reason is None and removal.pruned is not None:
            reason = self._remove_file(removal, MANIFEST_FILE)
            if reason is not None:
                self._may_be_gone.append(name)
        if reason is not None:
            self.fail(name, reason)
            if removal.pruned is not None:
                self._want([name], f"needed by {name_text(name)}, which stays", loading=True)
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
        """All but the manifest. Packs are in no order among themselves; leases stay if anything else does."""
        name = removal.entry.name
        files = [file for file in removal.files if file != MANIFEST_FILE]
        unwanted = [file for file in files if (name, file) not in self._wanted_packs]
        if len(unwanted) < len(files):
            self.fail(name, "its packs are needed by a checkpoint that stays after all")
        for are_packs, group in groupby(unwanted, key=lambda file: file.endswith(PACK_SUFFIX)):
            if are_packs:
                reasons = list(self._threads.map(partial(self._remove_file, removal), group))
            else:
                reasons = [None if self._is_sign(name, file) else self._remove_file(removal, file) for file in group]
            for reason in filter(None, reasons):
                self.fail(name, reason)

    def _is_sign(self, name: str, file: str) -> bool:
        """Whether a file is the lease by which the next prune recognises what could not be removed."""
        return is_lease(file) and name in self.failed

    def _remove_file(self, removal: Removal, file: str) -> str | None:
        """Remove a file; returns why it could not be removed."""
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

    # What is wanted by now.

    def _why_not(self, removal: Removal) -> str | None:
        """Why something must not be removed any more."""
        name = removal.entry.name
        try:
            if removal.pruned is not None:
                self._take_in_newcomers()
                if name in self._wanted:
                    return self._wanted[name]
            names = removal.entry.store.names()
            return (
                self._why_leased(name, names) or self._why_changed(removal, names) or self._why_loading(removal.loading)
            )
        except CNRError as error:
            self.refused.add(name)
            return f"it is not known who needs it: {error}"

    def _why_leased(self, name: str, names: list[str]) -> str | None:
        leases = in_force(self._plan.catalog.root.at(name), names, self._now_ns)
        return lease_text(leases[0], self._now_ns) if leases else None

    def _why_changed(self, removal: Removal, names: list[str]) -> str | None:
        """What came into a directory of which no checkpoint was to be left: a tag, another save, a compaction."""
        came = sorted({*names} - {*removal.entry.files, *removal.entry.directories})
        if removal.entry.name == journal.DIRECTORY:  # a checkpoint may be called so, too
            came = [name for name in came if not journal.is_journal_file(name)]
        if not came or (removal.pruned is None and removal.entry.checkpoint is not None):
            return None
        self._known.discard(removal.entry.name)  # there may be another checkpoint
        more = "" if len(came) == 1 else f" and {len(came) - 1} more"
        return f"{name_text(came[0])}{more} came meanwhile"

    def _why_loading(self, loading: tuple[str, ...]) -> str | None:
        for name in loading:
            reason = self._why_leased(name, self._plan.catalog.root.at(name).names())
            if reason is not None:
                return f"{name_text(name)}, which used it before it was compacted, is {reason}"
        return None

    def _take_in_newcomers(self) -> None:
        """What was committed since the catalog was read stays with all that it needs; so does what may be."""
        root = self._plan.catalog.root
        listed = root.listing()
        for name in {*listed.directories, *listed.links} - self._known:
            names = root.at(name).names()
            if MANIFEST_FILE not in names:
                if holds(root.at(name), names, self._now_ns):
                    bases = list(saves_stand_on(self._plan.catalog))
                    self._want(bases, f"{name_text(name)}, which is being saved, may stand on it")
                continue
            try:
                found = read_checkpoint(root.at(name))
            except CheckpointNotFoundError:  # removed by somebody else
                continue
            self._known.add(name)
            self._want_all_of(found, f"needed by {name_text(name)}, which was committed meanwhile")

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

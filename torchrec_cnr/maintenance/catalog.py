"""The catalog: the contents of a root, read once. Also finds the checkpoint to which a path of the user refers.

The catalog contains every directory of the root: checkpoints with their manifests, unreadable ones with the reason, and
everything else. Plans are computed from a catalog alone, without I/O.
"""

import os
import posixpath
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property

from torchrec_cnr.errors import CheckpointNotFoundError, CNRError, ConfigurationError, DamagedError, StoreError
from torchrec_cnr.format.manifest import MANIFEST_FILE, PACK_SUFFIX
from torchrec_cnr.lineage import journal
from torchrec_cnr.lineage.abandoned import mark_of
from torchrec_cnr.lineage.checkpoint import Checkpoint, Lineage, read_checkpoint
from torchrec_cnr.lineage.destination import contains_checkpoints
from torchrec_cnr.lineage.journal import Journal, PrunedCheckpoint
from torchrec_cnr.lineage.latest import latest
from torchrec_cnr.lineage.marker_commit import publish_marked
from torchrec_cnr.lineage.other_roots import needed_of_other_roots
from torchrec_cnr.maintenance import tags_and_metrics
from torchrec_cnr.maintenance.file_names import is_replacement, is_uncommitted
from torchrec_cnr.progress import Progress
from torchrec_cnr.storage.leases import Lease, in_force
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store

_NUM_THREADS = 8
_NUM_NAMED = 5  # roots that a message lists


@dataclass(frozen=True)
class Entry:
    """A directory under the root.

    Attributes:
        store: The directory.
        name: The name of the directory.
        files: The sizes in bytes of the files in it, by name.
        checkpoint: The committed checkpoint, or None.
        problem: Why the manifest or the directory cannot be read, or None.
        directories: The names of the directories in it.
        metrics: The metrics of the checkpoint, by name; only finite values.
        modified_ns: If there is a problem, when the manifest or else the directory was last written, in nanoseconds
            since 1970; None if unknown.
        is_link: Whether it is a symbolic link to a directory. Its files are not listed then.
        is_abandoned: Whether a job has abandoned the checkpoint by restoring an older one.
    """

    store: Store
    name: str
    files: Mapping[str, int]
    checkpoint: Checkpoint | None = None
    problem: CNRError | None = None
    directories: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    modified_ns: int | None = None
    is_link: bool = False
    is_abandoned: bool = False

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all files in the directory."""
        return sum(self.files.values())

    @property
    def tags(self) -> tuple[str, ...]:
        """Return the tags of the checkpoint, sorted."""
        return tags_and_metrics.tags(self.files)

    def leases(self, now_ns: int) -> list[Lease]:
        """Return the leases in force, the one that expires last first."""
        return in_force(self.store, self.files, now_ns)


@dataclass(frozen=True)
class Catalog:
    """The contents of a root.

    Attributes:
        root: The root.
        entries: The directories of the root, by name, without the journal's files.
        files: The sizes in bytes of the files in the root itself, by name.
        journal: The records of checkpoints that were pruned.
    """

    root: Store
    entries: Mapping[str, Entry]
    files: Mapping[str, int]
    journal: Journal = field(default_factory=Journal)

    @cached_property
    def checkpoints(self) -> Mapping[str, Checkpoint]:
        """Return all readable checkpoints, by name, oldest first."""
        items = [(name, entry.checkpoint) for name, entry in self.entries.items() if entry.checkpoint is not None]
        return dict(sorted(items, key=lambda item: item[1].created_ns))

    @cached_property
    def pruned(self) -> tuple[PrunedCheckpoint, ...]:
        """Return the pruned checkpoints, oldest first."""
        existing = {(name, checkpoint.created_ns) for name, checkpoint in self.checkpoints.items()}
        return tuple(pruned for pruned in self.journal.pruned if (pruned.name, pruned.created_ns) not in existing)

    def parent(self, checkpoint: Checkpoint) -> str | None:
        """Return the name of a checkpoint's parent, if it is under this root, has the expected digest, and is older."""
        ref = checkpoint.manifest.parent
        name = None if ref is None else self.name_of(checkpoint.store.at(ref.path))
        parent = self.checkpoints.get(name) if name is not None else None
        if parent is None or ref is None or parent.created_ns >= checkpoint.created_ns:
            return None
        return name if parent.sha256 == ref.sha256 else None

    def lineage(self, name: str) -> Lineage | None:
        """Return the lineage of a checkpoint, from its baseline on; None if a parent is missing."""
        checkpoints: list[Checkpoint] = []
        next_name: str | None = name
        while next_name is not None and len(checkpoints) <= len(self.checkpoints):
            checkpoints.append(self.checkpoints[next_name])
            next_name = self.parent(checkpoints[-1])
        return Lineage(tuple(reversed(checkpoints))) if checkpoints[-1].manifest.parent is None else None

    def uses(self, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
        """Yield the data files of a checkpoint: name of the directory under the root, and file name."""
        own_name = self.name_of(checkpoint.store)
        for pack in checkpoint.manifest.packs:
            name = own_name if pack.directory is None else self.name_of(checkpoint.store.at(pack.directory))
            if name is not None and pack.log is None:
                yield name, pack.name

    def used_directories(self, checkpoint: Checkpoint) -> list[str]:
        """Return the other directories of the root that have data files of a checkpoint, sorted by name."""
        return sorted({name for name, _ in self.uses(checkpoint)} - {self.name_of(checkpoint.store)})

    def missing_files(self, checkpoint: Checkpoint) -> list[str]:
        """Return the data files of a checkpoint that are not there, relative to the root."""
        return [
            f"{name}/{file}"
            for name, file in self.uses(checkpoint)
            if name not in self._links and (name not in self.entries or file not in self.entries[name].files)
        ]

    @cached_property
    def _links(self) -> frozenset[str]:
        return frozenset(name for name, entry in self.entries.items() if entry.is_link)

    @cached_property
    def incomplete(self) -> Mapping[str, str]:
        """Return the checkpoints that lack files or a parent; for those based on them, the ancestor that does."""
        lacking: dict[str, str] = {}
        for name, checkpoint in self.checkpoints.items():  # parents come first
            parent = self.parent(checkpoint)
            lacks_parent = checkpoint.manifest.parent is not None and parent is None
            is_elsewhere = bool(needed_of_other_roots(checkpoint.manifest))
            if self.missing_files(checkpoint) or (lacks_parent and not is_elsewhere):
                lacking[name] = name
            elif parent in lacking:
                lacking[name] = lacking[parent]
        return lacking

    @cached_property
    def newest(self) -> str | None:
        """Return the newest checkpoint that is not abandoned, or the newest if all are; None if there is none."""
        names = list(self.checkpoints)
        return next(
            (name for name in reversed(names) if not self.entries[name].is_abandoned), names[-1] if names else None
        )

    def heads(self) -> list[str]:
        """Return the checkpoints that are not the parent of another one, oldest first."""
        parents = {self.parent(checkpoint) for checkpoint in self.checkpoints.values()}
        return [name for name in self.checkpoints if name not in parents]

    def name_of(self, store: Store) -> str | None:
        """Return the name of a directory of the root, whether it exists or not; None if it is elsewhere."""
        directory, _, name = store.path.rpartition("/")
        return name if directory == self.root.path.rstrip("/") else None


def read_catalog(
    root: str | os.PathLike[str] | Store, progress: Progress | None = None, row_log: RowLog | None = None
) -> Catalog:
    """List a root and read all manifests.

    Directories and manifests that cannot be read are in the catalog, too, with the reason.

    Args:
        root: A directory of checkpoints, as a path or fsspec URL.
        progress: Called with the number of directories that were read, and the total.
        row_log: The Kafka topic that contains the rows of deltas, if they are not in files (``KafkaRows``). A job may
            have died after a commit in Kafka and before it renamed the manifest. Without the topic, such a checkpoint
            does not count as committed.

    Raises:
        StoreError: The root cannot be listed, its journal cannot be read, or Kafka does not answer in time.
    """
    store = Store.open(root, row_log=row_log)
    listing = store.listing()
    names = sorted({*listing.directories, *listing.links})
    entries: dict[str, Entry] = {}
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="cnr-catalog") as threads:
        for entry in threads.map(lambda name: _read_entry(store.at(name), name, name in listing.links), names):
            is_abandoned = entry.checkpoint is not None and mark_of(entry.checkpoint) in listing.files
            entries[entry.name] = replace(entry, is_abandoned=is_abandoned)
            if progress is not None:
                progress(len(entries), len(names))
    for name in publish_marked(store, [name for name in entries if any(map(is_uncommitted, entries[name].files))]):
        entries[name] = _read_entry(store.at(name), name, is_link=False)
    root_journal = Journal()
    if journal.DIRECTORY in entries:
        root_journal = journal.read_files(store.at(journal.DIRECTORY), entries[journal.DIRECTORY].files, time.time_ns())
        entries = _without_journal(entries)
    pruned_names = {pruned.name for pruned in root_journal.pruned}
    entries = {name: entry if name in pruned_names else _with_lost_manifest(entry) for name, entry in entries.items()}
    return Catalog(store, entries, listing.files, root_journal)


def list_checkpoints(root: str | os.PathLike[str], *, row_log: RowLog | None = None) -> list[Checkpoint]:
    """Return the checkpoints of a root, oldest first.

    Checkpoints that a job has abandoned are among them. Those whose manifest cannot be read are not: use ``verify``.

    Args:
        root: A directory of checkpoints, as a path or fsspec URL.
        row_log: The Kafka topic (``KafkaRows``) of the job's rows, if any, as in :func:`latest`.

    Raises:
        CheckpointNotFoundError: ``root`` does not exist, or contains only files, or roots.
        ConfigurationError: ``root`` is a checkpoint.
        StoreError: ``root`` cannot be listed.

    Examples:
        >>> [(checkpoint.path, checkpoint.kind) for checkpoint in cnr.list_checkpoints("run")]
        [('/.../run/step-1', 'baseline'), ('/.../run/step-2', 'delta')]
    """
    catalog = read_catalog(root, row_log=row_log)
    check_root(catalog)
    return list(catalog.checkpoints.values())


def read_journal(root: str | os.PathLike[str] | Catalog) -> list[PrunedCheckpoint]:
    """Return the checkpoints that were pruned from a root, oldest first.

    Args:
        root: The root, as a path or fsspec URL; or its catalog.

    Raises:
        StoreError: The root cannot be listed.

    Examples:
        >>> checkpoint = cnr.compact("run/step-2", self_contained=True)
        >>> result = cnr.execute(cnr.plan_prune("run", cnr.Keep(last=1)))
        >>> [pruned.name for pruned in cnr.read_journal("run")]
        ['step-1']
    """
    return list((root if isinstance(root, Catalog) else read_catalog(root)).pruned)


def _read_entry(store: Store, name: str, is_link: bool) -> Entry:
    try:
        listing = store.listing()
    except StoreError as error:
        return Entry(store, name, {}, problem=error, modified_ns=_modified_ns(store, ""), is_link=is_link)
    files = {} if is_link else listing.files
    entry = Entry(store, name, files, directories=(*listing.directories, *listing.links), is_link=is_link)
    if MANIFEST_FILE not in listing.files:
        return entry
    try:
        checkpoint = read_checkpoint(store)
        metrics = tags_and_metrics.read_metrics(store, files)
    except CheckpointNotFoundError:  # removed since it was listed
        return Entry(store, name, {}, is_link=is_link)
    except CNRError as error:
        return replace(entry, problem=error, modified_ns=_modified_ns(store, MANIFEST_FILE))
    return replace(entry, checkpoint=checkpoint, metrics=metrics)


def _with_lost_manifest(entry: Entry) -> Entry:
    """Return an entry with a problem, if a file of a compaction shows that its checkpoint had been committed."""
    if entry.checkpoint is not None or entry.problem is not None or not any(map(is_replacement, entry.files)):
        return entry
    problem = DamagedError(
        f"{entry.store.url}/{MANIFEST_FILE}: missing, although the checkpoint was committed and compacted; copy the "
        "file from a backup, or use another checkpoint"
    )
    return replace(entry, problem=problem, modified_ns=_modified_ns(entry.store, ""))


def _modified_ns(store: Store, name: str) -> int | None:
    try:
        return store.modified_ns(name)
    except StoreError:
        return None


def _without_journal(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the directories without the journal's files, and without the journal if it contains nothing else."""
    journal_entry = entries[journal.DIRECTORY]
    files = {name: num_bytes for name, num_bytes in journal_entry.files.items() if not journal.is_journal_file(name)}
    other_entries = {name: entry for name, entry in entries.items() if entry is not journal_entry}
    if not (files or journal_entry.directories or journal_entry.problem or journal_entry.is_link):
        return other_entries
    return {**other_entries, journal_entry.name: replace(journal_entry, files=files)}


def total_bytes(entries: Iterable[Entry]) -> int:
    """Return the bytes of all files in some directories."""
    return sum(entry.num_bytes for entry in entries)


def is_checkpoint(store: Store) -> bool:
    """Return whether a directory is a committed checkpoint, by its manifest or by a commit record in Kafka."""
    if not store.exists(MANIFEST_FILE):
        publish_marked(store.at(".."), [posixpath.basename(store.path)])
    return store.exists(MANIFEST_FILE)


def checkpoint_at(path: str | os.PathLike[str], row_log: RowLog | None = None) -> Store:
    """Return the store of the checkpoint at a path. For a root, return that of its newest checkpoint.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        VersionError: The newest checkpoint was written by a newer version of this library.
        StoreError: The path cannot be read.
    """
    store = Store.open(path, row_log=row_log)
    if is_checkpoint(store):
        return store
    try:
        newest_path = latest(path, row_log=row_log)
    except ConfigurationError as error:
        raise no_checkpoint(store) from error
    if newest_path is None:
        raise no_checkpoint(store)
    return Store.open(newest_path, row_log=row_log)


def check_root(catalog: Catalog) -> None:
    """Check that a catalog is that of a root: a directory that contains directories, or an empty one.

    Raises:
        ConfigurationError: It is a checkpoint itself.
        CheckpointNotFoundError: It does not exist, contains only files, or contains roots but no checkpoint.
        StoreError: It cannot be read.
    """
    root = catalog.root
    if MANIFEST_FILE in catalog.files:
        raise ConfigurationError(f"{root.url}: a checkpoint, not a root; pass the directory that contains it")
    is_known = bool(catalog.checkpoints or catalog.journal.files)
    if not is_known and (roots_in(root) or (not catalog.entries and (catalog.files or not root.is_directory()))):
        raise no_checkpoint(root)


def roots_in(store: Store) -> list[Store]:
    """Return the directories of a directory that contain committed checkpoints, as the parent of several runs does.

    Raises:
        StoreError: The directory cannot be listed. Directories in it that cannot be listed are skipped.
    """
    return [found for name in store.listing().directories if contains_checkpoints(found := store.at(name))]


def _journal_beside(checkpoint: Store) -> Journal:
    directory = checkpoint.at("..").at(journal.DIRECTORY)
    return journal.read_files(directory, directory.names(), time.time_ns())


def no_checkpoint(store: Store) -> CheckpointNotFoundError:
    """Return the error for a path that is neither a checkpoint nor a directory that contains one.

    Raises:
        StoreError: The path cannot be listed.
    """
    names, roots = store.names(), roots_in(store)
    if MANIFEST_FILE in names:
        reason = "a checkpoint, not a root; pass the directory that contains it"
    elif any(name.endswith(PACK_SUFFIX) for name in names):
        was_pruned = any(pruned.name == posixpath.basename(store.path) for pruned in _journal_beside(store).pruned)
        origin = (
            "of a checkpoint that was pruned; compacted checkpoints use them, or the next prune removes them"
            if was_pruned
            else "from a save that failed or is still running"
        )
        reason = f"data files, but no {MANIFEST_FILE}: {origin}"
    elif roots:
        named = ", ".join(posixpath.basename(root.path) for root in roots[:_NUM_NAMED])
        more = f" and {len(roots) - _NUM_NAMED} more" if len(roots) > _NUM_NAMED else ""
        reason = f"no checkpoint, but roots that contain some: {named}{more}; pass one of them"
    elif names:
        reason = "neither a checkpoint nor a directory that contains one"
    else:
        what = "a file, not a directory" if store.exists("") else "does not exist"
        reason = "an empty directory" if store.is_directory() else what
    return CheckpointNotFoundError(f"{store.url}: {reason}")

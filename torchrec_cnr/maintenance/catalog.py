"""The catalog: all that is under a root, read once; and what a path that a user gave refers to.

Every directory of the root is in it: checkpoints with their manifests, those that cannot be read with the reason, and
everything else. Maintenance plans from a catalog alone, without I/O, so that a plan can be shown before it is executed.
"""

import os
import posixpath
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property

from torchrec_cnr.errors import CheckpointNotFoundError, CNRError, ConfigurationError, StoreError
from torchrec_cnr.format.manifest import MANIFEST_FILE, PACK_SUFFIX
from torchrec_cnr.lineage.abandoned import mark_of
from torchrec_cnr.lineage.checkpoint import Checkpoint, Lineage, read_checkpoint
from torchrec_cnr.lineage.latest import latest
from torchrec_cnr.lineage.marker_commit import publish_marked
from torchrec_cnr.maintenance import journal, tags_and_metrics
from torchrec_cnr.maintenance.file_names import is_uncommitted
from torchrec_cnr.maintenance.journal import Journal, PrunedCheckpoint
from torchrec_cnr.progress import Progress
from torchrec_cnr.storage.leases import Lease, in_force
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store

_NUM_THREADS = 8


@dataclass(frozen=True)
class Entry:
    """A directory under the root.

    Attributes:
        store: The directory.
        name: Its name.
        files: Sizes in bytes of the files in it, by name.
        checkpoint: What was committed there, or None.
        problem: Why a manifest that is there, or the directory itself, cannot be read, or None.
        directories: Names of directories in it.
        metrics: Of the checkpoint; finite ones.
        modified_ns: Where there is a problem, when its manifest or else the directory was written last, if that is
            known.
        is_link: Whether it is a symbolic link to a directory; of that, no files are listed.
        is_abandoned: Whether a job has left the checkpoint behind, when it went back to an older one.
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
        """Bytes of all files in it."""
        return sum(self.files.values())

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the checkpoint, sorted."""
        return tags_and_metrics.tags(self.files)

    def leases(self, now_ns: int) -> list[Lease]:
        """Leases that hold, the one that holds longest first."""
        return in_force(self.store, self.files, now_ns)


@dataclass(frozen=True)
class Catalog:
    """What lies under a root.

    Attributes:
        root: The root.
        entries: Its directories, by name; the journal's files are not among what is in them.
        files: Sizes in bytes of the files in the root itself, by name.
        journal: What is known of checkpoints that were pruned.
    """

    root: Store
    entries: Mapping[str, Entry]
    files: Mapping[str, int]
    journal: Journal = field(default_factory=Journal)

    @cached_property
    def checkpoints(self) -> Mapping[str, Checkpoint]:
        """All checkpoints that can be read, by name, oldest first."""
        found = [(name, entry.checkpoint) for name, entry in self.entries.items() if entry.checkpoint is not None]
        return dict(sorted(found, key=lambda item: item[1].created_ns))

    @cached_property
    def pruned(self) -> tuple[PrunedCheckpoint, ...]:
        """Checkpoints that are gone, oldest first."""
        there = {(name, checkpoint.created_ns) for name, checkpoint in self.checkpoints.items()}
        return tuple(found for found in self.journal.pruned if (found.name, found.created_ns) not in there)

    def parent(self, checkpoint: Checkpoint) -> str | None:
        """The name of a checkpoint's parent, if it is here, is the one that was meant, and is older, as it must be."""
        ref = checkpoint.manifest.parent
        name = None if ref is None else self.name_of(checkpoint.store.at(ref.path))
        found = self.checkpoints.get(name) if name is not None else None
        if found is None or ref is None or found.created_ns >= checkpoint.created_ns:
            return None
        return name if found.sha256 == ref.sha256 else None

    def lineage(self, name: str) -> Lineage | None:
        """From the baseline to a checkpoint; None if a link is missing."""
        found: list[Checkpoint] = []
        next_: str | None = name
        while next_ is not None and len(found) <= len(self.checkpoints):
            found.append(self.checkpoints[next_])
            next_ = self.parent(found[-1])
        return Lineage(tuple(reversed(found))) if found[-1].manifest.parent is None else None

    def uses(self, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
        """The packs of a checkpoint that are files: name of the directory under the root, and file name."""
        own = self.name_of(checkpoint.store)
        for pack in checkpoint.manifest.packs:
            name = own if pack.directory is None else self.name_of(checkpoint.store.at(pack.directory))
            if name is not None and pack.log is None:
                yield name, pack.name

    @cached_property
    def newest(self) -> str | None:
        """The newest checkpoint that is not abandoned, or else the newest; None where there is none."""
        names = list(self.checkpoints)
        return next(
            (name for name in reversed(names) if not self.entries[name].is_abandoned), names[-1] if names else None
        )

    def heads(self) -> list[str]:
        """Checkpoints that are nobody's parent, oldest first."""
        parents = {self.parent(checkpoint) for checkpoint in self.checkpoints.values()}
        return [name for name in self.checkpoints if name not in parents]

    def name_of(self, store: Store) -> str | None:
        """The name of a directory of the root, be it there or not; None for one elsewhere."""
        above, _, name = store.path.rpartition("/")
        return name if above == self.root.path.rstrip("/") else None


def read_catalog(
    root: str | os.PathLike[str] | Store, progress: Progress | None = None, row_log: RowLog | None = None
) -> Catalog:
    """List a root and read all manifests.

    What cannot be listed or read is in the catalog with the reason; so a catalog never lacks a directory.

    Args:
        root: A directory of checkpoints, path or fsspec URL.
        progress: Told how many of how many directories were read.
        row_log: The log that rows of deltas went to, if they did: ``KafkaRows``. Without it, one is not seen that
            was committed by a job which died before it could give the manifest its name.

    Raises:
        StoreError: The root cannot be listed, its journal cannot be read, or the log does not answer in time.
    """
    store = Store.open(root, row_log=row_log)
    listed = store.listing()
    names = sorted({*listed.directories, *listed.links})
    entries: dict[str, Entry] = {}
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="cnr-catalog") as threads:
        for entry in threads.map(lambda name: _read_entry(store.at(name), name, name in listed.links), names):
            is_abandoned = entry.checkpoint is not None and mark_of(entry.checkpoint) in listed.files
            entries[entry.name] = replace(entry, is_abandoned=is_abandoned)
            if progress is not None:
                progress(len(entries), len(names))
    for name in publish_marked(store, [name for name in entries if any(map(is_uncommitted, entries[name].files))]):
        entries[name] = _read_entry(store.at(name), name, is_link=False)
    found = Journal()
    if journal.DIRECTORY in entries:
        found = journal.read_files(store.at(journal.DIRECTORY), entries[journal.DIRECTORY].files, time.time_ns())
        entries = _without_journal(entries)
    return Catalog(store, entries, listed.files, found)


def read_journal(root: str | os.PathLike[str] | Catalog) -> list[PrunedCheckpoint]:
    """The checkpoints that were pruned from a root, or from the root that a catalog was read of, oldest first.

    Raises:
        StoreError: As :func:`read_catalog`.
    """
    return list((root if isinstance(root, Catalog) else read_catalog(root)).pruned)


def _read_entry(store: Store, name: str, is_link: bool) -> Entry:
    try:
        listed = store.listing()
    except StoreError as error:
        return Entry(store, name, {}, problem=error, modified_ns=_modified_ns(store, ""), is_link=is_link)
    files = {} if is_link else listed.files
    there = Entry(store, name, files, directories=(*listed.directories, *listed.links), is_link=is_link)
    if MANIFEST_FILE not in listed.files:
        return there
    try:
        found = read_checkpoint(store)
        metrics = tags_and_metrics.read_metrics(store, files)
    except CheckpointNotFoundError:  # removed since it was listed
        return Entry(store, name, {}, is_link=is_link)
    except CNRError as error:
        return replace(there, problem=error, modified_ns=_modified_ns(store, MANIFEST_FILE))
    return replace(there, checkpoint=found, metrics=metrics)


def _modified_ns(store: Store, name: str) -> int | None:
    try:
        return store.modified_ns(name)
    except StoreError:
        return None


def _without_journal(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The directories without the journal's files; a directory that has nothing else is left out."""
    own = entries[journal.DIRECTORY]
    files = {name: num_bytes for name, num_bytes in own.files.items() if not journal.is_journal_file(name)}
    others = {name: entry for name, entry in entries.items() if entry is not own}
    if not (files or own.directories or own.problem or own.is_link):
        return others
    return {**others, own.name: replace(own, files=files)}


def total_bytes(entries: Iterable[Entry]) -> int:
    """Bytes of all files in some directories."""
    return sum(entry.num_bytes for entry in entries)


def is_checkpoint(store: Store) -> bool:
    """Whether a manifest lies there, or a marker in the store's log says that one is to."""
    if not store.exists(MANIFEST_FILE):
        publish_marked(store.at(".."), [posixpath.basename(store.path)])
    return store.exists(MANIFEST_FILE)


def checkpoint_at(path: str | os.PathLike[str], row_log: RowLog | None = None) -> Store:
    """The checkpoint at a path, and of a root its newest checkpoint; its store has the log that rows went to.

    Raises:
        CheckpointNotFoundError: There is none.
        VersionError: The newest was written by a newer version.
        StoreError: The place cannot be read.
    """
    store = Store.open(path, row_log=row_log)
    if is_checkpoint(store):
        return store
    newest = latest(path, row_log=row_log)
    if newest is None:
        raise no_checkpoint(store)
    return Store.open(newest, row_log=row_log)


def check_root(catalog: Catalog) -> None:
    """A root is a directory of directories. An empty one may become one.

    Raises:
        ConfigurationError: It is a checkpoint itself.
        CheckpointNotFoundError: Nothing is there, or files only.
        StoreError: The place cannot be looked up.
    """
    root = catalog.root
    if MANIFEST_FILE in catalog.files:
        raise ConfigurationError(f"{root.url}: a checkpoint, no root; give the directory that it lies in")
    if not catalog.entries and not catalog.journal.files and (catalog.files or not root.is_directory()):
        raise no_checkpoint(root)


def no_checkpoint(store: Store) -> CheckpointNotFoundError:
    """The error of a place where neither a checkpoint is nor a directory that holds one.

    Raises:
        StoreError: The place cannot be listed.
    """
    names = store.names()
    if any(name.endswith(PACK_SUFFIX) for name in names):
        why = f"packs, but no {MANIFEST_FILE}: a save that died, or is not done yet"
    elif names:
        why = "no checkpoint is here, nor in a directory of it"
    else:
        what = "a file, no directory" if store.exists("") else "nothing is there"
        why = "an empty directory" if store.is_directory() else what
    return CheckpointNotFoundError(f"{store.url}: {why}")

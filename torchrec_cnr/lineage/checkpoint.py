"""Committed checkpoints, the chain (lineage) from one back to its baseline, and the head that a job continues."""

import logging
import os
import posixpath
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torchrec_cnr.errors import CheckpointNotFoundError, DamagedError, LoadError
from torchrec_cnr.format.manifest import (
    MANIFEST_FILE,
    CheckpointKind,
    CheckpointRef,
    History,
    Manifest,
    Shard,
    replacement_name,
)
from torchrec_cnr.format.manifest_parser import PARENT_PATH
from torchrec_cnr.format.safe_pickle import unpickled
from torchrec_cnr.human_text import bytes_text, count_text, url_text
from torchrec_cnr.lineage.manifest_files import ReadAhead, ReadFile, ReadManifest, read_file, read_manifest
from torchrec_cnr.lineage.marker_commit import publish_marked
from torchrec_cnr.storage.pack_reader import PackReader
from torchrec_cnr.storage.store import Store
from torchrec_cnr.throttling import Bandwidth


@dataclass(frozen=True)
class Head:
    """The latest checkpoint of a running job, which its next save can be based on.

    Attributes:
        lineage: The checkpoints from the baseline to the newest, by full path.
        created_ns: Unix time of the newest one's commit, in nanoseconds.
        history: History of the lineage, as it was committed. So all ranks have the same one, although some may have
            read the lineage before a compaction and others after it.
        num_restores: Number of restores that the newest one's state has been through.
        kinds: The kind of each tensor in the newest one, by FQN.
        baseline_kinds: The kind of each tensor in the baseline.
    """

    lineage: tuple[CheckpointRef, ...]
    created_ns: int
    history: History
    num_restores: int
    kinds: "Kinds" = field(default_factory=dict, repr=False, compare=False)
    baseline_kinds: "Kinds" = field(default_factory=dict, repr=False, compare=False)

    @property
    def ref(self) -> CheckpointRef:
        """The newest checkpoint."""
        return self.lineage[-1]

    @property
    def baseline(self) -> CheckpointRef:
        """The baseline that all deltas are based on."""
        return self.lineage[0]


# By FQN: the name of its dtype, whether it is a table, and the FQN of the table if it is row-wise state of one. A delta
# can store only the modified rows of a tensor that is of the same kind in what the delta is based on.
Kinds = Mapping[str, tuple[str, bool, str | None]]

logger = logging.getLogger(__name__)

_NUM_NAMED = 5  # items that a message lists


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint.

    Attributes:
        store: The checkpoint's directory.
        committed: The manifest that committed the checkpoint.
        sha256: SHA-256 digest of that manifest, by which other checkpoints refer to this one.
        manifest: The current manifest: ``committed``, or the one by which a compaction replaced it.
        manifest_bytes: Total size of its manifest files in bytes.
        manifest_sha256: SHA-256 digest of ``manifest``.
        between: Manifests that replaced ``committed`` and were replaced themselves, oldest first.

    Examples:
        >>> checkpoint = cnr.read_checkpoint("run/step-2")
        >>> checkpoint.kind, checkpoint.num_rows, checkpoint.is_compacted
        ('delta', 100, False)
        >>> checkpoint.path, checkpoint.parent
        ('/.../run/step-2', '/.../run/step-1')
    """

    store: Store
    committed: Manifest
    sha256: str
    manifest: Manifest
    manifest_bytes: int
    manifest_sha256: str
    between: tuple[Manifest, ...] = ()

    def __repr__(self) -> str:
        size = f"{count_text(self.num_rows, 'row')}, {bytes_text(self.num_bytes)}"
        compacted = ", compacted" if self.is_compacted else ""
        return f"Checkpoint({self.kind}{compacted}, {size}, {url_text(self.store.url)})"

    @property
    def path(self) -> str:
        """The full path or URL of its directory."""
        return self.store.url

    @property
    def kind(self) -> CheckpointKind:
        """``baseline`` or ``delta``: what was saved. A delta remains a delta when its whole chain is merged into it."""
        return self.committed.kind

    @property
    def created_ns(self) -> int:
        """Unix time of its commit, in nanoseconds."""
        return self.committed.created_ns

    @property
    def is_compacted(self) -> bool:
        """Return whether another manifest has replaced the one that committed it."""
        return self.manifest is not self.committed

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """The current and all earlier manifests, oldest first; a load that began before a compaction uses those."""
        return (self.committed, *self.between, self.manifest) if self.is_compacted else (self.manifest,)

    @property
    def num_rows(self) -> int:
        """Number of rows of tables that it stores; after a compaction, older versions of rows count, too."""
        return self.manifest.num_rows

    @property
    def num_table_rows(self) -> int:
        """Number of rows of all tables, stored here or not."""
        return sum(entry.size[0] for entry in self.committed.tensors.values() if entry.is_table)

    @property
    def num_exact_rows(self) -> int:
        """Number of rows stored exactly because codes cannot represent them. A row in several shards counts in each."""
        return self.manifest.num_exact_rows

    @property
    def num_restores(self) -> int:
        """Number of restores that its state has been through."""
        return self.manifest.num_restores

    @property
    def num_bytes(self) -> int:
        """Total size of the checkpoint's own files in bytes."""
        return self.manifest.pack_bytes + self.manifest_bytes

    @property
    def parent(self) -> str | None:
        """Full path or URL of the parent; None for a baseline, and after a compaction of the whole chain."""
        parent = self.manifest.parent
        return None if parent is None else self.store.at(parent.path).url

    @property
    def ref(self) -> CheckpointRef:
        """This checkpoint by its full path."""
        return CheckpointRef(self.store.url, self.sha256)

    @property
    def kinds(self) -> Kinds:
        """The kind of each tensor."""
        return {fqn: (entry.dtype, entry.is_table, entry.table) for fqn, entry in self.manifest.tensors.items()}

    def head(self, below: tuple[CheckpointRef, ...], baseline_kinds: Kinds | None = None) -> Head:
        """Return the head of a job that is based on this checkpoint.

        Args:
            below: Its ancestors, the baseline first.
            baseline_kinds: The kinds of tensors in the baseline, if there are ancestors.
        """
        kinds = self.kinds
        return Head(
            (*below, self.ref),
            self.created_ns,
            self.committed.history,
            self.num_restores,
            kinds,
            kinds if baseline_kinds is None else baseline_kinds,
        )


def read_checkpoint(path: str | os.PathLike[str] | Store) -> Checkpoint:
    """Read and validate a checkpoint's manifest.

    Args:
        path: The checkpoint's path or URL, that is, its ``checkpoint_id``; or its store.

    Raises:
        CheckpointNotFoundError: There is no manifest, so no checkpoint was committed here.
        DamagedError: The manifest differs from the one that was committed.
        VersionError: A newer version has written the manifest.
        StoreError: The manifest cannot be read for another reason.

    Examples:
        >>> checkpoint = cnr.read_checkpoint("run/step-2")
        >>> checkpoint.kind, checkpoint.num_rows
        ('delta', 100)
    """
    return _read_checkpoint(Store.open(path), read_manifest)


def _read_checkpoint(store: Store, read: ReadManifest) -> Checkpoint:
    manifest_file = read(store, MANIFEST_FILE)
    if manifest_file is None and store.row_log is not None:
        publish_marked(store.at(".."), [posixpath.basename(store.path)])
        manifest_file = read_manifest(store, MANIFEST_FILE)
    if manifest_file is None:
        raise CheckpointNotFoundError(
            f"{store.url}: no {MANIFEST_FILE}: no checkpoint was committed here (a failed save leaves data files "
            "without one); call torchrec_cnr.latest(root) for the latest checkpoint"
        )
    committed, sha256, num_bytes = manifest_file
    if committed.replaces is not None:
        raise DamagedError(
            f"{store.url}/{MANIFEST_FILE}: it replaces manifest {committed.replaces}, expected one that replaces none; "
            "use another checkpoint"
        )
    manifest, last_sha256 = committed, sha256
    chain: list[Manifest] = []
    while (manifest_file := read(store, replacement_name(last_sha256))) is not None:
        replacement, digest, size = manifest_file
        _check_replacement(replacement, manifest, last_sha256, store)
        manifest, last_sha256, num_bytes = replacement, digest, num_bytes + size
        chain.append(manifest)
    return Checkpoint(store, committed, sha256, manifest, num_bytes, last_sha256, tuple(chain[:-1]))


def _check_replacement(replacement: Manifest, replaced: Manifest, sha256: str, store: Store) -> None:
    """Raise ``DamagedError`` unless a manifest and its replacement describe the same state."""
    differences = []
    if replacement.replaces != sha256:
        differences.append(f"it replaces manifest {replacement.replaces}, not the one that its name says")
    if replacement.parent is not None and replaced.parent is None:
        differences.append("it has a parent, but the replaced manifest has none")
    new_items, old_items = _items(replacement), _items(replaced)
    names = sorted(name for name in new_items.keys() | old_items.keys() if new_items.get(name) != old_items.get(name))
    if names:
        differences.append(f"it differs from the replaced manifest in: {', '.join(names[:_NUM_NAMED])}")
    if differences:
        where = f"{store.url}/{replacement_name(sha256)}"
        raise DamagedError(f"{where}: {'; '.join(differences)}; use another checkpoint")


def _items(manifest: Manifest) -> dict[str, object]:
    """Return the parts of a manifest that its replacements must not change, by names for messages."""
    tensors = {
        f"tensor {fqn!r}": (entry.dtype, entry.size, entry.is_table, entry.table, frozenset(entry.places))
        for fqn, entry in manifest.tensors.items()
    }
    paths = {f"path of {fqn!r}": path for fqn, path in manifest.paths.items()}
    return {**tensors, **{f"object {fqn!r}": True for fqn in manifest.objects}, **paths}


@dataclass(frozen=True)
class Lineage:
    """A checkpoint chain: a checkpoint and all those that it is based on.

    Attributes:
        checkpoints: The baseline, and then each delta, based on the one before it; the newest last.
    """

    checkpoints: tuple[Checkpoint, ...]

    @property
    def newest(self) -> Checkpoint:
        """The newest checkpoint of the chain."""
        return self.checkpoints[-1]

    @property
    def head(self) -> Head:
        """The head of a job that has loaded this lineage."""
        below = tuple(checkpoint.ref for checkpoint in self.checkpoints[:-1])
        return self.newest.head(below, self.checkpoints[0].kinds)

    def limited(self, bandwidth: Bandwidth) -> "Lineage":
        """Return the same lineage with limited read bandwidth."""
        return Lineage(
            tuple(
                replace(checkpoint, store=replace(checkpoint.store, bandwidth=bandwidth))
                for checkpoint in self.checkpoints
            )
        )

    def shards(self, fqn: str) -> Iterator[Shard]:
        """Yield the shards of a tensor in all checkpoints."""
        for checkpoint in self.checkpoints:
            entry = checkpoint.manifest.tensors.get(fqn)
            yield from entry.shards if entry else ()


def read_lineage(
    path: str | os.PathLike[str] | Store,
    *,
    since: str | None = None,
    is_as_committed: bool = False,
    read: ReadFile = read_file,
) -> Lineage:
    """Read the manifests from ``path`` back to its baseline, and check that each is the one that its child names.

    Args:
        path: The newest checkpoint of the chain.
        since: Digest of an ancestor's committed manifest. The search ends there, without that ancestor.
        is_as_committed: Whether to use the manifests that were committed, even if compactions have replaced them.
        read: Returns the bytes of a manifest file.

    Raises:
        DamagedError: A parent is missing, was replaced, or is its own ancestor.
        LoadError, StoreError: The checkpoint at ``path`` cannot be read; see :func:`read_checkpoint`.
    """
    return _read_lineage(Store.open(path), None, read, since, is_as_committed)


def read_lineage_of(newest: Checkpoint, read: ReadFile) -> Lineage:
    """Read the manifests from a checkpoint's parent back to its baseline, as :func:`read_lineage` does.

    Args:
        newest: The newest checkpoint of the chain.
        read: Returns the bytes of a manifest file.

    Raises:
        DamagedError, VersionError, StoreError: The chain cannot be read; see :func:`read_lineage`.
    """
    return _read_lineage(newest.store, newest, read, None, False)


def _read_lineage(
    store: Store, newest: Checkpoint | None, read_bytes: ReadFile, since: str | None, is_as_committed: bool
) -> Lineage:
    read_each: ReadManifest = partial(read_manifest, read=read_bytes)
    with ThreadPoolExecutor(1, thread_name_prefix="cnr-manifests") as threads:  # which starts none for local files
        read_each = read_each if store.is_local else ReadAhead(read_each, threads, since)

        def read(store: Store) -> Checkpoint:
            checkpoint = _read_checkpoint(store, read_each)
            return replace(checkpoint, manifest=checkpoint.committed) if is_as_committed else checkpoint

        return Lineage(tuple(reversed(_with_ancestors(newest or read(store), since, read))))


def _with_ancestors(newest: Checkpoint, since: str | None, read: Callable[[Store], Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints of a chain, the newest first."""
    checkpoints = [newest]
    seen_paths = {newest.store.path}
    while (parent := checkpoints[-1].manifest.parent) is not None and parent.sha256 != since:
        child = checkpoints[-1].store.url
        store = checkpoints[-1].store.at(parent.path)
        if store.path in seen_paths:
            raise DamagedError(f"{child}: its parent {store.url} is its own descendant; use another checkpoint")
        seen_paths.add(store.path)
        try:
            checkpoints.append(read(store))
        except CheckpointNotFoundError as error:
            raise DamagedError(f"{child}: its parent {store.url} is missing; use another checkpoint") from error
        if checkpoints[-1].sha256 != parent.sha256:
            raise DamagedError(
                f"{child}: its parent {store.url} was replaced: the manifest's sha256 is {checkpoints[-1].sha256}, "
                f"the child expects {parent.sha256}; use another checkpoint"
            )
        if checkpoints[-1].created_ns >= checkpoints[-2].created_ns:
            raise DamagedError(f"{child}: it is not newer than its parent {store.url}; use another checkpoint")
    return checkpoints


def existing(path: str | os.PathLike[str] | Store | None) -> str | os.PathLike[str] | Store:
    """Return ``path``, the result of :func:`latest`, if it is not None.

    Raises:
        CheckpointNotFoundError: ``path`` is None.
    """
    if path is None:
        raise CheckpointNotFoundError("no path: there is no committed checkpoint to load (latest() returned None)")
    return path


def committed(path: str | Store, save_id: str) -> Checkpoint | None:
    """Return the checkpoint that a save committed, or None if it committed nothing, by reading the store.

    An unreadable manifest counts as none. The rows of its save are then saved again, based on the checkpoint before
    it, which is correct in either case.

    Raises:
        StoreError: The store does not answer.
    """
    try:
        checkpoint = read_checkpoint(path)
    except CheckpointNotFoundError:
        return None
    except LoadError as error:
        logger.warning("a save of this job left no usable checkpoint; the next save includes its rows: %s", error)
        return None
    return checkpoint if checkpoint.committed.save_id == save_id else None


def relative_path(store: Store, path: str) -> str | None:
    """Return the path relative to ``store`` of the checkpoint at ``path``; None if there is no such path."""
    other_store = Store.open(path)
    if not store.is_beside(other_store) or other_store.path == store.path:
        return None
    relative = posixpath.relpath(other_store.path, store.path)
    return relative if PARENT_PATH.fullmatch(relative) else None


def read_objects(checkpoint: Checkpoint, fqns: Collection[str], thread_count: int) -> Iterator[tuple[str, Any]]:
    """Read objects that are not tensors, and yield each with its FQN, in the order of the packs.

    Args:
        checkpoint: The checkpoint. Every checkpoint contains all objects.
        fqns: FQNs of the objects.
        thread_count: Number of requests in flight at the same time.

    Raises:
        DamagedError: A pack differs from the one that was committed, or an object would run code.
        StoreError: A pack cannot be read.
    """
    if not fqns:
        return
    manifest, url = checkpoint.manifest, checkpoint.store.url
    by_key = {f"object {fqn!r}": fqn for fqn in fqns}
    blobs = [(key, manifest.objects[fqn]) for key, fqn in by_key.items()]
    for key, data in PackReader(checkpoint.store, manifest.packs, thread_count).read(blobs):
        yield by_key[key], unpickled(data.tobytes(), f"{url}: {key}")

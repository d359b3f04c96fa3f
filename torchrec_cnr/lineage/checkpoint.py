"""Committed checkpoints, the chain (lineage) from one back to its baseline, and the head that a job continues."""

import logging
import os
import posixpath
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torchrec_cnr.errors import CheckpointNotFoundError, DamagedError, LoadError, StoreError
from torchrec_cnr.format import manifest_json
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
from torchrec_cnr.lineage.marker_commit import publish_marked
from torchrec_cnr.storage.pack_reader import PackReader
from torchrec_cnr.storage.store import NOT_THERE, Store, read_whole
from torchrec_cnr.throttling import Bandwidth


@dataclass(frozen=True)
class Head:
    """The checkpoint that a running job stands on: what its next save may be a delta of.

    Attributes:
        lineage: From the baseline to the newest checkpoint, by full path.
        created_ns: Time of the newest one's commit.
        history: Of the lineage.
        num_restores: Restores that the newest one's state has been through.
    """

    lineage: tuple[CheckpointRef, ...]
    created_ns: int
    history: History
    num_restores: int

    @property
    def ref(self) -> CheckpointRef:
        """The newest checkpoint."""
        return self.lineage[-1]

    @property
    def baseline(self) -> CheckpointRef:
        """The one that all deltas stand on."""
        return self.lineage[0]


logger = logging.getLogger(__name__)

_NUM_NAMED = 5  # items in a message


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint.

    Attributes:
        store: Its directory.
        committed: The manifest that committed it.
        sha256: Digest of that manifest, by which other checkpoints refer to this one.
        manifest: What it holds now: ``committed``, or the manifest that replaced it when the lineage was compacted.
        manifest_bytes: Size of its manifest files.
        manifest_sha256: Digest of ``manifest``.
        between: Manifests that replaced ``committed`` and were replaced themselves, oldest first.
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
        return f"Checkpoint({self.kind}, {size}, {url_text(self.store.url)})"

    @property
    def kind(self) -> CheckpointKind:
        """``baseline`` or ``delta``."""
        return self.manifest.kind

    @property
    def created_ns(self) -> int:
        """Unix time of its commit, in nanoseconds."""
        return self.committed.created_ns

    @property
    def is_compacted(self) -> bool:
        """Whether another manifest has replaced the one that committed it."""
        return self.manifest is not self.committed

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """All that were ever in force, oldest first: a load that began before a compaction reads by an earlier one."""
        return (self.committed, *self.between, self.manifest) if self.is_compacted else (self.manifest,)

    @property
    def num_rows(self) -> int:
        """Rows of tables stored."""
        return self.manifest.num_rows

    @property
    def num_exact_rows(self) -> int:
        """Rows stored exactly because codes cannot represent them; one in several shards counts in each."""
        return self.manifest.num_exact_rows

    @property
    def num_restores(self) -> int:
        """Restores from a checkpoint that its state has been through."""
        return self.manifest.num_restores

    @property
    def num_bytes(self) -> int:
        """Bytes of all its own files."""
        return self.manifest.pack_bytes + self.manifest_bytes

    @property
    def parent(self) -> str | None:
        """Full path or URL of the parent, or None for a baseline."""
        parent = self.manifest.parent
        return None if parent is None else self.store.at(parent.path).url

    @property
    def ref(self) -> CheckpointRef:
        """This checkpoint by its full path."""
        return CheckpointRef(self.store.url, self.sha256)

    def head(self, below: tuple[CheckpointRef, ...]) -> Head:
        """What a job stands on that stands on this checkpoint, with those below it from the baseline on."""
        return Head((*below, self.ref), self.created_ns, self.manifest.history, self.num_restores)


def read_checkpoint(path: str | os.PathLike[str] | Store) -> Checkpoint:
    """Read and validate a checkpoint's manifest.

    Args:
        path: The checkpoint's path or URL, that is, its ``checkpoint_id``; or its store.

    Raises:
        CheckpointNotFoundError: There is no manifest: nothing was ever committed here.
        DamagedError: The manifest is not what was committed.
        VersionError: It was written by a newer version.
        StoreError: It cannot be read for another reason.
    """
    store = Store.open(path)
    found = _read_manifest(store, MANIFEST_FILE)
    if found is None and store.row_log is not None:
        publish_marked(store.at(".."), [posixpath.basename(store.path)])
        found = _read_manifest(store, MANIFEST_FILE)
    if found is None:
        raise CheckpointNotFoundError(
            f"{store.url}: no {MANIFEST_FILE}: nothing was committed here (a save that died leaves packs without one); "
            "torchrec_cnr.latest(root) names the newest checkpoint"
        )
    committed, sha256, num_bytes = found
    if committed.replaces is not None:
        raise DamagedError(
            f"{store.url}/{MANIFEST_FILE}: it replaces manifest {committed.replaces}, expected one that replaces none; "
            "use another checkpoint"
        )
    manifest, last = committed, sha256
    chain: list[Manifest] = []
    while (found := _read_manifest(store, replacement_name(last))) is not None:
        replacement, digest, size = found
        _check_replacement(replacement, manifest, last, store)
        manifest, last, num_bytes = replacement, digest, num_bytes + size
        chain.append(manifest)
    return Checkpoint(store, committed, sha256, manifest, num_bytes, last, tuple(chain[:-1]))


def _check_replacement(replacement: Manifest, replaced: Manifest, sha256: str, store: Store) -> None:
    """What takes a manifest's place must be of the same state, as far as manifests tell."""
    different = []
    if replacement.replaces != sha256:
        different.append(f"it replaces manifest {replacement.replaces}, not the one that its name says")
    if replacement.parent is not None and replaced.parent is None:
        different.append("it has a parent, what it replaces has none")
    new, old = _items(replacement), _items(replaced)
    items = sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name))
    if items:
        different.append(f"it has otherwise than what it replaces: {', '.join(items[:_NUM_NAMED])}")
    if different:
        where = f"{store.url}/{replacement_name(sha256)}"
        raise DamagedError(f"{where}: {'; '.join(different)}; use another checkpoint")


def _items(manifest: Manifest) -> dict[str, object]:
    """What of a manifest stays the same for ever, by names for messages."""
    tensors = {
        f"tensor {fqn!r}": (entry.dtype, entry.size, entry.is_table, entry.table, frozenset(entry.places))
        for fqn, entry in manifest.tensors.items()
    }
    paths = {f"path of {fqn!r}": path for fqn, path in manifest.paths.items()}
    return {**tensors, **{f"object {fqn!r}": True for fqn in manifest.objects}, **paths}


def _read_manifest(store: Store, name: str) -> tuple[Manifest, str, int] | None:
    """A manifest, its digest and its size; None if it is not there."""
    try:
        data = read_whole(store, name, manifest_json.MAX_MANIFEST_BYTES)
    except StoreError as error:
        if error.errno in NOT_THERE:
            return None
        raise
    manifest, sha256 = manifest_json.loads(data, f"{store.url}/{name}")
    _check_places(manifest, store, name)
    return manifest, sha256, len(data)


def _check_places(manifest: Manifest, store: Store, name: str) -> None:
    """What a manifest names lies in its store: no path leads above its top."""
    places = {pack.directory for pack in manifest.packs if pack.directory is not None}
    if manifest.parent is not None:
        places.add(manifest.parent.path)
    top = "../" * len(store.path.strip("/").split("/"))
    for place in places:
        if place.startswith(f"{top}../"):
            raise DamagedError(f"{store.url}/{name}: the path {place!r} leads out of the store; use another checkpoint")


@dataclass(frozen=True)
class Lineage:
    """A head and all that it stands on.

    Attributes:
        checkpoints: The baseline, then each delta on the one before it; the head last.
    """

    checkpoints: tuple[Checkpoint, ...]

    @property
    def newest(self) -> Checkpoint:
        """The checkpoint that was asked for."""
        return self.checkpoints[-1]

    @property
    def head(self) -> Head:
        """What a job that loaded this lineage stands on."""
        return self.newest.head(tuple(checkpoint.ref for checkpoint in self.checkpoints[:-1]))

    def limited(self, bandwidth: Bandwidth) -> "Lineage":
        """The same, read no faster than that."""
        return Lineage(
            tuple(replace(found, store=replace(found.store, bandwidth=bandwidth)) for found in self.checkpoints)
        )

    def shards(self, fqn: str) -> Iterator[Shard]:
        """The shards of a tensor in every checkpoint."""
        for checkpoint in self.checkpoints:
            entry = checkpoint.manifest.tensors.get(fqn)
            yield from entry.shards if entry else ()


def read_lineage(
    path: str | os.PathLike[str] | Store, *, since: str | None = None, is_as_committed: bool = False
) -> Lineage:
    """Read the manifests from ``path`` back to its baseline; each must be the one that its child names.

    Args:
        path: The head.
        since: Digest of an ancestor's committed manifest: only what stands on that one is read, if it is come across.
        is_as_committed: Whether to go by the manifests that were committed, even where others have replaced them.

    Raises:
        DamagedError: A parent is missing, was replaced, or is its own ancestor.
        LoadError, StoreError: As :func:`read_checkpoint`, for ``path`` itself.
    """

    def read(store: Store) -> Checkpoint:
        checkpoint = read_checkpoint(store)
        return replace(checkpoint, manifest=checkpoint.committed) if is_as_committed else checkpoint

    found = [read(Store.open(path))]
    seen = {found[0].store.path}
    while (parent := found[-1].manifest.parent) is not None and parent.sha256 != since:
        child = found[-1].store.url
        store = found[-1].store.at(parent.path)
        if store.path in seen:
            raise DamagedError(f"{child}: its parent {store.url} is its own descendant; use another checkpoint")
        seen.add(store.path)
        try:
            found.append(read(store))
        except CheckpointNotFoundError as error:
            raise DamagedError(f"{child}: its parent {store.url} is missing; use another checkpoint") from error
        if found[-1].sha256 != parent.sha256:
            raise DamagedError(
                f"{child}: its parent {store.url} was replaced: the manifest's sha256 is {found[-1].sha256}, "
                f"the child expects {parent.sha256}; use another checkpoint"
            )
        if found[-1].created_ns >= found[-2].created_ns:
            raise DamagedError(f"{child}: it is not newer than its parent {store.url}; use another checkpoint")
    return Lineage(tuple(reversed(found)))


def existing(path: str | os.PathLike[str] | Store | None) -> str | os.PathLike[str] | Store:
    """What :func:`latest` returned, if it found a checkpoint.

    Raises:
        CheckpointNotFoundError: It is None.
    """
    if path is None:
        raise CheckpointNotFoundError("no path: there is no committed checkpoint to load (latest() returned None)")
    return path


def committed(path: str | Store, save_id: str) -> Checkpoint | None:
    """The checkpoint that a save committed, or None if it committed nothing: the fate of a save, read from the store.

    A manifest that cannot be made sense of counts as none: the rows of its save are then saved once more, on top of
    the checkpoint before, which is right whatever happened.

    Raises:
        StoreError: The store does not answer.
    """
    try:
        checkpoint = read_checkpoint(path)
    except CheckpointNotFoundError:
        return None
    except LoadError as error:
        logger.warning("a save of this job left no usable checkpoint, its rows will be saved again: %s", error)
        return None
    return checkpoint if checkpoint.committed.save_id == save_id else None


def relative_path(store: Store, path: str) -> str | None:
    """How a checkpoint in ``store`` names the one at ``path``, or None where it cannot."""
    other = Store.open(path)
    if not store.is_beside(other) or other.path == store.path:
        return None
    relative = posixpath.relpath(other.path, store.path)
    return relative if PARENT_PATH.fullmatch(relative) else None


def read_objects(checkpoint: Checkpoint, fqns: Collection[str], thread_count: int) -> Iterator[tuple[str, Any]]:
    """Read what a checkpoint holds beside tensors, and yield each with its FQN, in their order in the packs.

    Args:
        checkpoint: The checkpoint; objects are stored whole in each.
        fqns: Which of its objects.
        thread_count: Requests in flight at once.

    Raises:
        DamagedError: A pack is not what was committed, or an object would run code.
        StoreError: A pack cannot be read.
    """
    if not fqns:
        return
    manifest, url = checkpoint.manifest, checkpoint.store.url
    by_key = {f"object {fqn!r}": fqn for fqn in fqns}
    blobs = [(key, manifest.objects[fqn]) for key, fqn in by_key.items()]
    for key, data in PackReader(checkpoint.store, manifest.packs, thread_count).read(blobs):
        yield by_key[key], unpickled(data.tobytes(), f"{url}: {key}")

"""Committed checkpoints, and the lineage from a head back to its baseline."""

import errno
import logging
import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass

from torchrec_cnr import manifest_json
from torchrec_cnr.errors import CheckpointNotFoundError, DamagedError, LoadError, StoreError
from torchrec_cnr.manifest import FILE_NAME, PARENT_PATH, CheckpointRef, Head, Kind, Manifest, Shard
from torchrec_cnr.stores import Store

logger = logging.getLogger(__name__)

_START_BYTES = 512  # enough of a manifest file to hold its time of commit


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint.

    Attributes:
        store: Its directory.
        manifest: What it holds.
        sha256: Digest of the manifest.
        manifest_bytes: Size of the manifest file.
    """

    store: Store
    manifest: Manifest
    sha256: str
    manifest_bytes: int

    @property
    def kind(self) -> Kind:
        """``baseline`` or ``delta``."""
        return self.manifest.kind

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
        """Bytes of all its files."""
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


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read and validate a checkpoint's manifest.

    Args:
        path: The checkpoint's path or URL, that is, its ``checkpoint_id``.

    Raises:
        CheckpointNotFoundError: There is no manifest: nothing was ever committed here.
        DamagedError: The manifest is not what was committed.
        VersionError: It was written by a newer version.
        StoreError: It cannot be read for another reason.
    """
    return _read(Store.open(path))


def _read(store: Store) -> Checkpoint:
    try:
        data = store.read(FILE_NAME)
    except StoreError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise CheckpointNotFoundError(
                f"{store.url}: no {FILE_NAME}: nothing was committed here (a save that died leaves packs without one); "
                "torchrec_cnr.latest(root) names the newest checkpoint"
            ) from error
        raise
    manifest, sha256 = manifest_json.loads(data, f"{store.url}/{FILE_NAME}")
    return Checkpoint(store, manifest, sha256, len(data))


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
        return Head.of(self.newest.manifest, tuple(checkpoint.ref for checkpoint in self.checkpoints))

    def shards(self, fqn: str) -> Iterator[Shard]:
        """The shards of a tensor in every checkpoint."""
        for checkpoint in self.checkpoints:
            entry = checkpoint.manifest.tensors.get(fqn)
            yield from entry.shards if entry else ()


def read_lineage(path: str | os.PathLike[str]) -> Lineage:
    """Read the manifests from ``path`` back to its baseline; each must be the one that its child names.

    Raises:
        DamagedError: A parent is missing, was replaced, or is its own ancestor.
        LoadError, StoreError: As :func:`read_checkpoint`, for ``path`` itself.
    """
    found = [read_checkpoint(path)]
    seen = {found[0].store.path}
    while (parent := found[-1].manifest.parent) is not None:
        child = found[-1].store.url
        store = found[-1].store.at(parent.path)
        if store.path in seen:
            raise DamagedError(f"{child}: its parent {store.url} is its own descendant; use another checkpoint")
        seen.add(store.path)
        try:
            found.append(_read(store))
        except CheckpointNotFoundError as error:
            raise DamagedError(f"{child}: its parent {store.url} is missing; use another checkpoint") from error
        if found[-1].sha256 != parent.sha256:
            raise DamagedError(
                f"{child}: its parent {store.url} was replaced: the manifest's sha256 is {found[-1].sha256}, "
                f"the child expects {parent.sha256}; use another checkpoint"
            )
        if found[-1].manifest.created_ns >= found[-2].manifest.created_ns:
            raise DamagedError(f"{child}: it is not newer than its parent {store.url}; use another checkpoint")
    return Lineage(tuple(reversed(found)))


def latest(root: str | os.PathLike[str]) -> str | None:
    """The newest committed checkpoint directly under ``root``, by the time of its commit.

    Directories without a manifest are no checkpoints; one with a damaged manifest, or that may not be read, is passed
    over with a warning.

    Returns:
        Its path or URL, or None where there is none.

    Raises:
        VersionError: The newest was written by a newer version: resuming from an older one would lose work silently.
        StoreError: ``root`` cannot be listed.
    """
    directory = Store.open(root)
    candidates = []
    for name in directory.names():
        try:
            start = directory.at(name).read(FILE_NAME, 0, _START_BYTES)
        except StoreError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                logger.warning("passed over while looking for the latest checkpoint: %s", error)
            elif error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
                raise
            continue
        candidates.append((manifest_json.created_ns(start) or 0, name))
    for _, name in sorted(candidates, reverse=True):
        store = directory.at(name)
        try:
            return _read(store).store.url
        except DamagedError as error:
            logger.warning("passed over while looking for the latest checkpoint: %s", error)
    return None


def existing(path: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """What :func:`latest` returned, if it found a checkpoint.

    Raises:
        CheckpointNotFoundError: It is None.
    """
    if path is None:
        raise CheckpointNotFoundError("no path: there is no committed checkpoint to load (latest() returned None)")
    return path


def committed(path: str, save_id: str) -> Checkpoint | None:
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
    return checkpoint if checkpoint.manifest.save_id == save_id else None


def relative_path(store: Store, path: str) -> str | None:
    """How a checkpoint in ``store`` names the one at ``path``, or None where it cannot."""
    other = Store.open(path)
    if not store.is_beside(other) or other.path == store.path:
        return None
    relative = posixpath.relpath(other.path, store.path)
    return relative if PARENT_PATH.fullmatch(relative) else None

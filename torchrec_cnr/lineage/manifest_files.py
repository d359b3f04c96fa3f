"""Reads manifest files, also in advance, and by one rank for all ranks of a load."""

import posixpath
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import zstandard

from torchrec_cnr.errors import DamagedError, StoreError
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.manifest import MANIFEST_FILE, Manifest
from torchrec_cnr.storage.store import NOT_THERE, Store, read_whole

ManifestFile = tuple[Manifest, str, int]  # a manifest, its digest, and the size of its file in bytes
ReadFile = Callable[[Store, str], bytes | None]
ReadManifest = Callable[[Store, str], ManifestFile | None]

_RANK_BYTES = 1 << 20  # sent to one rank, which parses them in about a second; it could read larger ones earlier
_SENT_BYTES = 64 << 20  # to all ranks together: DCP holds them in the coordinator's memory, with NCCL in its GPU's


def read_file(store: Store, name: str) -> bytes | None:
    """Return the bytes of a manifest file; None if it does not exist.

    Raises:
        DamagedError: It is too large for a manifest, or is a link or a pipe.
        StoreError: It cannot be read.
    """
    try:
        return read_whole(store, name, manifest_json.MAX_MANIFEST_BYTES)
    except StoreError as error:
        if error.errno in NOT_THERE:
            return None
        raise


def read_manifest(store: Store, name: str, read: ReadFile = read_file) -> ManifestFile | None:
    """Return a valid manifest, its digest and its size in bytes; None if it does not exist.

    Args:
        store: Directory of the checkpoint.
        name: Name of the file.
        read: Returns its bytes.

    Raises:
        DamagedError, VersionError, StoreError: It cannot be read, or is not valid.
    """
    data = read(store, name)
    if data is None:
        return None
    manifest, sha256 = manifest_json.loads(data, f"{store.url}/{name}")
    _check_places(manifest, store, name)
    return manifest, sha256, len(data)


def _check_places(manifest: Manifest, store: Store, name: str) -> None:
    """Raise ``DamagedError`` if a path in a manifest leads above the top of its store."""
    paths = {pack.directory for pack in manifest.packs if pack.directory is not None}
    if manifest.parent is not None:
        paths.add(manifest.parent.path)
    top = "../" * len(store.path.strip("/").split("/"))
    for path in paths:
        if path.startswith(f"{top}../"):
            raise DamagedError(f"{store.url}/{name}: the path {path!r} leads out of the store; use another checkpoint")


class ReadAhead:
    """Reads the manifest of each parent in a thread, while the caller looks for a replacement of the child's.

    Args:
        read: Reads a manifest.
        threads: Threads to read in.
        since: Digest of an ancestor that is not read.
    """

    def __init__(self, read: ReadManifest, threads: Executor, since: str | None) -> None:
        self._read = read
        self._threads = threads
        self._since = since
        self._reads: dict[str, Future[ManifestFile | None]] = {}

    def __call__(self, store: Store, name: str) -> ManifestFile | None:
        """Return what :func:`read_manifest` returns."""
        ahead = self._reads.pop(store.url, None) if name == MANIFEST_FILE else None
        found = self._read(store, name) if ahead is None else ahead.result()
        parent = found[0].parent if found is not None and name == MANIFEST_FILE else None
        if parent is not None and parent.sha256 != self._since:
            above = store.at(parent.path)
            self._reads[above.url] = self._threads.submit(self._read, above, MANIFEST_FILE)
        return found


FilePlace = tuple[str, str]  # the path of its directory, relative to the newest checkpoint, and its name


@dataclass(frozen=True)
class SentFiles:
    """Manifest files that the coordinator of a load has read for other ranks.

    A rank parses and verifies them as if it had read them itself: its own newest manifest contains the digest of the
    next one, and so on. It reads those that are missing here.

    Attributes:
        newest_sha256: Digest of the newest checkpoint's committed manifest, by which others refer to that checkpoint.
        files: The compressed bytes of each file; None for a file that does not exist.
    """

    newest_sha256: str
    files: Mapping[FilePlace, bytes | None]

    def reader_at(self, newest: Store) -> ReadFile:
        """Return a function that returns the bytes of these files, and reads others.

        Args:
            newest: Directory of the newest checkpoint, as this rank sees it.
        """

        def read(store: Store, name: str) -> bytes | None:
            place = _place(store, name, newest)
            if place not in self.files:
                return read_file(store, name)
            data = self.files[place]
            return None if data is None else zstandard.ZstdDecompressor().decompress(data)

        return read


class KeptFiles:
    """Reads the manifest files of a chain, and keeps those of older checkpoints for other ranks.

    It keeps the newest ones: 1 MiB after compression, and at most 64 MiB for all ranks together.

    Args:
        newest: Directory of the newest checkpoint of the chain.
        num_ranks: Number of ranks to which the files are sent.
    """

    def __init__(self, newest: Store, num_ranks: int) -> None:
        self._newest = newest
        self._files: dict[FilePlace, bytes | None] = {}
        self._left_bytes = min(_RANK_BYTES, _SENT_BYTES // num_ranks)

    def read(self, store: Store, name: str) -> bytes | None:
        """Return what :func:`read_file` returns, in any thread."""
        data = read_file(store, name)
        if self._left_bytes >= 0 and store.path != self._newest.path:
            kept = None if data is None else zstandard.ZstdCompressor().compress(data)
            self._left_bytes -= 0 if kept is None else len(kept)
            if self._left_bytes >= 0:
                self._files[_place(store, name, self._newest)] = kept
        return data

    def sent(self, newest_sha256: str) -> SentFiles | None:
        """Return the files to send; None if there are none.

        Args:
            newest_sha256: Digest of the newest checkpoint's committed manifest.
        """
        return SentFiles(newest_sha256, self._files) if self._files else None


def _place(store: Store, name: str, newest: Store) -> FilePlace:
    return posixpath.relpath(store.path, newest.path), name

"""The catalog: all that lies under a root, read once and then only looked at.

Every directory of the root is in it: checkpoints with their manifests, those that cannot be read with the reason, and
whatever else is there. Upkeep plans from a catalog alone, without I/O, so that what it will do can be shown before.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

from torchrec_cnr.errors import CheckpointNotFoundError, CNRError
from torchrec_cnr.lineage import Checkpoint, Lineage, read_checkpoint
from torchrec_cnr.manifest import FILE_NAME
from torchrec_cnr.stores import Store

_NUM_THREADS = 8
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Entry:
    """A directory under the root.

    Attributes:
        store: The directory.
        name: Its name.
        files: Sizes in bytes of the files in it, by name.
        checkpoint: What was committed there, or None.
        problem: Why the directory, or a manifest that is there, cannot be read; or None.
    """

    store: Store
    name: str
    files: Mapping[str, int]
    checkpoint: Checkpoint | None = None
    problem: CNRError | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all files in it."""
        return sum(self.files.values())


@dataclass(frozen=True)
class Catalog:
    """What lies under a root.

    Attributes:
        root: The root.
        entries: Its directories, by name.
        files: Sizes in bytes of the files in the root itself, by name.
    """

    root: Store
    entries: Mapping[str, Entry]
    files: Mapping[str, int]

    @cached_property
    def checkpoints(self) -> Mapping[str, Checkpoint]:
        """All checkpoints that can be read, by name, oldest first."""
        found = [(name, entry.checkpoint) for name, entry in self.entries.items() if entry.checkpoint is not None]
        return dict(sorted(found, key=lambda item: item[1].created_ns))

    def parent(self, checkpoint: Checkpoint) -> str | None:
        """The name of a checkpoint's parent, if that is here and is the one that was meant."""
        ref = checkpoint.manifest.parent
        name = None if ref is None else self._name_of(checkpoint.store.at(ref.path))
        found = self.checkpoints.get(name) if name is not None else None
        return name if found is not None and ref is not None and found.sha256 == ref.sha256 else None

    def lineage(self, name: str) -> Lineage | None:
        """From the baseline to a checkpoint; None if a link is missing."""
        found: list[Checkpoint] = []
        next_: str | None = name
        while next_ is not None and len(found) <= len(self.checkpoints):
            found.append(self.checkpoints[next_])
            next_ = self.parent(found[-1])
        return Lineage(tuple(reversed(found))) if found[-1].manifest.parent is None else None

    def uses(self, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
        """The packs of a checkpoint: name of the directory under the root, and file name."""
        for pack in checkpoint.manifest.packs:
            store = checkpoint.store if pack.directory is None else checkpoint.store.at(pack.directory)
            name = self._name_of(store)
            if name is not None:
                yield name, pack.name

    def heads(self) -> list[str]:
        """Checkpoints that are nobody's parent, oldest first."""
        parents = {self.parent(checkpoint) for checkpoint in self.checkpoints.values()}
        return [name for name in self.checkpoints if name not in parents]

    def _name_of(self, store: Store) -> str | None:
        above, _, name = store.path.rpartition("/")
        return name if above == self.root.path.rstrip("/") else None


def read_catalog(root: str | os.PathLike[str], progress: Progress | None = None) -> Catalog:
    """List a root and read all manifests.

    Args:
        root: A directory of checkpoints, path or fsspec URL.
        progress: Told how many of how many directories were read.

    Raises:
        StoreError: It cannot be listed.
    """
    store = Store.open(root)
    listed: dict[str, dict[str, int]] = {}
    own: dict[str, int] = {}
    for path, num_bytes in store.listing().items():
        directory, _, name = path.rpartition("/")
        if directory:
            listed.setdefault(directory, {})[name] = num_bytes
        else:
            own[name] = num_bytes
    for name in store.names():  # also those without files, and those that may not be listed
        if name not in own:
            listed.setdefault(name, {})
    entries: dict[str, Entry] = {}
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="cnr-catalog") as threads:
        for entry in threads.map(lambda item: _read_entry(store.at(item[0]), *item), listed.items()):
            entries[entry.name] = entry
            if progress is not None:
                progress(len(entries), len(listed))
    return Catalog(store, entries, own)


def _read_entry(store: Store, name: str, files: Mapping[str, int]) -> Entry:
    try:
        if FILE_NAME not in files:
            if not files:
                store.names()  # says why there are none
            return Entry(store, name, files)
        return Entry(store, name, files, read_checkpoint(store.url))
    except CheckpointNotFoundError:  # removed since it was listed
        return Entry(store, name, {})
    except CNRError as error:
        return Entry(store, name, files, problem=error)


def total_bytes(entries: Iterable[Entry]) -> int:
    """Bytes of all files in some directories."""
    return sum(entry.num_bytes for entry in entries)

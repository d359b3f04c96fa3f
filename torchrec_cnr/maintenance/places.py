"""Places: what a path that somebody gave stands for, and what to say of one where no checkpoint is."""

import os

from torchrec_cnr.errors import CheckpointNotFoundError, ConfigurationError
from torchrec_cnr.maintenance.catalog import Catalog
from torchrec_cnr.manifest import FILE_NAME
from torchrec_cnr.marking import settle
from torchrec_cnr.newest import latest
from torchrec_cnr.row_logs import RowLog
from torchrec_cnr.stores import Store

_PACK_SUFFIX = ".safetensors"


def is_checkpoint(store: Store) -> bool:
    """Whether a manifest lies there, or a marker in the store's log says that one is to."""
    if not store.exists(FILE_NAME):
        settle(store.at(".."))
    return store.exists(FILE_NAME)


def checkpoint_at(path: str | os.PathLike[str], rows: RowLog | None = None) -> Store:
    """The checkpoint at a path, and of a root its newest checkpoint; its store has the log that rows went to.

    Raises:
        CheckpointNotFoundError: There is none.
        VersionError: The newest was written by a newer version.
        StoreError: The place cannot be read.
    """
    store = Store.open(path, log=rows)
    if is_checkpoint(store):
        return store
    newest = latest(path, rows=rows)
    if newest is None:
        raise no_checkpoint(store)
    return Store.open(newest, log=rows)


def check_root(catalog: Catalog) -> None:
    """A root is a directory of directories. An empty one may become one.

    Raises:
        ConfigurationError: It is a checkpoint itself.
        CheckpointNotFoundError: Nothing is there, or files only.
        StoreError: The place cannot be looked up.
    """
    root = catalog.root
    if FILE_NAME in catalog.files:
        raise ConfigurationError(f"{root.url}: a checkpoint, no root; give the directory that it lies in")
    if not catalog.entries and not catalog.journal.files and (catalog.files or not root.is_directory()):
        raise no_checkpoint(root)


def no_checkpoint(store: Store) -> CheckpointNotFoundError:
    """The error of a place where neither a checkpoint is nor a directory that holds one.

    Raises:
        StoreError: The place cannot be listed.
    """
    names = store.names()
    if any(name.endswith(_PACK_SUFFIX) for name in names):
        why = f"packs, but no {FILE_NAME}: a save that died, or is not done yet"
    elif names:
        why = "no checkpoint is here, nor in a directory of it"
    else:
        what = "a file, no directory" if store.exists("") else "nothing is there"
        why = "an empty directory" if store.is_directory() else what
    return CheckpointNotFoundError(f"{store.url}: {why}")

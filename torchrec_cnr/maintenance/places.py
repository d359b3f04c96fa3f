"""Places: what a path that somebody gave stands for, and what to say of one where no checkpoint is."""

import os

from torchrec_cnr.errors import CheckpointNotFoundError
from torchrec_cnr.lineage import latest
from torchrec_cnr.manifest import FILE_NAME
from torchrec_cnr.stores import Store

_PACK_SUFFIX = ".safetensors"


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a manifest lies there."""
    return Store.open(path).exists(FILE_NAME)


def checkpoint_at(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The path of a checkpoint itself, and of a root its newest checkpoint.

    Raises:
        CheckpointNotFoundError: There is none.
        VersionError: The newest was written by a newer version.
        StoreError: The place cannot be read.
    """
    newest = path if is_checkpoint(path) else latest(path)
    if newest is None:
        raise no_checkpoint(Store.open(path))
    return newest


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
        why = "an empty directory" if store.exists("") else "nothing is there"
    return CheckpointNotFoundError(f"{store.url}: {why}")

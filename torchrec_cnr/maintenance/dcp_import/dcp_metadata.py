"""Reads the ``.metadata`` of a checkpoint in DCP's own format, without running code from it.

It is a pickle, and a pickle can call any function that it names. So the unpickler allows only the few classes that
DCP's metadata consists of.
"""

import errno
import io
import pathlib
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata
from torch.serialization import _get_layout

from torchrec_cnr.errors import CheckpointNotFoundError, DamagedError, StoreError
from torchrec_cnr.format.manifest_json import MAX_MANIFEST_BYTES
from torchrec_cnr.format.safe_pickle import check_pickle
from torchrec_cnr.storage.store import Store, read_whole

METADATA_FILE = ".metadata"

_CLASSES = (
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
)
_KNOWN: dict[tuple[str, str], Any] = {
    **{(known.__module__, known.__name__): known for known in _CLASSES},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    # The path to which it was saved, of any operating system. It is not used.
    **{
        (module, f"{system}Path"): pathlib.PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for system in ("Posix", "Windows")
    },
}


def read_dcp_metadata(store: Store) -> Metadata:
    """Read the metadata that DCP's ``FileSystemWriter`` wrote. Only its type is checked, not its contents.

    Raises:
        CheckpointNotFoundError: There is no ``.metadata``.
        DamagedError: It is not a pickle of DCP's metadata, or needs other classes.
        StoreError: It cannot be read.
    """
    url = f"{store.url}/{METADATA_FILE}"
    try:
        data = read_whole(store, METADATA_FILE, MAX_MANIFEST_BYTES)
    except StoreError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise CheckpointNotFoundError(
                f"{url}: does not exist, so this is not a checkpoint that dcp.save wrote with a FileSystemWriter"
            ) from error
        raise
    try:
        check_pickle(data)
        dcp_metadata = _Unpickler(io.BytesIO(data), url).load()
    except DamagedError:
        raise
    except Exception as error:  # invalid bytes may make the unpickler raise anything
        raise DamagedError(f"{url}: not DCP's metadata ({type(error).__name__}: {error})") from error
    if not isinstance(dcp_metadata, Metadata):
        raise DamagedError(f"{url}: expected DCP's Metadata, got {type(dcp_metadata).__name__}")
    return dcp_metadata


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, url: str) -> None:
        super().__init__(stream)
        self._url = url

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function that a pickle names, if it is allowed."""
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(value := vars(torch).get(name), torch.dtype):
            return value
        raise DamagedError(
            f"{self._url}: names {module}.{name}, which metadata of DCP's FileSystemWriter does not need and which "
            "might run code; if you trust it, load it with dcp.load and save it with a FileSystemWriter"
        )

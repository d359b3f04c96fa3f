"""The destination of an export: a new directory or file, which is removed again if the export fails."""

import os
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.storage.files import Stream
from torchrec_cnr.storage.store import Store

Written = tuple[Store, tuple[str, ...], tuple[str, ...]]  # directory, names of its files, FQNs that were left out


@contextmanager
def new_directory(out: str | os.PathLike[str]) -> Iterator[Store]:
    """Yield an empty directory, which is created if it does not exist.

    Raises:
        ConfigurationError: The directory is not empty, or it is a file.
        StoreError: The file system failed.
    """
    store = Store.open(out)
    listing, name = store.at("..").listing(), posixpath.basename(store.path)
    if name in listing.files or store.names():
        raise ConfigurationError(f"{store.url} already exists and is not empty; export to another path")
    is_new = name not in (*listing.directories, *listing.links)
    store.make()
    try:
        yield store
    except BaseException:
        with suppress(Exception):
            for name in store.names():
                store.fs.rm(store.child(name))
            if is_new:
                store.fs.rmdir(store.path)
        raise


@contextmanager
def new_file(out: str | os.PathLike[str]) -> Iterator[Stream]:
    """Yield a stream that writes a new file. Its directory is created if it does not exist.

    Raises:
        ConfigurationError: The path already exists.
        StoreError: The file system failed.
    """
    target = Store.open(out)
    store, name = target.at(".."), posixpath.basename(target.path)
    if store.exists(name):
        raise ConfigurationError(f"{target.url} already exists; export to another path")
    store.make()
    try:
        with store.create(name) as stream:
            yield stream
    except BaseException:
        with suppress(Exception):
            store.fs.rm(target.path)
        raise

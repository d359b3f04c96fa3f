"""Where an export goes: a directory or file that is not there yet, and is gone again if the export fails."""

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
    """An empty directory, which is made if there is none.

    Raises:
        ConfigurationError: Something is in it, or it is a file.
        StoreError: The file system refused.
    """
    store = Store.open(out)
    above, name = store.at("..").listing(), posixpath.basename(store.path)
    if name in above.files or store.names():
        raise ConfigurationError(f"{store.url} is there already, and not empty; export to another place")
    is_new = name not in (*above.directories, *above.links)
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
    """A file to be written, in a directory that is made if there is none.

    Raises:
        ConfigurationError: Something is there already.
        StoreError: The file system refused.
    """
    place = Store.open(out)
    store, name = place.at(".."), posixpath.basename(place.path)
    if store.exists(name):
        raise ConfigurationError(f"{place.url} is there already; export to another place")
    store.make()
    try:
        with store.create(name) as stream:
            yield stream
    except BaseException:
        with suppress(Exception):
            store.fs.rm(place.path)
        raise

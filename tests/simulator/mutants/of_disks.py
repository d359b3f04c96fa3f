"""Mutants of what makes files on a local disk whole and durable."""

import errno
import os
import posixpath
from typing import Any

from tests.simulator.engine.disk_calls import open_file, os_module
from tests.simulator.engine.disk_plan import DiskPlan
from tests.simulator.mutants.replacing import Mutant, both, nothing, replacing, wrapping
from torchrec_cnr.format.manifest import MANIFEST_FILE, PACK_SUFFIX
from torchrec_cnr.storage import local_files
from torchrec_cnr.storage import store as storing
from torchrec_cnr.storage.store import Store


def _is_plain(disk: DiskPlan) -> bool:
    """Return whether a disk has neither hard links nor renames that fail if the name exists."""
    return not disk.has_links and not disk.has_renames


def _in_place(link_new: Any, path: str, data: bytes, unlinked: str, sync_files: bool) -> None:
    """A manifest has its name before its bytes; fences are as they were."""
    if not path.endswith(f"/{MANIFEST_FILE}"):
        link_new(path, data, unlinked, sync_files)
        return
    with open_file(path, "xb") as file:
        file.write(data)
        file.flush()
        os_module.fsync(file.fileno())
    local_files.sync_directory(path.rpartition("/")[0])


def _is_only_put(put: Any, store: Store, name: str, parts: Any, is_durable: bool = True) -> None:
    put(store, name, parts, is_durable and not name.endswith(PACK_SUFFIX))


def _look_and_rename(unlinked: str, path: str) -> None:
    """Without a lock, another one may take the name between the look and the rename."""
    if os_module.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    os_module.rename(unlinked, path)


def _take_and_rename(unlinked: str, path: str) -> None:
    """The name is taken by an empty file first."""
    open_file(path, "xb").close()
    os_module.rename(unlinked, path)


def _for_now(remove: Any, store: Store, name: str, is_durable: bool = False) -> None:
    remove(store, name)


def _if_made(path: str) -> None:
    """Only what this process makes is forced to disk."""
    above = posixpath.dirname(path)
    if not os_module.path.exists(above):
        _if_made(above)
    if not os_module.path.exists(path):
        os_module.makedirs(path, exist_ok=True)
        local_files.sync_directory(above)


def _names_first(link_new: Any, path: str, data: bytes, unlinked: str, sync_files: bool) -> None:
    """What is linked was not forced to disk."""
    link_new(path, data, unlinked, False)
    local_files.sync_directory(path.rpartition("/")[0])


OF_DISKS: tuple[Mutant, ...] = (
    Mutant("a manifest is written in place", lambda: wrapping(storing, "link_new", _in_place)),
    Mutant("packs are not forced to disk", lambda: wrapping(Store, "put", _is_only_put)),
    Mutant("manifests are not forced to disk", lambda: wrapping(storing, "link_new", _names_first)),
    Mutant(
        "directories are not forced to disk",
        lambda: both(
            replacing(local_files, "sync_directory", nothing),
            replacing(storing, "sync_directory", nothing),
        ),
    ),
    Mutant(
        "without links, a name is taken after a look, without a lock",
        lambda: replacing(local_files, "_rename_new", _look_and_rename),
        disks=_is_plain,
    ),
    Mutant(
        "without links, a name is taken by an empty file first",
        lambda: replacing(local_files, "_rename_new", _take_and_rename),
        disks=_is_plain,
    ),
    Mutant("names that others made are not forced to disk", lambda: replacing(Store, "force_names", nothing)),
    Mutant(
        "directories that others made are not forced to disk",
        lambda: replacing(storing, "make_directory", _if_made),
    ),
    Mutant("the removal of a manifest is not forced to disk", lambda: wrapping(Store, "remove", _for_now)),
)

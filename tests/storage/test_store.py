"""Stores: names, listings, reads and writes of any file system."""

import errno
import os
import time
from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.faults import become_nobody
from tests.support.killing import in_child
from torchrec_cnr.errors import ConfigurationError, StoreError
from torchrec_cnr.storage.store import Listing, Store


@pytest.mark.parametrize("make", [str, Path])
def test_local_paths_are_opened_as_they_are(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    """A local directory is named by its path, given as a string, a path object or a URL, with or without a slash."""
    store = Store.open(make(tmp_path / "a"))
    assert store.url == store.path == str(tmp_path / "a")
    assert Store.open(f"{tmp_path}/a/") == Store.open(f"file://{tmp_path}/a") == store


def test_urls_keep_their_protocol() -> None:
    """Elsewhere the name is a URL that opens the same directory again."""
    store = Store.open("memory://bucket/job/step-1/")
    assert store.url == "memory:///bucket/job/step-1"
    assert Store.open(store.url) == store


@pytest.mark.parametrize("url", ["no-such-protocol://x", "s4://bucket/x"])
def test_unknown_protocols_are_refused(url: str) -> None:
    """A protocol that fsspec does not know is an error of the call."""
    with pytest.raises(ConfigurationError, match=url):
        Store.open(url)


@pytest.mark.parametrize("root", ["/job", "memory://job"])
def test_relative_paths_lead_to_other_directories(root: str) -> None:
    """Paths are resolved by their words, from the directory itself."""
    store = Store.open(f"{root}/step-2")
    assert store.at("../step-1") == Store.open(f"{root}/step-1")
    assert store.at("../../other/step-1") == Store.open(f"{root.removesuffix('job')}other/step-1")
    assert store.at("below") == Store.open(f"{root}/step-2/below")
    assert store.at("../step-2") == store


def test_directories_of_one_file_system_are_beside_each_other(tmp_path: Path) -> None:
    """Only within one file system can a relative path lead from one directory to another."""
    store = Store.open(tmp_path / "a")
    assert store.is_beside(Store.open(tmp_path / "b" / "c"))
    assert not store.is_beside(Store.open("memory://a"))


# Reading and writing


def test_files_come_back(store: Store) -> None:
    """Parts are written one behind the other and read as a whole or in ranges."""
    store.put("file", [b"one ", memoryview(b"two "), b"", b"three"])
    assert store.read("file") == b"one two three"
    assert store.read("file", 4, 7) == b"two"
    assert store.read_array("file", 4, 7).tobytes() == b"two"
    assert (store.exists("file"), store.exists("other")) == (True, False)
    assert store.names() == ["file"]


@pytest.mark.parametrize("size", [0, 1, 10])
def test_ranges_are_those_of_the_file(store: Store, size: int) -> None:
    """Any range is read as a slice would be; what passes the end is as long as the file has bytes in it."""
    data = bytes(range(size))
    store.put("file", [data])
    for start, stop in combinations_with_replacement(range(size + 3), 2):
        assert store.read_array("file", start, stop).tobytes() == data[start:stop]
        if start < stop and start < size:
            assert store.read("file", start, stop) == data[start:stop]


def test_arrays_can_be_written_to(store: Store) -> None:
    """What is read belongs to the reader: changing it changes neither the file nor what is read next."""
    store.put("file", [b"12345"])
    array = store.read_array("file", 0, 5)
    array[:] = 0
    assert store.read_array("file", 0, 5).tobytes() == b"12345"


def test_what_is_listed(store: Store) -> None:
    """Files with their sizes, apart from directories; nothing where there is no directory, or a file."""
    store.put("b", [b"12"])
    store.put("a", [b""])
    store.at("c").make()
    store.at("c").put("d", [b"3"])
    assert store.listing() == Listing({"a": 0, "b": 2}, ("c",))
    assert store.at("c").listing() == Listing({"d": 1})
    assert store.at("missing").listing() == store.at("b").listing() == Listing({})
    assert store.at("b").names() == []


def test_links_are_told_from_directories(tmp_path: Path) -> None:
    """Those to directories are neither files nor directories; all others are files."""
    for name, target in (("to directory", "directory"), ("to file", "file"), ("to nothing", "nothing")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_bytes(b"123")
    listed = Store.open(tmp_path).listing()
    assert dict(listed.files) == {"file": 3, "to file": 3, "to nothing": 0}
    assert (listed.directories, listed.links) == (("directory",), ("to directory",))


def test_directories_that_cannot_be_listed_are_no_empty_ones(open_folder: Path) -> None:
    """What is in them is not known, which is another thing than nothing."""
    (open_folder / "closed").mkdir(mode=0)
    assert in_child(_list_as_nobody, str(open_folder / "closed")) == errno.EACCES


def _list_as_nobody(path: str) -> int | None:
    become_nobody()
    try:
        Store.open(path).listing()
    except StoreError as error:
        return error.errno
    return None


def test_times_are_those_of_the_last_write(store: Store) -> None:
    """In nanoseconds; of what is not there, an error."""
    before_ns = time.time_ns()
    store.put("file", [b"1"])
    assert before_ns - 10**9 < store.modified_ns("file") < time.time_ns() + 10**9
    if store.is_local:
        assert before_ns - 10**9 < store.modified_ns() < time.time_ns() + 10**9
    with pytest.raises(StoreError):
        store.modified_ns("missing")


@pytest.mark.parametrize("is_durable", [False, True])
def test_files_are_removed(store: Store, is_durable: bool) -> None:
    """Also when they are gone already; a directory is removed if nothing is in it."""
    store.put("file", [b"1"])
    for _ in range(2):
        store.remove_directory()
        store.remove("file", is_durable)
        assert store.names() == []
    for _ in range(2):
        store.remove_directory()
    assert os.path.exists(store.path) is False
    store.remove("file", is_durable)


def test_two_may_remove_a_file_and_its_directory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two prunes at once, one may find the directory gone before it has forced the file's end to disk."""
    store.put("file", [b"1"])
    remove_file = store.fs.rm_file

    def remove_all(path: str) -> None:
        remove_file(path)
        store.remove_directory()

    monkeypatch.setattr(store.fs, "rm_file", remove_all)
    store.remove("file", is_durable=True)
    assert store.names() == []
    assert os.path.exists(store.path) is False


def test_names_are_those_of_files_and_directories(store: Store) -> None:
    """A directory lists what is directly in it, in order; one that is not there is empty."""
    for name in ("b", "a", "c"):
        store.put(name, [b"x"])
    below = store.at("d")
    below.make()
    below.put("e", [b"x"])
    assert store.names() == ["a", "b", "c", "d"]
    assert store.at("missing").names() == []


def test_names_are_new_each_time(store: Store) -> None:
    """Files that were written since the last look are listed."""
    assert store.names() == []
    store.put("a", [b"x"])
    assert store.names() == ["a"]


def test_making_a_directory_twice_is_no_error(store: Store) -> None:
    """Every rank makes the directory, and those above it."""
    for _ in range(2):
        store.at("x/y/z").make()
    store.at("x/y/z").put("file", [b"x"])
    assert store.at("x/y/z").read("file") == b"x"


def test_streams_are_written_piece_by_piece(store: Store) -> None:
    """A file has all that was written, in the place of what was there; a local one has its name once it is whole."""
    store.put("file", [b"before"])
    with store.create("file") as stream:
        assert [stream.write(b"one "), stream.write(memoryview(b"two"))] == [4, 3]
        assert (stream.store, stream.name, stream.num_bytes) == (store, "file", 7)
        if not isinstance(store.fs, MemoryFileSystem):
            assert store.read("file") == b"before"
    assert store.names() == ["file"]
    with store.open_file("file") as file:
        file.seek(4)
        assert file.read() == b"two"


def test_streams_that_fail_leave_local_files_as_they_were(store: Store) -> None:
    """The error is the caller's own, and nothing else is left."""
    store.put("file", [b"before"])
    with pytest.raises(ZeroDivisionError), store.create("file") as stream:
        stream.write(b"x" * (1 // (stream.write(b"one ") - 4)))
    assert store.names() == ["file"]
    if not isinstance(store.fs, MemoryFileSystem):
        assert store.read("file") == b"before"

"""Stores: files are written once and whole, and every failure is one of our errors."""

import contextlib
import errno
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations_with_replacement, count
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.faults import become_nobody
from tests.support.killing import in_child
from torchrec_cnr.errors import CheckpointExistsError, CNRError, ConfigurationError, StoreError
from torchrec_cnr.storage.store import Listing, Store

NUM_RACERS, NUM_RACES = 8, 30
numbers = count()


@pytest.fixture(params=["local", "local, synced", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty directory in each kind of file system."""
    url = f"memory://stores-{next(numbers)}/dir" if request.param == "memory" else str(tmp_path / "dir")
    found = Store.open(url, sync_files=request.param == "local, synced")
    found.make()
    yield found
    if request.param == "memory":
        found.fs.rm(found.path, recursive=True)


# Names and places


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
    if store.has_directories:
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


# The commit


def test_put_new_writes_once(store: Store) -> None:
    """The first writer's bytes are there, whole; the second is told, and changes nothing."""
    store.put_new("manifest.json", b"first", "save-1")
    with pytest.raises(CheckpointExistsError, match="another save committed here first"):
        store.put_new("manifest.json", b"second, and longer", "save-2")
    assert store.read("manifest.json") == b"first"
    assert store.names() == ["manifest.json"]


@pytest.mark.parametrize("first", [b"", b"sec"])
def test_another_commit_is_not_taken_for_a_part_of_ours(store: Store, first: bytes) -> None:
    """A file that is there before its bytes are, or whose bytes begin as ours do, is another one's, and stays."""
    store.put("manifest.json", [first])
    with pytest.raises(CheckpointExistsError):
        store.put_new("manifest.json", b"second", "save-2")
    assert store.read("manifest.json") == first


# fsspec's memory file system, which no two jobs can share, looks first and creates the file, empty, afterwards.
local_only = pytest.mark.parametrize("store", ["local", "local, synced"], indirect=True)


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads take turns at every opportunity."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@local_only
@pytest.mark.usefixtures("hasty_threads")
def test_of_several_writers_one_wins(store: Store) -> None:
    """Of eight writers that begin at once exactly one commits, and its bytes are the ones that are there."""

    def race(job: tuple[Store, threading.Barrier, int]) -> bool:
        place, start, number = job
        start.wait(timeout=10)
        try:
            place.put_new("manifest.json", str(number).encode() * 10_000, f"save-{number}")
        except CheckpointExistsError:
            return False
        return True

    with ThreadPoolExecutor(NUM_RACERS) as threads:
        for attempt in range(NUM_RACES):
            place = store.at(str(attempt))
            place.make()
            start = threading.Barrier(NUM_RACERS)
            won = list(threads.map(race, [(place, start, number) for number in range(NUM_RACERS)]))
            assert won.count(True) == 1
            assert place.read("manifest.json") == str(won.index(True)).encode() * 10_000
            assert place.names() == ["manifest.json"]


@local_only
@pytest.mark.usefixtures("hasty_threads")
def test_nobody_sees_half_a_commit(store: Store) -> None:
    """A reader that looks all the time finds no file, then the whole file, and never a part of it."""
    data = b"0123456789" * 100_000
    seen: set[int] = set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            for attempt in range(NUM_RACES):
                with contextlib.suppress(StoreError):
                    seen.add(len(store.read(f"manifest-{attempt}.json")))

    with ThreadPoolExecutor(1) as thread:
        looking = thread.submit(look)
        for attempt in range(NUM_RACES):
            store.put_new(f"manifest-{attempt}.json", data, f"save-{attempt}")
        done.set()
        looking.result()
    assert seen <= {len(data)}


class _FullDisk(Exception):
    """Stands for whatever a file system may raise."""


def _fail(*_: object, **__: object) -> None:
    raise _FullDisk("no space left")


@pytest.mark.parametrize("step", ["sync", "link"])
def test_nothing_is_left_of_a_failed_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """A local commit that fails at any step leaves no manifest and no other file, and can be tried again."""
    store = Store.open(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, {"sync": "fsync", "link": "link"}[step], _fail)
        with pytest.raises(StoreError, match=r"cannot write .*manifest\.json: _FullDisk: no space left"):
            store.put_new("manifest.json", b"data", "save-1")
    assert store.names() == []
    store.put_new("manifest.json", b"data", "save-1")
    assert store.names() == ["manifest.json"]


def test_nothing_is_left_of_a_failed_commit_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit into memory whose bytes cannot be written leaves no manifest that would make a broken checkpoint."""
    store = Store.open(f"memory://stores-{next(numbers)}")
    store.make()
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "open", _fail)
        patch.setattr(MemoryFileSystem, "pipe_file", _fail)
        with pytest.raises(StoreError, match="_FullDisk"):
            store.put_new("manifest.json", b"data", "save-1")
    assert store.names() == []


def test_file_systems_without_links_can_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hard links are refused, the commit is an exclusive create: the second writer still loses."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = Store.open(tmp_path)
    store.put_new("manifest.json", b"first", "save-1")
    with pytest.raises(CheckpointExistsError):
        store.put_new("manifest.json", b"second", "save-2")
    assert (store.read("manifest.json"), store.names()) == (b"first", ["manifest.json"])


def test_files_are_synced_unless_asked_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs, then the manifest, and their names are forced to disk; ``sync_files=False`` forces nothing."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    store = Store.open(tmp_path / "a" / "b", sync_files=True)
    store.make()
    store.put("pack", [b"data"])
    num_before = len(synced)
    store.put_new("manifest.json", b"data", "save-1")
    folder = str(tmp_path / "a" / "b")
    assert f"{folder}/pack" in synced[:num_before]
    assert synced[num_before:][:1] == [f"{folder}/save-1.manifest.json"]
    assert synced[-1] == folder
    assert {str(tmp_path), str(tmp_path / "a")} <= set(synced)
    synced.clear()
    quick = Store.open(tmp_path / "quick", sync_files=False)
    quick.make()
    quick.put("pack", [b"data"])
    quick.put_new("manifest.json", b"data", "save-1")
    assert synced == []


# Errors


def _file_in_the_way(store: Store) -> Store:
    store.put("file", [b"x"])
    return store.at("file")


FAILURES: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read("missing"),
    "read a range": lambda store: store.read("missing", 3, 5),
    "read an array": lambda store: store.read_array("missing", 3, 5),
    "open": lambda store: store.open_file("missing").__enter__(),
    "read below a file": lambda store: _file_in_the_way(store).read("below"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_missing_files_are_told_apart(store: Store, failure: str) -> None:
    """What is not there raises a typed error that names the file, with the errno that tells it from other failures."""
    with pytest.raises(StoreError, match="cannot read") as caught:
        FAILURES[failure](store)
    assert caught.value.errno in (errno.ENOENT, errno.ENOTDIR)
    assert isinstance(caught.value, CNRError | OSError)
    assert store.url in str(caught.value)
    assert caught.value.__cause__ is not None


def test_failures_name_what_and_where(tmp_path: Path) -> None:
    """Each operation that a file in the way prevents says what it tried, where, and why it could not."""
    (tmp_path / "file").write_bytes(b"x")
    store = Store.open(tmp_path / "file")
    calls: dict[str, Callable[[], object]] = {
        "create": store.make,
        "write": lambda: store.put("pack", [b"x"]),
        "read": lambda: store.read("pack"),
    }
    for action, call in calls.items():
        with pytest.raises(StoreError, match=f"cannot {action} {tmp_path}/file.*(NotADirectory|FileExists)Error"):
            call()
    with pytest.raises(StoreError, match="cannot write"):
        store.put_new("manifest.json", b"x", "save-1")
    with pytest.raises(StoreError, match="cannot write"), store.create("pack"):
        pass


@pytest.mark.parametrize("kind", [StoreError, CheckpointExistsError, ConfigurationError])
def test_errors_survive_pickling(kind: type[CNRError]) -> None:
    """DCP pickles a failure to carry it to other ranks: type and message arrive."""
    error = kind("what, where, expected, got, the way out")
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is kind
    assert str(copied) == str(error)


def test_raised_errors_survive_pickling(store: Store) -> None:
    """So do errors as the store raises them, and stores themselves, which travel to background processes."""
    with pytest.raises(StoreError) as caught:
        store.read("missing")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert pickle.loads(pickle.dumps(store)) == store


def test_whatever_is_raised_becomes_one_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems raise what they like, their libraries' own errors too; callers see one type, with the cause."""
    store = Store.open("memory://x")
    monkeypatch.setattr(MemoryFileSystem, "cat_file", _fail)
    with pytest.raises(StoreError, match="cannot read memory:///x/name: _FullDisk: no space left") as caught:
        store.read("name")
    assert isinstance(caught.value.__cause__, _FullDisk)
    assert caught.value.errno is None

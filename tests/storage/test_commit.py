"""Commits to a store: one wins, none is seen half done; and errors name what and where."""

import contextlib
import errno
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.faults import small_disk
from tests.support.killing import every_kill, in_child
from torchrec_cnr.errors import CheckpointExistsError, CNRError, ConfigurationError, StoreError
from torchrec_cnr.storage import local_files
from torchrec_cnr.storage.store import Store

NUM_RACERS, NUM_RACES = 8, 30
numbers = count()


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


WAYS = ["links", "one step", "locks"]  # the last two on file systems without links


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the file system can keep a name from being taken twice."""
    _allow_only(request.param, monkeypatch)


every_way = pytest.mark.parametrize("way", WAYS, indirect=True)


def _allow_only(way: str, patch: pytest.MonkeyPatch) -> None:
    if way != "links":
        patch.setattr(os, "link", _refuse)
    if way == "locks":
        patch.setattr(local_files, "_rename_at_once", lambda *_: False)


@local_only
@every_way
@pytest.mark.usefixtures("hasty_threads", "way")
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


@pytest.mark.long
@local_only
@every_way
@pytest.mark.usefixtures("hasty_threads", "way")
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


@every_way
@pytest.mark.usefixtures("way")
def test_file_systems_without_links_can_commit(tmp_path: Path) -> None:
    """Where hard links are refused, the second writer still loses."""
    store = Store.open(tmp_path)
    store.put_new("manifest.json", b"first", "save-1")
    with pytest.raises(CheckpointExistsError):
        store.put_new("manifest.json", b"second", "save-2")
    assert (store.read("manifest.json"), store.names()) == (b"first", ["manifest.json"])


def test_a_full_disk_without_links(tmp_path: Path) -> None:
    """A manifest that does not fit leaves nothing behind; one that fits once is not written a second time."""
    outcome = in_child(_commit_on_a_small_disk, str(tmp_path / "disk"))
    if outcome == "not allowed":
        pytest.skip("this process may not mount a file system")
    assert outcome == "as it must be"


def _commit_on_a_small_disk(path: str) -> str:
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(os, "link", _refuse)
        try:
            stack.enter_context(small_disk(path, 64 << 10))
        except OSError:
            return "not allowed"
        store = Store.open(path)
        with pytest.raises(StoreError, match="No space left"):
            store.put_new("manifest.json", bytes(100 << 10), "save-1")
        assert store.names() == []
        store.put_new("manifest.json", bytes(40 << 10), "save-2")
        assert (store.read("manifest.json"), store.names()) == (bytes(40 << 10), ["manifest.json"])
    return "as it must be"


def _refuse(*_: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_the_kernel_renames_in_one_step_where_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its other errors are raised, as those of any rename."""
    monkeypatch.setattr(os, "rename", _fail)
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"first")
    if not local_files._rename_at_once(str(first), str(second)):
        pytest.skip("this file system cannot")
    assert [path.name for path in tmp_path.iterdir()] == ["second"]
    first.write_bytes(b"another")
    with pytest.raises(FileExistsError):
        local_files._rename_at_once(str(first), str(second))
    with pytest.raises(FileNotFoundError):
        local_files._rename_at_once(str(tmp_path / "third"), str(tmp_path / "fourth"))
    assert second.read_bytes() == b"first"


def _commit_by_links(root: str) -> None:
    _commit(root, "links")


def _commit_in_one_step(root: str) -> None:
    _commit(root, "one step")


def _commit_by_locks(root: str) -> None:
    _commit(root, "locks")


def _commit(root: str, way: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _allow_only(way, patch)
        Store.open(root).put_new("manifest.json", b"killed", "save-1")


@pytest.mark.parametrize("commit", [_commit_by_links, _commit_in_one_step, _commit_by_locks])
def test_a_commit_that_is_killed_is_whole_or_not_there(tmp_path: Path, commit: Callable[[str], None]) -> None:
    """Wherever it was killed; where it is not there, the next one is not kept from its name."""

    def prepare(number: int) -> str:
        (tmp_path / str(number)).mkdir()
        return str(tmp_path / str(number))

    found = []
    for kill in every_kill(prepare, commit):
        store = Store.open(kill.root)
        if "manifest.json" in store.names():
            found.append(store.read("manifest.json"))
        else:
            store.put_new("manifest.json", b"the next", "save-2")
            found.append(b"none")
            assert store.read("manifest.json") == b"the next"
    assert len(found) > 3
    assert set(found) == {b"none", b"killed"}


def test_a_name_without_links_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it cannot be given to what was written."""
    store = Store.open(tmp_path)
    with monkeypatch.context() as patch:
        _allow_only("locks", patch)
        patch.setattr(os, "rename", _fail)
        with pytest.raises(StoreError, match="_FullDisk"):
            store.put_new("manifest.json", b"first", "save-1")
    assert store.names() == []


def test_a_conflict_with_what_is_there_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some servers answer 409 whether another one is writing or has written."""
    store, asked = Store.open(f"memory://stores-{next(numbers)}"), count()

    def conflict(*_: object) -> None:
        next(asked)
        error = OSError(errno.EIO, "conflict")
        error.code = 409  # type: ignore[attr-defined]
        raise error

    store.put("manifest.json", [b"another one's"])
    monkeypatch.setattr(Store, "_create_new", conflict)
    with pytest.raises(CheckpointExistsError):
        store.put_new("manifest.json", b"ours", "save-1")
    assert next(asked) == 1


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


def test_a_directory_that_a_killed_process_made_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may have been killed before its name was durable, and nothing below it would be."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    root = tmp_path / "jobs" / "root"
    root.mkdir(parents=True)
    Store.open(root / "step-1").make()
    assert synced == [str(tmp_path / "jobs"), str(root)]
    synced.clear()
    Store.open(root / "step-1").make()
    assert synced == [str(root)]


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

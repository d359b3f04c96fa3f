"""The storage requirements of checkpoints, each with a check that a file system meets it.

A check works in an empty directory of its own, and raises a ``StoreError`` with the expected and the actual result. It
accesses the file system as checkpoints do, through ``Store``. The first line of a check's docstring is the requirement,
which the command prints.
"""

import errno
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import combinations
from typing import Any

from torchrec_cnr.errors import CheckpointExistsError, StoreError
from torchrec_cnr.storage.files import Buffer
from torchrec_cnr.storage.store import Store
from torchrec_cnr.testing.faults import Fault, FaultyStore

CLOCK_SECS = 600.0  # the most by which a store's clock may differ from this machine's
NUM_AT_ONCE = 8
LARGE_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
ODD_NAMES = (
    "with space",
    "ümlaut 漢字 🙂",
    "percent%20sign",
    "plus+and&",
    "hash#mark",
    "name=value,comma",
    "[brackets]",
    "star*",
    ".hidden",
    "UPPER",
    "upper",
    "long" * 50,
)
_NAME = "manifest.json"


def expect(found: object, expected: object, what: str) -> None:
    """Raise a ``StoreError`` if ``found`` and ``expected`` differ."""
    if found != expected:
        raise StoreError(f"{what}: expected {_shown(expected)}, got {_shown(found)}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


@contextmanager
def must_raise(kind: type[StoreError] | type[CheckpointExistsError], what: str) -> Iterator[Any]:
    """Return a context that raises a ``StoreError`` if its body does not raise an error of the given kind."""
    try:
        yield
    except kind:
        return
    raise StoreError(f"{what}: expected {kind.__name__}, got no error")


def expect_absent(store: Store, name: str) -> None:
    """Raise a ``StoreError`` if a missing file is found, listed or read, or if the error does not say it is missing."""
    expect(store.exists(name), False, f"whether {name!r} exists, which was not written or was removed")
    expect(name in store.names(), False, f"whether {name!r} is listed, which was not written or was removed")
    try:
        store.read(name)
    except StoreError as error:
        expect(error.errno in (errno.ENOENT, errno.ENOTDIR), True, f"whether the error '{error}' says 'not found'")
        return
    raise StoreError(f"{name!r} can be read, but it was not written or was removed")


def again(store: Store) -> Store:
    """Return the same directory in a new file system object, which has no cache of this object's operations."""
    fs = store.fs
    if not getattr(type(fs), "cachable", False):
        return store
    return Store(
        type(fs)(*fs.storage_args, skip_instance_cache=True, **fs.storage_options), store.path, store.sync_files
    )


# Reading and writing.


def whole_files(store: Store) -> None:
    """A file that was written is read back completely, also by other clients."""
    files: dict[str, list[Buffer]] = {
        "pack": [b"one ", memoryview(b"two "), b"", b"three"],
        "empty": [],
        "byte": [b"\x00"],
    }
    for name, parts in files.items():
        store.put(name, parts)
        data = b"".join(bytes(part) for part in parts)
        for client in (store, again(store)):
            expect(client.read(name), data, f"the bytes of {name!r}")
            expect(client.listing().files.get(name), len(data), f"the listed size of {name!r}")


def ranges(store: Store) -> None:
    """Any range of a file can be read."""
    data = bytes(range(100))
    store.put("pack", [data])
    for start, stop in combinations((0, 1, 7, 50, 99, 100, 130), 2):
        if start < len(data):
            expect(store.read("pack", start, stop), data[start:stop], f"bytes {start} to {stop} of {len(data)}")
            expect(store.read_array("pack", start, stop).tobytes(), data[start:stop], f"bytes {start} to {stop}")
    with store.open_file("pack") as file:
        file.seek(90)
        expect(file.read(5), data[90:95], "bytes 90 to 95 of an open file")


def listings(store: Store) -> None:
    """A file is listed as soon as it was written, and listings distinguish directories from files."""
    expect(store.names(), [], "the names in an empty directory")
    for number in range(3):
        store.put(f"pack-{number}", [b"x" * number])
        expect(store.names(), [f"pack-{n}" for n in range(number + 1)], "the names in a directory")
        expect(again(store).names(), [f"pack-{n}" for n in range(number + 1)], "the names that other clients see")
    directory = store.at("step-1")
    directory.make()
    directory.put(_NAME, [b"{}"])
    expect(dict(store.listing().files), {f"pack-{n}": n for n in range(3)}, "files and sizes next to a directory")
    expect(store.listing().directories, ("step-1",), "directories next to files")
    expect(dict(directory.listing().files), {_NAME: 2}, "files of a directory in a directory")
    expect(store.is_directory(), True, "whether a directory with files exists")


def absence(store: Store) -> None:
    """Only missing files are reported as missing; a failed request is an error, and not an answer."""
    expect_absent(store, "pack")
    expect_absent(store.at("no-such-directory"), "pack")
    expect(store.at("no-such-directory").names(), [], "the names in a missing directory")
    expect(store.at("no-such-directory").is_directory(), False, "whether a missing directory exists")
    store.put("pack", [b"x"])
    expect(store.exists("pack"), True, "whether a file exists that was written")
    with FaultyStore(store.url) as faulty, must_raise(StoreError, "a look-up that fails"):
        faulty.faults[1] = Fault.FAIL
        Store.open(faulty.url).exists("pack")


def removal(store: Store) -> None:
    """A removed file disappears at once, and removing it again is not an error."""
    for name in ("pack", "other"):
        store.put(name, [b"x"])
    for _ in range(2):
        store.remove("pack")
        expect_absent(store, "pack")
        expect_absent(again(store), "pack")
    expect(store.read("other"), b"x", "the bytes of a file that was not removed")


def streams(store: Store, large_bytes: int) -> None:
    """A large file can be written piece by piece, replaces a smaller one, and can be read in parts."""
    store.put("export", [b"before"])
    pieces = [bytes([number % 251]) * PIECE_BYTES for number in range(max(1, large_bytes // PIECE_BYTES))]
    with store.create("export") as stream:
        for piece in pieces:
            stream.write(piece)
    num_bytes = PIECE_BYTES * len(pieces)
    expect(store.listing().files.get("export"), num_bytes, "the listed size of a large file")
    for number in range(len(pieces)):
        start = max(0, number * PIECE_BYTES - 10)
        expected = (pieces[number - 1][:10] if number else b"") + pieces[number][:10]
        expect(store.read("export", start, start + len(expected)), expected, f"bytes from {start} of a large file")
    expect(store.read("export", num_bytes - 3, num_bytes + 3), pieces[-1][:3], "the last bytes of a large file")


def odd_names(store: Store) -> None:
    """Files and directories keep their names, also with unusual characters."""
    for name in ODD_NAMES:
        store.put(name, [name.encode()])
        directory = store.at("below").at(name)
        directory.make()
        directory.put(_NAME, [name.encode(), b"/"])
    expect(store.names(), sorted((*ODD_NAMES, "below")), "names of files")
    expect(store.at("below").listing().directories, tuple(sorted(ODD_NAMES)), "names of directories")
    for name in ODD_NAMES:
        expect(store.read(name), name.encode(), f"the bytes of {name!r}")
        expect(store.at("below").at(name).read(_NAME), f"{name}/".encode(), f"the bytes of a file in {name!r}")
    store.remove(ODD_NAMES[-2])
    expect(store.exists(ODD_NAMES[-3]), True, "whether a file exists whose name differs from a removed one by case")
    store.remove("star*")
    store.remove("[brackets]")
    expect(len(store.names()), len(ODD_NAMES) - 2, "the number of remaining files")


def at_once(store: Store) -> None:
    """Files that are written and read at the same time do not affect one another."""

    def put_and_read(number: int) -> bytes:
        data = bytes([number]) * 100_000
        store.put(f"pack-{number}", [data])
        return store.read(f"pack-{number}", 50_000, 50_010) if store.read(f"pack-{number}") == data else b"others"

    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        for number, content in enumerate(threads.map(put_and_read, range(4 * NUM_AT_ONCE))):
            expect(content, bytes([number]) * 10, f"the bytes of one of {4 * NUM_AT_ONCE} files written at once")


def times(store: Store) -> None:
    """The store reports when a file was written, by a clock that is at most ten minutes wrong."""
    start_secs = time.time()
    store.put("pack", [b"x"])
    modified_secs = store.modified_ns("pack") / 1e9
    if not start_secs - CLOCK_SECS <= modified_secs <= time.time() + CLOCK_SECS:
        raise StoreError(
            f"the store's clock: expected a difference of at most {CLOCK_SECS:,.0f} s to this machine's, got "
            f"{modified_secs - start_secs:,.0f} s"
        )


# The commit.


def exclusive(store: Store) -> None:
    """Only the first writer can create a file; the second one gets FileExistsError, and changes nothing."""
    store.put_new(_NAME, b"first", "save-1")
    for data in (b"second, and longer", b"2nd", b"first, and more"):
        for client in (store, again(store)):
            with must_raise(CheckpointExistsError, f"a commit of {data!r} where a commit exists"):
                client.put_new(_NAME, data, "save-2")
            expect(client.read(_NAME), b"first", "the bytes of a commit, after another one was refused")
    expect(store.names(), [_NAME], "the names after commits")


def own_commit(store: Store) -> None:
    """A writer that lost the answer to its own commit can try the commit again."""
    _commit_spoiled(store, Fault.LOSE, b"mine", "a commit whose answer was lost")
    store.put_new(_NAME, b"mine", "save-1")
    again(store).put_new(_NAME, b"mine", "save-1")
    expect(store.read(_NAME), b"mine", "the bytes of a commit that was tried again")


def half_commit(store: Store) -> None:
    """A truncated commit is detected, and does not count as a commit."""
    _commit_spoiled(store, Fault.TRUNCATE, b"0123456789", "a truncated commit")
    expect_absent(store, _NAME)
    store.put_new(_NAME, b"0123456789", "save-2")


def _commit_spoiled(store: Store, fault: Fault, data: bytes, what: str) -> None:
    with FaultyStore(store.url) as faulty:
        faulty_store = Store.open(faulty.url)
        faulty.faults[1] = fault
        with must_raise(StoreError, what):
            faulty_store.put_new(_NAME, data, "save-1")

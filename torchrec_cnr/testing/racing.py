"""Races: several processes commit at once, and one must win.

Threads of one process would not do: many file systems look whether a name is there and create it afterwards, and a
process keeps its own threads apart. Where a store is this process's own, as ``memory://`` is, threads have to do.
The processes are started afresh, rather than by ``multiprocessing``, which would run the caller's script in each.
"""

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from torchrec_cnr.errors import CheckpointExistsError, CNRError, StoreError
from torchrec_cnr.storage.store import Store

NUM_RACERS = 4
NUM_RACES = 10
READY_SECS = 60.0  # for a process to start
COMMIT_SECS = 60.0
AHEAD_SECS = 0.02  # how long before a race its time is told

_PROBE = "probe"
_RACER = "import sys; sys.path[:] = {path!r}; from torchrec_cnr.testing.racing import be_racer; be_racer({descriptor})"


def race(store: Store) -> None:
    """Of several that commit at once, one wins, the others get a typed error, and the winner's bytes are there."""
    store.put(_PROBE, [b"x"])
    with _racers(store) as racers:
        is_shared = all(_answers(racers, READY_SECS))
        for number in range(NUM_RACES):
            name = f"manifest-{number}.json"
            _judge(store, name, _of_processes(racers, name) if is_shared else _of_threads(store, name))


def _of_processes(racers: Sequence[Connection], name: str) -> list[Any]:
    for number, racer in enumerate(racers):
        racer.send((name, number, time.time() + AHEAD_SECS))
    return _answers(racers, COMMIT_SECS)


def _of_threads(store: Store, name: str) -> list[bool | str]:
    start = threading.Barrier(NUM_RACERS)

    def run(number: int) -> bool | str:
        start.wait(COMMIT_SECS)
        return _commit(store, name, number)

    with ThreadPoolExecutor(NUM_RACERS) as threads:
        return list(threads.map(run, range(NUM_RACERS)))


def _judge(store: Store, name: str, answers: Sequence[Any]) -> None:
    """Raises a StoreError if not exactly one has won."""
    strange = [answer for answer in answers if isinstance(answer, str)]
    if strange:
        raise StoreError(f"of {NUM_RACERS} that committed at once, one got neither a yes nor a no: {strange[0]}")
    if answers.count(True) != 1:
        raise StoreError(f"of {NUM_RACERS} that committed at once, {answers.count(True)} were told that they had won")
    if store.read(name) != _content(answers.index(True)):
        raise StoreError(
            f"of {NUM_RACERS} that committed at once, one was told that he had won, but others' bytes are there"
        )


def _content(number: int) -> bytes:
    return str(number).encode() * (10_000 + number)


def _commit(store: Store, name: str, number: int) -> bool | str:
    """Whether a racer has won; or what else it was told."""
    try:
        store.put_new(name, _content(number), f"save-{number}")
    except CheckpointExistsError:
        return False
    except CNRError as error:
        return str(error)
    return True


@contextmanager
def _racers(store: Store) -> Iterator[Sequence[Connection]]:
    """Processes that say first whether they see the same store, and then race when they are told."""
    ours, processes = [], []
    try:
        for _ in range(NUM_RACERS):
            mine, theirs = Pipe()
            ours.append(mine)
            code = _RACER.format(path=sys.path, descriptor=theirs.fileno())
            with theirs:
                processes.append(subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()]))
            mine.send_bytes(_pickled(store))
        yield ours
    finally:
        for mine in ours:
            mine.close()
        for process in processes:
            process.kill()
            process.wait()


def _pickled(store: Store) -> bytes:
    try:
        return pickle.dumps(store)
    except (pickle.PicklingError, TypeError, AttributeError):  # no other process can have it
        return b""


def _answers(racers: Sequence[Connection], limit_secs: float) -> list[Any]:
    """What each says; of one that cannot be asked, that it does not see the store."""
    found = []
    for racer in racers:
        if not racer.poll(limit_secs):
            raise StoreError(f"a commit at once with others did not end within {limit_secs:.0f} s")
        try:
            found.append(racer.recv())
        except EOFError as error:
            raise StoreError("a process that committed at once with others has died") from error
    return found


def be_racer(descriptor: int) -> None:
    """Say whether the store is the same one, and commit under each name that is told, at its time.

    Args:
        descriptor: Of the file that leads to whoever tells.
    """
    orders = Connection(descriptor)
    store = _store(orders.recv_bytes())
    orders.send(store is not None)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while store is not None:
            name, number, start = orders.recv()
            time.sleep(max(0.0, start - time.time()))
            orders.send(_commit(store, name, number))


def _store(data: bytes) -> Store | None:
    """The store, if it is the same one here."""
    try:
        store: Store = pickle.loads(data)
        return store if store.read(_PROBE) == b"x" else None
    except (CNRError, EOFError, pickle.UnpicklingError, ImportError, AttributeError, ValueError, TypeError, OSError):
        return None

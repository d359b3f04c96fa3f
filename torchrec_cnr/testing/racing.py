"""Races: several processes commit at once, and exactly one of them must win.

Threads of one process would not be a sufficient test. Many file systems check whether a name exists and then create it,
and locks within the process may hide this race. Only for stores that are local to a process, such as ``memory://``, the
racers are threads. The processes are not started by ``multiprocessing``, which would run the caller's script in each.
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
READY_SECS = 60.0  # time limit for the start of a process
COMMIT_SECS = 60.0
AHEAD_SECS = 0.02  # the racers receive the starting time this long before it

_PROBE = "probe"
_RACER = "import sys; sys.path[:] = {path!r}; from torchrec_cnr.testing.racing import be_racer; be_racer({descriptor})"


def race(store: Store) -> None:
    """Check that of several processes that create a file at once, one succeeds and the others change nothing."""
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
    """Raise a ``StoreError`` if not exactly one racer has won."""
    errors = [answer for answer in answers if isinstance(answer, str)]
    if errors:
        raise StoreError(f"{NUM_RACERS} racers created a file at once, and one got an unexpected error: {errors[0]}")
    if answers.count(True) != 1:
        raise StoreError(f"{NUM_RACERS} racers created a file at once: expected 1 success, got {answers.count(True)}")
    if store.read(name) != _content(answers.index(True)):
        raise StoreError(
            f"{NUM_RACERS} racers created a file at once, and one succeeded, but the file has another one's bytes"
        )


def _content(number: int) -> bytes:
    return str(number).encode() * (10_000 + number)


def _commit(store: Store, name: str, number: int) -> bool | str:
    """Commit, and return whether the racer has won, or the message of an unexpected error."""
    try:
        store.put_new(name, _content(number), f"save-{number}")
    except CheckpointExistsError:
        return False
    except CNRError as error:
        return str(error)
    return True


@contextmanager
def _racers(store: Store) -> Iterator[Sequence[Connection]]:
    """Start processes that first send whether they see the same store, and then race when they receive orders."""
    connections, processes = [], []
    try:
        for _ in range(NUM_RACERS):
            connection, racer_end = Pipe()
            connections.append(connection)
            code = _RACER.format(path=sys.path, descriptor=racer_end.fileno())
            with racer_end:
                processes.append(subprocess.Popen([sys.executable, "-c", code], pass_fds=[racer_end.fileno()]))
            connection.send_bytes(_pickled(store))
        yield connections
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.kill()
            process.wait()


def _pickled(store: Store) -> bytes:
    try:
        return pickle.dumps(store)
    except (pickle.PicklingError, TypeError, AttributeError):  # the store cannot be opened by other processes
        return b""


def _answers(racers: Sequence[Connection], limit_secs: float) -> list[Any]:
    """Receive one answer from each racer."""
    answers = []
    for racer in racers:
        if not racer.poll(limit_secs):
            raise StoreError(f"a racer did not answer within {limit_secs:.0f} s")
        try:
            answers.append(racer.recv())
        except EOFError as error:
            raise StoreError("the process of a racer has died") from error
    return answers


def be_racer(descriptor: int) -> None:
    """Send whether this process sees the same store, then commit under each name that is received, at its time.

    Args:
        descriptor: File descriptor of the connection to the process that started this one.
    """
    connection = Connection(descriptor)
    store = _store(connection.recv_bytes())
    connection.send(store is not None)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while store is not None:
            name, number, start = connection.recv()
            time.sleep(max(0.0, start - time.time()))
            connection.send(_commit(store, name, number))


def _store(data: bytes) -> Store | None:
    """Unpickle the store; return None if it is not the same one in this process."""
    try:
        store: Store = pickle.loads(data)
        return store if store.read(_PROBE) == b"x" else None
    except (CNRError, EOFError, pickle.UnpicklingError, ImportError, AttributeError, ValueError, TypeError, OSError):
        return None

"""Functions run on several ranks: processes that form a gloo group, as a training job's do.

``run_ranks`` runs one function on a fresh group. ``RankPool`` keeps a group for many functions, since starting one
takes seconds; the fixture ``rank_pool`` shares pools between tests. The flow of a run:

1. The parent pickles ``(fn, args)`` and sends it to each rank, first only for its imports, then to be done.
2. Each rank calls ``fn(rank, *args)`` and answers with the pickled result, or with the traceback of what it raised.
3. The parent waits until all have answered, but not past the limit, and only a short grace once one of them has failed,
   since the others then often wait for it in a collective.
4. A rank that has not answered by then prints the Python stacks of its threads, at a signal that reaches it in C++ code
   too. All ranks are killed, and ``RankError`` tells what each of them did.

A rank leads a process group of its own, so that the processes it started die with it; ranks die with the parent.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, TypeVarTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor as dcp_process

ResultT = TypeVar("ResultT")
ArgsT = TypeVarTuple("ArgsT")

LIMIT_SECS = 120.0
GRACE_SECS = 3.0  # for the others, once a rank has failed
STACKS_SECS = 2.0  # to print stacks
ORPHAN_SECS = 0.1  # between the end of a parent's connection and that of the parent
EXIT_SECS = 10.0  # to leave when asked, or to be gone when killed
COLLECTIVE_SECS = 30.0  # gloo's own limit

# Ranks are forked from a process that has imported all this, and has run nothing: an import takes seconds.
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["torchrec", "fbgemm_gpu", "torchrec_cnr.manager", "tests.support.zoo", "pytest"])


class RankError(RuntimeError):
    """A rank failed; the message tells what every rank did.

    Attributes:
        reports: By rank, for those that failed: its traceback, how it died, or the stacks it hung in.
    """

    def __init__(self, world_size: int, reports: dict[int, str]) -> None:
        self.reports = reports
        others = [rank for rank in range(world_size) if rank not in reports]
        lines = [f"{len(reports)} of {world_size} ranks failed; ended well: {others or 'none'}"]
        lines += [f"--- rank {rank} {report}" for rank, report in sorted(reports.items())]
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Returned(Generic[ResultT]):
    """A rank's function returned."""

    value: ResultT


@dataclass(frozen=True)
class Killed:
    """A rank was killed by SIGKILL."""


@dataclass(frozen=True)
class Failed:
    """A rank raised, exited or hung."""

    report: str


def run_ranks(
    world_size: int,
    fn: Callable[[int, *ArgsT], ResultT],
    *args: *ArgsT,
    timeout_secs: float = LIMIT_SECS,
    expect_killed: Collection[int] = (),
) -> list[ResultT]:
    """Run ``fn(rank, *args)`` on a fresh group of processes, see `RankPool.run`."""
    with RankPool(world_size) as pool:
        return pool.run(fn, *args, timeout_secs=timeout_secs, expect_killed=expect_killed)


class RankPool:
    """A group of processes that runs one function after another, until one fails or the pool is closed.

    What a function leaves behind in its process, such as state of classes and modules, is there for the next.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._ranks: list[_Rank] = []
        self._closed = False
        try:
            for rank in range(world_size):
                self._ranks.append(_Rank(rank, Path(self._folder.name, f"stacks-{rank}")))
        except BaseException:
            self._end(_Rank.kill)
            raise
        self.run(_join_group, world_size, self._folder.name)

    def run(
        self,
        fn: Callable[[int, *ArgsT], ResultT],
        *args: *ArgsT,
        timeout_secs: float = LIMIT_SECS,
        expect_killed: Collection[int] = (),
    ) -> list[ResultT]:
        """Run ``fn(rank, *args)`` on every rank, and return the results in order of ranks.

        Args:
            fn: A function of a module, since the ranks import it.
            timeout_secs: After this time all ranks are killed. The start of the group and imports do not count.
            expect_killed: The ranks that must die by SIGKILL; None stands in the place of their result. The pool is
                closed afterwards.

        Raises:
            RankError: A rank raised, died or hung, or one of ``expect_killed`` did not die. The pool is closed.
        """
        if self._closed:
            raise RuntimeError("this pool of ranks is closed: it was left, a rank failed or was killed; start another")
        task = pickle.dumps((fn, args))
        try:
            outcomes = self._exchange(pickle.dumps((_import_all_of, (task,))), LIMIT_SECS, ())
            if not any(isinstance(outcome, Failed) for outcome in outcomes):
                outcomes = self._exchange(task, timeout_secs, expect_killed)
        except BaseException:
            self._end(_Rank.kill)
            raise
        reports = {rank: outcome.report for rank, outcome in enumerate(outcomes) if isinstance(outcome, Failed)}
        if reports or expect_killed:
            self._end(_Rank.kill)
        if reports:
            raise RankError(self.world_size, reports)
        return [cast("ResultT", outcome.value if isinstance(outcome, Returned) else None) for outcome in outcomes]

    @property
    def closed(self) -> bool:
        """Whether nothing can be run here any more."""
        return self._closed

    def close(self) -> None:
        """Let the ranks exit."""
        self._end(_Rank.leave)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(
        self, task: bytes, timeout_secs: float, expect_killed: Collection[int]
    ) -> list["Returned[Any] | Killed | Failed"]:
        """Have every rank do a task, and wait for their outcomes, of type `Killed` only where that is expected."""
        for rank in self._ranks:
            rank.send(task)
        start = time.monotonic()
        deadline = start + timeout_secs
        outcomes: dict[int, Returned[Any] | Killed | Failed] = {}
        pending = list(self._ranks)
        while pending and (left_secs := deadline - time.monotonic()) > 0:
            wait([handle for rank in pending for handle in (rank.connection, rank.process.sentinel)], left_secs)
            for rank in pending:
                outcome = rank.outcome()
                if outcome is None:
                    continue
                outcomes[rank.number] = outcome = _judge(outcome, rank.number in expect_killed)
                if isinstance(outcome, Failed):
                    deadline = min(deadline, time.monotonic() + GRACE_SECS)
            pending = [rank for rank in pending if rank.number not in outcomes]
        for rank in pending:
            waited_secs = time.monotonic() - start
            outcomes[rank.number] = Failed(f"hung; after {waited_secs:.1f} s it was in\n{rank.stacks()}")
        return [outcomes[rank.number] for rank in self._ranks]

    def _end(self, end: "Callable[[_Rank], None]") -> None:
        if self._closed:
            return
        self._closed = True
        for step in (end, _Rank.join):
            for rank in self._ranks:
                step(rank)
        self._folder.cleanup()


class RankPools:
    """Pools by world size: each is started when it is first asked for, and replaced when a failure closed it."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world_size: int) -> RankPool:
        """Return an open pool of ``world_size`` ranks."""
        pool = self._pools.get(world_size)
        if pool is None or pool.closed:
            pool = self._pools[world_size] = RankPool(world_size)
        return pool

    def close(self) -> None:
        """Close all pools."""
        for pool in self._pools.values():
            pool.close()


def _judge(outcome: Returned[Any] | Killed | Failed, expect_killed: bool) -> Returned[Any] | Killed | Failed:
    """Turn an outcome other than the expected one into a failure."""
    if expect_killed and isinstance(outcome, Returned):
        return Failed(f"was expected to be killed, and returned {outcome.value!r}")
    if isinstance(outcome, Killed) and not expect_killed:
        return Failed("was killed by SIGKILL")
    return outcome


class _Rank:
    """The parent's end of one rank."""

    def __init__(self, number: int, stacks_path: Path) -> None:
        self.number = number
        self._stacks_path = stacks_path
        self.connection, child_connection = FORK_SERVER.Pipe()
        self.process = FORK_SERVER.Process(
            target=_serve,
            args=(number, stacks_path, child_connection, dict(os.environ)),
            name=f"rank-{number}",
        )
        self.process.start()
        child_connection.close()

    def send(self, task: bytes) -> None:
        """Send a task; a rank that died meanwhile is noticed by `outcome`."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(task)

    def outcome(self) -> Returned[Any] | Killed | Failed | None:
        """Return what became of the task, or None while it runs."""
        alive = self.process.is_alive()  # asked before poll: whoever is dead here has sent all it ever will
        if self.connection.poll():
            with contextlib.suppress(EOFError, ConnectionResetError):
                returned, payload = pickle.loads(self.connection.recv_bytes())
                return Returned(pickle.loads(payload)) if returned else Failed(f"raised\n{payload}")
            self.process.join(EXIT_SECS)
        elif alive:
            return None
        exitcode = self.process.exitcode
        if exitcode == -signal.SIGKILL:
            return Killed()
        if exitcode is not None and exitcode < 0:
            stacks = self._stacks_path.read_text() if self._stacks_path.exists() else ""
            return Failed(f"was killed by {signal.Signals(-exitcode).name}\n{stacks}".rstrip())
        return Failed(f"exited with status {exitcode}")

    def stacks(self) -> str:
        """Have the rank print the stacks of its threads."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACKS_SECS
        text = ""
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, text = text, self._stacks_path.read_text() if self._stacks_path.exists() else ""
            if text and text == before:
                return text
        return text or "(it printed no stacks)"

    def leave(self) -> None:
        """Let the process exit by itself."""
        self.connection.close()

    def kill(self) -> None:
        """Kill the process, and those that it started."""
        self.connection.close()
        self.process.kill()
        self._kill_group()

    def join(self) -> None:
        """Wait until the process is gone, and free it."""
        wait([self.process.sentinel], EXIT_SECS)
        self._kill_group()
        self.process.kill()
        self.process.join()
        self.process.close()

    @property
    def _pid(self) -> int:
        return cast("int", self.process.pid)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)


def _serve(rank: int, stacks_path: Path, connection: Connection, variables: Mapping[str, str]) -> None:
    """Be a rank: run tasks until the parent closes the connection."""
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(variables)  # of the parent, not of the server when it began
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with stacks_path.open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                connection.send_bytes(_answer(rank, connection.recv_bytes()))
        dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()
    parent = multiprocessing.parent_process()
    if parent is not None and wait([parent.sentinel], ORPHAN_SECS):
        os.killpg(0, signal.SIGKILL)  # the parent died between two tasks: what this rank started ends with it


def _answer(rank: int, task: bytes) -> bytes:
    try:
        fn, args = pickle.loads(task)
        return pickle.dumps((True, pickle.dumps(fn(rank, *args))))
    except BaseException:  # noqa: BLE001 - the parent raises it; some errors of DCP are no Exception
        return pickle.dumps((False, traceback.format_exc()))
    finally:
        disconnect_from_kafka()


def disconnect_from_kafka() -> None:
    """End what a function has left behind of this process's connections, if there are any."""
    kafka = sys.modules.get("torchrec_cnr.kafka")
    if kafka is not None:
        kafka.disconnect()


def _import_all_of(rank: int, task: bytes) -> None:
    """Import what a task needs, which may take seconds, before its time is counted."""
    pickle.loads(task)


def _join_group(rank: int, world_size: int, folder: str) -> None:
    """Form the group, with the variables that torchrun sets for code that asks for them."""
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(place) for name, place in places.items()}, MASTER_ADDR="127.0.0.1")
    dcp_process.get_free_port = reserved_port
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_SECS),
    )


def reserved_port() -> int:
    """A port for DCP's process, which listens at it some ten seconds later, when it has imported everything.

    DCP's own choice is free when it is made, and any connection may have taken it by then. This one stays bound, and
    nobody listens at it: it is given to nobody who asks for any port, and can be listened at by who asks for this one.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _reserved.append(holder)
    port: int = holder.getsockname()[1]
    return port


_reserved: list[socket.socket] = []  # for as long as this process runs


def _die_with_parent() -> None:
    """Kill this rank's process group when the parent is gone, whatever the rank is doing."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)

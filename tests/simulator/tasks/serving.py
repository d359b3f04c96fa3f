"""A process that serves a model beside the jobs, and has a ``RowSubscriber`` apply each checkpoint that they commit."""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.simulator.engine import virtual
from tests.simulator.engine.ending import check_nothing_left, end_interpreter
from tests.simulator.engine.scheduler import FindingError, Process, Scheduler
from tests.simulator.engine.storage import PROTOCOL, FaultShares, Objects
from tests.simulator.tasks.jobs import Book
from tests.simulator.tasks.models import NUM_COLS, NUM_ROWS, TABLES
from torchrec_cnr.errors import CNRError, ConfigurationError, StateMismatchError
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.serving import Applied, RowSubscriber

FOLLOWED_SHARE = 0.15
RESTS = 4  # times as long as a part of a lookup, between two
CALM_SECS = 100.0  # without faults, within which a subscriber tries again whatever failed
DENSE = "dense"
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Follow:
    """How a root is followed.

    Attributes:
        interval_secs: Between two looks at the root.
        lookup_secs: What a part of a lookup takes.
        thread_count: Requests in flight at once.
    """

    interval_secs: float
    lookup_secs: float
    thread_count: int


def draw_follow(drawn: random.Random) -> Follow | None:
    """How a root is followed, if it is."""
    if drawn.random() >= FOLLOWED_SHARE:
        return None
    return Follow(drawn.choice([0.2, 0.5, 2.0]), drawn.choice([0.05, 0.1, 0.5]), drawn.choice([1, 2]))


class Served(nn.Module):
    """The tables and the rest of ``TinyModel``; a lookup takes a while between one tensor and the next.

    Args:
        pause: Between them.
    """

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__()
        nothing = torch.zeros(NUM_ROWS, NUM_COLS)
        tables = {fqn.split(".")[1]: nn.Embedding(NUM_ROWS, NUM_COLS, _weight=nothing.clone()) for fqn in TABLES}
        self.embedding_bags = nn.ModuleDict(tables)
        self.register_buffer(DENSE, torch.zeros(3))
        self._pause = pause

    def forward(self) -> Values:
        """All rows of all tables, and the rest."""
        found = {}
        for fqn, table in zip(TABLES, self.embedding_bags.values(), strict=True):
            found[fqn] = table(torch.arange(NUM_ROWS)).detach().clone()
            self._pause()
        return {**found, DENSE: self.dense.clone()}

    def values(self) -> Values:
        """The same, while nothing changes."""
        return {fqn: value.detach() for fqn, value in self.state_dict().items()}


@dataclass
class Follower:
    """Serves a model until nothing else runs any more, by one process after the other if they are killed.

    Attributes:
        sim: The scheduler.
        book: What happened.
        objects: The store.
        server: Its process.
        is_over: Whether all others have ended.
    """

    sim: Scheduler
    book: Book
    objects: Objects
    server: Process
    is_over: Callable[[], bool]
    _killed: list[RowSubscriber] = field(default_factory=list)

    def supervise(self, follow: Follow) -> None:
        """Serve, again if the process was killed."""
        process = None
        while process is None or process.has_been_killed:
            number = 0 if process is None else process.number - 1999
            process = Process(f"served{number}", host="host served", number=2000 + number)
            process.own["server"] = self.server
            live = _Serving(self, follow, process)
            task = self.sim.spawn(process, process.name, live.live)
            self.sim.wait(f"{process.name} to end", lambda task=task: task.has_ended)
            if task.error is not None:
                raise FindingError("unexpected error", f"{process.name}: {task.error!r}") from task.error
            if process.has_been_killed and live.subscriber is not None:
                self._killed.append(live.subscriber)

    def newest(self) -> str | None:
        """The newest checkpoint that is there."""
        end = f"/{MANIFEST_FILE}"
        there = (f"{PROTOCOL}://{name.removesuffix(end)}" for name in self.objects.files if name.endswith(end))
        of_root = (path for path in there if path.rpartition("/")[0] == self.book.root)
        return max(of_root, key=lambda path: (self.book.created_ns[path], path), default=None)

    def clean_up(self) -> None:
        """Take out what processes that were killed have hooked into classes of this one."""
        for subscriber in reversed(self._killed):
            subscriber._served.close()


class _Serving:
    """One process."""

    def __init__(self, of: Follower, follow: Follow, process: Process) -> None:
        self._of, self._sim, self._follow, self._process = of, of.sim, follow, process
        self._applied: list[str] = []
        self._is_served = True
        self.subscriber: RowSubscriber | None = None

    def live(self) -> None:
        """Serve until all others have ended, and then until no fault can excuse that the newest is not applied."""
        try:
            self._serve()
        finally:
            self._process.is_dead = True

    def _serve(self) -> None:
        sim, root, follow = self._sim, self._of.book.root, self._follow
        model = Served(lambda: sim.sleep(follow.lookup_secs))
        subscriber = self.subscriber = RowSubscriber(
            model,
            root,
            key=None,
            interval_secs=follow.interval_secs,
            on_applied=lambda applied: self._check_applied(model, applied),
            thread_count=follow.thread_count,
        )
        lookups = virtual.Thread(target=lambda: self._look_up(model, subscriber), name="lookups")
        lookups.start()
        self._start(subscriber)
        sim.wait("all others to end", self._of.is_over)
        self._is_served = False
        lookups.join()
        self._of.objects.shares = FaultShares()
        newest = self._of.newest()
        if not sim.wait("the newest", lambda: subscriber.applied == newest, CALM_SECS):
            raise FindingError("not followed", f"{subscriber.applied} is served, the newest is {newest}")
        with suppress(CNRError):  # the last attempt may have failed before
            subscriber.close()
        thread: Any = subscriber._thread
        if thread.is_alive() or "forward" in model.__dict__:
            raise FindingError("left waiting", "a subscriber that was closed goes on")
        end_interpreter(sim)
        check_nothing_left(sim)

    def _start(self, subscriber: RowSubscriber) -> None:
        while True:
            try:
                subscriber.start()
                return
            except (ConfigurationError, StateMismatchError):
                raise
            except CNRError as error:
                self._sim.tell(f"does not start: {type(error).__name__}: {str(error)[:160]}")
                self._sim.sleep(self._follow.interval_secs)

    def _check_applied(self, model: Served, applied: Applied) -> None:
        """The model is what it is said to be, and not older than before."""
        book, sim, before = self._of.book, self._sim, self._applied[-1] if self._applied else None
        self._applied.append(applied.path)
        sim.tell(f"serves {applied.path} ({applied.kind})")
        self._check_values([applied.path], model.values())
        is_there = before is not None and f"{before.partition('://')[2]}/{MANIFEST_FILE}" in self._of.objects.files
        if is_there and book.created_ns[applied.path] < book.created_ns[before]:
            sim.found(FindingError("went back", f"from {before}, which is there, to {applied.path}"))

    def _check_values(self, paths: list[str], found: Values) -> None:
        """They are those of one of some checkpoints."""
        for attempt in self._of.book.attempts.values():
            saved = attempt.snapshot(found) if attempt.path in paths else None
            if saved is not None and all(torch.equal(value, saved[fqn]) for fqn, value in found.items()):
                return
        # Raised, it would be caught: whatever fails in the thread of a subscriber is tried again.
        self._sim.found(FindingError("wrong values", f"{paths} should be served, and what is served is {found}"))

    def _look_up(self, model: Served, subscriber: RowSubscriber) -> None:
        """Each lookup sees what is applied at some moment of it."""
        while self._is_served:
            before, first = subscriber.applied, len(self._applied)
            found = model()
            paths = [before, *self._applied[first:], subscriber.applied]
            if before is not None:
                self._check_values([path for path in paths if path is not None], found)
            self._sim.sleep(RESTS * self._follow.lookup_secs)

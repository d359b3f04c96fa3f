"""The scheduler: tasks in real threads, of which exactly one runs at a time, and a clock that only it moves.

A task gives the others a chance at *points*: storage operations, collectives, locks, sleeps, reads of a clock. What
happens at a point is a function of the seed and of the number of the decision. So a schedule is replayed by its seed,
and shrunk by taking decisions back: one that is taken back does the ordinary thing (no switch, no fault).
"""

import _thread
import random
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

MAX_STEPS = 60_000
MAX_SECS = 5 * 86_400.0  # logical
TICK_SECS = 0.001
MAX_NAP_SECS = 2.0
TRACE_LINES = 4000


class Killed(BaseException):
    """The process of this task is dead; or the schedule has ended."""


class FindingError(AssertionError):
    """An invariant does not hold.

    Attributes:
        kind: What is wrong, the same for all schedules that show it.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass(eq=False)
class Process:
    """One rank of a job, or one that maintains or reads.

    Attributes:
        name: For the trace.
        clock_secs: What its host's clock is ahead of the true one.
        host: Where it runs.
        number: What its host calls it.
        is_dead: Whether it was killed or has ended.
        has_been_killed: Whether it was killed.
        own: What library and harness keep for one process, by name.
    """

    name: str
    clock_secs: float = 0.0
    host: str = "host"
    number: int = 0
    is_dead: bool = False
    has_been_killed: bool = False
    own: dict[str, Any] = field(default_factory=dict)


class Task:
    """A thread of a process."""

    def __init__(self, sim: "Scheduler", process: Process, name: str, run: Callable[[], None]) -> None:
        self.sim = sim
        self.process = process
        self.client = process  # whose request it does, if it is of the store
        self.name = name
        self.number = sim.num_tasks
        self.has_ended = False
        self.until: Callable[[], bool] | None = None  # what it waits for
        self.what = ""
        self.wake_secs: float | None = None
        self.is_timer = False
        self.is_daemon = False
        self.num_naps = 0
        self.num_naps_at = -1
        self.num_points = 0
        self.error: BaseException | None = None
        self._run = run
        self._baton = threading.Lock()
        self._baton.acquire()
        self.thread_id = 0  # until it runs for the first time, there is no thread

    def hand_over(self) -> None:
        """Let it run; whoever calls this must stop at once."""
        if self.thread_id:
            self._baton.release()
        else:
            _thread.start_new_thread(self._main, ())

    def stop(self) -> None:
        """Stop until somebody hands over."""
        self._baton.acquire()

    @property
    def is_ready(self) -> bool:
        """Whether it could go on now."""
        if self.until is None or self.process.is_dead:
            return True
        return self.until() or (self.wake_secs is not None and self.wake_secs <= self.sim.now)

    def _main(self) -> None:
        _local.task, self.thread_id = self, threading.get_ident()
        try:
            if not self.process.is_dead:
                self._run()
        except Killed:
            pass
        except FindingError as error:
            self.sim.found(error)
        except BaseException as error:  # noqa: BLE001 - judged by whoever spawned it
            self.error = error
            self.sim.tell(f"ended by {type(error).__name__}: {str(error)[:160]}")
        self.has_ended = True
        self.sim.leave()


class _Local(threading.local):
    task: Task | None = None


_local = _Local()


def this_task() -> Task | None:
    """The task that runs; None outside of a simulation."""
    return _local.task


class Scheduler:
    """Runs the tasks of one schedule.

    Args:
        seed: Of all decisions.
        undone: Numbers of decisions that do the ordinary thing.

    Attributes:
        now: Logical time in seconds.
        switch_share: How often a point switches to another task.
        taken: Numbers of the decisions that did something else than the ordinary thing, and what.
        trace: What happened.
        finding: What does not hold, the first that was seen.
    """

    def __init__(self, seed: int, undone: Collection[int] = ()) -> None:
        self.seed = seed
        self.now = 0.0
        self.switch_share = 0.2
        self.taken: dict[int, str] = {}
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)
        self.finding: FindingError | None = None
        self.tasks: list[Task] = []
        self.num_steps = self.num_tasks = 0
        self.digest = 0
        self._undone = undone
        self._num_decisions = 0
        self._decisions, self._numbers = random.Random(f"{seed} decisions"), random.Random(f"{seed} numbers")
        self._is_over = False
        self._over = threading.Lock()
        self._over.acquire()

    # Decisions

    def chance(self, share: float, what: str) -> bool:
        """Whether something out of the ordinary happens; never, where this decision was taken back."""
        number = self._num_decisions
        self._num_decisions += 1
        if self._decisions.random() >= share or number in self._undone or self._is_over:
            return False
        self.taken[number] = what
        return True

    def pick(self, count: int, what: str) -> int:
        """A number below ``count``; 0, where this decision was taken back."""
        number = self._num_decisions
        self._num_decisions += 1
        found = int(self._decisions.random() * count)
        if found == 0 or number in self._undone or self._is_over:
            return 0
        self.taken[number] = what
        return found

    def unique(self) -> int:
        """A number of 128 bits that nobody else gets."""
        return self._numbers.getrandbits(128)

    # Tasks

    def spawn(self, process: Process, name: str, run: Callable[[], None]) -> Task:
        """A new thread of a process, which runs when it is its turn."""
        self.num_tasks += 1
        task = Task(self, process, name, run)
        self.tasks.append(task)
        return task

    def point(self, what: str, share: float = 1.0, *, is_told: bool = True) -> None:
        """Others may run here.

        Args:
            what: For the trace.
            share: Less than 1, where a switch makes less of a difference.
            is_told: Whether it is a line of the trace.
        """
        task = this_task()
        if task is None or task.sim is not self:
            return
        self._count(task)
        task.num_points += is_told
        if is_told:
            self.tell(what)
        if self.chance(self.switch_share * share, "switch"):
            self._switch(task)

    def wait(self, what: str, until: Callable[[], bool], timeout_secs: float | None = None) -> bool:
        """Let others run until something is so; returns whether it is, or the time is over."""
        task = this_task()
        assert task is not None
        self._count(task)
        if until() and not self.chance(self.switch_share, "switch"):
            return True
        task.until, task.what = until, what
        task.wake_secs = None if timeout_secs is None else self.now + max(0.0, timeout_secs)
        self._switch(task)
        task.until = task.wake_secs = None
        return until()

    def sleep(self, secs: float) -> None:
        """Let time pass."""
        self.wait(f"sleep {secs:g}", lambda: False, secs)

    def nap(self, secs: float) -> None:
        """Sleep, longer and longer if the task does nothing else: it looks again and again for something."""
        task = this_task()
        assert task is not None
        is_again = task.num_points == task.num_naps_at
        task.num_naps = task.num_naps + 1 if is_again else 0
        self.sleep(max(secs, min(MAX_NAP_SECS, secs * 1.5**task.num_naps)))
        task.num_naps_at = task.num_points

    def _count(self, task: Task) -> None:
        if task.process.is_dead or self._is_over:
            raise Killed
        self.num_steps += 1
        self.now += TICK_SECS
        if self.num_steps > MAX_STEPS or self.now > MAX_SECS:
            raise FindingError("no end", f"after {self.num_steps} steps and {self.now:.0f} s: {self.waiting()}")

    def _switch(self, task: Task) -> None:
        following = self._next()
        if following is not task:
            following.hand_over()
            task.stop()
        if task.process.is_dead or self._is_over:
            raise Killed

    def _next(self) -> Task:
        """Whose turn it is: any that is ready; if none is, time passes until one is."""
        while True:
            ready = [task for task in self.tasks if self._is_over or task.is_ready]
            if ready:
                return ready[self.pick(len(ready), "turn")]
            alive = self.tasks
            wakes = [task.wake_secs for task in alive if task.wake_secs is not None]
            if all(task.is_timer or task.wake_secs is None for task in alive):
                self.found(FindingError("waits for ever", self.waiting()))
                continue
            self.now = max(self.now, min(wakes))

    def leave(self) -> None:
        """The task that runs has ended: another one goes on, or the schedule is over."""
        self.tasks = [task for task in self.tasks if not task.has_ended]
        if not self.tasks:
            self._over.release()
            return
        self._next().hand_over()

    def kill(self, process: Process, why: str) -> None:
        """Nothing of a process has any effect from here on."""
        if not process.is_dead:
            self.tell(f"*** {process.name} is killed: {why}")
            process.is_dead = process.has_been_killed = True

    def found(self, finding: FindingError) -> None:
        """Something does not hold; ends the schedule."""
        if self.finding is None:
            self.finding = finding
            self.tell(f"!!! {finding}")
        self._is_over = True

    def stop(self) -> None:
        """End all tasks that are left."""
        self._is_over = True

    def run(self) -> None:
        """Run all tasks to their ends."""
        if self.tasks:
            self._next().hand_over()
            self._over.acquire()

    # What is told

    def tell(self, what: str) -> None:
        """A line of the trace."""
        task = this_task()
        who = task.name if task is not None else "-"
        self.digest = zlib.crc32(f"{who} {what}".encode(), self.digest)
        self.trace.append(f"{self.now:10.3f} {who:<22} {what}")

    def waiting(self) -> str:
        """What each task waits for."""
        return "; ".join(f"{task.name} in {task.what or 'its turn'}" for task in self.tasks if not task.has_ended)

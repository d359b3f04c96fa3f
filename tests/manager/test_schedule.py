"""When to save: all ranks at the same steps, knowing the same facts, and waiting for no question that they ask.

And when a save in the background is over.
"""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_cnr.errors import SaveError
from torchrec_cnr.manager import schedule
from torchrec_cnr.manager.background import BackgroundSave
from torchrec_cnr.manager.schedule import Facts, Schedule

NUM_RANKS = 3


@dataclass
class Clock:
    """A clock that tests set, in the place of ``time``."""

    now: float = 100.0

    def monotonic(self) -> float:
        """The seconds on it."""
        return self.now


@dataclass
class Questions:
    """The questions of all ranks, in the order in which each rank asks them. An answer waits for all ranks."""

    wait_secs: float = 10.0
    asked: list[list[Sequence[int]]] = field(default_factory=lambda: [[] for _ in range(NUM_RANKS)])
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def begin(self, rank: int) -> Callable[[Sequence[int]], Callable[[], Sequence[int]]]:
        """What a rank asks with."""

        def begin(numbers: Sequence[int]) -> Callable[[], Sequence[int]]:
            index = len(self.asked[rank])
            with self._changed:
                self.asked[rank].append(numbers)
                self._changed.notify_all()

            def answer() -> Sequence[int]:
                with self._changed:
                    are_there = self._changed.wait_for(lambda: min(map(len, self.asked)) > index, self.wait_secs)
                assert are_there, f"rank {rank} waits for another one"
                return [max(each) for each in zip(*(asked[index] for asked in self.asked), strict=True)]

            return answer

        return begin


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all schedules of a test."""
    clock = Clock()
    monkeypatch.setattr(schedule, "time", clock)
    return clock


def _ranks(questions: Questions, every_steps: int | None, every_secs: float | None) -> list[Schedule]:
    return [
        Schedule(every_steps, every_secs, questions.begin(rank), is_coordinator=rank == 0, _saved_at=100.0)
        for rank in range(NUM_RANKS)
    ]


def test_a_step_asks_and_the_next_one_answers(clock: Clock) -> None:
    """No rank reads an answer at the step at which it asks, so that none waits; the save comes when it is due."""
    questions = Questions(wait_secs=0.0)
    ranks = _ranks(questions, None, 10.0)
    saves = []
    for step in range(1, 100):
        clock.now += 1.0
        for rank in ranks:  # one that waited for the next ones would fail
            if rank(step, Facts()) is not None:
                rank.saved()
                saves.append(step)
    assert saves == [step for step in range(10, 100, 10) for _ in range(NUM_RANKS)]
    assert len(questions.asked[0]) == len(questions.asked[2]) < 60


def test_a_step_that_is_due_is_asked_about_at_the_one_before(clock: Clock) -> None:
    """Only there, and so no rank waits when it saves."""
    questions = Questions(wait_secs=0.0)
    ranks = _ranks(questions, 10, None)
    for step in range(1, 100):
        due = [rank(step, Facts(is_busy=number == 1)) for number, rank in enumerate(ranks)]
        assert due == [Facts(is_busy=True) if step % 10 == 0 else None] * NUM_RANKS
        assert len(questions.asked[0]) == (step + 1) // 10


def test_calls_may_be_rare(clock: Clock) -> None:
    """A job that asks every 100 steps saves at the call that comes nearest after the time, not at the one behind."""
    questions = Questions()
    due = Schedule(None, 10.0, questions.begin(0), _saved_at=100.0)
    questions.asked[1:] = []
    saves = []
    for step in range(100, 2_000, 100):
        clock.now += 4.0
        if due(step, Facts()) is not None:
            due.saved()
            saves.append(step)
    assert saves == list(range(300, 2_000, 300))


def test_only_the_clock_of_the_coordinator_counts(clock: Clock) -> None:
    """Another rank believes that it is time, and must not save alone."""
    questions = Questions()
    ranks = _ranks(questions, None, 10.0)
    ranks[1]._saved_at = 0.0
    for step in range(1, 5):
        clock.now += 1.0
        assert [rank(step, Facts()) for rank in ranks] == [None] * NUM_RANKS


@given(
    every_steps=st.none() | st.integers(1, 4),
    every_secs=st.none() | st.floats(0.5, 5),
    facts=st.lists(st.lists(st.builds(Facts), min_size=NUM_RANKS, max_size=NUM_RANKS), min_size=1, max_size=30),
    forced=st.sets(st.integers(1, 30)),
)
def test_ranks_agree(
    every_steps: int | None, every_secs: float | None, facts: list[list[Facts]], forced: set[int]
) -> None:
    """They save at the same steps and know the same facts, which some rank had at this step or the one before."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(NUM_RANKS) as threads:
        clock = Clock()
        patch.setattr(schedule, "time", clock)
        questions = Questions()
        ranks = _ranks(questions, every_steps, every_secs)
        before = facts[0]
        for step, own in enumerate(facts, 1):
            clock.now += 1.0
            calls = [threads.submit(rank, step, fact, step in forced) for rank, fact in zip(ranks, own, strict=True)]
            agreed = [call.result() for call in calls]
            assert len(set(agreed)) == 1
            if agreed[0] is not None:
                known = [Facts(any(f.is_busy for f in each), any(f.is_corrupt for f in each)) for each in (own, before)]
                assert agreed[0] in known
                for rank in ranks:
                    rank.saved()
            is_certain = step in forced or (every_steps is not None and step % every_steps == 0)
            assert agreed[0] is not None or not (is_certain or (every_steps is None and every_secs is None))
            before = own


def test_a_background_save_is_over_when_its_manifest_was_read() -> None:
    """Not before, since a process that ends would leave the thread that reads it behind."""
    future, is_reading, may_end = Future[int](), threading.Event(), threading.Event()

    def read() -> None:
        is_reading.set()
        may_end.wait(10)

    save = BackgroundSave(3, future, time.monotonic() - 2, time.monotonic() - 1, read)
    assert (save.is_running, round(save.stall_secs)) == (True, 2)
    with ThreadPoolExecutor(2) as threads:
        threads.submit(future.set_result, 7)
        result = threads.submit(save.result)
        assert is_reading.wait(10)
        secs = save.secs
        assert (save.is_running, result.done(), round(secs)) == (False, False, 1)
        may_end.set()
        assert (result.result(10), save.secs) == (7, secs)


def test_a_background_save_that_fails_reads_nothing_and_is_freed() -> None:
    """Without the garbage collector: its error refers to all that was staged."""
    future, was_read = Future[int](), []
    save = BackgroundSave(3, future, 0.0, 0.0, lambda: was_read.append(True))
    future.set_exception(SaveError("no room"))
    with pytest.raises(SaveError, match="no room"):
        save.result()
    assert was_read == []
    freed = weakref.ref(future)
    gc.disable()
    try:
        del future, save
        assert freed() is None
    finally:
        gc.enable()

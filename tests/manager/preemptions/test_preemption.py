"""Preemption: a signal on any rank is agreed on by all, which save at the same step and are told to stop."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.support import faults
from tests.support.models import differing, plain_job, state, torchrec_job, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.maintenance.background_upkeep import Upkeep

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Put handlers back, which a manager that was told to stop leaves to the end of the process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _manager(root: str | Path, job: Any, **more: Any) -> cnr.CheckpointManager:
    return cnr.CheckpointManager(
        root, cnr.RowTracker(job.model), every_steps=100, **{"preemption": cnr.Preemption(), **more}
    )


def _run(rank: int, root: str, signalled: int, number: int, is_async: bool, overlap: bool) -> tuple[Any, ...]:
    """Train until told to stop; one rank gets a signal in its third step."""
    job = torchrec_job(1)
    manager = _manager(root, job, preemption=cnr.Preemption(overlap=overlap))
    saved = []
    for step in range(1, 20):
        train(job, step)
        if step == 3 and rank == signalled:
            os.kill(os.getpid(), number)
        result = manager.async_save(step, state(job)) if is_async else manager.save(step, state(job))
        if result is not None:
            saved.append(result.result().step if is_async else result.step)
        if manager.should_stop:
            break
    answer = step, saved, manager.should_stop, manager.exit_status
    manager.close()
    os.kill(os.getpid(), number)  # torchrun's, when another rank has exited
    signal.signal(number, signal.SIG_DFL)
    target = torchrec_job(2)
    again = _manager(root, target)
    restored = again.restore(state(target))
    is_same = not differing(whole(state(target)), whole(state(job)))
    again.close()
    return (*answer, restored, is_same, manager.should_stop, signal.getsignal(number))


@pytest.mark.parametrize(
    ("number", "is_async", "overlap"),
    [(signal.SIGTERM, False, True), (signal.SIGUSR1, True, True), (signal.SIGTERM, True, False)],
)
def test_all_ranks_save_at_the_same_step_and_stop(
    tmp_path: Path, rank_pool: RankPools, number: int, is_async: bool, overlap: bool
) -> None:
    """At the end of the step after the signal, or of its own; the handlers of before are back afterwards."""
    answers = rank_pool(2).run(_run, str(tmp_path / "run"), 1, int(number), is_async, overlap, timeout_secs=100.0)
    step = 3 + overlap
    assert answers == [(step, [step], True, 143, step, True, True, signal.SIG_DFL)] * 2


def test_one_process_stops(tmp_path: Path) -> None:
    """Without a process group, and with the exit status that was asked for; a job that ends by itself exits with 0."""
    job = plain_job(1)
    manager = _manager(tmp_path / "run", job, preemption=cnr.Preemption(signals=(signal.SIGUSR2,), exit_status=75))
    seen = []
    for step in range(1, 8):
        train(job, step)
        if step == 2:
            os.kill(os.getpid(), signal.SIGUSR2)
        seen.append((manager.save(step, state(job)) is not None, manager.should_stop, manager.exit_status))
    manager.close()
    stopped = (False, True, 75)
    assert seen == [(False, False, 0)] * 2 + [(True, True, 75)] + [stopped] * 4


def test_nothing_is_handled_unless_asked_for(tmp_path: Path) -> None:
    """A manager without preemption leaves all handlers alone."""
    before = signal.getsignal(signal.SIGTERM)
    manager = cnr.CheckpointManager(tmp_path, cnr.RowTracker(plain_job(1).model))
    assert signal.getsignal(signal.SIGTERM) is before
    assert (manager.should_stop, manager.exit_status) == (False, 0)
    manager.close()


def test_earlier_handlers_are_called_too(tmp_path: Path) -> None:
    """A trainer's own handler still runs. After a signal, others are ignored until the process ends."""
    calls: list[int] = []

    def own(number: int, frame: object) -> None:
        calls.append(number)

    before = signal.signal(signal.SIGUSR1, own)
    try:
        job = plain_job(1)
        manager = _manager(tmp_path, job)
        os.kill(os.getpid(), signal.SIGUSR1)
        for step in (1, 2):
            manager.save(step, state(job))
        assert manager.should_stop
        manager.close()
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun's, when another rank has exited
        assert calls == [signal.SIGUSR1]
        after = _manager(tmp_path, job)
        after.close()
        assert signal.getsignal(signal.SIGUSR1) != own  # that of the manager which was told to stop
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_handlers_are_put_back(tmp_path: Path) -> None:
    """By a manager that no signal has told to stop."""

    def own(number: int, frame: object) -> None:
        pass

    before = signal.signal(signal.SIGUSR1, own)
    try:
        manager = _manager(tmp_path, plain_job(1))
        assert signal.getsignal(signal.SIGUSR1) != own
        manager.close()
        assert signal.getsignal(signal.SIGUSR1) == own
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_failed_save_before_does_not_prevent_the_last_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The background save failed: the last save has its rows; without a signal, its error is raised."""
    job = plain_job(1)
    manager = _manager(tmp_path / "run", job)
    for is_stopping in (False, True):
        with faults.failing(manager._planner, manager._writer, "finish", "before", 0):
            future = manager.async_save(10 + is_stopping, state(job), force=True)
            assert future is not None
            assert isinstance(future.exception(timeout=60), CheckpointException)
        if is_stopping:
            os.kill(os.getpid(), signal.SIGTERM)
            assert manager.save(21, state(job)) is None  # all ranks learn of it at the end of the next step
            saved = manager.save(22, state(job))
            assert saved is not None
            assert saved.step == 22
        else:
            with pytest.raises(CheckpointException):
                manager.wait()
    manager.close()
    assert "saving before the job stops, although the save before has failed" in caplog.text
    assert cnr.latest(tmp_path / "run") == str(tmp_path / "run" / "step-22")


def test_limits_do_not_slow_down_a_job_that_must_stop(tmp_path: Path) -> None:
    """A save that would take hours at 10 bytes per second and a hundredth of a core, and the last one, end at once."""
    job = plain_job(1)
    background = cnr.Background(cpu_share=0.01, max_bytes_per_sec=10.0)
    manager = _manager(tmp_path / "run", job, background=background, quantization=cnr.Asymmetric(8))
    running = manager.async_save(1, state(job), force=True)
    assert running is not None
    time.sleep(0.5)
    assert not running.done()
    os.kill(os.getpid(), signal.SIGTERM)
    assert [manager.save(step, state(job)) is not None for step in (2, 3)] == [False, True]
    assert running.done()
    manager.close()
    assert cnr.latest(tmp_path / "run") == str(tmp_path / "run" / "step-3")


def test_a_job_that_must_stop_does_not_wait_for_maintenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maintenance may be killed at any moment; the thread ends after what it does, and begins nothing new."""
    done, worked_on = threading.Event(), list[str]()

    def work(self: Upkeep, checkpoint: Checkpoint) -> None:
        worked_on.append(checkpoint.path)
        assert done.wait(60)

    monkeypatch.setattr(Upkeep, "run_for", work)
    job = plain_job(1)
    manager = _manager(tmp_path / "run", job)
    for step in (1, 2):
        manager.save(step, state(job), force=True)
    os.kill(os.getpid(), signal.SIGTERM)
    for step in (3, 4):
        manager.save(step, state(job))
    assert manager.should_stop
    manager.close()
    assert manager._upkeep is not None
    thread = manager._upkeep._thread
    assert thread is not None
    assert thread.is_alive()
    done.set()
    thread.join(60)
    assert not thread.is_alive()
    assert len(worked_on) == 1


def test_children_are_ended_by_signals(tmp_path: Path) -> None:
    """A forked process, such as a worker of a data loader, does not inherit the handlers."""
    manager = _manager(tmp_path, plain_job(1))
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(sending, b"x")  # a signal before this may be lost, as in any process with a handler of Python's
        time.sleep(60)
        os._exit(0)
    assert os.read(receiving, 1) == b"x"
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    manager.close()
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert not manager.should_stop


def test_arguments_are_checked(tmp_path: Path) -> None:
    """A typed error that names the argument; outside of the main thread, Python handles no signals."""
    for wrong in (
        {"signals": (signal.SIGKILL,)},
        {"signals": signal.SIGTERM},
        {"signals": (0,)},
        {"signals": ("TERM",)},
    ):
        with pytest.raises(cnr.ConfigurationError, match="'signals'"):
            cnr.Preemption(**wrong)
    for status in (0, 256, "143"):
        with pytest.raises(cnr.ConfigurationError, match="'exit_status'"):
            cnr.Preemption(exit_status=status)  # type: ignore[arg-type]
    job, errors = plain_job(1), list[BaseException]()
    with pytest.raises(cnr.ConfigurationError, match="'preemption'"):
        cnr.CheckpointManager(tmp_path, cnr.RowTracker(job.model), preemption=True)  # type: ignore[arg-type]

    def make() -> None:
        try:
            _manager(tmp_path / "thread", job)
        except cnr.ConfigurationError as error:
            errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join(60)
    assert "main thread" in str(errors[0])
    _manager(tmp_path / "thread", job).close()  # nothing of the first one is left


def _differ(rank: int, root: str) -> str:
    with pytest.raises(cnr.ConfigurationError) as raised:
        _manager(root, torchrec_job(1), preemption=cnr.Preemption() if rank == 0 else None)
    dist.barrier()
    return str(raised.value)


def test_all_ranks_listen_or_none(tmp_path: Path, rank_pool: RankPools) -> None:
    """Ranks that do not agree on it would wait for each other for ever."""
    errors = rank_pool(2).run(_differ, str(tmp_path / "run"), timeout_secs=60.0)
    assert len(set(errors)) == 1
    assert "'preemption' must be the same on all ranks" in errors[0]


def test_a_process_that_was_told_to_stop_exits_with_the_status(tmp_path: Path) -> None:
    """As the documentation has it: a signal from outside, at any time, and ``sys.exit(manager.exit_status)``."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import sys, time, torch
            from torch import nn
            import torchrec_cnr as cnr

            model = nn.EmbeddingBag(100, 4, sparse=True)
            state = {"model": model.state_dict()}
            manager = cnr.CheckpointManager("run", cnr.RowTracker(model), every_steps=1000, preemption=cnr.Preemption())
            first = manager.restore(state) or 0
            print("ready", first, flush=True)
            for step in range(first + 1, 100_000):
                time.sleep(0.01)
                manager.save(step, state)
                if manager.should_stop:
                    break
            manager.close()
            sys.exit(manager.exit_status)
        """)
    )
    with subprocess.Popen([sys.executable, script], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready 0\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
    assert cnr.latest(tmp_path / "run") is not None

"""Trainers and brokers are killed at random moments: what was committed is there, bit for bit, and the run goes on.

A trainer saves in a loop. Before each save it writes down a digest of its state, under the name of the checkpoint. The
parent kills it, or the broker, or both, at moments that a seed gives, and starts them again. The next trainer must then
restore the checkpoint of the last marker that a plain consumer finds, and hold the state that was written down for it.
"""

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchrec_cnr as cnr
from tests.servers.kafka_server import KafkaServer
from tests.support import models
from tests.support.faults import act_before
from tests.support.jobs import SavingJob
from tests.support.kafka_jobs import SECS, marked, wait_until_well
from tests.support.killing import in_child
from tests.support.models import Whole, state, train, whole
from torchrec_cnr.storage.store import Store

TIMEOUT_SECS = 2.0
NUM_LIVES = 3  # trainers of a schedule that are killed
NUM_SCHEDULES = 100
FIRST_SEED = random.SystemRandom().randrange(10**6)


def digest(values: Whole) -> str:
    """Of all tensors, bit for bit."""
    found = hashlib.sha256()
    for fqn, value in sorted(values.items()):
        if isinstance(value, Tensor):
            found.update(fqn.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def live(root: str, bootstrap: str, topic: str, journal: str) -> None:
    """Be a trainer: restore, write down what that gave, and save for ever; what fails is tried again."""
    rows = cnr.KafkaRows(bootstrap, topic, num_partitions=2, timeout_secs=TIMEOUT_SECS)
    _linger(cnr.KafkaRows, "mark")
    _linger(Store, "put_new")
    job = SavingJob(root, row_log=rows, seed=int.from_bytes(os.urandom(3)))
    with Path(journal).open("a") as file:

        def write(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        newest = cnr.latest(root, row_log=rows)
        if newest is not None:
            models.load(job.job, newest, job.tracker, row_log=rows)
        write(restored=newest and Path(newest).name, digest=digest(whole(state(job.job))), pid=os.getpid())
        while True:
            train(job.job, int.from_bytes(os.urandom(3)))
            name = f"{os.getpid()}-{time.time_ns()}"
            write(name=name, digest=digest(whole(state(job.job))))
            try:
                if len(name) % 2:
                    job.save(name)
                else:
                    job.async_save(name).result()
            except Exception as error:  # noqa: BLE001 - the parent looks at it
                write(failed=name, says=f"{type(error).__name__}: {error}"[-300:])
                time.sleep(0.05)


def _linger(owner: Any, name: str) -> None:
    """Have a moment last that is over too soon to be hit."""
    act_before(owner, name, lambda: time.sleep(random.uniform(0, 0.1)))


@dataclass(frozen=True)
class Schedule:
    """When who is killed.

    Attributes:
        lives: How many saves each trainer begins, and how many seconds after that it is killed.
        broker: Which life the broker does not outlive, and how many seconds after the last save began it is killed.
    """

    lives: tuple[tuple[int, float], ...]
    broker: tuple[int, float] | None

    @classmethod
    def drawn(cls, seed: int) -> "Schedule":
        """That of a seed."""
        draw = random.Random(seed)
        lives = tuple((draw.randint(1, 5), draw.uniform(0, 0.2)) for _ in range(NUM_LIVES))
        return cls(lives, (draw.randrange(NUM_LIVES), draw.uniform(0, 0.2)) if seed % 2 else None)


def _lines(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("}")]


def _wait_for_restore(trainer: "Future[int | None]", journal: Path, number: int) -> dict[str, Any]:
    deadline = time.monotonic() + 3 * SECS
    while True:
        restored = [line for line in _lines(journal) if "restored" in line] if journal.exists() else []
        if len(restored) > number:
            return restored[number]
        assert not trainer.done(), trainer.result()
        assert time.monotonic() < deadline, "no restore"
        time.sleep(0.02)


def run(server: KafkaServer, folder: Path, schedule: Schedule, threads: ThreadPoolExecutor) -> int:
    """Live a schedule; how many checkpoints were committed."""
    root, journal, topic = folder / "root", folder / "journal", server.new_name()
    rows = cnr.KafkaRows(server.bootstrap, topic, num_partitions=2)
    rows.open()
    digests: dict[str, str] = {}
    committed: list[str] = []
    for number in range(NUM_LIVES + 1):
        trainer = threads.submit(in_child, live, str(root), server.bootstrap, topic, str(journal))
        restored = _wait_for_restore(trainer, journal, number)
        try:
            assert restored["restored"] == (committed[-1] if committed else None)
            if committed:
                assert restored["digest"] == digests[committed[-1]]
            if number == NUM_LIVES:
                return _goes_on(trainer, journal, rows, committed)
            _wait_for_saves(trainer, journal, restored["pid"], schedule.lives[number][0])
            _kill(server, restored["pid"], schedule, number)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(restored["pid"], signal.SIGKILL)
        assert trainer.result(SECS) == -signal.SIGKILL
        server.start()
        wait_until_well(server)
        digests |= {line["name"]: line["digest"] for line in _lines(journal) if "name" in line}
        rows = cnr.KafkaRows(server.bootstrap, topic, num_partitions=2, timeout_secs=TIMEOUT_SECS + number)
        cnr.latest(root, row_log=rows)  # waits until it is certain what was committed
        before, committed = committed, marked(rows)
        assert committed[: len(before)] == before, "once and for all"
        _assert_nothing_strange(journal)
    raise AssertionError


def _wait_for_saves(trainer: "Future[int | None]", journal: Path, pid: int, number: int) -> None:
    """Until a trainer has begun so many."""
    deadline = time.monotonic() + SECS
    while len([line for line in _lines(journal) if line.get("name", "").startswith(f"{pid}-")]) < number:
        assert not trainer.done(), trainer.result()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _kill(server: KafkaServer, pid: int, schedule: Schedule, number: int) -> None:
    ends: list[tuple[float, Callable[[], None]]] = [(schedule.lives[number][1], lambda: os.kill(pid, signal.SIGKILL))]
    if schedule.broker is not None and schedule.broker[0] == number:
        ends.append((schedule.broker[1], server.kill))
    began = time.monotonic()
    for at, end in sorted(ends, key=lambda found: found[0]):
        time.sleep(max(0.0, began + at - time.monotonic()))
        end()


def _assert_nothing_strange(journal: Path) -> None:
    """Saves failed because the broker was gone, and for no other reason."""
    for line in _lines(journal):
        assert "failed" not in line or "StoreError" in line["says"], line


def _goes_on(trainer: "Future[int | None]", journal: Path, rows: cnr.KafkaRows, committed: list[str]) -> int:
    """The last trainer commits once more."""
    deadline = time.monotonic() + SECS
    while len(found := marked(rows)) == len(committed):
        assert not trainer.done(), trainer.result()
        assert time.monotonic() < deadline
    assert found[: len(committed)] == committed
    _assert_nothing_strange(journal)
    return len(found)


@pytest.mark.long
@pytest.mark.timeout(280)
def test_what_was_committed_outlives_everybody(tmp_path_factory: pytest.TempPathFactory, server: KafkaServer) -> None:
    """One schedule, in which the broker is killed as well."""
    with ThreadPoolExecutor(1) as threads:
        number = run(server, tmp_path_factory.mktemp("kills"), Schedule.drawn(1), threads)
    assert number > 1, "more than what the last trainer committed"


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("number", range(NUM_SCHEDULES))
def test_many_schedules_of_kills(
    tmp_path_factory: pytest.TempPathFactory, server: KafkaServer, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """A hundred, other ones in each run, which says what they were."""
    seed = FIRST_SEED + number
    with ThreadPoolExecutor(1) as threads:
        num_checkpoints = run(server, tmp_path_factory.mktemp("kills"), Schedule.drawn(seed), threads)
    with capsys.disabled():
        sys.stderr.write(f"schedule {number} (seed {seed}): {num_checkpoints} checkpoints were committed\n")
    assert num_checkpoints

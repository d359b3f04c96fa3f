"""Random lives of a job whose broker freezes, dies and comes back: what loads is what was saved."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import torchrec_cnr as cnr
from tests.servers.kafka_server import KafkaServer
from tests.support import faults
from tests.support.jobs import SavingJob
from tests.support.kafka_jobs import (
    SECS,
    absent_at,
    failing_commit,
    marked,
)
from tests.support.models import Whole, differing, state, train, whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PATIENT_SECS = 6.0  # a broker that was killed answers late at first on a busy machine
IMPATIENT_SECS = 2.0  # with less, a busy machine has not ended a transaction that was left open


# Random lives


@dataclass
class KafkaLife:
    """What a job does, beside a dictionary of what must be loaded.

    Attributes:
        root: Of its checkpoints.
        rows: The log.
        server: Is frozen and killed.
        saved: What checkpoints hold, by name: those that were committed, or may have been.
        newest: Names of what may be the newest one: the last that was committed, then those whose saves failed.
    """

    root: str
    rows: cnr.KafkaRows
    server: KafkaServer
    saved: dict[str, Whole] = field(default_factory=dict)
    newest: list[str | None] = field(default_factory=lambda: [None])
    _in_flight: "Future[Any] | None" = None

    def __post_init__(self) -> None:
        self.job = SavingJob(self.root, row_log=self.rows)

    def run(self, operation: str, seed: int) -> None:
        """Train, and do one operation."""
        train(self.job.job, seed)
        if operation == "train":
            return
        self.land()
        name = str(len(self.saved))
        match operation.split():
            case ["save"]:
                self.saved[name] = self.job.save(name)
                self.newest = [name]
            case ["save", "behind"]:
                self._in_flight = self.job.async_save(name)
                self.saved[name] = self.job.saved[name]
            case ["fail", when]:
                with failing_commit(when):
                    assert isinstance(self.job.failure(name), faults.InjectedError)
                self.saved[name] = self.job.saved[name]
                self.newest = [name] if when == "after" else self.newest
            case [("killed" | "frozen") as how, moment]:
                with absent_at(moment, self.server, how):
                    assert isinstance(self.job.failure(name), cnr.StoreError)
                self.saved[name] = self.job.saved[name]
                self.newest = [*self.newest, name]
            case ["restore"]:
                self.check()
            case ["restart"]:
                self.job.close()
                self.job = SavingJob(self.root, row_log=self.rows, seed=seed)
                self.check()

    def land(self) -> None:
        """Wait for a save behind training."""
        if self._in_flight is not None:
            self._in_flight.result(timeout=SECS)
            self._in_flight = None
            self.newest = [list(self.saved)[-1]]

    def check(self) -> None:
        """The newest checkpoint is one that may be it, and gives the job exactly what was saved."""
        self.land()
        newest = cnr.latest(self.root, row_log=self.rows)
        assert (newest and Path(newest).name) in self.newest
        if newest is not None:
            name = self.job.restore()
            assert differing(whole(state(self.job.job)), self.saved[name]) == []
            self.newest = [name]


MILD = ("train", "save", "save", "save behind", "fail before", "fail after", "restore", "restart")
ROUGH = ("frozen begin", "frozen marker")


def _live(server: KafkaServer, folder: Path, operations: list[str], timeout_secs: float) -> None:
    rows = cnr.KafkaRows(server.bootstrap, server.new_name(), num_partitions=2, timeout_secs=timeout_secs)
    life = KafkaLife(str(folder), rows, server)
    for seed, operation in enumerate(operations):
        life.run(operation, seed)
    life.run("save", 1000)
    life.check()
    life.run("restart", 1001)
    for name in marked(rows):
        life.job.assert_loads(name, life.saved[name])
    life.job.close()


@pytest.mark.long
@settings(max_examples=3, derandomize=True, phases=[Phase.generate])  # the slow test below shrinks what fails
@given(operations=st.lists(st.sampled_from(MILD + MILD + MILD + ROUGH), min_size=5, max_size=12))
def test_the_newest_checkpoint_is_what_the_dictionary_says(
    tmp_path_factory: pytest.TempPathFactory, server: KafkaServer, operations: list[str]
) -> None:
    """Whatever a job goes through between its saves, what loads is what was saved."""
    _live(server, tmp_path_factory.mktemp("life"), operations, IMPATIENT_SECS)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))  # each within the time that a test has
@settings(max_examples=6)
@given(operations=st.lists(st.sampled_from(MILD + MILD + ROUGH + ("killed begin", "killed marker")), max_size=25))
def test_many_lives(
    tmp_path_factory: pytest.TempPathFactory, server: KafkaServer, part: int, operations: list[str]
) -> None:
    """As above, and the broker is killed too."""
    _live(server, tmp_path_factory.mktemp(f"life{part}-"), operations, PATIENT_SECS)

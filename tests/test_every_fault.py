"""Every storage operation of a save, a compaction and a prune, spoiled in every way: nothing is lost.

Whatever a request does instead of what it should, the head before loads bit for bit, the next save commits and has all
rows, running the upkeep again finishes it, and a prune leaves no file behind that nothing refers to.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests import models
from tests.models import Whole, differing, plain_job, state, train, whole
from torchrec_cnr.leases import LEASE_SECS
from torchrec_cnr.lineage import read_lineage
from torchrec_cnr.maintenance import journal
from torchrec_cnr.testing import Fault, FaultyStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

FAULTS = [fault for fault in Fault if fault is not Fault.CRASH]
NUM_SAMPLED = 40  # in every run, of each kind of work; all in the slow run


class _Run:
    """A job with a baseline and two deltas under a root that may fail."""

    def __init__(self, store: FaultyStore) -> None:
        self.store = store
        self.job = plain_job(1, "adagrad")
        self.tracker = cnr.RowTracker(self.job.model)
        self.planner = cnr.CNRSavePlanner(self.tracker, policy=cnr.Consecutive())
        self.writer = models.writer(store.url)
        self.cuts: dict[str, Whole] = {}
        for number in range(3):
            self.save(f"step-{number}")

    def save(self, name: str, *, is_async: bool = False) -> None:
        """Train, and save."""
        train(self.job, len(self.cuts))
        self.cuts[name] = whole(state(self.job))
        arguments: dict[str, Any] = {"storage_writer": self.writer, "planner": self.planner}
        arguments["checkpoint_id"] = f"{self.store.url}/{name}"
        if is_async:
            dcp.async_save(state(self.job), **arguments).result()  # type: ignore[union-attr]
        else:
            dcp.save(state(self.job), **arguments)

    def loads(self, name: str) -> bool:
        """Whether a checkpoint loads as its cut, bit for bit."""
        return differing(models.load(plain_job(2, "adagrad"), f"{self.store.url}/{name}"), self.cuts[name]) == []

    def close(self) -> None:
        """Give back what it took."""
        self.writer.close()
        self.tracker.close()


def _save(run: _Run) -> None:
    run.save("step-3")


def _save_behind(run: _Run) -> None:
    run.save("step-3", is_async=True)


def _compact(run: _Run) -> None:
    cnr.compact(f"{run.store.url}/step-2", max_ratio=1.0)


def _prune(run: _Run) -> None:
    result = cnr.execute(cnr.plan_prune(run.store.url, cnr.Keep(last=1), now_ns=_later_ns()))
    if result.failed:
        raise cnr.StoreError(str(result))


WORK: dict[str, Callable[[_Run], None]] = {
    "save": _save,
    "save behind training": _save_behind,
    "compact": _compact,
    "prune": _prune,
}


def _later_ns() -> int:
    """When all leases have run out."""
    return time.time_ns() + 2 * LEASE_SECS * 10**9


def _spoil(root: Path, work: str, fault: Fault | None, number: int) -> int:
    """Spoil one operation of some work, and see that nothing is lost; how many operations there were."""
    with FaultyStore(root, delay_secs=0.01) as store:
        run = _Run(store)
        if work == "prune":
            _compact(run)  # so that packs of several checkpoints stay
        store.clear()
        if fault is not None:
            store.faults[number] = fault
        error = _error_of(lambda: WORK[work](run))
        num_operations = len(store.operations)
        store.clear()
        assert fault is not None or error is None
        assert isinstance(error, cnr.CNRError | None), repr(error)
        assert run.loads("step-2")
        assert error is not None or "step-3" not in run.cuts or run.loads("step-3")
        if work in ("compact", "prune"):
            WORK[work](run)
            assert run.loads("step-2")
        run.save("step-4")
        assert run.loads("step-4")
        _prune(run)
        assert run.loads("step-4")
        assert _left_over(root, store.url) == []
        run.close()
    return num_operations


def _error_of(act: Callable[[], None]) -> BaseException | None:
    """What it fails with, on this rank."""
    try:
        act()
    except CheckpointException as error:
        return models.causes(error)[0]
    except cnr.CNRError as error:
        return error
    return None


def _left_over(root: Path, url: str) -> list[str]:
    """Files under a root that its newest checkpoint does not need."""
    newest = cnr.latest(url)
    assert newest is not None
    needed = set()
    for checkpoint in read_lineage(newest).checkpoints:
        folder = root / checkpoint.store.path.rpartition("/")[2]
        needed |= {folder / (pack.directory or "") / pack.name for pack in checkpoint.manifest.packs}
        needed |= set(folder.glob("manifest*.json"))
    needed = {path.resolve() for path in needed}
    files = (path for path in root.rglob("*") if path.is_file() and path.parent.name != journal.DIRECTORY)
    return [str(path) for path in files if path.resolve() not in needed]


@pytest.mark.parametrize("work", WORK)
def test_spoiled_operations_lose_nothing(tmp_path: Path, work: str) -> None:
    """A sample of all faults at all operations."""
    num_operations = _spoil(tmp_path / "none", work, None, 0)
    cells = [(fault, number) for fault in FAULTS for number in range(1, num_operations + 1)]
    for fault, number in random.Random(0).sample(cells, min(NUM_SAMPLED, len(cells))):
        _spoil(tmp_path / f"{fault.value}-{number}", work, fault, number)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.value)
@pytest.mark.parametrize("work", WORK)
def test_every_spoiled_operation_loses_nothing(
    tmp_path: Path, work: str, fault: Fault, record_property: Callable[[str, object], None]
) -> None:
    """All of them."""
    num_operations = _spoil(tmp_path / "none", work, None, 0)
    for number in range(1, num_operations + 1):
        _spoil(tmp_path / str(number), work, fault, number)
    record_property("num_faults", num_operations)

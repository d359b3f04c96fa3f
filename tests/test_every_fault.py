"""Every storage operation of a save, a compaction and a prune on two ranks, spoiled in every way: nothing is lost.

Whatever a request does instead of what it should, the head before loads bit for bit, the next save commits and has all
rows, running the upkeep again finishes it, and a prune leaves no file behind that nothing refers to.
"""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests import models
from tests.models import Whole, differing, state, torchrec_job, train, whole
from tests.ranks import RankPools
from torchrec_cnr.leases import LEASE_SECS
from torchrec_cnr.lineage import read_lineage
from torchrec_cnr.maintenance import journal
from torchrec_cnr.testing import Fault, FaultyStore

FAULTS = [fault for fault in Fault if fault is not Fault.CRASH]
NUM_SAMPLED = 12  # in every run, of each kind of work; all in the slow run
PACK_BYTES = 1 << 10  # so that a save has many operations

Cell = tuple[Fault, int, int]  # a fault, at which operation, of which rank


class _Run:
    """A job with a baseline and two deltas under a root that may fail."""

    def __init__(self, store: FaultyStore) -> None:
        self.store = store
        self.job = torchrec_job(1)
        self.tracker = cnr.RowTracker(self.job.model)
        self.planner = cnr.CNRSavePlanner(self.tracker, policy=cnr.Consecutive())
        self.writer = models.writer(store.url, pack_bytes=PACK_BYTES)
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
        return differing(models.load(torchrec_job(2), f"{self.store.url}/{name}"), self.cuts[name]) == []

    def close(self) -> None:
        """Give back what it took."""
        self.writer.close()
        self.tracker.close()


def _save(run: _Run) -> None:
    run.save("step-3")


def _save_behind(run: _Run) -> None:
    run.save("step-3", is_async=True)


def _compact(run: _Run) -> None:
    if dist.get_rank() == 0:
        cnr.compact(f"{run.store.url}/step-2", max_ratio=1.0, pack_bytes=PACK_BYTES)


def _prune(run: _Run) -> None:
    if dist.get_rank() == 0:
        later_ns = time.time_ns() + 2 * LEASE_SECS * 10**9  # when leases of what failed have run out
        result = cnr.execute(cnr.plan_prune(run.store.url, cnr.Keep(last=1), now_ns=later_ns))
        if result.failed:
            raise cnr.StoreError(str(result))


SAVES: dict[str, Callable[[_Run], None]] = {"save": _save, "save behind training": _save_behind}
UPKEEP: dict[str, Callable[[_Run], None]] = {"compact": _compact, "prune": _prune}
WORK = SAVES | UPKEEP


def _spoil(rank: int, root: str, work: str, cell: Cell | None) -> int:
    """Spoil one operation of some work, and see that nothing is lost; how many operations this rank had."""
    with FaultyStore(root, name="spoiled", delay_secs=0.01) as store:
        run = _Run(store)
        if work == "prune":
            _compact(run)  # so that packs of several checkpoints stay
        dist.barrier()
        store.clear()
        if cell is not None and rank == cell[2]:
            store.faults[cell[1]] = cell[0]
        errors = _errors_of(lambda: WORK[work](run))
        num_operations = len(store.operations)
        store.clear()
        dist.barrier()
        assert cell is not None or not errors
        assert all(isinstance(error, cnr.CNRError) for error in errors), errors
        assert run.loads("step-2")
        assert errors or work in UPKEEP or run.loads("step-3")
        if work in UPKEEP:
            WORK[work](run)
            dist.barrier()
            assert run.loads("step-2")
        run.save("step-4")
        assert run.loads("step-4")
        _prune(run)
        dist.barrier()
        assert run.loads("step-4")
        assert _left_over(Path(root), store.url) == []
        run.close()
    return num_operations


def _errors_of(act: Callable[[], None]) -> list[BaseException]:
    """What it fails with, on any rank."""
    try:
        act()
    except CheckpointException as error:
        return list(models.causes(error).values())
    except cnr.CNRError as error:
        return [error]
    return []


def _left_over(root: Path, url: str) -> list[str]:
    """Files under a root that its newest checkpoint does not need."""
    newest = cnr.latest(url)
    assert newest is not None
    needed: set[Path] = set()
    for checkpoint in read_lineage(newest).checkpoints:
        folder = root / checkpoint.store.path.rpartition("/")[2]
        needed |= {(folder / (pack.directory or "") / pack.name).resolve() for pack in checkpoint.manifest.packs}
        needed |= {path.resolve() for path in folder.glob("manifest*.json")}
    files = (path for path in root.rglob("*") if path.is_file() and path.parent.name != journal.DIRECTORY)
    return [str(path) for path in files if path.resolve() not in needed]


def _spoil_all(rank: int, root: str, work: str, cells: list[Cell]) -> None:
    for number, cell in enumerate(cells):
        try:
            _spoil(rank, f"{root}/{number}", work, cell)
        except BaseException as error:
            error.add_note(f"{work}: {cell[0].value} at operation {cell[1]} of rank {cell[2]}")
            raise


def _cells(ranks: Any, tmp_path: Path, work: str) -> Iterator[Cell]:
    """All faults at all operations of both ranks."""
    for rank, num_operations in enumerate(ranks.run(_spoil, str(tmp_path / "none"), work, None)):
        for fault in FAULTS:
            for number in range(1, num_operations + 1):
                yield fault, number, rank


@pytest.mark.parametrize("work", WORK)
def test_spoiled_operations_lose_nothing(tmp_path: Path, rank_pool: RankPools, work: str) -> None:
    """A sample of all faults at all operations."""
    cells = list(_cells(rank_pool(2), tmp_path, work))
    sample = random.Random(0).sample(cells, NUM_SAMPLED)
    rank_pool(2).run(_spoil_all, str(tmp_path), work, sample)


@pytest.mark.slow
@pytest.mark.parametrize("work", WORK)
def test_every_spoiled_operation_loses_nothing(
    tmp_path: Path, rank_pool: RankPools, work: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them."""
    cells = list(_cells(rank_pool(2), tmp_path, work))
    for first in range(0, len(cells), 50):
        rank_pool(2).run(_spoil_all, str(tmp_path / str(first)), work, cells[first : first + 50])
    with capsys.disabled():
        print(f"\n{work}: {len(cells)} faults tried")  # noqa: T201 - how much was tried is worth knowing

"""Round trips: a small job saves a baseline and deltas, compacts and prunes, while one operation has a fault.

The job retries an action that fails once, as real jobs do. After each step, the newest checkpoint must contain the
state of the job at the last save, bit for bit. After the prune, there must be no file that it does not need.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from torchrec_cnr.errors import CNRError, StoreError
from torchrec_cnr.lineage import journal
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.lineage.latest import latest
from torchrec_cnr.maintenance.compaction.compact import compact
from torchrec_cnr.maintenance.pruning.execute import run_prune
from torchrec_cnr.maintenance.pruning.plan import plan_prune
from torchrec_cnr.maintenance.pruning.retention import Keep
from torchrec_cnr.policies import Consecutive
from torchrec_cnr.reading.load_table import load_table
from torchrec_cnr.saving.planner import CNRSavePlanner
from torchrec_cnr.saving.writer import CNRStorageWriter
from torchrec_cnr.storage.leases import LEASE_SECS
from torchrec_cnr.storage.store import Store
from torchrec_cnr.testing.faults import Fault, FaultyStore, Operation
from torchrec_cnr.tracking.row_tracker import RowTracker

ResultT = TypeVar("ResultT")

NUM_SAVES = 3
TRIP_PACK_BYTES = 1 << 10  # the smallest size that writers accept
_NUM_ROWS, _DIM, _NUM_LOOKED_UP = 64, 8, 20


def trip(store: Store, fault: Fault | None = None, number: int = 0) -> list[Operation]:
    """A small job can save a baseline and deltas, compact and prune: no row is lost, and no unneeded file remains.

    Args:
        store: An empty directory.
        fault: The fault to inject, or None.
        number: Number of the operation that has the fault, from 1.

    Returns:
        The operations of the round trip.

    Raises:
        StoreError: A row was lost, an unneeded file remains, or an action failed twice.
    """
    with FaultyStore(store.url) as faulty:
        if fault is not None:
            faulty.faults[number] = fault
        job = _Job(faulty.url)
        try:
            job.run()
        except (CNRError, CheckpointException) as error:
            what = "no fault" if fault is None else f"fault {fault.value!r} at {number} ({_told(faulty, number)})"
            raise StoreError(f"a round trip failed, with {what}: {error}") from error
        finally:
            job.close()
        return list(faulty.operations)


def trips_with(store: Store, fault: Fault, num_faults: int) -> None:
    """Run round trips, each with a fault in another operation, spread evenly over all operations."""
    operations = trip(store.at("unspoiled"))
    numbers = [number for number, operation in enumerate(operations, 1) if fault.spoils(operation.kind)]
    for index in range(min(num_faults, len(numbers))):
        number = numbers[index * len(numbers) // num_faults]
        trip(store.at(f"{fault.value}-{number}"), fault, number)


def _told(faulty: FaultyStore, number: int) -> str:
    if number > len(faulty.operations):
        return "not reached"
    operation = faulty.operations[number - 1]
    return f"{operation.kind} {operation.path}"


class _Job:
    """A job that trains a table, in one process."""

    def __init__(self, root: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self._root = root
        self._table = nn.EmbeddingBag(
            _NUM_ROWS, _DIM, mode="sum", _weight=torch.rand(_NUM_ROWS, _DIM, generator=generator, device="cpu")
        )
        self._optimizer = torch.optim.SGD(self._table.parameters(), lr=0.5)
        self._tracker = RowTracker(nn.ModuleDict({"table": self._table}))
        self._planner = CNRSavePlanner(self._tracker, policy=Consecutive())
        self._writer = CNRStorageWriter(root, pack_bytes=TRIP_PACK_BYTES)
        self._generator = generator

    def run(self) -> None:
        """Run all steps, and check the newest checkpoint after each."""
        for number in range(NUM_SAVES):
            self._train()
            self._save(f"step-{number}")
            self._expect_all()
        head = _twice(lambda: latest(self._root)) or ""
        _twice(lambda: compact(head, max_ratio=1.0, pack_bytes=TRIP_PACK_BYTES))
        self._expect_all()
        _twice(self._prune)
        self._expect_all()
        _twice(self._expect_nothing_else)

    def close(self) -> None:
        """Close the writer and the tracker."""
        self._writer.close()
        self._tracker.close()

    def _train(self) -> None:
        ids = torch.randint(0, _NUM_ROWS, (_NUM_LOOKED_UP, 1), generator=self._generator, device="cpu")
        self._table(ids).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _save(self, name: str) -> None:
        """Save; if this fails, save again with another name."""
        try:
            self._save_once(name)
        except (CNRError, CheckpointException):
            self._save_once(f"{name}-again")

    def _save_once(self, name: str) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # DCP warns if there is no process group
            save(
                {"table": self._table.state_dict()},
                checkpoint_id=f"{self._root}/{name}",
                storage_writer=self._writer,
                planner=self._planner,
                no_dist=True,
            )

    def _prune(self) -> None:
        later_ns = time.time_ns() + 2 * LEASE_SECS * 10**9  # when the leases of failed operations have expired
        result = run_prune(plan_prune(self._root, Keep(last=1), now_ns=later_ns))
        if result.failed:
            raise StoreError(f"a prune could not remove everything: {result}")

    def _expect_all(self) -> None:
        """Raise a ``StoreError`` if the newest checkpoint does not contain the state of the job."""
        newest_path = _twice(lambda: latest(self._root))
        if newest_path is None:
            raise StoreError(f"{self._root}: there is no checkpoint, although saves have returned")
        if not torch.equal(_twice(lambda: load_table(newest_path, "table.weight")), self._table.weight.detach()):
            raise StoreError(f"{newest_path}: not all rows have the values that were saved")

    def _expect_nothing_else(self) -> None:
        """Raise a ``StoreError`` if there is a file that the newest checkpoint does not need."""
        root = Store.open(self._root)
        needed_files = set(_needed_by(str(latest(self._root))))
        for name in root.listing().directories:
            files = {root.at(name).child(file) for file in root.at(name).names()}
            if name != journal.DIRECTORY and not files <= needed_files:
                raise StoreError(f"a prune did not remove {sorted(files - needed_files)[0]}, which no checkpoint needs")


def _needed_by(path: str) -> Iterator[str]:
    """Yield the paths of the files that a checkpoint needs."""
    for checkpoint in read_lineage(path).checkpoints:
        for pack in checkpoint.manifest.packs:
            yield checkpoint.store.at(pack.directory or ".").child(pack.name)
        for name in checkpoint.store.names():
            if name.startswith("manifest"):
                yield checkpoint.store.child(name)


def _twice(act: Callable[[], ResultT]) -> ResultT:
    """Run an action, and run it again if it failed."""
    with suppress(CNRError, CheckpointException):
        return act()
    return act()

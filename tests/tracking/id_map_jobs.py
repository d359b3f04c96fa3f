"""A model with id maps of both kinds, in one process, and the ids that it has, as a plain dictionary."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

import torchrec_cnr as cnr
from tests.support import faults, models
from torchrec_cnr.storage.row_log import RowLog

NUM_ROWS, DIM, EMPTY = 13, 4, torch.iinfo(torch.int64).max
NAMES = ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_mch_counts", "_mch_last_access_iter")
HASHED = ("_hash_zch_identities", "_hash_zch_metadata")
CPU = torch.device("cpu")
Ids = dict[int, tuple[int, ...]]
Buffers = dict[str, Tensor]


class IdMapModel(nn.Module):
    """A table for each of two id maps. The kernels of the second need a GPU, so tests write to its buffers."""

    def __init__(self, num_rows: int = NUM_ROWS) -> None:
        super().__init__()
        self.ids = MCHManagedCollisionModule(num_rows, CPU, DistanceLFU_EvictionPolicy(), eviction_interval=1)
        self.hashed = HashZchManagedCollisionModule(num_rows, CPU, total_num_buckets=1)
        self.hashed._hash_zch_metadata = torch.zeros(num_rows, 1, dtype=torch.int32)
        self.table, self.other = (nn.EmbeddingBag(num_rows, DIM, sparse=True) for _ in range(2))

    def look_up(self, raw_ids: list[int]) -> None:
        """Count ids, and give them rows; others may be evicted for them."""
        ids = torch.tensor(raw_ids)
        self.ids._input_history_buffer_size = -1  # as large as this batch needs
        self.ids.profile({"f": JaggedTensor(ids, lengths=torch.ones_like(ids))})

    def place(self, row: int, raw_id: int) -> None:
        """Give a row of the second map an id, at a time that is never the same."""
        self.hashed._hash_zch_identities.data[row] = raw_id
        self.hashed._hash_zch_metadata[row] += 1


def buffers(model: IdMapModel) -> Buffers:
    """A copy of all buffers with a value for each row."""
    return {
        **{name: getattr(model.ids, name).clone() for name in NAMES},
        **{name: getattr(model.hashed, name).detach().clone() for name in HASHED},
    }


def by_row(found: Buffers) -> dict[str, list[Any]]:
    """What each row has: its id, its count and its time in the first map, its id and its time in the second."""
    order = found["_mch_remapped_ids_mapping"].argsort()
    return {
        **{name: found[name][order].tolist() for name in NAMES},
        **{name: found[name].squeeze(1).tolist() for name in HASHED},
    }


def ids_of(found: Buffers) -> Ids:
    """Row, count and time of each id of the first map."""
    values = zip(*(found[name].tolist() for name in NAMES), strict=True)
    return {raw_id: tuple(others) for raw_id, *others in values if raw_id != EMPTY}


def state(model: nn.Module) -> dict[str, Any]:
    """What is passed to DCP."""
    return {"model": model.state_dict()}


def stored_rows(checkpoint: cnr.Checkpoint) -> dict[str, list[int] | None]:
    """The rows that a checkpoint stores of each buffer of an id map; None for all of them."""
    found: dict[str, list[int] | None] = {}
    for fqn, entry in checkpoint.manifest.tensors.items():
        name = fqn.rpartition(".")[2]
        if name in (*NAMES, *HASHED):
            found[name] = None if entry.is_whole else [int(shard.rows.num_rows) for shard in entry.shards]
    return found


def writer(path: Any, **options: Any) -> cnr.CNRStorageWriter:
    """A writer at 4 bits."""
    return models.writer(path, quantization=cnr.AdaptiveAsymmetric(4), **options)


class IdMapJob:
    """A model that is saved and restored under a root, and what each of its checkpoints must have."""

    def __init__(self, root: Path, policy: cnr.Policy, row_log: RowLog | None = None) -> None:
        self.root, self.policy, self.row_log = root, policy, row_log
        self.saved: list[tuple[Path, Buffers]] = []
        self.num_paths = 0
        self.begin()

    def begin(self) -> None:
        self.model = IdMapModel()
        self.tracker = cnr.RowTracker(self.model)
        self.planner = cnr.CNRSavePlanner(self.tracker, policy=self.policy)
        self.writer = writer(self.root / "unused", row_log=self.row_log)

    def path(self) -> Path:
        self.num_paths += 1
        return self.root / str(self.num_paths)

    def save(self, *, is_async: bool = False) -> cnr.Checkpoint:
        path, content = self.path(), buffers(self.model)
        if is_async:
            future = models.save_behind(state(self.model), str(path), self.writer, self.planner)
            self.model.look_up([1, 2, 3])  # what comes later is not in the checkpoint
            self.model.place(0, 99)
            future.result(timeout=60)
        else:
            dcp.save(state(self.model), checkpoint_id=str(path), storage_writer=self.writer, planner=self.planner)
        self.saved.append((path, content))
        return cnr.read_checkpoint(path)

    def fail(self, phase: str) -> None:
        with faults.failing(self.planner, self.writer, phase, "after", 0), pytest.raises(CheckpointException):
            self.save()

    def restore(self, number: int = -1) -> None:
        self.tracker.close()
        self.begin()
        planner, path = cnr.CNRLoadPlanner(self.tracker), self.saved[number][0]
        dcp.load(state(self.model), storage_reader=cnr.CNRStorageReader(path, row_log=self.row_log), planner=planner)


def loaded(path: Path | str, row_log: RowLog | None = None) -> Buffers:
    """What a load without a tracker has, with nothing called after it."""
    model = IdMapModel()
    dcp.load(state(model), storage_reader=cnr.CNRStorageReader(path, row_log=row_log))
    return buffers(model)


def assert_equal(found: Buffers, expected: Buffers) -> None:
    assert ids_of(found) == ids_of(expected)
    assert models.differing(found, expected) == []

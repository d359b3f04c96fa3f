"""The model that simulated ranks train: two tables of four rows and two columns, their optimizer state, and a rest.

``Snapshot`` is the perfect memory of it that a checkpoint is compared with.
"""

import random
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties

import torchrec_cnr as cnr
from tests.simulator.engine.collectives import Group
from tests.simulator.engine.scheduler import FindingError, this_task
from tests.simulator.tasks.replicas import Collection, ReplicatedRows
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.lineage.checkpoint import read_checkpoint
from torchrec_cnr.tracking.modified_rows import ModifiedRows
from torchrec_cnr.tracking.tracked_tables import TrackedRows, TrackedShard

NUM_ROWS, NUM_COLS = 4, 2
TABLES = ("embedding_bags.t0.weight", "embedding_bags.t1.weight")
STATES = ("optimizer.t0.momentum", "optimizer.t1.momentum")
Snapshot = dict[str, Any]


class TinyModel:
    """One rank's part of the model.

    Args:
        rank: This one.
        world_size: How many there are.
        seed: Of the values it begins with.
        replicas: The group of the ranks that have the same shards; None if each has its own.
    """

    def __init__(self, rank: int, world_size: int, seed: int, replicas: Group | None = None) -> None:
        self.rank = rank
        num_shards = world_size // (1 if replicas is None else replicas.size())
        place = rank % num_shards
        self._drawn = random.Random(1000 * seed + place)
        self._of_all = random.Random(seed)  # what all ranks draw alike
        num_rows = NUM_ROWS // num_shards
        self._first = place * num_rows
        self._boxes = [Box((other * num_rows, 0), (num_rows, NUM_COLS)) for other in range(num_shards)]
        self.tensors = {fqn: self._values(num_rows) for fqn in (*TABLES, *STATES)}
        self.dense = torch.tensor([self._of_all.random() for _ in range(3)])
        box = self._boxes[place]
        shards = []
        for fqn, state in zip(TABLES, STATES, strict=True):
            rows = ModifiedRows(fqn, box, torch.device("cpu"))
            shards.append(TrackedShard(rows, self.tensors[fqn], lambda state=state: (self.tensors[state],)))
        self.collection = None if replicas is None else Collection(replicas, list(self.tensors.values()))
        self.tracker = TrackedRows(shards) if self.collection is None else ReplicatedRows(shards, self.collection)
        if replicas is not None:  # each trains other rows
            self._drawn = random.Random(f"{seed} {rank}")
        self.num_steps = 0
        self._sharded = {fqn: self._sharded_tensor(fqn) for fqn in self.tensors}

    def _values(self, num_rows: int) -> Tensor:
        return torch.tensor([[self._drawn.random() for _ in range(NUM_COLS)] for _ in range(num_rows)])

    def _sharded_tensor(self, fqn: str) -> Any:
        if len(self._boxes) == 1 and self.collection is None:
            return self.tensors[fqn]
        before = self.rank // len(self._boxes) * len(self._boxes)  # ranks of other replicas
        places = [
            ShardMetadata(list(box.offsets), list(box.sizes), f"rank:{before + place}/cpu")
            for place, box in enumerate(self._boxes)
        ]
        size = torch.Size((NUM_ROWS, NUM_COLS))
        metadata = ShardedTensorMetadata(places, size, TensorProperties(dtype=torch.float32))
        shards = [Shard(self.tensors[fqn], places[self.rank - before])]
        found = ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)
        found.has_replicas = self.collection is not None
        return found

    def train(self) -> None:
        """One step: some rows of this rank, and the rest on all ranks alike."""
        task = this_task()
        assert task is not None
        task.sim.point("trains")
        for shard, state in zip(self.tracker.shards, STATES, strict=True):
            num_rows = len(shard.weight)
            rows = torch.tensor(sorted({self._drawn.randrange(num_rows) for _ in range(self._drawn.randint(0, 2))}))
            if not len(rows):
                continue
            self.tracker.check_writes()
            shard.weight[rows] = self._values(len(rows))
            self.tensors[state][rows] = self._values(len(rows))
            shard.rows.mark(rows)
            shard.accept_writes()
        self.dense.add_(self._of_all.random())
        self.num_steps += 1

    def state(self, token: str) -> dict[str, Any]:
        """What is saved."""
        rest = {f"reader.{self.rank}": [self.num_steps, self.rank], "token": token, "dense": self.dense}
        return {**self._sharded, **rest}

    def snapshot(self) -> Snapshot:
        """All values of this rank."""
        found: Snapshot = {fqn: (self._first, tensor.clone()) for fqn, tensor in self.tensors.items()}
        return {**found, "dense": self.dense.clone(), f"reader.{self.rank}": [self.num_steps, self.rank]}

    def check_holds(self, path: str, whole: Snapshot) -> None:
        """Raise a finding unless this rank holds its part of a checkpoint."""
        for fqn, tensor in self.tensors.items():
            if not bool((whole[fqn][self._first : self._first + len(tensor)] == tensor).all()):
                raise FindingError("wrong values", f"{path}: {fqn} was restored as {tensor}, not {whole[fqn]}")


def merged(parts: list[Snapshot], got: Snapshot) -> Snapshot:
    """The snapshots of all ranks; of replicas that differ, that which was got."""
    found: Snapshot = {}
    for part in parts:
        for fqn, value in part.items():
            if isinstance(value, tuple):
                first, tensor = value
                whole = found.setdefault(fqn, torch.full((NUM_ROWS, NUM_COLS), float("nan")))
                rows = slice(first, first + len(tensor))
                if fqn in got:
                    known = ~got[fqn][rows].isnan().any(dim=1)  # a rank may have got some of the rows
                    if known.any() and torch.equal(whole[rows][known], got[fqn][rows][known]):
                        continue
                whole[rows] = tensor
            else:
                found[fqn] = value
    return found


def loaded(path: str) -> tuple[str, Snapshot]:
    """What a checkpoint holds, and the token of the save that wrote it."""
    manifest = read_checkpoint(path).manifest
    state: dict[str, Any] = {
        fqn: torch.full((NUM_ROWS, NUM_COLS), float("nan")) for fqn in manifest.tensors if fqn != "dense"
    }
    state |= {"dense": torch.zeros(3), **dict.fromkeys(manifest.objects, "")}
    dcp.load(state, storage_reader=cnr.CNRStorageReader(path), no_dist=True)
    return state.pop("token"), state


def check_same(path: str, got: Snapshot, expected: Snapshot) -> None:
    """Everything is equal bit for bit."""
    for fqn in sorted({*got, *expected}):
        some, others = got.get(fqn), expected.get(fqn)
        is_same = (
            torch.equal(some, others) if isinstance(some, Tensor) and isinstance(others, Tensor) else some == others
        )
        if not is_same:
            raise FindingError("wrong values", f"{path}: {fqn} is {some}, saved was {others}")

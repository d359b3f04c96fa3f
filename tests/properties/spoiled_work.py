"""Work on checkpoints whose storage operations are spoiled, one at a time, on either of two ranks.

A ``Cell`` is one fault at one operation of one rank. It is tried on a copy of a root with a baseline and two deltas:

1. The job restores the newest checkpoint and trains; then the work is done, with the fault.
2. The newest checkpoint from before must load as it was, bit for bit; upkeep is done again, and must succeed.
3. The job trains on and saves. After a prune that keeps only this checkpoint, it must load with every row, and no file
   may be there that it does not need.

Where the fault is a crash, step 1 is done by processes that were forked for it, and the others begin at step 2 with a
restore, as a job does that starts again. The ranks of a pool keep the job from cell to cell, so that one takes less
than half a second.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from os.path import normpath
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.jobs import SavingJob
from tests.support.killing import in_child
from tests.support.models import Job, Whole, differing, state, train, whole
from tests.support.ranks import RankPool
from torchrec_cnr.lineage import journal
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.loading.reader import CNRStorageReader
from torchrec_cnr.manager import ranks
from torchrec_cnr.manager.manager import CheckpointManager  # here, not in each of the processes that are forked
from torchrec_cnr.storage.fences import is_fence
from torchrec_cnr.storage.leases import LEASE_SECS
from torchrec_cnr.testing import Fault, FaultyStore, Operation

ResultT = TypeVar("ResultT")

WORLD_SIZE = 2
PACK_BYTES = 1 << 10  # the least there is, so that there are many operations
NUM_SAVED = 3  # checkpoints of a root that cells begin with
HEAD = f"step-{NUM_SAVED - 1}"
NEXT, LAST = f"step-{NUM_SAVED}", f"step-{NUM_SAVED + 1}"
DEATH_SECS = 20.0  # how long ranks wait for others

_SAVED = "saved"


@dataclass(frozen=True)
class Cell:
    """One fault.

    Attributes:
        work: A key of ``WORK``.
        fault: What goes wrong.
        number: At which operation, from 1.
        rank: Of which rank.
    """

    work: str
    fault: Fault
    number: int
    rank: int

    def __str__(self) -> str:
        return f"{self.work}: {self.fault.value} at operation {self.number} of rank {self.rank}"


@dataclass(frozen=True)
class Place:
    """Where cells are tried, and on how much: the more there is, the more operations there are.

    Attributes:
        folder: Has the roots.
        num_rows: Of two tables.
        dim: Of their rows.
        num_ids: Rows of each table that a rank looks up in a batch.
    """

    folder: str
    num_rows: tuple[int, int]
    dim: int
    num_ids: int

    @property
    def root(self) -> str:
        """That of the present cell."""
        return f"{self.folder}/root"

    def begun(self, work: str) -> str:
        """The root that work begins with; what is pruned was compacted, so that packs of several checkpoints stay."""
        return f"{self.folder}/{'compacted' if work == 'prune' else 'plain'}"


# The job.


class _Tables(nn.Module):
    """Two pooled tables, and nothing else: what costs time is the number of tensors."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=f"t{i}", embedding_dim=place.dim, num_embeddings=rows, feature_names=[f"f{i}"])
            for i, rows in enumerate(place.num_rows)
        ]
        self.ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """[num_ids, ...]: each sample is one id."""
        return self.ebc(features).values()  # type: ignore[no-any-return]  # torchrec has no types


def _batch(place: Place, generator: torch.Generator) -> KeyedJaggedTensor:
    ids = [torch.randint(0, rows, (place.num_ids,), generator=generator) for rows in place.num_rows]
    return KeyedJaggedTensor.from_lengths_sync(["f0", "f1"], torch.cat(ids), torch.ones(2 * place.num_ids).long())


def new_job(place: Place) -> Job:
    """A row-wise and a column-wise table on the ranks of the present group."""
    torch.manual_seed(dist.get_rank())
    model = _Tables(place)
    apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.5})
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model.ebc,
        {"t0": row_wise(), "t1": column_wise(ranks=list(range(WORLD_SIZE)))},
        local_size=WORLD_SIZE,
        world_size=WORLD_SIZE,
        device_type="cpu",
        sharder=sharder,  # type: ignore[arg-type]  # torchrec's own type, which lacks a parameter
    )
    sharded = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],  # type: ignore[list-item]  # as above
    )
    return Job(sharded, {}, partial(_batch, place))


# The work.


def saving(job: Job, url: str) -> SavingJob:
    """A job that saves under a root, which may fail; the model is made once for many cells."""
    return SavingJob(url, lambda _: job, pack_bytes=PACK_BYTES)


def compact(url: str) -> None:
    """Fold the newest checkpoint's lineage into it."""
    cnr.compact(f"{url}/{HEAD}", max_ratio=1.0, pack_bytes=PACK_BYTES)


def prune(url: str) -> None:
    """Remove all but the newest checkpoint, when leases of what failed have run out."""
    later_ns = time.time_ns() + 2 * LEASE_SECS * 10**9
    result = cnr.execute(cnr.plan_prune(url, cnr.Keep(last=1), now_ns=later_ns))
    if result.failed:
        raise cnr.StoreError(str(result))


SAVES: dict[str, Callable[[SavingJob], object]] = {
    "save": lambda run: run.save(NEXT),
    "async save": lambda run: run.async_save(NEXT).result(),
}
UPKEEP: dict[str, Callable[[str], None]] = {"compaction": compact, "prune": prune}
WORK = (*SAVES, *UPKEEP)


# What cells begin with, and what must come of them.


@dataclass(frozen=True, eq=False)
class _Bench:
    """What a rank of the pool keeps from cell to cell.

    Attributes:
        job: Trained anew in each cell.
        cuts: What the job has when it goes on from the newest of these: by the batches that it then trains.
    """

    job: Job
    cuts: dict[tuple[int, ...], Whole]

    @classmethod
    @cache  # for as long as the process lives
    def at(cls, place: Place) -> "_Bench":
        """Make the roots, and train as cells will do."""
        run = saving(new_job(place), place.begun("save"))
        for number in range(NUM_SAVED):
            train(run.job, number)
            run.save(f"step-{number}")
        bench = cls(run.job, {(): whole(state(run.job))})
        for batches in ((NUM_SAVED,), (NUM_SAVED, NUM_SAVED + 1), (NUM_SAVED + 1,)):
            run.restore(HEAD)
            for batch in batches:
                train(run.job, batch)
            bench.cuts[batches] = whole(state(run.job))
        run.close()
        if dist.get_rank() == 0:
            shutil.copytree(place.begun("save"), place.begun("prune"))
            compact(place.begun("prune"))
        dist.barrier()
        assert all(differing(bench.cuts[()], cut) for batches, cut in bench.cuts.items() if batches)
        return bench


def loads(url: str, cut: Whole) -> bool:
    """Whether a checkpoint loads as a cut, bit for bit, into one process."""
    target = {fqn: torch.zeros_like(value) if isinstance(value, Tensor) else None for fqn, value in cut.items()}
    dcp.load(target, storage_reader=CNRStorageReader(url), no_dist=True)
    return differing(target, cut) == []


def left_over(root: str, url: str) -> list[str]:
    """Files under a root that its newest checkpoint does not need."""
    needed: set[str] = set()
    for checkpoint in read_lineage(cnr.latest(url) or "").checkpoints:
        folder = f"{root}/{checkpoint.store.path.rpartition('/')[2]}"
        needed |= {normpath(f"{folder}/{pack.directory or '.'}/{pack.name}") for pack in checkpoint.manifest.packs}
        needed |= {f"{folder}/{name}" for name in os.listdir(folder) if name.startswith("manifest")}
    found = {f"{folder}/{name}" for folder, _, names in os.walk(root) for name in names if not is_fence(name)}
    return sorted(path for path in found - needed if path.split("/")[-2] != journal.DIRECTORY)


# Cells in which nobody dies.


def operations(rank: int, place: Place) -> dict[str, list[Operation]]:
    """The operations that each kind of work has on this rank, if nothing is spoiled."""
    return {work: _try(rank, place, work, None) for work in WORK}


def try_cells(rank: int, place: Place, cells: Sequence[Cell]) -> int:
    """Try them in turn; how many faults came to pass on this rank."""
    num_tried = 0
    for cell in cells:
        found = _named(cell, lambda cell=cell: _try(rank, place, cell.work, cell))
        num_tried += cell.rank == rank and cell.number <= len(found)
    return num_tried


def _named(cell: Cell, act: Callable[[], ResultT]) -> ResultT:
    try:
        return act()
    except BaseException as error:
        error.add_note(str(cell))
        raise


def _try(rank: int, place: Place, work: str, cell: Cell | None) -> list[Operation]:
    """Do some work with a fault, and see what comes of it; the operations that this rank had."""
    bench, root = _Bench.at(place), place.root
    if rank == 0:
        shutil.copytree(place.begun(work), root)
    dist.barrier()
    with FaultyStore(root, name="spoiled", delay_secs=0.01) as store:
        run = saving(bench.job, store.url)
        if work in SAVES:
            run.restore(HEAD)
            train(run.job, NUM_SAVED)
        dist.barrier()
        store.clear()
        if cell is not None and cell.rank == rank:
            store.faults[cell.number] = cell.fault
        errors = _errors_of(lambda: _work(work, run))
        found = list(store.operations)
        store.clear()
        dist.barrier()
        assert not errors or (cell is not None and set(errors) == {cell.rank}), errors
        assert all(isinstance(error, cnr.CNRError) for error in errors.values()), errors
        if work in UPKEEP:
            _work(work, run)
            dist.barrier()
            run.restore(HEAD)
        elif rank == 0:
            has_committed = cnr.latest(store.url) == f"{store.url}/{NEXT}"
            assert has_committed or errors
            assert not has_committed or loads(f"{store.url}/{NEXT}", bench.cuts[NUM_SAVED,])
        _go_on(rank, bench, run, root, (NUM_SAVED,) if work in SAVES else ())
    return found


def _work(work: str, run: SavingJob) -> None:
    if work in SAVES:
        SAVES[work](run)
    elif dist.get_rank() == 0:
        UPKEEP[work](run.root)


def _errors_of(act: Callable[[], None]) -> dict[int, BaseException]:
    """What it fails with, by rank."""
    try:
        act()
    except CheckpointException as error:
        return faults.causes(error)
    except cnr.CNRError as error:
        return {dist.get_rank(): error}
    return {}


def _go_on(rank: int, bench: _Bench, run: SavingJob, root: str, batches: tuple[int, ...]) -> None:
    """The newest checkpoint from before is what it was; the next save has all rows, and a prune leaves nothing else.

    Args:
        batches: What the job has trained since that checkpoint.
    """
    if rank == 1:
        assert loads(f"{run.root}/{HEAD}", bench.cuts[()])
    train(run.job, NUM_SAVED + 1)
    run.save(LAST)
    run.close()
    if rank == 0:
        prune(run.root)
        assert cnr.latest(run.root) == f"{run.root}/{LAST}"
        found = left_over(root, run.root)
        assert not found, found
    dist.barrier()
    if rank == 1:
        assert loads(f"{run.root}/{LAST}", bench.cuts[*batches, NUM_SAVED + 1])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(root)


# Cells in which a rank dies.


def crash(pool: RankPool, place: Place, cell: Cell) -> bool:
    """Kill a rank in its work, and start the job again; False if the work has fewer operations."""
    return _named(cell, lambda: _crash(pool, place, cell))


def _crash(pool: RankPool, place: Place, cell: Cell) -> bool:
    shutil.copytree(place.begun(cell.work), place.root)
    if cell.work in UPKEEP:
        died = in_child(_upkeep, place, cell) == -signal.SIGKILL
        pool.run(_start_again, place, cell)
        return died
    group = f"{place.root}.group"
    with ThreadPoolExecutor(WORLD_SIZE) as threads:
        lives = [threads.submit(in_child, _live, rank, place, group, cell) for rank in range(WORLD_SIZE)]
        told = [life.result() for life in lives]
    os.unlink(group)
    died = told.pop(cell.rank) == -signal.SIGKILL
    assert told[0] == _SAVED or f"rank {cell.rank} does not answer" in str(told[0]), told
    newest = pool.run(_start_again, place, cell)[0]
    assert newest == NEXT or told[0] != _SAVED
    return died


def _upkeep(place: Place, cell: Cell) -> str:
    with FaultyStore(place.root) as store:
        store.faults[cell.number] = Fault.CRASH
        UPKEEP[cell.work](store.url)
    return _SAVED


def _live(rank: int, place: Place, group: str, cell: Cell) -> str:
    """Be a rank of a job that saves while one of its ranks dies: what the others are told."""
    ranks.HEARTBEAT_SECS = 0.1
    dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=WORLD_SIZE)
    job = new_job(place)
    with FaultyStore(place.root, name="spoiled") as store:
        tracker = cnr.RowTracker(job.model)
        manager = CheckpointManager(store.url, tracker, policy=cnr.Consecutive(), timeout_secs=DEATH_SECS)
        manager._writer = models.writer(store.url, pack_bytes=PACK_BYTES, timeout_secs=DEATH_SECS)
        assert manager.restore(state(job)) == NUM_SAVED - 1
        train(job, NUM_SAVED)
        dist.barrier()
        store.clear()
        if cell.rank == rank:
            store.faults[cell.number] = Fault.CRASH
        began = time.monotonic()
        try:
            if cell.work == "save":
                manager.save(NUM_SAVED, state(job))
            else:
                manager.async_save(NUM_SAVED, state(job))
                manager.wait()
        except cnr.SaveError as error:
            assert time.monotonic() - began < 2 * DEATH_SECS
            return str(error)
    return _SAVED


def _start_again(rank: int, place: Place, cell: Cell) -> str:
    """Start the job again where a rank died; the checkpoint that it went on from."""
    bench, root = _Bench.at(place), place.root
    run = saving(bench.job, root)
    if cell.work in UPKEEP:
        _work(cell.work, run)
        dist.barrier()
    newest = str(cnr.latest(root)).removeprefix(f"{root}/")
    batches = {HEAD: (), NEXT: (NUM_SAVED,)}[newest]
    run.restore(newest)
    assert differing(whole(state(run.job)), bench.cuts[batches]) == []
    _go_on(rank, bench, run, root, batches)
    return newest

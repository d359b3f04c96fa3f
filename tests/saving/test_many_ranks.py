"""Ranks that are threads: torch's threaded process group lets one process be 64 ranks, with the stock save and load.

What the library keeps for a whole process (kernel threads, what is tracked, open file systems) they all share.
"""

import faulthandler
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

import torchrec_cnr as cnr
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking.modified_rows import ModifiedRows
from torchrec_cnr.tracking.tracked_tables import TrackedRows, TrackedShard

NUM_RANKS, NUM_TABLES, RANK_ROWS, DIM = 64, 3, 40, 8
LIMIT_SECS = 250.0
FQNS = [f"embedding_bags.t{number}.weight" for number in range(NUM_TABLES)]
State = dict[str, Any]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture
def threaded() -> Iterator[None]:
    """Process groups whose ranks are threads; whoever hangs prints all stacks and ends the process."""
    if torch.__version__.startswith("2.11."):
        pytest.skip("PyTorch 2.11 cannot destroy process groups of threads: its ThreadLocalWorld has no 'comms'")
    faulthandler.dump_traceback_later(LIMIT_SECS, exit=True)
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # groups of several ranks have one name
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=["local", pytest.param("memory", marks=pytest.mark.slow)])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where checkpoints go."""
    if request.param == "local":
        yield str(tmp_path)
        return
    url = f"memory://{uuid.uuid4().hex}"
    yield url
    fsspec.filesystem("memory").rm(url, recursive=True)


def in_ranks(act: Callable[[int], Any]) -> list[Any]:
    """Run a function on all ranks at once."""
    store = dist.HashStore()

    def ranked(rank: int) -> Any:
        dist.init_process_group("threaded", rank=rank, world_size=NUM_RANKS, store=store)
        try:
            return act(rank)
        except BaseException as error:
            ProcessLocalGroup.exception_handle(error)  # the others do not wait for this one
            raise
        finally:
            dist.destroy_process_group()

    answers: list[Any] = [None] * NUM_RANKS
    failures: list[BaseException] = []

    def answering(rank: int) -> None:
        try:
            answers[rank] = ranked(rank)
        except BaseException as error:  # noqa: BLE001 - raised by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=answering, args=(rank,)) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return answers


def values_of(number: int, rank: int) -> Tensor:
    """A rank's rows of a table, unlike all others'."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(RANK_ROWS, DIM, generator=generator)


def modified(rank: int) -> Tensor:
    """The rows of its shards that a rank trains between the two saves: other ones on each."""
    return torch.arange(rank % 7, RANK_ROWS, 3 + rank % 5)


def state_of(rank: int, tensors: list[Tensor]) -> State:
    """The tables, sharded by rows, and an object of each rank's own."""
    state: State = {f"reader.{rank}": [rank, "a reader's position"]}
    for fqn, tensor in zip(FQNS, tensors, strict=True):
        places = [
            ShardMetadata([other * RANK_ROWS, 0], [RANK_ROWS, DIM], f"rank:{other}/cpu") for other in range(NUM_RANKS)
        ]
        size = torch.Size((NUM_RANKS * RANK_ROWS, DIM))
        metadata = ShardedTensorMetadata(places, size, TensorProperties(dtype=torch.float32))
        shards = [Shard(tensor, places[rank])]
        state[fqn] = ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)
    return state


def tracked(rank: int, tensors: list[Tensor]) -> TrackedRows:
    """A rank's tracker."""
    box = Box((rank * RANK_ROWS, 0), (RANK_ROWS, DIM))
    shards = []
    for fqn, tensor in zip(FQNS, tensors, strict=True):
        shards.append(TrackedShard(ModifiedRows(fqn, box, torch.device("cpu")), tensor, tuple))
    return TrackedRows(shards)


def save_twice(root: str, rank: int, quantization: cnr.Scheme) -> list[Tensor]:
    """Save a baseline and a delta of rows that were trained in between; what the tables hold in the end."""
    tensors = [values_of(number, rank) for number in range(NUM_TABLES)]
    tracker = tracked(rank, tensors)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    writer = cnr.CNRStorageWriter(f"{root}/0", quantization=quantization)
    save(state_of(rank, tensors), storage_writer=writer, planner=planner)
    for shard, tensor in zip(tracker.shards, tensors, strict=True):
        tensor[modified(rank)] += 1
        shard.rows.mark(modified(rank))
        shard.accept_writes()
    save(state_of(rank, tensors), checkpoint_id=f"{root}/1", storage_writer=writer, planner=planner)
    return tensors


def load_back(root: str, rank: int) -> tuple[list[Tensor], Any]:
    """What a rank loads of its shards, and of its object, with the rows that its tracker takes for modified."""
    tensors = [torch.full((RANK_ROWS, DIM), 77.0) for _ in FQNS]
    tracker, state = tracked(rank, tensors), state_of(rank, tensors)
    state[f"reader.{rank}"] = None
    load(state, storage_reader=cnr.CNRStorageReader(f"{root}/1"), planner=cnr.CNRLoadPlanner(tracker))
    assert all(shard.rows.since_baseline.nonzero()[:, 0].equal(modified(rank)) for shard in tracker.shards)
    return tensors, state[f"reader.{rank}"]


@pytest.mark.parametrize(
    "quantization",
    [
        pytest.param(cnr.NoQuantization(), id="exact"),
        pytest.param(cnr.AdaptiveAsymmetric(4), id="4 bits", marks=pytest.mark.slow),
    ],
)
def test_64_ranks_save_into_one_store_and_load_what_they_saved(
    threaded: None, root: str, quantization: cnr.Scheme
) -> None:
    """Nobody waits for ever, no rank's file takes another's place, and each finds its own rows, bit for bit."""
    torch.set_num_threads(2)  # so that kernels of all ranks share the threads of one pool
    saved = in_ranks(lambda rank: save_twice(root, rank, quantization))
    baseline, delta = read_lineage(f"{root}/1").checkpoints
    for checkpoint in (baseline, delta):
        names = [pack.name for pack in checkpoint.manifest.packs]
        files = Store.open(checkpoint.store.url).listing().files
        assert len(set(names)) == len(names) >= NUM_RANKS
        assert sorted(files) == sorted([*names, "manifest.json"])
    assert delta.num_rows == sum(len(modified(rank)) for rank in range(NUM_RANKS)) * NUM_TABLES
    loaded = in_ranks(lambda rank: load_back(root, rank))
    for rank, (tensors, position) in enumerate(loaded):
        assert position == [rank, "a reader's position"]
        for tensor, before in zip(tensors, saved[rank], strict=True):
            assert quantization == cnr.NoQuantization() or not tensor.equal(before)
            torch.testing.assert_close(tensor, before, rtol=0, atol=0.5 if quantization != cnr.NoQuantization() else 0)

"""What FBGEMM's kernels modify: the rows that they train, whatever the caller's ids were, and those that they reset."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType as OptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torchrec import KeyedJaggedTensor

import torchrec_cnr as cnr
from tests.support import zoo
from tests.support.ranks import RankPools
from tests.support.zoo import Kind


def _reuse(ids: Tensor) -> None:
    ids.fill_(3)


CASES: dict[str, tuple[list[int], Callable[[Tensor], None]]] = {
    "negative": ([-2, 5], lambda _: None),
    "too large": ([1000, 5], lambda _: None),
    "reused": ([1, 2], _reuse),
}


def _train_odd_ids(rank: int, kind: Kind, dtype: torch.dtype, case: str) -> None:
    job = zoo.build(kind, seed=1)
    tracker = cnr.RowTracker(job.model)
    before = [shard.weight.clone() for shard in tracker.shards]
    ids, then = CASES[case]
    values = torch.tensor([ids, [7, 8]], dtype=dtype).repeat_interleave(zoo.BATCH, dim=0).reshape(-1)
    lengths = torch.full((2 * zoo.BATCH,), zoo.IDS)
    out = job.model(KeyedJaggedTensor.from_lengths_sync(["f0", "f1"], values, lengths))
    then(values)
    out.sum().backward()
    job.optimizer.step()
    for shard, old in zip(tracker.shards, before, strict=True):
        is_changed = (shard.weight != old).any(dim=1)
        assert bool(is_changed.any())
        assert shard.rows.marked.tolist() == is_changed.tolist()
    tracker.close()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("module", ["EmbeddingBagCollection", "EmbeddingCollection"])
def test_rows_that_the_kernel_trains_are_marked(
    rank_pool: RankPools, module: str, dtype: torch.dtype, case: str
) -> None:
    """FBGEMM converts ids, which makes a copy of int32, and trains row 0 for ids that are no row."""
    if (dtype, case) == (torch.int64, "reused"):
        pytest.skip("autograd refuses this")
    rank_pool(1).run(_train_odd_ids, Kind(module, "table_wise", "RowWiseAdagrad"), dtype, case)


def _train_compiled(rank: int, kind: Kind, is_warm: bool) -> None:
    job = zoo.build(kind, seed=1)
    tracker = cnr.RowTracker(job.model)
    if is_warm:
        zoo.train(job, 99)
    compiled = torch.compile(job.model, backend="eager")
    for step in range(2):
        for shard in tracker.shards:
            shard.rows.marked.zero_()
        before = [shard.weight.clone() for shard in tracker.shards]
        compiled(zoo.batch(job, step)).sum().backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        for shard, old in zip(tracker.shards, before, strict=True):
            is_changed = (shard.weight != old).any(dim=1)
            assert bool(is_changed.any())
            assert shard.rows.marked.tolist() == is_changed.tolist()
    tracker.close()


@pytest.mark.long
@pytest.mark.parametrize("is_warm", [False, True], ids=["compiled", "compiled after an eager step"])
@pytest.mark.parametrize("module", ["EmbeddingBagCollection", "EmbeddingCollection"])
def test_rows_that_a_compiled_model_trains_are_marked(rank_pool: RankPools, module: str, is_warm: bool) -> None:
    """FBGEMM's kernels keep the ids of a lookup only where torch.compile does not trace it."""
    rank_pool(1).run(_train_compiled, Kind(module, "table_wise", "RowWiseAdagrad"), is_warm)


def _reset_rows(
    kernel: SplitTableBatchedEmbeddingBagsCodegen,
    pruned_indices: Tensor,
    pruned_indices_offsets: Tensor,
    logical_table_ids: Tensor,
    buffer_ids: Tensor,
) -> None:
    """What FBGEMM does on GPUs only, and beneath the version counters."""
    weights = [weight.data for weight in kernel.split_embedding_weights()]
    for feature, buffer in zip(logical_table_ids.tolist(), buffer_ids.tolist(), strict=True):
        rows = pruned_indices[pruned_indices_offsets[buffer] : pruned_indices_offsets[buffer + 1]]
        weight = weights[kernel.feature_table_map[feature]]
        weight[rows[rows < len(weight)]] = 0.0  # others are those of the table behind it


def _prune(rank: int) -> None:
    job = zoo.build(Kind("tables shared by features", "table_wise", "RowWiseAdagrad"), seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitTableBatchedEmbeddingBagsCodegen, "reset_embedding_weight_momentum", _reset_rows)
        tracker = cnr.RowTracker(job.model)
        before = [shard.weight.clone() for shard in tracker.shards]
        (lookup,) = job.model.module.sparse._lookups  # type: ignore[union-attr]
        kernel = lookup._emb_modules[0].emb_module
        rows, offsets = torch.tensor([9, 8, 1, 2, 3]), torch.tensor([0, 2, 2, 5])
        kernel.reset_embedding_weight_momentum(rows, offsets, torch.tensor([3, 0]), buffer_ids=torch.tensor([0, 2]))
        changed = [(shard.weight != old).any(dim=1) for shard, old in zip(tracker.shards, before, strict=True)]
        assert [one.nonzero().squeeze(1).tolist() for one in changed] == [[1, 2, 3], [8, 9]]
        assert [shard.rows.marked.tolist() for shard in tracker.shards] == [one.tolist() for one in changed]
        kernel.reset_embedding_weight_momentum(
            torch.tensor([30]), torch.tensor([0, 1]), torch.tensor([3]), torch.tensor([0])
        )
        assert all(bool(shard.rows.marked.all()) for shard in tracker.shards), "row 30 of a table of 24"
        tracker.close()


def test_rows_that_are_pruned_are_marked(rank_pool: RankPools) -> None:
    """As ITEPEmbeddingBagCollection has kernels reset them."""
    rank_pool(1).run(_prune)


def _average_columns(rank: int) -> tuple[int, int]:
    """In how many steps each row of a table was marked, and in how many no more than were trained."""
    job = zoo.build(Kind("EmbeddingBagCollection", "table_wise", "RowWiseAdagrad"), seed=1)
    (lookup,) = job.model.module.sparse._lookups  # type: ignore[union-attr]
    kernel = lookup._emb_modules[0].emb_module
    kernel.optimizer = OptimType.EMAINPLACE_ROWWISE_ADAGRAD
    kernel._emainplace_mode = {"step_ema": 3.0, "step_start": 2.0, "step_ema_coef": 0.5}
    tracker = cnr.RowTracker(job.model)
    num_whole = num_exact = 0
    for step in range(7):
        for shard in tracker.shards:
            shard.rows.marked.zero_()
        before = [shard.weight.clone() for shard in tracker.shards]
        zoo.train(job, step)
        for shard, old in zip(tracker.shards, before, strict=True):
            is_changed, is_marked = (shard.weight != old).any(dim=1), shard.rows.marked
            assert bool(is_changed.any())
            assert not (is_changed & ~is_marked).any()
            num_whole += bool(is_marked.all())
            num_exact += bool((is_marked == is_changed).all()) and not is_marked.all()
    tracker.close()
    return num_whole, num_exact


def test_rows_whose_columns_are_averaged_are_marked(rank_pool: RankPools) -> None:
    """FBGEMM's EMAINPLACE_ROWWISE_ADAGRAD writes to all rows in some steps, past the counters, and else to none."""
    ((num_whole, num_exact),) = rank_pool(1).run(_average_columns)
    assert (num_whole, num_exact) == (4, 10)  # of two tables, in steps 3 and 6 of 0 to 6


def _look_at_state(rank: int) -> tuple[int, int]:
    """How many tables there are, and how often FBGEMM is asked for the optimizer state of all of them."""
    job = zoo.build(Kind("EmbeddingBagCollection", "table_wise", "RowWiseAdagrad"), seed=1)
    calls = 0
    original = SplitTableBatchedEmbeddingBagsCodegen.get_optimizer_state

    def counted(kernel: SplitTableBatchedEmbeddingBagsCodegen) -> object:
        nonlocal calls
        calls += 1
        return original(kernel)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitTableBatchedEmbeddingBagsCodegen, "get_optimizer_state", counted)
        tracker = cnr.RowTracker(job.model)
        for _ in range(3):
            assert all(len(shard.state()) == 1 for shard in tracker.shards)
            tracker.check_writes()
        (lookup,) = job.model.module.sparse._lookups  # type: ignore[union-attr]
        kernel = lookup._emb_modules[0].emb_module
        first = [shard.state()[0] for shard in tracker.shards]
        kernel.momentum1_host = torch.nn.Parameter(kernel.momentum1_host.detach().clone())
        for shard, old in zip(tracker.shards, first, strict=True):
            (new,) = shard.state()
            assert new.data_ptr() != old.data_ptr(), "the kernel has other memory now"
    tracker.close()
    return len(tracker.shards), calls


def test_optimizer_state_of_a_kernel_is_asked_for_once(rank_pool: RankPools) -> None:
    """FBGEMM tells that of all tables at once; what it told holds until the kernel has other memory."""
    ((num_tables, calls),) = rank_pool(1).run(_look_at_state)
    assert num_tables > 1
    assert calls == 2


class _DeviceCache:
    """Imitates a kernel's cache of rows on a device: what is trained there is in the table after a flush."""

    def __init__(self, kernel: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self.cached: dict[int, float] = {}
        self.weight = kernel.split_embedding_weights()[0]
        kernel.lxu_cache_weights = torch.nn.Buffer(torch.zeros(1, 1))
        kernel.flush = self.flush
        kernel.reset_cache_states = self.cached.clear

    def flush(self) -> None:
        """Write the cached rows to the table."""
        for row, value in self.cached.items():
            self.weight.data[row] = value


def _save_cached_rows(rank: int, root: str) -> None:
    job = zoo.build(Kind("EmbeddingBagCollection", "table_wise", "RowWiseAdagrad"), seed=1)
    (lookup,) = job.model.module.sparse._lookups  # type: ignore[union-attr]
    cache = _DeviceCache(lookup._emb_modules[0].emb_module)
    tracker = cnr.RowTracker(job.model, verify_untracked=True)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    writer = cnr.CNRStorageWriter(f"{root}/unused")
    table = tracker.shards[0].rows.name
    saved = job.model.state_dict()
    (fqn,) = (fqn for fqn in saved if table in fqn)
    for step, value in enumerate((5.0, 6.0, 7.0)):
        cache.cached[3] = value
        tracker.mark(table, torch.tensor([3]))
        dcp.save(saved, checkpoint_id=f"{root}/{step}", storage_writer=writer, planner=planner)
        assert tracker.num_modified == 0
    for step, value in enumerate((5.0, 6.0, 7.0)):
        assert bool((cnr.load_table(f"{root}/{step}", fqn)[3] == value).all())
    cache.cached[3] = 8.0
    reader = cnr.CNRStorageReader(f"{root}/1")
    dcp.load(saved, storage_reader=reader, planner=cnr.CNRLoadPlanner(tracker))
    cache.flush()
    assert bool((cache.weight[3] == 6.0).all()), "rows of the cache were written over what was loaded"
    tracker.close()


def _serve_cached_rows(rank: int, root: str) -> None:
    saved = zoo.build(Kind("EmbeddingBagCollection", "table_wise", "RowWiseAdagrad"), seed=1)
    dcp.save({"model": saved.model.state_dict()}, storage_writer=cnr.CNRStorageWriter(f"{root}/0"))
    job = zoo.build(saved.kind, seed=2)
    (lookup,) = job.model.module.sparse._lookups  # type: ignore[union-attr]
    cache = _DeviceCache(lookup._emb_modules[0].emb_module)
    cache.cached[3] = 8.0
    subscriber = cnr.RowSubscriber(job.model, root)
    subscriber.update()
    subscriber.close()
    cache.flush()
    assert all(torch.equal(one, other) for one, other in zip(*map(_weights, (saved, job)), strict=True))


def _weights(job: zoo.ZooJob) -> list[Tensor]:
    tracker = cnr.RowTracker(job.model)
    tracker.close()
    return [shard.weight for shard in tracker.shards]


def _flush_on_another_device(rank: int) -> list[str]:
    job = zoo.build(Kind("EmbeddingBagCollection", "table_wise", "RowWiseAdagrad"), seed=1)
    (lookup,) = job.model.module.sparse._lookups  # type: ignore[union-attr]
    kernel, calls = lookup._emb_modules[0].emb_module, list[str]()
    kernel.flush = lambda: calls.append("flush")
    kernel.current_device = torch.device("cuda", 3)
    del kernel.lxu_cache_weights
    kernel.lxu_cache_weights = SimpleNamespace(numel=lambda: 1, is_cuda=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda device=None: calls.append(f"wait for {device}"))
        tracker = cnr.RowTracker(job.model)
        calls.clear()
        tracker.freeze()
    tracker.close()
    return calls


def test_a_flush_is_waited_for_on_its_device(rank_pool: RankPools) -> None:
    """Which need not be the current one: rows in host memory are read next."""
    assert rank_pool(1).run(_flush_on_another_device) == [["flush", "wait for cuda:3"]]


def test_rows_in_a_devices_cache_do_not_outlive_an_update(tmp_path: Path, rank_pool: RankPools) -> None:
    """Of a served model: lookups would find the rows from before there."""
    rank_pool(1).run(_serve_cached_rows, str(tmp_path))


def test_rows_in_a_devices_cache_are_saved_and_do_not_outlive_a_load(tmp_path: Path, rank_pool: RankPools) -> None:
    """Tables in host memory whose rows are trained in a cache: flushed before a save, dropped before a load."""
    rank_pool(1).run(_save_cached_rows, str(tmp_path))

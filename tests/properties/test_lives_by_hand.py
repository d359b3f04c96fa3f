"""What a random program of ``test_lifecycle`` cannot say: single stories of saves, loads and training between them."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import SGD, Adagrad, Optimizer
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.keyed import KeyedOptimizerWrapper

import torchrec_cnr as cnr
from tests.properties.lives import assert_same
from tests.support import faults, models
from tests.support.jobs import adagrad_job
from tests.support.models import Job, Whole, differing, plain_job, state, torchrec_job, train, whole
from tests.support.ranks import RankPools

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


# What a program cannot say.


def _save(job: Job, tracker: cnr.RowTracker, path: str, policy: cnr.Policy) -> cnr.Checkpoint:
    planner = cnr.CNRSavePlanner(tracker, policy=policy)
    dcp.save(state(job), checkpoint_id=path, storage_writer=models.writer(path), planner=planner)
    return cnr.read_checkpoint(path)


def _num_rows_changed(before: Whole, after: Whole) -> int:
    tables = [fqn for fqn in before if fqn.endswith(".weight") and "over" not in fqn and "optim" not in fqn]
    assert len(tables) > 1
    return sum(int((before[fqn] != after[fqn]).any(dim=1).sum()) for fqn in tables if "fused" not in fqn)


def _train_in_flight(rank: int, root: str, build: Callable[[int], Job], fails: bool) -> None:
    job = build(1)
    tracker = cnr.RowTracker(job.model)
    _save(job, tracker, f"{root}/0", cnr.Consecutive())
    train(job, 1)
    cut = whole(state(job))
    writer = models.writer(f"{root}/1")
    written = writer.write_data

    def write_then_train(plan: Any, planner: Any) -> Any:
        results = written(plan, planner)
        train(job, 2)
        return results

    faults.replace_method(writer, "write_data", write_then_train)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    with ExitStack() as stack:
        if fails:
            stack.enter_context(faults.failing(planner, writer, "finish", "before", 0))
            stack.enter_context(pytest.raises(CheckpointException))
        dcp.save(state(job), checkpoint_id=f"{root}/1", storage_writer=writer, planner=planner)
    end = whole(state(job))
    delta = _save(job, tracker, f"{root}/2", cnr.Consecutive())
    tracker.close()
    before = whole(state(build(1))) if fails else cut
    assert delta.kind == "delta"
    assert delta.num_rows == _num_rows_changed(before, end)
    if not fails:
        assert_same(models.load(build(2), f"{root}/1"), cut)
    assert_same(models.load(build(3), f"{root}/2"), end)


@pytest.mark.parametrize("fails", [False, True], ids=["committed", "failed"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "sparse_adam"])
def test_rows_trained_while_a_save_is_in_flight_belong_to_the_next_delta(
    tmp_path: Path, optimizer: str, fails: bool
) -> None:
    """The cut is when the save begins; rows marked between it and the commit are in the next delta."""
    _train_in_flight(0, str(tmp_path), lambda seed: plain_job(seed, optimizer), fails)


@pytest.mark.parametrize("fails", [False, True], ids=["committed", "failed"])
def test_rows_trained_in_flight_belong_to_the_next_delta_on_ranks(
    tmp_path: Path, rank_pool: RankPools, fails: bool
) -> None:
    """As above, with sharded tables, on every rank."""
    rank_pool(2).run(_train_in_flight, str(tmp_path), torchrec_job, fails)


def _restore_then_one_shot(rank: int, root: str, build: Callable[[int], Job], policy: cnr.Policy) -> None:
    job = build(1)
    tracker = cnr.RowTracker(job.model)
    _save(job, tracker, f"{root}/baseline", policy)
    baseline = whole(state(job))
    train(job, 1)
    _save(job, tracker, f"{root}/first", policy)
    tracker.close()
    restored = build(2)
    tracker = cnr.RowTracker(restored.model)
    models.load(restored, f"{root}/first", tracker)
    train(restored, 2)
    end = whole(state(restored))
    second = _save(restored, tracker, f"{root}/second", policy)
    tracker.close()
    assert second.parent == f"{root}/baseline"
    assert second.num_rows == _num_rows_changed(baseline, end)
    assert_same(models.load(build(3), f"{root}/second"), end)


@pytest.mark.parametrize("policy", [cnr.OneShot(), cnr.Intermittent()], ids=["OneShot", "Intermittent"])
def test_a_one_shot_delta_after_a_restore_holds_rows_modified_before_it(tmp_path: Path, policy: cnr.Policy) -> None:
    """A delta of the baseline holds every row modified since, also those modified before a restore."""
    _restore_then_one_shot(0, str(tmp_path), plain_job, policy)


def test_a_one_shot_delta_after_a_restore_on_ranks(tmp_path: Path, rank_pool: RankPools) -> None:
    """As above, with sharded tables."""
    rank_pool(2).run(_restore_then_one_shot, str(tmp_path), torchrec_job, cnr.OneShot())


def _look_up_only(rank: int, root: str, build: Callable[[int], Job]) -> None:
    job = build(1)
    tracker = cnr.RowTracker(job.model)
    inputs = [job.batch(torch.Generator().manual_seed(seed)) for seed in range(2)]
    job.model.eval()
    job.model(inputs[0])
    job.model.train()
    with torch.no_grad():
        job.model(inputs[1])
    assert tracker.num_modified == 0
    train(job, 1)
    assert tracker.num_modified > 0
    tracker.close()


def test_looking_up_without_training_marks_nothing(tmp_path: Path, rank_pool: RankPools) -> None:
    """Evaluation and no_grad mark no row; training does."""
    _look_up_only(0, str(tmp_path), plain_job)
    rank_pool(2).run(_look_up_only, str(tmp_path), torchrec_job)


def _track_beside_others(rank: int, root: str) -> None:
    calls = {"before": 0, "after": 0}

    def counter(name: str) -> Callable[..., None]:
        def count(*args: Any) -> None:
            calls[name] += 1

        return count

    job = torchrec_job(1, "row", item_table="sequences")  # theirs takes equal names of tables for one
    model: Any = job.model
    model.module.ebc.register_post_lookup_tracker_fn(counter("before"))
    tracker = cnr.RowTracker(job.model)
    model.module.ec.register_post_lookup_tracker_fn(counter("after"))
    train(job, 1)
    assert calls == {"before": 1, "after": 1}
    _save(job, tracker, f"{root}/0", cnr.Consecutive())
    theirs = ModelDeltaTrackerTrec(job.model)
    train(job, 2)
    theirs.step()
    end = whole(state(job))
    assert sum(len(ids) for ids in theirs.get_unique_ids().values()) == tracker.num_modified > 0
    delta = _save(job, tracker, f"{root}/1", cnr.Consecutive())
    assert delta.kind == "delta"
    assert_same(models.load(torchrec_job(2, "row", item_table="sequences"), f"{root}/1"), end)
    tracker.close()
    train(job, 3)
    assert tracker.num_modified == 0


def test_lookup_trackers_of_others_keep_being_called(tmp_path: Path, rank_pool: RankPools) -> None:
    """A function registered for lookups works beside the row tracker, before or after it, TorchRec's own too."""
    rank_pool(2).run(_track_beside_others, str(tmp_path))


def test_gradients_that_wait_during_a_load_are_tracked(tmp_path: Path) -> None:
    """A step after a load, with gradients from before it, modifies rows that the next delta must hold."""
    job = plain_job(1)
    tracker = cnr.RowTracker(job.model)
    _save(job, tracker, f"{tmp_path}/0", cnr.Consecutive())
    models.backward(job, 1)
    models.load(job, f"{tmp_path}/0", tracker)
    models.step(job)
    end = whole(state(job))
    _save(job, tracker, f"{tmp_path}/1", cnr.Consecutive())
    tracker.close()
    assert_same(models.load(plain_job(2), f"{tmp_path}/1"), end)


@pytest.mark.parametrize("optimizer", ["adam", "sparse_adam", "momentum"])
def test_optimizer_state_that_appears_after_the_baseline_is_saved(tmp_path: Path, optimizer: str) -> None:
    """Optimizers make their state at the first step, perhaps after the first checkpoint; the next holds all of it."""
    job = plain_job(1, optimizer, fresh=True)
    tracker = cnr.RowTracker(job.model)
    _save(job, tracker, f"{tmp_path}/0", cnr.Consecutive())
    train(job, 1)
    end = whole(state(job))
    _save(job, tracker, f"{tmp_path}/1", cnr.Consecutive())
    tracker.close()
    assert_same(models.load(plain_job(2, optimizer), f"{tmp_path}/1"), end)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_table_that_is_used_as_a_matrix_too_is_saved_as_it_is(tmp_path: Path, optimizer: str) -> None:
    """Where a table's weight is also a layer's (tied), its gradient reaches rows that no lookup named."""
    torch.manual_seed(1)
    table, scores = nn.Embedding(30, 4), nn.Linear(4, 30, bias=False)
    scores.weight = table.weight
    model = nn.ModuleDict({"table": table, "scores": scores})
    optim = models.OPTIMIZERS[optimizer](model.parameters())
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    saved = {"table": table.state_dict()}
    dcp.save(saved, storage_writer=models.writer(tmp_path / "0"), planner=planner)
    before = table.weight.detach().clone()
    nn.functional.cross_entropy(scores(table(torch.tensor([3, 5]))), torch.tensor([1, 2])).backward()
    optim.step()
    assert int((table.weight != before).any(dim=1).sum()) == 30
    dcp.save(saved, storage_writer=models.writer(tmp_path / "1"), planner=planner)
    tracker.close()
    loaded = nn.Embedding(30, 4)
    target = {"table": loaded.state_dict()}
    dcp.load(target, storage_reader=cnr.CNRStorageReader(tmp_path / "1"), planner=cnr.CNRLoadPlanner())
    assert torch.equal(loaded.weight, table.weight)


def _load_weights_only(rank: int, root: str, build: Callable[[int], Job]) -> None:
    job = build(1)
    tracker = cnr.RowTracker(job.model)
    train(job, 1)
    _save(job, tracker, f"{root}/0", cnr.Consecutive())
    tracker.close()
    fresh = build(2)
    tracker = cnr.RowTracker(fresh.model)
    weights = {"model": fresh.model.state_dict()}
    planner = cnr.CNRLoadPlanner(tracker, allow_partial_load=True)
    dcp.load(weights, storage_reader=cnr.CNRStorageReader(f"{root}/0"), planner=planner)
    train(fresh, 2)
    end = whole(state(fresh))
    _save(fresh, tracker, f"{root}/1", cnr.Consecutive())
    tracker.close()
    assert_same(models.load(build(3), f"{root}/1"), end)


def test_a_save_after_a_load_of_the_weights_alone_holds_the_optimizer(tmp_path: Path, rank_pool: RankPools) -> None:
    """Fine-tuning loads weights and starts a fresh optimizer: its rows are not those of the loaded checkpoint."""
    rank_pool(2).run(_load_weights_only, str(tmp_path / "torchrec"), torchrec_job)


def test_a_save_after_a_load_of_plain_weights_alone_holds_the_optimizer(tmp_path: Path) -> None:
    """As above, for a ``torch.optim`` optimizer."""
    _load_weights_only(0, str(tmp_path), adagrad_job)


def _go_on_from_an_untracked_save(rank: int, root: str, build: Callable[[int], Job]) -> None:
    job = build(1)
    dcp.save(state(job), storage_writer=models.writer(f"{root}/0"))  # which tables there are, only names tell
    tracker = cnr.RowTracker(job.model)
    models.load(job, f"{root}/0", tracker)
    for number in (1, 2):
        train(job, number)
        _save(job, tracker, f"{root}/{number}", cnr.Consecutive())
    tracker.close()
    assert cnr.read_checkpoint(f"{root}/2").kind == "delta"
    end = whole(state(job))
    assert_same(models.load(build(3), f"{root}/2"), end)


def test_a_run_goes_on_from_a_save_without_a_tracker(tmp_path: Path, rank_pool: RankPools) -> None:
    """Its baseline knows less of tables and their state, so the first delta holds those whole, and loads."""
    _go_on_from_an_untracked_save(0, str(tmp_path / "plain"), adagrad_job)
    rank_pool(2).run(_go_on_from_an_untracked_save, str(tmp_path / "torchrec"), torchrec_job)


def _more_ranks_than_rows(rank: int, root: str) -> None:
    def build(seed: int) -> Job:
        return torchrec_job(seed, "row", bag_rows=(37, 24, 1))

    job = build(1)
    tracker = cnr.RowTracker(job.model)
    for number in range(2):
        # By hand: fbgemm's kernels for CPUs read beyond a table without rows now and then.
        for shard in state(job)["model"]["ebc.embedding_bags.t2.weight"].local_shards():
            shard.tensor.data.add_(1.0)
        tracker.mark("ebc.embedding_bags.t2.weight", torch.tensor([0]))
        _save(job, tracker, f"{root}/{number}", cnr.Consecutive())
    end = whole(state(job))
    assert_same(models.load(build(2), f"{root}/1"), end)
    tracker.close()


def test_a_table_with_fewer_rows_than_ranks_is_saved(tmp_path: Path, rank_pool: RankPools) -> None:
    """Row-wise sharding of a small table leaves ranks without a row; their empty shards do not hinder a save."""
    rank_pool(2).run(_more_ranks_than_rows, str(tmp_path))


def _dense_kernel_model(seed: int, sharding: str) -> DistributedModelParallel:
    torch.manual_seed(seed)
    model = nn.Module()
    model.ebc = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t0", embedding_dim=8, num_embeddings=30, feature_names=["f0"])],
        device=torch.device("meta"),
    )
    sharder = EmbeddingBagCollectionSharder()
    world_size = torch.distributed.get_world_size()
    plan = construct_module_sharding_plan(
        model.ebc,
        {"t0": data_parallel() if sharding == "data" else row_wise(compute_kernel=EmbeddingComputeKernel.DENSE.value)},
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(torch.distributed.GroupMember.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],
    )


def _zero(optimizer: Optimizer, *_: Any) -> None:
    optimizer.zero_grad()


def _clamp(optimizer: Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter[20] = 7.0  # which no rank looks up


def _cut_between_backward_and_step(
    rank: int, root: str, optimizer: type[SGD | Adagrad], sharding: str, hook: Callable[..., None] | None = None
) -> None:
    model = _dense_kernel_model(1, sharding)
    optim = optimizer(model.parameters(), lr=0.5)
    if hook is not None:
        optim.register_step_post_hook(hook)
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())

    def save(name: str) -> None:
        path = f"{root}/{name}"
        dcp.save({"model": model.state_dict()}, storage_writer=models.writer(path), planner=planner)

    save("0")
    ids = KeyedJaggedTensor.from_lengths_sync(["f0"], torch.arange(8) + 5 * rank, torch.full((4,), 2))
    model.module.ebc(ids).values().sum().backward()
    save("1")
    before = whole({"model": model.state_dict()})
    optim.step()
    end = whole({"model": model.state_dict()})
    assert differing(before, end)
    save("2")
    assert cnr.read_checkpoint(f"{root}/2").kind == "delta"
    tracker.close()
    target = _dense_kernel_model(2, sharding)
    loaded = {"model": target.state_dict()}
    dcp.load(loaded, storage_reader=cnr.CNRStorageReader(f"{root}/2"), planner=cnr.CNRLoadPlanner())
    assert_same(whole({"model": target.state_dict()}), end)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("sharding", ["row", "data"])
@pytest.mark.parametrize("optimizer", [SGD, Adagrad])
def test_a_cut_between_backward_and_step_of_a_dense_kernel(
    tmp_path: Path, rank_pool: RankPools, optimizer: type[SGD | Adagrad], sharding: str, world_size: int
) -> None:
    """Tables of a dense kernel are modified by the optimizer's step: rows whose step follows a cut are in the next.

    Replicated ones too, whose gradients come from the lookups of all ranks.
    """
    rank_pool(world_size).run(_cut_between_backward_and_step, str(tmp_path), optimizer, sharding)


@pytest.mark.parametrize("hook", [_zero, _clamp])
@pytest.mark.parametrize("sharding", ["row", "data"])
def test_hooks_of_an_optimizer_may_write_to_a_dense_kernel(
    tmp_path: Path, rank_pool: RankPools, sharding: str, hook: Callable[..., None]
) -> None:
    """They may zero the gradients that the step used, or write to rows that it did not train."""
    rank_pool(1).run(_cut_between_backward_and_step, str(tmp_path), Adagrad, sharding, hook)


def _save_state_of_a_dense_kernel(rank: int, root: str) -> None:
    model = _dense_kernel_model(1, "row")
    named = dict(model.named_parameters())
    optimizer = KeyedOptimizerWrapper(named, lambda parameters: Adagrad(parameters, lr=0.5))
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker)
    ids = KeyedJaggedTensor.from_lengths_sync(["f0"], torch.arange(8) + 5 * rank, torch.full((4,), 2))
    model.module.ebc(ids).values().sum().backward()
    optimizer.step()
    state_dict = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state_dict, storage_writer=models.writer(f"{root}/0"), planner=planner)
    assert "sum' is optimizer state of each rank's own rows, but is not sharded" in str(caught.value)
    apart = {"model": model.state_dict(), f"optim{rank}": optimizer.state_dict()}
    dcp.save(apart, storage_writer=models.writer(f"{root}/1"), planner=planner)
    tracker.close()


def test_state_that_ranks_have_under_one_name_is_refused(tmp_path: Path, rank_pool: RankPools) -> None:
    """A sharded table with a dense kernel has optimizer state that is not sharded: DCP would save that of one rank."""
    rank_pool(2).run(_save_state_of_a_dense_kernel, str(tmp_path))


def _save_other_sizes(rank: int, root: str) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.save(
            {"mine": torch.zeros(3 + rank)}, storage_writer=models.writer(f"{root}/0"), planner=cnr.CNRSavePlanner()
        )
    assert "has one size on rank 0 and another on rank 1" in str(caught.value)


def test_tensors_of_other_sizes_under_one_name_are_refused(tmp_path: Path, rank_pool: RankPools) -> None:
    """DCP itself would save the first."""
    rank_pool(2).run(_save_other_sizes, str(tmp_path))


def _rows(table: torch.Tensor, first: int, step: int) -> torch.Tensor:
    return torch.arange(first, len(table), step)


@pytest.mark.long
@pytest.mark.parametrize("quantization", [cnr.NoQuantization(), cnr.Asymmetric(8)], ids=["exact", "quantized"])
def test_tables_larger_than_a_pack(tmp_path: Path, quantization: cnr.Scheme) -> None:
    """Tables of many blocks and packs, with more rows than are looked at once, written and read by several threads."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"long": nn.EmbeddingBag(5_000_000, 1), "wide": nn.EmbeddingBag(150_000, 100)})
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    tables = {name: parameter.detach() for name, parameter in model.named_parameters()}
    baseline = {}
    for number, step in enumerate((None, 3)):
        for name, table in tables.items():
            if step is not None:
                rows = _rows(table, number, step)
                table[rows] += 1.0
                tracker.mark(name, rows)
        writer = models.writer(tmp_path / str(number), quantization=quantization, thread_count=3)
        dcp.save(model.state_dict(), storage_writer=writer, planner=planner)
        loaded = {name: torch.zeros_like(table) for name, table in tables.items()}
        reader = cnr.CNRStorageReader(tmp_path / str(number), thread_count=3)
        dcp.load(loaded, storage_reader=reader, planner=cnr.CNRLoadPlanner())
        for name, table in tables.items():
            got = loaded[name]
            if isinstance(quantization, cnr.NoQuantization):
                assert torch.equal(got, table)
            elif step is None:
                baseline[name] = got
                assert float((got - table).abs().max()) < 0.05
            else:
                is_modified = torch.zeros(len(table), dtype=torch.bool).index_fill(0, _rows(table, number, step), True)
                assert torch.equal(got[~is_modified], baseline[name][~is_modified])
                assert float((got - table).abs().max()) < 0.05
    tracker.close()
    assert cnr.read_checkpoint(tmp_path / "1").kind == "delta"
    assert len(cnr.read_checkpoint(tmp_path / "0").manifest.packs) > 1

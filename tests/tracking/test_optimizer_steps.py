"""Whose writes those around a step of a torch.optim optimizer are, and which tables and parameters it has."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

import torchrec_cnr as cnr
from tests.support.ranks import RankPools

ROWS, TRAINED = 12, (1, 2)


class _Run:
    """A table, its tracker, and what changed and was marked since the last cut."""

    def __init__(self, optimizer: type[Optimizer] = SGD, *, sparse: bool = False) -> None:
        self.table = nn.Embedding(ROWS, 4, sparse=sparse)
        self.optimizer = optimizer(self.table.parameters(), lr=0.5)  # type: ignore[call-arg]
        self.tracker = cnr.RowTracker(self.table)
        self.cut()

    def cut(self) -> None:
        self.tracker.freeze()
        self.before = self.table.weight.detach().clone()

    def backward(self) -> Tensor:
        loss: Tensor = self.table(torch.tensor(TRAINED)).sum()
        loss.backward()
        return loss

    def is_all_marked(self) -> bool:
        """Whether every row that changed is marked; looks for writes first, as a cut does."""
        self.tracker.check_writes()
        changed = (self.table.weight.detach() != self.before).any(dim=1)
        assert bool(changed.any())
        return bool((self.tracker.shards[0].rows.marked | ~changed).all())

    @property
    def num_marked(self) -> int:
        return self.tracker.num_modified

    def clamp(self, *_: Any) -> None:
        with torch.no_grad():
            self.table.weight[5] = 7.0


@pytest.fixture(params=[(SGD, False), (SGD, True), (Adagrad, False), (SparseAdam, True)], ids=str)
def run(request: pytest.FixtureRequest) -> Iterator[_Run]:
    optimizer, sparse = request.param
    run = _Run(optimizer, sparse=sparse)
    yield run
    run.tracker.close()


def test_a_step_marks_its_rows_and_no_others(run: _Run) -> None:
    """With hooks and a closure that write nothing, in step after step."""
    run.optimizer.register_step_pre_hook(lambda *_: None)
    run.optimizer.register_step_post_hook(lambda *_: None)
    for _ in range(2):
        run.optimizer.step(run.backward)
        assert run.is_all_marked()
        assert run.num_marked == len(TRAINED)


@pytest.mark.parametrize("where", ["pre", "post", "closure", "closure by name"])
def test_writes_of_hooks_and_closures_are_saved(run: _Run, where: str) -> None:
    """Clamping or projecting rows there is no write of the optimizer."""
    if where == "pre":
        run.optimizer.register_step_pre_hook(run.clamp)
    if where == "post":
        run.optimizer.register_step_post_hook(run.clamp)

    def closure() -> Tensor:
        loss = run.backward()
        run.clamp()
        return loss

    if where == "closure":
        run.optimizer.step(closure)
    elif where == "closure by name":
        run.optimizer.step(closure=closure)
    else:
        run.backward()
        run.optimizer.step()
    assert run.is_all_marked()


def test_gradients_may_be_zeroed_in_a_hook(run: _Run) -> None:
    """Also if a save has taken the marks of the backward before."""
    run.optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
    run.backward()
    run.cut()
    run.optimizer.step()
    assert run.is_all_marked()
    assert run.num_marked == len(TRAINED)


def test_a_tracker_may_be_freed_in_a_step() -> None:
    """The garbage collector may run while PyTorch iterates over its hooks; trackers that live on mark their rows."""
    num_before = len(_global_optimizer_pre_hooks)
    freed = list[cnr.RowTracker]()

    def free(*_: Any) -> None:
        freed.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(free)  # before those of trackers
    try:
        freed.append(cnr.RowTracker(nn.Embedding(ROWS, 4)))
        run = _Run()
        run.backward()
        run.optimizer.step()
    finally:
        handle.remove()
    assert not freed
    assert run.is_all_marked()
    run.tracker.close()
    assert len(_global_optimizer_pre_hooks) <= num_before


def test_a_step_that_raises_leaves_no_hook(run: _Run) -> None:
    """What it wrote counts as written by something unknown; the next one marks its rows."""

    def closure() -> float:
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            run.optimizer.step(closure)
    run.backward()
    run.optimizer.step()
    assert run.is_all_marked()
    assert run.num_marked == len(TRAINED)
    assert not run.optimizer._optimizer_step_pre_hooks
    assert not run.optimizer._optimizer_step_post_hooks


class _Hashed(nn.Embedding):
    def forward(self, ids: Any) -> Tensor:  # type: ignore[override]
        """Ids are hashed, and lie in a list."""
        return super().forward(torch.as_tensor(ids[0]) % ROWS)


class _HashedBag(nn.EmbeddingBag):
    def forward(self, ids: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        """Ids are hashed."""
        return super().forward(ids % ROWS) * scale


@pytest.mark.parametrize(
    ("table", "lookup"),
    [
        (_Hashed(ROWS, 4), lambda table: table([[100, 101]])),
        (_Hashed(ROWS, 4, max_norm=1.0), lambda table: table([[100, 101]])),
        (_HashedBag(ROWS, 4), lambda table: table(scale=2.0, ids=torch.tensor([[100, 101]]))),
    ],
    ids=["ids in a list", "max_norm", "keyword"],
)
def test_tables_with_a_forward_of_their_own(table: Any, lookup: Callable[[nn.Module], Tensor]) -> None:
    """What they are called with need not be row numbers: their rows are marked by the gradient."""
    tracker = cnr.RowTracker(table)
    optimizer = SGD(table.parameters(), lr=0.5)
    before = table.weight.detach().clone()
    lookup(table).sum().backward()
    optimizer.step()
    tracker.check_writes()
    changed = (table.weight.detach() != before).any(dim=1)
    marked = tracker.shards[0].rows.marked
    assert changed.nonzero().squeeze(1).tolist() == [100 % ROWS, 101 % ROWS]
    assert bool((marked | ~changed).all())
    assert bool(marked.all()) == (table.max_norm is not None)  # which is written beside the optimizer
    tracker.close()


class _Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4)
        self.over = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, 1]."""
        return torch.as_tensor(self.over(self.table(ids)))


def _train_beside_dtensors(rank: int) -> None:
    torch.manual_seed(1)
    model = _Parts()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.over, mesh=mesh)
    tracker = cnr.RowTracker(model)
    optimizer = SGD(model.parameters(), lr=0.5)
    model(torch.tensor(TRAINED)).sum().backward()
    optimizer.step()
    assert tracker.num_modified == len(TRAINED)
    tracker.close()
    fully_shard(model, mesh=mesh)
    with pytest.raises(cnr.ConfigurationError, match="table: its weight is a DTensor"):
        cnr.RowTracker(model)


def test_parameters_beside_a_table_may_be_dtensors(rank_pool: RankPools) -> None:
    """FSDP2 makes DTensors of parameters; a table that is one is refused."""
    rank_pool(2).run(_train_beside_dtensors)


def _track_under_fsdp(rank: int, strategy: ShardingStrategy, use_orig_params: bool) -> list[str]:
    """What a tracker says of a table that FSDP1 manages, and of one that it ignores."""
    said = []
    for is_ignored in (False, True):
        table = nn.Embedding(ROWS, 4)
        model = FullyShardedDataParallel(
            nn.Sequential(table, nn.Linear(4, 2)),
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
            ignored_modules=[table] if is_ignored else None,
        )
        try:
            cnr.RowTracker(model).close()
        except cnr.ConfigurationError as error:
            said.append(str(error))
        else:
            said.append("tracked")
    return said


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD], ids=str)
def test_tables_that_fsdp1_manages_are_refused(
    rank_pool: RankPools, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """It moves them in and out of memory of its own, and its optimizer sees parts of them."""
    for refused, ignored in rank_pool(2).run(_track_under_fsdp, strategy, use_orig_params):
        assert "save without a tracker" in refused
        assert ignored == "tracked"

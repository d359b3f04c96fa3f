"""Tables whose memory changes hands: other memory in a parameter, two parameters over one, copies, other processes."""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD

import torchrec_cnr as cnr
from tests.support.ranks import RankPools
from torchrec_cnr.tracking.hooks import Hooks
from torchrec_cnr.tracking.tracked_tables import trackers

ROWS, TRAINED = 12, (1, 2)


class _Tied(nn.Module):
    """A table whose memory two other parameters share."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4)
        self.bag = nn.EmbeddingBag(ROWS, 4, mode="sum")
        self.bag.weight = nn.Parameter(self.table.weight.data)
        self.over = nn.Linear(4, ROWS, bias=False)
        self.over.weight = nn.Parameter(self.table.weight.data)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, 4]."""
        return torch.as_tensor(self.table(ids) + self.bag(ids.view(-1, 1)))


@pytest.fixture
def model() -> nn.Embedding:
    return nn.Embedding(ROWS, 4)


@pytest.fixture
def tracker(model: nn.Module) -> Iterator[cnr.RowTracker]:
    tracker = cnr.RowTracker(model)
    tracker.freeze()
    yield tracker
    tracker.close()


def _train(model: nn.Module) -> None:
    model(torch.tensor(TRAINED)).sum().backward()
    SGD(model.parameters(), lr=0.5).step()


def _swap(model: nn.Embedding) -> None:
    model.weight.data = torch.rand(ROWS, 4)


def _round(model: nn.Embedding) -> None:
    model.half().float()


def _put_vector(model: nn.Embedding) -> None:
    vector_to_parameters(2 * parameters_to_vector(model.parameters()), model.parameters())


@pytest.mark.parametrize("put", [_swap, _round, _put_vector])
def test_other_memory_in_a_parameter_is_a_write(
    model: nn.Embedding, tracker: cnr.RowTracker, put: Callable[[nn.Module], None]
) -> None:
    """It moves no version counter. Training afterwards marks its rows, as ever."""
    put(model)
    _train(model)
    tracker.freeze()
    (shard,) = tracker.shards
    assert shard.rows.frozen is not None
    assert bool(shard.rows.frozen.all())
    _train(model)
    assert tracker.num_modified == len(TRAINED)


def _average(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Embedding(ROWS, 4)
    tracker = cnr.RowTracker(model)
    _train(model)
    tracker.freeze()
    before = model.weight.detach().clone()
    average_parameters(model.parameters(), dist.GroupMember.WORLD)
    assert not torch.equal(model.weight, before)
    tracker.freeze()
    (shard,) = tracker.shards
    assert shard.rows.frozen is not None
    assert bool(shard.rows.frozen.all())
    tracker.close()


def test_averages_of_parameters_are_a_write(rank_pool: RankPools) -> None:
    """PyTorch's model averaging puts other memory into each parameter."""
    rank_pool(2).run(_average)


def _broadcast(rank: int) -> bool:
    torch.manual_seed(rank)
    model = nn.Embedding(ROWS, 4)
    tracker = cnr.RowTracker(model, verify_untracked=True)
    tracker.freeze()
    dist.broadcast(model.weight.detach(), 0)
    try:
        tracker.freeze()
    except cnr.UntrackedRowsError:
        tracker.mark_all()
        tracker.freeze()
        is_found = True
    else:
        is_found = False
    tracker.close()
    return is_found


def test_a_broadcast_into_a_table_is_found_by_the_check_of_unmarked_rows(rank_pool: RankPools) -> None:
    """Nothing else shows what collectives write; ``mark_all`` accounts for it."""
    assert rank_pool(2).run(_broadcast) == [False, True]


@pytest.mark.parametrize("name", ["table", "bag", "over"])
def test_parameters_over_one_memory_are_one_table(name: str) -> None:
    """A write by any of them is seen, and a step by all of them marks the rows of either gradient."""
    model = _Tied()
    tracker = cnr.RowTracker(model)
    (shard,) = tracker.shards
    tracker.freeze()
    _train(model)
    tracker.check_writes()
    assert shard.rows.marked.nonzero().squeeze(1).tolist() == list(TRAINED)
    with torch.no_grad():
        model.get_parameter(f"{name}.weight")[5] = 7.0
    tracker.check_writes()
    assert bool(shard.rows.marked.all())
    tracker.close()


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "a parameter over all": lambda weight: nn.Parameter(weight.data),
    "a parameter over some rows": lambda weight: nn.Parameter(weight.data[3:6]),
    "a buffer": lambda weight: nn.Buffer(weight.data),
    "a buffer over a column": lambda weight: nn.Buffer(weight.data[:, 3]),
}


@pytest.mark.parametrize("is_late", [False, True], ids=["before the tracker", "after it"])
@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_writes_through_other_tensors_over_a_table_are_found(alias: Callable[[Tensor], Tensor], is_late: bool) -> None:
    """Through parameters and buffers over all of its memory or some, whenever they were put into the model."""
    model = nn.ModuleDict({"a": nn.Embedding(ROWS, 4)})
    if not is_late:
        model.other = alias(model["a"].weight)
    tracker = cnr.RowTracker(model)
    tracker.freeze()
    if is_late:
        model.other = alias(model["a"].weight)
    assert tracker.num_modified == 0
    for _ in range(2):
        with torch.no_grad():
            model.other[1] = 7.0
        tracker.freeze()
        assert bool(tracker.shards[0].rows.frozen.all())
        tracker.freeze()
        assert not tracker.shards[0].rows.frozen.any()
    tracker.close()


def test_writes_beside_a_table_in_its_storage_are_none_to_it() -> None:
    """Parameters may lie in one storage without having a value in common."""
    storage = torch.randn(ROWS * 4 + 3)
    model = nn.ModuleDict({"a": nn.Embedding(ROWS, 4)})
    model["a"].weight = nn.Parameter(storage.data[: ROWS * 4].view(ROWS, 4))
    model.over = nn.Parameter(storage.data[ROWS * 4 :])
    tracker = cnr.RowTracker(model)
    with torch.no_grad():
        model.over.add_(1.0)
    tracker.freeze()
    assert not tracker.shards[0].rows.frozen.any()
    tracker.close()


def test_a_load_onto_itself_of_parameters_over_one_memory_writes_nothing() -> None:
    """As DCP has modules do after a load."""
    model = nn.ModuleDict({"a": nn.Embedding(ROWS, 4), "b": nn.Embedding(ROWS, 4)})
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    tracker = cnr.RowTracker(model)
    tracker.freeze()
    model.load_state_dict(model.state_dict())
    tracker.check_writes()
    assert tracker.num_modified == 0
    tracker.close()


def _saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("copied", [_saved, copy.deepcopy])
def test_a_copy_of_the_model_is_not_tracked(max_norm: float | None, copied: Callable[[nn.Module], Any]) -> None:
    """Nor does a model that an optimizer has stepped hinder torch.save."""
    model = nn.Embedding(ROWS, 4, max_norm=max_norm)
    tracker = cnr.RowTracker(model)
    _train(model)
    tracker.freeze()
    other = copied(model)
    _train(other)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.weight, model.weight)
    assert tracker.num_modified == 0
    _train(model)
    assert tracker.num_modified == len(TRAINED)
    tracker.close()


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2

    def scaled(self, value: int) -> int:
        return self.scale * value


def _twice_scaled(value: int) -> int:
    return 100 * value


@pytest.mark.parametrize("num_hooks", [1, 2])
@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("copied", [_saved, copy.deepcopy])
def test_a_copy_of_a_module_has_its_own_methods(
    copied: Callable[[nn.Module], Any], is_own: bool, num_hooks: int
) -> None:
    """And not those that a tracker or a subscriber calls in their place, which are of the original."""
    module, calls = _Scaled(), list[int]()
    if is_own:
        module.__dict__["scaled"] = _twice_scaled

    def around(original: Callable[[int], int], value: int) -> int:
        calls.append(value)
        return original(value)

    hooks = [Hooks() for _ in range(num_hooks)]
    for one in hooks:
        one.around(module, "scaled", around)
    other = copied(module)
    other.scale = 3
    assert other.scaled(1) == (100 if is_own else 3)
    assert calls == []
    assert module.scaled(1) == (100 if is_own else 2)
    assert calls == [1] * num_hooks
    for one in reversed(hooks):
        one.remove()
    assert module.__dict__.get("scaled") is (_twice_scaled if is_own else None)
    assert other.scaled(1) == (100 if is_own else 3)


def test_functional_gradients_pass(model: nn.Embedding, tracker: cnr.RowTracker) -> None:
    """torch.func.grad looks rows up without training them."""

    def loss(weights: dict[str, Tensor], ids: Tensor) -> Tensor:
        return torch.as_tensor(torch.func.functional_call(model, weights, (ids,)).sum())

    weights = dict(model.named_parameters())
    gradients = torch.func.grad(loss)(weights, torch.tensor(TRAINED))
    assert (gradients["weight"] != 0).any(dim=1).nonzero().squeeze(1).tolist() == list(TRAINED)
    of_each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, torch.tensor(TRAINED))
    assert of_each["weight"].shape == (2, ROWS, 4)
    assert tracker.num_modified == 0


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        """[rows, 4]."""
        return 2 * weight


def test_tables_that_are_computed_are_refused(model: nn.Embedding) -> None:
    """A parametrized weight is a new tensor at every lookup, and no state dict holds it."""
    nn.utils.parametrize.register_parametrization(model, "weight", _Doubled())
    with pytest.raises(cnr.ConfigurationError, match="its weight is a Tensor, not a parameter with memory of its own"):
        cnr.RowTracker(nn.ModuleDict({"table": model}))


def test_loads_of_sparse_tensors_overwrite_no_table(tracker: cnr.RowTracker) -> None:
    """They have no storage to look for."""
    sparse = torch.eye(3).to_sparse()
    (shard,) = tracker.shards
    assert trackers.tracking([sparse]) == []
    assert trackers.tracking([sparse, shard.weight]) == [tracker]


def test_tables_in_shared_memory_are_refused(model: nn.Embedding, tracker: cnr.RowTracker) -> None:
    """Other processes train them, as in Hogwild, and mark rows in memory of their own."""
    model.share_memory()
    with pytest.raises(cnr.ConfigurationError, match=r"'' is in shared memory.*: train it in one process"):
        tracker.freeze()
    with pytest.raises(cnr.ConfigurationError, match="is in shared memory"):
        cnr.RowTracker(nn.ModuleDict({"table": model}))

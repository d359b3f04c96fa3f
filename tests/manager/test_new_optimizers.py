"""Restores into optimizers that have made no step: their state is created first, and nothing else changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, SparseAdam
from torch.optim.lr_scheduler import StepLR
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import torchrec_cnr as cnr

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:Detected call of `lr_scheduler")


def _keyed(model: nn.Module) -> Optimizer:
    parameters = {name: value for name, value in model.named_parameters() if name != "table.weight"}
    return CombinedOptimizer([("dense", KeyedOptimizerWrapper(parameters, lambda values: Adam(values, lr=0.1)))])


def _dense(kind: Callable[..., Optimizer], **options: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: kind([*model.get_submodule("dense").parameters()], lr=0.1, **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Adam": _dense(Adam),
    "Adam with a tensor": lambda model: Adam(model.get_submodule("dense").parameters(), lr=torch.tensor(0.1)),
    "AdamW": _dense(AdamW, weight_decay=0.5),
    "momentum": _dense(SGD, momentum=0.9, weight_decay=0.5),
    "SGD": _dense(SGD),
    "Adagrad": _dense(Adagrad),
    "NAdam": _dense(NAdam),
    "keyed": _keyed,
    "tables": lambda model: SparseAdam([model.get_submodule("table").weight], lr=0.1),
}


class _Job:
    def __init__(self, root: Path, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.ModuleDict({"table": nn.EmbeddingBag(50, 4, sparse=True), "dense": nn.Linear(4, 2)})
        self.optimizer = OPTIMIZERS[name](self.model)
        self.scheduler = StepLR(self.optimizer, 1, gamma=1.0) if name == "Adam" else None
        self.state = {"model": self.model.state_dict(), "optimizer": self.optimizer}
        self.manager = cnr.CheckpointManager(root, cnr.RowTracker(self.model), every_steps=1)

    def train(self, seed: int) -> None:
        rows = torch.randint(50, (8, 2), generator=torch.Generator().manual_seed(seed))
        self.model["dense"](self.model["table"](rows)).square().sum().backward()
        self.optimizer.step()
        self.model.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_job_resumes_as_it_would_have_gone_on(tmp_path: Path, name: str, num_steps: int) -> None:
    """Bit for bit, also from a checkpoint of before the first step; the first save afterwards is a delta."""
    first = _Job(tmp_path, name, seed=1)
    for step in range(num_steps):
        first.train(step)
    first.manager.save(num_steps, first.state)
    first.manager.close()
    resumed = _Job(tmp_path, name, seed=2)
    assert resumed.manager.restore(resumed.state) == num_steps
    assert resumed.scheduler is None or resumed.scheduler._step_count == 1
    assert all(parameter.grad is None for parameter in resumed.model.parameters())
    for job in (first, resumed):
        job.train(9)
    saved = resumed.manager.save(9, resumed.state)
    assert saved is not None
    assert saved.kind == "delta"
    assert saved.num_rows < 50
    resumed.manager.close()
    for expected, value in zip(first.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(expected, value)


def test_one_that_needs_a_closure_is_refused_as_before(tmp_path: Path) -> None:
    """The error says that it has no state, and nothing was loaded."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    tracked = nn.EmbeddingBag(9, 2)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.ones(1, 2)).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    state = {"model": tracked.state_dict(), "optimizer": optimizer}
    cnr.CheckpointManager(tmp_path, tracker := cnr.RowTracker(tracked)).save(1, state)
    state["optimizer"] = torch.optim.LBFGS(model.parameters())
    with pytest.raises(torch.distributed.checkpoint.api.CheckpointException, match="has made no step"):
        cnr.restore_newest(tmp_path, state, tracker)

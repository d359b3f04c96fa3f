"""TorchTNT: a job that is killed, preempted or ended by an error goes on as if nothing had happened."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.parallel import DistributedDataParallel
from torchtnt.framework.auto_unit import AutoUnit
from torchtnt.framework.callback import Callback
from torchtnt.framework.callbacks import DistributedCheckpointSaver
from torchtnt.framework.state import State
from torchtnt.framework.train import train
from torchtnt.framework.unit import TrainUnit

import torchrec_cnr as cnr
from tests.support.models import Whole, differing, torchrec_job
from tests.support.ranks import RankPools
from tests.trainers.interrupted import (
    EVERY_STEPS,
    NUM_EPOCHS,
    NUM_ROWS,
    Losses,
    Outcome,
    Trainer,
    batches_of,
    interruption,
    loss_of,
    seed,
    status_of,
)
from tests.trainers.recipes import recipe, values

pytestmark = pytest.mark.filterwarnings("ignore")  # those of TorchTNT


class PlainUnit(TrainUnit[Tensor]):
    """A table of torch's own, whose gradients are sparse, beside a dense part that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        model = nn.Sequential(nn.EmbeddingBag(NUM_ROWS, 4, sparse=True), nn.Dropout(0.3), nn.Linear(4, 1))
        self.model = DistributedDataParallel(model) if dist.is_initialized() else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.random = cnr.RandomState()
        self.losses: Losses = []

    def forward(self, data: Tensor) -> Tensor:
        """[4, 1]."""
        return torch.as_tensor(self.model(data))

    def train_step(self, state: State, data: Tensor) -> None:
        """Train a batch."""
        loss = loss_of(self.forward(data))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        progress = self.train_progress
        self.losses.append((progress.num_steps_completed + 1, progress.num_epochs_completed, loss.item()))

    def on_train_epoch_end(self, state: State) -> None:
        """Lower the learning rate."""
        self.scheduler.step()


class ShardedUnit(PlainUnit):
    """Tables in shards by rows, columns and as wholes, with a fused optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.job = torchrec_job(1)
        self.model = self.job.model
        self.optimizer = self.job.optimizers["dense"]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def forward(self, data: Tensor) -> Tensor:
        """[4, 1]."""
        return torch.as_tensor(self.model(self.job.batch(torch.Generator().manual_seed(int(data.sum())))))


def _fused(unit: ShardedUnit) -> dict[str, Any]:
    return {"fused": unit.job.model.fused_optimizer.state_dict()}


class At(Callback):
    """Does something before a step."""

    def __init__(self, step: int | None, act: Callable[[], None]) -> None:
        self._step, self._act = step, act

    def on_train_step_start(self, state: State, unit: Any) -> None:
        """Act before the step."""
        if unit.train_progress.num_steps_completed + 1 == self._step:
            self._act()


def _train(rank: int, root: str, kind: str, act: str | None = None, at: int | None = None) -> Outcome:
    seed()
    unit = ShardedUnit() if kind == "sharded" else PlainUnit()
    batches = batches_of(rank)
    loader = cnr.ReaderState(batches if kind == "list" else lambda first: iter(batches[first:]))
    options: dict[str, Any] = {"every_steps": EVERY_STEPS, "policy": cnr.Consecutive()}
    if kind == "sharded":
        options["extra"] = _fused
    if act == "preempt":
        options["preemption"] = cnr.Preemption()
    checkpoints = recipe("cnr_torchtnt.py").Checkpoints(root, loader, **options)
    callbacks = [checkpoints, At(at, interruption(act, rank, checkpoints))]
    status = status_of(lambda: train(unit, loader, max_epochs=NUM_EPOCHS, callbacks=callbacks), checkpoints, root)
    return checkpoints.first, unit.losses, values(checkpoints.state(unit)), status


TORCHTNT = Trainer(_train)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "killed", "saved"),
    [
        ("list", 11, 8),  # the last batch of the first epoch
        ("sharded", 15, 12),  # the middle of the second one
    ],
)
def test_a_killed_job_goes_on(tmp_path: Path, rank_pool: RankPools, kind: str, killed: int, saved: int) -> None:
    """Losses, weights, rows, optimizers, schedulers and counts are those of a job that nothing interrupted."""
    TORCHTNT.check_killed(rank_pool, tmp_path, kind, killed, saved)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_preempted_job_saves_on_all_ranks_and_goes_on(tmp_path: Path, rank_pool: RankPools) -> None:
    """A signal to one rank stops all of them."""
    TORCHTNT.check_preempted(rank_pool, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_error_ends_the_manager(tmp_path: Path, rank_pool: RankPools) -> None:
    """The background save ends well, and the next training of the same process can use the root."""
    TORCHTNT.check_failed(rank_pool, tmp_path)


def _unit_and_loader() -> tuple[PlainUnit, cnr.ReaderState[Tensor]]:
    return PlainUnit(), cnr.ReaderState(batches_of(0))


class OwnLoop(AutoUnit[Tensor]):
    """TorchTNT's unit that trains by itself, and takes a batch in advance."""

    def __init__(self, num_accumulated: int) -> None:
        torch.manual_seed(3)
        super().__init__(
            module=nn.Sequential(nn.EmbeddingBag(NUM_ROWS, 4, sparse=True), nn.Dropout(0.3), nn.Linear(4, 1)),
            device=torch.device("cpu"),
            gradient_accumulation_steps=num_accumulated,
        )
        self.random = cnr.RandomState()
        self.losses: list[float] = []

    def compute_loss(self, state: State, data: Tensor) -> tuple[Tensor, None]:
        """Return the loss of a batch."""
        return loss_of(self.module(data)), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
        """Return an optimizer and a scheduler."""
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    def on_train_step_end(self, state: State, data: Tensor, step: int, results: Any) -> None:
        """Keep the loss."""
        self.losses.append(results.loss.item())


def _train_auto_unit(root: Path, num_accumulated: int, fails_at: int | None) -> tuple[int, list[float], Whole]:
    unit, loader = OwnLoop(num_accumulated), cnr.ReaderState(batches_of(0))
    checkpoints = recipe("cnr_torchtnt.py").Checkpoints(root, loader, every_steps=EVERY_STEPS)

    def fail() -> None:
        checkpoints.manager.wait()
        raise ZeroDivisionError

    with suppress(ZeroDivisionError):
        train(unit, loader, max_epochs=NUM_EPOCHS, callbacks=[checkpoints, At(fails_at, fail)])
    return checkpoints.first, unit.losses, values(checkpoints.state(unit))


@pytest.mark.long
@pytest.mark.parametrize("num_accumulated", [1, 2])
def test_an_auto_unit_goes_on(tmp_path: Path, num_accumulated: int) -> None:
    """At the end of an epoch and in the middle of one."""
    _, losses, expected = _train_auto_unit(tmp_path / "one", num_accumulated, None)
    for fails_at, saved in ((11, 8), (15, 12)):
        root = tmp_path / str(saved)
        _train_auto_unit(root, num_accumulated, fails_at)
        first, resumed, found = _train_auto_unit(root, num_accumulated, None)
        assert (first, resumed) == (saved, losses[saved:])
        assert differing(found, expected) == []


@pytest.mark.long
def test_the_own_saver_in_the_same_directory(tmp_path: Path) -> None:
    """TorchTNT removes its own checkpoints only, and the manager leaves them alone."""
    unit, loader = _unit_and_loader()
    checkpoints = recipe("cnr_torchtnt.py").Checkpoints(tmp_path, loader, every_steps=2, keep=cnr.Keep(last=2))
    theirs = DistributedCheckpointSaver(str(tmp_path), save_every_n_train_steps=2, keep_last_n_checkpoints=1)
    train(unit, loader, max_epochs=1, callbacks=[checkpoints, theirs])
    assert [path.name for path in tmp_path.glob("epoch_*")] == ["epoch_1_train_step_8"]
    assert {path.name for path in tmp_path.glob("step-*")} >= {"step-6", "step-8"}
    table = cnr.load_table(tmp_path / "step-8", "model.0.weight")
    assert torch.equal(torch.as_tensor(table), unit.model[0].weight.detach())


class Saver(DistributedCheckpointSaver):
    """TorchTNT's saver with our writer and planner, as one could make it."""

    def __init__(self, root: str, tracker: cnr.RowTracker, **options: Any) -> None:
        super().__init__(root, **options)
        self._planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())

    def _checkpoint_impl(self, *args: Any, checkpoint_path: str, **options: Any) -> bool:
        writer = cnr.CNRStorageWriter(checkpoint_path)
        return super()._checkpoint_impl(
            *args, checkpoint_path=checkpoint_path, planner=self._planner, storage_writer=writer, **options
        )


def _fail() -> None:
    raise ZeroDivisionError


@pytest.mark.long
@pytest.mark.parametrize("kept", [None, 2])
def test_the_own_saver_with_our_writer_loses_baselines(tmp_path: Path, kept: int | None) -> None:
    """It removes the oldest checkpoints, which the others are based on; until the next baseline, none can be loaded."""
    unit, loader = _unit_and_loader()
    tracker = cnr.RowTracker(unit.model)
    saver = Saver(str(tmp_path), tracker, save_every_n_train_steps=2, keep_last_n_checkpoints=kept)
    with pytest.raises(ZeroDivisionError):
        train(unit, loader, max_epochs=1, callbacks=[saver, At(7, _fail)])
    tracker.close()
    assert not Saver.restore_from_latest(str(tmp_path), unit), "it looks for DCP's .metadata"
    names = {path.name for path in tmp_path.glob("epoch_*")}
    target = {"app_state": {"model": PlainUnit().model.state_dict()}}
    load = partial(
        dcp.load,
        target,
        storage_reader=cnr.CNRStorageReader(tmp_path / "epoch_0_train_step_6"),
        planner=cnr.CNRLoadPlanner(allow_partial_load=True),
    )
    if kept is None:
        assert names == {f"epoch_0_train_step_{step}" for step in (2, 4, 6)}
        load()
        assert torch.equal(target["app_state"]["model"]["0.weight"], unit.model[0].weight.detach())
        return
    assert names == {f"epoch_0_train_step_{step}" for step in (4, 6)}
    with pytest.raises(CheckpointException) as caught:
        load()
    assert isinstance(caught.value.failures[0][0], cnr.DamagedError)

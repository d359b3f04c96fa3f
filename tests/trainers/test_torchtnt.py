"""TorchTNT: a job that is killed, preempted or ended by an error goes on as if nothing had happened."""

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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
from tests.trainers.recipes import batch_ids, recipe, values
from torchrec_cnr.manager.open_roots import open_roots

pytestmark = pytest.mark.filterwarnings("ignore")  # those of TorchTNT

NUM_ROWS, NUM_BATCHES, NUM_EPOCHS, EVERY_STEPS = 50, 8, 3, 4
LIMIT_SECS = 240.0

Losses = list[tuple[int, int, float]]


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
        loss = (self.forward(data) - torch.arange(4.0).view(4, 1)).square().mean()
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


def _seed() -> None:
    torch.set_num_threads(1)
    random.seed(3)
    np.random.seed(3)


def _train(
    rank: int, root: str, kind: str, act: str | None = None, at: int | None = None
) -> tuple[int, Losses, Whole, int]:
    """Train to the end, or to what happens at a step: the first step, losses, values, and the exit status."""
    _seed()
    unit = ShardedUnit() if kind == "sharded" else PlainUnit()
    batches = batch_ids(rank, NUM_BATCHES, NUM_ROWS)
    loader = cnr.ReaderState(batches if kind == "list" else lambda first: iter(batches[first:]))
    options: dict[str, Any] = {"every_steps": EVERY_STEPS, "policy": cnr.Consecutive()}
    if kind == "sharded":
        options["extra"] = _fused
    if act == "preempt":
        options["preemption"] = cnr.Preemption()
    checkpoints = recipe("cnr_torchtnt.py").Checkpoints(root, loader, **options)

    def kill() -> None:
        checkpoints.manager.wait()
        os.kill(os.getpid(), signal.SIGKILL)

    def preempt() -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def fail() -> None:
        raise ZeroDivisionError

    acts = {"kill": kill, "preempt": preempt, "fail": fail, None: kill}
    status = 0
    try:
        train(unit, loader, max_epochs=NUM_EPOCHS, callbacks=[checkpoints, At(at, acts[act])])
    except SystemExit as end:
        status = int(str(end.code))
    except ZeroDivisionError:
        status = 1
    assert checkpoints.manager is None
    assert not any(path == root for _, path in open_roots._managers)
    return checkpoints.first, unit.losses, values(checkpoints.state(unit)), status


def _run(ranks: RankPools, root: Path, kind: str, *more: Any, **options: Any) -> list[Any]:
    return ranks(2).run(_train, str(root), kind, *more, timeout_secs=LIMIT_SECS, **options)


_whole_runs: dict[str, list[Any]] = {}


def _whole_run(ranks: RankPools, root: Path, kind: str) -> list[Any]:
    """Return what a run gives that nothing interrupts."""
    if kind not in _whole_runs:
        _whole_runs[kind] = _run(ranks, root, kind)
    return _whole_runs[kind]


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
    whole_run = _whole_run(rank_pool, tmp_path / "one", kind)
    assert _run(rank_pool, tmp_path / "two", kind, "kill", killed, expect_killed=(0, 1)) == [None, None]
    resumed_run = _run(rank_pool, tmp_path / "two", kind)
    for (_, losses, expected, _), (first, resumed, found, status) in zip(whole_run, resumed_run, strict=True):
        assert (first, status) == (saved, 0)
        assert resumed == [loss for loss in losses if loss[0] > saved]
        assert 0 < len(resumed) < len(losses) == NUM_BATCHES * NUM_EPOCHS
        assert len({loss for _, _, loss in losses}) == len(losses), "the losses differ from step to step"
        assert differing(found, expected) == []
    steps = range(EVERY_STEPS, NUM_BATCHES * NUM_EPOCHS + 1, EVERY_STEPS)
    saves = {step: cnr.read_checkpoint(tmp_path / "two" / f"step-{step}") for step in steps}
    kinds = [saves[step].kind for step in steps]
    assert kinds == ["baseline"] + ["delta"] * (len(steps) - 1), "after the restore, too"
    assert saves[saved + EVERY_STEPS].num_rows < saves[EVERY_STEPS].num_rows


@pytest.mark.timeout(600)
def test_a_preempted_job_saves_on_all_ranks_and_goes_on(tmp_path: Path, rank_pool: RankPools) -> None:
    """A signal to one rank stops all of them, with the exit status of a preemption."""
    whole_run = _whole_run(rank_pool, tmp_path / "one", "list")
    preempted = _run(rank_pool, tmp_path / "two", "list", "preempt", 6)
    assert [(status, losses[-1][0]) for _, losses, _, status in preempted] == [(143, 7)] * 2
    assert cnr.latest(tmp_path / "two") == str(tmp_path / "two" / "step-7")
    resumed_run = _run(rank_pool, tmp_path / "two", "list")
    for (_, losses, expected, _), (first, resumed, found, _) in zip(whole_run, resumed_run, strict=True):
        assert (first, resumed) == (7, losses[7:])
        assert differing(found, expected) == []


@pytest.mark.timeout(600)
def test_an_error_ends_the_manager(tmp_path: Path, rank_pool: RankPools) -> None:
    """The background save ends well, and the next training of the same process can use the root."""
    for first, last in ((0, 6), (4, 10), (8, 11)):
        assert [
            (found, losses[-1][0], status)
            for found, losses, _, status in _run(rank_pool, tmp_path / "run", "list", "fail", last + 1)
        ] == [(first, last, 1)] * 2


def _unit_and_loader() -> tuple[PlainUnit, cnr.ReaderState[Tensor]]:
    return PlainUnit(), cnr.ReaderState(batch_ids(0, NUM_BATCHES, NUM_ROWS))


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
        return (self.module(data) - torch.arange(4.0).view(4, 1)).square().mean(), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
        """Return an optimizer and a scheduler."""
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    def on_train_step_end(self, state: State, data: Tensor, step: int, results: Any) -> None:
        """Keep the loss."""
        self.losses.append(results.loss.item())


def _train_auto_unit(root: Path, num_accumulated: int, fails_at: int | None) -> tuple[int, list[float], Whole]:
    unit, loader = OwnLoop(num_accumulated), cnr.ReaderState(batch_ids(0, NUM_BATCHES, NUM_ROWS))
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

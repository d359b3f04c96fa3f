"""PyTorch Lightning: a job that is killed, preempted or ended by an error goes on as if nothing had happened."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import torchrec_cnr as cnr
from tests.support.models import torchrec_job
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

pytestmark = pytest.mark.filterwarnings("ignore")  # those of Lightning


class PlainModule(pl.LightningModule):
    """A table of torch's own, whose gradients are sparse, beside a dense part that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.EmbeddingBag(NUM_ROWS, 4, sparse=True)
        self.dropout = nn.Dropout(0.3)
        self.over = nn.Linear(4, 1)
        self.losses: Losses = []

    def forward(self, batch: Tensor) -> Tensor:
        return torch.as_tensor(self.over(self.dropout(self.table(batch))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self(batch))
        self.losses.append((self.trainer.global_step + 1, self.trainer.current_epoch, loss.item()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]

    def extra(self) -> dict[str, Any]:
        """What the trainer does not know of."""
        return {"random": cnr.RandomState()}


class ShardedModule(PlainModule):
    """Tables in shards by rows, columns and as wholes, with a fused optimizer."""

    def configure_model(self) -> None:
        if not hasattr(self, "job"):
            self.job = torchrec_job(1)
            self.model = self.job.model

    def forward(self, batch: Tensor) -> Tensor:
        torch_batch = self.job.batch(torch.Generator().manual_seed(int(batch.sum())))
        return torch.as_tensor(self.model(torch_batch))

    def configure_optimizers(self) -> Any:
        return self.job.optimizers["dense"]

    def extra(self) -> dict[str, Any]:
        """The state of the optimizer of the tables."""
        return {"fused": self.job.model.fused_optimizer.state_dict()}


class ShardedStrategy(DDPStrategy):
    """Leaves the synchronization to `DistributedModelParallel`."""

    def configure_ddp(self) -> None:
        """Wrap nothing."""


class At(pl.Callback):
    """Does something before a step."""

    def __init__(self, step: int | None, act: Callable[[], None]) -> None:
        self._step, self._act = step, act

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Act before the first batch of the step."""
        if self._step is not None and trainer.global_step + 1 == self._step:
            self._step = None
            self._act()


def _loader(rank: int, kind: str) -> cnr.ReaderState[Tensor]:
    batches = batches_of(rank)
    if kind in ("stream", "sharded"):  # of no length, so that Lightning takes a batch in advance
        return cnr.ReaderState(lambda first: iter(batches[first:]))
    return cnr.ReaderState(batches)


def _trainer(callbacks: list[Any], **options: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", callbacks=callbacks, **quiet, **options)


def _fit(rank: int, root: str, kind: str, act: str | None = None, at: int | None = None) -> Outcome:
    seed()
    module = ShardedModule() if kind == "sharded" else PlainModule()
    loader = _loader(rank, kind)
    options: dict[str, Any] = {"every_steps": EVERY_STEPS, "policy": cnr.Consecutive()}
    if act == "preempt":
        options["preemption"] = cnr.Preemption()
    checkpoints = recipe("cnr_lightning.py").Checkpoints(root, loader, extra=PlainModule.extra, **options)
    if kind == "sharded":
        checkpoints.extra = ShardedModule.extra
    trainer = _trainer(
        [checkpoints, At(at, interruption(act, rank, checkpoints))],
        devices=2,
        strategy=ShardedStrategy() if kind == "sharded" else "ddp",
        max_epochs=NUM_EPOCHS,
        accumulate_grad_batches=2 if kind == "accumulated" else 1,
    )
    status = status_of(lambda: trainer.fit(module, loader), checkpoints, root)
    assert trainer.checkpoint_callbacks == [checkpoints], "Lightning would save, too"
    return checkpoints.first, module.losses, values(checkpoints.state(trainer, module)), status


LIGHTNING = Trainer(_fit)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "killed", "saved"),
    [
        ("list", 11, 8),  # the last batch of the first epoch
        ("stream", 15, 12),  # the middle of the second one
        ("accumulated", 7, 4),  # the last step of the first epoch, which has four
        ("sharded", 11, 8),
    ],
)
def test_a_killed_job_goes_on(tmp_path: Path, rank_pool: RankPools, kind: str, killed: int, saved: int) -> None:
    """Losses, weights, rows, optimizers, schedulers and counts are those of a job that nothing interrupted."""
    LIGHTNING.check_killed(rank_pool, tmp_path, kind, killed, saved, 2 if kind == "accumulated" else 1)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_preempted_job_saves_on_all_ranks_and_goes_on(tmp_path: Path, rank_pool: RankPools) -> None:
    """A signal to one rank stops all of them."""
    LIGHTNING.check_preempted(rank_pool, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_error_ends_the_manager(tmp_path: Path, rank_pool: RankPools) -> None:
    """The background save ends well, and a new trainer of the same process can use the root."""
    LIGHTNING.check_failed(rank_pool, tmp_path)


class LoggingModule(PlainModule):
    """Logs its loss, and counts what it validates."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append((self.trainer.global_step, self.trainer.current_epoch, -1.0))


def _fit_alone(root: Path, kind: str, fails_at: int | None, strict: bool = False, **options: Any) -> tuple[Losses, str]:
    module, loader = LoggingModule(), _loader(0, kind)
    stopping = EarlyStopping("loss", patience=50, check_on_train_epoch_end=True, strict=strict)
    checkpoints = recipe("cnr_lightning.py").Checkpoints(
        root,
        loader,
        extra=lambda module: {"stopping": stopping, **PlainModule.extra(module)},
        every_steps=EVERY_STEPS,
    )

    def fail() -> None:
        checkpoints.manager.wait()
        raise ZeroDivisionError

    trainer = _trainer([checkpoints, stopping, At(fails_at, fail)], devices=1, num_sanity_val_steps=0, **options)
    with suppress(ZeroDivisionError):
        trainer.fit(module, loader, [1, 2])
    return module.losses, str(stopping.state_dict())


@pytest.mark.long
@pytest.mark.parametrize("kind", ["list", "stream"])
@pytest.mark.parametrize(
    "options", [{"max_steps": 24}, {"max_epochs": 3}, {"max_epochs": 3, "val_check_interval": 3}], ids=str
)
def test_validation_and_early_stopping_go_on(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """Only the validation after the last step of an epoch is not made up for."""
    losses, stopping = _fit_alone(tmp_path / "one", kind, None, **options)
    for fails_at, saved in ((11, 8), (15, 12)):
        root = tmp_path / str(saved)
        _fit_alone(root, kind, fails_at, **options)
        resumed, stopping_then = _fit_alone(root, kind, None, **options)
        assert resumed == losses[losses.index(resumed[0]) :]
        assert (resumed[0][0], stopping_then) == (saved + 1, stopping)


@pytest.mark.long
def test_a_metric_of_the_epoch_is_lost_at_its_end(tmp_path: Path) -> None:
    """Which is why the page asks for ``strict=False``."""
    _fit_alone(tmp_path, "list", 11, strict=True, max_epochs=3)
    with pytest.raises(RuntimeError, match="Early stopping conditioned on metric `loss` which is not available"):
        _fit_alone(tmp_path, "list", None, strict=True, max_epochs=3)


@pytest.mark.long
def test_a_model_checkpoint_in_the_same_directory(tmp_path: Path) -> None:
    """Lightning removes its own files only, and the manager leaves them alone."""
    loader = _loader(0, "list")
    checkpoints = recipe("cnr_lightning.py").Checkpoints(tmp_path, loader, every_steps=2, keep=cnr.Keep(last=2))
    theirs = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=1, filename="{step}")
    module = PlainModule()
    _trainer([checkpoints, theirs], devices=1, max_epochs=1).fit(module, loader)
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=8.ckpt"]
    assert {path.name for path in tmp_path.glob("step-*") if path.is_dir()} >= {"step-6", "step-8"}
    table = cnr.load_table(tmp_path / "step-8", "model.table.weight")
    assert torch.equal(torch.as_tensor(table), module.table.weight.detach())
    with pytest.raises(MisconfigurationException, match="enable_checkpointing=False"):
        _trainer([checkpoints], devices=1, enable_checkpointing=False)

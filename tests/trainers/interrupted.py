"""Jobs of trainers that are killed, preempted or ended by an error, and what must hold when they go on.

Each trainer has a function that trains on a rank to the end, or to what happens at a step. It returns the step after
which it began, its losses, the values at the end, and the exit status.
"""

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchrec_cnr as cnr
from tests.support.models import Whole, differing
from tests.support.ranks import RankPools
from torchrec_cnr.manager.open_roots import open_roots

NUM_ROWS, NUM_BATCHES, NUM_EPOCHS, EVERY_STEPS = 50, 8, 3, 4
LIMIT_SECS = 240.0

Losses = list[tuple[int, int, float]]  # step, epoch, loss
Outcome = tuple[int, Losses, Whole, int]


def seed() -> None:
    """Begin as every job does."""
    torch.set_num_threads(1)
    random.seed(3)
    np.random.seed(3)


def batches_of(rank: int) -> list[Tensor]:
    """Return a rank's batches of four samples with three rows each."""
    generator = torch.Generator().manual_seed(7 + rank)
    return [torch.randint(NUM_ROWS, (4, 3), generator=generator) for _ in range(NUM_BATCHES)]


def loss_of(outputs: Tensor) -> Tensor:
    """Return a loss of [4, 1] outputs."""
    return (outputs - torch.arange(4.0).view(4, 1)).square().mean()


def interruption(act: str | None, rank: int, checkpoints: Any) -> Callable[[], None]:
    """Return what happens at a step: "kill" all ranks, "preempt" by a signal to rank 1, or "fail" on all."""

    def kill() -> None:
        checkpoints.manager.wait()
        os.kill(os.getpid(), signal.SIGKILL)

    def preempt() -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def fail() -> None:
        raise ZeroDivisionError

    return {"kill": kill, "preempt": preempt, "fail": fail, None: kill}[act]


def status_of(train: Callable[[], object], checkpoints: Any, root: str) -> int:
    """Train, and return the exit status; the manager is closed then, however it ends."""
    status = 0
    try:
        train()
    except SystemExit as end:
        status = int(str(end.code))
    except ZeroDivisionError:
        status = 1
    assert checkpoints.manager is None
    assert not any(path == root for _, path in open_roots._managers)
    return status


@dataclass
class Trainer:
    """A trainer on two ranks.

    Attributes:
        train: Trains on a rank: takes the rank, the root, a kind of job, and what happens at which step.
    """

    train: Callable[..., Outcome]
    _whole_runs: dict[str, list[Outcome]] = field(default_factory=dict)

    def run(self, ranks: RankPools, root: Path, kind: str, *more: Any, **options: Any) -> list[Any]:
        """Return the outcome of each rank."""
        return ranks(2).run(self.train, str(root), kind, *more, timeout_secs=LIMIT_SECS, **options)

    def whole_run(self, ranks: RankPools, root: Path, kind: str) -> list[Outcome]:
        """Return what a run gives that nothing interrupts."""
        if kind not in self._whole_runs:
            self._whole_runs[kind] = self.run(ranks, root, kind)
        return self._whole_runs[kind]

    def check_killed(
        self, ranks: RankPools, folder: Path, kind: str, killed: int, saved: int, batches_per_step: int = 1
    ) -> None:
        """A job that is killed in a step goes on after the last save as one that nothing interrupts."""
        whole_run = self.whole_run(ranks, folder / "one", kind)
        root = folder / "two"
        assert self.run(ranks, root, kind, "kill", killed, expect_killed=(0, 1)) == [None, None]
        resumed_run = self.run(ranks, root, kind)
        for (_, losses, expected, _), (first, resumed, found, status) in zip(whole_run, resumed_run, strict=True):
            assert (first, status) == (saved, 0)
            assert resumed == [loss for loss in losses if loss[0] > saved]
            assert 0 < len(resumed) < len(losses) == NUM_BATCHES * NUM_EPOCHS
            assert len({loss for _, _, loss in losses}) == len(losses), "the losses differ from step to step"
            assert differing(found, expected) == []
        steps = range(EVERY_STEPS, NUM_BATCHES * NUM_EPOCHS // batches_per_step + 1, EVERY_STEPS)
        saves = {step: cnr.read_checkpoint(root / f"step-{step}") for step in steps}
        kinds = [saves[step].kind for step in steps]
        assert kinds == ["baseline"] + ["delta"] * (len(steps) - 1), "after the restore, too"
        assert saves[saved + EVERY_STEPS].num_rows < saves[EVERY_STEPS].num_rows

    def check_preempted(self, ranks: RankPools, folder: Path) -> None:
        """A signal to one rank stops all of them at the same step, with the exit status of a preemption."""
        whole_run = self.whole_run(ranks, folder / "one", "list")
        root = folder / "two"
        preempted = self.run(ranks, root, "list", "preempt", 6)
        assert [(status, losses[-1][0]) for _, losses, _, status in preempted] == [(143, 7)] * 2
        assert cnr.latest(root) == str(root / "step-7")
        resumed_run = self.run(ranks, root, "list")
        for (_, losses, expected, _), (first, resumed, found, _) in zip(whole_run, resumed_run, strict=True):
            assert (first, resumed) == (7, losses[7:])
            assert differing(found, expected) == []

    def check_failed(self, ranks: RankPools, folder: Path) -> None:
        """The background save ends well, and the next training of the same process can use the root."""
        for first, last in ((0, 6), (4, 10), (8, 11)):
            outcomes = self.run(ranks, folder / "run", "list", "fail", last + 1)
            assert [(found, losses[-1][0], status) for found, losses, _, status in outcomes] == [(first, last, 1)] * 2

"""Continuous checkpoints, step by step: a model and a reader, a manager that saves both behind the training, a resume.

A checkpoint holds the rows modified since the one before, exactly, so that a resumed run equals one that was never
stopped, bit for bit; pass the manager ``quantization=cnr.AdaptiveAsymmetric(4)`` to save an eighth of the bytes.
"""

import argparse
import logging
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from click_data import open_stream
from delimited import DataError
from dlrm_model import Trainer, build_trainer, local_tensors
from samples import Samples, Stream, global_batches
from synthetic_criteo import SyntheticCriteo
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr

BATCH_SIZE = 50
KAFKA_SECS = 4.0  # a broker that does not answer for so long is gone


@dataclass
class Training:
    """A model, and where its reader stands among the samples."""

    trainer: Trainer
    reader: cnr.ReaderState[Samples]

    @classmethod
    def begin(cls, stream: Stream, samples: Samples, options: argparse.Namespace) -> "Training":
        """A model that has seen nothing; every one is made with the same weights."""

        def batches(first: int) -> Iterator[Samples]:
            return (samples[at : at + BATCH_SIZE] for at in range(first * BATCH_SIZE, len(samples), BATCH_SIZE))

        trainer = build_trainer(stream, options.num_rows, options.dim, sharding="table", seed=0)
        return cls(trainer, cnr.ReaderState(batches))

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: the live tensors, and the position behind the last sample trained."""
        return {**self.trainer.state({}), "reader": self.reader}

    def steps(self, first: int, last: int) -> Iterator[tuple[int, float]]:
        """Train from the step after ``first`` to ``last``, the end of an epoch: each step's number and loss."""
        step = first
        while step < last:
            for batch in self.reader:  # what is left of an epoch
                loss = self.trainer.train(batch)
                self.reader.trained()
                step += 1
                yield step, float(loss)


def train(options: argparse.Namespace) -> None:
    """Look whether Kafka is there, and what lies under the root; then begin or resume.

    Raises:
        DataError: It cannot, for a reason that a user can mend.
    """
    # TorchRec itself uses what torch deprecates, and says so.
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # more would add in another order from run to run
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not mark it as exported
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        rows = None if options.kafka is None else kafka_rows(options.kafka, may_make=options.command == "save")
        check_begin(options, cnr.latest(options.root, row_log=rows))
        run(options, rows, *read_samples(options))
    except (cnr.CNRError, CheckpointException, ImportError) as error:
        raise DataError(explained(error)) from error


def kafka_rows(place: str, may_make: bool) -> Any:
    """HOST:PORT/TOPIC as what checkpoints are told of Kafka; an error if nobody is there."""
    # Imported here, because only those who use Kafka need its client.
    from torchrec_cnr.kafka import KafkaRows  # noqa: PLC0415

    bootstrap, _, topic = place.rpartition("/")
    rows = KafkaRows(bootstrap, topic, timeout_secs=KAFKA_SECS)
    rows.open(may_make=may_make)
    return rows


def check_begin(options: argparse.Namespace, newest: str | None) -> None:
    """Refuse to load nothing, and to mix a new run with an old one."""
    if options.command == "load" and newest is None:
        raise DataError(f"{options.root} holds no checkpoint to load; `save` makes some")
    if options.command == "save" and newest is not None:
        raise DataError(f"{options.root} holds checkpoints; go on with `load`, or give another --root")


def read_samples(options: argparse.Namespace) -> tuple[Stream, Samples]:
    """The first samples of Criteo's file, or made-up ones of their shape."""
    stream = SyntheticCriteo(seed=0) if options.data is None else open_stream("criteo", options.data, seed=0)
    return stream, next(global_batches(stream, 0, options.num_samples))


def run(options: argparse.Namespace, rows: Any, stream: Stream, samples: Samples) -> None:
    """Begin or resume, and train to the last epoch with checkpoints behind it."""
    steps_per_epoch = math.ceil(len(samples) / BATCH_SIZE)
    training = Training.begin(stream, samples, options)
    manager = cnr.CheckpointManager(
        options.root,
        cnr.RowTracker(training.trainer.model),
        policy=cnr.Consecutive(),  # each checkpoint holds the rows modified since the one before
        every_steps=options.every,
        row_log=rows,
        on_saved=lambda saved: say_saved(saved, "files" if rows is None or saved.kind == "baseline" else "Kafka"),
    )
    first = manager.restore(training.state()) or 0
    last = options.epochs * steps_per_epoch
    if options.command == "load":
        epoch, step = divmod(first, steps_per_epoch)
        print(f"resumed behind step {first}: epoch {epoch + 1}, sample {step * BATCH_SIZE:,}")
    losses = []
    for step, loss in training.steps(first, last):
        losses.append(loss)
        with failures_told():
            manager.async_save(step, training.state)
        if step % steps_per_epoch == 0:
            mean = sum(losses[-steps_per_epoch:]) / len(losses[-steps_per_epoch:])
            print(f"epoch {step // steps_per_epoch} of {options.epochs}: mean loss {mean:.4f}", flush=True)
    with failures_told():
        manager.close()
    if options.command == "save":
        print(f"stopped behind step {last}: `load` goes on from the last checkpoint")
    if options.check:
        check(training, losses, Training.begin(stream, samples, options), first, last)


@contextmanager
def failures_told() -> Iterator[None]:
    """A save that failed, which shows when the next one begins, is no reason to stop training."""
    try:
        yield
    except (CheckpointException, cnr.CNRError) as error:
        print(f"not saved, its rows ride in the next checkpoint: {explained(error)}", file=sys.stderr, flush=True)


def check(training: Training, losses: list[float], other: Training, first: int, last: int) -> None:
    """Train once more from the beginning, without a stop, and compare losses and state bit for bit."""
    print(f"checking: {last:,} steps without a stop")
    all_losses = [loss for _, loss in other.steps(0, last)]
    ours, theirs = (dict(local_tensors("", each.state())) for each in (training, other))
    different = [name for name in ours.keys() | theirs.keys() if not same(ours.get(name), theirs.get(name))]
    if losses != all_losses[first:] or different:
        raise DataError(f"the resumed run differs from one that was never stopped: {sorted(different) or 'losses'}")
    print(f"{len(losses):,} losses and {len(ours)} tensors equal those of a run that was never stopped, bit for bit")


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors hold the same."""
    return one is not None and other is not None and torch.equal(one, other)


def say_saved(saved: cnr.Saved, where: str) -> None:
    """A line on a checkpoint."""
    num_mb = saved.phases.num_bytes / 1e6
    print(
        f"  step {saved.step:>5}: {saved.kind:8} {saved.num_rows:>7,} rows, {num_mb:5.2f} MB to {where},"
        f" training stood still for {1e3 * saved.stall_secs:3.0f} ms",
        flush=True,
    )


def explained(error: BaseException) -> str:
    """What went wrong, without the traces that DCP adds."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return next((str(failure) for failure, _ in failures), str(error))

"""Continuous checkpoints, step by step: a manager saves a model and its data loader in the background, and resumes.

A checkpoint contains the rows modified since the one before, exactly. A resumed run therefore equals an uninterrupted
one, bit for bit. Pass the manager ``quantization=cnr.AdaptiveAsymmetric(4)`` to save an eighth of the bytes.
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
KAFKA_SECS = 4.0  # time limit for an answer of the broker


@dataclass
class Training:
    """A model, and the position of its data loader in the samples."""

    trainer: Trainer
    reader: cnr.ReaderState[Samples]

    @classmethod
    def begin(cls, stream: Stream, samples: Samples, options: argparse.Namespace) -> "Training":
        """Create an untrained model, always with the same weights, and a data loader at the first sample."""

        def batches(first: int) -> Iterator[Samples]:
            return (samples[at : at + BATCH_SIZE] for at in range(first * BATCH_SIZE, len(samples), BATCH_SIZE))

        trainer = build_trainer(stream, options.num_rows, options.dim, sharding="table", seed=0)
        return cls(trainer, cnr.ReaderState(batches))

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint: the live tensors, and the position after the last trained sample."""
        return {**self.trainer.state({}), "reader": self.reader}

    def steps(self, first: int, last: int) -> Iterator[tuple[int, float]]:
        """Train from the step after ``first`` to ``last``, the end of an epoch, and yield each step and its loss."""
        step = first
        while step < last:
            for batch in self.reader:  # the remaining batches of an epoch
                loss = self.trainer.train(batch)
                self.reader.trained()
                step += 1
                yield step, float(loss)


def train(options: argparse.Namespace) -> None:
    """Check Kafka and the checkpoints under the root, then begin or resume training.

    Raises:
        DataError: Training cannot begin or resume, for a reason that the user can fix.
    """
    # TorchRec itself uses functions that torch deprecates, which causes warnings.
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # with more threads, the order of additions differs from run to run
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not mark it as exported
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        rows = None if options.kafka is None else kafka_rows(options.kafka, may_make=options.command == "save")
        check_begin(options, cnr.latest(options.root, row_log=rows))
        run(options, rows, *read_samples(options))
    except (cnr.CNRError, CheckpointException, ImportError) as error:
        raise DataError(explained(error)) from error


def kafka_rows(place: str, may_make: bool) -> Any:
    """Return the Kafka settings for HOST:PORT/TOPIC; raise an error if the broker does not answer."""
    # Imported here, because the client is needed only with --kafka.
    from torchrec_cnr.kafka import KafkaRows  # noqa: PLC0415

    bootstrap, _, topic = place.rpartition("/")
    rows = KafkaRows(bootstrap, topic, timeout_secs=KAFKA_SECS)
    rows.open(may_make=may_make)
    return rows


def check_begin(options: argparse.Namespace, newest: str | None) -> None:
    """Raise an error if there is no checkpoint to load, or if a new run would mix with an old one."""
    if options.command == "load" and newest is None:
        raise DataError(f"{options.root} contains no checkpoint to load; create some with `save`")
    if options.command == "save" and newest is not None:
        raise DataError(f"{options.root} already contains checkpoints; continue with `load`, or give another --root")


def read_samples(options: argparse.Namespace) -> tuple[Stream, Samples]:
    """Return the stream and its first samples, from Criteo's file or synthetic ones of the same shape."""
    stream = SyntheticCriteo(seed=0) if options.data is None else open_stream("criteo", options.data, seed=0)
    return stream, next(global_batches(stream, 0, options.num_samples))


def run(options: argparse.Namespace, rows: Any, stream: Stream, samples: Samples) -> None:
    """Begin or resume, and train to the last epoch, with checkpoints in the background."""
    steps_per_epoch = math.ceil(len(samples) / BATCH_SIZE)
    training = Training.begin(stream, samples, options)
    manager = cnr.CheckpointManager(
        options.root,
        cnr.RowTracker(training.trainer.model),
        policy=cnr.Consecutive(),  # each checkpoint contains the rows modified since the one before
        every_steps=options.every,
        row_log=rows,
        on_saved=lambda saved: say_saved(saved, "files" if rows is None or saved.kind == "baseline" else "Kafka"),
    )
    first = manager.restore(training.state()) or 0
    last = options.epochs * steps_per_epoch
    if options.command == "load":
        epoch, step = divmod(first, steps_per_epoch)
        print(f"resumed after step {first}: epoch {epoch + 1}, sample {step * BATCH_SIZE:,}")
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
        print(f"stopped after step {last}; `load` continues from the last checkpoint")
    if options.check:
        check(training, losses, Training.begin(stream, samples, options), first, last)


@contextmanager
def failures_told() -> Iterator[None]:
    """Print the error of a failed save, which is raised when the next save begins, and continue training."""
    try:
        yield
    except (CheckpointException, cnr.CNRError) as error:
        print(f"save failed, the next checkpoint includes its rows: {explained(error)}", file=sys.stderr, flush=True)


def check(training: Training, losses: list[float], other: Training, first: int, last: int) -> None:
    """Train again from the beginning, without interruption, and compare losses and state bit for bit."""
    print(f"checking: training {last:,} steps without interruption")
    all_losses = [loss for _, loss in other.steps(0, last)]
    ours, theirs = (dict(local_tensors("", each.state())) for each in (training, other))
    different = [name for name in ours.keys() | theirs.keys() if not same(ours.get(name), theirs.get(name))]
    if losses != all_losses[first:] or different:
        raise DataError(f"the resumed run differs from an uninterrupted run: {sorted(different) or 'losses'}")
    print(f"{len(losses):,} losses and {len(ours)} tensors equal those of an uninterrupted run, bit for bit")


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether two tensors are equal."""
    return one is not None and other is not None and torch.equal(one, other)


def say_saved(saved: cnr.Saved, where: str) -> None:
    """Print a line about a checkpoint."""
    num_mb = saved.phases.num_bytes / 1e6
    print(
        f"  step {saved.step:>5}: {saved.kind:8} {saved.num_rows:>7,} rows, {num_mb:5.2f} MB to {where},"
        f" training waited for {1e3 * saved.stall_secs:3.0f} ms",
        flush=True,
    )


def explained(error: BaseException) -> str:
    """Return the message of an error, without the tracebacks that DCP adds."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return next((str(failure) for failure, _ in failures), str(error))

"""A job that trains, saves, restores and is checked, and each of these steps alone."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.models import Job, Whole, differing, plain_job, state, train, whole
from torchrec_cnr.storage.row_log import RowLog


def adagrad_job(seed: int) -> Job:
    """A model with two tables and state of an optimizer."""
    return plain_job(seed, "adagrad")


class SavingJob:
    """A job that saves under a root.

    Args:
        root: The root.
        build: Makes such a model of other weights, from a seed.
        seed: Of the weights to begin with.
        policy: Of saves.
        row_log: Where the rows of deltas go, if not to files.
        group: Of saves, where training has the default one.
        writer: Options of the writer.

    Attributes:
        job: The model.
        saved: What its checkpoints must hold, by name; of saves that failed, too.
    """

    def __init__(
        self,
        root: str | PathLike[str],
        build: Callable[[int], Job] = adagrad_job,
        *,
        seed: int = 1,
        policy: cnr.Policy | None = None,
        row_log: RowLog | None = None,
        group: dist.ProcessGroup | None = None,
        **writer: Any,
    ) -> None:
        self.root = str(root)
        self.group = group
        self.build = build
        self.policy = policy if policy is not None else cnr.Consecutive()
        self.row_log = row_log
        self.saved: dict[str, Whole] = {}
        self.num_trained = 0
        self._options = writer
        self.begin(seed)

    def begin(self, seed: int) -> None:
        """Begin with other weights and nothing else, as a new process does."""
        self.job = self.build(seed)
        self.tracker = cnr.RowTracker(self.job.model)
        self.planner = cnr.CNRSavePlanner(self.tracker, policy=self.policy)
        self.writer = models.writer(f"{self.root}/unused", row_log=self.row_log, **self._options)

    def path(self, name: str | int) -> str:
        """A checkpoint's path or URL."""
        return f"{self.root}/{name}"

    def train(self, num_batches: int = 1) -> None:
        """Train some batches, each another one."""
        for _ in range(num_batches):
            self.num_trained += 1
            train(self.job, self.num_trained)

    def save(self, name: str | int, *, planner: cnr.CNRSavePlanner | None = None, **plain: Any) -> Whole:
        """Save, with some plain values; what the checkpoint must hold."""
        live = state(self.job, **plain)
        self.saved[str(name)] = whole(live)
        dcp.save(
            live,
            checkpoint_id=self.path(name),
            storage_writer=self.writer,
            planner=planner if planner is not None else self.planner,
            process_group=self.group,
            no_dist=not dist.is_initialized(),
        )
        return self.saved[str(name)]

    def train_and_save(self, *names: str | int) -> Whole:
        """Train a batch and save, for each name; what the last checkpoint must hold."""
        for name in names:
            self.train()
            self.save(name)
        return self.saved[str(names[-1])]

    def async_save(
        self,
        name: str | int,
        executor: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
        **plain: Any,
    ) -> "Future[Any]":
        """Begin an asynchronous save."""
        live = state(self.job, **plain)
        self.saved[str(name)] = whole(live)
        return models.save_behind(live, self.path(name), self.writer, self.planner, group=self.group, executor=executor)

    def failure(self, name: str | int) -> BaseException:
        """Save, which fails: what with."""
        return faults.failure_of(lambda: self.save(name))

    def restore(self, name: str | int | None = None, **plain: Any) -> str:
        """Go on from a checkpoint, by default the newest, which has such plain values; its name."""
        path = self.path(name) if name is not None else cnr.latest(self.root, row_log=self.row_log)
        assert path is not None
        loaded = models.load(self.job, path, self.tracker, row_log=self.row_log, **plain)
        self.saved.setdefault(Path(path).name, loaded)
        return Path(path).name

    def restart(self, seed: int, **plain: Any) -> str:
        """Go on from the newest checkpoint as another process would; its name."""
        self.close()
        self.begin(seed)
        return self.restore(**plain)

    def assert_loads(self, name: str | int, expected: Whole | None = None, **options: Any) -> None:
        """Another job gets from a checkpoint what was saved, bit for bit."""
        expected = self.saved[str(name)] if expected is None else expected
        assert_loads(self.path(name), expected, self.build, row_log=self.row_log, **options)

    def close(self) -> None:
        """Give back what it took."""
        self.writer.close()
        self.tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def saver(job: Job) -> tuple[cnr.RowTracker, cnr.CNRSavePlanner]:
    """A tracker, and a planner of deltas that are each based on the one before."""
    tracker = cnr.RowTracker(job.model)
    return tracker, cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())


def save(
    saved: Job | dict[str, Any], path: str | PathLike[str], planner: cnr.CNRSavePlanner | None = None, **writer: Any
) -> Whole:
    """Save a job, or a state dict, by default as a baseline without a lineage; what the checkpoint must hold."""
    live = state(saved) if isinstance(saved, Job) else saved
    held = whole(live)
    dcp.save(live, storage_writer=models.writer(path, **writer), planner=planner or cnr.CNRSavePlanner())
    return held


def assert_loads(path: str, expected: Whole, build: Callable[[int], Job] = adagrad_job, **options: Any) -> None:
    """A job of other weights gets exactly these from a checkpoint."""
    job = build(99)
    assert differing(whole(state(job)), expected)
    assert differing(models.load(job, path, **options), expected) == []


def load_into(target: dict[str, Any], path: str | PathLike[str], **options: Any) -> cnr.LoadReport:
    """Load a checkpoint into a state dict, with options of the planner."""
    planner = cnr.CNRLoadPlanner(**options)
    dcp.load(target, storage_reader=cnr.CNRStorageReader(path), planner=planner)
    return planner.report


def refusal(target: dict[str, Any], path: str | PathLike[str], **options: Any) -> str:
    """The one message with which a load is refused, by the coordinator for all ranks."""
    failures = faults.failures_of(lambda: load_into(target, path, **options))
    assert [type(cause) for cause in failures.values()] == [cnr.StateMismatchError]
    assert list(failures) == [0], "the coordinator refuses, for all"
    return str(failures[0])


@contextmanager
def warnings() -> Iterator[list[str]]:
    """What the package warns of."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchrec_cnr").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("torchrec_cnr").removeHandler(handler)

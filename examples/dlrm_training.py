"""The training run of one rank: step, save, resume. The checkpoint calls are those of PyTorch.

dcp.save(state, checkpoint_id=…, storage_writer=writer, planner=planner)
dcp.async_save(state, checkpoint_id=…, storage_writer=writer, planner=planner, process_group=…)
dcp.load(state, storage_reader=…, planner=…)
"""

import concurrent.futures
import hashlib
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_places import is_committed, step_path, steps_on_disk
from checkpoint_report import (
    TABLE_HEAD,
    Resume,
    draw_report,
    ranks,
    read_record,
    read_records,
    summary,
)
from click_data import open_stream
from delimited import DataError
from dlrm_model import build_trainer, local_tensors
from samples import global_batches, rank_share
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from train_options import Options

import torchrec_cnr as cnr

WARM_UP_STEPS = 20

POLICIES: dict[str, Callable[[], cnr.Policy]] = {
    "full": cnr.Full,
    "oneshot": cnr.OneShot,
    "consecutive": cnr.Consecutive,
    "intermittent": cnr.Intermittent,
}


@dataclass(frozen=True)
class _Saving:
    """A save in the background.

    Attributes:
        step: The step after which it began.
        secs: Seconds for which training waited.
        mean_loss: Mean loss of the steps since the save before.
        future: The future that DCP returned, which is done when the save ends.
    """

    step: int
    secs: float
    mean_loss: float
    future: concurrent.futures.Future[Any]


class _Clock:
    """A measurement of the steps per second, saves included, without the first steps, which compile and fill caches."""

    def __init__(self, first: int) -> None:
        self._first = self._last = first + WARM_UP_STEPS
        self._began = self._ended = time.monotonic()

    def has_done(self, step: int) -> None:
        """Record the end of a step."""
        self._ended = time.monotonic()
        if step <= self._first:
            self._began = self._ended
        self._last = max(step, self._first)

    def line(self) -> str:
        """Return the rate as a line of text."""
        rate = (self._last - self._first) / max(self._ended - self._began, 1e-9)
        return f"{rate:.2f} steps per second" if self._last > self._first else "too few steps to measure their rate"


class WriterKilledInSave(cnr.CNRStorageWriter):
    """A writer that simulates the failure of a machine: it kills its process after writing data, before the commit."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's data files, then kill the process."""
        super().write_data(plan, planner).wait()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a process does not survive SIGKILL")


def train(options: Options) -> None:
    """Train as one rank of a run, from its first step or its newest checkpoint to its last step."""
    # TorchRec itself uses functions that torch deprecates, which causes warnings on every rank.
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    # With more threads, the order of additions differs from run to run, and a resumed run could not be bit-exact.
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Run(options).train()
    dist.destroy_process_group()


class Run:
    """A run: the model, its data, its checkpoints, and its progress."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._stream = open_stream(options.format, options.data, options.seed)
        self._trainer = build_trainer(self._stream, options.num_rows, options.dim, options.sharding, options.seed)
        self._tracker = cnr.RowTracker(self._trainer.model)
        self._planner = cnr.CNRSavePlanner(self._tracker, policy=POLICIES[options.policy]())
        self._writer = self._make_writer(cnr.CNRStorageWriter)
        self._saving: _Saving | None = None
        # The collectives of a save in the background must not interfere with those of training.
        self._group = dist.new_group(backend="gloo") if options.asynchronous else None
        self._progress: dict[str, Any] = {"step": 0, "next_sample": 0, "resumes": []}
        if options.resume:
            self._resume()

    def _resume(self) -> None:
        """Load the newest checkpoint, to continue the run that saved it."""
        root = self._options.root
        head = cnr.latest(str(root))
        if head is None:
            raise DataError(f"every checkpoint under {root} is corrupt")
        self._check_tables(head)
        uncommitted = [step for step in steps_on_disk(root) if not is_committed(step_path(root, step))]
        state = self._trainer.state(self._progress)
        dcp.load(  # type: ignore[attr-defined]  # torch does not mark it as exported
            state, storage_reader=cnr.CNRStorageReader(head), planner=cnr.CNRLoadPlanner(self._tracker)
        )
        # The load wrote to the live tensors in place; other items of the state were replaced.
        self._progress = state["progress"]
        step = self._progress["step"]
        killed_save = max((late for late in uncommitted if late > step), default=0)
        self._progress["resumes"] = [*self._progress["resumes"], [step, self._world_size, killed_save]]
        self._say(f"resumed from {head}, saved by {ranks(cnr.read_checkpoint(head).manifest.world_size)}")

    def _check_tables(self, head: str) -> None:
        """Raise an error that names the difference if a checkpoint has other tables."""
        tensors = cnr.read_checkpoint(head).manifest.tensors
        saved = {name: tuple(entry.size) for name, entry in tensors.items() if entry.is_table}
        ours = self._trainer.table_sizes()
        for name in sorted(saved.keys() | ours.keys()):
            if saved.get(name) != ours.get(name):
                raise DataError(
                    f"{head} has {name.split('.')[-2]} of size {saved.get(name)}, these options make {ours.get(name)};"
                    " resume with the options of the run that saved it"
                )

    def train(self) -> None:
        """Train to the last step, with checkpoints on schedule, and print a report."""
        options, first = self._options, self._progress["step"]
        self._say(TABLE_HEAD + "    secs  mean loss")
        losses_since_save: list[float] = []
        clock = _Clock(first)
        with _LossFile(options.losses if self._rank == 0 else None, first) as loss_file:
            for step, loss in self._steps(first):
                loss_file.write(step, loss)
                losses_since_save.append(loss)
                if options.saves_at(step):
                    self._save(step, sum(losses_since_save) / len(losses_since_save))
                    losses_since_save.clear()
                clock.has_done(step)
        self._finish_save()
        self._say(clock.line())
        digest = self._digest()
        self._say(f"state after step {self._progress['step']} on {ranks(self._world_size)}: sha256 {digest}")
        if self._rank == 0:
            self._report()

    def _steps(self, first: int) -> Iterator[tuple[int, float]]:
        """Train from the step after ``first``, and yield each step and its loss over all ranks."""
        options = self._options
        batches = global_batches(self._stream, self._progress["next_sample"], options.batch_size)
        for step, batch in zip(range(first + 1, options.steps + 1), batches, strict=False):
            loss = self._trainer.train(rank_share(batch, self._rank, self._world_size))
            dist.all_reduce(loss)
            self._progress["step"] = step
            self._progress["next_sample"] += options.batch_size
            yield step, float(loss) / self._world_size

    def _save(self, step: int, mean_loss: float) -> None:
        started = time.monotonic()
        self._finish_save()
        is_last_rank = self._rank == self._world_size - 1
        dies = is_last_rank and step == self._options.crash_at
        saving: dict[str, Any] = {
            "checkpoint_id": str(step_path(self._options.root, step)),
            "storage_writer": self._make_writer(WriterKilledInSave) if dies else self._writer,
            "planner": self._planner,
            "process_group": self._group,
        }
        state = self._trainer.state(self._progress)
        if self._options.asynchronous:
            future = dcp.async_save(state, **saving)  # type: ignore[attr-defined]  # torch does not mark it as exported
            assert isinstance(future, concurrent.futures.Future)  # true because the writer is also the stager
            self._saving = _Saving(step, time.monotonic() - started, mean_loss, future)
        else:
            dcp.save(state, **saving)  # type: ignore[attr-defined]
            self._say_saved(step, time.monotonic() - started, mean_loss)

    def _finish_save(self) -> None:
        """Wait for the save in the background; raise its error if it failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.future.result()
            self._say_saved(saving.step, saving.secs, saving.mean_loss)

    def _say_saved(self, step: int, secs: float, mean_loss: float) -> None:
        """Print a line about a checkpoint; ``secs`` are the seconds for which training waited."""
        if self._rank == 0:
            self._say(f"{read_record(self._options.root, step).line()}  {secs:>6.2f}  {mean_loss:>9.4f}")

    def _make_writer(self, kind: type[cnr.CNRStorageWriter]) -> cnr.CNRStorageWriter:
        options = self._options
        quantization: cnr.Scheme = cnr.AdaptiveAsymmetric(min(options.bits, 8))
        if options.bits >= 8:
            quantization = cnr.Asymmetric(8) if options.bits == 8 else cnr.NoQuantization()
        return kind(str(options.root), quantization=quantization)

    def _report(self) -> None:
        options = self._options
        records = read_records(options.root)
        if not records:
            return
        self._say(summary(records))
        if options.report is not None:
            resumes = [Resume(step, num_ranks, killed or None) for step, num_ranks, killed in self._progress["resumes"]]
            bits = "exact" if options.bits == 32 else f"{options.bits}-bit"
            draw_report(options.report, records, resumes, f"{options.policy} checkpoints, {bits} rows")
            self._say(f"drawn: {options.report}")

    def _digest(self) -> str:
        """Return a digest of the state, over the parts of all ranks."""
        mine = hashlib.sha256()
        for name, tensor in sorted(local_tensors("", self._trainer.state({}))):
            mine.update(name.encode())
            mine.update(tensor.detach().contiguous().view(-1).numpy().tobytes())
        digests: list[str | None] = [None] * self._world_size
        dist.all_gather_object(digests, mine.hexdigest())
        return hashlib.sha256(" ".join(map(str, digests)).encode()).hexdigest()

    def _say(self, line: str) -> None:
        if self._rank == 0:
            print(line, flush=True)


class _LossFile:
    """A file with one line per step: its number, and its loss as a hexadecimal float, which is exact.

    A resumed run keeps the lines up to its first step. So the file of a killed and resumed run can be compared with
    that of an uninterrupted run.
    """

    def __init__(self, path: Path | None, first_step: int) -> None:
        self._file: TextIO | None = None
        if path is None:
            return
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if int(line.split()[0]) <= first_step]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self._file.writelines(line + "\n" for line in kept)

    def write(self, step: int, loss: float) -> None:
        """Add a line and flush it, because the process may be killed afterwards."""
        if self._file is not None:
            self._file.write(f"{step} {loss.hex()}\n")
            self._file.flush()

    def __enter__(self) -> "_LossFile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

"""One rank's training run: step, save when due, resume. The checkpoint calls are the stock ones of PyTorch.

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
    """A save behind training.

    Attributes:
        step: The step that it is of.
        secs: How long training stood still for it.
        mean_loss: Of the steps since the save before.
        future: Its end.
    """

    step: int
    secs: float
    mean_loss: float
    future: concurrent.futures.Future[Any]


class _Clock:
    """How fast steps are made, saves included; the first ones, which compile and fill caches, do not count."""

    def __init__(self, first: int) -> None:
        self._first = self._last = first + WARM_UP_STEPS
        self._began = self._ended = time.monotonic()

    def has_done(self, step: int) -> None:
        """A step is done."""
        self._ended = time.monotonic()
        if step <= self._first:
            self._began = self._ended
        self._last = max(step, self._first)

    def line(self) -> str:
        """For the user."""
        rate = (self._last - self._first) / max(self._ended - self._began, 1e-9)
        return f"{rate:.2f} steps a second" if self._last > self._first else "too few steps to tell their rate"


class WriterKilledInSave(cnr.CNRStorageWriter):
    """Ends its process, as a machine that fails would, when this rank's packs are written but nothing is committed."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write, then die."""
        super().write_data(plan, planner).wait()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a process does not survive SIGKILL")


def train(options: Options) -> None:
    """Be one rank of a run, from its first step or from its newest checkpoint to its last step."""
    # TorchRec itself uses what torch deprecates, and says so on every rank.
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    # More threads would add in another order from run to run, and a resumed run could not be bit-exact.
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Run(options).train()
    dist.destroy_process_group()


class Run:
    """The model, its data, its checkpoints, and how far it is."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._stream = open_stream(options.format, options.data, options.seed)
        self._trainer = build_trainer(self._stream, options.num_rows, options.dim, options.sharding, options.seed)
        self._tracker = cnr.RowTracker(self._trainer.model)
        self._planner = cnr.CNRSavePlanner(self._tracker, policy=POLICIES[options.policy]())
        self._writer = self._make_writer(cnr.CNRStorageWriter)
        self._saving: _Saving | None = None
        # A group of its own: a save behind training must not meet training's collectives.
        self._group = dist.new_group(backend="gloo") if options.asynchronous else None
        self._progress: dict[str, Any] = {"step": 0, "next_sample": 0, "resumes": []}
        if options.resume:
            self._resume()

    def _resume(self) -> None:
        """Load the newest checkpoint; from here on this run is the one that took it."""
        root = self._options.root
        head = cnr.latest(str(root))
        if head is None:
            raise DataError(f"every checkpoint under {root} is damaged")
        self._check_tables(head)
        uncommitted = [step for step in steps_on_disk(root) if not is_committed(step_path(root, step))]
        state = self._trainer.state(self._progress)
        dcp.load(  # type: ignore[attr-defined]  # torch does not mark it as exported
            state, storage_reader=cnr.CNRStorageReader(head), planner=cnr.CNRLoadPlanner(self._tracker)
        )
        # The tensors of the state are the live ones, and now hold what was loaded. The rest was replaced.
        self._progress = state["progress"]
        step = self._progress["step"]
        killed_save = max((late for late in uncommitted if late > step), default=0)
        self._progress["resumes"] = [*self._progress["resumes"], [step, self._world_size, killed_save]]
        self._say(f"resumed from {head}, taken by {cnr.read_checkpoint(head).manifest.world_size} ranks")

    def _check_tables(self, head: str) -> None:
        """Refuse a checkpoint of other tables with a line that names the difference."""
        tensors = cnr.read_checkpoint(head).manifest.tensors
        saved = {name: tuple(entry.size) for name, entry in tensors.items() if entry.is_table}
        ours = self._trainer.table_sizes()
        for name in sorted(saved.keys() | ours.keys()):
            if saved.get(name) != ours.get(name):
                raise DataError(
                    f"{head} has {name.split('.')[-2]} of size {saved.get(name)}, these options make {ours.get(name)};"
                    " resume with the options it was trained with"
                )

    def train(self) -> None:
        """Train to the last step, with a checkpoint whenever one is due; then report."""
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
        self._say(f"state after step {self._progress['step']} on {self._world_size} ranks: sha256 {digest}")
        if self._rank == 0:
            self._report()

    def _steps(self, first: int) -> Iterator[tuple[int, float]]:
        """Train from the step after ``first`` on: each step's number and its loss over all ranks."""
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
            assert isinstance(future, concurrent.futures.Future)  # as it is with the writer for a stager
            self._saving = _Saving(step, time.monotonic() - started, mean_loss, future)
        else:
            dcp.save(state, **saving)  # type: ignore[attr-defined]
            self._say_saved(step, time.monotonic() - started, mean_loss)

    def _finish_save(self) -> None:
        """Wait for the save behind training, which raises what it failed with."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.future.result()
            self._say_saved(saving.step, saving.secs, saving.mean_loss)

    def _say_saved(self, step: int, secs: float, mean_loss: float) -> None:
        """A line on a checkpoint; ``secs`` is how long training stood still for it."""
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
            resumes = [Resume(step, ranks, killed or None) for step, ranks, killed in self._progress["resumes"]]
            bits = "exact" if options.bits == 32 else f"{options.bits}-bit"
            draw_report(options.report, records, resumes, f"{options.policy} checkpoints, {bits} rows")
            self._say(f"drawn: {options.report}")

    def _digest(self) -> str:
        """A digest of every rank's part of the state."""
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
    """One line a step: its number, and its loss as a hexadecimal float, which is exact.

    A resumed run keeps the lines up to its first step, so that the file of a run that was killed and resumed can be
    compared with that of one that was not.
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
        """Add a line, at once: the process may be killed after it."""
        if self._file is not None:
            self._file.write(f"{step} {loss.hex()}\n")
            self._file.flush()

    def __enter__(self) -> "_LossFile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

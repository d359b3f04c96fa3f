"""A job on several gloo ranks that a signal stops, to be started by torchrun. Rank 0 prints the results as JSON.

At each signal, all ranks save at the end of a step: with a manager, which writes a delta of the modified rows, or with
plain DCP, which writes all rows. The time counts from the signal, in the middle of a step, until the save has returned.
"""

import argparse
import json
import os
import random
import shutil
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import torchrec_cnr as cnr
from benchmarks.support.jobs.table_models import TableModel, TableSizes, num_bytes

IDS = 64  # of each rank and table in a step
WARM_UP_STEPS = 3  # before the step of the signal
NEVER = 10**6  # steps until a checkpoint is due without a signal
SENDER = 1  # the rank that gets the signal
TIMEOUT = timedelta(seconds=120)


def main() -> None:
    """Measure rounds of preemptions; print the seconds of the whole and of the save alone, and the bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="an empty folder")
    parser.add_argument("--rows", type=int, required=True, help="rows of each table; a table per rank")
    parser.add_argument("--dim", type=int, required=True, help="values per row")
    parser.add_argument("--step-secs", type=float, required=True, help="seconds of a step")
    parser.add_argument("--rounds", type=int, required=True, help="measured rounds")
    parser.add_argument("--shares", type=float, nargs="+", required=True, help="shares of rows that are modified")
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.set_num_threads(1)
    sizes = TableSizes(dist.get_world_size(), options.rows, options.dim)
    job = _Job(TableModel(sizes), options.root, options.step_secs)
    results: dict[str, list[tuple[float, float, int]]] = {}
    for number in range(options.rounds + 1):
        for name, share in {**{f"{share:g}": share for share in options.shares}, "plain": None}.items():
            found = job.stop_plain() if share is None else job.stop_managed(share)
            if number > 0:  # the first round compiles, and fills caches
                results.setdefault(name, []).append(found)
    if dist.get_rank() == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


class _Job:
    """Training steps of a fixed length, and the ways to save after a signal.

    Args:
        model: The tables.
        root: The folder of the checkpoints.
        step_secs: The length of a step.
    """

    def __init__(self, model: TableModel, root: Path, step_secs: float) -> None:
        self._model = model
        self._root = root
        self._step_secs = step_secs
        self._rank = dist.get_rank()
        self._signalled_at = 0.0
        torch.manual_seed(self._rank)

    def _step(self) -> None:
        """Train on a small batch, which all ranks exchange, for the length of a step."""
        ends_at = time.monotonic() + self._step_secs
        ids = [torch.randint(self._model.sizes.num_rows, (IDS,)) for _ in range(self._model.sizes.num_tables)]
        self._model.step(self._model.batch(ids))
        time.sleep(max(0.0, ends_at - time.monotonic()))

    def _signal_soon(self) -> None:
        """Send SIGTERM to this process in the middle of the next step, if it is the one that gets it."""
        self._signalled_at = 0.0
        if self._rank == SENDER % dist.get_world_size():
            timer = threading.Timer(random.uniform(0, self._step_secs), self._signal)
            timer.start()

    def _signal(self) -> None:
        self._signalled_at = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)

    def _secs(self) -> float:
        """Return the seconds from the signal until now, on the rank that commits. Collective."""
        now = time.monotonic()
        times: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(times, self._signalled_at)
        return now - max(times)  # the clock is that of the machine

    def _cleared(self) -> Path:
        if self._rank == 0:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root.mkdir()
        dist.barrier()
        return self._root

    def stop_managed(self, share: float) -> tuple[float, float, int]:
        """Return the seconds from a signal to the commit of a delta, of the save alone, and the checkpoint's bytes."""
        root = self._cleared()
        tracker = cnr.RowTracker(self._model.sharded)
        scheme = cnr.AdaptiveAsymmetric(bits=4)
        manager = cnr.CheckpointManager(
            root, tracker, quantization=scheme, every_steps=NEVER, preemption=cnr.Preemption(overlap=False)
        )
        manager.save(0, self._model.state(), force=True)
        self._model.modify(share)
        step = 0
        while not manager.should_stop:
            step += 1
            if step == WARM_UP_STEPS:
                self._signal_soon()
            self._step()
            saved = manager.save(step, self._model.state)
        secs = self._secs()
        assert saved is not None
        assert saved.kind == "delta"
        manager.close()
        tracker.close()
        return secs, saved.secs, num_bytes(root / f"step-{step}")

    def stop_plain(self) -> tuple[float, float, int]:
        """Return the seconds from a signal to the end of a save of plain DCP, of the save alone, and its bytes."""
        root = self._cleared()
        received = torch.zeros(1)
        earlier = signal.signal(signal.SIGTERM, lambda number, frame: received.fill_(1))
        step = 0
        while True:
            step += 1
            if step == WARM_UP_STEPS:
                self._signal_soon()
            self._step()
            agreed = received.clone()
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
            if agreed.item():
                break
        began = time.monotonic()
        self._model.save(FileSystemWriter(root))
        save_secs = time.monotonic() - began
        secs = self._secs()
        signal.signal(signal.SIGTERM, earlier)
        return secs, save_secs, num_bytes(root)


if __name__ == "__main__":
    main()

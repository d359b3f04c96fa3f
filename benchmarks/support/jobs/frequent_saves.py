"""The example's training on several gloo ranks with a local checkpoint every second, to be started by torchrun.

Blocks of training without saves and with them alternate. Rank 0 prints the results as JSON.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchrec_cnr as cnr
from benchmarks.support.jobs.example_training import ExampleTraining
from benchmarks.support.jobs.table_models import num_bytes
from benchmarks.support.process_memory import resident_mib

BATCH_SIZE, DIM = 4096, 32
DURABLE_SECS = 60.0


@dataclass(frozen=True)
class Block:
    """The results of a block of training without saves, and the next one with them.

    Attributes:
        rate_without: Steps per second without saves.
        rate: Steps per second with saves.
        num_saves: Number of local checkpoints that were committed.
        num_durable: Number of durable ones.
        save_secs: Median seconds of a local save, in the background.
        stall_secs: Median seconds for which training waited for one.
        latest_secs: Seconds to find the newest local checkpoint.
        list_secs: Seconds to list all local checkpoints, as ``cnr ls`` does.
        memory_mib: Resident memory of the rank with most of it.
        num_rows: Rows of the local checkpoints, of all deltas.
        num_durable_rows: Rows of the durable ones, of all deltas.
        local_bytes: Bytes of all files under the local root.
        durable_bytes: Bytes of all files under the durable one.
    """

    rate_without: float
    rate: float
    num_saves: int
    num_durable: int
    save_secs: float
    stall_secs: float
    latest_secs: float
    list_secs: float
    memory_mib: float
    num_rows: int
    num_durable_rows: int
    local_bytes: int
    durable_bytes: int


@dataclass(frozen=True)
class Sizes:
    """Bytes of the state, and of a restore.

    Attributes:
        full: A full checkpoint as the durable ones store rows.
        full_exact: One as the local ones do.
        restored: What a restore of the newest durable checkpoint reads, without manifests, on all ranks.
    """

    full: int
    full_exact: int
    restored: int


def main() -> None:
    """Measure blocks of training, and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="the folder of the checkpoints")
    parser.add_argument("--rows", type=int, required=True, help="rows of each large table")
    parser.add_argument("--blocks", type=int, required=True, help="number of blocks")
    parser.add_argument("--secs-without", type=float, required=True, help="seconds of a block without saves")
    parser.add_argument("--secs", type=float, required=True, help="seconds of a block with saves")
    options = parser.parse_args()
    job = _Job(options.root, options.rows)
    job.train(options.secs_without, saves=False)  # compiles, and fills caches
    job.train(min(5.0, options.secs), saves=True)
    blocks = [asdict(job.block(options.secs_without, options.secs)) for _ in range(options.blocks)]
    sizes = job.close()
    if dist.get_rank() == 0:
        print(json.dumps({"blocks": blocks, "sizes": asdict(sizes)}), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # DDP keeps gloo's threads alive, which could abort the process while Python shuts down


class _Job:
    """The example's model, its clicks, and a manager that saves to a local root every second.

    Args:
        root: The folder of the checkpoints.
        num_rows: Rows of each large table.
    """

    def __init__(self, root: Path, num_rows: int) -> None:
        training = ExampleTraining(num_rows, DIM, BATCH_SIZE)
        self._root = root
        self._trainer, self._batches = training.trainer, training.batches(0)
        self._step = 0
        self._saved, self._durable = list[cnr.Saved](), list[cnr.Saved]()
        local = cnr.LocalCheckpoints(root.with_name("local"), every_secs=1, on_saved=self._saved.append)
        self._local_root = local.root_of(str(root))
        self._tracker = cnr.RowTracker(self._trainer.model)
        self._manager = cnr.CheckpointManager(
            root,
            self._tracker,
            quantization=cnr.AdaptiveAsymmetric(bits=4),
            every_secs=DURABLE_SECS,
            keep=cnr.Keep(last=1),
            local_checkpoints=local,
            on_saved=self._durable.append,
        )
        self._manager.restore(self._state())

    def train(self, secs: float, saves: bool) -> float:
        """Train for some seconds by the clock of rank 0, and return the steps per second."""
        first, began = self._step, time.monotonic()
        is_over = torch.zeros(1)
        while not is_over.item():
            self._trainer.train(next(self._batches))
            self._step += 1
            if saves:
                self._manager.async_save(self._step, self._state)
            is_over.fill_(float(dist.get_rank() == 0 and time.monotonic() - began >= secs))
            dist.all_reduce(is_over)
        rate = (self._step - first) / (time.monotonic() - began)
        self._manager.wait()
        return rate

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._trainer.state({"step": self._step})
        return state

    def block(self, secs_without: float, secs: float) -> Block:
        """Train without saves and then with them."""
        rate_without = self.train(secs_without, saves=False)
        self._saved.clear()
        self._durable.clear()
        rate = self.train(secs, saves=True)
        memory = torch.tensor(resident_mib())
        dist.all_reduce(memory, dist.ReduceOp.MAX)
        saved, durable = list(self._saved), list(self._durable)
        began = time.monotonic()
        cnr.latest(self._local_root)
        latest_secs, began = time.monotonic() - began, time.monotonic()
        cnr.list_checkpoints(self._local_root)
        list_secs = time.monotonic() - began
        dist.barrier()
        return Block(
            rate_without,
            rate,
            len(saved),
            len(durable),
            statistics.median(each.secs for each in saved),
            statistics.median(each.stall_secs for each in saved),
            latest_secs,
            list_secs,
            float(memory),
            sum(each.num_rows for each in saved if each.kind == "delta"),
            sum(each.num_rows for each in durable if each.kind == "delta"),
            num_bytes(self._local_root),
            num_bytes(self._root),
        )

    def close(self) -> Sizes:
        """End the job, and measure a restore and full checkpoints."""
        self._manager.close()
        self._tracker.close()
        copies = cnr.LocalCopies(self._root.with_name(f"copies-{dist.get_rank()}"))
        cnr.restore_newest(self._root, self._state(), local=copies)
        restored = torch.tensor(copies.num_store_bytes)
        dist.all_reduce(restored)
        full, full_exact = (self._full_bytes(bits) for bits in (4, None))
        return Sizes(full, full_exact, int(restored))

    def _full_bytes(self, bits: int | None) -> int:
        path = self._root.with_name(f"full-{bits}")
        writer = cnr.CNRStorageWriter(path, quantization=None if bits is None else cnr.AdaptiveAsymmetric(bits))
        torch.distributed.checkpoint.save(  # type: ignore[attr-defined]  # torch does not mark it as exported
            self._state(), storage_writer=writer, planner=cnr.CNRSavePlanner()
        )
        return num_bytes(path)


if __name__ == "__main__":
    main()

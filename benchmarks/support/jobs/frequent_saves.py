"""The example's training on several gloo ranks with a save every second, to be started by torchrun.

Blocks of training without saves and with them alternate. Rank 0 prints the results as JSON.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchrec_cnr as cnr
from benchmarks.support.jobs.table_models import num_bytes
from benchmarks.support.process_memory import resident_mib

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
BATCH_SIZE, DIM, SEED = 4096, 32, 1
KEPT = 10
TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Block:
    """The results of a block of training without saves, and the next one with them.

    Attributes:
        rate_without: Steps per second without saves.
        rate: Steps per second with saves.
        num_saves: Number of checkpoints that were committed.
        save_secs: Median seconds of a save, in the background.
        stall_secs: Median seconds for which training waited.
        latest_secs: Seconds to find the newest checkpoint.
        list_secs: Seconds to list all checkpoints, as ``cnr ls`` does.
        memory_mib: Resident memory of the rank with most of it.
        written_bytes: Bytes of the checkpoints that were committed.
        root_bytes: Bytes of all files under the root.
    """

    rate_without: float
    rate: float
    num_saves: int
    save_secs: float
    stall_secs: float
    latest_secs: float
    list_secs: float
    memory_mib: float
    written_bytes: int
    root_bytes: int


def main() -> None:
    """Measure blocks of training, and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="the folder of the checkpoints")
    parser.add_argument("--rows", type=int, required=True, help="rows of each large table")
    parser.add_argument("--blocks", type=int, required=True, help="number of blocks")
    parser.add_argument("--secs-without", type=float, required=True, help="seconds of a block without saves")
    parser.add_argument("--secs", type=float, required=True, help="seconds of a block with saves")
    options = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    job = _Job(options.root, options.rows)
    job.train(options.secs_without, saves=False)  # compiles, and fills caches
    job.train(min(5.0, options.secs), saves=True)
    blocks = [asdict(job.block(options.secs_without, options.secs)) for _ in range(options.blocks)]
    full_bytes = job.close()
    if dist.get_rank() == 0:
        print(json.dumps({"blocks": blocks, "full_bytes": full_bytes}), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # DDP keeps gloo's threads alive, which could abort the process while Python shuts down


class _Job:
    """The example's model, its clicks, and a manager that saves every second.

    Args:
        root: The folder of the checkpoints.
        num_rows: Rows of each large table.
    """

    def __init__(self, root: Path, num_rows: int) -> None:
        # Imported here, because the folder of examples is on the path only now.
        from click_data import open_stream  # noqa: PLC0415
        from dlrm_model import build_trainer  # noqa: PLC0415

        stream = open_stream("synthetic", None, SEED)
        self._root = root
        self._trainer = build_trainer(stream, num_rows, DIM, "row", SEED)
        self._batches = self._rank_batches(stream)
        self._step = 0
        self._saved: list[cnr.Saved] = []
        self._tracker = cnr.RowTracker(self._trainer.model)
        self._manager = cnr.CheckpointManager(
            root,
            self._tracker,
            quantization=cnr.AdaptiveAsymmetric(bits=4),
            every_secs=1,
            keep=cnr.Keep(last=KEPT),
            on_saved=self._saved.append,
        )

    def _rank_batches(self, stream: Any) -> Iterator[Any]:
        from samples import global_batches, rank_share  # noqa: PLC0415

        for batch in global_batches(stream, 0, BATCH_SIZE):
            yield rank_share(batch, dist.get_rank(), dist.get_world_size())

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
        rate = self.train(secs, saves=True)
        memory = torch.tensor(resident_mib())
        dist.all_reduce(memory, dist.ReduceOp.MAX)
        saved = list(self._saved)
        began = time.monotonic()
        cnr.latest(self._root)
        latest_secs, began = time.monotonic() - began, time.monotonic()
        cnr.list_checkpoints(self._root)
        list_secs = time.monotonic() - began
        dist.barrier()
        return Block(
            rate_without,
            rate,
            len(saved),
            statistics.median(each.secs for each in saved),
            statistics.median(each.stall_secs for each in saved),
            latest_secs,
            list_secs,
            float(memory),
            sum(each.num_bytes for each in saved),
            num_bytes(self._root),
        )

    def close(self) -> int:
        """End the job, and return the bytes of a checkpoint of all rows with the same scheme."""
        self._manager.close()
        self._tracker.close()
        writer = cnr.CNRStorageWriter(self._root.with_name("full"), quantization=cnr.AdaptiveAsymmetric(bits=4))
        torch.distributed.checkpoint.save(  # type: ignore[attr-defined]  # torch does not mark it as exported
            self._state(), storage_writer=writer, planner=cnr.CNRSavePlanner()
        )
        return num_bytes(self._root.with_name("full"))


if __name__ == "__main__":
    main()

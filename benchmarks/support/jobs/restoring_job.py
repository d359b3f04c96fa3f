"""A job on several gloo ranks that restores from a slow store and local copies, to be started by torchrun.

Each rank has copies of its own, as on a host of its own. Rank 0 prints the results as JSON.
"""

import argparse
import json
import shutil
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import torchrec_cnr as cnr
from benchmarks.support.jobs.table_models import TableModel, TableSizes
from benchmarks.support.slow_store import SlowStore
from torchrec_cnr.format.manifest_json import forget

NUM_DELTAS, SHARE = 3, 0.1
LOST = 1  # the rank that loses its copies
TIMEOUT = timedelta(seconds=300)
WAYS = ("all from the store", "one rank lost its copies", "all from copies")


def main() -> None:
    """Measure restores; print for each way and round the seconds, and the bytes and requests of each rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder")
    parser.add_argument("--rows", type=int, required=True, help="rows of each table; a table per rank")
    parser.add_argument("--dim", type=int, required=True, help="values per row")
    parser.add_argument("--rounds", type=int, required=True, help="measured rounds")
    parser.add_argument("--latency-secs", type=float, required=True, help="latency of a request")
    parser.add_argument("--bytes-per-sec", type=float, required=True, help="bandwidth of all ranks together")
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.set_num_threads(1)
    with SlowStore(options.folder / "store", options.latency_secs, options.bytes_per_sec) as store:
        job = _Job(store, options.folder / f"copies-{dist.get_rank()}", options.rows, options.dim)
        job.save()
        results: dict[str, list[tuple[float, list[int], list[int]]]] = {}
        for number in range(options.rounds + 1):
            for way in WAYS:
                found = job.restore(way)
                if number > 0:  # the first round compiles, and fills caches
                    results.setdefault(way, []).append(found)
    if dist.get_rank() == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


class _Job:
    """Tables, and the ways to restore them.

    Args:
        store: The root.
        copies: The folder of this rank's copies.
        num_rows: Rows of each table.
        dim: Values per row.
    """

    def __init__(self, store: SlowStore, copies: Path, num_rows: int, dim: int) -> None:
        self._store = store
        self._copies = copies
        self._model = TableModel(TableSizes(dist.get_world_size(), num_rows, dim))
        self._expected: list[int] = []  # the sums of the bits of this rank's tables

    def save(self) -> None:
        """Save a baseline and deltas, to the store and to the copies."""
        tracker = cnr.RowTracker(self._model.sharded)
        scheme = cnr.AdaptiveAsymmetric(bits=8)
        manager = cnr.CheckpointManager(
            self._store.url, tracker, policy=cnr.Consecutive(), quantization=scheme, local=self._copies
        )
        for step in range(NUM_DELTAS + 1):
            if step:
                self._model.modify(SHARE)
            manager.save(step, self._model.state())
        manager.close()
        tracker.close()

    def restore(self, way: str) -> tuple[float, list[int], list[int]]:
        """Restore: the seconds until all ranks have, and of each rank the bytes read from the store and requests."""
        if way == WAYS[1] and dist.get_rank() == LOST:
            shutil.rmtree(self._copies)
        for shard in self._shards():
            shard.zero_()
        forget()
        tracker = cnr.RowTracker(self._model.sharded)
        num_bytes, num_requests = self._store.num_read_bytes, self._store.num_requests
        self._store.is_slow = True
        dist.barrier()
        began = time.monotonic()
        manager = cnr.CheckpointManager(self._store.url, tracker, local=None if way == WAYS[0] else self._copies)
        restored = manager.restore(self._model.state())
        dist.barrier()
        secs = time.monotonic() - began
        self._store.is_slow = False
        assert restored == NUM_DELTAS
        self._check(way)
        counts = [self._store.num_read_bytes - num_bytes, self._store.num_requests - num_requests]
        manager.close()
        tracker.close()
        all_counts: list[list[int]] = [[]] * dist.get_world_size()
        dist.all_gather_object(all_counts, counts)
        return secs, [count[0] for count in all_counts], [count[1] for count in all_counts]

    def _check(self, way: str) -> None:
        """Check that each way restores the same rows."""
        found = [int(shard.view(torch.int32).sum(dtype=torch.int64)) for shard in self._shards()]
        self._expected = self._expected or found
        if found != self._expected or 0 in found:
            raise AssertionError(f"{way}: other rows were restored")

    def _shards(self) -> list[torch.Tensor]:
        tables = self._model.sharded.state_dict().values()
        return [shard.tensor for table in tables for shard in table.local_shards()]


if __name__ == "__main__":
    main()

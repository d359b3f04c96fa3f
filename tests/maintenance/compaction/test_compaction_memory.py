"""Compaction in bounded memory: with files and blobs of their real sizes, and however a table is sharded."""

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import hand_made
from tests.support.hand_made import Content, Part
from tests.support.lineages import is_same
from torchrec_cnr import load_table
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.maintenance.compaction.compact import run_compaction
from torchrec_cnr.maintenance.compaction.plan import plan_compaction
from torchrec_cnr.storage import pack_writer
from torchrec_cnr.tracking.modified_rows import RowMask

MAX_MIB = 512  # what `compact` promises
NUM_DELTAS = 6
CHILD_SECS = 250.0


def _write_lineage(root: Path, size: tuple[int, int], boxes: list[Box]) -> Path:
    """A baseline, and deltas of rows of three heats; returns the last one's path."""
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.standard_normal(size, dtype=np.float32))
    shards = [values[box.slices(Box.whole(size))].contiguous() for box in boxes]
    chances = np.where(np.arange(size[0]) % 2 == 0, 0.4, 0.1)
    heat, parent = np.zeros(size[0], dtype=np.int64), None
    for number in range(NUM_DELTAS + 1):
        mask = rng.random(size[0]) < chances
        masks = [torch.from_numpy(mask & (heat == value)) for value in range(3)]
        heat = np.where(mask, np.minimum(heat + 1, 2), 0)
        parts: list[Part] = []
        for box, shard in zip(boxes, shards, strict=True):
            shard += 1
            rows = slice(box.offsets[0], box.offsets[0] + box.num_rows)
            own = [RowMask(mask[rows]) for mask in masks] if number else [None]
            parts += (Part(box, shard, rows, heat=value) for value, rows in enumerate(own))
        parent = hand_made.write(
            root / str(number),
            {"t": Content(size, tuple(parts), is_table=True)},
            parent=parent,
            created_ns=10**18 + number * 10**12,
            pack_bytes=pack_writer.PACK_BYTES,
        )
    return root / str(NUM_DELTAS)


def _status_mib(name: str) -> float:
    """A size of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1024


def _compact(path: Path, results: Any) -> None:
    torch.set_num_threads(1)
    start = _status_mib("VmRSS")
    plan = plan_compaction(path, max_ratio=1.1)
    planned = _status_mib("VmHWM") - start
    run_compaction(plan)
    results.put((plan.moved_bytes, planned, _status_mib("VmHWM") - start))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "num_parts"), [((8_000_000, 16), (32, 1)), ((4_000_000, 32), (1, 8))], ids=["rows", "columns"]
)
def test_memory_is_bounded(tmp_path: Path, size: tuple[int, int], num_parts: tuple[int, int]) -> None:
    """A table that was cut into many shards, each stored exactly and with rows of many ages, is folded in 512 MiB."""
    num_rows, num_cols = size[0] // num_parts[0], size[1] // num_parts[1]
    boxes = [
        Box((row * num_rows, column * num_cols), (num_rows, num_cols))
        for row in range(num_parts[0])
        for column in range(num_parts[1])
    ]
    path = _write_lineage(tmp_path, size, boxes)
    before = load_table(path, "t")
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    child = spawn.Process(target=_compact, args=(path, results), daemon=True)
    child.start()
    moved_bytes, planned_mib, peak_mib = results.get(timeout=CHILD_SECS)
    child.join(CHILD_SECS)
    assert moved_bytes > 200 << 20
    assert planned_mib < MAX_MIB / 4
    assert peak_mib < MAX_MIB
    assert is_same(load_table(path, "t"), before)

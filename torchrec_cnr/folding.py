"""Folding: a lineage is read oldest first, and each checkpoint's rows overwrite those before.

What is wanted is a list of regions of tensors. ``plan_fold`` works out which blobs of which checkpoints touch them;
``fold`` reads these, verifies them and writes their rows into the targets. It reads row numbers first, of as many
checkpoints as it may, so that a row which a later one holds too is not decoded. A tensor that was folded out of several
checkpoints may be stored in shards that overlap; a manifest cannot show that these hold every row, so it is seen to
while they are read.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torchrec_cnr.boxes import Box
from torchrec_cnr.checkpoint_rows import CheckpointRows
from torchrec_cnr.coverage import Coverage
from torchrec_cnr.errors import DamagedError
from torchrec_cnr.fold_plan import CheckpointReads
from torchrec_cnr.last_turns import MOST_TURNS, LastTurns
from torchrec_cnr.manifest import TensorEntry
from torchrec_cnr.progress import Count, Progress
from torchrec_cnr.regions import Region

_EARLY_BYTES = 256 << 20  # read before the first row is written: row numbers, and the records of logs


def fold(
    plans: Sequence[CheckpointReads],
    regions: Sequence[Region],
    thread_count: int,
    *,
    are_complete: bool = True,
    progress: Progress | None = None,
) -> None:
    """Execute a plan.

    Args:
        plans: For each checkpoint, oldest first, what is read of it.
        regions: What it was planned for.
        thread_count: Threads that read.
        are_complete: Whether all rows must be found; not where a delta is looked at by itself.
        progress: Told how many of how many bytes of rows were read.

    Raises:
        DamagedError: Bytes are not what was committed; the targets hold a mixture of old and new values.
        StoreError: A pack cannot be read.
    """
    coverages = _coverages(plans, regions) if are_complete else {}
    count = Count(sum(read.blob.num_bytes for plan in plans for read in plan.reads.values()), progress)
    for window in _windows(plans):
        first_turns = itertools.accumulate((plan.num_turns for plan in window), initial=1)
        checkpoints = [
            CheckpointRows(plan, first_turn, thread_count, holds_logs=len(window) > 1)
            for plan, first_turn in zip(window, first_turns, strict=False)
        ]
        turns = _last_turns(checkpoints)
        for checkpoint in checkpoints:
            for turn, read, block in checkpoint.blocks():
                for region in read.regions:
                    left = turns.left(region, block, turn)
                    if left is not None:
                        region.write(left)
                    if id(region) in coverages:
                        coverages[id(region)].add(block.box, block.rows.index)
                count.add(read.blob.num_bytes)
    for region in regions:
        hole = coverages[id(region)].first_hole() if id(region) in coverages else None
        if hole is not None:
            url = plans[0].checkpoint.store.url
            raise DamagedError(f"{url}: tensor '{region.fqn}': row {hole} is nowhere stored; use another checkpoint")
        region.finish()


def _windows(plans: Iterable[CheckpointReads]) -> Iterator[list[CheckpointReads]]:
    """Checkpoints of which the row numbers are read before any rows."""
    window: list[CheckpointReads] = []
    num_bytes = num_turns = 0
    for plan in plans:
        is_full = num_bytes + plan.early_bytes > _EARLY_BYTES or num_turns + plan.num_turns >= MOST_TURNS
        if window and is_full:
            yield window
            window, num_bytes, num_turns = [], 0, 0
        window.append(plan)
        num_bytes, num_turns = num_bytes + plan.early_bytes, num_turns + plan.num_turns
    if window:
        yield window


def _last_turns(checkpoints: Sequence[CheckpointRows]) -> LastTurns:
    """When rows of tables are overwritten for the last time, in regions of which several checkpoints hold some rows."""
    regions: dict[int, Region] = {}
    times: Counter[int] = Counter()
    for checkpoint in checkpoints:
        reads = [read for read in checkpoint.plan.reads.values() if read.rows.blob and read.entry.table is None]
        found = {id(region): region for read in reads for region in read.regions}
        regions |= found
        times.update(found.keys())
    turns = LastTurns(regions[number] for number, count in times.items() if count > 1)
    for checkpoint in checkpoints if turns.num_regions else ():
        for turn, read, rows in checkpoint.placed():
            for region in read.regions:
                turns.note(region, rows, turn)
    return turns


def _coverages(plans: Sequence[CheckpointReads], regions: Sequence[Region]) -> dict[int, Coverage]:
    """What is stored of the regions of tensors that no manifest shows to be whole."""
    oldest: dict[int, TensorEntry] = {}
    boxes: dict[int, list[Box]] = {}
    num_rows: dict[int, int] = {}  # stored, each as often as it is
    for plan in plans:
        for read in plan.reads.values():
            for region in read.regions:
                oldest.setdefault(id(region), read.entry)
                boxes.setdefault(id(region), []).append(read.shard.table_box or read.shard.box)
                num_rows[id(region)] = num_rows.get(id(region), 0) + read.rows.num_rows
    return {
        id(region): Coverage(region.box, boxes.get(id(region), ()), num_rows.get(id(region), 0))
        for region in regions
        if math.prod(region.box.sizes) and not (id(region) in oldest and oldest[id(region)].is_whole)
    }

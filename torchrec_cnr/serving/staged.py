"""Staging: links are folded, as a load folds a lineage, into memory beside the model; nothing of the model is touched.

A tensor that links hold whole gets a second copy; of any other, only the rows that links hold are staged.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem

from torchrec_cnr.folding import CheckpointReads, fold, held, plan_fold
from torchrec_cnr.handover import InferenceReadItem
from torchrec_cnr.inference_regions import turns
from torchrec_cnr.item_regions import item_box, item_regions
from torchrec_cnr.lineage import Lineage
from torchrec_cnr.manifest import DTYPES
from torchrec_cnr.regions import Region
from torchrec_cnr.rows import Box
from torchrec_cnr.serving.links import Links
from torchrec_cnr.serving.staged_rows import StagedRows
from torchrec_cnr.serving.targets import Target


@dataclass(frozen=True, eq=False)
class StagedTensor:
    """A tensor that is replaced as a whole.

    Attributes:
        tensor: The served one.
        values: What it will be; in host memory.
        num_rows: Of a table, its rows here; 0 of any other.
    """

    tensor: Tensor
    values: Tensor
    num_rows: int

    def swap_in(self) -> None:
        """Overwrite the served values."""
        self.tensor.copy_(self.values)


@dataclass(frozen=True, eq=False)
class Staged:
    """What is ready to be swapped in.

    Attributes:
        parts: All of it.
        num_rows: Rows of tables.
        num_bytes: Bytes of packs that it was read from.
    """

    parts: Sequence[StagedRows | StagedTensor]
    num_rows: int
    num_bytes: int

    def swap_in(self) -> None:
        """Overwrite what is served, while no lookup happens."""
        devices = {part.tensor.device for part in self.parts if part.tensor.device.type == "cuda"}
        _wait_for(devices)
        with torch.inference_mode():  # also tables that were made in it can be written to
            for part in self.parts:
                part.swap_in()
        _wait_for(devices)


def stage(links: Links, targets: Sequence[Target], thread_count: int) -> Staged | None:
    """Read, verify and decode links.

    Args:
        links: What is to be applied.
        targets: What of the model it goes to.
        thread_count: Requests in flight at once.

    Returns:
        None if the links alone do not tell what the rows will be, so that the whole lineage must be read.

    Raises:
        DamagedError: Bytes are not what was committed.
        StoreError: A pack cannot be read.
        StateMismatchError: A tensor is of another size or dtype.
    """
    parts: list[StagedRows | StagedTensor] = []
    regions: list[Region] = []
    for target in targets:
        if links.is_delta and not _is_whole(links.lineage, target.fqn):
            rows = _staged_rows(links.lineage, target)
            if rows is None:
                return None
            parts.append(rows)
            regions.append(rows)
        else:
            tensor = _staged_tensor(links.lineage, target)
            parts.append(tensor)
            regions += item_regions(links.lineage, target.item, tensor.values)
    num_bytes = 0
    for turn in turns(regions):
        plans = plan_fold(links.lineage, turn)
        fold(plans, turn, thread_count, are_complete=not links.is_delta)
        num_bytes += sum(map(_read_bytes, plans))
    if not all(part.is_complete for part in parts if isinstance(part, StagedRows)):
        return None
    return Staged(parts, sum(part.num_rows for part in parts), num_bytes)


def _is_whole(lineage: Lineage, fqn: str) -> bool:
    """Whether some link holds all of a tensor."""
    return any(entry.is_whole for _, entry in held(lineage.checkpoints, fqn))


def _staged_rows(lineage: Lineage, target: Target) -> StagedRows | None:
    """Rows of a table; None for optimizer state, whose rows may be made of several."""
    item, entry = target.item, lineage.newest.manifest.tensors[target.fqn]
    shards = tuple(lineage.shards(target.fqn))
    if isinstance(item, InferenceReadItem):
        box = Box.whole(entry.size)
        return StagedRows(target.fqn, box, target.tensor, item.row, DTYPES[entry.dtype], shards)
    if type(item) is not ReadItem or entry.table is not None or len(entry.size) != 2:
        return None
    return StagedRows(target.fqn, item_box(item), target.tensor, None, DTYPES[entry.dtype], shards)


def _staged_tensor(lineage: Lineage, target: Target) -> StagedTensor:
    is_table = lineage.newest.manifest.tensors[target.fqn].is_table
    values = torch.empty(target.tensor.shape, dtype=target.tensor.dtype)
    return StagedTensor(target.tensor, values, len(values) if is_table else 0)


def _read_bytes(plan: CheckpointReads) -> int:
    blobs = [read.blob for read in plan.reads.values()]
    blobs += [block.blob for block in plan.row_blocks.values() if block.blob is not None]
    return sum(blob.num_bytes for blob in blobs)


def _wait_for(devices: set[torch.device]) -> None:
    """What was started on GPUs, lookups or copies, is done."""
    for device in devices:
        torch.cuda.synchronize(device)

"""A save by one process, which acts as all ranks, one after the other.

Without a process group, ``dcp.save`` warns, and it wraps every error in one of its own. So this module calls the public
methods of storage writers and planners directly, in the order in which DCP calls them.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter

from torchrec_cnr.maintenance.export.contents import Chunk


def index_of(chunk: Chunk) -> MetadataIndex:
    """Return DCP's index of a chunk of a tensor."""
    return MetadataIndex(chunk.fqn, chunk.box.offsets)


def chunk_item(chunk: Chunk, size: Sequence[int], kind: WriteItemType) -> WriteItem:
    """Return a plan's item for a chunk of a tensor whose global size is ``size``."""
    box = ChunkStorageMetadata(torch.Size(chunk.box.offsets), torch.Size(chunk.box.sizes))
    data = TensorWriteData(box, TensorProperties(dtype=chunk.dtype), torch.Size(size))
    return WriteItem(index_of(chunk), kind, tensor_data=data)


def object_items(fqns: Iterable[str]) -> list[WriteItem]:
    """Return a plan's items for objects."""
    return [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO) for fqn in fqns]


def save(
    writer: StorageWriter,
    plans: Sequence[SavePlan],
    planner: SavePlanner,
    paths: Mapping[str, tuple[str | int, ...]],
) -> None:
    """Write the plans of all ranks, and commit them as one checkpoint.

    Args:
        writer: The storage writer.
        plans: One plan per rank. Each is written before the data of the next one is read.
        planner: Returns the data of the items.
        paths: The keys and indices that lead to each FQN in the nested state dict.
    """
    writer.storage_meta()
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    local_plans = [writer.prepare_local_plan(plan) for plan in plans]
    global_plans, metadata = create_default_global_save_plan(local_plans)
    metadata.planner_data = dict(paths)
    results = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(global_plans)]
    writer.finish(metadata, results)

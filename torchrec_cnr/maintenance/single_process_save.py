"""A save by one process alone, which plays as many ranks as there are plans, one after the other.

``dcp.save`` asks for a process group or warns, and hides what went wrong in an error of its own. Storage writers and
planners are public, so they are called here in the order in which DCP calls them.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter

from torchrec_cnr.maintenance.export.contents import Chunk


def index_of(chunk: Chunk) -> MetadataIndex:
    """What DCP calls a chunk of a tensor."""
    return MetadataIndex(chunk.fqn, chunk.box.offsets)


def chunk_item(chunk: Chunk, size: Sequence[int], kind: WriteItemType) -> WriteItem:
    """A chunk of a tensor of that size, as an item of a plan."""
    box = ChunkStorageMetadata(torch.Size(chunk.box.offsets), torch.Size(chunk.box.sizes))
    data = TensorWriteData(box, TensorProperties(dtype=chunk.dtype), torch.Size(size))
    return WriteItem(index_of(chunk), kind, tensor_data=data)


def object_items(fqns: Iterable[str]) -> list[WriteItem]:
    """Objects as items of a plan."""
    return [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO) for fqn in fqns]


def save(
    writer: StorageWriter,
    plans: Sequence[SavePlan],
    planner: SavePlanner,
    paths: Mapping[str, tuple[str | int, ...]],
) -> None:
    """Write plans, and commit them as one checkpoint.

    Args:
        writer: Where to.
        plans: Each is written by itself, before the next one's data is asked for.
        planner: Asked for the data of items.
        paths: The keys and indices that lead to each FQN in the nested state dict.
    """
    writer.storage_meta()
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    local_plans = [writer.prepare_local_plan(plan) for plan in plans]
    global_plans, metadata = create_default_global_save_plan(local_plans)
    metadata.planner_data = dict(paths)
    results = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(global_plans)]
    writer.finish(metadata, results)

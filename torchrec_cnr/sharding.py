"""What a rank holds of a tensor: the only module that knows ShardedTensor and DTensor."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchrec_cnr.format.boxes import Box


@dataclass(frozen=True, eq=False)
class LocalShard:
    """One shard on this rank.

    Attributes:
        box: Where it lies in its tensor.
        tensor: Its values, of the box's size; shares memory with the state dict.
    """

    box: Box
    tensor: Tensor


def local_shards(value: Any) -> Sequence[LocalShard]:
    """The shards of a state dict's item that this rank holds; none for what is no tensor."""
    if isinstance(value, ShardedTensor):
        return [
            LocalShard(_box(shard.metadata.shard_offsets, shard.metadata.shard_sizes), shard.tensor)
            for shard in value.local_shards()
        ]
    if isinstance(value, DTensor):
        return _dtensor_shards(value)
    if isinstance(value, Tensor):
        return [LocalShard(Box.whole(tuple(value.shape)), value)]
    return []


def copied(value: Any) -> Any:
    """A copy of a state dict's item that shares no memory with it; tensors are copied to the host."""
    if isinstance(value, ShardedTensor):
        shards = [Shard(_on_host(shard.tensor), shard.metadata) for shard in value.local_shards()]
        group = value._process_group
        return ShardedTensor._init_from_local_shards_and_global_metadata(shards, value.metadata(), process_group=group)
    if isinstance(value, DTensor):
        return value.detach().clone()
    return _on_host(value) if isinstance(value, Tensor) else copy.deepcopy(value)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _dtensor_shards(value: DTensor) -> Sequence[LocalShard]:
    if value.device_mesh.get_coordinate() is None:  # this rank is no part of its mesh
        return []
    local = value.to_local()
    # TorchRec's LocalShardsWrapper holds several shards; DCP's _Checkpointable protocol names their boxes.
    if hasattr(local, "local_shards") and hasattr(local, "local_offsets"):
        # Without shards it still names one offset, hence not strict.
        return [
            LocalShard(_box(offsets, shard.shape), shard)
            for shard, offsets in zip(local.local_shards(), local.local_offsets(), strict=False)
        ]
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return [LocalShard(_box(offsets, sizes), local)]


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    return Box(tuple(map(int, offsets)), tuple(map(int, sizes)))


def is_replicated(value: Any) -> bool:
    """Whether several ranks may hold one and the same shard of a state dict's item."""
    if isinstance(value, DTensor):
        return any(placement.is_replicate() for placement in value.placements)
    return isinstance(value, Tensor) and not isinstance(value, ShardedTensor)


MemoryKey = tuple[object, ...]


def memory_key(tensor: Tensor) -> MemoryKey | None:
    """Identify the memory that a tensor's values lie in, and how they are read from it; None where there is none.

    All objects that wrap the same values have the same key. A view of another dtype, or a lazily negated one, has not.
    DTensors and other tensors that are made of tensors have none of their own.
    """
    if tensor.layout is not torch.strided or tensor.numel() == 0 or hasattr(tensor, "__tensor_flatten__"):
        return None
    place = tensor.data_ptr(), tensor.device, tuple(tensor.shape), tensor.stride()
    return *place, tensor.dtype, tensor.is_neg(), tensor.is_conj()


def wait_for_devices(values: Iterable[Any]) -> None:
    """Wait until what all streams of GPUs were given is done, where tensors or a state dict's items lie on them.

    Whoever reads or writes them next does so in a stream that need not be the one in which the model is trained.
    """
    tensors = (shard.tensor for value in values for shard in local_shards(value))
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def dtype_name(tensor: Tensor) -> str:
    """A dtype as manifests name it, such as ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


ShardKey = tuple[str, tuple[int, ...]]


def shard_key(item: WriteItem) -> ShardKey:
    """Which shard an item of a plan is."""
    return item.index.fqn, tuple(item.index.offset or ())

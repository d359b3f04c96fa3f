"""The shards of a tensor that a rank holds. The only module that knows ``ShardedTensor`` and ``DTensor``."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor, ShardedTensorBase
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchrec_cnr.format.boxes import Box


@dataclass(frozen=True, eq=False)
class LocalShard:
    """A shard of a tensor on this rank.

    Attributes:
        box: The shard region: its offsets and sizes in the tensor.
        tensor: The values, of the region's sizes; shares memory with the state dict.
    """

    box: Box
    tensor: Tensor


def local_shards(value: Any) -> Sequence[LocalShard]:
    """Return the shards of an item of a state dict that this rank holds; none if the item is not a tensor."""
    if isinstance(value, ShardedTensorBase):
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
    """Return a copy of an item of a state dict that shares no memory with it. Tensors are copied to the host."""
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
    if value.device_mesh.get_coordinate() is None:  # this rank is not in the mesh
        return []
    local = value.to_local()
    # TorchRec's LocalShardsWrapper holds several shards, whose regions DCP's _Checkpointable protocol gives.
    if hasattr(local, "local_shards") and hasattr(local, "local_offsets"):
        # A wrapper without shards still has one offset, so zip must not be strict.
        return [
            LocalShard(_box(offsets, shard.shape), shard)
            for shard, offsets in zip(local.local_shards(), local.local_offsets(), strict=False)
        ]
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return [LocalShard(_box(offsets, sizes), local)]


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    return Box(tuple(map(int, offsets)), tuple(map(int, sizes)))


def is_replicated(value: Any) -> bool:
    """Return whether several ranks may hold the same shard of an item of a state dict."""
    if isinstance(value, DTensor):
        return any(placement.is_replicate() for placement in value.placements)
    return isinstance(value, Tensor) and not isinstance(value, ShardedTensor)


MemoryKey = tuple[object, ...]


def memory_key(tensor: Tensor) -> MemoryKey | None:
    """Return a key of a tensor's memory and of how values are read from it, or None if it has no memory of its own.

    All objects that wrap the same values have the same key. A view with another dtype, or a lazily negated view, has
    another key. DTensors, and other tensors that consist of tensors, have no memory of their own.
    """
    if tensor.layout is not torch.strided or tensor.numel() == 0 or hasattr(tensor, "__tensor_flatten__"):
        return None
    layout = tensor.data_ptr(), tensor.device, tuple(tensor.shape), tensor.stride()
    return *layout, tensor.dtype, tensor.is_neg(), tensor.is_conj()


def wait_for_devices(values: Iterable[Any]) -> None:
    """Synchronize all GPUs that hold one of these tensors or items of a state dict.

    The next access to them may use another stream than training does.
    """
    tensors = (shard.tensor for value in values for shard in local_shards(value))
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype in manifests, such as ``float32``."""
    # Each operation on a ShardedTensor warns that the class is deprecated, and also that returns its dtype or size.
    dtype = tensor.metadata().tensor_properties.dtype if isinstance(tensor, ShardedTensorBase) else tensor.dtype
    return str(dtype).removeprefix("torch.")


def size_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the size of a whole tensor."""
    return tuple(tensor.metadata().size if isinstance(tensor, ShardedTensorBase) else tensor.size())


def first_rows(tensor: Tensor) -> tuple[int, ...]:
    """Return the first rows of the shards that all ranks have of a tensor; none if it is a DTensor."""
    if isinstance(tensor, ShardedTensor):
        return tuple(sorted(int(shard.shard_offsets[0]) for shard in tensor.metadata().shards_metadata))
    return () if isinstance(tensor, DTensor) else (0,)


ShardKey = tuple[str, tuple[int, ...]]


def shard_key(item: WriteItem) -> ShardKey:
    """Return the key of the shard that an item of a plan writes."""
    return item.index.fqn, tuple(item.index.offset or ())

"""PyTorch's own tables: ``nn.EmbeddingBag`` and ``nn.Embedding``, including those inside unsharded collections."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.sharding import MemoryKey, memory_key
from torchrec_cnr.tracking.hooks import Hook, Hooks, modules_below, on_gradient, watch_loads
from torchrec_cnr.tracking.modified_rows import ModifiedRows
from torchrec_cnr.tracking.torch_optim import OptimizerTables
from torchrec_cnr.tracking.tracked_tables import TrackedShard

_FORWARDS = (nn.EmbeddingBag.forward, nn.Embedding.forward)


def track_plain(model: nn.Module, hooks: Hooks, stepped: OptimizerTables) -> Iterator[TrackedShard]:
    """Track all such tables and yield their shards; modules may share a table.

    Raises:
        ConfigurationError: A table is a DTensor, is computed from other parameters, or is managed by
            ``FullyShardedDataParallel``.
    """
    fsdp_ids = set(_managed_by_fsdp(model))
    shards_by_key: dict[MemoryKey | int, TrackedShard] = {}
    for path, module in modules_below(model):
        if not isinstance(module, nn.EmbeddingBag | nn.Embedding):
            continue
        weight = module.weight
        key = memory_key(weight) or id(weight)
        if id(weight) in fsdp_ids:
            raise ConfigurationError(
                f"{path}: FullyShardedDataParallel manages its weight (use_orig_params=True), and the table cannot be "
                "tracked: pass its module in ignored_modules, or save without a tracker"
            )
        if weight is not module._parameters.get("weight") or (key == id(weight) and weight.numel()):
            raise ConfigurationError(
                f"{path}: its weight is a {type(weight).__name__}, not a parameter with memory of its own, and cannot "
                "be tracked: exclude the table from FSDP or tensor parallelism, remove its parametrization, or save "
                "without a tracker"
            )
        if key not in shards_by_key:
            rows = ModifiedRows(path, Box.whole(tuple(weight.shape)), weight.device)
            shards_by_key[key] = stepped.add(rows, weight)
            yield shards_by_key[key]
        shard = shards_by_key[key]
        watch_loads(module, [("weight", shard)], hooks)
        if getattr(module.forward, "__func__", None) not in _FORWARDS:
            continue  # its arguments may be anything, so rows are marked by the gradient that a step uses
        if module.max_norm is None:
            hooks.add(module.register_forward_hook(Hook(_Lookup(shard)), with_kwargs=True))
        else:
            hooks.add(module.register_forward_pre_hook(Hook(_BeforeNorm(shard))))
            hooks.add(module.register_forward_hook(Hook(_NormedLookup(shard)), with_kwargs=True))


def _managed_by_fsdp(model: nn.Module) -> Iterator[int]:
    """Yield the ids of the parameters that FSDP1 moves in and out of memory of its own, with any strategy."""
    for module in FullyShardedDataParallel.fsdp_modules(model):
        if module._handle is not None:
            yield from map(id, module._handle.flat_param._params or ())


class Aliases:
    """Other tensors of a model over the memory of its plain tables, such as a layer that is tied to one.

    Each has its own version counter, which changes when the table is written to through that tensor.
    """

    def __init__(self, model: nn.Module, shards: Sequence[TrackedShard]) -> None:
        self._model = ref(model)
        self._shards = [shard for shard in shards if shard.weight.numel()]
        self._of_parameters: Sequence[TrackedShard] = ()
        self._of_parameters = self.find()
        for shard in self._shards:
            shard.accept_weight()

    def find(self) -> Sequence[TrackedShard]:
        """Watch tensors that were added to the model since the last call; writes through them are detected.

        Returns:
            The shards whose weights are tensors of the model.

        Raises:
            ConfigurationError: The weight of a table was replaced by another tensor, whose rows are not tracked.
        """
        model = self._model()
        if model is None or not self._shards:
            return ()
        in_storage: dict[int, list[TrackedShard]] = {}
        for shard in self._shards:
            in_storage.setdefault(shard.weight.untyped_storage().data_ptr(), []).append(shard)
        found: dict[int, TrackedShard] = {}
        for tensor in chain(model.parameters(), model.buffers()):
            if memory_key(tensor) is not None:
                for shard in in_storage.get(tensor.untyped_storage().data_ptr(), ()):
                    if _overlap(tensor, shard.weight):
                        shard.watch(tensor)
                        found[id(shard)] = shard
        for shard in self._of_parameters:
            if id(shard) not in found:
                raise ConfigurationError(
                    f"the weight of {shard.rows.name!r} was replaced by another tensor after the tracker was made, so "
                    "its modified rows are unknown: make a new tracker, planner and state dict"
                )
        return list(found.values())


def _overlap(tensor: Tensor, other_tensor: Tensor) -> bool:
    """Return whether two tensors of one storage may have a value in common."""
    return tensor.data_ptr() < _end(other_tensor) and other_tensor.data_ptr() < _end(tensor)


def _end(tensor: Tensor) -> int:
    """Return the address after a tensor's last value."""
    last_offset = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last_offset + 1) * tensor.element_size()


@dataclass(frozen=True, eq=False)
class _Lookup:
    """Forward hook that marks the rows of a lookup when their gradient arrives.

    Another hook may replace the output by something that is not a tensor. Its rows are marked by the step.
    """

    shard: TrackedShard

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(output, Tensor):
            ids = self._ids(args, kwargs)
            on_gradient(output, lambda: self.shard.rows.mark(ids))

    def _ids(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        ids: Tensor = args[0] if args else kwargs["input"]
        return ids.detach().values() if ids.is_nested else ids.detach().reshape(-1)


@dataclass(frozen=True, eq=False)
class _BeforeNorm:
    """Forward pre-hook for lookups that renormalize rows."""

    shard: TrackedShard

    def __call__(self, *_: Any) -> None:
        self.shard.check_writes()


@dataclass(frozen=True, eq=False)
class _NormedLookup(_Lookup):
    """Forward hook for lookups that renormalize rows, which they also do in evaluation.

    Within ``torch.func`` the hook cannot read the ids. Such writes are then detected as unmarked ones.
    """

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(output, Tensor) and is_functorch_wrapped_tensor(output):
            return
        self.shard.rows.mark(self._ids(args, kwargs))
        self.shard.accept_writes()
        super().__call__(_, args, kwargs, output)

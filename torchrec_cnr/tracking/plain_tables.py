"""Tables of PyTorch's own: ``nn.EmbeddingBag`` and ``nn.Embedding``, those inside unsharded collections too."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torchrec_cnr.format.boxes import Box
from torchrec_cnr.tracking.hooks import Hooks, modules_below, on_gradient, watch_loads
from torchrec_cnr.tracking.modified_rows import ModifiedRows
from torchrec_cnr.tracking.torch_optim import OptimizerTables
from torchrec_cnr.tracking.tracked_tables import TrackedShard


def track_plain(model: nn.Module, hooks: Hooks, stepped: OptimizerTables) -> Iterator[TrackedShard]:
    """Track all such tables; modules may share one."""
    found: dict[int, TrackedShard] = {}
    for path, module in modules_below(model):
        if not isinstance(module, nn.EmbeddingBag | nn.Embedding):
            continue
        weight = module.weight
        if id(weight) not in found:
            rows = ModifiedRows(path, Box.whole(tuple(weight.shape)), weight.device)
            found[id(weight)] = stepped.add(rows, weight)
            yield found[id(weight)]
        shard = found[id(weight)]
        watch_loads(module, [("weight", shard)], hooks)
        if module.max_norm is None:
            hooks.add(module.register_forward_hook(_Lookup(shard), with_kwargs=True))
        else:
            hooks.add(module.register_forward_pre_hook(_BeforeNorm(shard)))
            hooks.add(module.register_forward_hook(_NormedLookup(shard), with_kwargs=True))


@dataclass(frozen=True, eq=False)
class _Lookup:
    """Forward hook: rows that were looked up are marked when their gradient arrives."""

    shard: TrackedShard

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        ids = self._ids(args, kwargs)
        on_gradient(output, lambda: self.shard.rows.mark(ids))

    def _ids(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        ids: Tensor = args[0] if args else kwargs["input"]
        return ids.detach().reshape(-1)


@dataclass(frozen=True, eq=False)
class _BeforeNorm:
    """Forward pre-hook where the lookup itself renormalises rows."""

    shard: TrackedShard

    def __call__(self, *_: Any) -> None:
        self.shard.check_writes()


@dataclass(frozen=True, eq=False)
class _NormedLookup(_Lookup):
    """Forward hook where the lookup itself renormalises rows, in evaluation too."""

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        ids = self._ids(args, kwargs)
        self.shard.rows.mark(ids)
        self.shard.accept_writes()
        on_gradient(output, lambda: self.shard.rows.mark(ids))

"""Hooks of ``load_state_dict``: what is copied onto itself was not written to.

DCP loads in place, and has modules take what was loaded as from anywhere: they copy their own tensors onto themselves.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torchrec_cnr.shards import local_shards, memory_key
from torchrec_cnr.tracked import TrackedShard
from torchrec_cnr.tracker.hooks import Hooks


def watch_loads(module: nn.Module, shards: Sequence[tuple[str, TrackedShard]], hooks: Hooks) -> None:
    """Watch what a module with these shards loads, each with the key of its weights in the module's state dict."""
    loads = _Loads(shards)
    first = module.register_load_state_dict_pre_hook(loads.before)
    # Before TorchRec's own hook, which puts other tensors in the place of the state dict's.
    order: Any = module._load_state_dict_pre_hooks  # an OrderedDict
    order.move_to_end(first.id, last=False)
    hooks.add(first)
    hooks.add(module.register_load_state_dict_post_hook(loads.after))


class _Loads:
    def __init__(self, shards: Sequence[tuple[str, TrackedShard]]) -> None:
        self._shards = shards
        self._is_own = False

    def before(self, _: nn.Module, state_dict: Mapping[str, Any], prefix: str, *__: Any) -> None:
        """See whether all that the module takes is its own."""
        for _key, shard in self._shards:
            shard.check_writes()
        taken = [(shard, state_dict[f"{prefix}{key}"]) for key, shard in self._shards if f"{prefix}{key}" in state_dict]
        self._is_own = all(_is_own(shard, value) for shard, value in taken)
        if self._is_own:
            for shard, _value in taken:
                for _key, other in self._shards:
                    if other.shares_storage(shard):
                        other.expect_copy()

    def after(self, *_: Any) -> None:
        """The module has taken it; DistributedModelParallel does not always have this called."""
        if self._is_own:
            for _key, shard in self._shards:
                shard.accept_weight()


def _is_own(shard: TrackedShard, value: Any) -> bool:
    key = memory_key(shard.weight)
    return key is None or key in [memory_key(local.tensor) for local in local_shards(value)]

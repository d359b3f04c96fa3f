"""The hooks that a tracker adds to a model, all in one place, so that all of them can be removed.

DCP loads in place, and then makes modules load their own tensors. A ``load_state_dict`` that copies a tensor onto
itself is not a write, and the hooks distinguish it from one that overwrites a table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper, wraps
from typing import Any, Protocol

from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from torchrec_cnr.sharding import local_shards, memory_key
from torchrec_cnr.tracking.tracked_tables import TrackedShard

_WRAPPERS = ("_dmp_wrapped_module", "module")  # parts of a module's path that are in no FQN


class Removable(Protocol):
    """An object that can be removed from a model, such as the handle of a hook."""

    def remove(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Hook:
    """A hook that only the tracked model has. A copy of the model, or a file of it, has one that does nothing instead.

    Attributes:
        act: The function that it calls.
    """

    act: Callable[..., None]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.act(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _untracked_hook, ()


def _untracked_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing: the hook of a model that is not tracked."""


class _Replacement:
    """Replacement for a module's method. A copy of the module, or a file of it, has its own method."""

    def __init__(self, owner: nn.Module, method: str, call: Callable[..., Any]) -> None:
        self._owner, self._method, self._call = owner, method, call
        self._own = owner.__dict__.get(method)  # a user's replacement, which a copy keeps
        update_wrapper(self, call, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self._own is not None:
            return _itself, (self._own,)
        return getattr, (self._owner, self._method)  # of the copy, which has no replacement yet


def _itself(method: Callable[..., Any]) -> Callable[..., Any]:
    return method


class Hooks:
    """Hooks and replaced methods of a model."""

    def __init__(self) -> None:
        self._removals: list[Callable[[], None]] = []

    def add(self, handle: Removable) -> None:
        """Record a hook, or what has hooks, to be removed later."""
        self._removals.append(handle.remove)

    def around(self, owner: nn.Module | type, method: str, around: Callable[..., Any]) -> None:
        """Replace a method, for which there is no hook, by ``around(original, *args, **kwargs)``.

        A method can be replaced several times, and the replacements removed in any order. One that is not the last
        remains in the chain, and passes calls on.

        Args:
            owner: A module; or a class, for all its objects.
            method: The method's name.
            around: The function to call.
        """
        original, own_method = getattr(owner, method), owner.__dict__.get(method)
        set_method = partial(setattr, owner) if isinstance(owner, type) else owner.__dict__.__setitem__
        is_active = True

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs) if is_active else original(*args, **kwargs)

        replacement = call if isinstance(owner, type) else _Replacement(owner, method, call)

        def remove() -> None:
            nonlocal is_active
            is_active = False
            if owner.__dict__.get(method) is not replacement:
                return
            if own_method is not None:
                set_method(method, own_method)
            elif isinstance(owner, type):
                delattr(owner, method)
            else:
                owner.__dict__.pop(method)

        set_method(method, replacement)
        self._removals.append(remove)

    def remove(self) -> None:
        """Remove all hooks and replacements, the last one first."""
        while self._removals:
            self._removals.pop()()


def on_gradient(output: Tensor, act: Callable[[], None]) -> None:
    """Call a function when the gradient of a lookup's output arrives, if ever.

    Gradients of ``torch.func`` are ordinary values and update no table. Code that uses them writes to the table itself.
    """
    if output.requires_grad and not is_functorch_wrapped_tensor(output):
        output.register_hook(lambda _: act())


def modules_below(module: nn.Module, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules with their FQNs, each once, but none below TorchRec's sharded collections.

    In ``named_modules``, TorchRec's sharded modules yield only themselves, so towers would hide their tables there.
    """
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    if isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
        return
    for name, child in module._modules.items():
        if child is not None:
            child_path = path if name in _WRAPPERS else f"{path}.{name}".removeprefix(".")
            yield from modules_below(child, child_path, seen)


def watch_loads(module: nn.Module, shards: Sequence[tuple[str, TrackedShard]], hooks: Hooks) -> None:
    """Watch what a module with these shards loads. Each has the key of its weights in the module's state dict."""
    loads = _Loads(shards)
    pre_hook = module.register_load_state_dict_pre_hook(Hook(loads.before))
    # Before TorchRec's own hook, which replaces tensors of the state dict.
    order: Any = module._load_state_dict_pre_hooks  # an OrderedDict
    order.move_to_end(pre_hook.id, last=False)
    hooks.add(pre_hook)
    hooks.add(module.register_load_state_dict_post_hook(Hook(loads.after)))


class _Loads:
    def __init__(self, shards: Sequence[tuple[str, TrackedShard]]) -> None:
        self._shards = shards
        self._is_own = False

    def before(self, _: nn.Module, state_dict: Mapping[str, Any], prefix: str, *__: Any) -> None:
        """Determine whether the module loads only its own tensors, and mark its rows if not."""
        for _key, shard in self._shards:
            shard.check_writes()
        loaded_values = [
            (shard, state_dict[f"{prefix}{key}"]) for key, shard in self._shards if f"{prefix}{key}" in state_dict
        ]
        self._is_own = all(_is_own(shard, value) for shard, value in loaded_values)
        for shard, _value in loaded_values:
            if not self._is_own:
                shard.mark_written()  # at once, because a later mark of some rows would account for this write, too
                continue
            for _key, other_shard in self._shards:
                if other_shard.shares_storage(shard):
                    other_shard.expect_copy()

    def after(self, *_: Any) -> None:
        """Account for the load of the module's own tensors; ``DistributedModelParallel`` does not always call this."""
        if self._is_own:
            for _key, shard in self._shards:
                shard.accept_weight()


def _is_own(shard: TrackedShard, value: Any) -> bool:
    key = memory_key(shard.weight)
    return key is None or key in [memory_key(local.tensor) for local in local_shards(value)]

"""What a tracker hangs into a model: everything in one place, so that all of it can be taken out again."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

_WRAPPERS = ("_dmp_wrapped_module", "module")  # parts of a module's path that are in no FQN


class Hooks:
    """Hooks and replaced methods."""

    def __init__(self) -> None:
        self._removals: list[Callable[[], None]] = []

    def add(self, handle: RemovableHandle) -> None:
        """Remove a hook later."""
        self._removals.append(handle.remove)

    def around(self, owner: nn.Module, method: str, around: Callable[..., Any]) -> None:
        """Have ``around(original, *args, **kwargs)`` called instead of a module's method, which offers no hook.

        Several may do so, and stop in any order: one that is not the last stays in the chain, and passes calls on.
        """
        original, own = getattr(owner, method), owner.__dict__.get(method)
        is_active = True

        @wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs) if is_active else original(*args, **kwargs)

        def remove() -> None:
            nonlocal is_active
            is_active = False
            if owner.__dict__.get(method) is replacement:
                owner.__dict__.pop(method)
                owner.__dict__.update({} if own is None else {method: own})

        owner.__dict__[method] = replacement
        self._removals.append(remove)

    def remove(self) -> None:
        """Take everything out, the last thing first."""
        while self._removals:
            self._removals.pop()()


def on_gradient(output: Tensor, act: Callable[[], None]) -> None:
    """Act when the gradient of a lookup's output arrives, if ever."""
    if output.requires_grad:
        output.register_hook(lambda _: act())


def modules_below(module: nn.Module, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """All modules with their FQNs, each once; nothing below TorchRec's sharded collections.

    TorchRec's sharded modules name only themselves in ``named_modules``, so towers would hide their tables there.
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
            below = path if name in _WRAPPERS else f"{path}.{name}".removeprefix(".")
            yield from modules_below(child, below, seen)

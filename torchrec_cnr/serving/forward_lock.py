"""Lookups: many at a time, or none while rows are swapped in.

Who calls what: every forward of the model, and of a module with tables in it, is within ``shared``; whoever swaps rows
in does it within ``exclusive``, which waits for the lookups that have begun and keeps new ones waiting. A forward of
the whole model therefore sees one checkpoint from its first lookup to its last.

A CUDA graph looks up without a forward, and does not tell of which model: every replay of one is within ``shared``.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.tracking.hooks import Hooks, modules_below

_GRACE_SECS = 0.5  # for which new lookups wait for a swap that waits for others
_WITH_TABLES = (
    nn.EmbeddingBag,
    nn.Embedding,
    EmbeddingBagCollection,
    EmbeddingCollection,
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    ShardedModule,
)


class ForwardLock:
    """A lock that lookups share, also within one another, and a swap has for itself.

    A swap that waits goes first, so that lookups without a pause do not keep it waiting for ever. But a lookup may be
    what one that has begun waits for, in another thread; after ``_GRACE_SECS`` it goes on, therefore.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_lookups = 0
        self._num_waiting = 0
        self._is_swapping = False
        self._own = threading.local()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Look rows up: no swap happens meanwhile."""
        depth = getattr(self._own, "depth", 0)
        if depth == 0:
            with self._changed:
                self._changed.wait_for(lambda: not (self._is_swapping or self._num_waiting), _GRACE_SECS)
                self._changed.wait_for(lambda: not self._is_swapping)
                self._num_lookups += 1
        self._own.depth = depth + 1
        try:
            yield
        finally:
            self._own.depth = depth
            if depth == 0:
                with self._changed:
                    self._num_lookups -= 1
                    self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Swap rows in: no lookup happens meanwhile.

        Raises:
            ConfigurationError: This thread is within a lookup, and would wait for itself.
        """
        if getattr(self._own, "depth", 0):
            raise ConfigurationError("rows cannot be swapped in from within a lookup: call update() outside of forward")
        with self._changed:
            self._num_waiting += 1
            try:
                self._changed.wait_for(lambda: not (self._is_swapping or self._num_lookups))
                self._is_swapping = True
            finally:
                self._num_waiting -= 1
        try:
            yield
        finally:
            with self._changed:
                self._is_swapping = False
                self._changed.notify_all()


def share_forwards(model: nn.Module, lookups: ForwardLock) -> Hooks:
    """Have every forward of a model, and of each module with tables in it, and every CUDA graph share ``lookups``."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with lookups.shared():
            return original(*args, **kwargs)

    hooks = Hooks()
    for _, module in modules_below(model):
        if module is model or isinstance(module, _WITH_TABLES):
            hooks.around(module, "forward", around)
    hooks.around(torch.cuda.CUDAGraph, "replay", around)
    return hooks

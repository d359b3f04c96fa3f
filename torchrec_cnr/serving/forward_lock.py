"""A lock that allows many lookups at the same time, or none while rows are swapped in.

Every forward of the model, and of each module with tables in it, runs within ``shared``. An update swaps rows in within
``exclusive``, which waits for running lookups and makes new ones wait. So all lookups in a forward of the whole model
see the same checkpoint.

The replay of a CUDA graph looks rows up without a forward, and its model is unknown. So every replay runs within
``shared``.
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

_GRACE_SECS = 0.5  # how long new lookups wait for a swap that has not begun
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
    """A lock that lookups share, even if they are nested, and that a swap takes exclusively.

    A waiting swap has priority, so that continuous lookups do not block it forever. But a running lookup may wait for a
    new one in another thread. So new lookups proceed after ``_GRACE_SECS``.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_lookups = 0
        self._num_waiting = 0
        self._is_swapping = False
        self._own = threading.local()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Look rows up, while no swap runs."""
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
        """Swap rows in, while no lookup runs.

        Raises:
            ConfigurationError: This thread is within a lookup, so it would wait for itself.
        """
        if getattr(self._own, "depth", 0):
            raise ConfigurationError("cannot apply a checkpoint from within a lookup; call update() outside of forward")
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
    """Wrap the forwards of a model and of its modules with tables, and all CUDA graph replays, to share ``lookups``."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with lookups.shared():
            return original(*args, **kwargs)

    hooks = Hooks()
    for _, module in modules_below(model):
        if module is model or isinstance(module, _WITH_TABLES):
            hooks.around(module, "forward", around)
    hooks.around(torch.cuda.CUDAGraph, "replay", around)
    return hooks

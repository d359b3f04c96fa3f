"""Mutants of what replicas of two-dimensional parallel models exchange when they are synchronised."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.simulator.mutants.replacing import Mutant, both, replacing, wrapping
from torchrec_cnr.saving import planned_save
from torchrec_cnr.tracking.replicas import Replicas


def _one_by_one(self: Replicas, sync: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Each set of rows is exchanged by a collective of its own, and only by ranks that have it."""
    for shard in self._shards:
        shard.check_writes()
    sync(*args, **kwargs)
    for shard, cut, synchronised in zip(self._shards, self._cut, self._synchronised, strict=True):
        rows = shard.rows
        synchronised |= self._united(cut | rows.marked)[0]
        cut.zero_()
        rows.marked.zero_()
        for held in (rows._since_baseline, rows._frozen):
            if held is not None:
                held.put(self._united(held.mask())[0])
        shard.accept_writes()


def _own_only(united: Any, self: Replicas, *masks: Tensor | None) -> Tensor:
    """The exchange happens, and what others have is not taken."""
    found: Tensor = united(self, *masks)
    return torch.stack([torch.zeros_like(found[0]) if mask is None else mask.bool() for mask in masks])


def _always(*_: Any) -> bool:
    return True


def _drops_cut(before_cut: Any, self: Replicas) -> None:
    before_cut(self)
    for cut in self._cut:
        cut.zero_()


OF_REPLICAS: tuple[Mutant, ...] = (
    Mutant(
        "replicas exchange frozen rows only where a save is in flight",
        lambda: replacing(Replicas, "_synchronise", _one_by_one),
    ),
    Mutant(
        "replicas do not mark the rows of others, and a save does not compare what they have marked",
        lambda: both(wrapping(Replicas, "_united", _own_only), replacing(planned_save, "agree", _always)),
    ),
    Mutant(
        "replicas forget the rows that were cut between two synchronisations",
        lambda: wrapping(Replicas, "before_cut", _drops_cut),
    ),
)

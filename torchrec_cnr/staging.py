"""Staging: the cut of an asynchronous save, and the copy of the state that goes with it, in one moment.

``dcp.async_save`` copies the state and saves the copy in a thread of its own. Were the marks taken there, a row that is
trained in between would count as saved, with the value it had before. So whoever copies cuts: this stager freezes the
marks, copies everything, and tells the planner which copy stands for which tensor. (DCP's own stagers do not copy the
ShardedTensors of TorchRec.)
"""

from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.staging import AsyncStager

from torchrec_cnr.planner import CNRSavePlanner
from torchrec_cnr.shards import MemoryKey, copied, local_shards, memory_key


class CNRStager(AsyncStager):
    """Stages saves of one planner; to be passed to ``dcp.async_save`` together with it.

    The save before must have ended: wait for its future first.

    Args:
        planner: The planner of these saves.
    """

    def __init__(self, planner: CNRSavePlanner) -> None:
        self._planner = planner

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Cut, and copy the state to the host."""
        live, paths = flatten_state_dict(state_dict)
        self._planner.cut(live)
        copies = {fqn: copied(value) for fqn, value in live.items()}
        self._planner.staged = {copy: key for fqn in live for copy, key in _pairs(live[fqn], copies[fqn])}
        return dict(unflatten_state_dict(copies, paths))

    def synchronize_staging(self) -> None:
        """Nothing to wait for: :meth:`stage` returns when all is copied."""

    def close(self) -> None:
        """Nothing to free: copies go with the save that they were made for."""


def _pairs(live: Any, copied: Any) -> list[tuple[MemoryKey, MemoryKey]]:
    """Of each shard, where its copy lies and where itself."""
    shards = zip(local_shards(live), local_shards(copied), strict=True)
    keys = [(memory_key(copy.tensor), memory_key(shard.tensor)) for shard, copy in shards]
    return [(copy, key) for copy, key in keys if copy is not None and key is not None]

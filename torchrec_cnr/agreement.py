"""Agreement: what the ranks of a save tell the coordinator, and what they must agree on.

DCP stores one of the shards that several ranks have in common, whichever rank has least to write. That is right only if
these are one and the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from torchrec_cnr.decisions import RowTensor, ShardKey
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.manifest import CheckpointRef
from torchrec_cnr.modified import Since


@dataclass(frozen=True)
class RankData:
    """What a rank's plan carries to the coordinator.

    Attributes:
        paths: DCP's flatten mapping.
        head: The checkpoint that this rank's marks relate to.
        tensors: Those that this rank can store by rows, by FQN.
        replaced: Optimizer state that was put in the place of the one that the head holds.
        marks: Digests of the modified rows of shards that other ranks may have, too, by what they are a delta of.
        of_own_rows: Optimizer state that is not sharded, although its table is.
    """

    paths: dict[str, tuple[Any, ...]]
    head: CheckpointRef | None
    tensors: dict[str, RowTensor]
    replaced: frozenset[ShardKey]
    marks: Mapping[tuple[ShardKey, Since], bytes]
    of_own_rows: frozenset[ShardKey]


def ranks_of_shards(plans: Sequence[SavePlan]) -> dict[ShardKey, list[int]]:
    """Which ranks hold each shard.

    Raises:
        ConfigurationError: Ranks hold different tensors under one FQN, of which DCP would save only one.
    """
    ranks_of: dict[ShardKey, list[int]] = {}
    sizes: dict[ShardKey, Any] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            key, data = shard_key(item), item.tensor_data
            ranks_of.setdefault(key, []).append(rank)
            size = (data.size, data.chunk.sizes) if data is not None else None
            if sizes.setdefault(key, size) != size:
                raise ConfigurationError(
                    f"item {key[0]!r} is not sharded, but has one size on rank {ranks_of[key][0]} and another on rank "
                    f"{rank}, so that DCP would save only one of them: name them apart"
                )
    return ranks_of


def refuse_unsharded_state(ranks_of: Mapping[ShardKey, Sequence[int]], data: Sequence[RankData]) -> None:
    """As ``torch.optim`` makes it of tables with dense kernels, of which each rank knows but its own rows.

    Raises:
        ConfigurationError: DCP would save that of one rank for all.
    """
    for key, ranks in ranks_of.items():
        if len(ranks) > 1 and any(key in data[rank].of_own_rows for rank in ranks):
            raise ConfigurationError(
                f"{key[0]!r} is optimizer state of each rank's own rows, but is not sharded as its table is, so that "
                "DCP would save that of one rank for all: give the table a fused kernel, or make it data-parallel"
            )


def agree(key: ShardKey, since: Since, ranks: Sequence[RankData]) -> bool:
    """Whether all ranks that have a shard modified the same rows of it."""
    return len({rank.marks.get((key, since)) for rank in ranks}) == 1


def shard_key(item: WriteItem) -> ShardKey:
    """Which shard an item of a plan is."""
    return item.index.fqn, tuple(item.index.offset or ())

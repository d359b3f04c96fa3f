"""Agreement: what the ranks of a save tell the coordinator, and what they must agree on.

DCP stores one of the shards that several ranks have in common, whichever rank has least to write. That is right only if
these are one and the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from torchrec_cnr.errors import ConfigurationError, SaveError
from torchrec_cnr.format.manifest import CheckpointRef, History
from torchrec_cnr.policies import Policy, Since
from torchrec_cnr.saving.decision import Decision, RowTensor
from torchrec_cnr.sharding import ShardKey, shard_key


@dataclass(frozen=True)
class RankData:
    """What a rank's plan carries to the coordinator.

    Attributes:
        paths: DCP's flatten mapping.
        head: The checkpoint that this rank's marks relate to.
        staged: What the save can be a delta of with what was staged; None if all rows are at hand.
        tensors: Those that this rank can store by rows, by FQN.
        whole: Shards that must be stored with all rows: optimizer state that was put in the place of the one that the
            head holds, and what was staged without marks.
        partial: Shards of which only the modified rows were staged.
        marks: Digests of the modified rows of shards that other ranks may have, too, by what they are a delta of.
        of_own_rows: Optimizer state that is not sharded, although its table is.
    """

    paths: dict[str, tuple[Any, ...]]
    head: CheckpointRef | None
    staged: frozenset[Since] | None
    tensors: Mapping[str, RowTensor]
    whole: frozenset[ShardKey]
    partial: frozenset[ShardKey]
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


@dataclass(frozen=True)
class _Staged:
    """The policy of a save whose rows were staged: what they were modified since is settled."""

    since: Since

    def decide(self, history: History) -> Since:
        return self.since


def policy_of_all(policy: Policy, data: Sequence[RankData]) -> Policy:
    """The policy that a save follows: rows that were staged leave it no choice.

    Raises:
        SaveError: Ranks have staged different rows.
    """
    staged = {rank.staged for rank in data}
    if staged == {None}:
        return policy
    common = frozenset(Since).intersection(*(sinces for sinces in staged if sinces is not None))
    if None in staged or not common:
        found = "; ".join(sorted(", ".join(since.value for since in sinces or ()) for sinces in staged))
        raise SaveError(f"nothing was saved, because ranks staged rows modified since different checkpoints ({found})")
    return _Staged(Since.EVER if Since.EVER in common else next(iter(common)))


def refuse_missing_rows(
    decision: Decision, ranks_of: Mapping[ShardKey, Sequence[int]], data: Sequence[RankData]
) -> None:
    """What must be stored whole must have been staged whole.

    Raises:
        SaveError: It was not.
    """
    for key, ranks in ranks_of.items():
        is_whole = decision.since is Since.EVER or key in decision.whole
        if is_whole and any(key in data[rank].partial for rank in ranks):
            raise SaveError(
                f"nothing was saved, because the checkpoint that {key[0]!r} was modified since cannot be built upon, "
                "and only modified rows were staged; the next save holds all rows"
            )


def agree(key: ShardKey, since: Since, ranks: Sequence[RankData]) -> bool:
    """Whether all ranks that have a shard modified the same rows of it."""
    return len({rank.marks.get((key, since)) for rank in ranks}) == 1

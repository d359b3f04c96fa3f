"""Decisions: what one save holds. Made by the coordinator, for all ranks.

A policy says what it would like; what is right comes first. Whenever a delta might not load, or might lack rows, the
save is a baseline, and whatever tensor the parent does not have is stored whole.

The ranks tell the coordinator what they hold. DCP stores one of the shards that several ranks have in common, whichever
rank has least to write. That is right only if these are one and the same.
"""

import logging
import posixpath
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from torchrec_cnr.errors import ConfigurationError, LoadError, SaveError
from torchrec_cnr.format.manifest import MANIFEST_FILE, CheckpointRef, History, Manifest, Pack
from torchrec_cnr.lineage.checkpoint import Checkpoint, Head, Lineage, read_checkpoint, read_lineage, relative_path
from torchrec_cnr.policies import Policy, Since
from torchrec_cnr.sharding import ShardKey, shard_key
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store

logger = logging.getLogger(__name__)

_MAX_READ_WHOLE = 16  # links of a lineage that every save reads


@dataclass(frozen=True)
class Decision:
    """What one save holds.

    Attributes:
        save_id: The save.
        since: What its rows were modified since.
        policy: Name of the policy that was asked.
        parent: The checkpoint it is a delta of, by full path, or None for a baseline.
        history: Of the lineage up to the head, or None for a baseline.
        after_ns: Commit time of the head; this save's must be later.
        whole: Shards that are stored with all their rows all the same.
        num_restores: Restores from a checkpoint that the state has been through.
        head: The checkpoint that the ranks stand on, by full path, if they all do.
        loadable_besides: Another checkpoint that may be loaded until this save commits, if its sinks must know of it.
    """

    save_id: str
    since: Since
    policy: str
    parent: CheckpointRef | None = None
    history: History | None = None
    after_ns: int = 0
    whole: frozenset[ShardKey] = frozenset()
    num_restores: int = 0
    head: CheckpointRef | None = None
    loadable_besides: CheckpointRef | None = None


@dataclass(frozen=True)
class RowTensor:
    """A tensor that a rank can store by rows: a table, or the optimizer state of one.

    Attributes:
        dtype: Name of its dtype.
        is_table: Whether it is a table.
        table: For row-wise optimizer state, the FQN of its table; its own size depends on the table's sharding.
    """

    dtype: str
    is_table: bool
    table: str | None


@dataclass(frozen=True)
class RankData:
    """What a rank's plan carries to the coordinator.

    Attributes:
        is_tracked: Whether its planner has a tracker.
        policy: Of its planner, as text.
        head: The checkpoint that this rank's marks relate to.
        baseline: The one that this rank takes for the baseline of the head's lineage; None if it has no head.
        num_links: Length of that lineage.
        staged: What the save can be a delta of with what was staged; None if all rows are at hand.
        tensors: Those that this rank can store by rows, by FQN.
        whole: Shards that must be stored with all rows, because no marks of them were staged.
        replaced: Optimizer state that took the place of the one that such a checkpoint holds: all of its rows are new.
        partial: Shards of which only the modified rows were staged.
        marks: Digests of the modified rows of shards that other ranks may have, too, by what they are a delta of.
        of_own_rows: Optimizer state that is not sharded, although its table is.
    """

    is_tracked: bool
    policy: str
    head: CheckpointRef | None
    baseline: CheckpointRef | None
    num_links: int
    staged: frozenset[Since] | None
    tensors: Mapping[str, RowTensor]
    whole: frozenset[ShardKey]
    replaced: Mapping[Since, frozenset[ShardKey]]
    partial: frozenset[ShardKey]
    marks: Mapping[tuple[ShardKey, Since], bytes]
    of_own_rows: frozenset[ShardKey]


@dataclass(frozen=True)
class Base:
    """What a save will be a delta of.

    Attributes:
        since: What its rows were modified since.
        parent: The parent.
        history: Of the lineage, which the save will extend.
    """

    since: Since
    parent: Checkpoint
    history: History


def newest_baseline(ranks: Sequence[RankData]) -> CheckpointRef | None:
    """Return the newest of the baselines that ranks with one head know.

    They differ if the lineage was compacted after some of the ranks had read it. A rank that knows an older baseline
    stores at least the rows that were modified since the newer one.
    """
    known = [rank for rank in ranks if rank.baseline is not None]
    return min(known, key=lambda rank: rank.num_links).baseline if known else None


def choose_base(
    policy: Policy,
    head: Head | None,
    heads: Collection[CheckpointRef | None],
    baseline: CheckpointRef | None,
    store: Store | None,
) -> Base | None:
    """What the next save is a delta of, or None if it is a baseline.

    Args:
        policy: Asked where a delta is possible.
        head: The checkpoint that the coordinator's marks relate to.
        heads: Those that each rank's marks relate to.
        baseline: Of the head's lineage, the newest that a rank knows.
        store: Where the save goes.

    Raises:
        StoreError: The store does not answer.
    """
    if head is None or baseline is None or store is None:
        return None
    if set(heads) != {head.ref}:
        logger.warning("ranks stand on different checkpoints (%s): this save is a baseline", _paths(heads))
        return None
    found = _intact_head(head)
    if found is None:
        logger.warning("%s is no longer what was saved there: this save is a baseline", head.ref.path)
        return None
    newest, history = found
    since = policy.decide(history)
    if since is Since.EVER:
        return None
    parent = newest if since is Since.HEAD else _intact_checkpoint(baseline)
    if parent is None:
        logger.warning("%s is no longer what was saved there: this save is a baseline", baseline.path)
        return None
    if store.row_log is not None and not store.row_log.holds(_packs_needed(store.row_log, head, newest, parent)):
        logger.warning("rows of %s are gone from topic %r: this save is a baseline", head.ref.path, store.row_log.topic)
        return None
    if relative_path(store, parent.store.url) is None:
        logger.info("%s cannot be named by a relative path from %s: it is a baseline", parent.store.url, store.url)
        return None
    return Base(since, parent, history)


def _packs_needed(row_log: RowLog, head: Head, newest: Checkpoint, parent: Checkpoint) -> list[Pack]:
    """The oldest and newest packs that a delta stands on, or takes over where the log keeps the newest rows only."""
    links = [newest if row_log.block_bytes is not None else parent]
    if parent.ref == head.ref and len(head.lineage) > 2:
        oldest = _intact_checkpoint(head.lineage[1])
        links += [] if oldest is None else [oldest]
    return [pack for link in links for pack in link.manifest.packs]


def stored_whole(tensors: Mapping[str, RowTensor], metadata: Metadata, parent: Manifest) -> set[str]:
    """FQNs that cannot be stored as deltas, because the parent does not have them, or has them otherwise."""
    return {fqn for fqn, tensor in tensors.items() if not _continues(fqn, tensor, metadata, parent)}


def _continues(fqn: str, tensor: RowTensor, metadata: Metadata, parent: Manifest) -> bool:
    old = parent.tensors.get(fqn)
    if old is None or (old.dtype, old.is_table, old.table) != (tensor.dtype, tensor.is_table, tensor.table):
        return False
    sized = tensor.table or fqn  # row-wise state is as large as its table's sharding makes it
    entry, old_entry = metadata.state_dict_metadata.get(sized), parent.tensors.get(sized)
    return isinstance(entry, TensorStorageMetadata) and old_entry is not None and tuple(entry.size) == old_entry.size


def _intact_head(head: Head) -> tuple[Checkpoint, History] | None:
    """The head and the history of its lineage, if all of it is still there and still the same.

    A long lineage is read whole every so many saves only, in between its two ends: a save asks for no more than a
    handful of manifests. One listing of the root tells whether the directory of a link was removed.
    """
    newest = _intact_checkpoint(head.ref)
    if newest is None:
        return None
    length = len(head.lineage)
    is_long = length > _MAX_READ_WHOLE and length % _MAX_READ_WHOLE != 0
    if is_long and not newest.is_compacted and _are_there(newest.store.at(".."), head.lineage):
        return newest, head.history
    try:
        lineage = read_lineage(newest.store)
    except LoadError:
        return None
    return lineage.newest, _history(head, lineage)


def _are_there(root: Store, lineage: Sequence[CheckpointRef]) -> bool:
    """Whether the baseline's manifest is there, and the directory of each link in this root."""
    there = {root.at(name).url for name in root.names()}
    roots_path = posixpath.dirname(lineage[-1].path)
    in_root = {ref.path for ref in lineage if posixpath.dirname(ref.path) == roots_path}
    return in_root <= there and Store.open(lineage[0].path).exists(MANIFEST_FILE)


def _history(head: Head, lineage: Lineage) -> History:
    """Of the head; where its lineage was compacted, that begins anew with what was folded."""
    links = lineage.checkpoints
    folded = max((number for number, link in enumerate(links) if link.is_compacted), default=None)
    if folded is None:
        return head.history
    history = links[folded].manifest.history
    return History(history.baseline_bytes, (*history.delta_bytes, *(link.num_bytes for link in links[folded + 1 :])))


def _intact_checkpoint(ref: CheckpointRef) -> Checkpoint | None:
    """The checkpoint referred to, if it is still there and still the same."""
    try:
        checkpoint = read_checkpoint(ref.path)
    except LoadError:
        return None
    return checkpoint if checkpoint.sha256 == ref.sha256 else None


def _paths(refs: Collection[CheckpointRef | None]) -> str:
    return ", ".join(sorted({ref.path if ref else "none" for ref in refs}))


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

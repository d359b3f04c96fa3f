"""The coordinator's decisions for all ranks: what one save contains.

A policy states a preference, and correctness comes first. If a delta might not load, or might lack rows, the save is a
baseline. A tensor that the parent does not have is stored whole.

The ranks report to the coordinator what they have. If several ranks have the same shard, DCP stores the copy of the
rank that has the least to write. That is correct only if all copies are the same.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from torchrec_cnr.errors import ConfigurationError, SaveError
from torchrec_cnr.format.manifest import CheckpointRef, History, Manifest, Pack
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.lineage.checkpoint import Checkpoint, Head, relative_path
from torchrec_cnr.lineage.intact import intact_chain, intact_checkpoint
from torchrec_cnr.lineage.other_roots import is_in_other_root
from torchrec_cnr.policies import Policy, Since
from torchrec_cnr.sharding import ShardKey, shard_key
from torchrec_cnr.storage.files import Listing
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredPart:
    """A transform or basis that the parent or an ancestor of it uses, so that a delta need not store it.

    Attributes:
        pack: Its data file, in any older checkpoint of the root; the directory is relative to the new checkpoint's.
        blob: Its place in it.
    """

    pack: Pack
    blob: Blob


@dataclass(frozen=True)
class Decision:
    """The decision on what one save contains.

    Attributes:
        save_id: Id of the save.
        since: What its rows were modified since.
        policy: Name of the policy.
        parent: The checkpoint that the save is based on, by full path, or None for a baseline.
        history: History of the chain so far, or None for a baseline.
        after_ns: Commit time of the latest checkpoint, in ns; this save's must be later.
        whole: Shards that are stored with all their rows in spite of a delta.
        num_restores: Number of restores from a checkpoint in the history of the state.
        head: The checkpoint that the modified rows of all ranks relate to, by full path; None if there is none.
        loadable_besides: Another checkpoint that may be loaded until this save commits, if sinks must preserve its
            rows.
        transforms: The transforms and bases that need not be stored, by their digests in hexadecimal.
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
    transforms: Mapping[str, StoredPart] = field(default_factory=dict)


@dataclass(frozen=True)
class RowTensor:
    """A tensor that a rank can store by rows: a table, or its optimizer state.

    Attributes:
        dtype: Name of the dtype.
        is_table: Whether it is a table.
        table: For row-wise optimizer state, the FQN of its table; its own size depends on the table's sharding.
    """

    dtype: str
    is_table: bool
    table: str | None


@dataclass(frozen=True)
class RankData:
    """The report of a rank's plan to the coordinator.

    Attributes:
        is_tracked: Whether the rank's planner has a tracker.
        policy: The planner's policy, as text.
        head: The checkpoint that this rank's modified rows relate to.
        baseline: The baseline of that checkpoint's chain, as this rank knows it; None without ``head``.
        num_links: Number of checkpoints in that chain.
        staged: What the save can be based on with the staged rows; None if nothing was staged.
        tensors: Tensors that this rank can store by rows, by FQN.
        whole: Shards that must be stored with all rows, because they were staged without their modified rows.
        replaced: By what a delta is based on, optimizer state that is another tensor there: all of its rows are new.
        partial: Shards with only their modified rows staged.
        marks: Digests of the modified rows of shards that other ranks may also have, by what a delta is based on.
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
    """The checkpoint that a save will be based on.

    Attributes:
        since: What its rows were modified since.
        chain: The checkpoints of the parent's chain that were read, oldest first; the parent last.
        history: History of the chain that the save extends.
        reused: The latest checkpoint, if it is no parent, but row blocks with its transforms may be kept in a topic.
    """

    since: Since
    chain: tuple[Checkpoint, ...]
    history: History
    reused: Checkpoint | None = None

    @property
    def parent(self) -> Checkpoint:
        """The parent."""
        return self.chain[-1]

    @property
    def used(self) -> tuple[Checkpoint, ...]:
        """The checkpoints that a prune must not remove before the commit."""
        return (self.parent,) if self.reused is None else (self.parent, self.reused)


def transforms_of(base: Base, store: Store) -> Mapping[str, StoredPart]:
    """Return the transforms and bases that a delta in ``store`` need not store, by their digests in hexadecimal.

    An ancestor counts if it was read to choose the base. In a long chain, most saves do not read most ancestors.
    Call it when leases protect ``base.used``. Manifests that name transforms are then read again: a compaction may have
    replaced them since they were read, and a prune may have removed files that only the old ones name. A manifest whose
    transforms newer ones name, too, is not needed.

    Raises:
        StoreError: The store does not answer.
    """
    parts: dict[str, StoredPart] = {}
    for checkpoint in reversed((*base.chain, *base.used[1:])):
        if _parts_of(checkpoint, store).keys() <= parts.keys():
            continue
        current = intact_checkpoint(checkpoint.ref)
        if current is not None:
            parts = {**_parts_of(current, store), **parts}
    return parts


def _parts_of(checkpoint: Checkpoint, store: Store) -> dict[str, StoredPart]:
    """Return the transforms and bases that a checkpoint uses, as another one in the directory ``store`` names them.

    Those in other roots are left out. A prune there does not know which of a checkpoint's files are used here.
    """
    parts: dict[str, StoredPart] = {}
    for entry in checkpoint.manifest.tensors.values():
        for shard in entry.shards:
            for digest, blob in shard.transform_parts.items():
                pack = checkpoint.manifest.packs[blob.pack]
                directory = checkpoint.store if pack.directory is None else checkpoint.store.at(pack.directory)
                path = relative_path(store, directory.url)
                if path is not None and pack.log is None and not is_in_other_root(path):
                    parts[digest] = StoredPart(replace(pack, directory=path), blob)
    return parts


def newest_baseline(ranks: Sequence[RankData]) -> CheckpointRef | None:
    """Return the newest of the baselines that ranks with the same latest checkpoint know.

    They differ if the chain was compacted after some of the ranks had read it. A rank that knows an older baseline
    stores at least the rows that were modified since the newer one.
    """
    ranks_with_baseline = [rank for rank in ranks if rank.baseline is not None]
    return min(ranks_with_baseline, key=lambda rank: rank.num_links).baseline if ranks_with_baseline else None


def choose_base(
    policy: Policy,
    head: Head | None,
    heads: Collection[CheckpointRef | None],
    baseline: CheckpointRef | None,
    store: Store | None,
    root: Listing | None = None,
    latest: Checkpoint | None = None,
) -> Base | None:
    """Return what the next save is based on, or None if it is a baseline.

    Args:
        policy: Decides where a delta is possible.
        head: The checkpoint that the coordinator's modified rows relate to.
        heads: The checkpoints that each rank's modified rows relate to.
        baseline: The newest baseline of its chain that a rank knows.
        store: Destination of the save.
        root: Content of its root, if it was listed for this save.
        latest: The latest checkpoint, if a listing has shown for this save that it is unchanged.

    Raises:
        StoreError: The store does not answer.
    """
    if head is None or baseline is None or store is None:
        logger.info(
            "it is not known since which checkpoint rows were modified, as in a first save, after forget() and after a "
            "load that left something out: this save is a baseline"
        )
        return None
    if set(heads) != {head.ref}:
        logger.warning("ranks are based on different checkpoints (%s): this save is a baseline", _paths(heads))
        return None
    head_and_history = intact_chain(head, {store.at("..").url: root} if root is not None else {}, latest)
    if head_and_history is None:
        logger.warning(
            "%s or a checkpoint that it is based on is missing, corrupt or was replaced: this save is a baseline",
            head.ref.path,
        )
        return None
    chain, history = head_and_history
    newest = chain[-1]
    since = policy.decide(history)
    if since is Since.EVER:
        logger.info("the policy %r begins a new chain: this save is a baseline", policy)
        return None
    parent = newest if since is Since.HEAD else intact_checkpoint(baseline)
    if parent is None and isinstance(policy, _Staged) and store.row_log is None:
        # A compaction has merged the baseline into the newest checkpoint, and a prune has removed it. The staged rows,
        # which were modified since the baseline, include those that were modified since the newest checkpoint.
        parent = newest
    if parent is None:
        logger.warning("%s is missing, corrupt or was replaced: this save is a baseline", baseline.path)
        return None
    if not _is_usable(parent, store, head, newest):
        return None
    keeps_blocks = parent is not newest and store.row_log is not None and store.row_log.block_bytes is not None
    reused = newest if keeps_blocks and _parts_of(newest, store) else None
    return Base(since, chain if parent is newest else (parent,), history, reused)


def _is_usable(parent: Checkpoint, store: Store, head: Head, newest: Checkpoint) -> bool:
    """Return whether a delta in ``store`` can be based on a checkpoint, which exists; log why not."""
    if store.row_log is not None and not _holds_rows(store.row_log, head, newest, parent):
        logger.warning("rows of %s are not in topic %r: this save is a baseline", head.ref.path, store.row_log.topic)
        return False
    if relative_path(store, parent.store.url) is None:
        logger.info("no relative path leads to %s from %s: this save is a baseline", parent.store.url, store.url)
        return False
    return True


def _holds_rows(row_log: RowLog, head: Head, newest: Checkpoint, parent: Checkpoint) -> bool:
    """Return whether a topic has the oldest and newest data files of the chain that a delta is based on.

    If it keeps the newest rows only, these are files to reuse. Then a merged parent must not have rows there, because
    later saves overwrite them.
    """
    if row_log.block_bytes is not None and any(pack.log and pack.log.key for pack in parent.manifest.packs):
        return False
    links = [newest if row_log.block_bytes is not None else parent]
    if parent.ref == head.ref and len(head.lineage) > 2:
        oldest = intact_checkpoint(head.lineage[1])
        links += [] if oldest is None else [oldest]
    return row_log.holds([pack for link in links for pack in link.manifest.packs])


def stored_whole(tensors: Mapping[str, RowTensor], metadata: Metadata, parent: Manifest) -> set[str]:
    """Return FQNs that cannot be stored as deltas: the parent lacks them, or has them with another dtype or size."""
    return {fqn for fqn, tensor in tensors.items() if not _continues(fqn, tensor, metadata, parent)}


def _continues(fqn: str, tensor: RowTensor, metadata: Metadata, parent: Manifest) -> bool:
    parent_tensor = parent.tensors.get(fqn)
    if parent_tensor is None or (parent_tensor.dtype, parent_tensor.is_table, parent_tensor.table) != (
        tensor.dtype,
        tensor.is_table,
        tensor.table,
    ):
        return False
    sized_fqn = tensor.table or fqn  # the size of row-wise state depends on its table's sharding
    entry, old_entry = metadata.state_dict_metadata.get(sized_fqn), parent.tensors.get(sized_fqn)
    return isinstance(entry, TensorStorageMetadata) and old_entry is not None and tuple(entry.size) == old_entry.size


def _paths(refs: Collection[CheckpointRef | None]) -> str:
    return ", ".join(sorted({ref.path if ref else "none" for ref in refs}))


def ranks_of_shards(plans: Sequence[SavePlan]) -> dict[ShardKey, list[int]]:
    """Return which ranks have each shard.

    Raises:
        ConfigurationError: Ranks have different tensors under one FQN. DCP would save only one of them.
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
                    f"{rank}, and DCP would save only one of them: give them different names"
                )
    return ranks_of


def refuse_unsharded_state(ranks_of: Mapping[ShardKey, Sequence[int]], data: Sequence[RankData]) -> None:
    """Refuse optimizer state that is not sharded although its table is: each rank's state covers only its own rows.

    ``torch.optim`` makes such state for tables with dense kernels.

    Raises:
        ConfigurationError: There is such state. DCP would save one rank's state for all ranks.
    """
    for key, ranks in ranks_of.items():
        if len(ranks) > 1 and any(key in data[rank].of_own_rows for rank in ranks):
            raise ConfigurationError(
                f"{key[0]!r} is optimizer state of each rank's own rows, but is not sharded as its table is, and DCP "
                "would save one rank's state for all: give the table a fused kernel, or make it data-parallel"
            )


@dataclass(frozen=True)
class _Staged:
    """The policy of a save whose rows were staged: staging has decided what they were modified since."""

    since: Since

    def decide(self, history: History) -> Since:
        return self.since


def policy_of_all(policy: Policy, data: Sequence[RankData]) -> Policy:
    """Return the policy that a save follows: ``policy``, or the one that staging has decided.

    Raises:
        SaveError: Ranks have staged different rows.
    """
    staged = {rank.staged for rank in data}
    if staged == {None}:
        return policy
    common = frozenset(Since).intersection(*(sinces for sinces in staged if sinces is not None))
    if None in staged or not common:
        description = "; ".join(sorted(", ".join(since.value for since in sinces or ()) for sinces in staged))
        raise SaveError(
            f"nothing was saved, because ranks staged rows modified since different checkpoints ({description})"
        )
    return _Staged(Since.EVER if Since.EVER in common else next(iter(common)))


def refuse_missing_rows(
    decision: Decision, ranks_of: Mapping[ShardKey, Sequence[int]], data: Sequence[RankData]
) -> None:
    """Refuse a save that must store a shard whole if only its modified rows were staged.

    Raises:
        SaveError: There is such a shard.
    """
    for key, ranks in ranks_of.items():
        is_whole = decision.since is Since.EVER or key in decision.whole
        if is_whole and any(key in data[rank].partial for rank in ranks):
            raise SaveError(
                f"nothing was saved, because {key[0]!r} cannot be stored as a delta of the checkpoint that it was "
                "modified since, and only modified rows were staged; the next save will contain all rows"
            )


def agree(key: ShardKey, since: Since, ranks: Sequence[RankData]) -> bool:
    """Return whether all ranks that have a shard modified the same rows of it."""
    return len({rank.marks.get((key, since)) for rank in ranks}) == 1

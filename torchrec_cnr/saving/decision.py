"""Decisions: what one save holds. Made by the coordinator, for all ranks.

A policy says what it would like; what is right comes first. Whenever a delta might not load, or might lack rows, the
save is a baseline, and whatever tensor the parent does not have is stored whole.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchrec_cnr.errors import ConfigurationError, LoadError
from torchrec_cnr.format.manifest import CheckpointRef, History, Manifest
from torchrec_cnr.lineage.checkpoint import Head, Lineage, committed, read_lineage, relative_path
from torchrec_cnr.lineage.latest import newest_first
from torchrec_cnr.policies import Full, Intermittent, OneShot, Policy, Since
from torchrec_cnr.sharding import ShardKey
from torchrec_cnr.storage.row_log import RowLog, root_id
from torchrec_cnr.storage.store import Store

logger = logging.getLogger(__name__)

_NUM_LOOKED_AT = 8  # of the newest markers


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
        newest: The newest checkpoint that was committed, if that is another one and rows go to a log of row blocks.
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
    newest: CheckpointRef | None = None


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
class Base:
    """What a save will be a delta of.

    Attributes:
        since: What its rows were modified since.
        head: The checkpoint that the ranks stand on.
        parent: The parent's manifest.
        ref: The parent, by full path.
        history: Of the lineage, which the save will extend.
    """

    since: Since
    head: Head
    parent: Manifest
    ref: CheckpointRef
    history: History


def choose_base(
    policy: Policy, head: Head | None, heads: Collection[CheckpointRef | None], store: Store | None
) -> Base | None:
    """What the next save is a delta of, or None if it is a baseline.

    Args:
        policy: Asked where a delta is possible.
        head: The checkpoint that the coordinator's marks relate to.
        heads: Those that each rank's marks relate to.
        store: Where the save goes.

    Raises:
        StoreError: The store does not answer.
    """
    if head is None or store is None:
        return None
    if set(heads) != {head.ref}:
        logger.warning("ranks stand on different checkpoints (%s): this save is a baseline", _paths(heads))
        return None
    lineage = _intact(head.ref)
    if lineage is None:
        logger.warning("%s is no longer what was saved there: this save is a baseline", head.ref.path)
        return None
    history = _history(head, lineage)
    since = policy.decide(history)
    if since is Since.EVER:
        return None
    below = lineage if since is Since.HEAD else _intact(head.baseline)
    if below is None:
        logger.warning("%s is no longer what was saved there: this save is a baseline", head.baseline.path)
        return None
    parent = below.newest
    if relative_path(store, parent.store.url) is None:
        logger.info("%s cannot be named by a relative path from %s: it is a baseline", parent.store.url, store.url)
        return None
    return Base(since, head, parent.manifest, parent.ref, history)


def newest_beside(store: Store, head: CheckpointRef | None) -> CheckpointRef | None:
    """The newest committed checkpoint of a job's root, if it is not its head.

    It may be loaded until the next one is committed, although this job does not go on from it.

    Raises:
        StoreError: Store or log do not answer.
    """
    root = store.at("..")
    for marker in reversed(
        store.row_log.markers(root_id(root.url), _NUM_LOOKED_AT) if store.row_log is not None else ()
    ):
        if head is not None and marker.sha256 == head.sha256:
            return None
        found = committed(root.at(marker.name), marker.save_id)
        if found is not None and found.sha256 == marker.sha256:
            return found.ref
    newest = next(newest_first(root.url, store.row_log), None)
    return None if newest is None or (head is not None and newest.sha256 == head.sha256) else newest.ref


def refuse_policy(policy: Policy, row_log: RowLog | None) -> None:
    """A log of row blocks holds what was modified since the baseline, and nothing else.

    Raises:
        ConfigurationError: The policy makes other deltas.
    """
    if (
        row_log is not None
        and row_log.block_bytes is not None
        and not isinstance(policy, OneShot | Intermittent | Full)
    ):
        raise ConfigurationError(
            f"the policy {type(policy).__name__} makes deltas of deltas, but the topic {row_log.topic!r} is compacted "
            "and keeps the newest rows only: use OneShot, Intermittent or Full, or a topic that is not compacted"
        )


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


def _history(head: Head, lineage: Lineage) -> History:
    """Of the head; where its lineage was compacted, that begins anew with what was folded."""
    links = lineage.checkpoints
    folded = max((number for number, link in enumerate(links) if link.is_compacted), default=None)
    if folded is None:
        return head.history
    history = links[folded].manifest.history
    return History(history.baseline_bytes, (*history.delta_bytes, *(link.num_bytes for link in links[folded + 1 :])))


def _intact(ref: CheckpointRef) -> Lineage | None:
    """The lineage of the checkpoint referred to, if it is still there and still the same."""
    try:
        lineage = read_lineage(ref.path)
    except LoadError:
        return None
    return lineage if lineage.newest.sha256 == ref.sha256 else None


def _paths(refs: Collection[CheckpointRef | None]) -> str:
    return ", ".join(sorted({ref.path if ref else "none" for ref in refs}))

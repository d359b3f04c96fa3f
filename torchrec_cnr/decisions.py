"""Decisions: what one save holds. Made by the coordinator, for all ranks.

A policy says what it would like; what is right comes first. Whenever a delta might not load, or might lack rows, the
save is a baseline, and whatever tensor the parent does not have is stored whole.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchrec_cnr.errors import LoadError
from torchrec_cnr.lineage import Checkpoint, read_checkpoint, relative_path
from torchrec_cnr.manifest import CheckpointRef, Head, History, Manifest
from torchrec_cnr.modified import Since
from torchrec_cnr.policies import Policy
from torchrec_cnr.stores import Store

logger = logging.getLogger(__name__)

ShardKey = tuple[str, tuple[int, ...]]


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
    """

    save_id: str
    since: Since
    policy: str
    parent: CheckpointRef | None = None
    history: History | None = None
    after_ns: int = 0
    whole: frozenset[ShardKey] = frozenset()
    num_restores: int = 0


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
    """

    since: Since
    head: Head
    parent: Manifest
    ref: CheckpointRef


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
    since = policy.decide(head.history)
    if since is Since.EVER:
        return None
    lineage = head.lineage[:1] if since is Since.BASELINE else head.lineage
    ref = lineage[-1]
    links = [_intact(link) for link in lineage]
    parent = links[-1]
    if parent is None or None in links:
        changed = lineage[links.index(None)].path
        logger.warning("%s is no longer what was saved there: this save is a baseline", changed)
        return None
    if relative_path(store, ref.path) is None:
        logger.info("%s cannot be named by a relative path from %s: this save is a baseline", ref.path, store.url)
        return None
    return Base(since, head, parent.manifest, ref)


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


def _intact(ref: CheckpointRef) -> Checkpoint | None:
    """The checkpoint referred to, if it is still there and still the same."""
    try:
        checkpoint = read_checkpoint(ref.path)
    except LoadError:
        return None
    return checkpoint if checkpoint.sha256 == ref.sha256 else None


def _paths(refs: Collection[CheckpointRef | None]) -> str:
    return ", ".join(sorted({ref.path if ref else "none" for ref in refs}))

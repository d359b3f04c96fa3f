"""The commit of a save: its manifest, put last, and only if it can be loaded again and nothing it needs was pruned."""

import posixpath
import time

from torch.distributed.checkpoint.metadata import Metadata

from torchrec_cnr import manifest_json
from torchrec_cnr.assembly import Assembled
from torchrec_cnr.decisions import Decision
from torchrec_cnr.errors import LoadError, SaveError
from torchrec_cnr.fences import Fence
from torchrec_cnr.leases import LEASE_SECS, Lease
from torchrec_cnr.lineage import relative_path
from torchrec_cnr.manifest import FILE_NAME, CheckpointRef, History, Manifest
from torchrec_cnr.stores import Store
from torchrec_cnr.version import __version__


def manifest_of(store: Store, decision: Decision, parts: Assembled, metadata: Metadata, save_id: str) -> Manifest:
    """The manifest of what all ranks have written.

    Args:
        store: The checkpoint.
        decision: What it is a delta of.
        parts: What was written.
        metadata: DCP's.
        save_id: Of this save.

    Raises:
        SaveError: The parent is out of reach.
    """
    return Manifest(
        created_ns=max(time.time_ns(), decision.after_ns + 1),
        checkpoint_id=posixpath.basename(store.path),
        save_id=save_id,
        parent=_parent(store, decision),
        policy=decision.policy,
        history=_extended(decision.history, sum(pack.num_bytes for pack in parts.packs)),
        num_restores=decision.num_restores,
        world_size=len(parts.phases),
        writer=f"torchrec_cnr {__version__}",
        packs=parts.packs,
        tensors=parts.tensors,
        objects=parts.objects,
        paths=dict(sorted((metadata.planner_data or {}).items())),
    )


def file_of(manifest: Manifest, store: Store) -> bytes:
    """The bytes of a manifest's file.

    Raises:
        SaveError: It could not be loaded again.
    """
    try:
        return manifest_json.dumps_valid(manifest, f"{store.url}/{FILE_NAME}")
    except LoadError as error:
        raise SaveError(f"nothing was committed, because it could not be loaded again: {error}") from error


def commit(
    store: Store, data: bytes, parent: CheckpointRef | None, save_id: str, lease: Lease | None, fence: Fence | None
) -> None:
    """Put the manifest, where none is.

    Args:
        store: The checkpoint.
        data: The manifest's file.
        parent: What the manifest names as its parent.
        save_id: Of this save.
        lease: Keeps its packs from being pruned.
        fence: Of the job, if it may be the only one that saves there.

    Raises:
        CheckpointExistsError: There is another one.
        FencedError: A later job saves there.
        SaveError: Something that it needs may have been pruned.
        StoreError: The store refused.
    """
    if parent is not None and not store.at(parent.path).exists(FILE_NAME):
        raise SaveError(
            f"{store.url}: nothing was committed, because its parent {store.at(parent.path).url} was pruned meanwhile; "
            "save again: the next save will be a baseline"
        )
    if lease is not None and lease.has_run_out:
        raise SaveError(
            f"{store.url}: nothing was committed, because the save took longer than {LEASE_SECS} s, and its packs may "
            "have been pruned; save again"
        )
    if fence is not None:
        fence.check()
    store.put_new(FILE_NAME, data, save_id)


def _parent(store: Store, decision: Decision) -> CheckpointRef | None:
    if decision.parent is None:
        return None
    path = relative_path(store, decision.parent.path)
    if path is None:
        raise SaveError(f"{store.url}: no relative path to its parent {decision.parent.path}")
    return CheckpointRef(path, decision.parent.sha256)


def _extended(history: History | None, num_bytes: int) -> History:
    if history is None:
        return History(num_bytes)
    return History(history.baseline_bytes, (*history.delta_bytes, num_bytes))

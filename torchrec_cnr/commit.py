"""The commit of a save: its manifest, put last, and only if it can be loaded again and nothing it needs was pruned."""

import posixpath
import time
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata

from torchrec_cnr import manifest_json
from torchrec_cnr.assembly import Assembled
from torchrec_cnr.decisions import Decision
from torchrec_cnr.errors import LoadError, SaveError
from torchrec_cnr.fences import Fence
from torchrec_cnr.leases import LEASE_SECS, Lease
from torchrec_cnr.lineage import relative_path
from torchrec_cnr.manifest import FILE_NAME, CheckpointRef, History, Manifest
from torchrec_cnr.marking import commit_marked
from torchrec_cnr.row_logs import Marker, root_id
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


@dataclass(frozen=True)
class ManifestFile:
    """A manifest that is ready to be put.

    Attributes:
        data: The file's bytes.
        marker: What tells of it in a log.
        parent: The checkpoint's parent.
    """

    data: bytes
    marker: Marker
    parent: CheckpointRef | None


def file_of(manifest: Manifest, store: Store) -> ManifestFile:
    """The file of a manifest.

    Raises:
        SaveError: It could not be loaded again.
    """
    try:
        data, sha256 = manifest_json.dumps_valid(manifest, f"{store.url}/{FILE_NAME}")
    except LoadError as error:
        raise SaveError(f"nothing was committed, because it could not be loaded again: {error}") from error
    root, name, parent = root_id(store.at("..").url), posixpath.basename(store.path), manifest.parent
    marker = Marker(
        root, name, manifest.save_id, sha256, None if parent is None else parent.sha256, manifest.created_ns
    )
    return ManifestFile(data, marker, parent)


def commit(store: Store, file: ManifestFile, lease: Lease | None, fence: Fence | None) -> None:
    """Put the manifest, where none is; if the store has a log, once its marker is there.

    Args:
        store: The checkpoint.
        file: Its manifest.
        lease: Keeps its packs from being pruned.
        fence: Of the job, if it may be the only one that saves there.

    Raises:
        CheckpointExistsError: There is another one.
        FencedError: A later job saves there.
        SaveError: Something that it needs may have been pruned.
        StoreError: Store or log refused.
    """
    if file.parent is not None and not store.at(file.parent.path).exists(FILE_NAME):
        raise SaveError(
            f"{store.url}: nothing was committed, because its parent {store.at(file.parent.path).url} was pruned "
            "meanwhile; save again: the next save will be a baseline"
        )
    if lease is not None and lease.has_run_out:
        raise SaveError(
            f"{store.url}: nothing was committed, because the save took longer than {LEASE_SECS} s, and its packs may "
            "have been pruned; save again"
        )
    check = fence.check if fence is not None else _no_check
    check()
    if store.log is not None:
        commit_marked(store, store.log, file.marker, file.data, check)
    else:
        store.put_new(FILE_NAME, file.data, file.marker.save_id)


def _no_check() -> None:
    """Without a lineage, jobs may save side by side."""


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

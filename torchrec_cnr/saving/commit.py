"""The commit of a save: from what every rank reports having written to a manifest, which is put last.

Each rank numbers its packs by itself; here they get one numbering. DCP's own writer reports success for tensors that
were never written, so every chunk of the plan must be matched by exactly one record, and nothing else. The manifest is
put only if it can be loaded again and nothing it needs was pruned.
"""

import itertools
import posixpath
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from torchrec_cnr.errors import CheckpointExistsError, FencedError, LoadError, SaveError
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import (
    MANIFEST_FILE,
    CheckpointRef,
    History,
    Manifest,
    Pack,
    Renumbering,
    Shard,
    TensorEntry,
)
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.gc_pause import paused_gc
from torchrec_cnr.lineage.checkpoint import relative_path
from torchrec_cnr.lineage.marker_commit import commit_marked
from torchrec_cnr.lineage.other_roots import tell_other_root
from torchrec_cnr.progress import SavePhases
from torchrec_cnr.saving.decision import Decision
from torchrec_cnr.saving.plug_in_messages import STAGED, CommittedSize
from torchrec_cnr.storage.fences import Fence
from torchrec_cnr.storage.leases import LEASE_SECS, Lease
from torchrec_cnr.storage.row_log import Marker, root_id
from torchrec_cnr.storage.store import Store
from torchrec_cnr.version import __version__

Key = tuple[tuple[int, ...], tuple[int, ...]] | None  # offsets and sizes of a shard; None for an object
RANK_RECORD = ""  # the fqn under which each rank reports its packs; DCP has no other way to pass them


@dataclass(frozen=True)
class RankRecord:
    """The files of one rank, and what they took."""

    packs: tuple[Pack, ...]
    phases: SavePhases


@dataclass(frozen=True)
class ShardRecord:
    """A shard that was written: what a rank knows of a ``TensorEntry``, with its own numbers of packs.

    Its rows may be stored in parts, as shards of one place that have no row in common.
    """

    size: tuple[int, ...]
    dtype: str
    is_table: bool
    table: str | None
    parts: tuple[Shard, ...]


@dataclass(frozen=True)
class Assembled:
    """The parts of a manifest that the ranks' records give; and what each rank took."""

    packs: list[Pack]
    phases: list[SavePhases]
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, Blob]


def assemble(results: Sequence[Sequence[WriteResult]]) -> Assembled:
    """Number all ranks' records through."""
    packs: list[Pack] = []
    phases: list[SavePhases] = []
    shards: dict[str, list[tuple[ShardRecord, tuple[Shard, ...]]]] = {}  # each with its parts, renumbered
    objects: dict[str, Blob] = {}
    for rank, rank_results in enumerate(results):
        records = [(result.index.fqn, result.storage_data) for result in rank_results]
        files = [record for _, record in records if isinstance(record, RankRecord)]
        if len(files) != 1:
            raise SaveError(f"rank {rank} reported its packs {len(files)} times, expected once; save again")
        renumbered = Renumbering(partial(_behind, len(packs)))
        packs += files[0].packs
        phases.append(files[0].phases)
        for fqn, record in records:
            if isinstance(record, ShardRecord):
                shards.setdefault(fqn, []).append((record, tuple(map(renumbered.shard, record.parts))))
            elif isinstance(record, Blob):
                objects[fqn] = renumbered.blob(record)
    tensors = {fqn: _tensor_entry(fqn, records) for fqn, records in shards.items()}
    return Assembled(packs, phases, dict(sorted(tensors.items())), dict(sorted(objects.items())))


def _behind(num_packs: int, blob: Blob) -> Blob:
    return Blob(blob.pack + num_packs, blob.offset, blob.num_bytes, blob.crc32c)


def _tensor_entry(fqn: str, written: Sequence[tuple[ShardRecord, tuple[Shard, ...]]]) -> TensorEntry:
    # What an empty shard belongs to, its rank cannot tell.
    filled = [record for record, parts in written if 0 not in parts[0].box.sizes] or [written[0][0]]
    first = filled[0]
    shared = {(r.size, r.dtype, r.is_table, r.table) for r in filled}
    if len(shared) != 1:
        raise SaveError(f"tensor {fqn!r}: its shards do not agree in size, dtype or table: {shared}")
    ordered = sorted([parts for _, parts in written], key=lambda parts: parts[0].box.offsets)
    shards = tuple(itertools.chain.from_iterable(ordered))
    places = tuple([parts[0].place for parts in ordered]) if len(shards) > len(ordered) else None
    return TensorEntry(first.dtype, first.size, shards, first.is_table, first.table, folded=places)


def _check_against_plan(metadata: Metadata, tensors: Mapping[str, TensorEntry], objects: Mapping[str, Blob]) -> None:
    planned: dict[str, set[Key]] = {}
    for fqn, plan in metadata.state_dict_metadata.items():
        chunks = plan.chunks if isinstance(plan, TensorStorageMetadata) else None
        planned[fqn] = {None} if chunks is None else {(c.offsets, c.sizes) for c in chunks}
    written: dict[str, set[Key]] = {fqn: {None} for fqn in objects}
    for fqn, entry in tensors.items():
        places = [(place.box.offsets, place.box.sizes) for place in entry.sharding]
        written.setdefault(fqn, set()).update(places)
        if len(set(places)) != len(places):
            raise SaveError("a shard was written twice; save again")
    if written != planned:
        missing, surplus = _difference(planned, written), _difference(written, planned)
        raise SaveError(
            f"what was written is not what was planned: missing {missing or 'nothing'}, not planned "
            f"{surplus or 'nothing'}; nothing was committed, save again"
        )


def _difference(some: Mapping[str, set[Key]], others: Mapping[str, set[Key]]) -> list[str]:
    """The first of what is in one and not in the other."""
    found = [(fqn, key) for fqn, keys in some.items() for key in keys - others.get(fqn, set())]
    return sorted(str((fqn, key and Box(*key))) for fqn, key in found)[:3]


@dataclass(frozen=True)
class ManifestFile:
    """A manifest that is ready to be put.

    Attributes:
        manifest: The manifest.
        data: The file's bytes.
        sha256: Their digest.
        phases: What each rank took.
    """

    manifest: Manifest
    data: bytes
    sha256: str
    phases: tuple[SavePhases, ...]

    @property
    def size(self) -> CommittedSize:
        """What it commits: at this moment, all packs are its own."""
        num_bytes = sum(pack.num_bytes for pack in self.manifest.packs) + len(self.data)
        return CommittedSize(self.manifest.kind, num_bytes, self.manifest.num_rows)

    def marker(self, store: Store) -> Marker:
        """What tells of it in a log."""
        root, name, manifest = root_id(store.at("..").url), posixpath.basename(store.path), self.manifest
        parent_sha256 = None if manifest.parent is None else manifest.parent.sha256
        return Marker(root, name, manifest.save_id, self.sha256, parent_sha256, manifest.created_ns)


@paused_gc()  # to its end: then all that was made here is gone, and need not be looked through
def file_of(
    store: Store, decision: Decision, metadata: Metadata, results: Sequence[Sequence[WriteResult]], save_id: str
) -> ManifestFile:
    """The manifest of what all ranks have written, as a file.

    Args:
        store: The checkpoint.
        decision: What it is a delta of.
        metadata: DCP's metadata of the global plan.
        results: What ``write_data`` returned on each rank.
        save_id: Of this save.

    Raises:
        SaveError: Something planned was not written, something else was, or ranks disagree about a tensor; or the
            checkpoint could not be loaded again, or its parent is out of reach.
    """
    parts = assemble(results)
    _check_against_plan(metadata, parts.tensors, parts.objects)
    manifest = Manifest(
        created_ns=max(time.time_ns(), decision.after_ns + 1),
        checkpoint_id=posixpath.basename(store.path),
        save_id=save_id,
        parent=_parent(store, decision),
        policy=decision.policy,
        history=_extended(decision.history, sum(pack.num_bytes for pack in parts.packs)),
        num_restores=decision.num_restores,
        world_size=len(parts.phases),
        writer=f"torchrec_cnr {__version__}",
        packs=tuple(parts.packs),
        tensors=parts.tensors,
        objects=parts.objects,
        paths=dict(sorted((key, path) for key, path in (metadata.planner_data or {}).items() if key != STAGED)),
    )
    try:
        data, sha256 = manifest_json.dumps_valid(manifest, f"{store.url}/{MANIFEST_FILE}")
    except LoadError as error:
        raise SaveError(f"nothing was committed, because it could not be loaded again: {error}") from error
    return ManifestFile(manifest, data, sha256, tuple(parts.phases))


def commit(store: Store, file: ManifestFile, lease: Lease | None, fence: Fence | None) -> None:
    """Put the manifest, where none is; if the store has a log, once its marker is there.

    Args:
        store: The checkpoint.
        file: Its manifest.
        lease: Keeps its packs from being pruned. If the commit fails and may yet arrive, it is left until it runs out.
        fence: Of the job, if it may be the only one that saves there.

    Raises:
        CheckpointExistsError: There is another one.
        FencedError: A later job saves there.
        SaveError: Something that it needs may have been pruned, or is not in this store.
        StoreError: Store or log refused.
    """
    parent = file.manifest.parent
    if parent is not None and not store.at(parent.path).exists(MANIFEST_FILE):
        raise SaveError(
            f"{store.url}: nothing was committed, because its parent {store.at(parent.path).url} was pruned "
            "meanwhile; save again: the next save will be a baseline"
        )
    if parent is not None:
        store.at(parent.path).force_names()  # its own writer may have been killed before it was durable
        tell_other_root(store, parent.path)
    _refuse_missing_packs(store, file.manifest)
    if lease is not None and lease.is_lost:
        raise SaveError(
            f"{store.url}: nothing was committed, because its lease of {LEASE_SECS} s has run out or was removed, and "
            "its packs may have been pruned; save again"
        )
    check = fence.check if fence is not None else _no_check
    check()
    try:
        if store.row_log is not None:
            commit_marked(store, store.row_log, file.marker(store), file.data, check)
        elif store.put_new(MANIFEST_FILE, file.data, file.manifest.save_id) and lease is not None:
            lease.leave()  # a prune must not remove the checkpoint before the request that may still put its manifest
    except (CheckpointExistsError, FencedError):
        raise
    except BaseException:
        # A request that seems to have failed may still arrive, and name packs that a prune has removed meanwhile.
        if lease is not None and not (store.is_local and store.row_log is None):
            lease.leave()
        raise


def _refuse_missing_packs(store: Store, manifest: Manifest) -> None:
    """All packs must be in the store that this rank commits to.

    A prune may have removed them, by a clock that is ahead. Those of other ranks may never have been there: each rank
    has opened it by itself.
    """
    there = store.listing().files
    for pack in manifest.packs:
        if pack.is_own_file and there.get(pack.name) != pack.num_bytes:
            found = f"{there[pack.name]} bytes of it are" if pack.name in there else "it is not"
            raise SaveError(
                f"{store.url}: nothing was committed, because a rank has written {pack.name} ({pack.num_bytes} bytes), "
                f"and {found} in the store of the rank that commits: save again if it was pruned meanwhile; or save to "
                "a store that all ranks share, which disks of their own and 'memory://' are not"
            )


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

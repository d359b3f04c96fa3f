"""The commit of a save: build the manifest from what all ranks report, and write it last.

Each rank numbers its own data files. Here they get one numbering. DCP's own writer reports success even for tensors
that were never written. So the commit requires exactly one record for every chunk of the plan, and no others. It writes
the manifest only if a load could read it and no prune has removed anything that it needs.
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
    own_bytes,
)
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.gc_pause import paused_gc
from torchrec_cnr.lineage.checkpoint import Checkpoint, relative_path
from torchrec_cnr.lineage.marker_commit import commit_marked
from torchrec_cnr.lineage.other_roots import tell_other_root
from torchrec_cnr.progress import SavePhases
from torchrec_cnr.saving.decision import Decision
from torchrec_cnr.saving.plug_in_messages import STAGED, CommittedSize
from torchrec_cnr.storage.fences import Fence
from torchrec_cnr.storage.files import Listing
from torchrec_cnr.storage.leases import LEASE_SECS, Lease
from torchrec_cnr.storage.row_log import Marker, root_id
from torchrec_cnr.storage.store import Store
from torchrec_cnr.version import __version__

Key = tuple[tuple[int, ...], tuple[int, ...]] | None  # offsets and sizes of a shard; None for an object
RANK_RECORD = ""  # the FQN under which each rank reports its data files; DCP has no other way to pass them


@dataclass(frozen=True)
class RankRecord:
    """The data files of one rank, and the time that they took."""

    packs: tuple[Pack, ...]
    phases: SavePhases


@dataclass(frozen=True)
class ShardRecord:
    """A shard that was written: a rank's part of a ``TensorEntry``, with the rank's own numbers of data files.

    Its rows may be stored in parts: several shards of the same place, which have no row in common.
    """

    size: tuple[int, ...]
    dtype: str
    is_table: bool
    table: str | None
    parts: tuple[Shard, ...]


@dataclass(frozen=True)
class Assembled:
    """The parts of a manifest that come from the ranks' records, and the phases of each rank."""

    packs: list[Pack]
    phases: list[SavePhases]
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, Blob]


def assemble(results: Sequence[Sequence[WriteResult]]) -> Assembled:
    """Combine the records of all ranks, with one numbering of data files."""
    packs: list[Pack] = []
    phases: list[SavePhases] = []
    shards: dict[str, list[tuple[ShardRecord, tuple[Shard, ...]]]] = {}  # each with its parts, renumbered
    objects: dict[str, Blob] = {}
    for rank, rank_results in enumerate(results):
        records = [(result.index.fqn, result.storage_data) for result in rank_results]
        files = [record for _, record in records if isinstance(record, RankRecord)]
        if len(files) != 1:
            raise SaveError(f"rank {rank} reported its data files {len(files)} times, expected once; save again")
        renumbered = Renumbering(partial(_placed, _numbered(files[0].packs, packs)))
        phases.append(files[0].phases)
        for fqn, record in records:
            if isinstance(record, ShardRecord):
                shards.setdefault(fqn, []).append((record, tuple(map(renumbered.shard, record.parts))))
            elif isinstance(record, Blob):
                objects[fqn] = renumbered.blob(record)
    tensors = {fqn: _tensor_entry(fqn, records) for fqn, records in shards.items()}
    return Assembled(packs, phases, dict(sorted(tensors.items())), dict(sorted(objects.items())))


def _numbered(rank_packs: Sequence[Pack], packs: list[Pack]) -> list[int]:
    """Append the data files of a rank to those of all, and return their numbers. Ranks may use the same older file."""
    older_packs = {pack: number for number, pack in enumerate(packs) if pack.directory is not None}
    numbers = []
    for pack in rank_packs:
        if pack not in older_packs:
            packs.append(pack)
        numbers.append(older_packs.get(pack, len(packs) - 1))
    return numbers


def _placed(numbers: Sequence[int], blob: Blob) -> Blob:
    return blob.in_pack(numbers[blob.pack])


def _tensor_entry(fqn: str, records_and_parts: Sequence[tuple[ShardRecord, tuple[Shard, ...]]]) -> TensorEntry:
    # An empty shard's record does not count: its rank cannot know the table that it belongs to.
    filled_records = [record for record, parts in records_and_parts if 0 not in parts[0].box.sizes] or [
        records_and_parts[0][0]
    ]
    first_record = filled_records[0]
    descriptions = {(r.size, r.dtype, r.is_table, r.table) for r in filled_records}
    if len(descriptions) != 1:
        raise SaveError(f"tensor {fqn!r}: its shards differ in size, dtype or table: {descriptions}")
    ordered_parts = sorted([parts for _, parts in records_and_parts], key=lambda parts: parts[0].box.offsets)
    shards = tuple(itertools.chain.from_iterable(ordered_parts))
    places = tuple([parts[0].place for parts in ordered_parts]) if len(shards) > len(ordered_parts) else None
    return TensorEntry(
        first_record.dtype, first_record.size, shards, first_record.is_table, first_record.table, folded=places
    )


def _check_against_plan(metadata: Metadata, tensors: Mapping[str, TensorEntry], objects: Mapping[str, Blob]) -> None:
    planned_keys: dict[str, set[Key]] = {}
    for fqn, plan in metadata.state_dict_metadata.items():
        chunks = plan.chunks if isinstance(plan, TensorStorageMetadata) else None
        planned_keys[fqn] = {None} if chunks is None else {(c.offsets, c.sizes) for c in chunks}
    written_keys: dict[str, set[Key]] = {fqn: {None} for fqn in objects}
    for fqn, entry in tensors.items():
        places = [(place.box.offsets, place.box.sizes) for place in entry.sharding]
        written_keys.setdefault(fqn, set()).update(places)
        if len(set(places)) != len(places):
            raise SaveError("a shard was written twice; save again")
    if written_keys != planned_keys:
        missing, unplanned = _difference(planned_keys, written_keys), _difference(written_keys, planned_keys)
        raise SaveError(
            f"the ranks did not write what was planned: missing {missing or 'nothing'}, not planned "
            f"{unplanned or 'nothing'}; nothing was committed, save again"
        )


def _difference(keys_by_fqn: Mapping[str, set[Key]], other_keys: Mapping[str, set[Key]]) -> list[str]:
    """Return the first few shards and objects that are in ``keys_by_fqn`` and not in ``other_keys``."""
    difference = [(fqn, key) for fqn, keys in keys_by_fqn.items() for key in keys - other_keys.get(fqn, set())]
    return sorted(str((fqn, key and Box(*key))) for fqn, key in difference)[:3]


@dataclass(frozen=True)
class ManifestFile:
    """A manifest that is ready to be written.

    Attributes:
        manifest: The manifest.
        data: Content of the file.
        sha256: SHA-256 digest of the content.
        phases: What each phase of the save took, for each rank.
    """

    manifest: Manifest
    data: bytes
    sha256: str
    phases: tuple[SavePhases, ...]

    @property
    def size(self) -> CommittedSize:
        """The size of what the manifest commits."""
        return CommittedSize.of(self.manifest, len(self.data))

    def checkpoint(self, store: Store) -> Checkpoint:
        """Return the checkpoint, once the file is written."""
        return Checkpoint(store, self.manifest, self.sha256, self.manifest, len(self.data), self.sha256)

    def marker(self, store: Store) -> Marker:
        """Return the commit record for a Kafka topic."""
        root, name, manifest = root_id(store.at("..").url), posixpath.basename(store.path), self.manifest
        parent_sha256 = None if manifest.parent is None else manifest.parent.sha256
        return Marker(root, name, manifest.save_id, self.sha256, parent_sha256, manifest.created_ns)


@paused_gc()  # until it returns, when almost all objects made here are freed, so that no collection scans them
def file_of(
    store: Store, decision: Decision, metadata: Metadata, results: Sequence[Sequence[WriteResult]], save_id: str
) -> ManifestFile:
    """Return the manifest of what all ranks have written, as a file.

    Args:
        store: The checkpoint.
        decision: What the checkpoint is based on.
        metadata: DCP's metadata of the global plan.
        results: What ``write_data`` returned on each rank.
        save_id: Id of this save.

    Raises:
        SaveError: Ranks did not write what was planned, or disagree about a tensor; or the checkpoint could not be
            loaded, or no relative path leads to its parent.
    """
    contents = assemble(results)
    _check_against_plan(metadata, contents.tensors, contents.objects)
    manifest = Manifest(
        created_ns=max(time.time_ns(), decision.after_ns + 1),
        checkpoint_id=posixpath.basename(store.path),
        save_id=save_id,
        parent=_parent(store, decision),
        policy=decision.policy,
        history=_extended(decision.history, own_bytes(contents.packs)),
        num_restores=decision.num_restores,
        world_size=len(contents.phases),
        writer=f"torchrec_cnr {__version__}",
        packs=tuple(contents.packs),
        tensors=contents.tensors,
        objects=contents.objects,
        paths=dict(sorted((key, path) for key, path in (metadata.planner_data or {}).items() if key != STAGED)),
    )
    try:
        data, sha256 = manifest_json.dumps_valid(manifest, f"{store.url}/{MANIFEST_FILE}")
    except LoadError as error:
        raise SaveError(f"nothing was committed, because it could not be loaded again: {error}") from error
    return ManifestFile(manifest, data, sha256, tuple(contents.phases))


def commit(store: Store, file: ManifestFile, lease: Lease | None, fence: Fence | None) -> None:
    """Write the manifest, unless one exists. If the store has a Kafka topic, the commit record comes first.

    Args:
        store: The checkpoint.
        file: Its manifest.
        lease: Protects its data files from pruning. If the commit fails but may still take effect, the lease is left to
            expire.
        fence: Fence of the job, if only one job may save there.

    Raises:
        CheckpointExistsError: Another checkpoint exists there.
        FencedError: A newer job saves there.
        SaveError: A prune may have removed something that the checkpoint needs, or it is not in this store.
        StoreError: The store or the Kafka broker refused the commit.
    """
    parent = file.manifest.parent
    if parent is not None and not store.at(parent.path).exists(MANIFEST_FILE):
        raise SaveError(
            f"{store.url}: nothing was committed, because its parent {store.at(parent.path).url} was pruned during the "
            "save; save again: the next save will be a baseline"
        )
    if parent is not None:
        store.at(parent.path).force_names()  # its own writer may have been killed before the parent was durable
        tell_other_root(store, parent.path)
    listed = store.listing()
    _refuse_missing_packs(store, listed, file.manifest)
    if lease is not None and lease.is_lost(listed.files):
        raise SaveError(
            f"{store.url}: nothing was committed, because its lease of {LEASE_SECS} s has expired or was removed, and "
            "its data files may have been pruned; save again"
        )
    check = fence.check if fence is not None else _no_check
    check()
    try:
        if store.row_log is not None:
            commit_marked(store, store.row_log, file.marker(store), file.data, check)
        elif store.put_new(MANIFEST_FILE, file.data, file.manifest.save_id):
            _leave(lease)  # a request in flight may still write the manifest: no prune must come before it
    except (CheckpointExistsError, FencedError):
        raise
    except BaseException:
        # A request that seems to have failed may still write the manifest. Until then, no prune may remove the files.
        if not (store.is_local and store.row_log is None):
            _leave(lease)
        raise


def _leave(lease: Lease | None) -> None:
    """Leave the save's lease until it expires, unless the store has refused it."""
    if lease is not None:
        lease.leave()


def _refuse_missing_packs(store: Store, listed: Listing, manifest: Manifest) -> None:
    """Refuse to commit unless the store of this rank has all data files, and the older ones that the manifest names.

    A prune may have removed them if its clock was ahead. Files of other ranks may never have been there, because each
    rank has opened the store by itself.
    """
    packs = [pack for pack in manifest.packs if pack.log is None]
    directories = {pack.directory: store.at(pack.directory or ".") for pack in packs}
    files = {path: (directory.listing() if path else listed).files for path, directory in directories.items()}
    for pack in packs:
        num_bytes = files[pack.directory].get(pack.name)
        if num_bytes == pack.num_bytes:
            continue
        found_text = "it is not" if num_bytes is None else f"{num_bytes} bytes of it are"
        if pack.directory is not None:
            raise SaveError(
                f"{store.url}: nothing was committed, because it needs the transforms in {pack.name} "
                f"({pack.num_bytes} bytes), and {found_text} in {directories[pack.directory].url}: save again; if the "
                "file was not pruned during the save, call tracker.forget() first, so that a baseline is saved"
            )
        raise SaveError(
            f"{store.url}: nothing was committed, because a rank has written {pack.name} ({pack.num_bytes} bytes), "
            f"and {found_text} in the store of the rank that commits: save again if the file was pruned during the "
            "save; or save to a store that all ranks share, unlike a disk of each machine or 'memory://'"
        )


def _no_check() -> None:
    """Check nothing: without a checkpoint chain, jobs may save in parallel."""


def _parent(store: Store, decision: Decision) -> CheckpointRef | None:
    if decision.parent is None:
        return None
    path = relative_path(store, decision.parent.path)
    if path is None:
        raise SaveError(f"{store.url}: no relative path leads to its parent {decision.parent.path}")
    return CheckpointRef(path, decision.parent.sha256)


def _extended(history: History | None, num_bytes: int) -> History:
    if history is None:
        return History(num_bytes)
    return History(history.baseline_bytes, (*history.delta_bytes, num_bytes))

"""The execution of a compaction: has live rows copied, then builds, checks and commits the new manifest."""

import os
import posixpath
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

from torchrec_cnr.errors import CheckpointExistsError, CNRError, LoadError, SaveError, StoreError
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.manifest import (
    CheckpointRef,
    History,
    Manifest,
    Pack,
    Renumbering,
    Shard,
    StoredTransform,
    TensorEntry,
    moved_block,
    replacement_name,
)
from torchrec_cnr.format.row_sets import Blob, RowBlock, RowSet, UnplacedBlob
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_checkpoint
from torchrec_cnr.lineage.other_roots import tell_other_root
from torchrec_cnr.lineage.recent import recent_checkpoints
from torchrec_cnr.maintenance.compaction.copy_rows import Copied, Copying, NewPacks, NewShard
from torchrec_cnr.maintenance.compaction.live_rows import Piece, pieces_of
from torchrec_cnr.maintenance.compaction.plan import CompactionPlan, plan_compaction
from torchrec_cnr.policies import MAX_RATIO
from torchrec_cnr.progress import Progress
from torchrec_cnr.storage.leases import Lease, leased
from torchrec_cnr.storage.pack_reader import PackReader
from torchrec_cnr.storage.pack_writer import PACK_BYTES, check_pack_bytes, check_thread_count
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store, read_whole
from torchrec_cnr.version import __version__


def replacement_of(
    plan: CompactionPlan, save_id: str, copied: Copied, packs: Sequence[Pack], blobs: Sequence[Blob]
) -> bytes:
    """Return the bytes of the new manifest.

    Args:
        plan: The plan of the compaction.
        save_id: The id of the compaction.
        copied: What was copied.
        packs: The new data files.
        blobs: The places of the new blobs, by number.

    Raises:
        SaveError: The new manifest would not be readable.
    """
    newest = plan.newest
    contents = _NewContents(plan, copied, packs, blobs)
    manifest = replace(
        newest.manifest,
        created_ns=time.time_ns(),
        save_id=save_id,
        parent=None if plan.parent is None else _ref(newest, plan.parent),
        replaces=newest.manifest_sha256,
        history=History(0),
        writer=f"torchrec_cnr {__version__}",
        packs=contents.packs,
        tensors=contents.tensors,
        objects=contents.objects,
    )
    manifest = replace(manifest, history=_history(plan, manifest))
    try:
        return manifest_json.dumps_valid(manifest, f"{newest.store.url}/{_name(newest)}")[0]
    except LoadError as error:
        raise SaveError(f"nothing was compacted, because the result could not be loaded: {error}") from error


def commit_replacement(newest: Checkpoint, data: bytes, save_id: str) -> None:
    """Commit the new manifest by writing its file.

    Raises:
        CheckpointExistsError: Another compaction was faster.
        StoreError: The file cannot be written.
    """
    try:
        newest.store.put_new(_name(newest), data, save_id)
    except CheckpointExistsError as error:
        raise CheckpointExistsError(
            f"{newest.store.url}: another compaction of this checkpoint was faster; nothing was changed"
        ) from error


def may_have_committed(newest: Checkpoint, save_id: str) -> bool:
    """Return whether a commit that raised may have taken effect, or still may. Then all its files must be kept.

    On a local file system, the file exists or does not. On others, a request that seems to have failed may still
    arrive.
    """
    try:
        if not newest.store.exists(_name(newest)):
            return not newest.store.is_local
        data = read_whole(newest.store, _name(newest), manifest_json.MAX_MANIFEST_BYTES)
        manifest, _ = manifest_json.loads(data, newest.store.url)
    except CNRError:
        return True
    return manifest.save_id == save_id


def _name(newest: Checkpoint) -> str:
    return replacement_name(newest.manifest_sha256)


def _ref(newest: Checkpoint, parent: Checkpoint) -> CheckpointRef:
    return CheckpointRef(posixpath.relpath(parent.store.path, newest.store.path), parent.sha256)


def _history(plan: CompactionPlan, manifest: Manifest) -> History:
    if plan.parent is None:
        return History(manifest.blob_bytes)
    parent_history = plan.parent.manifest.history
    return History(parent_history.baseline_bytes, (*parent_history.delta_bytes, manifest.blob_bytes))


class _NewContents:
    """The contents of the new manifest: tensors and objects by FQN, the places of their blobs, and the data files."""

    def __init__(self, plan: CompactionPlan, copied: Copied, packs: Sequence[Pack], blobs: Sequence[Blob]) -> None:
        self._plan = plan
        self._copied = copied
        self._new_packs = packs
        self._new_blobs = blobs
        self._numbers: dict[Pack, int] = {}  # numbers of data files, in the order in which blobs use them
        self._row_sets: dict[RowSet, RowSet] = {}
        self._renumbered = Renumbering(self._place)
        self.tensors = {fqn: self._tensor(fqn, entry) for fqn, entry in plan.merged.tensors.items()}
        self.objects = {fqn: self._place(blob) for fqn, blob in plan.merged.objects.items()}
        self.packs = tuple(self._numbers)

    def _place(self, blob: Blob) -> Blob:
        """Return the place of an old blob in the new manifest."""
        copy = self._copied.blobs.get(blob)
        return blob.in_pack(self._number(self._plan.merged.packs[blob.pack])) if copy is None else self._new_place(copy)

    def _new_place(self, blob: UnplacedBlob) -> Blob:
        new_blob = self._new_blobs[blob]
        return new_blob.in_pack(self._number(self._new_packs[new_blob.pack]))

    def _number(self, pack: Pack) -> int:
        return self._numbers.setdefault(pack, len(self._numbers))

    def _tensor(self, fqn: str, entry: TensorEntry) -> TensorEntry:
        if entry.folded is None:
            return self._renumbered.tensor(entry)
        return replace(entry, shards=tuple(self._shards(fqn, entry)))

    def _shards(self, fqn: str, entry: TensorEntry) -> Iterator[Shard]:
        """Yield the old shards without dead and moved rows, and each new shard after the last one it has rows from."""
        kept_pieces: dict[int, list[Piece]] = {}
        for piece in pieces_of(fqn, entry):
            if self._plan.stays(piece):
                kept_pieces.setdefault(piece.shard, []).append(piece)
        for index, shard in enumerate(entry.shards):
            if index in kept_pieces:
                pieces = kept_pieces[index]
                rows = self._row_set(moved_block(piece.rows, self._place) for piece in pieces)
                transform = self._transform(shard, [piece.num_exact for piece in pieces])
                blobs = tuple(self._place(piece.blob) for piece in pieces)
                yield replace(shard, rows=rows, blobs=blobs, transform=transform)
            for new_shard in self._copied.shards[fqn]:
                if new_shard.after == index:
                    yield self._new_shard(new_shard)

    def _new_shard(self, new_shard: NewShard) -> Shard:
        rows = self._row_set(block.placed(self._new_place) for block, _, _ in new_shard.blocks)
        transform = self._transform(new_shard.source, [num_exact for _, _, num_exact in new_shard.blocks])
        blobs = tuple(self._new_place(blob) for _, blob, _ in new_shard.blocks)
        return replace(new_shard.source, rows=rows, blobs=blobs, transform=transform)

    def _transform(self, shard: Shard, num_exact: Sequence[int]) -> StoredTransform | None:
        """Return the transform of some blobs of a shard, each with this number of exact rows."""
        if shard.transform is None:
            return None
        basis = None if shard.transform.basis is None else self._place(shard.transform.basis)
        return StoredTransform(self._place(shard.transform.blob), basis, tuple(num_exact))

    def _row_set(self, blocks: Iterable[RowBlock]) -> RowSet:
        """Return the row set of some blocks: the same object for shards that share all blocks."""
        rows = RowSet(tuple(blocks))
        return self._row_sets.setdefault(rows, rows)


def compact(
    path: str | os.PathLike[str] | Store,
    *,
    since: str | os.PathLike[str] | None = None,
    max_ratio: float = MAX_RATIO,
    max_moved_bytes: int | None = None,
    self_contained: bool = False,
    row_log: RowLog | None = None,
    thread_count: int = 2,
    pack_bytes: int = PACK_BYTES,
    progress: Progress | None = None,
) -> Checkpoint:
    """Merge a checkpoint chain, or its newest deltas, into one checkpoint.

    This needs less than 512 MiB of memory. Any process that can write to the store may run it, even while a job is
    saving. All arguments that are not listed here are those of :func:`plan_compaction`.

    Args:
        path: The newest checkpoint to merge, as a path or fsspec URL.
        thread_count: Number of read requests in flight at the same time, and of data files written at the same time.
        pack_bytes: The approximate size of new data files in bytes, by default 16 MiB.
        progress: Called with the number of bytes that were copied, and the total.

    Returns:
        The checkpoint, with its new manifest.

    Raises:
        CheckpointExistsError: Another compaction of the same checkpoint was faster. Nothing was changed.
        ConfigurationError, LoadError, StoreError: As :func:`plan_compaction`.

    Examples:
        >>> checkpoint = cnr.compact("run/step-2")
        >>> checkpoint.is_compacted, checkpoint.parent
        (True, None)
    """
    newest = read_checkpoint(Store.open(path, row_log=row_log))
    with leased(newest.store, "compact") as lease:
        plan = plan_compaction(
            newest.store,
            since=since,
            max_ratio=max_ratio,
            max_moved_bytes=max_moved_bytes,
            self_contained=self_contained,
            thread_count=thread_count,
        )
        return run_compaction(plan, lease, thread_count=thread_count, pack_bytes=pack_bytes, progress=progress)


def run_compaction(
    plan: CompactionPlan,
    lease: Lease | None = None,
    *,
    thread_count: int = 2,
    pack_bytes: int = PACK_BYTES,
    progress: Progress | None = None,
) -> Checkpoint:
    """Execute a plan, unless there is nothing to compact. The other arguments are those of :func:`compact`.

    Args:
        plan: The plan.
        lease: The caller's lease on the checkpoint; by default, this takes one. If the commit fails and may still
            arrive, the lease is not removed but left to expire: no prune may remove the new data files before that.

    Raises:
        StoreError: No lease can be written, or it was lost, so that a prune may remove the new data files. Nothing was
            changed.
    """
    check_thread_count(thread_count)
    check_pack_bytes(pack_bytes)
    if not plan.is_needed:
        return plan.newest
    with leased(plan.newest.store, "compact") if lease is None else nullcontext(lease) as held_lease:
        if held_lease is None:
            raise StoreError(f"{plan.newest.store.url}: nothing was changed: no lease can be written there; try again")
        save_id = uuid.uuid4().hex[:16]
        data, packs = _rewritten(plan, save_id, thread_count, pack_bytes, progress)
        try:
            _commit(plan, data, save_id, held_lease)
        except BaseException:
            if not may_have_committed(plan.newest, save_id):
                packs.discard()
            else:
                held_lease.leave()
            raise
    return read_checkpoint(plan.newest.store)


def _commit(plan: CompactionPlan, data: bytes, save_id: str, lease: Lease) -> None:
    if plan.parent is not None:
        tell_other_root(plan.newest.store, _ref(plan.newest, plan.parent).path)
    if lease.is_lost():
        raise StoreError(
            f"{plan.newest.store.url}: nothing was changed: the lease of the compaction has expired or was removed, "
            "and a prune may have removed the new data files; try again"
        )
    commit_replacement(plan.newest, data, save_id)
    recent_checkpoints.forget()  # so that the next save of this process learns that its chain is shorter


def _rewritten(
    plan: CompactionPlan, save_id: str, thread_count: int, pack_bytes: int, progress: Progress | None
) -> tuple[bytes, NewPacks]:
    """Copy rows into new data files. Return the bytes of the new manifest, and the data files."""
    packs = NewPacks(plan, save_id, thread_count, pack_bytes, progress)
    try:
        copied = Copying(plan, packs, PackReader(plan.newest.store, plan.merged.packs, thread_count)).run()
        data = replacement_of(plan, save_id, copied, *packs.finish())
    except BaseException:
        packs.discard()
        raise
    finally:
        packs.close()
    return data, packs

"""The run history of a root: put together from the manifests that are there, and the journal of what was pruned.

What a compaction wrote is told by the files of its checkpoint that the save did not write. Compactions of checkpoints
that are gone are known no more, nor are packs of earlier compactions that were removed. Of checkpoints that are gone,
only packs are counted. Links are no checkpoints of their own.
"""

from collections.abc import Iterator

from torchrec_cnr.lineage import Checkpoint
from torchrec_cnr.maintenance.catalog import Catalog, Entry
from torchrec_cnr.maintenance.history import Event, KeptCheckpoint, RunHistory
from torchrec_cnr.maintenance.journal import PrunedCheckpoint
from torchrec_cnr.maintenance.own_files import PACK_SUFFIX, is_replacement, save_id
from torchrec_cnr.maintenance.restore_bytes import all_restore_bytes
from torchrec_cnr.manifest import DTYPES, Manifest, TensorEntry
from torchrec_cnr.schemes import NoQuantization


def run_history(catalog: Catalog) -> RunHistory:
    """All that is known to have happened under a root."""
    restore_bytes = all_restore_bytes(catalog)
    events: list[Event] = []
    kept = []
    model = max([1, *(pruned.num_bytes for pruned in catalog.pruned if pruned.kind == "baseline")])
    for name, checkpoint in catalog.checkpoints.items():
        entry, read = catalog.entries[name], restore_bytes[name]
        if entry.is_link:
            continue
        model = max(1, model_bytes(checkpoint.manifest))
        events += _events(name, entry, checkpoint, read, model)
        kept.append(_kept(name, entry, checkpoint, catalog.parent(checkpoint), read))
    left_bytes = {pruned: _left_bytes(catalog.entries.get(pruned.name), pruned) for pruned in catalog.pruned}
    for pruned, num_bytes in left_bytes.items():
        events += _pruned_events(pruned, num_bytes, model)
    events.sort(key=lambda event: event.at_ns)
    unreadable = tuple(name for name, entry in catalog.entries.items() if entry.problem is not None)
    return RunHistory(catalog.root.url, tuple(events), tuple(kept), sum(left_bytes.values()), unreadable)


def model_bytes(manifest: Manifest) -> int:
    """About what one full baseline would take, quantized as the rows that are stored are."""
    stored = sum(_whole_bytes(manifest, entry) for entry in manifest.tensors.values())
    return round(stored) + sum(blob.num_bytes for blob in manifest.objects.values())


def _whole_bytes(manifest: Manifest, entry: TensorEntry) -> float:
    num_rows = sum(shard.rows.num_rows * shard.box.num_cols for shard in entry.shards)
    num_bytes = sum(blob.num_bytes for shard in entry.shards for blob in shard.blobs)
    num_values = sum(place.box.num_rows * place.box.num_cols for place in entry.places)
    if num_rows:
        return num_bytes * num_values / num_rows
    scheme, dtype = entry.shards[0].scheme if entry.shards else NoQuantization(), DTYPES[entry.dtype]
    return float(sum(place.box.num_rows * scheme.row_bytes(place.box.num_cols, dtype) for place in entry.places))


def _events(name: str, entry: Entry, checkpoint: Checkpoint, restore_bytes: int | None, model: int) -> Iterator[Event]:
    saved, now = checkpoint.committed, checkpoint.manifest
    is_own = {file: save_id(file) == saved.save_id for file in entry.files if file.endswith(PACK_SUFFIX)}
    own_bytes = sum(entry.files[file] for file, is_saved in is_own.items() if is_saved)
    of_compaction = [file for file in entry.files if is_replacement(file) or not is_own.get(file, True)]
    moved_bytes = sum(entry.files[file] for file in of_compaction) if checkpoint.is_compacted else 0
    gone_bytes = max(0, saved.pack_bytes - own_bytes)
    is_delta = saved.parent is not None
    yield Event(
        at_ns=saved.created_ns,
        kind="delta" if is_delta else "baseline",
        name=name,
        written_bytes=entry.num_bytes - moved_bytes + gone_bytes,
        freed_bytes=0,
        modified_share=_share(saved.num_rows, _table_rows(saved)) if is_delta else None,
        restore_bytes=None if checkpoint.is_compacted else restore_bytes,
        model_bytes=model,
    )
    if checkpoint.is_compacted:
        yield Event(
            at_ns=max(now.created_ns, saved.created_ns),
            kind="compaction",
            name=name,
            written_bytes=moved_bytes,
            freed_bytes=gone_bytes,
            modified_share=None,
            restore_bytes=restore_bytes,
            model_bytes=model,
        )


def _left_bytes(entry: Entry | None, pruned: PrunedCheckpoint) -> int:
    """Of the packs of a checkpoint that is gone; where another has its name by now, they count for that."""
    if entry is None or entry.checkpoint is not None:
        return 0
    packs = (file for file in entry.files if file.endswith(PACK_SUFFIX))
    return sum(entry.files[file] for file in packs if save_id(file) in pruned.save_ids)


def _pruned_events(pruned: PrunedCheckpoint, left_bytes: int, model: int) -> Iterator[Event]:
    written = max(pruned.num_bytes, left_bytes)  # a compaction's are left, perhaps
    yield Event(
        at_ns=pruned.created_ns,
        kind=pruned.kind,
        name=pruned.name,
        written_bytes=written,
        freed_bytes=0,
        modified_share=_share(pruned.num_rows, pruned.num_table_rows) if pruned.kind == "delta" else None,
        restore_bytes=pruned.restore_bytes,
        model_bytes=model,
    )
    yield Event(
        at_ns=max(pruned.removed_ns, pruned.created_ns),
        kind="prune",
        name=pruned.name,
        written_bytes=0,
        freed_bytes=written - left_bytes,
        modified_share=None,
        restore_bytes=None,
        model_bytes=model,
    )


def _kept(
    name: str, entry: Entry, checkpoint: Checkpoint, parent: str | None, restore_bytes: int | None
) -> KeptCheckpoint:
    ref = checkpoint.manifest.parent
    return KeptCheckpoint(
        name=name,
        kind=checkpoint.kind,
        created_ns=checkpoint.created_ns,
        num_bytes=entry.num_bytes,
        parent=parent if ref is None or parent is not None else ref.path,
        restore_bytes=restore_bytes,
    )


def _table_rows(manifest: Manifest) -> int:
    return sum(entry.size[0] for entry in manifest.tensors.values() if entry.is_table)


def _share(num_rows: int, num_table_rows: int) -> float:
    return min(1.0, num_rows / num_table_rows) if num_table_rows else 0.0

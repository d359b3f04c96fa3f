"""The run history of a root: put together from the manifests that are there, and the journal of what was pruned.

What a compaction wrote is told by the packs of its checkpoint that the save did not write. Compactions of checkpoints
that are gone are known no more, nor is what was removed of a checkpoint that stays.
"""

from collections.abc import Iterator

from torchrec_cnr.lineage import Checkpoint
from torchrec_cnr.maintenance.catalog import Catalog, Entry
from torchrec_cnr.maintenance.history import Event, KeptCheckpoint, RunHistory
from torchrec_cnr.maintenance.journal import PrunedCheckpoint
from torchrec_cnr.maintenance.restore_bytes import all_restore_bytes
from torchrec_cnr.manifest import DTYPES, Manifest, TensorEntry
from torchrec_cnr.schemes import NoQuantization


def run_history(catalog: Catalog) -> RunHistory:
    """All that is known to have happened under a root."""
    restore_bytes = all_restore_bytes(catalog)
    events: list[Event] = []
    kept = []
    model = 1
    for name, checkpoint in catalog.checkpoints.items():
        model = max(1, model_bytes(checkpoint.manifest))
        entry, read = catalog.entries[name], restore_bytes[name]
        events += _events(name, entry, checkpoint, read, model)
        kept.append(_kept(name, entry, checkpoint, catalog.parent(checkpoint), read))
    for pruned in catalog.pruned:
        events += _pruned_events(pruned, model)
    events.sort(key=lambda event: event.at_ns)
    return RunHistory(catalog.root.url, tuple(events), tuple(kept))


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
    sizes = {file: num_bytes for file, num_bytes in entry.files.items() if file.endswith(".safetensors")}
    by_save = sum(num_bytes for file, num_bytes in sizes.items() if file.startswith(saved.save_id))
    written = max(saved.pack_bytes, by_save)
    is_delta = saved.parent is not None
    yield Event(
        at_ns=saved.created_ns,
        kind="delta" if is_delta else "baseline",
        name=name,
        written_bytes=written,
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
            written_bytes=sum(sizes.values()) - by_save,
            freed_bytes=written - by_save,
            modified_share=None,
            restore_bytes=restore_bytes,
            model_bytes=model,
        )


def _pruned_events(pruned: PrunedCheckpoint, model: int) -> Iterator[Event]:
    yield Event(
        at_ns=pruned.created_ns,
        kind=pruned.kind,
        name=pruned.name,
        written_bytes=pruned.num_bytes,
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
        freed_bytes=pruned.num_bytes,
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
        restore_bytes=restore_bytes or 0,
    )


def _table_rows(manifest: Manifest) -> int:
    return sum(entry.size[0] for entry in manifest.tensors.values() if entry.is_table)


def _share(num_rows: int, num_table_rows: int) -> float:
    return min(1.0, num_rows / num_table_rows) if num_table_rows else 0.0

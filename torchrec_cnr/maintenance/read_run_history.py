"""Builds the run history of a root from its manifests and from the journal of pruned checkpoints.

What a save or a compaction wrote is taken from its manifest, or from the journal once it was pruned. Prunes are in the
journal only if they were completed. Symbolic links do not count as checkpoints.
"""

import math
import re
from collections.abc import Iterator

from torchrec_cnr.format.manifest import DTYPES, Manifest, TensorEntry
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.lineage.journal import PrunedCheckpoint
from torchrec_cnr.maintenance.catalog import Catalog, Entry
from torchrec_cnr.maintenance.pruning.plan import record_of
from torchrec_cnr.maintenance.restore_bytes import all_restore_bytes
from torchrec_cnr.maintenance.run_history import Event, KeptCheckpoint, RunHistory
from torchrec_cnr.quantization import NoQuantization


def read_run_history(catalog: Catalog) -> RunHistory:
    """Return the history of a root, as far as it is known."""
    restore_bytes = all_restore_bytes(catalog)
    events: list[Event] = []
    kept_checkpoints, exact = [], 0
    model = max([1, *(pruned.num_bytes for pruned in catalog.pruned if pruned.kind == "baseline")])
    for name, checkpoint in catalog.checkpoints.items():
        entry, read_bytes = catalog.entries[name], restore_bytes[name]
        if entry.is_link:
            continue
        model, exact = max(1, model_bytes(checkpoint.manifest)), exact_bytes(checkpoint.manifest)
        events += _events(record_of(catalog, entry, checkpoint, read_bytes, removed_ns=0), model)
        kept_checkpoints.append(_kept(name, entry, checkpoint, catalog.parent(checkpoint), read_bytes))
    for pruned in catalog.pruned:
        events += _events(pruned, model)
    for prune in catalog.journal.prunes:
        events.append(Event(prune.at_ns, "prune", prune.name, 0, prune.freed_bytes, None, None, model))
    events.sort(key=lambda event: event.at_ns)
    pruned_names = {pruned.name for pruned in catalog.journal.pruned}
    leftover_entries = (
        entry for name, entry in catalog.entries.items() if name in pruned_names and entry.checkpoint is None
    )
    left_bytes = sum(entry.num_bytes for entry in leftover_entries)
    unreadable = tuple(name for name, entry in catalog.entries.items() if entry.problem is not None)
    return RunHistory(catalog.root.url, tuple(events), tuple(kept_checkpoints), left_bytes, unreadable, exact)


def exact_bytes(manifest: Manifest) -> int:
    """Return the bytes of all values of a full checkpoint without quantization, and of the objects."""
    tensors = (math.prod(entry.size) * DTYPES[entry.dtype].itemsize for entry in manifest.tensors.values())
    return sum(tensors) + sum(blob.num_bytes for blob in manifest.objects.values())


def precision_text(manifest: Manifest) -> str:
    """Return the precision of values without quantization, such as ``fp32``; all of them, if tensors differ."""
    dtypes = {entry.dtype for entry in manifest.tensors.values() if "float" in entry.dtype}
    return " and ".join(sorted(re.sub("^float", "fp", dtype.replace("bfloat", "bf")) for dtype in dtypes)) or "exact"


def model_bytes(manifest: Manifest) -> int:
    """Return the approximate bytes of a full checkpoint, quantized like the rows that a manifest stores."""
    tensor_bytes = sum(_whole_bytes(manifest, entry) for entry in manifest.tensors.values())
    return round(tensor_bytes) + sum(blob.num_bytes for blob in manifest.objects.values())


def _whole_bytes(manifest: Manifest, entry: TensorEntry) -> float:
    num_rows = sum(shard.rows.num_rows * shard.box.num_cols for shard in entry.shards)
    num_bytes = sum(blob.num_bytes for shard in entry.shards for blob in shard.blobs)
    num_values = sum(place.box.num_rows * place.box.num_cols for place in entry.places)
    if num_rows:
        return num_bytes * num_values / num_rows
    scheme, dtype = entry.shards[0].scheme if entry.shards else NoQuantization(), DTYPES[entry.dtype]
    return float(sum(place.box.num_rows * scheme.row_bytes(place.box.num_cols, dtype) for place in entry.places))


def _events(checkpoint: PrunedCheckpoint, model: int) -> Iterator[Event]:
    """Yield the events of a checkpoint: its save and its compactions. Only the last has the bytes of a restore."""
    modified_share = min(1.0, checkpoint.num_rows / checkpoint.num_table_rows) if checkpoint.num_table_rows else 0.0
    writes = [(checkpoint.created_ns, checkpoint.num_bytes), *checkpoint.compactions]
    for number, (at_ns, num_bytes) in enumerate(writes):
        yield Event(
            at_ns=max(at_ns, checkpoint.created_ns),
            kind="compaction" if number else checkpoint.kind,
            name=checkpoint.name,
            written_bytes=num_bytes,
            freed_bytes=0,
            modified_share=modified_share if checkpoint.kind == "delta" and not number else None,
            restore_bytes=checkpoint.restore_bytes if number == len(writes) - 1 else None,
            model_bytes=model,
            log_bytes=0 if number else checkpoint.log_bytes,  # a compaction writes files
        )


def _kept(
    name: str, entry: Entry, checkpoint: Checkpoint, parent: str | None, restore_bytes: int | None
) -> KeptCheckpoint:
    ref = checkpoint.manifest.parent
    return KeptCheckpoint(
        name=name,
        kind=checkpoint.committed.kind,
        created_ns=checkpoint.created_ns,
        num_bytes=entry.num_bytes,
        parent=parent if ref is None or parent is not None else ref.path,
        restore_bytes=restore_bytes,
        is_compacted=checkpoint.is_compacted,
    )

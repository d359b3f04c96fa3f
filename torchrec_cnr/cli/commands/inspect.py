"""``cnr inspect``: show what one checkpoint contains, from its manifest."""

import dataclasses
from typing import Annotated, Any

import typer

from torchrec_cnr.cli.contents import bytes_of_save, pack_summaries, print_contents
from torchrec_cnr.cli.options import AsJson, Everything
from torchrec_cnr.cli.output import print_json, stdout
from torchrec_cnr.errors import LoadError, StoreError
from torchrec_cnr.format.manifest import TensorEntry
from torchrec_cnr.lineage.checkpoint import Checkpoint, Lineage, read_checkpoint, read_lineage
from torchrec_cnr.maintenance.catalog import checkpoint_at
from torchrec_cnr.maintenance.file_names import log_bytes
from torchrec_cnr.maintenance.read_run_history import exact_bytes
from torchrec_cnr.maintenance.restore_bytes import restore_bytes, tensor_bytes


def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint; or a root, for its newest checkpoint.")],
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Show what one checkpoint contains.

    Only manifests are read. The bytes of a tensor are those of its rows and row numbers in this checkpoint, and "of
    bytes" is their share of all bytes that the checkpoint stores. "in use" is the share of a data file that the
    checkpoint uses; after a compaction, the rest is overwritten rows.

    Examples:

    - `cnr inspect runs/a/step-300`
    - `cnr inspect s3://bucket/runs/a --json`
    """
    checkpoint = read_checkpoint(checkpoint_at(path))
    lineage, problem = _lineage(checkpoint)
    if as_json:
        print_json(_document(checkpoint, lineage, problem))
        return
    print_contents(stdout(), checkpoint, lineage, problem, everything)


def _lineage(checkpoint: Checkpoint) -> tuple[Lineage | None, str | None]:
    """Return the checkpoint chain, or the reason why it cannot be read."""
    try:
        return read_lineage(checkpoint.store), None
    except (LoadError, StoreError) as error:
        return None, str(error)


def _document(checkpoint: Checkpoint, lineage: Lineage | None, problem: str | None) -> dict[str, Any]:
    manifest, num_bytes = checkpoint.manifest, tensor_bytes(checkpoint.manifest)
    return {
        "path": checkpoint.store.url,
        "kind": checkpoint.committed.kind,
        "is_compacted": checkpoint.is_compacted,
        "created_ns": checkpoint.created_ns,
        "sha256": checkpoint.sha256,
        "checkpoint_id": manifest.checkpoint_id,
        "save_id": manifest.save_id,
        "policy": manifest.policy,
        "num_restores": manifest.num_restores,
        "world_size": manifest.world_size,
        "writer": manifest.writer,
        "num_bytes": checkpoint.num_bytes,
        "written_bytes": bytes_of_save(checkpoint),
        "exact_bytes": exact_bytes(checkpoint.committed),
        "manifest_bytes": checkpoint.manifest_bytes,
        "log_bytes": log_bytes(manifest),
        "blob_bytes": manifest.blob_bytes,
        "num_rows": checkpoint.num_rows,
        "num_exact_rows": checkpoint.num_exact_rows,
        "lineage": None if lineage is None else [_link(link) for link in lineage.checkpoints],
        "lineage_problem": problem,
        "restore_bytes": None if lineage is None else restore_bytes(lineage),
        "tensors": [_tensor(fqn, entry, num_bytes[fqn]) for fqn, entry in manifest.tensors.items()],
        "objects": [{"fqn": fqn, "num_bytes": blob.num_bytes} for fqn, blob in manifest.objects.items()],
        "packs": [dataclasses.asdict(use) for use in pack_summaries(manifest)],
    }


def _link(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "path": checkpoint.store.url,
        "kind": checkpoint.committed.kind,
        "created_ns": checkpoint.created_ns,
        "num_bytes": checkpoint.num_bytes,
    }


def _tensor(fqn: str, entry: TensorEntry, num_bytes: int) -> dict[str, Any]:
    schemes = {str(scheme): scheme for scheme in (shard.scheme.to_json() for shard in entry.shards)}
    return {
        "fqn": fqn,
        "dtype": entry.dtype,
        "size": entry.size,
        "is_table": entry.is_table,
        "table": entry.table,
        "schemes": list(schemes.values()),
        "num_shards": len(entry.places),
        "num_stored_rows": round(entry.num_stored_rows),
        "num_bytes": num_bytes,
    }

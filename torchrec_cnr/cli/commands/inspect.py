"""``cnr inspect``: show what one checkpoint contains, from its manifest."""

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Annotated, Any

import typer

from torchrec_cnr.cli.contents import Inspected, bits_per_value, bytes_of_save, pack_summaries, print_contents
from torchrec_cnr.cli.options import AsJson, Everything
from torchrec_cnr.cli.output import print_json, stdout
from torchrec_cnr.errors import LoadError, StoreError
from torchrec_cnr.format.manifest import TensorEntry
from torchrec_cnr.lineage.abandoned import mark_of
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_checkpoint, read_lineage
from torchrec_cnr.maintenance.catalog import checkpoint_at
from torchrec_cnr.maintenance.file_names import log_bytes
from torchrec_cnr.maintenance.read_run_history import exact_bytes
from torchrec_cnr.maintenance.restore_bytes import restore_bytes, tensor_bytes
from torchrec_cnr.storage.store import Store


def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint; or a root, for its newest checkpoint.")],
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Show what one checkpoint contains.

    Only manifests are read, and directories listed. The bytes of a tensor are those of its rows, row numbers and
    transforms in this checkpoint, and "of bytes" is their share of all bytes that the checkpoint stores. The scheme of
    transform-coded rows has the bits per value that they take, and the beginning of the transform's digest. "in use" is
    the share of a data file that the checkpoint uses; after a compaction, the rest is overwritten rows.

    Examples:

    - `cnr inspect runs/a/step-300`
    - `cnr inspect s3://bucket/runs/a --json`
    """
    inspected = _inspected(read_checkpoint(checkpoint_at(path)))
    if as_json:
        print_json(_document(inspected))
    else:
        print_contents(stdout(), inspected, everything)


def _inspected(checkpoint: Checkpoint) -> Inspected:
    """Read what a checkpoint depends on."""
    try:
        lineage, problem = read_lineage(checkpoint.store), None
    except (LoadError, StoreError) as error:
        lineage, problem = None, str(error)
    links = (checkpoint,) if lineage is None else lineage.checkpoints
    return Inspected(checkpoint, lineage, problem, tuple(_missing_files(links)), _is_abandoned(checkpoint))


def _missing_files(checkpoints: Iterable[Checkpoint]) -> Iterator[str]:
    """Yield the data files of checkpoints that are not there, as far as directories can be listed."""
    needed: dict[str, tuple[Store, set[str]]] = {}
    for checkpoint in checkpoints:
        for pack in checkpoint.manifest.packs:
            if pack.log is None:
                directory = checkpoint.store.at(pack.directory or ".")
                needed.setdefault(directory.url, (directory, set()))[1].add(pack.name)
    for url, (directory, names) in needed.items():
        with suppress(StoreError):
            yield from (f"{url}/{name}" for name in sorted(names - directory.listing().files.keys()))


def _is_abandoned(checkpoint: Checkpoint) -> bool:
    try:
        return checkpoint.store.at("..").exists(mark_of(checkpoint))
    except StoreError:
        return False


def _document(inspected: Inspected) -> dict[str, Any]:
    checkpoint, lineage = inspected.checkpoint, inspected.lineage
    manifest, num_bytes = checkpoint.manifest, tensor_bytes(checkpoint.manifest)
    return {
        "path": checkpoint.store.url,
        "kind": checkpoint.committed.kind,
        "is_compacted": checkpoint.is_compacted,
        "is_abandoned": inspected.is_abandoned,
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
        "lineage_problem": inspected.problem,
        "missing_files": list(inspected.missing_files),
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
        "bits_per_value": bits_per_value(entry.shards),
        "num_shards": len(entry.places),
        "num_stored_rows": round(entry.num_stored_rows),
        "num_bytes": num_bytes,
    }

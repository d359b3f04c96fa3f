"""The text that ``cnr inspect`` prints: the contents of one checkpoint."""

import posixpath
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from torchrec_cnr.cli.output import (
    Dotted,
    bare_grid,
    common_prefix,
    grid,
    heading,
    name_cell,
    print_columns,
    print_left_out,
)
from torchrec_cnr.errors import StoreError
from torchrec_cnr.format.manifest import LogRange, Manifest, Shard, TensorEntry
from torchrec_cnr.human_text import (
    age_text,
    bytes_text,
    count_text,
    instant_text,
    name_text,
    percent_text,
    relation_text,
    share_text,
)
from torchrec_cnr.lineage.checkpoint import Checkpoint, Lineage
from torchrec_cnr.maintenance.file_names import log_bytes, saved_bytes
from torchrec_cnr.maintenance.read_run_history import exact_bytes, precision_text
from torchrec_cnr.maintenance.restore_bytes import restore_bytes, tensor_bytes
from torchrec_cnr.quantization import Scheme, Transformed

_LINES = 10  # of tensors, and of data files, without --all
_MANY_LINKS = 3
_DIGITS = 12  # of a digest


@dataclass(frozen=True)
class PackSummary:
    """A data file (pack), and how much of it a checkpoint uses.

    Attributes:
        name: The name of the file.
        directory: The directory of another checkpoint, relative to this one's; None for this one's own.
        num_bytes: The size of the file in bytes.
        num_blobs: The number of blobs that the checkpoint uses.
        blob_bytes: The bytes of these blobs.
        log: The place in a Kafka topic; None if it is a file.
    """

    name: str
    directory: str | None
    num_bytes: int
    num_blobs: int
    blob_bytes: int
    log: LogRange | None = None


@dataclass(frozen=True)
class Inspected:
    """A checkpoint, and what it depends on.

    Attributes:
        checkpoint: The checkpoint.
        lineage: The checkpoint chain; None if it cannot be read.
        problem: Why it cannot be read, or None.
        missing_files: The data files that a load needs and that are not there, as paths or URLs.
        is_abandoned: Whether a job has abandoned the checkpoint by restoring an older one.
    """

    checkpoint: Checkpoint
    lineage: Lineage | None
    problem: str | None
    missing_files: tuple[str, ...]
    is_abandoned: bool


def pack_summaries(manifest: Manifest) -> list[PackSummary]:
    """Return a summary of each data file that a manifest names, in its order."""
    blobs: list[list[int]] = [[] for _ in manifest.packs]
    for _, blob in manifest.blobs():
        blobs[blob.pack].append(blob.num_bytes)
    return [
        PackSummary(pack.name, pack.directory, pack.num_bytes, len(own), sum(own), pack.log)
        for pack, own in zip(manifest.packs, blobs, strict=True)
    ]


def bytes_of_save(checkpoint: Checkpoint) -> int:
    """Return the bytes that a save wrote; without those of its manifest, if the directory may not be listed."""
    try:
        files = checkpoint.store.listing().files
    except StoreError:
        files = {}
    return saved_bytes(checkpoint, files)


def print_contents(console: Console, inspected: Inspected, everything: bool) -> None:
    """Print what a manifest says; if there are many tensors, only the largest, unless ``everything`` is true."""
    checkpoint, manifest = inspected.checkpoint, inspected.checkpoint.manifest
    notes = ["compacted"] * checkpoint.is_compacted + ["abandoned"] * inspected.is_abandoned
    kind = ", ".join([checkpoint.committed.kind, *notes])
    console.print(Text.assemble(name_cell(checkpoint.store.url, "bold"), f"  {kind}", overflow="fold"))
    console.print(_facts(inspected))
    num_bytes = tensor_bytes(manifest)
    tables = [fqn for fqn, entry in manifest.tensors.items() if entry.is_table]
    others = [fqn for fqn, entry in manifest.tensors.items() if not entry.is_table]
    others.sort(key=lambda fqn: -num_bytes[fqn])
    shown = others if everything else others[:_LINES]
    _print_tensors(console, manifest, tables, "tables")
    _print_tensors(console, manifest, shown, "other tensors")
    print_left_out(console, len(others) - len(shown), "tensors")
    _print_objects(console, manifest, everything)
    _print_packs(console, pack_summaries(manifest), everything)


def _facts(inspected: Inspected) -> Table:
    checkpoint, lineage, manifest = inspected.checkpoint, inspected.lineage, inspected.checkpoint.manifest
    table = bare_grid("what", "fact")
    table.columns[0].style = "dim"
    age = age_text(time.time_ns() - checkpoint.created_ns)
    ago = f"{age} by this machine's clock" if age.startswith("in ") else f"{age} ago"
    table.add_row("committed", f"{instant_text(checkpoint.created_ns)}, {ago}")
    if lineage is None:
        table.add_row("based on", name_cell(_parent(checkpoint, checkpoint.manifest)))
        table.add_row(Text("problem", "red"), name_cell(inspected.problem or "", "red"))
    else:
        table.add_row("based on", Text(_parents(lineage)))
        read_bytes = bytes_text(restore_bytes(lineage))
        table.add_row("restore", f"reads {read_bytes} from {count_text(len(lineage.checkpoints), 'checkpoint')}")
    if inspected.missing_files:
        table.add_row(Text("missing", "red"), name_cell(_missing_text(inspected.missing_files), "red"))
    table.add_row("rows", _rows(checkpoint))
    table.add_row("written", _written(checkpoint))
    in_log = f"; {bytes_text(log_bytes(manifest))} more in Kafka" if log_bytes(manifest) else ""
    of_manifest = f"including {bytes_text(checkpoint.manifest_bytes)} of manifests"
    table.add_row("size", f"{bytes_text(checkpoint.num_bytes)} now, {of_manifest}{in_log}")
    ranks, restores = count_text(manifest.world_size, "rank"), count_text(manifest.num_restores, "restore")
    table.add_row("saved by", name_cell(f"{manifest.writer} on {ranks}, policy {manifest.policy}, after {restores}"))
    table.add_row("sha256", checkpoint.sha256)
    return table


def _parent(checkpoint: Checkpoint, manifest: Manifest) -> str:
    """Return the parent that a manifest of the checkpoint names, relative to the root."""
    parent, root = manifest.parent, checkpoint.store.at("..")
    return "no other checkpoint" if parent is None else posixpath.relpath(root.at(f"x/{parent.path}").path, root.path)


def _missing_text(files: Sequence[str]) -> str:
    more = f" and {len(files) - _MANY_LINKS:,} more" if len(files) > _MANY_LINKS else ""
    return f"{count_text(len(files), 'data file')} that a load needs: {', '.join(files[:_MANY_LINKS])}{more}"


def _parents(lineage: Lineage) -> str:
    """Return the checkpoints that the newest one is based on, its parent first."""
    root = lineage.newest.store.at("..").path
    names = [name_text(posixpath.relpath(link.store.path, root)) for link in reversed(lineage.checkpoints[:-1])]
    if not names:
        if not lineage.newest.is_compacted:
            return "no other checkpoint"
        directories = {pack.directory for pack in lineage.newest.manifest.packs if pack.directory is not None}
        where = ", ".join(sorted(name_text(posixpath.basename(directory)) for directory in directories)[:_MANY_LINKS])
        more = f" and {len(directories) - _MANY_LINKS:,} more" if len(directories) > _MANY_LINKS else ""
        uses = f"; uses data files in {where}{more}" if where else ""
        saved_on = name_text(_parent(lineage.newest, lineage.newest.committed))
        return f"no other checkpoint: it was compacted{uses}; saved on top of {saved_on}"
    if len(names) > _MANY_LINKS:
        names = [names[0], f"… {len(names) - 2:,} more …", names[-1]]
    oldest = lineage.checkpoints[0]
    return f"{', '.join(names)} ({'delta, compacted' if oldest.committed.kind == 'delta' else 'baseline'})"


def _rows(checkpoint: Checkpoint) -> str:
    """Return how many rows of tables a checkpoint stores; one that was compacted may have older versions of a row."""
    num_rows, all_rows = checkpoint.num_rows, checkpoint.num_table_rows
    exact = f"; {checkpoint.num_exact_rows:,} of them in full precision" if checkpoint.num_exact_rows else ""
    if not all_rows:
        return "no tables"
    if checkpoint.is_compacted and num_rows != all_rows:
        return f"{num_rows:,} stored of tables with {all_rows:,}, including older versions of rows{exact}"
    return f"{num_rows:,} of {all_rows:,} ({share_text(num_rows / all_rows)}){exact}"


def _written(checkpoint: Checkpoint) -> str:
    """Return what the save wrote, without what was written since."""
    num_bytes, full = bytes_of_save(checkpoint), exact_bytes(checkpoint.committed)
    relation = relation_text(num_bytes, full, f"a full {precision_text(checkpoint.committed)} checkpoint")
    return f"{bytes_text(num_bytes)} by the save{', ' * bool(relation)}{relation}"


def _print_tensors(console: Console, manifest: Manifest, fqns: Sequence[str], title: str) -> None:
    if not fqns:
        return
    entries, num_bytes = [manifest.tensors[fqn] for fqn in fqns], tensor_bytes(manifest)
    are_tables, dtypes = entries[0].is_table, sorted({entry.dtype for entry in entries})
    prefix, note = common_prefix(fqns), dtypes[0] if len(dtypes) == 1 else ""
    columns: dict[str, Sequence[RenderableType]] = {
        "table" if are_tables else "tensor": [Dotted(fqn.removeprefix(prefix)) for fqn in fqns],
        ">shape": [_shape(entry) for entry in entries],
        ">dtype": ["" if note else entry.dtype for entry in entries],
        "scheme": [_schemes(entry) if are_tables else "" for entry in entries],
        ">rows": [f"{round(entry.num_stored_rows):,}" for entry in entries],
        ">of all": [_row_share(entry) if are_tables else "" for entry in entries],
        ">bytes": [bytes_text(num_bytes[fqn]) for fqn in fqns],
        ">of bytes": [_byte_share(manifest, num_bytes[fqn]) for fqn in fqns],
    }
    print_under(console, title, note, prefix)
    print_columns(console, columns, [">of bytes", ">of all", "scheme", ">rows", ">shape"])


def _row_share(entry: TensorEntry) -> str:
    """Return the share of a table's rows that are stored; "" if older versions of rows are among them."""
    return percent_text(entry.num_stored_rows / entry.size[0]) if 0 < entry.size[0] >= entry.num_stored_rows else ""


def _byte_share(manifest: Manifest, num_bytes: int) -> str:
    return percent_text(num_bytes / manifest.blob_bytes) if manifest.blob_bytes else ""


def print_under(console: Console, title: str, note: str, prefix: str) -> None:
    """Print a heading, and the common prefix that the names in the table below omit."""
    console.print(heading(title, note))
    if prefix:
        console.print(Dotted(f"all names begin with '{prefix}'", "dim"))


def _print_objects(console: Console, manifest: Manifest, everything: bool) -> None:
    if not manifest.objects:
        return
    num_bytes = sum(blob.num_bytes for blob in manifest.objects.values())
    fqns = sorted(manifest.objects)
    shown = fqns if everything else fqns[:_LINES]
    prefix = common_prefix(shown)
    print_under(console, "objects", f"{bytes_text(num_bytes)}, {_byte_share(manifest, num_bytes)} of bytes", prefix)
    for fqn in shown:
        console.print(Dotted(fqn.removeprefix(prefix)))
    print_left_out(console, len(fqns) - len(shown), "objects")


def _print_packs(console: Console, uses: Sequence[PackSummary], everything: bool) -> None:
    if not uses:
        return
    shown = uses if everything else uses[:_LINES]
    has_others = any(use.directory is not None for use in shown)
    in_kafka = ["in Kafka"] * any(use.log is not None for use in uses)
    table = grid("data file", ">size", ">blocks", ">in use", *in_kafka)
    for use in shown:
        place = f"{use.directory}/" if use.directory is not None else ""
        used = percent_text(use.blob_bytes / use.num_bytes)
        log = [name_cell("" if use.log is None else str(use.log)) for _ in in_kafka]
        table.add_row(name_cell(place + use.name), bytes_text(use.num_bytes), f"{use.num_blobs:,}", used, *log)
    console.print(heading("data files", "also in the directories of other checkpoints" if has_others else ""))
    console.print(table)
    print_left_out(console, len(uses) - len(shown), "data files")


def _shape(entry: TensorEntry) -> str:
    return " x ".join(f"{length:,}" for length in entry.size) or "scalar"


def bits_per_value(shards: Iterable[Shard]) -> float | None:
    """Return the bits that the values of shards take on average, without row numbers and transforms.

    Returns:
        The bits; None if the shards store no value.
    """
    stored = [shard for shard in shards if shard.blobs]
    num_values = sum(shard.rows.num_rows * shard.box.num_cols for shard in stored)
    num_bytes = sum(blob.num_bytes for shard in stored for blob in shard.blobs)
    return 8 * num_bytes / num_values if num_values else None


def _schemes(entry: TensorEntry) -> str:
    """Return the names of the schemes of a tensor's shards, each once; all transforms together."""
    transformed = [shard for shard in entry.shards if isinstance(shard.scheme, Transformed)]
    names = dict.fromkeys(_scheme(shard.scheme) for shard in entry.shards if not isinstance(shard.scheme, Transformed))
    return " + ".join([*names, *([_transformed(transformed)] if transformed else [])]) or "none"


def _transformed(shards: Sequence[Shard]) -> str:
    """Return the bits per value of transform-coded rows, and the beginning of the digest of their transform."""
    bits = bits_per_value(shards)
    digests = list(dict.fromkeys(shard.scheme.to_json()["digest"] for shard in shards))
    more = f" and {len(digests) - 1:,} more" if len(digests) > 1 else ""
    return f"{'' if bits is None else f'{bits:.2f}-bit '}transformed {digests[0][:_DIGITS]}{more}"


def _scheme(scheme: Scheme) -> str:
    value = scheme.to_json()
    bits = f"{value['bits']}-bit " if "bits" in value else ""
    return " ".join([bits + scheme.name.removesuffix("_asymmetric"), *filter(None, [value.get("dtype")])])

"""``cnr export`` and ``cnr import``: write plain files, and make a baseline from a plain DCP checkpoint."""

import posixpath
from typing import Annotated, Literal

import typer

from torchrec_cnr.cli.options import (
    EXACT,
    AsJson,
    Bits,
    Kafka,
    KafkaFile,
    KafkaSettings,
    Threads,
    rows_log,
    scheme_of_bits,
)
from torchrec_cnr.cli.output import print_json, progress_bar, stdout
from torchrec_cnr.human_text import bytes_text, count_text, name_text
from torchrec_cnr.lineage.checkpoint import read_checkpoint
from torchrec_cnr.maintenance.catalog import checkpoint_at
from torchrec_cnr.maintenance.dcp_import.import_checkpoint import import_checkpoint
from torchrec_cnr.maintenance.export.export import export as export_checkpoint
from torchrec_cnr.quantization import NoQuantization


def export(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint; or a root, for its newest checkpoint.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The new directory or file to write.")],
    to: Annotated[Literal["dcp", "safetensors", "torch"], typer.Option("--to", help="The format of the files.")],
    threads: Threads = 2,
    kafka: Kafka = None,
    kafka_settings: KafkaSettings = None,
    kafka_file: KafkaFile = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as plain files in full precision.

    You can load them without this package, with dcp.load, torch.load or safetensors.

    Examples:

    - `cnr export runs/a/step-300 plain --to dcp`
    - `cnr export runs/a model.pt --to torch`
    """
    checkpoint = read_checkpoint(checkpoint_at(path, rows_log(kafka, kafka_settings, kafka_file)))
    with progress_bar("exporting", not as_json) as report:
        found = export_checkpoint(checkpoint.store, out, to=to, thread_count=threads, progress=report)
    if as_json:
        document = {"checkpoint": checkpoint.store.url, "files": list(found.files), "bytes": found.num_bytes}
        print_json({**document, "left_out": list(found.left_out)})
        return
    console, num_files = stdout(), count_text(len(found.files), "file")
    values = f"{bytes_text(found.num_bytes)} of values in {num_files}"
    written = found.files[0] if to == "torch" else posixpath.dirname(found.files[0])
    console.print(f"{name_text(written)}: {values}, from {name_text(checkpoint.store.url)}")
    if found.left_out:
        console.print(f"left out, because {to} cannot hold them: {', '.join(map(name_text, found.left_out))}")


def import_(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A plain DCP checkpoint.")],
    path: Annotated[str, typer.Argument(metavar="PATH", help="The directory of the new checkpoint.")],
    bits: Bits = EXACT,
    tables: Annotated[
        list[str] | None,
        typer.Option("--table", metavar="PATTERN", help="The matrices with such names are tables. May be repeated."),
    ] = None,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> None:
    """Make a baseline from a plain DCP checkpoint.

    Tables are recognised by the names that TorchRec gives them. If yours have other names, pass --table with a name or
    pattern, as often as needed.

    Examples:

    - `cnr import plain runs/b/step-0`
    - `cnr import plain runs/b/step-0 --bits 4`
    - `cnr import plain runs/b/step-0 --bits 4 --table 'model.user.*'`
    """
    with progress_bar("importing", not as_json) as report:
        checkpoint = import_checkpoint(
            source,
            path,
            quantization=scheme_of_bits(bits),
            tables=tables or None,
            thread_count=threads,
            progress=report,
        )
    entries = checkpoint.manifest.tensors
    quantized = [
        fqn
        for fqn, entry in entries.items()
        if not all(isinstance(shard.scheme, NoQuantization) for shard in entry.shards)
    ]
    if as_json:
        print_json(
            {
                "checkpoint": checkpoint.store.url,
                "bytes": checkpoint.num_bytes,
                "rows": checkpoint.num_rows,
                "tensors": len(entries),
                "tables": [fqn for fqn, entry in entries.items() if entry.is_table],
                "quantized": quantized,
            }
        )
        return
    num_tables = sum(entry.is_table for entry in entries.values())
    how = f", {len(quantized):,} quantized" if quantized else ""
    tensors = f"{count_text(len(entries), 'tensor')} ({count_text(num_tables, 'table')}{how})"
    stdout().print(f"{name_text(checkpoint.store.url)}: a baseline, {tensors}, {bytes_text(checkpoint.num_bytes)}")

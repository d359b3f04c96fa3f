"""``cnr diff``: show what differs between two checkpoints."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from torchrec_cnr.cli.contents import print_under
from torchrec_cnr.cli.options import AsJson, Everything, Kafka, KafkaFile, KafkaSettings, Threads, rows_log
from torchrec_cnr.cli.output import (
    Dotted,
    common_prefix,
    grid,
    heading,
    name_cell,
    print_columns,
    print_json,
    print_left_out,
    progress_bar,
    stdout,
)
from torchrec_cnr.human_text import count_text, percent_text, ratio_text
from torchrec_cnr.maintenance.catalog import checkpoint_at
from torchrec_cnr.maintenance.comparison.compare import Comparison, TensorComparison, compare

_DISTANCES = "mean, median and max are distances |b - a| / |a| of the rows that differ"
_LINES = 10  # of other tensors
_PLACE = "A checkpoint; or a root, for its newest checkpoint."


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_PLACE)],
    b: Annotated[str, typer.Argument(metavar="B", help=_PLACE)],
    threads: Threads = 2,
    kafka: Kafka = None,
    kafka_settings: KafkaSettings = None,
    kafka_file: KafkaFile = None,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Show what differs between two checkpoints.

    Rows are compared bit for bit, as a load of each checkpoint would return them. The distance of a row is |b - a| /
    |a|, with Euclidean norms. Mean, median and maximum are over the rows that differ. Rows whose norm in A is 0, and
    rows with NaN or infinity, have no distance and are counted separately. "stored" is the number of rows in the
    deltas from A to B.

    Examples:

    - `cnr diff runs/a/step-100 runs/a/step-200`
    - `cnr diff runs/a runs/b --json`
    """
    rows = rows_log(kafka, kafka_settings, kafka_file)
    with progress_bar("comparing", not as_json) as report:
        found = compare(checkpoint_at(a, rows), checkpoint_at(b, rows), progress=report, thread_count=threads)
    if as_json:
        print_json(_document(found))
    else:
        _print(stdout(), found, everything)


def _document(found: Comparison) -> dict[str, Any]:
    document = {"is_same": found.is_same, **dataclasses.asdict(found)}
    for tensor, value in zip(document["tensors"], found.tensors, strict=True):
        tensor["num_rows"] = value.num_rows
    return document


def _print(console: Console, found: Comparison, everything: bool) -> None:
    console.print(Text.assemble("a  ", name_cell(found.a, "bold"), overflow="fold"))
    console.print(Text.assemble("b  ", name_cell(found.b, "bold"), overflow="fold"))
    console.print(name_cell(_relation(found), "dim"))
    if found.is_same:
        console.print(Text("\nno difference", "bold green"))
        return
    tables = [tensor for tensor in found.tensors if tensor.is_table]
    others = [tensor for tensor in found.tensors if not tensor.is_table and tensor.num_differing]
    if tables:
        _print_tensors(console, "tables", _DISTANCES, tables, found.tensors)
    if others:
        others.sort(key=lambda tensor: -tensor.num_differing)
        shown = others if everything else others[:_LINES]
        num_same = sum(not tensor.is_table for tensor in found.tensors) - len(others)
        _print_tensors(console, "other tensors that differ", f"{num_same:,} are the same", shown, found.tensors)
        print_left_out(console, len(others) - len(shown), "tensors")
    _print_apart(console, found)
    _print_names(console, found)


def _relation(found: Comparison) -> str:
    if found.common is None:
        return "restores of a and b read no checkpoint in common; after a compaction, a restore reads no parents"
    if found.num_own_a and found.num_own_b:
        return f"a and b are both based on {found.common}"
    if found.num_own_a:
        return f"a is based on b, {count_text(found.num_own_a, 'delta')} later"
    if found.num_own_b:
        return f"b is based on a, {count_text(found.num_own_b, 'delta')} later"
    return "a and b are the same checkpoint"


def _print_tensors(
    console: Console, title: str, note: str, tensors: Sequence[TensorComparison], all_: Sequence[TensorComparison]
) -> None:
    prefix = common_prefix([tensor.fqn for tensor in tensors])
    columns: dict[str, Sequence[RenderableType]] = {
        "table" if tensors[0].is_table else "tensor": [Dotted(tensor.fqn.removeprefix(prefix)) for tensor in tensors],
        ">rows": [f"{tensor.num_rows:,}" for tensor in tensors],
        ">differ": [f"{tensor.num_differing:,}" for tensor in tensors],
        ">of all": [
            percent_text(tensor.num_differing / tensor.num_rows) if tensor.num_rows else "" for tensor in tensors
        ],
        ">stored": ["" if tensor.num_stored is None else f"{tensor.num_stored:,}" for tensor in tensors],
        ">mean": [_distance_text(tensor.movement.mean) for tensor in tensors],
        ">median": [_distance_text(tensor.movement.median) for tensor in tensors],
        ">max": [_distance_text(tensor.movement.max) for tensor in tensors],
    }
    print_under(console, title, note, prefix)
    print_columns(console, columns, [">median", ">stored", ">rows", ">mean", ">max", ">of all"])


def _distance_text(distance: float | None) -> str:
    return "–" if distance is None else ratio_text(distance)


def _print_apart(console: Console, found: Comparison) -> None:
    """Print how many of the rows that differ have no distance."""
    num_from_zero = sum(tensor.movement.num_from_zero for tensor in found.tensors)
    num_not_finite = sum(tensor.movement.num_not_finite for tensor in found.tensors)
    parts = []
    if num_from_zero:
        parts.append(f"{count_text(num_from_zero, 'row')} of norm 0 in a")
    if num_not_finite:
        parts.append(f"{count_text(num_not_finite, 'row')} with NaN or infinity")
    if parts:
        console.print(Text(f"no distance: {', '.join(parts)}", "dim"))


def _print_names(console: Console, found: Comparison) -> None:
    if found.reshaped:
        console.print(heading("different size or dtype"))
        table = grid("tensor", ">a", ">b")
        for tensor in found.reshaped:
            old, new = f"{tensor.dtype_a} {list(tensor.size_a)}", f"{tensor.dtype_b} {list(tensor.size_b)}"
            table.add_row(Dotted(tensor.fqn), old, new)
        console.print(table)
    names = {
        "only in a": found.only_in_a,
        "only in b": found.only_in_b,
        "objects that differ": found.differing_objects,
    }
    for title, fqns in names.items():
        if fqns:
            console.print(heading(title))
            for fqn in fqns:
                console.print(Dotted(fqn))

"""``cnr verify``: check whether a checkpoint chain is as it was committed."""

import dataclasses
import posixpath
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from torchrec_cnr.cli.options import AsJson, Kafka, KafkaFile, KafkaSettings, Threads, rows_log
from torchrec_cnr.cli.output import bare_grid, name_cell, print_json, progress_bar, stdout
from torchrec_cnr.human_text import bytes_text, count_text, name_text
from torchrec_cnr.maintenance.verification.verify import VerifyReport
from torchrec_cnr.maintenance.verification.verify import verify as verify_checkpoints
from torchrec_cnr.storage.store import Store

_NAMES = 10  # of checkpoints that cannot be restored, and of missing files; --json lists all


def verify(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint; or a root, for its newest checkpoint.")],
    all_heads: Annotated[bool, typer.Option("--all", help="Verify all checkpoints of a root.")] = False,
    threads: Threads = 2,
    kafka: Kafka = None,
    kafka_settings: KafkaSettings = None,
    kafka_file: KafkaFile = None,
    as_json: AsJson = False,
) -> None:
    """Check every byte of a checkpoint chain.

    For the checkpoint and all that it is based on, this compares manifests and data files with their digests, and
    decodes every row. It lists everything that is wrong, the checkpoints that cannot be restored because of it, and the
    newest checkpoint that can. The exit status is 0 only if nothing is wrong.

    Examples:

    - `cnr verify runs/a/step-300`
    - `cnr verify s3://bucket/runs/a --all --threads 16`
    """
    rows = rows_log(kafka, kafka_settings, kafka_file)
    with progress_bar("verifying", not as_json) as report:
        found = verify_checkpoints(path, all_heads=all_heads, row_log=rows, progress=report, thread_count=threads)
    if as_json:
        document = {"is_right": found.is_right, **dataclasses.asdict(found)}
        if found.is_right:
            del document["newest_restorable"]  # it is only looked for if something is wrong
        print_json(document)
    else:
        newest = posixpath.basename(found.heads[0]) if found.heads else ""
        has_others = not all_heads and found.heads != (Store.open(path).url,)
        _print(found, "all checkpoints" if all_heads else f"{name_text(newest)} and its chain", has_others)
    if not found.is_right:
        raise typer.Exit(1)


def _print(found: VerifyReport, verified: str, has_others: bool) -> None:
    console = stdout()
    texts: dict[str, dict[str | int, str]] = {}  # by file, and by offset in it: several checkpoints may use one file
    for problem in found.problems:
        place = problem.file or problem.checkpoint
        text = problem.message.removeprefix(f"{place}: ").removesuffix("; use another checkpoint")
        texts.setdefault(place, {}).setdefault(text if problem.offset is None else problem.offset, text)
    num_problems = sum(map(len, texts.values()))
    for directory, names in _missing(found).items():
        for name in names:
            texts.pop(posixpath.join(directory, name))
        texts[directory] = {"": f"{len(names):,} data files are missing: {_listed(names)}"}
    for place, place_texts in texts.items():
        console.print(name_cell(place, "bold"))
        lines = bare_grid("mark", "message")
        for text in place_texts.values():
            lines.add_row(Text("✗", "red"), name_cell(text))
        console.print(lines)
    num_checkpoints, num_blobs = count_text(len(found.checkpoints), "checkpoint"), count_text(found.num_blobs, "block")
    extent = f"{num_checkpoints}, {num_blobs}, {bytes_text(found.num_bytes)}"
    if found.is_right:
        others = "; --all verifies the other checkpoints, too" if has_others else ""
        console.print(Text.assemble((f"✓ no problems in {verified}: ", "bold green"), extent + others))
    else:
        console.print(Text.assemble(("\n" + count_text(num_problems, "problem"), "bold red"), f" in {extent}"))
        _print_impact(console, found)


def _missing(found: VerifyReport) -> dict[str, list[str]]:
    """Return the names of missing data files by directory, for each directory that lacks several."""
    files = {item.file for item in found.problems if item.file is not None and item.offset == 0 and item.blob is None}
    names: dict[str, list[str]] = {}
    for file in sorted(files):
        names.setdefault(posixpath.dirname(file), []).append(posixpath.basename(file))
    return {directory: missing for directory, missing in names.items() if len(missing) > 1}


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES:,} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more


def _print_impact(console: Console, found: VerifyReport) -> None:
    """Print which checkpoints cannot be restored, and which one can be restored instead."""
    names = [posixpath.basename(url) for url in found.unrestorable]
    lines = bare_grid("what", "which")
    lines.add_row("cannot be restored:", name_cell(_listed(names) or "none"))
    lines.add_row("newest that can be restored:", name_cell(found.newest_restorable or "none", "bold"))
    console.print(lines)

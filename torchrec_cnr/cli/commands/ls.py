"""``cnr ls``: list the checkpoints under a root.

Checkpoint chains are drawn as lines of text. A chain goes straight down, however long it is: a checkpoint is based on
the one above it. Where several are based on one, each begins a branch, except the one that leads to the newest
checkpoint, which continues the chain. If the newest has no child yet, all of them are branches.

    step-10
    step-20
    ├─ step-30     abandoned when the job was restored from step-20
    │  step-40
    step-35
    step-45
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchrec_cnr.cli.options import AsJson, Everything, Kafka, KafkaFile, KafkaSettings, rows_log
from torchrec_cnr.cli.output import bare_grid, grid, name_cell, print_json, progress_bar, stdout
from torchrec_cnr.errors import DamagedError, VersionError
from torchrec_cnr.format.manifest import PACK_SUFFIX
from torchrec_cnr.human_text import age_text, bytes_text, count_text, name_text, percent_text
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.lineage.other_roots import needed_of_other_roots
from torchrec_cnr.maintenance.catalog import Catalog, Entry, check_root, read_catalog, total_bytes
from torchrec_cnr.maintenance.file_names import is_uncommitted, log_bytes
from torchrec_cnr.maintenance.restore_bytes import all_restore_bytes


@dataclass(frozen=True)
class Line:
    """A checkpoint in the drawing.

    Attributes:
        name: The name of the checkpoint.
        guide: The characters before the name, which draw the tree.
        root: The name of the first checkpoint of its tree.
    """

    name: str
    guide: str
    root: str


def draw(catalog: Catalog) -> list[Line]:
    """Return the lines of all checkpoints, tree by tree, with the newest one last."""
    children: dict[str | None, list[str]] = {}
    parents = {name: catalog.parent(checkpoint) for name, checkpoint in catalog.checkpoints.items()}
    for name, parent in parents.items():
        children.setdefault(parent, []).append(name)
    newest = _newest_above(parents)
    for siblings in children.values():
        siblings.sort(key=lambda name: newest[name])
    return [line for root in children.get(None, ()) for line in _tree(root, children)]


def _newest_above(parents: Mapping[str, str | None]) -> dict[str, int]:
    """Return, for each checkpoint, the number of the newest one that is based on it, or its own.

    Args:
        parents: The parent of each checkpoint, oldest first.
    """
    newest = {name: number for number, name in enumerate(parents)}
    for name, parent in reversed(list(parents.items())):
        if parent is not None:
            newest[parent] = max(newest[parent], newest[name])
    return newest


def _tree(root: str, children: Mapping[str | None, Sequence[str]]) -> Iterator[Line]:
    waiting = [(root, "", "")]  # a stack of: name, guide before it, guide before the checkpoints based on it
    while waiting:
        name, guide, indent = waiting.pop()
        yield Line(name, guide, root)
        above = children.get(name, ())
        goes_on = len(above) == 1 or (len(above) > 1 and above[-1] in children)
        branches = above[:-1] if goes_on else above
        if goes_on:
            waiting.append((above[-1], indent, indent))
        for number, branch in reversed(list(enumerate(branches, 1))):
            is_last = number == len(branches) and not goes_on
            waiting.append((branch, indent + ("└─ " if is_last else "├─ "), indent + ("   " if is_last else "│  ")))


@dataclass(frozen=True)
class Gap:
    """Consecutive checkpoints that a drawing does not show."""

    names: tuple[str, ...]


def visible(lines: Sequence[Line], shown: Collection[str]) -> Iterator[Line | Gap | None]:
    """Yield the visible part of a drawing: some checkpoints, and the beginning of each of their trees.

    Yields:
        Lines, gaps, and None for a blank line between trees.
    """
    roots = {line.root for line in lines if line.name in shown}
    sizes = Counter(line.root for line in lines)
    hidden: list[str] = []
    root = None
    for line in lines:
        if line.name not in shown and line.name not in roots:
            hidden.append(line.name)
            continue
        if hidden:
            yield Gap(tuple(hidden))
            hidden = []
        if root not in (None, line.root) and max(sizes[root], sizes[line.root]) > 1:
            yield None
        root = line.root
        yield line
    if hidden:
        yield Gap(tuple(hidden))


EntryState = Literal["damaged", "newer", "unreadable", "pruned", "unfinished", "empty", "foreign"]

_LINES = 40  # fit on a screen
_MEANINGS: Mapping[EntryState, str] = {
    "damaged": "corrupt",
    "newer": "newer version",
    "unreadable": "unreadable",
    "pruned": "pruned",
    "unfinished": "unfinished",
    "empty": "empty",
    "foreign": "not a checkpoint",
}
_NOTES: Mapping[EntryState, str] = {
    "pruned": "; compacted checkpoints use them, or the next prune removes them",
    "unfinished": "; from a save that failed or is still running",
}


def ls(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A directory of checkpoints, as a path or URL.")],
    last: Annotated[
        int | None, typer.Option("--last", min=1, help="Show only the newest N checkpoints.", metavar="N")
    ] = None,
    everything: Everything = False,
    kafka: Kafka = None,
    kafka_settings: KafkaSettings = None,
    kafka_file: KafkaFile = None,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints under a root, and their parents.

    Each checkpoint is based on the one above it. If several are based on one checkpoint, branches begin there. The
    column "restore" shows how many bytes a load reads, from the checkpoint and all that it is based on. If there are
    more than 40 checkpoints, only the newest are shown.

    Examples:

    - `cnr ls runs/a`
    - `cnr ls s3://bucket/runs/a --last 10`
    - `cnr ls runs/a --json | jq '.checkpoints[-1].name'`
    """
    rows = rows_log(kafka, kafka_settings, kafka_file)
    with progress_bar("reading manifests", not as_json) as report:
        catalog = read_catalog(root, report, rows)
    check_root(catalog)
    shown = set(list(catalog.checkpoints)[-last:] if last else catalog.checkpoints)
    if as_json:
        print_json(_document(catalog, shown))
        return
    if last is None and not everything and len(shown) > _LINES:
        shown = set(list(catalog.checkpoints)[-_LINES:])
    _print(stdout(), catalog, shown)


def _document(catalog: Catalog, shown: set[str]) -> dict[str, Any]:
    restores, heads = all_restore_bytes(catalog), set(catalog.heads())
    return {
        "root": catalog.root.url,
        "checkpoints": [
            {
                "name": name,
                "path": checkpoint.store.url,
                "kind": checkpoint.committed.kind,
                "is_compacted": checkpoint.is_compacted,
                "is_abandoned": catalog.entries[name].is_abandoned,
                "is_head": name in heads,
                "parent": checkpoint.parent,
                "needed_of_other_roots": needed_of_other_roots(checkpoint.manifest),
                "is_parent_here": checkpoint.parent is None or catalog.parent(checkpoint) is not None,
                "created_ns": checkpoint.created_ns,
                "num_rows": checkpoint.committed.num_rows,
                "num_table_rows": _num_table_rows(checkpoint),
                "num_bytes": catalog.entries[name].num_bytes,
                "log_bytes": log_bytes(checkpoint.manifest),
                "restore_bytes": restores[name],
            }
            for name, checkpoint in catalog.checkpoints.items()
            if name in shown
        ],
        "others": [
            {
                "name": entry.name,
                "path": entry.store.url,
                "state": _state(entry, catalog),
                "num_files": len(entry.files),
                "num_bytes": entry.num_bytes,
                "message": None if entry.problem is None else str(entry.problem),
            }
            for entry in _others(catalog)
        ],
    }


def _others(catalog: Catalog) -> list[Entry]:
    return [entry for _, entry in sorted(catalog.entries.items()) if entry.checkpoint is None]


def _state(entry: Entry, catalog: Catalog) -> EntryState:
    """Return why a directory is not a checkpoint."""
    if isinstance(entry.problem, DamagedError):
        return "damaged"
    if isinstance(entry.problem, VersionError):
        return "newer"
    if entry.problem is not None:
        return "unreadable"
    if any(file.endswith(PACK_SUFFIX) for file in entry.files):
        was_pruned = any(pruned.name == entry.name for pruned in catalog.journal.pruned)
        return "pruned" if was_pruned else "unfinished"
    return "foreign" if entry.files else "empty"


def _num_table_rows(checkpoint: Checkpoint) -> int:
    return sum(entry.size[0] for entry in checkpoint.manifest.tensors.values() if entry.is_table)


def _print(console: Console, catalog: Catalog, shown: set[str]) -> None:
    if catalog.checkpoints:
        console.print(_table(catalog, list(visible(draw(catalog), shown))))
        console.print()
    console.print(_summary(catalog))
    others = _others(catalog)
    if others:
        table = bare_grid("name", "state", "why")
        for entry in others:
            state = _state(entry, catalog)
            is_bad = entry.problem is not None
            table.add_row(
                name_cell(entry.name), Text(_MEANINGS[state], "red" if is_bad else "yellow"), _why(entry, state)
            )
        console.print(Text("\nother directories", "bold"))
        console.print(table)


def _why(entry: Entry, state: EntryState) -> Text:
    if entry.problem is not None:
        return name_cell(str(entry.problem).removeprefix(f"{entry.store.url}/"))
    size = f"{count_text(len(entry.files), 'file')}, {bytes_text(entry.num_bytes)}" if entry.files else ""
    note = _NOTES.get(state, "")
    if entry.store.row_log is None and any(map(is_uncommitted, entry.files)):
        note = "; may be committed in Kafka: pass --kafka to check"
    return Text(size + note, "dim")


def _summary(catalog: Catalog) -> Text:
    checkpoints = catalog.checkpoints
    if not checkpoints:
        return Text(f"no checkpoints under {name_text(catalog.root.url)}")
    num_bytes = total_bytes(catalog.entries[name] for name in checkpoints)
    num_baselines = sum(checkpoint.committed.kind == "baseline" for checkpoint in checkpoints.values())
    num_compacted = sum(checkpoint.is_compacted for checkpoint in checkpoints.values())
    kinds = f"{count_text(num_baselines, 'baseline')} and {count_text(len(checkpoints) - num_baselines, 'delta')}"
    compacted = f", {num_compacted:,} of them compacted" if num_compacted else ""
    return Text(
        f"{count_text(len(checkpoints), 'checkpoint')}: {kinds}{compacted}, "
        f"{bytes_text(num_bytes)}{_in_logs(checkpoints.values())}; newest is {name_text(catalog.newest or '')}",
        overflow="fold",
    )


def _in_logs(checkpoints: Iterable[Checkpoint]) -> str:
    """Return how many bytes in Kafka the checkpoints need, as text. Data that several of them need counts once."""
    packs = {pack.log: pack for checkpoint in checkpoints for pack in checkpoint.manifest.packs if pack.log is not None}
    return f" and {bytes_text(sum(pack.num_bytes for pack in packs.values()))} in Kafka" if packs else ""


def _table(catalog: Catalog, lines: Sequence[Line | Gap | None]) -> Table:
    restores, now_ns = all_restore_bytes(catalog), time.time_ns()
    has_logs = any(log_bytes(checkpoint.manifest) for checkpoint in catalog.checkpoints.values())
    in_kafka = [">in Kafka"] * has_logs
    table = grid("checkpoint", "kind", ">rows", ">", ">size", *in_kafka, ">restore", ">age")
    for line in lines:
        if line is None:
            table.add_row()
            continue
        if isinstance(line, Gap):
            entries = [catalog.entries[name] for name in line.names]
            text = f"⋮  {count_text(len(entries), 'checkpoint')}"
            table.add_row(Text(text, "dim"), "", "", "", Text(bytes_text(total_bytes(entries)), "dim"))
            continue
        checkpoint, read_bytes = catalog.checkpoints[line.name], restores[line.name]
        num_rows, all_rows = checkpoint.committed.num_rows, _num_table_rows(checkpoint)
        table.add_row(
            Text.assemble(
                (line.guide, "dim"),
                name_cell(line.name, "bold" if line.name == catalog.newest else ""),
                overflow="fold",
            ),
            _kind(catalog, line.name),
            f"{num_rows:,}",
            percent_text(num_rows / all_rows) if all_rows else "",
            bytes_text(catalog.entries[line.name].num_bytes),
            *[bytes_text(log_bytes(checkpoint.manifest)) for _ in in_kafka],
            Text("?", "red") if read_bytes is None else bytes_text(read_bytes),
            age_text(now_ns - checkpoint.created_ns),
        )
    return table


def _kind(catalog: Catalog, name: str) -> Text:
    """Return the kind of checkpoint that the save wrote, and what has happened to it since."""
    checkpoint = catalog.checkpoints[name]
    kind, elsewhere = checkpoint.committed.kind, needed_of_other_roots(checkpoint.manifest)
    flags = ["compacted"] * checkpoint.is_compacted + ["abandoned"] * catalog.entries[name].is_abandoned
    if elsewhere:
        flags.append(f"needs other roots: {name_text(', '.join(elsewhere))}")
    elif checkpoint.parent is not None and catalog.parent(checkpoint) is None:
        return Text("delta, parent missing", "red")
    text = Text(kind, "green" if kind == "baseline" else "")
    return text.append(f", {', '.join(flags)}", "cyan") if flags else text

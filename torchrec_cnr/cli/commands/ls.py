"""``cnr ls``: list the checkpoints under a root, one line for each, the newest last."""

import posixpath
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import typer
from rich.console import Console
from rich.text import Text

from torchrec_cnr.cli.options import AsJson, Everything, Kafka, KafkaFile, KafkaSettings, rows_log
from torchrec_cnr.cli.output import (
    bare_grid,
    name_cell,
    print_columns,
    print_json,
    print_left_out,
    progress_bar,
    stdout,
)
from torchrec_cnr.errors import ConfigurationError, DamagedError, VersionError
from torchrec_cnr.format.manifest import PACK_SUFFIX, CheckpointKind
from torchrec_cnr.human_text import (
    age_text,
    bytes_text,
    count_text,
    instant,
    name_text,
    percent_text,
    relation_text,
)
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.lineage.other_roots import needed_of_other_roots
from torchrec_cnr.maintenance.catalog import Catalog, Entry, check_root, read_catalog, roots_in
from torchrec_cnr.maintenance.file_names import is_uncommitted, log_bytes, saved_bytes
from torchrec_cnr.maintenance.read_run_history import exact_bytes, precision_text, read_run_history
from torchrec_cnr.maintenance.restore_bytes import all_restore_bytes
from torchrec_cnr.maintenance.run_history import RunHistory
from torchrec_cnr.storage.leases import is_lease
from torchrec_cnr.storage.store import Store

EntryState = Literal["corrupt", "newer", "unreadable", "pruned", "unfinished", "empty", "foreign"]

_LINES = 40  # fit on a screen
_MANY_PRUNED = 4  # directories are listed each; more are counted
_TWO_DAYS_NS = 48 * 3_600 * 1_000_000_000  # until then, an age says more than a date
_MEANINGS: Mapping[EntryState, str] = {
    "corrupt": "corrupt",
    "newer": "newer version",
    "unreadable": "unreadable",
    "pruned": "pruned",
    "unfinished": "unfinished",
    "empty": "empty",
    "foreign": "not a checkpoint",
}
_NOTES: Mapping[EntryState, str] = {
    "pruned": "; the next prune removes them",
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
    """List the checkpoints under a root, the newest last.

    Columns:

    - kind, based on: a baseline contains every row, a delta only those that were modified since the checkpoint that it
      is based on
    - rows, of all: the rows that the save wrote, and their share of all rows of the tables
    - written: the bytes that the save wrote, without those of later compactions
    - vs fp32: these bytes, compared with a full checkpoint without quantization
    - restore: the bytes that a load reads now, from the checkpoint and all that it is based on
    - age: the time since the commit; after two days, when that was, in UTC
    - notes: compacted (a load reads no parent any more, but may read data files in its directory), abandoned, tags,
      dependencies on other roots, missing data files

    A narrow terminal shows fewer columns, and names those that it leaves out. If there are more than 40
    checkpoints, only the newest are shown.

    Examples:

    - `cnr ls runs/a`
    - `cnr ls s3://bucket/runs/a --last 10`
    - `cnr ls runs/a --json | jq '.checkpoints[-1].name'`
    """
    if last is not None and everything:
        raise ConfigurationError("--last and --all exclude each other")
    rows = rows_log(kafka, kafka_settings, kafka_file)
    with progress_bar("reading manifests", not as_json) as report:
        catalog = read_catalog(root, report, rows)
    roots = [] if catalog.checkpoints else roots_in(catalog.root)
    if not roots:
        check_root(catalog)
    names = list(catalog.checkpoints)
    shown = names[-last:] if last else names
    if as_json:
        print_json(_document(catalog, shown, roots))
        return
    if last is None and not everything:
        shown = names[-_LINES:]
    console = stdout()
    if names:
        print_left_out(console, len(names) - len(shown), "checkpoints")
        _print_table(console, catalog, shown)
        console.print()
    for line in _summary(catalog, roots):
        console.print(Text(line, overflow="fold"))
    _print_others(console, [] if roots else _others(catalog), catalog, everything)


def _document(catalog: Catalog, shown: Sequence[str], roots: Sequence[Store]) -> dict[str, Any]:
    restores, heads, history = all_restore_bytes(catalog), set(catalog.heads()), read_run_history(catalog)
    users = _users(catalog)
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
                "based_on": _based_on(catalog, checkpoint),
                "parent": checkpoint.parent,
                "needed_of_other_roots": needed_of_other_roots(checkpoint.manifest),
                "is_parent_here": checkpoint.parent is None or catalog.parent(checkpoint) is not None,
                "uses_directories": catalog.used_directories(checkpoint),
                "missing_files": catalog.missing_files(checkpoint),
                "created_ns": checkpoint.created_ns,
                "policy": checkpoint.committed.policy,
                "tags": catalog.entries[name].tags,
                "num_rows": checkpoint.committed.num_rows,
                "num_table_rows": checkpoint.num_table_rows,
                "written_bytes": saved_bytes(checkpoint, catalog.entries[name].files),
                "exact_bytes": exact_bytes(checkpoint.committed),
                "num_bytes": catalog.entries[name].num_bytes,
                "log_bytes": log_bytes(checkpoint.manifest),
                "restore_bytes": restores[name],
            }
            for name, checkpoint in ((name, catalog.checkpoints[name]) for name in shown)
        ],
        "totals": {
            "num_saves": len(history.saves),
            "num_compactions": len(history.of_kind("compaction")),
            "written_bytes": history.all_bytes,
            "log_bytes": history.log_bytes,
            "kept_bytes": history.kept_bytes,
            "exact_bytes": history.exact_bytes,
        },
        "roots": [found.url for found in roots],
        "others": [
            {
                "name": entry.name,
                "path": entry.store.url,
                "state": _state(entry, catalog),
                "num_files": len(entry.files),
                "num_bytes": entry.num_bytes,
                "message": None if entry.problem is None else str(entry.problem),
                "used_by": users.get(entry.name, []),
            }
            for entry in _others(catalog)
        ],
    }


def _based_on(catalog: Catalog, checkpoint: Checkpoint) -> str | None:
    """Return the checkpoint on which a save was based: its name under this root, or its path relative to the root."""
    parent = checkpoint.committed.parent
    if parent is None:
        return None
    store = checkpoint.store.at(parent.path)
    return catalog.name_of(store) or posixpath.relpath(store.path, catalog.root.path)


def _others(catalog: Catalog) -> list[Entry]:
    return [entry for _, entry in sorted(catalog.entries.items()) if entry.checkpoint is None]


def _users(catalog: Catalog) -> dict[str, list[str]]:
    """Return, by directory, the other checkpoints that need data files in it."""
    users: dict[str, list[str]] = {}
    for name, checkpoint in catalog.checkpoints.items():
        for directory in catalog.used_directories(checkpoint):
            users.setdefault(directory, []).append(name)
    return users


def _state(entry: Entry, catalog: Catalog) -> EntryState:
    """Return why a directory is not a checkpoint."""
    if isinstance(entry.problem, DamagedError):
        return "corrupt"
    if isinstance(entry.problem, VersionError):
        return "newer"
    if entry.problem is not None:
        return "unreadable"
    if any(file.endswith(PACK_SUFFIX) for file in entry.files):
        was_pruned = any(pruned.name == entry.name for pruned in catalog.journal.pruned)
        return "pruned" if was_pruned else "unfinished"
    if entry.files and all(map(is_lease, entry.files)):
        return "unfinished"  # a save that died before its first data file
    return "foreign" if entry.files or entry.directories else "empty"


def _print_table(console: Console, catalog: Catalog, names: Sequence[str]) -> None:
    restores, now_ns = all_restore_bytes(catalog), time.time_ns()
    found = [(name, catalog.checkpoints[name], catalog.checkpoints[name].committed) for name in names]
    versus, policies = f">vs {precision_text(found[-1][2])}", {saved.policy for _, _, saved in found}
    written = [saved_bytes(checkpoint, catalog.entries[name].files) for name, checkpoint, _ in found]
    columns: dict[str, Sequence[str | Text]] = {
        "checkpoint": [name_cell(name, "bold" if name == catalog.newest else "") for name in names],
        "kind": [Text(saved.kind, "green" if saved.kind == "baseline" else "") for _, _, saved in found],
        "based on": [name_cell(_based_on(catalog, checkpoint) or "–") for _, checkpoint, _ in found],
        ">rows": [f"{saved.num_rows:,}" for _, _, saved in found],
        ">of all": [_row_share(checkpoint) for _, checkpoint, _ in found],
        ">written": [*map(bytes_text, written)],
        ">in Kafka": [bytes_text(log_bytes(saved)) if log_bytes(saved) else "" for _, _, saved in found],
        versus: [relation_text(own, exact_bytes(saved)) for own, (_, _, saved) in zip(written, found, strict=True)],
        ">restore": [_read_cell(restores[name]) for name in names],
        ">age": [_age(checkpoint.created_ns, now_ns) for _, checkpoint, _ in found],
        "policy": [name_cell(saved.policy if len(policies) > 1 else "") for _, _, saved in found],
        "notes": [_notes(catalog, name) for name in names],
    }
    expendable = ["policy", ">rows", ">restore", "based on", ">of all", ">age", ">in Kafka", versus, ">written"]
    print_columns(console, columns, expendable)


def _age(created_ns: int, now_ns: int) -> str:
    """Return how long ago a checkpoint was committed; after two days, when that was."""
    is_long_ago = now_ns - created_ns >= _TWO_DAYS_NS
    return f"{instant(created_ns):%Y-%m-%d %H:%M}" if is_long_ago else age_text(now_ns - created_ns)


def _row_share(checkpoint: Checkpoint) -> str:
    all_rows = checkpoint.num_table_rows
    return percent_text(min(1.0, checkpoint.committed.num_rows / all_rows)) if all_rows else ""


def _read_cell(num_bytes: int | None) -> Text:
    return Text("?", "red") if num_bytes is None else Text(bytes_text(num_bytes))


def _notes(catalog: Catalog, name: str) -> Text:
    """Return what has happened to a checkpoint since it was saved, and what it depends on."""
    checkpoint, entry = catalog.checkpoints[name], catalog.entries[name]
    elsewhere = needed_of_other_roots(checkpoint.manifest)
    notes = ["compacted"] * checkpoint.is_compacted + ["abandoned"] * entry.is_abandoned
    notes += [f"tagged {tag}" for tag in entry.tags]
    notes += [f"needs {posixpath.normpath(posixpath.join(name, path))}" for path in elsewhere]
    text = name_cell(", ".join(notes), "cyan")
    lacking = catalog.incomplete.get(name)
    if lacking is not None:
        what = "data files" if catalog.missing_files(catalog.checkpoints[lacking]) else "parent"
        of = "" if lacking == name else f" of {name_text(lacking)}"
        text = Text.assemble((f"{what}{of} missing", "red"), ", " if notes else "", text, overflow="fold")
    return text


def _summary(catalog: Catalog, roots: Sequence[Store]) -> Iterator[str]:
    """Yield the lines below the table: what is there, and what was written for it."""
    root, checkpoints = name_text(catalog.root.url), catalog.checkpoints
    if roots:
        yield f"{root}: no checkpoints, but {count_text(len(roots), 'root')}; list one of them:"
        yield from (f"  cnr ls {name_text(found.url)}" for found in roots)
    elif not checkpoints:
        yield f"no checkpoints under {root}"
    else:
        saved = [checkpoint.committed for checkpoint in checkpoints.values()]
        nums = Counter(manifest.kind for manifest in saved)
        kinds = " and ".join(count_text(nums[kind], kind) for kind in get_args(CheckpointKind) if nums[kind])
        num_compacted = sum(checkpoint.is_compacted for checkpoint in checkpoints.values())
        compacted = f", {num_compacted:,} of them compacted" if num_compacted else ""
        policies = {manifest.policy for manifest in saved}
        policy = f"; policy {name_text(policies.pop())}" if len(policies) == 1 else ""
        num, newest = count_text(len(saved), "checkpoint"), catalog.newest or ""
        problem = ", which cannot be restored" if newest in catalog.incomplete else ""
        yield f"{num}: {kinds}{compacted}{policy}; newest: {name_text(newest)}{problem}"
        yield _sizes(catalog, read_run_history(catalog))
        if any(map(catalog.used_directories, checkpoints.values())):
            yield "checkpoints use data files in other directories: remove checkpoints with cnr prune only"


def _sizes(catalog: Catalog, history: RunHistory) -> str:
    num_compactions = len(history.of_kind("compaction"))
    compactions = f" and {count_text(num_compactions, 'compaction')}" if num_compactions else ""
    full = f"full {precision_text(list(catalog.checkpoints.values())[-1].committed)} checkpoints"
    relation = relation_text(history.all_bytes, len(history.saves) * history.exact_bytes, full)
    return (
        f"{bytes_text(history.kept_bytes)} kept{_in_logs(catalog.checkpoints.values())}, "
        f"{bytes_text(history.all_bytes)} written by {count_text(len(history.saves), 'save')}{compactions}"
        f"{': ' * bool(relation)}{relation}"
    )


def _in_logs(checkpoints: Iterable[Checkpoint]) -> str:
    """Return how many bytes in Kafka the checkpoints need, as text. Data that several of them need counts once."""
    packs = {pack.log: pack for checkpoint in checkpoints for pack in checkpoint.manifest.packs if pack.log is not None}
    return f" and {bytes_text(sum(pack.num_bytes for pack in packs.values()))} in Kafka" if packs else ""


def _print_others(console: Console, others: Sequence[Entry], catalog: Catalog, everything: bool) -> None:
    if not others:
        return
    table, users = bare_grid("name", "state", "why"), _users(catalog)
    states = {entry.name: _state(entry, catalog) for entry in others}
    pruned = [entry for entry in others if states[entry.name] == "pruned" and entry.name in users]
    if len(pruned) > _MANY_PRUNED and not everything:
        size = f"{sum(len(entry.files) for entry in pruned):,} files, {bytes_text(sum(e.num_bytes for e in pruned))}"
        advice = f"{size}; do not remove them: checkpoints use their data files; --all lists them"
        table.add_row(f"{len(pruned):,} directories", Text(_MEANINGS["pruned"], "yellow"), Text(advice))
        others = [entry for entry in others if entry not in pruned]
    for entry in others:
        state = states[entry.name]
        style = "yellow" if entry.problem is None else "red"
        why = _why(entry, state, users.get(entry.name, ()))
        table.add_row(name_cell(entry.name), Text(_MEANINGS[state], style), why)
    console.print(Text("\nother directories", "bold"))
    console.print(table)


def _why(entry: Entry, state: EntryState, users: Sequence[str]) -> Text:
    used = f"; do not remove it: its data files are used by {', '.join(map(name_text, users))}" if users else ""
    if entry.problem is not None:
        return name_cell(str(entry.problem).removeprefix(f"{entry.store.url}/") + used)
    size = f"{count_text(len(entry.files), 'file')}, {bytes_text(entry.num_bytes)}" if entry.files else ""
    note = used or _NOTES.get(state, "")
    if not used and entry.store.row_log is None and any(map(is_uncommitted, entry.files)):
        note = "; may be committed in Kafka: pass --kafka to check"
    return Text(size + note, "dim")

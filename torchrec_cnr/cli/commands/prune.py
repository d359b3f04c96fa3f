"""``cnr prune``: remove the checkpoints that need not be kept."""

from typing import Annotated

import typer
from rich.text import Text

from torchrec_cnr.cli.options import AsJson, Kafka, KafkaFile, KafkaSettings, rows_log
from torchrec_cnr.cli.output import bare_grid, name_cell, print_json, progress_bar, stdout
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.human_text import bytes_text, count_text
from torchrec_cnr.maintenance.catalog import Catalog, check_root, read_catalog
from torchrec_cnr.maintenance.pruning.execute import PruneResult, run_prune
from torchrec_cnr.maintenance.pruning.plan import PrunePlan, Removal, plan_prune
from torchrec_cnr.maintenance.pruning.retention import Best, Keep
from torchrec_cnr.storage.leases import is_lease


def prune(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="A directory of checkpoints, as a path or URL.")],
    last: Annotated[int, typer.Option("--last", min=0, metavar="N", help="Keep the newest N checkpoints.")] = 3,
    daily: Annotated[
        int, typer.Option("--daily", min=0, metavar="N", help="Keep the newest checkpoint of each of the last N days.")
    ] = 0,
    metric: Annotated[
        str | None,
        typer.Option("--best", metavar="METRIC", help="Keep the one with the largest METRIC; -METRIC: the smallest."),
    ] = None,
    tagged: Annotated[bool, typer.Option(help="Keep the checkpoints that have a tag.")] = True,
    execute: Annotated[bool, typer.Option("--execute", help="Remove them. By default, only print the plan.")] = False,
    kafka: Kafka = None,
    kafka_settings: KafkaSettings = None,
    kafka_file: KafkaFile = None,
    as_json: AsJson = False,
) -> None:
    """Remove the checkpoints that need not be kept.

    This is a dry run unless you pass --execute. It also keeps everything that a kept checkpoint needs, that is being
    saved, loaded or compacted, that cannot be read, or that this library did not write.

    Rows in Kafka are not removed; the topic's own settings decide. A job may have died right after a commit to Kafka.
    With --kafka, such a checkpoint is recognised as committed. Without it, its files are kept in any case.

    Examples:

    - `cnr prune runs/a --last 5 --daily 7`
    - `cnr prune s3://bucket/runs/a --best auc --execute`
    """
    best = _best(metric)
    keep = Keep(last=last, daily=daily, best=best, tagged=tagged)
    rows = rows_log(kafka, kafka_settings, kafka_file)
    with progress_bar("reading manifests", not as_json) as report:
        catalog = read_catalog(root, report, rows)
    check_root(catalog)
    _check_metric(catalog, best)
    plan = plan_prune(catalog, keep)
    result = None
    if execute:
        with progress_bar("removing", not as_json) as report:
            result = run_prune(plan, progress=report)
    if as_json:
        print_json(_json(plan, result))
    else:
        _print(plan, result)
    if result is not None and result.failed:
        raise typer.Exit(1)


def _best(metric: str | None) -> Best | None:
    if metric is None:
        return None
    if metric in ("", "-"):
        raise ConfigurationError("--best needs the name of a metric")
    return Best(metric.removeprefix("-"), largest=not metric.startswith("-"))


def _check_metric(catalog: Catalog, best: Best | None) -> None:
    """Refuse a metric that no checkpoint has: if its name is misspelled, the best checkpoint would be removed."""
    known = {metric for entry in catalog.entries.values() for metric in entry.metrics}
    if best is not None and best.metric not in known and catalog.checkpoints:
        there = ", ".join(map(repr, sorted(known))) or "none"
        raise ConfigurationError(
            f"{catalog.root.url}: no checkpoint has the metric {best.metric!r}; known metrics: {there}"
        )


def _json(plan: PrunePlan, result: PruneResult | None) -> dict[str, object]:
    failed = {} if result is None else result.failed
    return {
        "rules": str(plan.keep),
        "remove": [
            {"name": item.entry.name, "bytes": item.num_bytes, "is_checkpoint": item.pruned is not None}
            for item in plan.removals
        ],
        "keep": [
            {"name": name, "bytes": _kept_bytes(plan, name), "reasons": list(reasons)}
            for name, reasons in plan.stays.items()
        ],
        "freed_bytes": plan.freed_bytes if result is None else result.freed_bytes,
        "kept_bytes": plan.left_bytes,
        "executed": result is not None,
        "failed": [{"name": name, "reasons": list(reasons)} for name, reasons in failed.items()],
    }


def _kept_bytes(plan: PrunePlan, name: str) -> int:
    """Return the bytes that are kept in a directory."""
    return plan.catalog.entries[name].num_bytes - sum(
        item.num_bytes for item in plan.removals if item.entry.name == name
    )


def _left_over(removal: Removal) -> str:
    """Return which files of a directory are removed; "" if it is a checkpoint with all its files."""
    if removal.pruned is not None:
        return ""
    if all(map(is_lease, removal.files)):
        return "leases of processes that died"
    return "files that no checkpoint needs"


def _print(plan: PrunePlan, result: PruneResult | None) -> None:
    console = stdout()
    console.print(Text.assemble("keep ", (str(plan.keep), "bold")))
    removals = {removal.entry.name: removal for removal in plan.removals}
    lines = bare_grid("what", "size", "name", "why")
    for name in dict.fromkeys((*plan.catalog.checkpoints, *plan.catalog.entries)):  # oldest first, as in cnr ls
        removal, kept = removals.get(name), "; ".join(plan.stays.get(name, ()))
        if kept and (removal is None or removal.pruned is None):
            also = "" if removal is None else f"; remove {bytes_text(removal.num_bytes)}: {_left_over(removal)}"
            size = bytes_text(_kept_bytes(plan, name))
            lines.add_row(Text("keep", "green"), size, name_cell(name), name_cell(kept + also))
        elif removal is not None:
            why = f"{bytes_text(_kept_bytes(plan, name))} stay: {kept}" if kept else _left_over(removal)
            lines.add_row(Text("remove", "red"), bytes_text(removal.num_bytes), name_cell(name), name_cell(why))
    console.print(lines)
    if plan.catalog.newest in {pruned.name for pruned in plan.pruned}:
        console.print(Text(f"this removes the newest checkpoint, {plan.catalog.newest}", "yellow"))
    if result is None:
        gone, freed = count_text(len(plan.pruned), "checkpoint"), bytes_text(plan.freed_bytes)
        left = bytes_text(plan.left_bytes)
        if plan.removals:
            console.print(f"Dry run: would remove {gone}, free {freed} and keep {left}. Add --execute to remove them")
        else:
            console.print(f"nothing to remove; {left} are kept")
        return
    for directory, reasons in result.failed.items():
        told = name_cell("; ".join(reasons))
        console.print(Text.assemble(("not removed: ", "bold red"), name_cell(directory), "  ", told))
    gone, freed = count_text(len(result.removed), "checkpoint"), bytes_text(result.freed_bytes)
    console.print(Text.assemble(("✓ ", "bold green"), f"removed {gone}, freed {freed}"))

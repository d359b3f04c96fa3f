"""``cnr compact``: merge a checkpoint chain into one checkpoint."""

from typing import Annotated

import typer

from torchrec_cnr.cli.options import AsJson, Kafka, KafkaFile, KafkaSettings, Threads, rows_log
from torchrec_cnr.cli.output import print_json, progress_bar, stdout
from torchrec_cnr.human_text import bytes_text, count_text, name_text, ratio_text
from torchrec_cnr.lineage.checkpoint import read_checkpoint
from torchrec_cnr.maintenance.catalog import checkpoint_at
from torchrec_cnr.maintenance.compaction.compact import run_compaction
from torchrec_cnr.maintenance.compaction.plan import CompactionPlan, plan_compaction
from torchrec_cnr.policies import MAX_RATIO
from torchrec_cnr.storage.leases import leased


def compact(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint; or a root, for its newest checkpoint.")],
    since: Annotated[
        str | None, typer.Option("--since", metavar="PATH", help="Merge only checkpoints newer than this ancestor.")
    ] = None,
    max_ratio: Annotated[
        float,
        typer.Option("--max-ratio", min=1, metavar="RATIO", help="Bytes a restore may read, per byte that it needs."),
    ] = MAX_RATIO,
    self_contained: Annotated[
        bool,
        typer.Option("--self-contained", help="Copy all rows from other directories and Kafka."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
    threads: Threads = 2,
    kafka: Kafka = None,
    kafka_settings: KafkaSettings = None,
    kafka_file: KafkaFile = None,
    as_json: AsJson = False,
) -> None:
    """Merge a checkpoint chain into one checkpoint.

    The checkpoint gets a new manifest, with which a load reads no parent. Deltas that are based on it use the new
    manifest. Files that contain few overwritten rows remain in use, in any directory. The rows of other files are
    copied without decoding.

    You may run this while a job is training and saving. It removes nothing; use cnr prune for that.

    Examples:

    - `cnr compact runs/a`
    - `cnr compact runs/a/step-300 --self-contained`
    """
    checkpoint = read_checkpoint(checkpoint_at(path, rows_log(kafka, kafka_settings, kafka_file)))
    with leased(checkpoint.store, "compact") as lease:
        plan = plan_compaction(
            checkpoint.store,
            since=since,
            max_ratio=max_ratio,
            self_contained=self_contained,
            thread_count=threads,
        )
        if not dry_run:
            with progress_bar("copying rows", not as_json) as report:
                run_compaction(plan, lease, thread_count=threads, progress=report)
    if as_json:
        print_json(_json(plan, is_done=not dry_run and plan.is_needed))
    else:
        _print(plan, dry_run)


def _json(plan: CompactionPlan, is_done: bool) -> dict[str, object]:
    return {
        "checkpoint": plan.newest.store.url,
        "folded": [checkpoint.store.url for checkpoint in plan.run],
        "rewritten_files": len(plan.rewritten),
        "files": len(plan.uses),
        "moved_bytes": plan.moved_bytes,
        "live_bytes": plan.live_bytes,
        "bytes_before": plan.bytes_before,
        "bytes_after": plan.bytes_after,
        "executed": is_done,
    }


def _print(plan: CompactionPlan, dry_run: bool) -> None:
    console, live_bytes = stdout(), max(1, plan.live_bytes)
    if not plan.is_needed:
        console.print(f"{name_text(plan.newest.store.url)}: nothing to compact")
        return
    if len(plan.run) == 1:
        done = "would be compacted" if dry_run else "was compacted"
    else:
        done = f"{'would merge' if dry_run else 'merged'} {count_text(len(plan.run), 'checkpoint')} into one"
    console.print(f"{name_text(plan.newest.store.url)}: {done}")
    files, moved = f"{len(plan.rewritten):,} of {count_text(len(plan.uses), 'file')}", bytes_text(plan.moved_bytes)
    console.print(f"rewritten: {files} ({moved} copied)")
    before, after = ratio_text(plan.bytes_before / live_bytes), ratio_text(plan.bytes_after / live_bytes)
    console.print(f"restore read amplification: {before}x → {after}x")

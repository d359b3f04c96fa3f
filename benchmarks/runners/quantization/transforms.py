"""Bytes of transform-coded checkpoints, of tables that four models have trained on clicks.

Each model is trained once. The rows that it has modified are then saved many times by each scheme, for real, with
row-wise optimizer state, and 26 % of them are modified before each checkpoint, as in ``bandwidth``. All bytes of files
count.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

import torch
from torch import Tensor

import torchrec_cnr as cnr
from benchmarks.support.data.click_model import ClickModel, Head
from benchmarks.support.data.clicks import BATCH_CLICKS, TABLES, Clicks, batches, read_clicks, trained_on
from benchmarks.support.jobs.policy_runs import DIM, EXACT, RunTable, Step, least_written, modified_rows, saved
from benchmarks.support.jobs.restored_runs import decoded_rows
from benchmarks.support.jobs.table_models import one_rank
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Setup
from torchrec_cnr.quantization import Quantization, TransformCoded

SAVED_TABLES = ("readers", "articles")
PACK_BYTES = 1 << 20  # small, so that a compaction can keep most files of small tables
NUM_CLICKS, NUM_QUICK_CLICKS, NUM_ALL_CLICKS = 1_000_000, 12 * BATCH_CLICKS, 2_988_181  # all of the real ones
NUM_CHECKPOINTS, NUM_QUICK_CHECKPOINTS = 100, 4
FOUR_BITS = "transformed, error of 4 bits"
SCHEMES: Mapping[str, tuple[Quantization, cnr.Scheme]] = {  # of the tables, and of the optimizer state
    "4 bits": (cnr.AdaptiveAsymmetric(4), EXACT),
    "3 bits": (cnr.AdaptiveAsymmetric(3), EXACT),
    "8 bits": (cnr.Asymmetric(8), EXACT),
    "8 bits, entropy-coded": (cnr.Asymmetric(8, entropy_coded=True), EXACT),
    "4 bits, entropy-coded": (cnr.AdaptiveAsymmetric(4, entropy_coded=True), EXACT),
    "transformed, error of 8 bits": (TransformCoded(cnr.Asymmetric(8)), EXACT),
    FOUR_BITS: (TransformCoded(cnr.AdaptiveAsymmetric(4)), EXACT),
    "transformed, error of 3 bits": (TransformCoded(cnr.AdaptiveAsymmetric(3)), EXACT),
    "transformed, error of 4 bits; state in bf16": (
        TransformCoded(cnr.AdaptiveAsymmetric(4)),
        cnr.HalfPrecision(torch.bfloat16),
    ),
}
POLICIES: Mapping[str, cnr.Policy] = {"Consecutive": cnr.Consecutive(), "Compacted": cnr.Compacted()}
SMALLER_RATIO = 1.05  # for these: what keeping less takes in copies
SMALLER = f"Compacted(max_ratio={SMALLER_RATIO})"
MIN_WRITTEN: Mapping[tuple[Head, str], float] = {
    ("dot products", "4 bits"): 70.0,
    ("DCN-v2", "4 bits"): 35.0,
    ("MLP", "4 bits"): 34.0,
    ("matrix factorisation", "4 bits"): 27.0,
    ("dot products", "3 bits"): 100.0,
    ("DCN-v2", "3 bits"): 50.0,
    ("MLP", "3 bits"): 45.0,
    **{(head, "8 bits"): 14.0 for head in get_args(Head)},
}
MIN_KEPT: Mapping[Head, float] = {"dot products": 18.0, "DCN-v2": 8.0}


@dataclass(frozen=True)
class Course:
    """What the checkpoints of one model took by one scheme and policy, in bytes.

    Attributes:
        written: Written in all, with the bytes of compaction.
        kept: The most that was kept after a checkpoint.
        full: As many full checkpoints in fp32.
        full_kept: One of them.
    """

    written: int
    kept: int
    full: int
    full_kept: int


@dataclass
class _Result:
    """The courses of a model by scheme and policy, the mean errors by scheme, and its numbers of rows."""

    courses: dict[tuple[str, str], Course] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    num_rows: dict[str, int] = field(default_factory=dict)


def run(setup: Setup) -> Report:
    """Train each model, and save checkpoints of its tables by each scheme and policy."""
    clicks = read_clicks(NUM_QUICK_CLICKS if setup.quick else NUM_ALL_CLICKS if setup.all_cases else NUM_CLICKS)
    num_checkpoints = NUM_QUICK_CHECKPOINTS if setup.quick else NUM_CHECKPOINTS
    results: dict[Head, _Result] = {}
    for head in get_args(Head):
        setup.say(f"{head}: training on {len(clicks):,} clicks")
        tables = trained_tables(clicks, head)
        with one_rank(setup.folder):
            results[head] = follow(tables, num_checkpoints, partial(_say, setup, head))
    return _report(results, len(clicks), num_checkpoints)


def _say(setup: Setup, head: Head, text: str) -> None:
    setup.say(f"{head}: {text}")


def trained_tables(clicks: Clicks, head: Head) -> list[RunTable]:
    """Train a model, and return the rows of readers and articles that it has modified."""
    model = ClickModel(clicks.num_rows(), DIM, 0, head)
    touched = [torch.zeros(len(table), dtype=torch.bool) for table in model.tables]
    for batch in batches(clicks, 0, len(clicks), 0):
        model.train(batch)
        for mask, lookup in zip(touched, batch.lookups, strict=True):
            mask[lookup.rows] = True
    numbers = [TABLES.index(name) for name in SAVED_TABLES]
    return [
        RunTable(TABLES[number], model.tables[number][touched[number]], model.state[number][touched[number]])
        for number in numbers
    ]


def follow(tables: Sequence[RunTable], num_checkpoints: int, say: Callable[[str], None]) -> _Result:
    """Save checkpoints of tables by each scheme and policy: 26 % of the rows are modified before each."""
    result = _Result(num_rows={table.name: len(table.rows) for table in tables})
    for name, (scheme, state_scheme) in SCHEMES.items():
        errors = torch.cat([_errors(scheme, table.rows) for table in tables])
        result.errors[name] = float(errors.mean())
        smaller = {SMALLER: cnr.Compacted(max_ratio=SMALLER_RATIO)} if name == FOUR_BITS else {}
        policies: Mapping[str, cnr.Policy] = {**POLICIES, **smaller}
        for policy_name, policy in policies.items():
            say(f"{name}, {policy_name}")
            masks = zip(*(modified_rows(len(table.rows), num_checkpoints) for table in tables), strict=True)
            steps = list(saved(tables, policy, scheme, masks, PACK_BYTES, state_scheme))
            result.courses[name, policy_name] = _course(steps, tables)
    return result


def _course(steps: Sequence[Step], tables: Sequence[RunTable]) -> Course:
    full = sum(table.num_bytes for table in tables)
    return Course(sum(step.written for step in steps), max(step.kept for step in steps), len(steps) * full, full)


def _errors(rule: Quantization, rows: Tensor) -> Tensor:
    """Return the l2 norm of each row's error, with the choice of scheme that a save makes."""
    errors: Tensor = (decoded_rows(rows, torch.arange(len(rows)), rule) - rows).double().norm(dim=1)
    return errors


def _report(results: Mapping[Head, _Result], num_clicks: int, num_checkpoints: int) -> Report:
    figures = []
    for (head, bits), least in MIN_WRITTEN.items():
        course = results[head].courses[f"transformed, error of {bits}", "Consecutive"]
        figures.append(
            Figure(f"{head}, error of {bits}: written, less by", course.full / course.written, "×", at_least=least)
        )
    for head, result in results.items():
        course = result.courses["8 bits, entropy-coded", "Consecutive"]
        figures.append(
            Figure(f"{head}, 8 bits, entropy-coded: written, less by", course.full / course.written, "×", at_least=14.0)
        )
    for head, least in MIN_KEPT.items():
        for policy in ("Compacted", SMALLER):
            course = results[head].courses[FOUR_BITS, policy]
            figures.append(
                Figure(f"{head}: kept with {policy}, less by", course.full_kept / course.kept, "×", at_least=least)
            )
    lines = []
    for head, result in results.items():
        for name in SCHEMES:
            consecutive, *compacted = (result.courses[key] for key in result.courses if key[0] == name)
            lines.append(
                (
                    head,
                    name,
                    f"{consecutive.full / consecutive.written:.1f} ×",
                    _both(f"{course.full / course.written:.1f} ×" for course in compacted),
                    _both(f"{course.full_kept / course.kept:.1f} ×" for course in compacted),
                    f"{result.errors[name]:.5f}",
                )
            )
    columns = ("model", "scheme", "Consecutive: written", "Compacted: written", "kept", "mean l2 error")
    return Report(
        title=f"{num_checkpoints} checkpoints of tables of {DIM} columns, {num_clicks:,} {trained_on()}",
        notes=(
            "All as so many times less than full fp32 checkpoints with optimizer state. All bytes of files count.",
            f"In brackets by {SMALLER}, which copies more and keeps less.",
            "Even if it knew how often each row is modified, a compaction would write at least, of a full checkpoint:",
            "; ".join(f"{least_written(share):.2f} with {share:.0%} of dead rows" for share in (0.16, 0.1, 0.05)),
        ),
        figures=tuple(figures),
        tables=(Table(columns, tuple(lines)),),
    )


def _both(texts: Iterable[str]) -> str:
    """Return the first text, with the second one in brackets if there is one."""
    first, *others = texts
    return " ".join((first, *(f"({text})" for text in others)))


BENCHMARK = Benchmark(run, "bytes of transform-coded checkpoints of four models", is_long=True)

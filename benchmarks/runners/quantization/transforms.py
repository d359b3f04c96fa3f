"""Bytes of transform-coded checkpoints, of tables that four models have trained on clicks.

Each model is trained once. The rows that it has modified are then saved many times by each scheme, for real, with
row-wise optimizer state, and 26 % of them are modified before each checkpoint, as in ``bandwidth``. All bytes of files
count.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

import fsspec
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

import torchrec_cnr as cnr
from benchmarks.support.data.click_model import ClickModel, Head
from benchmarks.support.data.clicks import BATCH_CLICKS, TABLES, Clicks, batches, read_clicks, trained_on
from benchmarks.support.jobs.policy_runs import DIM, modified_rows
from benchmarks.support.jobs.table_models import one_rank
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Setup
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.coverage import Mask
from torchrec_cnr.maintenance.background_upkeep import Upkeep
from torchrec_cnr.maintenance.pruning.retention import Keep
from torchrec_cnr.quantization import Quantization, TransformCoded
from torchrec_cnr.tracking.modified_rows import ModifiedRows
from torchrec_cnr.tracking.tracked_tables import TrackedRows, TrackedShard

SAVED_TABLES = ("readers", "articles")
_PACK_BYTES = 1 << 20  # small, so that a compaction can keep most files of small tables
NUM_CLICKS, NUM_QUICK_CLICKS, NUM_ALL_CLICKS = 1_000_000, 12 * BATCH_CLICKS, 2_988_181  # all of the real ones
NUM_CHECKPOINTS, NUM_QUICK_CHECKPOINTS = 100, 4
SCHEMES: Mapping[str, Quantization] = {
    "4 bits": cnr.AdaptiveAsymmetric(4),
    "3 bits": cnr.AdaptiveAsymmetric(3),
    "transformed, error of 4 bits": TransformCoded(cnr.AdaptiveAsymmetric(4)),
    "transformed, error of 3 bits": TransformCoded(cnr.AdaptiveAsymmetric(3)),
}
POLICIES: Mapping[str, cnr.Policy] = {"Consecutive": cnr.Consecutive(), "Compacted": cnr.Compacted()}
MIN_WRITTEN: Mapping[tuple[Head, str], float] = {
    ("dot products", "4 bits"): 70.0,
    ("DCN-v2", "4 bits"): 35.0,
    ("MLP", "4 bits"): 34.0,
    ("matrix factorisation", "4 bits"): 27.0,
    ("dot products", "3 bits"): 100.0,
    ("DCN-v2", "3 bits"): 50.0,
    ("MLP", "3 bits"): 45.0,
}
MIN_KEPT: Mapping[Head, float] = {"dot products": 18.0, "DCN-v2": 8.0}


@dataclass(frozen=True, eq=False)
class TrainedTable:
    """The rows of a table that were modified in training.

    Attributes:
        name: One of ``SAVED_TABLES``.
        rows: float32 [num_rows, DIM].
        state: Their sums of squared gradients, float32 [num_rows].
    """

    name: str
    rows: Tensor
    state: Tensor

    def states(self) -> list[Tensor]:
        """Return the optimizer state, as trackers ask for it."""
        return [self.state]


@dataclass
class Course:
    """What the checkpoints of one model took by one scheme and policy.

    Attributes:
        written: Bytes written, with those of compaction.
        kept: The most bytes that were kept after a checkpoint.
        full: Bytes of as many full checkpoints in fp32.
        full_kept: Bytes of one of them.
    """

    written: int = 0
    kept: int = 0
    full: int = 0
    full_kept: int = 0


class _Run:
    """The checkpoints of tables by one scheme and policy, in a file system in memory."""

    def __init__(self, tables: Sequence[TrainedTable], policy: cnr.Policy, scheme: Quantization) -> None:
        self._root = f"memory://run-{uuid.uuid4().hex}"
        self._rows = [
            ModifiedRows(table.name, Box.whole(tuple(table.rows.shape)), torch.device("cpu")) for table in tables
        ]
        shards = [TrackedShard(rows, table.rows, table.states) for rows, table in zip(self._rows, tables, strict=True)]
        self._state = {f"table.{table.name}": table.rows for table in tables}
        self._state |= {f"state.{table.name}": table.state for table in tables}
        self._planner = cnr.CNRSavePlanner(TrackedRows(shards), policy=policy)
        self._writer = cnr.CNRStorageWriter(self._root, quantization={"table.*": scheme}, pack_bytes=_PACK_BYTES)
        is_compacted = isinstance(policy, cnr.Compacted)
        self._upkeep = Upkeep(self._root, Keep(last=1), is_compacted, pack_bytes=_PACK_BYTES) if is_compacted else None
        self.course = Course(full_kept=sum(value.numel() * value.element_size() for value in self._state.values()))

    def save(self, number: int, masks: Sequence[Mask]) -> None:
        """Save a checkpoint of the rows that these masks say."""
        for rows, mask in zip(self._rows, masks, strict=True):
            rows.mark_where(torch.from_numpy(mask))
        path, course = f"{self._root}/step-{number}", self.course
        before = self._stored()
        save(self._state, checkpoint_id=path, storage_writer=self._writer, planner=self._planner)
        course.written += self._stored() - before
        is_done = self._upkeep is None
        while self._upkeep is not None and not is_done:
            before = self._stored()
            is_done = self._upkeep.compact_some(cnr.read_checkpoint(path))
            course.written += self._stored() - before
            self._upkeep.prune()
        course.kept = max(course.kept, self._stored())
        course.full += course.full_kept

    def close(self) -> None:
        """Remove all files."""
        fsspec.filesystem("memory").rm(self._root, recursive=True)

    def _stored(self) -> int:
        files = MemoryFileSystem.store  # `du` looks through all files for each file
        folder = self._root.removeprefix("memory:/") + "/"
        return sum(file.size for path, file in files.items() if path.startswith(folder))


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


def trained_tables(clicks: Clicks, head: Head) -> list[TrainedTable]:
    """Train a model, and return the rows of readers and articles that it has modified."""
    model = ClickModel(clicks.num_rows(), DIM, 0, head)
    touched = [torch.zeros(len(table), dtype=torch.bool) for table in model.tables]
    for batch in batches(clicks, 0, len(clicks), 0):
        model.train(batch)
        for mask, lookup in zip(touched, batch.lookups, strict=True):
            mask[lookup.rows] = True
    numbers = [TABLES.index(name) for name in SAVED_TABLES]
    return [
        TrainedTable(TABLES[number], model.tables[number][touched[number]], model.state[number][touched[number]])
        for number in numbers
    ]


def follow(tables: Sequence[TrainedTable], num_checkpoints: int, say: Callable[[str], None]) -> _Result:
    """Save checkpoints of tables by each scheme and policy: 26 % of the rows are modified before each."""
    result = _Result(num_rows={table.name: len(table.rows) for table in tables})
    for name, scheme in SCHEMES.items():
        errors = torch.cat([_errors(scheme, table.rows) for table in tables])
        result.errors[name] = float(errors.mean())
        for policy in POLICIES:
            say(f"{name}, {policy}")
            own_run = _Run(tables, POLICIES[policy], scheme)
            masks = zip(*(modified_rows(len(table.rows), num_checkpoints) for table in tables), strict=True)
            for number, own_masks in enumerate(masks):
                own_run.save(number, own_masks)
            result.courses[name, policy] = own_run.course
            own_run.close()
    return result


def _errors(scheme: Quantization, rows: Tensor) -> Tensor:
    """Return the l2 norm of each row's error, with the choice of scheme that a save makes."""
    chosen = scheme.choose(lambda: rows[:: max(1, len(rows) // 2048)], 0)
    encoded = chosen.encode(rows)
    decoded = chosen.decode(encoded.codes, DIM, rows.dtype)
    decoded[encoded.exact] = rows[encoded.exact]
    errors: Tensor = (decoded - rows).double().norm(dim=1)
    return errors


def _report(results: Mapping[Head, _Result], num_clicks: int, num_checkpoints: int) -> Report:
    figures = []
    for (head, bits), least in MIN_WRITTEN.items():
        course = results[head].courses[f"transformed, error of {bits}", "Consecutive"]
        figures.append(
            Figure(f"{head}, error of {bits}: written, less by", course.full / course.written, "×", at_least=least)
        )
    for head, least in MIN_KEPT.items():
        course = results[head].courses["transformed, error of 4 bits", "Compacted"]
        figures.append(
            Figure(f"{head}: kept with Compacted, less by", course.full_kept / course.kept, "×", at_least=least)
        )
    lines = []
    for head, result in results.items():
        for name in SCHEMES:
            consecutive, compacted = (result.courses[name, policy] for policy in POLICIES)
            lines.append(
                (
                    head,
                    name,
                    f"{consecutive.full / consecutive.written:.1f} ×",
                    f"{compacted.full / compacted.written:.1f} ×",
                    f"{compacted.full_kept / compacted.kept:.1f} ×",
                    f"{result.errors[name]:.5f}",
                )
            )
    columns = ("model", "scheme", "Consecutive: written", "Compacted: written", "kept", "mean l2 error")
    return Report(
        title=f"{num_checkpoints} checkpoints of tables of {DIM} columns, {num_clicks:,} {trained_on()}",
        notes=("All as so many times less than full fp32 checkpoints with optimizer state. All bytes of files count.",),
        figures=tuple(figures),
        tables=(Table(columns, tuple(lines)),),
    )


BENCHMARK = Benchmark(run, "bytes of transform-coded checkpoints of four models", is_long=True)

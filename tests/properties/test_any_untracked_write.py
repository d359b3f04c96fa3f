"""Random writes to tables, marked or not: a save complains of exactly the rows that nobody marked."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.faults import InjectedError
from tests.support.models import Job, Whole, differing, plain_job, state, train, whole
from tests.tracking.complaints import Complaint, Save, _complaints

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _changed(before: Tensor, after: Tensor) -> list[int]:
    """Rows that are not the same bit for bit; all are fp32 here."""
    bits = [values.contiguous().view(len(values), -1).view(torch.int32) for values in (before, after)]
    return (bits[0] != bits[1]).any(dim=1).nonzero().squeeze(1).tolist()


# Random programs


@dataclass(frozen=True)
class Train:
    """Look up, backward, step."""

    seed: int


@dataclass(frozen=True)
class Write:
    """Modify rows of a table, or of its optimizer state, by hand."""

    table: str
    is_state: bool
    rows: tuple[int, ...]
    negates: bool
    is_marked: bool


@dataclass(frozen=True)
class Mark:
    """Mark rows that nothing has modified, or all."""

    table: str
    rows: tuple[int, ...] | None


@dataclass(frozen=True)
class Load:
    """Load a checkpoint into the living job, with the tracker or behind its back."""

    num_back: int
    is_tracked: bool


@dataclass(frozen=True)
class Heed:
    """Mark the rows that the next save would complain of."""


Operation = Train | Write | Mark | Save | Load | Heed
NUM_ROWS = {"bag": 40, "item": 12}


@dataclass
class Copies:
    """A job under test, and plain copies of its tables.

    Attributes:
        marked: Rows that the next cut must not complain of.
        frozen: Those of the last cut.
        copied: Table and optimizer state as they were at the last cut that passed; None where nothing is known.
        is_stepped: Whether the tracker has seen an optimizer step, and so knows where its state is.
        in_flight: Whether the last save was committed, until the next one looks.
        committed: By path: all that the job held at the cut.
    """

    root: Path
    job: Job
    tracker: cnr.RowTracker
    planner: cnr.CNRSavePlanner
    marked: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in NUM_ROWS})
    frozen: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in NUM_ROWS})
    copied: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in NUM_ROWS})
    committed: dict[Path, Whole] = field(default_factory=dict)
    is_stepped: bool = False
    in_flight: bool = False
    num_saves: int = 0

    def tensors(self, table: str) -> list[Tensor]:
        """The live weights, and the row-shaped optimizer state; writes to them move no counter of versions."""
        weight = self.job.model.get_parameter(f"{table}.weight")
        states = [
            value for optimizer in self.job.optimizers.values() for value in optimizer.state.get(weight, {}).values()
        ]
        return [weight.data, *(value.data for value in states if isinstance(value, Tensor) and value.dim())]

    def run(self, operation: Operation) -> None:
        """Do one operation."""
        match operation:
            case Train(seed):
                ids = self.job.batch(torch.Generator().manual_seed(1000 * seed))
                for table, rows in zip(NUM_ROWS, ids, strict=True):
                    self.marked[table] |= set(rows.flatten().tolist())
                train(self.job, seed)
                self.is_stepped = True
            case Write():
                self.write(operation)
            case Mark(table, None):
                self.tracker.mark_all(table)
                self.marked[table] = set(range(NUM_ROWS[table]))
            case Mark(table, rows):
                self.mark(table, rows or ())
            case Save(failing):
                self.save(failing)
            case Load() if self.committed:
                self.load(operation)
            case Heed():
                self.planner.resolve_last_save()
                self.settle()
                for (table, _), rows in self.untracked().items():
                    self.mark(table, rows)
            case _:
                pass

    def write(self, operation: Write) -> None:
        """Modify rows."""
        values = self.tensors(operation.table)[-1 if operation.is_state else 0]
        rows = torch.tensor(operation.rows)
        values[rows] = -values[rows] if operation.negates else values[rows] + 1.0
        if operation.is_marked:
            self.mark(operation.table, operation.rows)

    def mark(self, table: str, rows: Sequence[int]) -> None:
        """Mark rows."""
        self.tracker.mark(table, torch.tensor(rows))
        self.marked[table] |= set(rows)

    def save(self, failing: tuple[str, str] | None = None) -> bool:
        """Save, and compare what it complains of with what it must."""
        self.num_saves += 1
        path = self.root / str(self.num_saves)
        writer = models.writer(path)
        cut = whole(state(self.job))
        is_checked = failing != ("set_up_planner", "before")
        if is_checked:
            self.settle()
        expected = [
            Complaint.of(table, part, rows, NUM_ROWS[table]) for (table, part), rows in self.untracked().items()
        ]
        errors: list[BaseException] = []
        with _maybe_failing(self.planner, writer, failing):
            try:
                dcp.save(state(self.job), checkpoint_id=str(path), storage_writer=writer, planner=self.planner)
            except CheckpointException as error:
                errors = list(faults.causes(error).values())
        if is_checked and expected:
            (error,) = errors
            assert _complaints(error) == expected
            assert self.tracker.num_modified == sum(map(len, self.marked.values()))
            return False
        assert [type(error) for error in errors] == ([] if failing is None else [InjectedError])
        if is_checked:
            self.frozen, self.marked = self.marked, {name: set() for name in NUM_ROWS}
            self.copy()
            assert self.tracker.num_modified == 0
        if failing is None or faults.has_committed(*failing):
            self.committed[path] = cut
            self.in_flight = True
        return True

    def settle(self) -> None:
        """The frozen rows are in a checkpoint, or marked again."""
        for table, rows in self.frozen.items():
            self.marked[table] |= set() if self.in_flight else rows
            self.frozen[table] = set()
        self.in_flight = False

    def untracked(self) -> dict[tuple[str, str], list[int]]:
        """Rows that a cut must complain of, by table and part of it."""
        found = {}
        for table, copies in self.copied.items():
            tensors = self.tensors(table)
            for number, (before, after) in enumerate(zip(copies, tensors, strict=False)):
                rows = sorted(set(_changed(before, after)) - self.marked[table])
                part = "optimizer state" + (f" ({number} of {len(tensors) - 1})" if len(tensors) > 2 else "")
                if rows:
                    found[table, part if number else "weights"] = rows
        return found

    def copy(self) -> None:
        """Keep what the tables are now."""
        for table in NUM_ROWS:
            known = self.tensors(table) if self.is_stepped else self.tensors(table)[:1]
            self.copied[table] = [values.clone() for values in known]

    def load(self, operation: Load) -> None:
        """Load, and compare."""
        path = list(self.committed)[-1 - operation.num_back % len(self.committed)]
        got = models.load(self.job, str(path), self.tracker if operation.is_tracked else None)
        assert differing(got, self.committed[path]) == []
        if operation.is_tracked:
            self.marked = {name: set() for name in NUM_ROWS}
            self.frozen = {name: set() for name in NUM_ROWS}
            self.in_flight = False
            self.copy()
        else:
            self.in_flight = False  # the tracker no longer knows of the save
            self.marked = {name: set(range(num_rows)) for name, num_rows in NUM_ROWS.items()}  # the model was loaded
            self.copied = {name: [] for name in NUM_ROWS}


@contextmanager
def _maybe_failing(
    planner: cnr.CNRSavePlanner, writer: cnr.CNRStorageWriter, failing: tuple[str, str] | None
) -> Iterator[None]:
    if failing is None:
        yield
        return
    with faults.failing(planner, writer, *failing, rank=0):
        yield


def _operations() -> st.SearchStrategy[list[Operation]]:
    tables = st.sampled_from(sorted(NUM_ROWS))

    def rows_of(table: str) -> st.SearchStrategy[tuple[int, ...]]:
        return st.lists(st.integers(0, NUM_ROWS[table] - 1), min_size=1, max_size=20, unique=True).map(tuple)

    def writes(is_marked: bool) -> st.SearchStrategy[Operation]:
        return tables.flatmap(
            lambda table: st.builds(
                Write, st.just(table), st.booleans(), rows_of(table), st.booleans(), st.just(is_marked)
            )
        )

    marks = tables.flatmap(lambda table: st.builds(Mark, st.just(table), rows_of(table) | st.none()))
    failing = st.tuples(st.sampled_from(faults.PHASES), st.sampled_from(["before", "after"]))
    saves = st.builds(Save)
    # Each is as likely as its share of this list.
    kinds: list[st.SearchStrategy[Operation]] = [st.builds(Train, st.integers(1, 10**6))] * 4 + [saves] * 6
    kinds += [writes(True), writes(True), writes(False), writes(False), marks, st.just(Heed()), st.just(Heed())]
    kinds += [st.builds(Save, failing)] * 2 + [st.builds(Load, st.integers(0, 3), st.booleans())] * 2
    return st.lists(st.sampled_from(kinds).flatmap(lambda kind: kind), min_size=8, max_size=20)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "sparse_adam"])
@settings(max_examples=15, derandomize=True, phases=[Phase.generate])
@given(program=_operations())
def test_a_save_complains_of_exactly_the_rows_modified_but_not_marked(
    tmp_path_factory: pytest.TempPathFactory, optimizer: str, program: list[Operation]
) -> None:
    """Whatever happens before it; and each checkpoint is the state at its cut, in spite of such rows."""
    job = plain_job(1, optimizer)
    tracker = cnr.RowTracker(job.model, verify_untracked=True)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    copies = Copies(tmp_path_factory.mktemp("copies"), job, tracker, planner)
    for operation in [Save(), *program]:
        copies.run(operation)
    if not copies.save():
        assert not copies.save(), "it must fail until they are marked"
        copies.run(Heed())
        assert copies.save()
    tracker.close()
    path, cut = list(copies.committed.items())[-1]
    assert differing(models.load(plain_job(2, optimizer), str(path)), cut) == []

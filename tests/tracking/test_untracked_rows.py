"""Rows modified but not marked: with ``verify_untracked``, a save that would lack them fails and says which they are.

Random programs write to tables behind the tracker's back; plain copies of the tables, made at each cut that passed, say
which rows a save must complain of. A save that passes must load as its cut, as without such writes.
"""

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.faults import InjectedError
from tests.support.models import Job, Whole, differing, plain_job, state, torchrec_job, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.tracking import untracked_rows
from torchrec_cnr.tracking.modified_rows import ModifiedRows
from torchrec_cnr.tracking.tracked_tables import TrackedShard
from torchrec_cnr.tracking.untracked_rows import ReferenceDigests

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NUM_NAMED = 10
COMPLAINT = re.compile(r"table '([\w.]+)': (\d+) of its (\d+) rows on this rank \(([\d, .]+)\), in their ([\w ()]+)")


@dataclass(frozen=True)
class Complaint:
    """What an error says of one tensor."""

    table: str
    part: str
    num_found: int
    num_rows: int
    rows: str

    @classmethod
    def of(cls, table: str, part: str, rows: Sequence[int], num_rows: int) -> "Complaint":
        """What it must say."""
        named = ", ".join(map(str, rows[:NUM_NAMED])) + (", ..." if len(rows) > NUM_NAMED else "")
        return cls(table, part, len(rows), num_rows, named)


def _complaints(error: BaseException) -> list[Complaint]:
    assert isinstance(error, cnr.UntrackedRowsError)
    found = COMPLAINT.findall(str(error))
    assert found, error
    assert str(error).endswith("call tracker.mark(table, rows) or tracker.mark_all(table), then save again")
    return [Complaint(table, part, int(num), int(of), rows) for table, num, of, rows, part in found]


def _save(job: Job, tracker: cnr.RowTracker, path: Path | str, policy: cnr.Policy | None = None) -> cnr.Checkpoint:
    planner = cnr.CNRSavePlanner(tracker, policy=policy or cnr.Consecutive())
    dcp.save(state(job), checkpoint_id=str(path), storage_writer=models.writer(path), planner=planner)
    return cnr.read_checkpoint(path)


def _failed_save(job: Job, tracker: cnr.RowTracker, path: Path | str) -> dict[int, BaseException]:
    """Save, and tell what failed on which rank."""
    with pytest.raises(CheckpointException) as raised:
        _save(job, tracker, path)
    with pytest.raises(cnr.CheckpointNotFoundError):
        cnr.read_checkpoint(path)
    return faults.causes(raised.value)


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
class Save:
    """Save, perhaps with a phase that fails."""

    failing: tuple[str, str] | None = None


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


# Real fused tables, on ranks


def _write_behind_the_tracker(rank: int, root: str, is_state: bool) -> None:
    job = torchrec_job(1)
    tracker = cnr.RowTracker(job.model, verify_untracked=True)
    cuts = []
    for number in range(2):
        train(job, number)
        cuts.append(whole(state(job)))
        _save(job, tracker, f"{root}/{number}")
    train(job, 2)
    table = "ebc.embedding_bags.t0"
    (shard,) = (shard for shard in tracker.shards if shard.rows.name == table) if rank == 1 else (None,)
    found: list[Any] = [None, None]
    if shard is not None:
        unmarked = (~shard.rows.marked).nonzero().squeeze(1)[:2]
        marked = shard.rows.marked.nonzero().squeeze(1)[:1]
        values = shard.state()[0] if is_state else shard.weight
        values.data[torch.cat((unmarked, marked))] += 1.0
        rows = (unmarked + shard.rows.box.offsets[0]).tolist()
        part = "optimizer state" if is_state else "weights"
        found[1] = rows, Complaint.of(table, part, rows, shard.rows.box.num_rows)
    torch.distributed.broadcast_object_list(found, src=1)
    rows, complaint = found[1]
    assert len(rows) == 2
    num_modified = tracker.num_modified
    for _ in range(2):  # the second save knows of them as the first did
        causes = _failed_save(job, tracker, f"{root}/2")
        assert list(causes) == [1]
        assert _complaints(causes[1]) == [complaint]
    assert tracker.num_modified == (num_modified if rank == 1 else 0)  # rank 0 has cut, and gives back when it looks
    assert cnr.latest(root) == f"{root}/1"
    assert differing(models.load(torchrec_job(2), f"{root}/1"), cuts[1]) == []
    tracker.mark(table, torch.tensor(rows))
    end = whole(state(job))
    changed = "fused" if is_state else "model"
    assert any(fqn.startswith(changed) for fqn in differing(cuts[1], end))
    assert _save(job, tracker, f"{root}/2").kind == "delta"
    tracker.close()
    assert differing(models.load(torchrec_job(3), f"{root}/2"), end) == []


@pytest.mark.parametrize("is_state", [False, True], ids=["weights", "state"])
def test_a_write_on_one_rank_fails_the_save_on_all(tmp_path: Path, rank_pool: RankPools, is_state: bool) -> None:
    """Every rank learns which rows of which table; the last checkpoint stands, the next holds the rows once marked."""
    rank_pool(2).run(_write_behind_the_tracker, str(tmp_path), is_state)


# One shard after the other


def _shard(weight: Tensor, states: list[Tensor], *, is_replaceable: bool = True, name: str = "t") -> TrackedShard:
    """A shard whose first row is row 100 of its table, and whose state is what the list holds."""
    box = Box((100, 0), (len(weight), *weight.shape[1:]))
    return TrackedShard(ModifiedRows(name, box, weight.device), weight, lambda: states, is_replaceable)


def _found(references: ReferenceDigests) -> list[Complaint]:
    """What a check complains of."""
    try:
        references.check()
    except cnr.UntrackedRowsError as error:
        return _complaints(error)
    return []


def _flip(tensor: Tensor, rows: list[int]) -> None:
    """Flip the last bit of rows."""
    tensor.view(-1).view(torch.uint8).view(len(tensor), -1)[rows, 0] ^= 1


@pytest.mark.parametrize("size", [(6,), (6, 1), (6, 3), (6, 8), (6, 2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.bool], ids=str)
def test_rows_of_every_dtype_are_compared(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """One bit of weights, or of state of any shape; rows that are marked may change, those that are not may not."""
    weight, state = torch.zeros(6, 3, dtype=dtype), torch.zeros(size, dtype=dtype)
    shard = _shard(weight, [state])
    references = ReferenceDigests([shard])
    assert _found(references) == []
    shard.rows.mark(torch.tensor([1, 2]))
    _flip(weight, [1, 5])
    _flip(state, [2, 3, 4])
    complaints = [Complaint.of("t", "weights", [105], 6), Complaint.of("t", "optimizer state", [103, 104], 6)]
    assert _found(references) == complaints
    assert _found(references) == complaints
    shard.rows.mark(torch.tensor([3, 4, 5]))
    assert _found(references) == []
    shard.rows.freeze()
    assert _found(references) == []
    _flip(weight, [1])
    assert _found(references) == [Complaint.of("t", "weights", [101], 6)]
    _flip(weight, [1])
    assert _found(references) == []


def test_zeros_of_both_signs_are_different_rows() -> None:
    """A resume is bit for bit what was trained, so that a sign of zero is a change, and a NaN that stays is none."""
    weight = torch.tensor([[0.0], [float("nan")]])
    references = ReferenceDigests([_shard(weight, [])])
    references.take()
    assert _found(references) == []
    weight.neg_()
    assert _found(references) == [Complaint.of("t", "weights", [100, 101], 2)]


def test_a_message_names_the_first_rows_of_every_table() -> None:
    """All tables in one message, so that all can be marked at once."""
    shards = [_shard(torch.zeros(5000, 64), [torch.zeros(5000, 64), torch.zeros(5000)], name=name) for name in "ab"]
    references = ReferenceDigests(shards)
    references.take()
    shards[0].weight.add_(1.0)
    shards[1].weight[7:4600:4500].add_(1.0)
    shards[1].state()[1][4999] = 1.0
    assert _found(references) == [
        Complaint("a", "weights", 5000, 5000, "100, 101, 102, 103, 104, 105, 106, 107, 108, 109, ..."),
        Complaint("b", "weights", 2, 5000, "107, 4607"),
        Complaint("b", "optimizer state (2 of 2)", 1, 5000, "5099"),
    ]


def test_state_that_was_not_there_is_compared_with_nothing() -> None:
    """Optimizers make their state at their first step, and replace it when they load; such state is stored whole."""
    states: list[Tensor] = []
    shard = _shard(torch.zeros(4, 2), states)
    references = ReferenceDigests([shard])
    references.take()
    states.append(torch.ones(4, 2))
    assert _found(references) == []
    states[0][2] += 1.0
    assert _found(references) == [Complaint.of("t", "optimizer state", [102], 4)]
    states[0] = states[0].clone()
    assert _found(references) == []
    states.insert(0, torch.zeros(4))
    states[1][3] += 1.0
    assert _found(references) == [Complaint.of("t", "optimizer state (2 of 2)", [103], 4)]
    states[1][3] -= 1.0
    states[0][1] += 1.0
    assert _found(references) == [], "state that a save did not pass with is new at the next"
    gone = states.pop(0)
    assert _found(references) == []
    states.append(gone)
    gone[0] += 1.0
    assert _found(references) == []


def test_state_of_fused_kernels_is_known_by_its_place() -> None:
    """They hand out other views at every look."""
    values = torch.zeros(2, 4)
    shard = _shard(torch.zeros(4, 2), [], is_replaceable=False)
    shard = TrackedShard(shard.rows, shard.weight, lambda: [values[0], values[1]])
    references = ReferenceDigests([shard])
    references.take()
    values[1, 3] = 1.0
    assert _found(references) == [Complaint.of("t", "optimizer state (2 of 2)", [103], 4)]


def test_tensors_that_were_converted_are_compared_with_nothing() -> None:
    """``model.half()`` gives parameters another dtype in their place; a save stores such tensors whole."""
    weight, state = nn.Parameter(torch.randn(4, 2)), torch.zeros(4, 2)
    references = ReferenceDigests([_shard(weight, [state])])
    references.take()
    weight.data, state.data = weight.data.half(), torch.ones(4, 3)
    assert _found(references) == []
    weight.data[1] += 1.0
    state[2] += 1.0
    complaints = [Complaint.of("t", "weights", [101], 4), Complaint.of("t", "optimizer state", [102], 4)]
    assert _found(references) == complaints


def test_shards_without_rows_pass() -> None:
    """A rank may hold no row of a table."""
    references = ReferenceDigests([_shard(torch.zeros(0, 4), [torch.zeros(0)])])
    assert [_found(references), _found(references)] == [[], []]


def test_overwritten_tables_are_compared_with_nothing() -> None:
    """Between a load that bypasses the tracker and the next save; what is loaded with it is the new reference."""
    weight = torch.zeros(4, 2)
    references = ReferenceDigests([_shard(weight, [])])
    for overwrite, rows in ((references.drop, []), (references.take, [100])):
        references.take()
        weight += 1.0
        overwrite()
        weight[0] += 1.0
        assert _found(references) == ([Complaint.of("t", "weights", rows, 4)] if rows else [])


# The life of a tracker


@pytest.fixture
def start() -> Iterator[Callable[[Job], cnr.RowTracker]]:
    """Tracks jobs with the check, and closes what it tracked."""
    trackers = []

    def track(job: Job) -> cnr.RowTracker:
        trackers.append(cnr.RowTracker(job.model, verify_untracked=True))
        return trackers[-1]

    yield track
    for tracker in trackers:
        tracker.close()


def test_weights_that_are_put_in_the_place_of_others_are_compared(
    tmp_path: Path, start: Callable[[Job], cnr.RowTracker]
) -> None:
    """Rows are compared by what they are, wherever they lie; a table of other values differs in all rows."""
    job = plain_job(1)
    tracker = start(job)
    _save(job, tracker, tmp_path / "0")
    weight = job.model.get_parameter("item.weight")
    weight.data = weight.data.clone()
    _save(job, tracker, tmp_path / "1")
    weight.data = weight.data + 1.0
    (error,) = _failed_save(job, tracker, tmp_path / "2").values()
    assert _complaints(error) == [Complaint.of("item", "weights", range(12), 12)]
    tracker.mark_all("item")
    end = whole(state(job))
    assert _save(job, tracker, tmp_path / "2").kind == "delta"
    assert differing(models.load(plain_job(2), str(tmp_path / "2")), end) == []


def test_optimizer_state_that_is_made_or_loaded_late_does_not_fail_a_save(
    tmp_path: Path, start: Callable[[Job], cnr.RowTracker]
) -> None:
    """It is new, and stored whole; from then on it is compared."""
    job = plain_job(1, "sparse_adam", fresh=True)
    tracker = start(job)
    optimizer = job.optimizers["tables"]
    for number in range(4):
        if number == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for values in optimizer.state[job.model.get_parameter("bag.weight")].values():
                if isinstance(values, Tensor):
                    values += 1.0
        end = whole(state(job))
        _save(job, tracker, tmp_path / str(number))
        if number != 1:
            train(job, number)
    assert cnr.read_checkpoint(tmp_path / "2").kind == "delta"
    optimizer.state[job.model.get_parameter("item.weight")]["exp_avg"].data.neg_()
    rows = (~tracker.shards[1].rows.marked).nonzero().squeeze(1).tolist()
    (error,) = _failed_save(job, tracker, tmp_path / "4").values()
    assert _complaints(error) == [Complaint.of("item", "optimizer state (1 of 2)", rows, 12)]
    assert differing(models.load(plain_job(2, "sparse_adam"), str(tmp_path / "3")), end) == []


def test_who_does_not_ask_for_the_check_pays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row is digested in saves and loads, nor after the tracker was closed."""
    calls = []

    def digest_rows(tensor: Tensor) -> Iterator[tuple[slice, Tensor]]:
        calls.append(tensor)
        return iter(())

    monkeypatch.setattr(untracked_rows, "digest_rows", digest_rows)
    job = plain_job(1)
    tracker = cnr.RowTracker(job.model)
    verifying = cnr.RowTracker(job.model, verify_untracked=True)
    for number in range(2):
        train(job, number)
        _save(job, tracker, tmp_path / str(number))
    models.load(job, str(tmp_path / "0"), tracker)
    assert calls == []
    _save(job, verifying, tmp_path / "2")
    assert len(calls) == 2
    tracker.close()
    verifying.close()
    models.load(job, str(tmp_path / "0"), verifying)
    assert len(calls) == 2

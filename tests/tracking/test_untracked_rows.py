"""Rows that were modified and not marked: how a save finds and names them."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.models import Job, differing, plain_job, state, torchrec_job, train, whole
from tests.support.ranks import RankPools
from tests.tracking.complaints import Complaint, _complaints
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.tracking import untracked_rows
from torchrec_cnr.tracking.modified_rows import ModifiedRows
from torchrec_cnr.tracking.tracked_tables import TrackedShard
from torchrec_cnr.tracking.untracked_rows import ReferenceDigests

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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


def test_weights_that_are_put_in_the_place_of_others_are_saved(
    tmp_path: Path, start: Callable[[Job], cnr.RowTracker]
) -> None:
    """All their rows count as modified, so that there is nothing to complain of."""
    job = plain_job(1)
    tracker = start(job)
    _save(job, tracker, tmp_path / "0")
    weight = job.model.get_parameter("item.weight")
    weight.data = weight.data.clone()
    assert _save(job, tracker, tmp_path / "1").num_rows == 12
    weight.data = weight.data + 1.0
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

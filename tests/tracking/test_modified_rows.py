"""Sets of modified rows: no mark is ever lost, whatever happens to the save that took it."""

import itertools
from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import CheckpointRef, History
from torchrec_cnr.lineage.checkpoint import Head
from torchrec_cnr.policies import Since
from torchrec_cnr.tracking import modified_rows
from torchrec_cnr.tracking.modified_rows import ModifiedRows, RowBits, RowMask
from torchrec_cnr.tracking.tracked_tables import Pending, TrackedRows, TrackedShard, forget_overwritten

CPU = torch.device("cpu")
NUM_ROWS = 12
row_lists = st.lists(st.integers(0, NUM_ROWS - 1), max_size=6)


def _rows(mask: Tensor) -> set[int]:
    return set(mask.nonzero().squeeze(1).tolist())


class ModifiedRowsAgainstSets(RuleBasedStateMachine):
    """The rows of one shard through any life, beside plain sets that are assumed to be perfect."""

    @initialize()
    def begin(self) -> None:
        self.rows = ModifiedRows("table", Box((100, 0), (NUM_ROWS, 4)), CPU)
        self.marked: set[int] = set()
        self.frozen: set[int] | None = None
        self.since_baseline: set[int] = set()
        self.ever: set[int] = set()  # modified and in no committed checkpoint: these must never be lost

    @rule(rows=row_lists, dtype=st.sampled_from([torch.int64, torch.int32]))
    def mark(self, rows: list[int], dtype: torch.dtype) -> None:
        self.rows.mark(torch.tensor(rows, dtype=dtype))
        self.marked |= set(rows)
        self.ever |= set(rows)

    @rule()
    def mark_all(self) -> None:
        self.rows.mark_all()
        self.marked = set(range(NUM_ROWS))
        self.ever |= self.marked

    @precondition(lambda self: self.frozen is None)
    @rule()
    def freeze(self) -> None:
        self.rows.freeze()
        self.frozen, self.marked = self.marked, set()

    @rule(is_baseline=st.booleans())
    def commit(self, is_baseline: bool) -> None:
        self.rows.commit(is_baseline)
        if self.frozen is not None:
            self.since_baseline = set() if is_baseline else self.since_baseline | self.frozen
            self.ever = set(self.marked)
        self.frozen = None

    @rule()
    def rollback(self) -> None:
        self.rows.rollback()
        self.marked |= self.frozen or set()
        self.frozen = None

    @rule()
    def restore(self) -> None:
        self.rows.restore()
        self.marked, self.frozen, self.since_baseline, self.ever = set(), None, set(), set()

    @rule()
    def select(self) -> None:
        if self.frozen is None:
            with pytest.raises(ConfigurationError, match="'table': no save is in progress"):
                self.rows.select(Since.HEAD)
            return
        assert _rows(self.rows.select(Since.HEAD).mask) == self.frozen
        assert _rows(self.rows.select(Since.BASELINE).mask) == self.frozen | self.since_baseline

    @precondition(lambda self: self.frozen is not None)
    @rule(rows=row_lists, since=st.sampled_from([Since.HEAD, Since.BASELINE]))
    def mark_while_a_save_is_in_flight(self, rows: list[int], since: Since) -> None:
        """The save's rows are those of the cut, although others are marked before they are written."""
        selected = self.rows.select(since)
        before = _rows(selected.mask)
        self.mark(rows, torch.int64)
        assert _rows(selected.mask) == before

    @invariant()
    def the_sets_agree(self) -> None:
        assert _rows(self.rows.marked) == self.marked
        assert (None if self.rows.frozen is None else _rows(self.rows.frozen)) == self.frozen
        assert _rows(self.rows.since_baseline) == self.since_baseline

    @invariant()
    def nothing_modified_is_missing(self) -> None:
        assert _rows(self.rows.marked) | (self.frozen or set()) == self.ever


TestModifiedRowsAgainstSets = ModifiedRowsAgainstSets.TestCase
TestModifiedRowsAgainstSets.settings = hypothesis.settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_failed_save_gives_its_rows_back() -> None:
    """Rows of a save that failed belong to the next one, beside those marked meanwhile."""
    rows = ModifiedRows("table", Box.whole((NUM_ROWS, 4)), CPU)
    rows.mark(torch.tensor([1, 2]))
    rows.freeze()
    rows.mark(torch.tensor([2, 3]))
    assert _rows(rows.select(Since.HEAD).mask) == {1, 2}
    rows.rollback()
    rows.freeze()
    assert _rows(rows.select(Since.HEAD).mask) == {1, 2, 3}


def test_one_shot_deltas_hold_all_rows_since_the_baseline() -> None:
    """A delta of the baseline holds rows of committed deltas too; a new baseline begins anew."""
    rows = ModifiedRows("table", Box.whole((NUM_ROWS, 4)), CPU)
    for number in (1, 2):
        rows.mark(torch.tensor([number]))
        rows.freeze()
        rows.commit(is_baseline=False)
    rows.mark(torch.tensor([3]))
    rows.freeze()
    assert _rows(rows.select(Since.BASELINE).mask) == {1, 2, 3}
    assert _rows(rows.select(Since.HEAD).mask) == {3}
    rows.commit(is_baseline=True)
    rows.freeze()
    assert _rows(rows.select(Since.BASELINE).mask) == set()


@pytest.mark.parametrize("rows", [[], [5], [5, 5, 5], [11, 0, 3]])
def test_any_ids_of_a_lookup_can_be_marked(rows: list[int]) -> None:
    """Ids come unsorted and repeated, or not at all."""
    marks = ModifiedRows("table", Box.whole((NUM_ROWS, 4)), CPU)
    marks.mark(torch.tensor(rows, dtype=torch.int64))
    assert _rows(marks.marked) == set(rows)


def test_shard_without_rows_has_nothing_to_lose() -> None:
    """A rank that holds no row of a table goes through a save like any other."""
    rows = ModifiedRows("table", Box((NUM_ROWS, 0), (0, 4)), CPU)
    rows.mark_all()
    rows.freeze()
    assert len(rows.select(Since.BASELINE)) == 0
    assert list(rows.select(Since.BASELINE).blocks(4)) == []
    rows.commit(is_baseline=False)


# Blocks of a mask


@hypothesis.settings(max_examples=300, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    mask=st.lists(st.booleans(), max_size=60), block_rows=st.integers(1, 70), window_rows=st.integers(1, 70)
)
def test_blocks_are_the_members_in_order(
    monkeypatch: pytest.MonkeyPatch, mask: list[bool], block_rows: int, window_rows: int
) -> None:
    """For any size of block and window, the blocks joined are the members; each is full but the last."""
    monkeypatch.setattr(modified_rows, "_WINDOW_ROWS", window_rows)
    rows = RowMask(torch.tensor(mask, dtype=torch.bool))
    blocks = [block.tolist() for block in rows.blocks(block_rows)]
    members = [row for row, is_member in enumerate(mask) if is_member]
    assert list(itertools.chain(*blocks)) == members
    assert [len(block) for block in blocks[:-1]] == [block_rows] * (len(blocks) - 1)
    assert all(0 < len(block) <= block_rows for block in blocks)
    assert len(rows) == len(members)


def test_blocks_of_a_large_mask() -> None:
    """Windows of the real size are joined without a seam."""
    mask = torch.zeros(2 * modified_rows._WINDOW_ROWS + 1000, dtype=torch.bool)
    expected = torch.cat(
        [torch.arange(edge - 300, edge + 300) for edge in range(0, len(mask), modified_rows._WINDOW_ROWS)]
    )
    expected = expected[(expected >= 0) & (expected < len(mask))]
    mask[expected] = True
    blocks = list(RowMask(mask).blocks(1000))
    assert torch.cat(blocks).equal(expected)
    assert {block.dtype for block in blocks} == {torch.int64}


# All shards of a rank


def _tracked(num_shards: int = 2) -> TrackedRows:
    shards = []
    for number in range(num_shards):
        weight = torch.zeros(NUM_ROWS, 4)
        shards.append(TrackedShard(ModifiedRows(f"t{number}", Box.whole((NUM_ROWS, 4)), CPU), weight, lambda: ()))
    return TrackedRows(shards)


def _stand(tracked: TrackedRows) -> tuple[Head | None, Pending | None]:
    """What the marks relate to, and the save in flight."""
    return tracked.head, tracked.pending


REFS = [CheckpointRef(f"/job/step-{number}", "0" * 64) for number in range(2)]
BASELINE, DELTA = Head((REFS[0],), 1, History(100), 0), Head((REFS[0], REFS[1]), 2, History(100, (10,)), 0)


def test_shards_are_cut_and_committed_together() -> None:
    """A save takes the marks of every shard at once, and settles them at once."""
    tracked = _tracked()
    for shard in tracked.shards:
        shard.rows.mark(torch.tensor([1, 2]))
    assert tracked.num_modified == 4
    tracked.freeze()
    assert tracked.pending is not None
    tracked.pending.announce("/job/step-1", "save")
    assert tracked.num_modified == 0
    tracked.commit(DELTA)
    assert _stand(tracked) == (DELTA, None)
    assert [_rows(shard.rows.since_baseline) for shard in tracked.shards] == [{1, 2}, {1, 2}]
    tracked.freeze()
    tracked.commit(BASELINE)
    assert [_rows(shard.rows.since_baseline) for shard in tracked.shards] == [set(), set()]


def test_failed_save_leaves_the_head() -> None:
    """After a rollback the marks relate to the checkpoint before, as if there had been no save."""
    tracked = _tracked()
    tracked.commit(BASELINE)
    tracked.shards[1].rows.mark(torch.tensor([7]))
    tracked.freeze()
    assert tracked.pending is not None
    tracked.pending.announce("/job/step-1", "save")
    tracked.rollback()
    assert _stand(tracked) == (BASELINE, None)
    assert tracked.num_modified == 1


def test_overwritten_tables_have_no_head() -> None:
    """From the moment that tables are about to be loaded until they are, only a baseline is right."""
    tracked = _tracked()
    tracked.commit(BASELINE)
    tracked.forget()
    assert tracked.head is None
    tracked.restore(DELTA)
    assert tracked.head == DELTA


def test_restores_are_counted_from_the_checkpoint_restored() -> None:
    """What a save, its failure or a load that begins cannot change is how many restores the tables went through."""
    tracked = _tracked()
    assert tracked.num_restores == 0
    tracked.restore(replace(DELTA, num_restores=4))
    for settle in (tracked.rollback, lambda: tracked.commit(BASELINE), tracked.freeze, tracked.forget):
        settle()
        assert tracked.num_restores == 5
    tracked.restore_partly(replace(DELTA, num_restores=2))
    assert (tracked.num_restores, tracked.head) == (5, None)
    tracked.restore_partly(replace(DELTA, num_restores=5))
    assert (tracked.num_restores, tracked.head) == (6, None)
    tracked.restore(BASELINE)
    assert tracked.num_restores == 1


def test_loads_that_bypass_the_tracker_are_noticed() -> None:
    """Whoever tracks a tensor that is about to be loaded loses its head; other trackers keep theirs."""
    mine, other = _tracked(), _tracked()
    for tracked in (mine, other):
        tracked.commit(BASELINE)
    forget_overwritten([torch.zeros(3), torch.zeros(0, 4)])
    assert (mine.head, other.head) == (BASELINE, BASELINE)
    forget_overwritten([mine.shards[1].weight[3:5]])
    assert (mine.head, other.head) == (None, BASELINE)


def test_heat_where_nobody_asks_for_it() -> None:
    """It is not kept, and begins anew when somebody does."""
    rows = ModifiedRows("t", Box.whole((4, 2)), CPU)
    for has_heat, expected in ((True, [1, 0, 0, 0]), (False, None), (True, [1, 0, 0, 0]), (True, [2, 0, 0, 0])):
        rows.mark(torch.tensor([0]))
        rows.freeze()
        rows.commit(is_baseline=False, has_heat=has_heat)
        assert (rows.heat.tolist() if rows.heat is not None else None) == expected


@pytest.mark.parametrize("num_rows", [0, 4, 13])
@pytest.mark.parametrize("is_by_heat", [False, True])
def test_numbers_on_a_device_are_found_window_by_window(
    monkeypatch: pytest.MonkeyPatch, is_by_heat: bool, num_rows: int
) -> None:
    """So that few of them are there at once, however many rows a table has."""

    def unpacked(num_rows: int, device: torch.device) -> RowBits:
        return RowBits(num_rows, torch.zeros(num_rows, dtype=torch.bool, device=device))

    monkeypatch.setattr(RowBits, "none_of", unpacked)  # as on a device
    rows = ModifiedRows("table", Box((0, 0), (num_rows, 4)), CPU)
    for step in (2, 3):
        rows.mark(torch.arange(0, num_rows, step))
        rows.freeze()
        rows.commit(is_baseline=step == 2)
    rows.mark_all()
    rows.freeze()
    monkeypatch.setattr(modified_rows, "_WINDOW_ROWS", 5)
    found = rows.select_on_device(Since.HEAD, is_by_heat)
    expected = [part.mask.nonzero().squeeze(1) for part in rows.select_parts(Since.HEAD, is_by_heat)]
    blocks = list(found.blocks(3))
    numbers = torch.cat([torch.empty(0, dtype=torch.int64), *blocks])
    assert [part.tolist() for part in numbers.split(found.part_sizes)] == [part.tolist() for part in expected]
    assert all(0 < len(block) <= 3 and int(block[-1] - block[0]) < 5 for block in blocks)

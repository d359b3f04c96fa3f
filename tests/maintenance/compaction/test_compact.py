"""Compaction: whatever a lineage holds, it loads afterwards as it did before, bit for bit, and takes the room promised.

Lineages are made by hand (``tests.support.lineages``, ``tests.support.hand_made``), so that every sharding, scheme and
size of files can be had in milliseconds. What jobs do with compacted checkpoints is in ``test_compacted_jobs``.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

import torchrec_cnr as cnr
from tests.golden import reader
from tests.support import hand_made
from tests.support.hand_made import Content, Part, mask_of, some_rows, whole
from tests.support.lineages import (
    PACK_BYTES,
    ROWS,
    SCHEMES,
    Run,
    Save,
    World,
    family,
    is_same,
    objects_of,
    own_packs,
    remove_all_but,
)
from torchrec_cnr import latest, load_table, read_checkpoint
from torchrec_cnr.errors import (
    DamagedError,
)
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.row_sets import Blob, RowBlock, RowSet
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_lineage
from torchrec_cnr.maintenance.compaction import copy_rows, live_rows
from torchrec_cnr.maintenance.compaction.compact import compact, run_compaction
from torchrec_cnr.maintenance.compaction.live_rows import pieces_of
from torchrec_cnr.maintenance.compaction.plan import CompactionPlan, plan_compaction
from torchrec_cnr.quantization import Asymmetric, NoQuantization, Scheme
from torchrec_cnr.storage import pack_reader, pack_writer
from torchrec_cnr.storage.leases import is_lease
from torchrec_cnr.storage.pack_reader import PackReader

GOLDEN = Path(__file__).parents[2] / "golden"


# Random lineages


@dataclass(frozen=True)
class Compact:
    """Compact a checkpoint.

    Attributes:
        head: Its number, counted from the newest.
        since: Its ancestor, counted from the oldest of the lineage; None for all of it.
        max_ratio: As it is passed on.
        self_contained: As it is passed on.
        pack_bytes: Of new packs.
    """

    head: int
    since: int | None
    max_ratio: float
    self_contained: bool
    pack_bytes: int


@dataclass(frozen=True)
class Remove:
    """Remove all that one checkpoint, counted from the newest, does not need."""

    head: int


@dataclass(frozen=True)
class Sizes:
    """Sizes made so small that there are many of everything.

    Attributes:
        block_bytes: Of values in a blob.
        window_rows: Looked at at once.
        cache_bytes: Of blobs kept.
        max_waiting: Blocks being filled.
        span_bytes: Of a request.
    """

    block_bytes: int
    window_rows: int
    cache_bytes: int
    max_waiting: int
    span_bytes: int

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make them so."""
        with ExitStack() as stack:
            for module, name, value in (
                (pack_writer, "BLOCK_BYTES", self.block_bytes),
                (pack_reader, "_SPAN_BYTES", self.span_bytes),
                (live_rows, "WINDOW_ROWS", self.window_rows),
                (copy_rows, "BlobCache", partial(copy_rows.BlobCache, max_bytes=self.cache_bytes)),
                (copy_rows, "CACHE_BYTES", self.cache_bytes),
                (copy_rows, "_MAX_WAITING", self.max_waiting),
            ):
                stack.enter_context(mock.patch.object(module, name, value))
            yield


seeds = st.integers(0, 2**32 - 1)
saves = st.builds(Save, st.integers(0, 2), seeds, st.sampled_from([0.05, 0.5, 1.0]), st.integers(0, 3))
compactions = st.builds(
    Compact,
    st.integers(0, 1),
    st.none() | st.integers(0, 3),
    st.sampled_from([1.0, 1.0, 1.2, 3.0]),
    st.booleans(),
    st.sampled_from([1024, 4000, 10**6]),
)
removals = st.builds(Remove, st.integers(0, 1))
programs = st.lists(saves | saves | compactions | removals, min_size=3, max_size=9)
sizes = st.builds(
    Sizes,
    st.sampled_from([100, 1000, 10**4]),
    st.sampled_from([5, 50, 10**6]),
    st.sampled_from([0, 2000, 10**8]),
    st.sampled_from([0, 2, 100]),
    st.sampled_from([100, 10**6]),
)


@contextmanager
def _without_codes() -> Iterator[None]:
    """Whoever encodes or decodes a row meanwhile fails."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("rows were decoded")

    with ExitStack() as stack:
        for kind in {type(scheme) for scheme in SCHEMES}:
            for name in ("encode", "decode", "decode_into"):
                stack.enter_context(mock.patch.object(kind, name, fail))
        yield


def _compact_in_world(world: World, operation: Compact) -> None:
    """Compact, and see what must be true of any compaction."""
    name = world.names[operation.head % len(world.names)]
    path, lineage = world.path(name), read_lineage(world.path(name)).checkpoints
    below = None if operation.since is None else lineage[operation.since % len(lineage)]
    since = None if below is None or below is lineage[-1] else below.store.url
    with _without_codes():
        plan = plan_compaction(
            path, since=since, max_ratio=operation.max_ratio, self_contained=operation.self_contained
        )
        after = run_compaction(plan, pack_bytes=operation.pack_bytes)
    assert after.is_compacted or not plan.is_needed
    assert (after.sha256, after.created_ns) == (lineage[-1].sha256, lineage[-1].created_ns)
    if plan.is_needed:
        assert (after.parent, after.kind) == (since, "baseline" if since is None else "delta")
        if operation.self_contained:
            assert all(pack.directory is None for pack in after.manifest.packs)
        if operation.max_ratio == 1:
            again = plan_compaction(path, since=since, max_ratio=1.0)
            assert sum(use.dead_bytes for use in again.uses) <= _left_behind_bytes(plan)


def _left_behind_bytes(plan: CompactionPlan) -> int:
    """Row numbers that lie in another file than their rows, which are moved: nobody uses them then."""
    pieces = [piece for fqn, entry in plan.flat.tensors.items() for piece in pieces_of(fqn, entry)]
    blobs = {piece.rows.blob for piece in pieces if piece.blob.pack in plan.victims and piece.rows.blob is not None}
    return sum(blob.num_bytes for blob in blobs if blob.pack not in plan.victims)


def _live(root: Path, seed: int, program: Sequence[Save | Compact | Remove], small: Sizes) -> None:
    world = World(root, seed)
    with small.applied():
        for operation in [Save(None, seed, 1.0, 1), Save(0, seed + 1, 0.5, 1), *program]:
            match operation:
                case Save():
                    world.check([world.save(operation)])
                case Compact():
                    _compact_in_world(world, operation)
                    world.check()
                case Remove(head):
                    name = world.names[head % len(world.names)]
                    assert name in world.remove_all_but(name)
                    world.check()
        world.check()


@settings(
    max_examples=12, derandomize=True, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow]
)  # the slow test below shrinks what fails
@given(seed=seeds, program=programs, small=sizes)
def test_every_checkpoint_loads_as_before_a_compaction(
    tmp_path_factory: pytest.TempPathFactory, seed: int, program: list[Save | Compact | Remove], small: Sizes
) -> None:
    """Whatever is compacted, and removed then, each checkpoint has the values that were stored last, bit for bit."""
    _live(tmp_path_factory.mktemp("world"), seed, program, small)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(seed=seeds, program=programs, small=sizes)
def test_many_lineages_load_as_before_a_compaction(
    tmp_path_factory: pytest.TempPathFactory, part: int, seed: int, program: list[Save | Compact | Remove], small: Sizes
) -> None:
    """As above, with many programs that change from run to run."""
    _live(tmp_path_factory.mktemp("world"), seed, program, small)


# What a plan promises


def _pack_bytes(checkpoint: Checkpoint) -> int:
    return sum(pack.num_bytes for pack in checkpoint.manifest.packs)


@pytest.mark.parametrize("scheme", [NoQuantization(), Asymmetric(4)], ids=["exact", "4 bits"])
@pytest.mark.parametrize("max_ratio", [1.0, 1.2, 2.0])
def test_plans_come_true(tmp_path: Path, scheme: Scheme, max_ratio: float) -> None:
    """Sizes are as planned within a hundredth, the ratio is reached, and what was compacted needs it no more."""
    run = Run(tmp_path, scheme)
    needed_bytes, num_victims = _pack_bytes(run.newest), 0
    for _ in range(4):
        run.save(6)
        before = run.load()
        plan = plan_compaction(run.path, max_ratio=max_ratio)
        assert plan.is_needed
        assert plan.live_bytes == pytest.approx(needed_bytes, rel=0.03)
        assert plan.bytes_before == sum(_pack_bytes(checkpoint) for checkpoint in plan.run) >= plan.bytes_after
        num_victims += len(plan.victims)
        files = own_packs(run.newest)
        run.newest = run_compaction(plan, pack_bytes=PACK_BYTES)
        written = [Path(run.path, name).stat().st_size for name in own_packs(run.newest) - files]
        assert sum(written) == pytest.approx(plan.moved_bytes, rel=0.02, abs=20_000)
        assert _pack_bytes(run.newest) == pytest.approx(plan.bytes_after, rel=0.01)
        assert plan.bytes_after <= max_ratio * plan.live_bytes
        for victim in (plan.uses[number] for number in plan.victims):  # none of them could be spared
            assert victim.moved_bytes == 0 or plan.bytes_after + victim.dead_bytes > max_ratio * plan.live_bytes
        again = plan_compaction(run.path, max_ratio=max_ratio * 1.01)
        assert not again.is_needed
        assert (again.bytes_before, again.bytes_after) == (_pack_bytes(run.newest), _pack_bytes(run.newest))
        names = run.newest.store.names()
        assert run_compaction(again).manifest_sha256 == run.newest.manifest_sha256
        assert run.newest.store.names() == names
        assert all(is_same(*pair) for pair in zip(before, run.load(), strict=True))
    assert num_victims > 0


def test_less_room_is_more_to_copy(tmp_path: Path) -> None:
    """The smaller the ratio, the more is copied; with a large one nothing is but manifests."""
    run = Run(tmp_path, Asymmetric(4))
    run.save(8)
    plans = [plan_compaction(run.path, max_ratio=max_ratio) for max_ratio in (1.0, 1.3, 1.8, 10.0)]
    moved = [plan.moved_bytes for plan in plans]
    assert moved == sorted(moved, reverse=True)
    assert len(set(moved)) == 4
    assert [plan.bytes_after for plan in plans] == sorted(plan.bytes_after for plan in plans)
    assert plans[-1].victims == frozenset()
    before = run.load()
    assert "9 checkpoints become one; 0 of" in str(plans[-1])
    files = own_packs(run.newest)
    after = run_compaction(plans[-1])
    assert (after.is_compacted, after.parent, own_packs(after)) == (True, None, files)
    assert all(is_same(*pair) for pair in zip(before, run.load(), strict=True))


def test_a_plan_changes_nothing(tmp_path: Path) -> None:
    """To plan is to read."""
    run = Run(tmp_path, Asymmetric(4))
    run.save(3)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    plan = plan_compaction(run.path, max_ratio=1.0)
    assert plan.is_needed
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files


def test_moved_rows_keep_their_heat_and_age(tmp_path: Path) -> None:
    """New files are of rows of one heat, and as old as the rows in them, however often these have been moved."""
    run = Run(tmp_path, NoQuantization())
    for _ in range(3):
        run.save(6)
        plan = plan_compaction(run.path, max_ratio=1.0)
        known = {(use.pack.heat, use.written_ns) for use in plan.uses}
        run.newest = run_compaction(plan, pack_bytes=PACK_BYTES)
        new = [pack for pack in run.newest.manifest.packs if pack.name.startswith(run.newest.manifest.save_id)]
        assert {(pack.heat, pack.written_ns) for pack in new} <= known
        assert {pack.heat for pack in new} == {0, 1, 2}
        assert len({pack.written_ns for pack in new}) > 1
    assert any((pack.written_ns or 0) < plan.run[0].created_ns for pack in new)
    flat = plan_compaction(run.path).flat
    for entry in flat.tensors.values():
        for shard in entry.shards:
            assert len({flat.packs[blob.pack].heat for blob in shard.blobs}) == 1


@pytest.mark.parametrize("is_planned", [False, True])
def test_progress_is_told(tmp_path: Path, is_planned: bool) -> None:
    """From some bytes to nearly all; meanwhile the checkpoint is leased once, which tells pruning to leave it alone."""
    run = Run(tmp_path, NoQuantization())
    run.save(4)
    told: list[tuple[int, int]] = []
    leases: set[str] = set()

    def listen(done: int, total: int) -> None:
        told.append((done, total))
        leases.update(name for name in run.newest.store.names() if is_lease(name))

    plan = plan_compaction(run.path, max_ratio=1.0)
    if is_planned:
        cnr.execute(plan, progress=listen)
    else:
        compact(run.path, max_ratio=1.0, progress=listen)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert all(done <= total for done, total in told)
    assert told[-1][0] == pytest.approx(told[-1][1], rel=0.03)
    assert told[0][1] == plan.moved_bytes
    assert len(leases) == 1
    assert leases.isdisjoint(run.newest.store.names())


def test_blobs_are_kept_for_the_next_block(tmp_path: Path) -> None:
    """If there is no room for all, some stay: the next block, which wants the same ones, reads only the others."""
    a = hand_made.write(tmp_path / "a", {"t": whole(_values((400, 5), 1), True)}, block_bytes=2000)
    pieces = pieces_of("t", a.manifest.tensors["t"])
    assert [piece.blob.num_bytes for piece in pieces] == [2000] * 4
    wanted: list[str] = []
    reader = PackReader(a.store, a.manifest.packs, 1)

    def read(blobs: Iterable[tuple[str, Blob]]) -> Iterator[tuple[str, Any]]:
        blobs = list(blobs)
        wanted.extend(key for key, _ in blobs)
        yield from PackReader.read(reader, blobs)

    with mock.patch.object(reader, "read", read):
        cache = copy_rows.BlobCache(reader, max_bytes=4000)
        uses = [(pieces[:3], 0, 3), (pieces[:3], 0, 1), (pieces[1:], 0, 2), (pieces[1:], 400, 1)]
        for part, next_row, num_reads in uses:
            wanted.clear()
            assert {piece.key for piece, _ in cache.blobs(part, next_row)} == {piece.key for piece in part}
            assert len(wanted) == num_reads


# What a lineage may hold


def _values(size: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def _three(root: Path, names: Sequence[str], contents: Sequence[dict[str, Content]]) -> list[Checkpoint]:
    """A lineage."""
    found: list[Checkpoint] = []
    for name, content in zip(names, contents, strict=True):
        found.append(hand_made.write(root / name, content, parent=found[-1] if found else None))
    return found


@pytest.mark.parametrize("old", [None, (4, 3), (7, 3)], ids=["not there", "of another size", "of the same size"])
def test_tensors_that_are_new_in_what_is_folded(tmp_path: Path, old: tuple[int, int] | None) -> None:
    """A tensor that came after the new parent, or came back otherwise, is whole without it, and stays so."""
    first, second, size = _values((9, 2), 1), _values((9, 2), 2), (7, 3)
    stale = {} if old is None else {"new": whole(_values(old, 9), is_table=True)}
    new = [whole(_values(size, 3), True), some_rows(_values(size, 4), [1, 2]), some_rows(_values(size, 5), [2, 6])]
    checkpoints = [hand_made.write(tmp_path / "a", {"t": whole(first, True), **stale})]
    for name, content in zip("bcd", new, strict=True):
        contents = {"t": some_rows(second, [3]), "new": content}
        checkpoints.append(hand_made.write(tmp_path / name, contents, parent=checkpoints[-1]))
    before = {name: load_table(tmp_path / name, "new") for name in "bcd"}
    assert not is_same(before["b"], before["c"])
    compact(tmp_path / "c", since=tmp_path / "a", max_ratio=1.0)
    assert read_checkpoint(tmp_path / "c").parent == str(tmp_path / "a")
    assert {name: is_same(load_table(tmp_path / name, "new"), before[name]) for name in "bcd"} == dict.fromkeys(
        "bcd", True
    )
    for name in "bcd":
        assert reader.read(tmp_path / name).tensors["new"][2] == before[name].numpy().tobytes()
    after = compact(tmp_path / "d", max_ratio=1.0)
    assert after.kind == "baseline"
    assert is_same(load_table(tmp_path / "d", "new"), before["d"])
    assert is_same(load_table(tmp_path / "d", "t"), torch.cat((first[:3], second[3:4], first[4:])))


def test_tensors_that_are_gone_stay_gone(tmp_path: Path) -> None:
    """What only an ancestor has is not in what is folded, and its files are needed no more."""
    _three(
        tmp_path,
        "ab",
        [
            {"t": whole(_values((9, 2), 1), True), "gone": whole(_values((50, 50), 2))},
            {"t": some_rows(_values((9, 2), 3), [1])},
        ],
    )
    plan = plan_compaction(tmp_path / "b", max_ratio=1.0)
    assert plan.live_bytes < 2000 < plan.bytes_before
    after = run_compaction(plan)
    assert set(after.manifest.tensors) == {"t"}
    assert _pack_bytes(after) < 2000


def test_state_may_be_stored_otherwise_than_its_table(tmp_path: Path) -> None:
    """Rows of a table live on in blocks of which only some do for its state: both keep the row numbers they need."""
    size, rows = (64, 4), mask_of(range(0, 64, 3), 64)
    box, half = Box.whole(size), Box((0, 0), (32, 4))
    rest = Box((32, 0), (32, 4))

    def content(seed: int, *parts: tuple[Box, Any]) -> Content:
        values = _values(size, seed)
        return Content(size, tuple(Part(place, values[place.slices(box)], own) for place, own in parts))

    few, fewer = mask_of([0, 5, 9], 32), mask_of([], 32)
    kinds = [
        {"t": content(1, (box, None)), "s": content(2, (box, None))},
        {"t": content(3, (box, rows)), "s": content(4, (box, rows))},
        {"t": content(5, (half, few), (rest, fewer)), "s": content(6, (half, None), (rest, fewer))},
    ]
    parent = None
    for name, contents in zip("abc", kinds, strict=True):
        parent = hand_made.write(tmp_path / name, contents, parent=parent, block_bytes=64, pack_bytes=4000)
    before = {fqn: load_table(tmp_path / "c", fqn) for fqn in "ts"}
    after = compact(tmp_path / "c", max_ratio=100.0)
    t, s = (_coded(after, fqn) for fqn in "ts")
    assert t & s
    assert t != s
    assert all(is_same(load_table(tmp_path / "c", fqn), before[fqn]) for fqn in "ts")
    for self_contained in (False, True):
        with mock.patch.object(pack_writer, "BLOCK_BYTES", 64):
            compact(tmp_path / "c", max_ratio=1.0, self_contained=self_contained, pack_bytes=4000)
        assert all(is_same(load_table(tmp_path / "c", fqn), before[fqn]) for fqn in "ts")


def _coded(checkpoint: Checkpoint, fqn: str) -> set[RowBlock]:
    """The coded row numbers of a tensor."""
    blocks = (block for shard in checkpoint.manifest.tensors[fqn].shards for block in shard.rows.blocks)
    return {block for block in blocks if block.blob is not None}


def test_rows_overwritten_in_some_columns_only(tmp_path: Path) -> None:
    """Such rows stay behind what they overwrote and before what overwrote them, wherever they are moved."""
    size = (40, 6)
    box = Box.whole(size)
    left, right, middle = Box((0, 0), (40, 3)), Box((0, 3), (40, 3)), Box((0, 2), (40, 2))
    rng = np.random.default_rng(1)
    expected = _values(size, 0)
    parent = hand_made.write(tmp_path / "0", {"t": whole(expected.clone(), True)})
    layouts = [[box], [left, right], [Box((0, 0), (40, 2)), middle, Box((0, 4), (40, 2))]]
    for number in range(1, 10):
        values = _values(size, number)
        parts = []
        for place in layouts[number % 3]:
            rows = rng.choice(40, 12, replace=False)
            parts.append(Part(place, values[place.slices(box)], mask_of(np.sort(rows), 40)))
            expected[rows, place.offsets[1] : place.offsets[1] + place.num_cols] = parts[-1].values[rows]
        parent = hand_made.write(tmp_path / str(number), {"t": Content(size, tuple(parts), True)}, parent=parent)
        if number in (4, 7):
            parent = compact(tmp_path / str(number), max_ratio=1.0)
    plan = plan_compaction(tmp_path / "9", max_ratio=1.0)
    assert {("t", index) for index in _shards_in(plan, "t")} & plan.partial
    run_compaction(plan)
    assert is_same(load_table(tmp_path / "9", "t"), expected)


def _shards_in(plan: CompactionPlan, fqn: str) -> set[int]:
    """Shards of a tensor that have blobs in victims."""
    shards = enumerate(plan.flat.tensors[fqn].shards)
    return {index for index, shard in shards if any(blob.pack in plan.victims for blob in shard.blobs)}


def test_tensors_without_rows_columns_or_dimensions(tmp_path: Path) -> None:
    """Nothing is stored of some, and one row of others, which may be numbered."""
    one = RowSet((RowBlock("all", 0, 1, 1, None),))
    contents = {"rowless": whole(torch.zeros(0, 4), True), "columnless": whole(torch.zeros(4, 0), True)}
    a = hand_made.write(tmp_path / "a", {**contents, "scalar": whole(torch.tensor(1.0))})
    scalar = Content((), (Part(Box((), ()), torch.tensor(2.0), mask_of([0], 1)),))
    none = Content((4, 0), (Part(Box.whole((4, 0)), torch.zeros(4, 0)),), is_table=True)
    b = hand_made.write(tmp_path / "b", {**contents, "columnless": none, "scalar": scalar}, parent=a)
    assert b.manifest.tensors["scalar"].shards[0].rows != one
    compact(tmp_path / "b", max_ratio=1.0, self_contained=True)
    assert load_table(tmp_path / "b", "scalar") == 2.0
    assert load_table(tmp_path / "b", "rowless").shape == (0, 4)
    assert load_table(tmp_path / "b", "columnless").shape == (4, 0)


def test_a_lineage_of_one(tmp_path: Path) -> None:
    """A baseline has nothing to fold."""
    a = hand_made.write(tmp_path / "a", {"t": whole(_values((9, 2), 1), True)})
    after = compact(tmp_path / "a", max_ratio=1.0, self_contained=True)
    assert after.manifest_sha256 == a.manifest_sha256
    assert "nothing to compact" in str(plan_compaction(tmp_path / "a"))
    assert len(a.store.names()) == 2


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_lineages_of_older_versions(tmp_path: Path, version: str) -> None:
    """Checkpoints that older versions wrote are folded and loaded as before."""
    shutil.copytree(GOLDEN / version, tmp_path / version)
    for name, max_ratio, self_contained in (("step-2", 100.0, False), ("step-3", 1.0, False), ("step-3", 1.0, True)):
        path = tmp_path / version / name
        fqns = list(read_checkpoint(path).manifest.tensors)
        before, objects = [load_table(path, fqn) for fqn in fqns], objects_of(read_checkpoint(path))
        after = compact(path, max_ratio=max_ratio, self_contained=self_contained, pack_bytes=1024)
        assert after.is_compacted
        assert all(is_same(load_table(path, fqn), tensor) for fqn, tensor in zip(fqns, before, strict=True))
        assert objects_of(after) == objects
    assert remove_all_but(str(path)) == ["step-3"]
    assert all(is_same(load_table(path, fqn), tensor) for fqn, tensor in zip(fqns, before, strict=True))


def test_other_readers_of_packs_see_values(tmp_path: Path) -> None:
    """What is stored exactly is found in new files by any safetensors library, with its dtype and shape."""
    values, dense, number = _values((40, 4), 1), _values((3, 5), 2).double(), torch.tensor(7)
    size, parts = (40, 4), []
    for rows in (range(20), range(10, 30)):  # which have rows in common: the later ones count
        values = values + 1
        parts.append(Part(Box.whole(size), values, mask_of(rows, 40)))
    contents = {"t": whole(values, True), "q": whole(values, True, Asymmetric(8))}
    a = hand_made.write(tmp_path / "a", contents)
    contents = {"t": Content(size, tuple(parts), True), "q": some_rows(values, [1], True, Asymmetric(8))}
    contents |= {"dense": whole(dense), "number": whole(number)}
    b = hand_made.write(tmp_path / "b", contents, parent=a, objects={"epoch": 3})
    before, old = {fqn: load_table(tmp_path / "b", fqn) for fqn in contents}, own_packs(b)
    after = compact(tmp_path / "b", self_contained=True, max_ratio=1.0)
    assert all(is_same(load_table(tmp_path / "b", fqn), before[fqn]) for fqn in contents)
    assert objects_of(after) == {"epoch": 3}
    found: dict[torch.dtype, list[Tensor]] = {}
    for name in own_packs(after) - old:
        with safe_open(tmp_path / "b" / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(key)
                found.setdefault(tensor.dtype, []).append(tensor)
    assert is_same(found[torch.float64][0], dense)
    assert is_same(found[torch.int64][0], number[None])
    assert all(tensor.shape[1:] == (4,) for tensor in found[torch.float32])
    assert sum(map(len, found[torch.float32])) == 40


# What is removed then


def test_a_self_contained_checkpoint_needs_nobody(tmp_path: Path) -> None:
    """All other directories may go, and it still loads; until then it may share files."""
    run = Run(tmp_path, Asymmetric(4))
    run.save(5)
    before = run.load()
    compact(run.path)
    assert any(pack.directory is not None for pack in read_checkpoint(run.path).manifest.packs)
    after = compact(run.path, self_contained=True)
    assert all(pack.directory is None for pack in after.manifest.packs)
    for path in tmp_path.glob("*/*"):
        if path.parent != Path(run.path):
            path.unlink()
    assert all(is_same(*pair) for pair in zip(before, run.load(), strict=True))
    assert compact(run.path, self_contained=True).manifest_sha256 == after.manifest_sha256


def test_files_that_a_manifest_does_not_name_may_go(tmp_path: Path) -> None:
    """The head loads without them, deltas on top of it too; what forked off below does not."""
    run = Run(tmp_path, Asymmetric(4))
    run.save(2)
    fork = hand_made.write(
        tmp_path / "fork", family([mask_of([1, 2], ROWS)], 99, Asymmetric(4)), parent=run.newest, pack_bytes=PACK_BYTES
    )
    of_fork = load_table(fork.store.url, "t")
    run.save(3)
    run.newest = compact(run.path, max_ratio=1.0)
    run.save(1)
    before = run.load()
    assert is_same(load_table(fork.store.url, "t"), of_fork)
    kept = {
        os.path.normpath(Path(checkpoint.store.path, pack.directory or ".", pack.name))
        for checkpoint in read_lineage(run.path).checkpoints
        for pack in checkpoint.manifest.packs
    }
    removed = [path for path in tmp_path.glob("*/*.safetensors") if str(path) not in kept]
    assert removed
    for path in removed:
        path.unlink()
    assert all(is_same(*pair) for pair in zip(before, run.load(), strict=True))
    with pytest.raises(DamagedError, match="the pack is missing"):
        load_table(fork.store.url, "t")


# What a checkpoint says of itself


def test_what_a_compacted_checkpoint_says(tmp_path: Path) -> None:
    """It is what it was for those who refer to it, and tells its new kind and size."""
    run = Run(tmp_path, Asymmetric(4))
    run.save(4)
    old = run.newest
    new = compact(run.path, since=tmp_path / "step-1", max_ratio=1.0, pack_bytes=PACK_BYTES)
    assert (old.kind, old.is_compacted, new.kind, new.is_compacted) == ("delta", False, "delta", True)
    assert (new.parent, new.ref, new.created_ns) == (str(tmp_path / "step-1"), old.ref, old.created_ns)
    assert new.manifest_bytes == sum(path.stat().st_size for path in Path(run.path).glob("manifest*.json"))
    own = [pack for pack in new.manifest.packs if pack.directory is None]
    assert new.num_bytes == new.manifest_bytes + sum(Path(run.path, pack.name).stat().st_size for pack in own)
    assert new.manifest.history.delta_bytes == (*old.manifest.history.delta_bytes[:1], new.manifest.blob_bytes)
    newest = compact(run.path, max_ratio=1.0, pack_bytes=PACK_BYTES)
    assert (newest.kind, newest.parent, newest.ref) == ("baseline", None, old.ref)
    assert newest.manifest_bytes == sum(path.stat().st_size for path in Path(run.path).glob("manifest*.json"))
    assert newest.manifest.history.baseline_bytes == newest.manifest.blob_bytes
    assert newest.num_rows >= ROWS
    assert latest(tmp_path) == run.path
    assert not any(name.endswith(".lease") for name in newest.store.names())


def test_the_latest_is_the_newest_save_not_the_newest_compaction(tmp_path: Path) -> None:
    """An older checkpoint that is compacted later does not become the latest."""
    run = Run(tmp_path, Asymmetric(4))
    run.save(2)
    older = run.path
    run.save(1)
    after = compact(older)
    assert after.manifest.created_ns > run.newest.created_ns
    assert latest(tmp_path) == run.path
    assert [checkpoint.store.url for checkpoint in read_lineage(run.path).checkpoints] == [older, run.path]

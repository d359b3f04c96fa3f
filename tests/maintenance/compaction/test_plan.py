"""What a plan of a compaction promises comes true."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import torchrec_cnr as cnr
from tests.support import hand_made
from tests.support.hand_made import whole
from tests.support.lineages import PACK_BYTES, HotLineage, is_same, own_packs
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.maintenance.compaction import copy_rows
from torchrec_cnr.maintenance.compaction.compact import compact, run_compaction
from torchrec_cnr.maintenance.compaction.live_rows import pieces_of
from torchrec_cnr.maintenance.compaction.plan import plan_compaction
from torchrec_cnr.quantization import Asymmetric, NoQuantization, Scheme
from torchrec_cnr.storage.leases import is_lease
from torchrec_cnr.storage.pack_reader import PackReader


def _pack_bytes(checkpoint: Checkpoint) -> int:
    return sum(pack.num_bytes for pack in checkpoint.manifest.packs)


@pytest.mark.long
@pytest.mark.parametrize("scheme", [NoQuantization(), Asymmetric(4)], ids=["exact", "4 bits"])
@pytest.mark.parametrize("max_ratio", [1.0, 1.2, 2.0])
def test_plans_come_true(tmp_path: Path, scheme: Scheme, max_ratio: float) -> None:
    """Sizes are as planned within a hundredth, the ratio is reached, and what was compacted needs it no more."""
    run = HotLineage(tmp_path, scheme)
    needed_bytes, num_rewritten = _pack_bytes(run.newest), 0
    for _ in range(4):
        run.save(6)
        before = run.load()
        plan = plan_compaction(run.path, max_ratio=max_ratio)
        assert plan.is_needed
        assert plan.live_bytes == pytest.approx(needed_bytes, rel=0.03)
        assert plan.bytes_before == sum(_pack_bytes(checkpoint) for checkpoint in plan.run) >= plan.bytes_after
        num_rewritten += len(plan.rewritten)
        files = own_packs(run.newest)
        run.newest = run_compaction(plan, pack_bytes=PACK_BYTES)
        written = [Path(run.path, name).stat().st_size for name in own_packs(run.newest) - files]
        assert sum(written) == pytest.approx(plan.moved_bytes, rel=0.02, abs=20_000)
        assert _pack_bytes(run.newest) == pytest.approx(plan.bytes_after, rel=0.01)
        assert plan.bytes_after <= max_ratio * plan.live_bytes
        for use in (plan.uses[number] for number in plan.rewritten):  # none of them could be spared
            assert use.moved_bytes == 0 or plan.bytes_after + use.dead_bytes > max_ratio * plan.live_bytes
        again = plan_compaction(run.path, max_ratio=max_ratio * 1.01)
        assert not again.is_needed
        assert (again.bytes_before, again.bytes_after) == (_pack_bytes(run.newest), _pack_bytes(run.newest))
        names = run.newest.store.names()
        assert run_compaction(again).manifest_sha256 == run.newest.manifest_sha256
        assert run.newest.store.names() == names
        assert all(is_same(*pair) for pair in zip(before, run.load(), strict=True))
    assert num_rewritten > 0


@pytest.mark.long
def test_less_room_is_more_to_copy(tmp_path: Path) -> None:
    """The smaller the ratio, the more is copied; with a large one nothing is but manifests."""
    run = HotLineage(tmp_path, Asymmetric(4))
    run.save(8)
    plans = [plan_compaction(run.path, max_ratio=max_ratio) for max_ratio in (1.0, 1.3, 1.8, 10.0)]
    moved = [plan.moved_bytes for plan in plans]
    assert moved == sorted(moved, reverse=True)
    assert len(set(moved)) == 4
    assert [plan.bytes_after for plan in plans] == sorted(plan.bytes_after for plan in plans)
    assert plans[-1].rewritten == frozenset()
    before = run.load()
    assert "merges 9 checkpoints into one; rewrites 0 of" in str(plans[-1])
    files = own_packs(run.newest)
    after = run_compaction(plans[-1])
    assert (after.is_compacted, after.parent, own_packs(after)) == (True, None, files)
    assert all(is_same(*pair) for pair in zip(before, run.load(), strict=True))


def test_a_plan_changes_nothing(tmp_path: Path) -> None:
    """To plan is to read."""
    run = HotLineage(tmp_path, Asymmetric(4))
    run.save(3)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    plan = plan_compaction(run.path, max_ratio=1.0)
    assert plan.is_needed
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files


@pytest.mark.long
def test_moved_rows_keep_their_heat_and_age(tmp_path: Path) -> None:
    """New files are of rows of one heat, and as old as the rows in them, however often these have been moved."""
    run = HotLineage(tmp_path, NoQuantization())
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
    merged = plan_compaction(run.path).merged
    for entry in merged.tensors.values():
        for shard in entry.shards:
            assert len({merged.packs[blob.pack].heat for blob in shard.blobs}) == 1


@pytest.mark.parametrize("is_planned", [False, True])
def test_progress_is_told(tmp_path: Path, is_planned: bool) -> None:
    """From some bytes to nearly all; meanwhile the checkpoint is leased once, which tells pruning to leave it alone."""
    run = HotLineage(tmp_path, NoQuantization())
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

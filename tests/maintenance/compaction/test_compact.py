"""What a lineage that is compacted may hold."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.golden import copy_of, reader
from tests.support import hand_made
from tests.support.hand_made import Content, Part, mask_of, some_rows, whole
from tests.support.lineages import (
    is_same,
    objects_of,
    own_packs,
    remove_all_but,
)
from torchrec_cnr import load_table, read_checkpoint
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.row_sets import RowBlock, RowSet
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.maintenance.compaction.compact import compact, run_compaction
from torchrec_cnr.maintenance.compaction.plan import CompactionPlan, plan_compaction
from torchrec_cnr.quantization import Asymmetric
from torchrec_cnr.storage import pack_writer

GOLDEN = Path(__file__).parents[2] / "golden" / "v1" / "run"


def _pack_bytes(checkpoint: Checkpoint) -> int:
    return sum(pack.num_bytes for pack in checkpoint.manifest.packs)


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
    assert after.parent is None
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
    """Shards of a tensor that have blobs in rewritten files."""
    shards = enumerate(plan.merged.tensors[fqn].shards)
    return {index for index, shard in shards if any(blob.pack in plan.rewritten for blob in shard.blobs)}


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


def test_golden_lineage(tmp_path: Path) -> None:
    """Checkpoints that were once written are folded and loaded as before."""
    for step in ("step-1", "step-2", "step-3"):
        copy_of(GOLDEN / step, tmp_path / step)
    for name, max_ratio, self_contained in (("step-2", 100.0, False), ("step-3", 1.0, False), ("step-3", 1.0, True)):
        path = tmp_path / name
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

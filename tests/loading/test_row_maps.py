"""Row maps: each row of a table, and its optimizer state, is loaded from the saved row that a tensor names."""

from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import Adagrad, Optimizer
from torchrec.optim import RowWiseAdagrad

import torchrec_cnr as cnr
from tests.loading.loads import load_by, refusal
from tests.support import models
from tests.support.jobs import save
from tests.support.models import SHARDINGS, Whole, state, torchrec_job, train, whole
from tests.support.ranks import RankPools

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

OLD_ROWS, NEW_ROWS = (37, 24, 5), (50, 20, 5)


def _row_map(num_rows: int, num_saved: int, seed: int) -> Tensor:
    """Random saved rows, some of them several times, and -1."""
    return torch.randint(-1, num_saved, (num_rows,), generator=torch.Generator().manual_seed(seed))


def _maps() -> dict[str, Tensor]:
    """Row maps of the pooled tables by patterns, which cover their optimizer state."""
    maps = {f"t{n}": _row_map(new, old, n) for n, (new, old) in enumerate(zip(NEW_ROWS, OLD_ROWS, strict=True))}
    return {f"*.ebc.embedding_bags.{name}.weight*": rows for name, rows in maps.items()}


def _mapped(
    rank: int, root: str, shardings: tuple[str, str], fused: type[Optimizer], bits: int | None
) -> tuple[Whole, Whole, Whole, cnr.LoadReport]:
    """Save a baseline and deltas of one job, and load them into another: whole states, and the report."""
    job = torchrec_job(1, shardings[0], fused=fused)
    tracker = cnr.RowTracker(job.model)
    scheme = cnr.NoQuantization() if bits is None else cnr.AdaptiveAsymmetric(bits)
    for number in range(3):
        train(job, number)
        planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
        save(state(job), f"{root}/{number}", planner, quantization=scheme)
    tracker.close()
    same = torchrec_job(3, shardings[1], fused=fused)
    load_by(state(same), f"{root}/2")
    target = torchrec_job(2, shardings[1], fused=fused, bag_rows=NEW_ROWS)
    train(target, 7)
    before = whole(state(target))
    report = load_by(state(target), f"{root}/2", resize=_maps())
    return whole(state(same)), before, whole(state(target)), report


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("fused", [RowWiseAdagrad, Adagrad])
@pytest.mark.parametrize("shardings", [*((one, one) for one in SHARDINGS), ("column", "row"), ("row", "column")])
def test_rows_come_from_where_the_map_says(
    tmp_path: Path, rank_pool: RankPools, shardings: tuple[str, str], fused: type[Optimizer], bits: int | None
) -> None:
    """Under any sharding, exactly as a load without a map reads these rows; rows without a saved one stay."""
    saved, before, found, report = rank_pool(2).run(_mapped, str(tmp_path), shardings, fused, bits)[0]
    num_mapped = 0
    for pattern, rows in _maps().items():
        name = pattern.split(".")[3]
        is_there = rows >= 0
        for fqn in found:
            if f".ebc.embedding_bags.{name}.weight" not in fqn or fqn.endswith((".iter", ".step")):
                continue
            num_parts = len(found[fqn]) // len(rows)
            parts = zip(*(side[fqn].chunk(num_parts) for side in (saved, before, found)), strict=True)
            for old, own, values in parts:
                assert torch.equal(values[is_there], old[rows[is_there]])
                assert torch.equal(values[~is_there], own[~is_there])
                assert not torch.equal(own[is_there], values[is_there])
            assert report.mapped_rows[fqn] == int(is_there.sum())
            num_mapped += 1
    assert num_mapped == len(report.mapped_rows) >= 6
    others = [fqn for fqn in found if fqn not in report.mapped_rows]
    assert [fqn for fqn in models.differing(found, saved) if fqn in others] == []


@hypothesis.given(
    num_saved=st.integers(1, 60),
    rows=st.lists(st.integers(-1, 59), max_size=80),
    special=st.sets(st.integers(0, 59)),
    num_cols=st.integers(1, 9),
    steps=st.lists(st.sets(st.integers(0, 59)), max_size=3),
)
def test_any_map_is_that_of_a_list(
    tmp_path_factory: pytest.TempPathFactory,
    num_saved: int,
    rows: list[int],
    special: set[int],
    num_cols: int,
    steps: list[set[int]],
) -> None:
    """Also for rows that codes cannot represent, and rows of several deltas."""
    root = tmp_path_factory.mktemp("root")
    table = torch.nn.Embedding(num_saved, num_cols)
    with torch.no_grad():
        table.weight[[row for row in special if row < num_saved]] = float("inf")
    tracker = cnr.RowTracker(table)
    for number, modified in enumerate([set[int](), *steps]):
        modified_rows = [row for row in modified if row < num_saved]
        if modified_rows:
            table(torch.tensor(modified_rows))
            with torch.no_grad():
                table.weight[modified_rows] += 1.0
        writer = models.writer(root / str(number), quantization=cnr.AdaptiveAsymmetric(4))
        planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
        dcp.save({"t": table.state_dict()}, storage_writer=writer, planner=planner)
    tracker.close()
    saved = cnr.load_table(root / str(len(steps)), "t.weight")
    row_map = torch.tensor([row if row < num_saved else -1 for row in rows], dtype=torch.int64)
    target = torch.full((len(rows), num_cols), -7.0)
    load_by({"t": {"weight": target}}, str(root / str(len(steps))), resize={"t.*": row_map})
    for row, values in zip(row_map.tolist(), target, strict=True):
        expected = saved[row] if row >= 0 else torch.full((num_cols,), -7.0)
        assert torch.equal(values, expected)


@pytest.mark.parametrize(
    ("resize", "words"),
    [
        (
            {"a": torch.tensor([0, 4])},
            "a row map that does not fit: 'a' (saved [4, 2], wanted [6, 2], 2 entries, the largest 4)",
        ),
        ({"a": torch.tensor([0, 1, 2, 3, 3, 4])}, "'a' (saved [4, 2], wanted [6, 2], 6 entries, the largest 4)\n"),
        ({"a": torch.zeros(6, dtype=torch.int64), "b": torch.zeros(6, dtype=torch.int32)}, "'b' (saved [4, 3], wanted"),
        ({"a": torch.zeros(6, dtype=torch.int64), "*": None}, "'a' has different row maps by '*' and by 'a'"),
        ({"z": torch.zeros(6, dtype=torch.int64)}, "resize 'z': nothing that is loaded has such a name"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(tmp_path: Path, resize: dict[str, Any], words: str) -> None:
    """And nothing is overwritten."""
    saved = {"a": torch.ones(4, 2), "b": torch.ones(4, 3)}
    dcp.save(saved, storage_writer=models.writer(tmp_path / "0"))
    target = {"a": torch.zeros(6, 2), "b": torch.zeros(6, 2)}
    assert words in refusal(target, str(tmp_path / "0"), resize=resize)
    assert not any(value.any() for value in target.values())


@pytest.mark.parametrize(
    ("resize", "words"),
    [
        ({"a": torch.zeros(3)}, "'resize': the saved rows of 'a' must be a tensor int64 [rows], not torch.float32 [3]"),
        ({"a": torch.zeros(3, 1, dtype=torch.int64)}, "must be a tensor int64 [rows], not torch.int64 [3, 1]"),
        ({"a": torch.tensor([0, -2])}, "must be at least 0, or -1 for none, not -2"),
        ({"a": [0, 1]}, "'resize' must be a list of patterns of FQNs, or a mapping of such patterns"),
        ({1: None}, "'resize' must be a list of patterns of FQNs, or a mapping of such patterns"),
    ],
)
def test_wrong_maps_are_refused(resize: Any, words: str) -> None:
    """Before anything is read."""
    with pytest.raises(cnr.ConfigurationError) as caught:
        cnr.CNRLoadPlanner(resize=resize)
    assert words in str(caught.value)


def test_state_has_the_map_of_its_table(tmp_path: Path) -> None:
    """State of the same size would silently be that of other rows."""
    key = "ebc.embedding_bags.t.weight"
    tensors = {"model": {key: torch.ones(4, 2)}, "fused": {"state": {key: {"t.exp_avg": torch.ones(4, 2)}}}}
    dcp.save(tensors, storage_writer=models.writer(tmp_path / "0"))
    target = {"model": {key: torch.zeros(4, 2)}, "fused": {"state": {key: {"t.exp_avg": torch.zeros(4, 2)}}}}
    rows = torch.tensor([3, 2, 1, 0])
    message = refusal(target, str(tmp_path / "0"), resize={"model.*": rows})
    assert f"'fused.state.{key}.t.exp_avg' and its table 'model.{key}': give both the same row map" in message
    message = refusal(target, str(tmp_path / "0"), resize={"fused.*": rows})
    assert "give both the same row map" in message
    load_by(target, str(tmp_path / "0"), resize={"*": rows})


def _load_by_different_maps(rank: int, root: str) -> str:
    job = torchrec_job(1)
    save(state(job), f"{root}/0")
    rows = torch.arange(37).roll(rank)
    return refusal(state(job), f"{root}/0", resize={"*.ebc.embedding_bags.t0.weight*": rows})


def test_maps_that_differ_between_ranks_are_refused(tmp_path: Path, rank_pool: RankPools) -> None:
    """On all ranks."""
    messages = rank_pool(2).run(_load_by_different_maps, str(tmp_path))
    assert messages == ["'rename', 'resize' and 'only' must be the same on all ranks"] * 2


def test_a_permuted_table_keeps_its_size(tmp_path: Path) -> None:
    """Only the map is reported, and the model's next save is a baseline."""
    table, other = torch.nn.Embedding(9, 3), torch.nn.Embedding(9, 3)
    dcp.save({"t": table.state_dict()}, storage_writer=models.writer(tmp_path / "0"))
    tracker, rows = cnr.RowTracker(other), torch.arange(8, -1, -1)
    report = load_by({"t": other.state_dict()}, str(tmp_path / "0"), tracker=tracker, resize={"t.weight": rows})
    assert torch.equal(other.weight, table.weight.flip(0))
    assert (report.mapped_rows, report.reshaped) == ({"t.weight": 9}, {})
    assert repr(report).startswith("LoadReport(1 loaded, 1 mapped rows, ")
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    dcp.save({"t": other.state_dict()}, storage_writer=models.writer(tmp_path / "1"), planner=planner)
    assert cnr.read_checkpoint(tmp_path / "1").kind == "baseline"
    tracker.close()

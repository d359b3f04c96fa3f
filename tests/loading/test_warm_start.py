"""Warm starts: another model takes from a checkpoint what its rules say, and nothing is guessed or overwritten."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import torchrec_cnr as cnr
from tests.loading.loads import load_by, refusal
from tests.support import models
from tests.support.jobs import save
from tests.support.models import SHARDINGS, Whole, plain_job, state, torchrec_job, train, whole
from tests.support.ranks import RankPools

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

RENAME = {"*.goods.weight": "*.t0.weight", "*.goods.weight.goods.*": "*.t0.weight.t0.*"}
RESIZE = ["model.ebc.*", "fused.state.ebc.*"]


def _start(rank: int, root: str, sharding: str, bag_rows: tuple[int, ...]) -> tuple[Whole, Whole, Whole, Any]:
    """Save a job, and load it into one with another item table and other rows: whole states, and the report."""
    job = torchrec_job(1, "table")
    tracker = cnr.RowTracker(job.model)
    train(job, 1)
    save(state(job), f"{root}/0", cnr.CNRSavePlanner(tracker))
    tracker.close()
    target = torchrec_job(2, sharding, bag_rows=bag_rows, item_table="goods")
    train(target, 2)
    before = whole(state(target))
    report = load_by(state(target), f"{root}/0", rename=RENAME, resize=RESIZE)
    return whole(state(job)), before, whole(state(target)), report


@pytest.mark.parametrize("bag_rows", [(50, 20, 5), (3, 24, 90)])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_tables_of_other_names_and_sizes(
    tmp_path: Path, rank_pool: RankPools, sharding: str, bag_rows: tuple[int, ...]
) -> None:
    """Rows that both sides have are loaded, with their optimizer state; others keep what they have."""
    (saved, before, found, report), (_, _, _, other_report) = rank_pool(2).run(
        _start, str(tmp_path), sharding, bag_rows
    )
    assert report == other_report
    renamed = {fqn: fqn.replace("goods", "t0") for fqn in found if "goods" in fqn}
    assert len(renamed) == 2
    assert report.renamed == renamed
    assert report.missing == report.unexpected == report.skipped == ()
    num_resized = 0
    for fqn, values in found.items():
        source = saved[renamed.get(fqn, fqn)]
        if not isinstance(values, Tensor) or not values.dim():
            assert values == source
            continue
        num_parts = values.shape[0] // (before[_table(fqn)].shape[0] if "fused" in fqn else values.shape[0])
        for part, old in zip(values.chunk(num_parts), before[fqn].chunk(num_parts), strict=True):
            num_rows = min(len(part), len(source))
            assert torch.equal(part[:num_rows], source[:num_rows])
            assert torch.equal(part[num_rows:], old[num_rows:])
            num_resized += len(part) != len(source)
    assert num_resized >= 4


def _table(fqn: str) -> str:
    """The FQN of a table, by that of its optimizer state."""
    return "model." + fqn.removeprefix("fused.state.").rpartition(".weight.")[0] + ".weight"


def test_only_what_is_asked_for_is_loaded(tmp_path: Path) -> None:
    """The rest stays, and is in the report; the checkpoint may have more. The next save is a baseline."""
    job, target = plain_job(1), plain_job(2)
    save(state(job, seen=3), f"{tmp_path}/0")
    before, tracker = whole(state(target)), cnr.RowTracker(target.model)
    wanted = {**state(target), "new": torch.ones(2)}
    report = load_by(wanted, f"{tmp_path}/0", tracker=tracker, only=["model.bag.*", "*optimizer.param_groups*"])
    found, saved = whole(state(target)), whole(state(job))
    assert models.differing(found, saved) != []
    assert [fqn for fqn in models.differing(found, saved) if fqn in report.loaded] == []
    assert [fqn for fqn in models.differing(found, before) if fqn in report.skipped] == []
    assert "model.bag.weight" in report.loaded
    assert {"new", "model.item.weight", "model.over.bias"} <= set(report.skipped)
    assert "reader.seen" in report.unexpected
    save(state(target), f"{tmp_path}/1", cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive()))
    assert cnr.read_checkpoint(tmp_path / "1").kind == "baseline"
    tracker.close()


names = st.sampled_from(["a", "b", "c.d", "e"])
sizes = st.tuples(st.integers(0, 5), st.integers(1, 2))


def _filled(sizes: Mapping[str, tuple[int, int]], first: float) -> dict[str, Tensor]:
    return {name: torch.full(size, first + number) for number, (name, size) in enumerate(sizes.items())}


@given(st.dictionaries(names, sizes, min_size=1), st.dictionaries(names, st.integers(0, 7)), st.booleans())
def test_any_sizes_and_names(
    tmp_path_factory: pytest.TempPathFactory, saved_sizes: dict[str, Any], num_rows: dict[str, int], has_more: bool
) -> None:
    """As a dictionary has it: by another name, the rows that both have."""
    root = tmp_path_factory.mktemp("root")
    saved = _filled(saved_sizes, 1.0)
    dcp.save(saved, storage_writer=models.writer(root / "0"))
    kept = [name for name in saved if name in num_rows] or list(saved)[:1]
    target = {f"x.{name}.y": torch.full((num_rows.get(name, 3), saved[name].shape[1]), -1.0) for name in kept}
    more = {"more": torch.ones(1)} if has_more else {}
    report = load_by({**target, **more}, str(root / "0"), rename={"x.*.y": "*"}, resize=["x.*"], only=["x.*"])
    for name in kept:
        found, num_both = target[f"x.{name}.y"], min(len(saved[name]), len(target[f"x.{name}.y"]))
        assert torch.equal(found[:num_both], saved[name][:num_both])
        assert bool((found[num_both:] == -1.0).all())
    assert report.renamed == {f"x.{name}.y": name for name in kept}
    assert report.unexpected == tuple(sorted(saved.keys() - kept))
    assert report.skipped == tuple(more)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rename": {"z*": "*"}}, ["rename 'z*': nothing that is loaded has such a name"]),
        (
            {"rename": {"a": "nowhere", "b": "no.where"}},
            ["2 renamed, but not in the checkpoint: 'no.where', 'nowhere'"],
        ),
        ({"rename": {"a*": "a*", "*a": "*a"}}, ["'a' is renamed by '*a' and by 'a*'"]),
        ({"rename": {"a": "b"}}, ["'a' and 'b' would both be loaded from 'b'"]),
        ({"resize": ["c"], "only": ["a"]}, ["resize 'c': nothing that is loaded has such a name"]),
        ({"only": ["nothing.*"], "rename": {"a": "z"}}, ["only 'nothing.*': nothing", "rename 'a': nothing"]),
        ({"only": ["a", "c"]}, ["1 not in the checkpoint: 'c'"]),
        (
            {"resize": ["b"]},
            ["2 of another size: 'a' (saved [4, 2], wanted [4, 3]), 'd' (saved [4], wanted [3])", "resize=[...]"],
        ),
        ({"resize": ["a", "b"]}, ["of another size: 'a' (saved [4, 2], wanted [4, 3])"]),
    ],
)
def test_what_would_be_guessed_is_refused(tmp_path: Path, options: dict[str, Any], words: Sequence[str]) -> None:
    """All of it at once, and nothing is overwritten."""
    saved = {"a": torch.ones(4, 2), "b": torch.ones(4), "d": torch.ones(4)}
    dcp.save(saved, storage_writer=models.writer(tmp_path / "0"))
    target = {"a": torch.zeros(4, 3), "b": torch.zeros(6), "c": torch.zeros(1), "d": torch.zeros(3)}
    message = refusal(target, str(tmp_path / "0"), **options)
    assert [word for word in words if word not in message] == []
    assert not any(value.any() for value in target.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rename": {1: "a"}}, "'rename' must be a mapping of patterns to saved FQNs"),
        ({"only": [None]}, "'only' must be a list of patterns of FQNs"),
        ({"rename": ["a"]}, "'rename' must be a mapping of patterns to saved FQNs"),
        ({"rename": {"a.*": "b"}}, "'rename' needs as many '*' in 'b' as in 'a.*'"),
        ({"resize": "a"}, "'resize' must be a list of patterns of FQNs"),
        ({"only": "a"}, "'only' must be a list of patterns of FQNs"),
    ],
)
def test_wrong_rules_are_refused(options: dict[str, Any], words: str) -> None:
    """Before anything is read."""
    with pytest.raises(cnr.ConfigurationError) as caught:
        cnr.CNRLoadPlanner(**options)
    assert words in str(caught.value)


def _load_by_different_rules(rank: int, root: str) -> str:
    job = torchrec_job(1)
    save(state(job), f"{root}/0")
    return refusal(state(job), f"{root}/0", only=["model.*"] if dist.get_rank() else ["*"])


def test_rules_that_differ_between_ranks_are_refused(tmp_path: Path, rank_pool: RankPools) -> None:
    """On all ranks."""
    messages = rank_pool(2).run(_load_by_different_rules, str(tmp_path))
    assert messages == ["'rename', 'resize' and 'only' must be the same on all ranks"] * 2


def _fused(num_rows: int, state: Tensor, name: str = "momentum1") -> dict[str, Any]:
    """A table of two columns, and fused state of it, as TorchRec names them."""
    key = "ebc.embedding_bags.t.weight"
    return {"model": {key: torch.arange(2.0 * num_rows).view(-1, 2)}, "fused": {"state": {key: {f"t.{name}": state}}}}


@pytest.mark.parametrize(("num_rows", "num_state"), [(6, 12), (4, 12), (6, 4), (2, 4)])
def test_state_of_column_shards_is_not_resized_without_its_table(tmp_path: Path, num_rows: int, num_state: int) -> None:
    """A save without a tracker does not tell where the values of one shard end: they would go to other rows."""
    dcp.save(_fused(4, torch.arange(8.0)), storage_writer=models.writer(tmp_path / "0"))
    target = _fused(num_rows, torch.full((num_state,), -1.0))
    message = refusal(target, str(tmp_path / "0"), resize=["model.*", "fused.state.*"])
    assert "1 of another size: 'fused.state.ebc.embedding_bags.t.weight.t.momentum1'" in message
    dcp.save(_fused(4, torch.arange(4.0)), storage_writer=models.writer(tmp_path / "1"))
    target = _fused(6, torch.full((6,), -1.0))
    load_by(target, str(tmp_path / "1"), resize=["model.*", "fused.state.*"])
    state = target["fused"]["state"]["ebc.embedding_bags.t.weight"]["t.momentum1"]
    assert state.tolist() == [0.0, 1.0, 2.0, 3.0, -1.0, -1.0]


def _halved(rank: int, root: str) -> str:
    """From one shard of 20 rows to two column shards of 10: the state has 20 values in both."""
    job = torchrec_job(1, "table", bag_rows=(20, 8, 4))
    tracker = cnr.RowTracker(job.model)
    save(state(job), f"{root}/0", cnr.CNRSavePlanner(tracker))
    tracker.close()
    target = torchrec_job(2, "column", bag_rows=(10, 8, 4))
    message = refusal(state(target), f"{root}/0", only=["fused.state.ebc.embedding_bags.t0.*"])
    load_by(state(target), f"{root}/0", resize=RESIZE)
    found, saved = whole(state(target)), whole(state(job))
    fqn = "fused.state.ebc.embedding_bags.t0.weight.t0.momentum1"
    assert torch.equal(found[fqn], saved[fqn][:10].repeat(2))
    return message


def test_state_of_the_same_size_is_not_taken_for_the_same_rows(tmp_path: Path, rank_pool: RankPools) -> None:
    """It goes to the rows that it belongs to, or is refused where its table is not loaded."""
    for message in rank_pool(2).run(_halved, str(tmp_path)):
        assert "1 of another size: 'fused.state.ebc.embedding_bags.t0.weight.t0.momentum1'" in message


def _swapped(rank: int, root: str) -> str:
    job = torchrec_job(1, "column")
    tracker = cnr.RowTracker(job.model)
    save(state(job), f"{root}/0", cnr.CNRSavePlanner(tracker))
    tracker.close()
    names = {number: f"*.ebc.embedding_bags.t{number}.weight.t{number}.*" for number in (0, 1)}
    return refusal(state(job), f"{root}/0", rename={names[0]: names[1], names[1]: names[0]})


def test_state_is_not_renamed_without_its_table(tmp_path: Path, rank_pool: RankPools) -> None:
    """The shards of the wrong table would place its rows."""
    for message in rank_pool(2).run(_swapped, str(tmp_path)):
        assert "rename both, or neither" in message


def test_a_message_has_the_names_of_both_sides(tmp_path: Path) -> None:
    """A user looks for the name in the model, and for the saved one in the checkpoint."""
    dcp.save({"old": torch.ones(4, 2)}, storage_writer=models.writer(tmp_path / "0"))
    message = refusal({"new": torch.zeros(4, 3)}, str(tmp_path / "0"), rename={"new": "old"})
    assert "1 of another size: 'new' (saved as 'old') (saved [4, 2], wanted [4, 3])" in message


def test_only_excludes_objects_of_other_ranks_too(tmp_path: Path) -> None:
    """A data loader state that two ranks saved is not looked at; renamed, it is refused."""
    saved = {"w": torch.ones(2), "reader": {f"rank_{rank}_of_2": b"position" for rank in range(2)}}
    dcp.save(saved, storage_writer=models.writer(tmp_path / "0"))
    target: dict[str, Any] = {"w": torch.zeros(2), "reader": {"rank_0_of_1": b"mine"}}
    report = load_by(target, str(tmp_path / "0"), only=["w"])
    assert (report.loaded, report.skipped) == (("w",), ("reader.rank_0_of_1",))
    assert target["reader"] == {"rank_0_of_1": b"mine"}
    message = refusal(target, str(tmp_path / "0"), rename={"reader.*": "old.*"})
    assert "cannot be renamed, because another number of ranks saved it" in message


def test_what_is_not_loaded_still_tells_the_optimizer(tmp_path: Path) -> None:
    """State of Adagrad is not taken for an average of Adam's because only the average is asked for."""
    adagrad = {
        "model": _fused(4, torch.ones(4))["model"],
        "dense": {"state": {"ebc.embedding_bags.t.weight": {"sum": torch.ones(4, 2)}}},
    }
    dcp.save(adagrad, storage_writer=models.writer(tmp_path / "0"))
    adam = _fused(4, torch.zeros(4, 2))
    adam["fused"]["state"]["ebc.embedding_bags.t.weight"]["t.exp_avg_sq"] = torch.zeros(4, 2)
    message = refusal(adam, str(tmp_path / "0"), only=["model.*", "*.momentum1"])
    assert "1 not in the checkpoint: 'fused.state.ebc.embedding_bags.t.weight.t.momentum1'" in message

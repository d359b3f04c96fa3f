"""Reports of loads: what was loaded and what was not, known on every rank, and told at once where it is refused."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.jobs import load_into, refusal, save, warnings
from tests.support.models import differing, plain_job, state, torchrec_job, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import History, Manifest, Shard, TensorEntry
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.loading.fitting import Wanted, fit
from torchrec_cnr.quantization import NoQuantization

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def _all_loaded(rank: int, root: str, sharding: str) -> cnr.LoadReport:
    job = torchrec_job(1, "table")
    train(job, 1)
    save(state(job, seen=1), f"{root}/0")
    with warnings() as messages:
        report = load_into(state(torchrec_job(2, sharding), seen=0), f"{root}/0")
    assert report.loaded == tuple(sorted(whole(state(job, seen=1))))
    assert messages == []
    return report


def test_a_strict_load_reports_everything_as_loaded(tmp_path: Path, rank_pool: RankPools) -> None:
    """Nothing is missing, unexpected or renamed, and every rank says so of the tensors of all ranks."""
    first, second = rank_pool(2).run(_all_loaded, str(tmp_path), "table")
    assert first == second
    assert (first.missing, first.unexpected, first.reshaped, first.renamed) == ((), (), {}, {})
    assert first.url == f"{tmp_path}/0"
    assert "fused.state.ebc.embedding_bags.t1.weight.t1.momentum1" in first.loaded


def _reshaped(rank: int, root: str, with_tracker: bool) -> cnr.LoadReport:
    job = torchrec_job(1, "row")
    tracker = cnr.RowTracker(job.model)
    save(state(job), f"{root}/0", cnr.CNRSavePlanner(tracker))
    tracker.close()
    return load_into(state(torchrec_job(2, "column")), f"{root}/0")


def test_state_that_changed_its_size_is_reported(tmp_path: Path, rank_pool: RankPools) -> None:
    """Row-wise state takes as many values a row as its table has column shards: the report has both sizes."""
    first, second = rank_pool(2).run(_reshaped, str(tmp_path), True)
    assert first == second
    assert first.reshaped["fused.state.ebc.embedding_bags.t0.weight.t0.momentum1"] == ((37,), (74,))
    assert len(first.reshaped) == 4
    assert all(fqn in first.loaded for fqn in first.reshaped)
    assert "4 reshaped: 'fused.state.ebc.embedding_bags.t0.weight.t0.momentum1' from [37] to [74], " in str(first)


def _with_other_keys(rank: int, root: str) -> tuple[list[str], str, cnr.LoadReport, list[str]]:
    job = torchrec_job(1, "table")
    train(job, 1)
    cut = whole(state(job, seen=1))
    save(state(job, seen=1), f"{root}/0")

    def target() -> dict[str, Any]:
        """What both ranks want less of, and each something that the other does not."""
        found = state(torchrec_job(2, "table"), seen=0)
        del found["model"]["over.bias"], found["reader"]["seen"]
        found["fused"]["state"] = {}
        found["extra"] = {f"of_rank_{rank}": torch.full((3,), 7.0), "of_both": torch.zeros(2)}
        return found

    refused = target()
    before = whole(refused)
    message = refusal(refused, f"{root}/0")
    changed = differing(whole(refused), before)
    partial = target()
    with warnings() as messages:
        report = load_into(partial, f"{root}/0", allow_partial_load=True)
    extra = partial.pop("extra")
    assert bool((extra[f"of_rank_{rank}"] == 7.0).all())
    loaded = whole(partial)
    assert set(report.unexpected) == set(cut) - set(loaded)
    assert differing(loaded, {fqn: cut[fqn] for fqn in loaded}) == []
    return changed, message, report, messages


def test_ranks_with_different_keys_decide_together(tmp_path: Path, rank_pool: RankPools) -> None:
    """What any rank lacks or has too much is in one error on all ranks, or in one report, and one rank warns of it."""
    results = rank_pool(2).run(_with_other_keys, str(tmp_path))
    (changed, message, report, warnings), (other_changed, other_message, other_report, other_warnings) = results
    assert changed == other_changed == []
    assert message == other_message
    assert report == other_report
    assert report.missing == ("extra.of_both", "extra.of_rank_0", "extra.of_rank_1")
    states = [f"fused.state.ebc.embedding_bags.t{i}.weight.t{i}.momentum1" for i in range(3)]
    states.append("fused.state.ec.embeddings.t0.weight.t0.momentum1")
    assert report.unexpected == (*states, "model.over.bias", "reader.seen")
    assert not set(report.loaded) & {*report.missing, *report.unexpected}
    assert "3 not in the checkpoint: 'extra.of_both', 'extra.of_rank_0', 'extra.of_rank_1'\n" in message
    assert "6 not in the state dict: 'fused.state.ebc" in message
    assert "allow_partial_load=True" in message
    assert len(warnings) == 1
    assert str(report).replace("\n", "; ") in warnings[0]
    assert other_warnings == []


def _load_each_its_own(rank: int, root: str) -> tuple[list[str], str]:
    job = torchrec_job(1, "table")
    for step in range(2):
        train(job, 1)
        save(state(job, seen=step), f"{root}/{step}")
    target = state(torchrec_job(2, "table"), seen=0)
    before = whole(target)
    failures = faults.failures_of(lambda: load_into(target, f"{root}/{rank}"))
    assert [type(cause) for cause in failures.values()] == [cnr.LoadError]
    return differing(whole(target), before), str(failures[0])


def test_ranks_that_would_load_different_checkpoints_are_refused(tmp_path: Path, rank_pool: RankPools) -> None:
    """Each may have found another newest one, if a save was committed in between: nothing is loaded on any rank."""
    for changed, message in rank_pool(2).run(_load_each_its_own, str(tmp_path)):
        assert changed == []
        assert f"ranks load different checkpoints ({tmp_path}/0, {tmp_path}/1)" in message
        assert "restore_newest" in message


def _load_on_a_submesh(rank: int, root: str) -> float:
    mesh = DeviceMesh("cpu", [0])

    def on_rank_0(value: float) -> dict[str, Any]:
        local = torch.full((4, 2), value)
        return {
            "part": DTensor.from_local(local, mesh, [ShardPlacement(0)], run_check=False),
            "copies": DTensor.from_local(local, mesh, [Replicate()], run_check=False),
            "all": torch.full((3,), value),
        }

    dcp.save(on_rank_0(2.0), storage_writer=models.writer(root))
    target = on_rank_0(0.0)
    report = load_into(target, root)
    assert report.loaded == ("all", "copies", "part")
    return sum(float(value.to_local().sum()) for value in (target["part"], target["copies"])) + float(
        target["all"].sum()
    )


def test_ranks_outside_of_a_tensors_mesh_load_what_else_there_is(tmp_path: Path, rank_pool: RankPools) -> None:
    """A tensor on some ranks alone, as stages of a pipeline have them: all ranks load, and report it."""
    assert rank_pool(2).run(_load_on_a_submesh, str(tmp_path / "1")) == [38.0, 6.0]


def test_objects_are_restored_under_the_keys_that_they_have(tmp_path: Path) -> None:
    """Optimizers number their parameters: a step under 0 does not become one under "0", beside the old one."""

    def sparse_adam() -> tuple[nn.Embedding, torch.optim.SparseAdam]:
        table = nn.Embedding(8, 4, sparse=True)
        return table, torch.optim.SparseAdam(table.parameters())

    def trained(num_steps: int) -> dict[str, Any]:
        table, optimizer = sparse_adam()
        for _ in range(num_steps):
            table(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
        flags: dict[Any, Any] = {True: num_steps, (1, 2): [num_steps], "007": num_steps, 7: -num_steps}
        return {"model": table.state_dict(), "optimizer": optimizer.state_dict(), "flags": flags}

    saved, target = trained(9), trained(1)
    save(saved, str(tmp_path / "1"))
    load_into(target, str(tmp_path / "1"))
    assert target["optimizer"]["state"].keys() == {0}
    assert target["optimizer"]["state"][0]["step"] == 9
    assert target["flags"] == saved["flags"]
    assert target["optimizer"]["param_groups"] == saved["optimizer"]["param_groups"]
    save(target, str(tmp_path / "2"))


def test_a_refusal_lists_everything_but_only_so_much(tmp_path: Path) -> None:
    """All that is missing or unexpected is in one message: the first five of each, and how many there are."""
    save({"old": {f"{i}": torch.ones(2) for i in range(7)}, "both": torch.ones(1), "more": {"x": 1}}, tmp_path / "0")
    target = {"new": {f"{i}": torch.zeros(2) for i in range(6)}, "both": torch.zeros(1), "more": {"x": 0, "y": 0}}
    message = refusal(target, tmp_path / "0")
    assert f"does not fit {tmp_path}/0:" in message
    assert "7 not in the checkpoint: 'more.y', 'new.0', 'new.1', 'new.2', 'new.3', ...\n" in message
    assert "7 not in the state dict: 'old.0', 'old.1', 'old.2', 'old.3', 'old.4', ...\n" in message
    assert "allow_partial_load=True" in message
    assert torch.equal(target["both"], torch.zeros(1)), "nothing is loaded"


@pytest.mark.parametrize("partial", [False, True], ids=["strict", "partial"])
def test_all_other_sizes_and_dtypes_are_listed_in_either_mode(tmp_path: Path, partial: bool) -> None:
    """Tensors that cannot be loaded are listed together, beside what is missing only where that is refused too."""
    save({"a": torch.ones(4, 2), "b": torch.ones(5), "c": torch.ones(3), "d": 1, "e": torch.ones(1)}, tmp_path / "0")
    target = {
        "a": torch.zeros(6, 2),
        "b": torch.zeros(1, 5),
        "c": torch.zeros(3, dtype=torch.float16),
        "d": torch.zeros(()),
        "f": 1,
    }
    message = refusal(target, tmp_path / "0", allow_partial_load=partial)
    assert "2 of another size: 'a' (saved [4, 2], wanted [6, 2]), 'b' (saved [5], wanted [1, 5])\n" in message
    assert "1 of another dtype: 'c' (saved float32, wanted float16)\n" in message
    assert "1 a tensor on one side only: 'd' (in the state dict)\n" in message
    assert ("not in the checkpoint" not in message) == partial
    assert ("not in the state dict" not in message) == partial


def test_a_table_with_more_rows_is_refused_together_with_its_state(tmp_path: Path) -> None:
    """A table that has grown is no load under another sharding, neither for itself nor for its row-wise state."""
    job = plain_job(1, "rowwise_adagrad")
    tracker = cnr.RowTracker(job.model)
    train(job, 1)
    save(state(job), tmp_path / "0", cnr.CNRSavePlanner(tracker))
    tracker.close()
    message = refusal(state(plain_job(2, "rowwise_adagrad", rows=(41, 12))), tmp_path / "0", allow_partial_load=True)
    assert (
        "2 of another size: 'model.bag.weight' (saved [40, 4], wanted [41, 4]), 'tables_optimizer.state.0.sum'"
        in message
    )


def test_a_refused_load_leaves_the_tracker_on_its_head(tmp_path: Path) -> None:
    """Nothing was overwritten, so that the next save is still a delta, with the rows marked before the load."""
    job = plain_job(1)
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    save(state(job), tmp_path / "0", planner)
    train(job, 1)
    num_modified = tracker.num_modified
    assert num_modified
    refusal({**state(job), "extra": torch.zeros(1)}, tmp_path / "0", tracker=tracker)
    assert tracker.num_modified == num_modified
    end = whole(state(job))
    save(state(job), tmp_path / "1", planner)
    tracker.close()
    assert cnr.read_checkpoint(tmp_path / "1").parent == f"{tmp_path}/0"
    assert differing(models.load(plain_job(2), str(tmp_path / "1")), end) == []


def test_a_report_is_there_after_a_load_only(tmp_path: Path) -> None:
    """A planner that has loaded nothing, or whose last load failed, has none; one that loads again has the last."""
    model = nn.Linear(2, 1)
    save(model.state_dict(), tmp_path / "0")
    planner = cnr.CNRLoadPlanner()
    reader = cnr.CNRStorageReader(tmp_path / "0")
    with pytest.raises(cnr.LoadError, match="no report"):
        _ = planner.report
    dcp.load(model.state_dict(), storage_reader=reader, planner=planner)
    assert planner.report.loaded == ("bias", "weight")
    with pytest.raises(CheckpointException):
        dcp.load({"weight": model.weight}, storage_reader=reader, planner=planner)
    with pytest.raises(cnr.LoadError, match="no report"):
        _ = planner.report


def test_a_report_is_a_value() -> None:
    """Reports are frozen, survive pickling, and say everything that is not as it was, in a few lines."""
    names = tuple(f"n{i}" for i in range(9))
    report = cnr.LoadReport("run/3", names, names[:2], names, {"n1": ((4,), (4, 1))}, {"n2": 1000}, {"n1": "old.n1"})
    assert pickle.loads(pickle.dumps(report)) == report
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.missing = ()  # type: ignore[misc]
    assert str(report).splitlines() == [
        "9 loaded from run/3",
        "2 missing, left as they were: 'n0', 'n1'",
        "9 unexpected, left out: 'n0', 'n1', 'n2', 'n3', 'n4', ...",
        "1 reshaped: 'n1' from [4] to [4, 1]",
        "1 of which a map of rows was loaded: 'n2' (1,000 rows)",
        "1 renamed: 'n1' was 'old.n1'",
    ]
    assert str(cnr.LoadReport("run/3", names)) == "9 loaded from run/3"


def _manifest(tensors: dict[str, tuple[int, ...]], objects: list[str]) -> Manifest:
    entries = {
        fqn: TensorEntry("float32", size, (Shard(Box.whole(size), None, 1, (), NoQuantization()),))
        for fqn, size in tensors.items()
    }
    blobs = {fqn: Blob(0, 8, 1, 0) for fqn in objects}
    return Manifest(1, "0", "s", None, "Full", History(0), 0, 1, "test", (), entries, blobs)


names = st.sampled_from("abcdefgh")
sizes = st.sampled_from([None, (), (2,), (2, 3)])  # None: no tensor
sides = st.dictionaries(names, sizes, max_size=8)


@given(sides, st.lists(sides, min_size=1, max_size=3), st.booleans())
def test_fitting_is_set_arithmetic(
    saved: dict[str, tuple[int, ...] | None], ranks: list[dict[str, tuple[int, ...] | None]], allow_partial: bool
) -> None:
    """Whatever both sides hold: refused if anything differs in size or kind, or, strictly, is on one side only."""
    manifest = _manifest(
        {fqn: size for fqn, size in saved.items() if size is not None}, [fqn for fqn in saved if saved[fqn] is None]
    )
    wanted = {
        Wanted(fqn, fqn, size, None if size is None else "float32") for rank in ranks for fqn, size in rank.items()
    }
    union = set[str]().union(*ranks)
    differs = any(fqn in saved and saved[fqn] != size for rank in ranks for fqn, size in rank.items())

    def act() -> cnr.LoadReport:
        return fit(wanted, manifest, "run/0", allow_partial=allow_partial).report

    if differs or (set(saved) != union and not allow_partial):
        with pytest.raises(cnr.StateMismatchError) as raised:
            act()
        assert all(repr(fqn) in str(raised.value) for fqn in sorted(union - set(saved))[:5] if not allow_partial)
        assert all(repr(fqn) in str(raised.value) for fqn in sorted(set(saved) - union)[:5] if not allow_partial)
        return
    report = act()
    assert set(report.loaded) == union & set(saved)
    assert set(report.missing) == union - set(saved)
    assert set(report.unexpected) == set(saved) - union

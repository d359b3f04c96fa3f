"""Loads from wrong places and into wrong targets: a typed error that helps, and nothing is lost by it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchrec_cnr as cnr
from tests.loading.bad_input.mishaps import forge, goes_on, load_failure, manifest
from tests.support import faults
from tests.support.jobs import SavingJob, assert_loads, load_into, save
from tests.support.models import differing, plain_job, state, train, whole
from torchrec_cnr.format.manifest_parser import VERSION

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def test_there_is_nothing_to_load(run: SavingJob, tmp_path: Path) -> None:
    """No path, no directory, a file, or a directory without a manifest: the error says that nothing is there."""
    with pytest.raises(cnr.CheckpointNotFoundError, match="no committed checkpoint"):
        cnr.CNRStorageReader(cnr.latest(tmp_path / "nowhere"))
    empty, file = Path(run.root, "empty"), Path(run.root, "file")
    empty.mkdir()
    file.touch()
    shutil.copytree(run.path(2), f"{run.root}/uncommitted")
    Path(run.root, "uncommitted", "manifest.json").unlink()
    for place in (empty, file, f"{run.root}/uncommitted", f"{run.root}/missing"):
        assert load_failure(str(place)).startswith("CheckpointNotFoundError")
        assert str(place) in load_failure(str(place))
        with pytest.raises(cnr.CheckpointNotFoundError, match=str(place)):
            cnr.read_checkpoint(place)
    assert cnr.latest(run.root) == run.path(2)
    goes_on(run)


def test_latest_passes_over_damaged_manifests_but_not_over_newer_versions(run: SavingJob) -> None:
    """A damaged head must not end a job; a head that only a newer version reads must."""
    body = manifest(run, 2).read_bytes()
    manifest(run, 2).write_bytes(body[:-20])
    assert cnr.latest(run.root) == run.path(1)
    manifest(run, 2).write_bytes(body)
    forge(run.path(2), lambda manifest: manifest.update(version=VERSION + 1))
    with pytest.raises(cnr.VersionError, match="upgrade"):
        cnr.latest(run.root)


@pytest.mark.parametrize(
    "name",
    [
        *["Prüfung 1", "数据 集", "with space ", "100%25", "a#b", "a?b=c", "[x]", "st*r", "{0}", "~", "a:b", "'", '"'],
        *["a;b", "back\\slash", "a::b", "new\nline", "...", "a&b", "$HOME", "é" * 60],
    ],
)
def test_paths_of_all_kinds(run: SavingJob, name: str) -> None:
    """Whatever the names of directories: a lineage there loads, unless the name was refused at once."""
    root = f"{run.root}/{name}"
    try:
        baseline = save(run.job, f"{root}/{name} 0", cnr.CNRSavePlanner(run.tracker, policy=cnr.Full()))
    except cnr.ConfigurationError as error:
        assert "path or URL" in str(error)  # noqa: PT017 - only some names may be refused
        goes_on(run)
        return
    train(run.job, 4)
    delta = save(run.job, f"{root}/{name} 1", run.planner)
    assert Path(root, f"{name} 1", "manifest.json").exists()
    assert cnr.read_checkpoint(f"{root}/{name} 1").parent == f"{root}/{name} 0"
    assert cnr.latest(root) == f"{root}/{name} 1"
    assert_loads(f"{root}/{name} 0", baseline)
    assert_loads(f"{root}/{name} 1", delta)
    shutil.move(root, f"{run.root}-moved {name}")
    assert_loads(f"{run.root}-moved {name}/{name} 1", delta)


def test_a_store_in_memory(run: SavingJob) -> None:
    """Any fsspec file system will do: a lineage in memory, with the same refusals."""
    root = "memory://" + run.root
    baseline = save(run.job, f"{root}/0", run.planner)
    assert cnr.read_checkpoint(f"{root}/0").kind == "baseline", "no relative path leads from one store to another"
    train(run.job, 4)
    delta = save(run.job, f"{root}/1", run.planner)
    assert cnr.read_checkpoint(f"{root}/1").parent == f"{root}/0"
    assert cnr.latest(root) == f"{root}/1"
    assert_loads(f"{root}/0", baseline)
    assert_loads(f"{root}/1", delta)
    assert isinstance(faults.failure_of(lambda: save(run.job, f"{root}/1", run.planner)), cnr.CheckpointExistsError)
    assert load_failure(f"{root}/2").startswith("CheckpointNotFoundError")
    goes_on(run)


@pytest.mark.parametrize(
    ("fqn", "value", "words"),
    [
        ("bag.weight", torch.zeros(41, 4), ["[40, 4]", "[41, 4]"]),
        ("bag.weight", torch.zeros(40, 5), ["[40, 4]", "[40, 5]"]),
        ("bag.weight", torch.zeros(160), ["[40, 4]", "[160]"]),
        ("bag.weight", torch.zeros(40, 4, dtype=torch.float16), ["float32", "float16"]),
        ("bag.weight", torch.zeros(40, 4, dtype=torch.float64), ["float32", "float64"]),
        ("over.weight", torch.zeros(1, 8), ["[1, 7]", "[1, 8]"]),
        ("over.bias", torch.zeros(1, dtype=torch.int32), ["float32", "int32"]),
        ("over.bias", "no tensor", ["tensor"]),
    ],
)
@pytest.mark.parametrize("partial", [False, True], ids=["strict", "partial"])
def test_a_tensor_of_another_shape_or_dtype_is_refused(
    run: SavingJob, fqn: str, value: Any, words: list[str], partial: bool
) -> None:
    """The error names the tensor, what the checkpoint has, and what the target has; also in a partial load."""
    target = state(plain_job(99, "adagrad"))
    target["model"][fqn] = value
    message = load_failure(run.path(2), cnr.CNRLoadPlanner(allow_partial_load=partial), target)
    assert message.startswith("StateMismatchError")
    assert f"model.{fqn}" in message
    assert all(word in message for word in words)
    goes_on(run)


def test_what_only_the_target_has_is_refused_or_left_alone(run: SavingJob) -> None:
    """A strict load names what the checkpoint lacks; a partial one loads the rest and leaves it as it was."""
    target = state(plain_job(99, "adagrad"))
    target["model"]["new.weight"] = torch.full((3, 2), 7.0)
    message = load_failure(run.path(2), cnr.CNRLoadPlanner(), target)
    assert message.startswith("StateMismatchError")
    assert "'model.new.weight'" in message
    assert "allow_partial_load" in message
    load_into(target, run.path(2), allow_partial_load=True)
    loaded = whole(target)
    assert bool((loaded.pop("model.new.weight") == 7.0).all())
    assert differing(loaded, run.saved["2"]) == []
    goes_on(run)


def test_what_only_the_checkpoint_has_is_refused_or_left_out(run: SavingJob) -> None:
    """A strict load names what the target lacks; a partial one loads the rest."""
    for fqn in ("model.item.weight", "all_optimizer.state.0.sum", "all_optimizer.param_groups.0.lr"):
        target = state(plain_job(99, "adagrad"))
        place: Any = target
        *path, last = fqn.split(".", 1) if fqn.startswith("model") else fqn.split(".")
        for key in path:
            place = place[int(key)] if isinstance(place, list) else place[key]
        del place[last]
        message = load_failure(run.path(2), cnr.CNRLoadPlanner(), target)
        assert message.startswith("StateMismatchError")
        assert f"'{fqn}'" in message
        assert "allow_partial_load" in message
        load_into(target, run.path(2), allow_partial_load=True)
        assert differing(whole(target), run.saved["2"]) == [fqn]
    goes_on(run)


def test_a_table_that_a_partial_load_left_out_is_in_the_next_save(run: SavingJob) -> None:
    """A job whose table the checkpoint lacks, or did not load, saves all of it next."""
    with SavingJob(run.root, seed=7) as fork:
        target = state(fork.job)
        del target["model"]["item.weight"]
        load_into(target, run.path(2), tracker=fork.tracker, allow_partial_load=True)
        fork.train_and_save("forked")
        fork.assert_loads("forked")
    goes_on(run)


class _OneTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 4)


class _TwoOfOneName(nn.Module):
    """Two modules, each with a table called ``table``."""

    def __init__(self) -> None:
        super().__init__()
        self.users = _OneTable()
        self.items = _OneTable()


def test_two_tables_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    """Equal names in two modules: each table has its own rows and its own marks."""
    model = _TwoOfOneName()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    save(model.state_dict(), tmp_path / "0", planner)
    model.users.table(torch.tensor([[1, 2], [2, 3]])).sum().backward()
    optimizer.step()
    assert tracker.num_modified == 3
    with torch.no_grad():
        model.items.table.weight[5] = 9.0
    tracker.mark("items.table", torch.tensor([5]))
    assert tracker.num_modified == 4
    with pytest.raises(cnr.ConfigurationError, match="users"):
        tracker.mark("sellers.table", torch.tensor([5]))
    save(model.state_dict(), tmp_path / "1", planner)
    assert cnr.read_checkpoint(tmp_path / "1").num_rows == 4
    other = _TwoOfOneName()
    assert not torch.equal(other.users.table.weight, model.users.table.weight)
    load_into(other.state_dict(), tmp_path / "1")
    assert differing(whole(other.state_dict()), whole(model.state_dict())) == []
    tracker.close()

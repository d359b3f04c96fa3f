"""Wrong calls, wrong targets, damaged and hostile checkpoints: a typed error that helps, and nothing is lost by it.

After each mishap the job must go on: its last checkpoint loads, and the next save works and loads.
"""

import hashlib
import io
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import torchrec_cnr as cnr
from tests.golden.replacement import replace_manifest
from tests.support import faults, models
from tests.support.jobs import SavingJob, assert_loads, load_into, save
from tests.support.models import Job, Whole, differing, plain_job, state, torchrec_job, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.format.manifest_parser import VERSION

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SavingJob]:
    """A job with three checkpoints, a baseline, a delta, and a delta of that, which has been trained since."""
    with SavingJob(tmp_path / "run") as run:
        run.train_and_save(0, 1, 2)
        assert [cnr.read_checkpoint(run.path(number)).kind for number in range(3)] == ["baseline", "delta", "delta"]
        run.train()
        yield run


def manifest(run: SavingJob, number: int) -> Path:
    """A checkpoint's manifest."""
    return Path(run.path(number), "manifest.json")


def goes_on(run: SavingJob, last: int | None = 2) -> None:
    """The last checkpoint loads, and the job's next save does; it holds all that was trained."""
    if last is not None:
        run.assert_loads(last)
    run.train_and_save("next")
    run.assert_loads("next")


def load_failure(path: str, planner: LoadPlanner | None = None, target: dict[str, Any] | None = None) -> str:
    """Load a checkpoint that must be refused; the error's type and message."""
    target = target if target is not None else state(plain_job(99, "adagrad"))
    reader = cnr.CNRStorageReader(path)
    cause = faults.failure_of(lambda: dcp.load(target, storage_reader=reader, planner=planner or cnr.CNRLoadPlanner()))
    assert isinstance(cause, cnr.CNRError), f"not one of ours: {cause!r}"
    return f"{type(cause).__name__}: {cause}"


def forge(path: str, change: Callable[[dict[str, Any]], None]) -> str:
    """Change a manifest, and make its digest right again; the new digest."""
    file = Path(path, "manifest.json")
    body = json.loads(file.read_bytes())["manifest"]
    change(body)
    return write_manifest(file, body)


def write_manifest(file: Path, body: Any) -> str:
    """Write a manifest with a digest that is right."""
    text = json.dumps(body, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    file.write_text(f'{{"sha256":"{digest}","manifest":{text}}}\n')
    return digest


def adopt(child: str, digest: str) -> str:
    """Have a child accept a parent of this digest."""
    return forge(child, lambda body: body["parent"].update(sha256=digest))


# Wrong calls.


def test_an_id_that_exists_is_refused(run: SavingJob) -> None:
    """A checkpoint is never overwritten: the error names it, and what it holds stays."""
    saved = run.saved["1"]
    cause = run.failure(1)
    assert isinstance(cause, cnr.CheckpointExistsError)
    assert run.path(1) in str(cause)
    assert "checkpoint_id" in str(cause)
    run.assert_loads(1, saved)
    goes_on(run)


def test_arguments_that_cannot_work_are_refused(run: SavingJob) -> None:
    """The error names the argument."""
    arguments: dict[str, Any] = {"overwrite": True, "thread_count": 0, "quantization": "4 bits"}
    for name, value in arguments.items():
        with pytest.raises(cnr.ConfigurationError, match=name):
            models.writer(run.root, **{name: value})
    with pytest.raises(cnr.ConfigurationError, match="bits"):
        cnr.Asymmetric(5)
    with pytest.raises(cnr.ConfigurationError, match="thread_count"):
        cnr.CNRStorageReader(run.path(0), thread_count=0)
    with pytest.raises(cnr.ConfigurationError, match="nosuchprotocol"):
        models.writer("nosuchprotocol://bucket/step")
    with pytest.raises(cnr.ConfigurationError, match="no embedding table"):
        cnr.RowTracker(nn.Linear(2, 2))
    goes_on(run)


def test_a_tracker_needs_our_writer_and_reader(run: SavingJob, tmp_path: Path) -> None:
    """With DCP's own writer a delta would be a checkpoint with holes; with its reader nothing would be validated."""
    planner = cnr.CNRSavePlanner(run.tracker)
    cause = faults.failure_of(
        lambda: dcp.save(state(run.job), storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), planner=planner)
    )
    assert isinstance(cause, cnr.ConfigurationError)
    assert "CNRStorageWriter" in str(cause)
    dcp.save(state(run.job), storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"))
    cause = faults.failure_of(
        lambda: dcp.load(
            state(plain_job(2, "adagrad")),
            storage_reader=dcp.FileSystemReader(tmp_path / "theirs"),
            planner=cnr.CNRLoadPlanner(),
        )
    )
    assert isinstance(cause, cnr.ConfigurationError)
    assert "CNRStorageReader" in str(cause)
    goes_on(run)


def test_a_state_dict_without_a_tracked_table_is_refused(run: SavingJob) -> None:
    """A table that is tracked but not saved would lose its rows."""
    saved = state(run.job)
    del saved["model"]["item.weight"]
    cause = faults.failure_of(lambda: save(saved, run.path(3), run.planner))
    assert isinstance(cause, cnr.ConfigurationError)
    assert "'item'" in str(cause)
    goes_on(run)


def _async_save_copies(rank: int, root: str, build: Callable[[int], Job], stager: AsyncStager) -> None:
    job = build(1)
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    dcp.save(state(job), storage_writer=models.writer(f"{root}/0"), planner=planner)
    train(job, 1)
    writer = models.writer(f"{root}/1")
    future = dcp.async_save(state(job), storage_writer=writer, planner=planner, async_stager=stager)
    assert isinstance(future, Future)
    with pytest.raises(CheckpointException) as raised:
        future.result(timeout=60)
    causes = faults.causes(raised.value)
    assert all(isinstance(cause, cnr.ConfigurationError) for cause in causes.values())
    assert any("async_save" in str(cause) for cause in causes.values())
    assert cnr.latest(root) == f"{root}/0"
    train(job, 2)
    end = whole(state(job))
    dcp.save(state(job), storage_writer=models.writer(f"{root}/2"), planner=planner)
    tracker.close()
    assert cnr.read_checkpoint(f"{root}/2").kind == "delta"
    assert differing(models.load(build(2), f"{root}/2"), end) == []


def test_an_async_save_of_copies_is_refused(tmp_path: Path, rank_pool: RankPools) -> None:
    """DCP's own stagers copy at another moment than the cut: refused, with what to do, and no row is lost."""
    # DCP's default stager cannot copy sharded tensors at all.
    stager = BlockingAsyncStager()
    _async_save_copies(0, str(tmp_path / "plain"), plain_job, stager)
    rank_pool(2).run(_async_save_copies, str(tmp_path / "ranks"), torchrec_job, stager, timeout_secs=90.0)


class Opaque:
    """A value of a type that a weights-only unpickler does not know."""


def test_an_object_that_could_not_be_loaded_again_is_refused_at_save(run: SavingJob) -> None:
    """What cannot be unpickled without running code is refused when it is saved, by name, not when it is needed."""
    saved = state(run.job, of_a_type_of_mine=Opaque())
    cause = faults.failure_of(lambda: save(saved, run.path(3), run.planner))
    assert isinstance(cause, cnr.ConfigurationError)
    assert "reader.of_a_type_of_mine" in str(cause)
    assert "add_safe_globals" in str(cause)
    goes_on(run)


@pytest.mark.parametrize(
    "value",
    [torch.zeros(2, dtype=torch.complex64), torch.eye(3).to_sparse(), torch.zeros(2).to(torch.float8_e4m3fn)],
    ids=["complex", "sparse", "float8"],
)
def test_a_tensor_that_cannot_be_stored_is_refused_at_save(run: SavingJob, value: Tensor) -> None:
    """Tensors of other layouts and dtypes: the error names the tensor and what it is."""
    saved = state(run.job, value=value)
    cause = faults.failure_of(lambda: save(saved, run.path(3), run.planner))
    assert isinstance(cause, cnr.ConfigurationError)
    assert "reader.value" in str(cause)
    goes_on(run)


# Wrong places.


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


# Wrong targets.


def _with(change: Callable[[nn.Module], None]) -> dict[str, Any]:
    job = plain_job(99, "adagrad")
    change(job.model)
    return state(job)


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
    tracker.mark("items.table", torch.tensor([5]))
    with torch.no_grad():
        model.items.table.weight[5] = 9.0
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


# Unusual contents.


def test_an_empty_delta(run: SavingJob) -> None:
    """Nothing was trained: the delta holds no row, loads as its parent, and another may follow."""
    run.save(3)
    for number in (4, 5):
        run.save(number)
        checkpoint = cnr.read_checkpoint(run.path(number))
        assert (checkpoint.kind, checkpoint.num_rows) == ("delta", 0)
        run.assert_loads(number)
    goes_on(run)


def test_tensors_of_all_kinds(tmp_path: Path) -> None:
    """Empty tensors, scalars, every dtype, views and gradients: all come back as they were."""
    values: dict[str, Any] = {
        "empty": torch.zeros(0),
        "no rows": torch.zeros(0, 4),
        "no columns": torch.zeros(3, 0),
        "scalar": torch.tensor(3.5),
        "four": torch.randn(2, 3, 4, 5),
        "transposed": torch.randn(5, 4).t(),
        "strided": torch.randn(10, 4)[::2, 1::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "parameter": nn.Parameter(torch.randn(2, 2)),
        "bits": torch.tensor([0x7FC00001, 0x7F800000, -1], dtype=torch.int32).view(torch.float32),
    }
    for dtype in ("float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"):
        values[dtype] = torch.randint(0, 2, (3, 2)).to(getattr(torch, dtype))
    save(values, tmp_path / "0")
    for planner in (cnr.CNRLoadPlanner(), DefaultLoadPlanner()):
        target = {name: torch.full(value.shape, 1).to(value.dtype) for name, value in values.items()}
        target["transposed"] = torch.zeros(5, 4).t()
        dcp.load(target, storage_reader=cnr.CNRStorageReader(tmp_path / "0"), planner=planner)
        assert differing(whole(target), whole(values)) == []


@pytest.mark.parametrize(
    "names",
    [
        ["", " ", "ü", "日本", "a/b", "a\nb", '"', "\\", "a\0b"],
        ["__metadata__", "format", "shape"],
        ["a", "a[0, 0]/0", "a[0, 0]", "a/rows/0"],
        ["x" * 5_000],
    ],
    ids=["characters", "words of the format", "look like blobs", "long"],
)
def test_keys_of_all_kinds(tmp_path: Path, names: list[str]) -> None:
    """Whatever the keys of a state dict, tensors and values come back, and packs are safetensors files."""
    tensors: dict[str, Any] = {name: torch.full((2, 2), float(i)) for i, name in enumerate(names)}
    values = {name: f"value {i}" for i, name in enumerate(names)}
    for number, saved in enumerate((tensors, values, {"tensors": tensors, "values": values})):
        path = tmp_path / str(number)
        save(saved, path)
        target = _emptied(saved)
        load_into(target, path)
        assert differing(whole(target), whole(saved)) == []
        for pack in path.glob("*.safetensors"):
            safetensors.torch.load_file(pack)


def test_an_object_that_is_called_as_its_neighbour_is_stored(tmp_path: Path) -> None:
    """A value whose key looks like the name of a tensor's blob takes nothing from it."""
    saved = {"a": torch.ones(2, 2), "a[0, 0]/0": "value", "__metadata__": "value"}
    save(saved, tmp_path / "0")
    target = _emptied(saved)
    load_into(target, tmp_path / "0")
    assert differing(whole(target), whole(saved)) == []
    for pack in (tmp_path / "0").glob("*.safetensors"):
        safetensors.torch.load_file(pack)


def _emptied(saved: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _emptied(value)
        if isinstance(value, dict)
        else torch.full_like(value, -1)
        if isinstance(value, Tensor)
        else "to be loaded"
        for name, value in saved.items()
    }


# Broken lineages.


def _remove(run: SavingJob, number: int) -> None:
    shutil.rmtree(run.path(number))


def _replace_by_foreign(run: SavingJob, number: int) -> None:
    """Another run's checkpoint, of the same model, under the same name."""
    _remove(run, number)
    with SavingJob(run.root, seed=77) as foreign:
        foreign.save(number)
    forge(run.path(number), lambda body: body.update(created_ns=1 + number))  # older than its child


def _replace_by_sibling(run: SavingJob, number: int) -> None:
    """A checkpoint of the same run under the name of another."""
    _remove(run, number)
    shutil.copytree(run.path(2), run.path(number))


def _damage_manifest(run: SavingJob, number: int) -> None:
    faults.flip_middle(manifest(run, number))


def _empty_manifest(run: SavingJob, number: int) -> None:
    manifest(run, number).write_bytes(b"")


def _remove_manifest(run: SavingJob, number: int) -> None:
    manifest(run, number).unlink()


@pytest.mark.parametrize("number", [0, 1], ids=["baseline", "middle"])
@pytest.mark.parametrize(
    "spoil",
    [_remove, _replace_by_foreign, _replace_by_sibling, _damage_manifest, _empty_manifest, _remove_manifest],
    ids=lambda spoil: spoil.__name__.strip("_").replace("_", " "),
)
def test_a_spoiled_parent_is_refused_and_the_next_save_does_not_build_on_it(
    run: SavingJob, spoil: Callable[[SavingJob, int], None], number: int
) -> None:
    """Loading the head names the parent; a job that still runs saves a checkpoint that loads."""
    spoil(run, number)
    for path in (run.path(2), run.path(1)):
        if path != run.path(number):
            message = load_failure(path)
            assert message.startswith("DamagedError")
            assert run.path(number) in message
    goes_on(run, last=None if number == 0 else 0)


def test_a_lineage_of_links_that_do_not_fit_each_other_is_refused(run: SavingJob, tmp_path: Path) -> None:
    """Digests may be right and yet a parent's table be smaller, or of another dtype: nothing is half filled."""
    for number, change in enumerate((_fewer_rows, _fewer_columns, _other_dtype)):
        root = tmp_path / f"forged-{number}"
        shutil.copytree(run.root, root)
        model = change(plain_job(1, "adagrad").model)
        shutil.rmtree(root / "0")
        saved = state(Job(model, {"all": torch.optim.Adagrad(model.parameters())}, lambda _: None))
        save(saved, root / "0")
        digest = forge(str(root / "0"), lambda body: body.update(created_ns=1))  # a parent is older
        adopt(f"{root}/2", adopt(f"{root}/1", digest))
        message = load_failure(f"{root}/2")
        assert message.startswith("DamagedError")
        assert re.search(r"/0: tensor '(model|all_optimizer)\..* of it; use another checkpoint", message), message
    goes_on(run)


def _fewer_rows(model: nn.Module) -> nn.Module:
    model.bag = nn.EmbeddingBag(30, 4)
    return model


def _fewer_columns(model: nn.Module) -> nn.Module:
    model.bag = nn.EmbeddingBag(40, 3)
    return model


def _other_dtype(model: nn.Module) -> nn.Module:
    return model.half()


# Damaged bytes.


def _files(root: str, number: int) -> list[Path]:
    return sorted(Path(root, str(number)).iterdir())


def test_a_truncated_pack_is_refused(run: SavingJob) -> None:
    """A pack that is short by one byte, half gone, or gone: the error names it."""
    for number in (0, 2):
        (pack,) = (file for file in _files(run.root, number) if file.suffix == ".safetensors")
        content = pack.read_bytes()
        for size in (len(content) - 1, len(content) // 2, 100, 4, 0, None):
            if size is None:
                pack.unlink()
            else:
                pack.write_bytes(content[:size])
            message = load_failure(run.path(2)) if number == 2 else load_failure(run.path(0))
            assert message.startswith("DamagedError")
            assert str(pack) in message
            pack.write_bytes(content)
    goes_on(run)


def _flip_bits(root: str, head: Whole, seed: int, num_flips: int) -> None:
    """Flip bits all over a lineage, one at a time, as many in each file."""
    files = [(number, file) for number in range(3) for file in _files(root, number)]
    assert len(files) == 6
    rng = random.Random(seed)
    target = plain_job(99, "adagrad")
    for index in range(num_flips):
        number, file = files[index % len(files)]
        size = file.stat().st_size
        # Every file's first bytes, its header's length for one, are worth a look each.
        bit = rng.randrange(8 * min(size, 16)) if index % 4 == 0 else rng.randrange(8 * size)
        faults.flip(file, bit // 8, bit % 8)
        where = f"bit {bit} of {file}"
        message = load_failure(f"{root}/{number}", target=state(target))
        assert message.startswith(("DamagedError", "VersionError")), where
        assert str(file) in message, where
        _load_head_or_refuse(root, file, head, where)
        faults.flip(file, bit // 8, bit % 8)


def _load_head_or_refuse(root: str, file: Path, expected: Whole, where: str) -> None:
    """What a newer checkpoint holds anew is not read from older ones: then the head is right; else it is refused."""
    job = plain_job(98, "adagrad")
    try:
        got = models.load(job, f"{root}/2")
    except CheckpointException as error:
        (cause,) = faults.causes(error).values()
        assert isinstance(cause, cnr.DamagedError), where
        assert str(file) in str(cause), where
    else:
        assert file.suffix == ".safetensors", where
        assert differing(got, expected) == [], where


def test_a_flipped_bit_is_noticed(run: SavingJob) -> None:
    """One flipped bit anywhere in manifests and packs, headers too: the checkpoint is refused, the file is named."""
    _flip_bits(run.root, run.saved["2"], seed=1, num_flips=150)
    goes_on(run)


@pytest.mark.slow
def test_many_flipped_bits_are_noticed(run: SavingJob) -> None:
    """As above, at 1,000 places that change from run to run."""
    _flip_bits(run.root, run.saved["2"], seed=random.randrange(10**9), num_flips=1_000)
    goes_on(run)


# Hostile checkpoints: every digest is right.


@pytest.mark.parametrize("version", [VERSION + 1, 999])
@pytest.mark.parametrize("number", [2, 0], ids=["head", "parent"])
def test_another_format_version_is_a_version_error(run: SavingJob, version: Any, number: int) -> None:
    """A manifest of another version, with whatever a later version may have in it, is named as such."""
    shutil.copytree(run.root, run.root + "-kept")

    def change(body: dict[str, Any]) -> None:
        body["version"] = version
        body["codebooks"] = []

    digest = forge(run.path(number), change)
    if number == 0:
        adopt(run.path(2), adopt(run.path(1), digest))
    message = load_failure(run.path(2))
    assert message.startswith("VersionError")
    assert run.path(number) in message
    assert "upgrade" in message
    shutil.rmtree(run.root)
    shutil.move(run.root + "-kept", run.root)
    goes_on(run)


def _leave_mark(path: str) -> str:
    Path(path).write_text("code ran")
    return path


class _Evil:
    """Unpickled, it runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        return _leave_mark, (str(self.path),)


def test_a_pickle_that_would_run_code_runs_none(run: SavingJob, tmp_path: Path) -> None:
    """A checkpoint made by hand, with code in an object: refused by every way to load, and nothing ran."""
    mark = tmp_path / "mark"
    path = str(tmp_path / "evil")
    with torch.serialization.safe_globals([_leave_mark]):  # the hand that makes it
        save(run.job, path + "-harmless", cnr.CNRSavePlanner(run.tracker, policy=cnr.Full()))
        evil = state(run.job, batch=_Evil(mark))
        save(evil, path)
    mark.unlink()
    target = state(plain_job(2, "adagrad"), batch=None)
    for planner in (cnr.CNRLoadPlanner(), DefaultLoadPlanner()):
        message = load_failure(path, planner, target)
        assert message.startswith("DamagedError")
        assert "reader.batch" in message
        assert not mark.exists()
    cause = faults.failure_of(lambda: _load_state_dict_from_keys(storage_reader=cnr.CNRStorageReader(path)))
    assert isinstance(cause, cnr.DamagedError)
    assert not mark.exists()
    goes_on(run)


def _replace_bytes(pack: Path, offset: int, content: bytes) -> int:
    """Put other bytes in a blob's place; their digest."""
    with pack.open("r+b") as file:
        file.seek(offset)
        file.write(content)
    return int(google_crc32c.value(content))


def _fuzz_object(path: str, seed: int, num_changes: int) -> None:
    """Change an object's pickle at random, digests being right: loads, or one of our errors."""
    file = Path(path, "manifest.json")
    body = json.loads(file.read_bytes())["manifest"]
    blob = body["objects"]["reader.seen"]
    name = body["packs"][blob[0]][1]
    original = Path(path, name).read_bytes()[blob[1] : blob[1] + blob[2]]
    start = original.index(b"data.pkl") + 8
    rng = random.Random(seed)
    for number in range(num_changes):
        content = bytearray(original)
        for _ in range(rng.randrange(1, 4)):
            # Most of the file is the frame of a zip archive; the pickle lies behind the first name.
            place = rng.randrange(start, start + 120) if number % 2 else rng.randrange(len(content))
            content[place] = rng.randrange(256)
        blob[3] = _replace_bytes(Path(path, name), blob[1], bytes(content))
        write_manifest(file, body)
        _loads_or_is_refused(path, {"reader": {"seen": None}}, f"change {number} of seed {seed}")


def _loads_or_is_refused(path: str, target: dict[str, Any], where: str) -> None:
    reader = cnr.CNRStorageReader(path)
    try:
        dcp.load(target, storage_reader=reader, planner=cnr.CNRLoadPlanner(allow_partial_load=True))
    except CheckpointException as error:
        for cause in faults.causes(error).values():
            assert isinstance(cause, cnr.CNRError), f"{where}: {cause!r}"


def _save_values(path: str) -> None:
    seen = [1, 2.5, "three", {"four": (5, None, True)}, b"six", torch.ones(2)]
    saved = {"reader": {"seen": tuple(seen)}}  # a tuple is one object to DCP
    save(saved, path)


def test_a_changed_pickle_is_refused_or_loads(tmp_path: Path) -> None:
    """Whatever the bytes of an object, its digest being right: one of our errors, or a value; no other error."""
    _save_values(f"{tmp_path}/0")
    _fuzz_object(f"{tmp_path}/0", seed=1, num_changes=200)


@pytest.mark.slow
def test_many_changed_pickles_are_refused_or_load(tmp_path: Path) -> None:
    """As above, with changes that differ from run to run."""
    _save_values(f"{tmp_path}/0")
    _fuzz_object(f"{tmp_path}/0", seed=random.randrange(10**9), num_changes=5_000)


_HOSTILE: list[Any] = [
    None, True, -1, 0, 1, 7, 2**31, 2**40, 2**62, 2**63, 2**70, 1.5, "", "..", "../..", "/etc/passwd", "none", "int8",
    "float64", "x" * 1000, "\0", [], {}, [[]], [0], [[0, 0], [2**31, 2**31]], [1, 2, 3, 4],
    {"name": "asymmetric", "bits": 4},
]  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value within a JSON value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key)
            yield from _places(inner, (*path, key))


def _fuzz_manifest(run: SavingJob, number: int, seed: int, num_changes: int) -> None:
    """Replace, drop, swap and repeat values of a manifest, digests being right: loads, or one of our errors."""
    original = manifest(run, number).read_bytes()
    kept = {child: manifest(run, child).read_bytes() for child in range(3)}
    target = plain_job(98, "adagrad")
    for body in _changed_bodies(original, seed, num_changes):
        digest = write_manifest(manifest(run, number), body)
        for child in range(number + 1, 3):
            digest = adopt(run.path(child), digest)
        changed = manifest(run, number).read_text()
        _loads_or_is_refused(run.path(2), state(target), changed[:3_000])
        for child, content in kept.items():
            manifest(run, child).write_bytes(content)


def _fuzz_replacement(run: SavingJob, number: int, base: str | None, seed: int, num_changes: int) -> None:
    """As above, with the manifest that a checkpoint's lineage was folded into."""
    replaces = replace_manifest(Path(run.path(number)), base).replaces
    file = Path(run.path(number), f"manifest-{replaces}.json")
    original = file.read_bytes()
    target = plain_job(98, "adagrad")
    for body in _changed_bodies(original, seed, num_changes):
        write_manifest(file, body)
        _loads_or_is_refused(run.path(2), state(target), file.read_text()[:3_000])
    file.write_bytes(original)


def _changed_bodies(original: bytes, seed: int, num_changes: int) -> Iterator[Any]:
    places = list(_places(json.loads(original)["manifest"]))
    rng = random.Random(seed)
    for _ in range(num_changes):
        body = json.loads(original)["manifest"]
        for _ in range(rng.choice([1, 1, 2])):
            _change_somewhere(body, places, rng)
        yield body


def _change_somewhere(body: Any, places: list[tuple[Any, ...]], rng: random.Random) -> None:
    *path, last = rng.choice(places)
    holder = body
    try:
        for key in path:
            holder = holder[key]
        match rng.randrange(5):
            case 0:
                del holder[last]
            case 1 if isinstance(holder[last], int):
                holder[last] += rng.choice([-1, 1, 8, 4096])
            case 2 if isinstance(holder, list):
                other = rng.randrange(len(holder))
                holder[last], holder[other] = holder[other], holder[last]
            case 3 if isinstance(holder, list):
                holder.append(holder[last])
            case _:
                holder[last] = rng.choice(_HOSTILE)
    except (KeyError, IndexError, TypeError):
        pass  # an earlier change took the place away


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_forged_manifest_is_refused_or_loads(run: SavingJob, number: int) -> None:
    """Whatever a manifest says, its digest being right: one of our errors, or a load; no other error."""
    _fuzz_manifest(run, number, seed=number, num_changes=150)
    goes_on(run)


@pytest.mark.parametrize(("number", "base"), [(1, None), (2, None), (2, "0")])
def test_a_forged_replacement_is_refused_or_loads(run: SavingJob, number: int, base: str | None) -> None:
    """So too with a replacement, of the head or of its parent; and who stands on the head goes on."""
    _fuzz_replacement(run, number, base, seed=number, num_changes=150)
    goes_on(run)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "base"), [(1, None), (2, None), (2, "0")])
def test_many_forged_replacements_are_refused_or_load(run: SavingJob, number: int, base: str | None) -> None:
    """As above, with changes that differ from run to run."""
    _fuzz_replacement(run, number, base, seed=random.randrange(10**9), num_changes=2_000)
    goes_on(run)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2])
def test_many_forged_manifests_are_refused_or_load(run: SavingJob, number: int) -> None:
    """As above, with changes that differ from run to run."""
    _fuzz_manifest(run, number, seed=random.randrange(10**9), num_changes=4_000)
    goes_on(run)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "no complete manifest"),
        (b"{}\n", "no complete manifest"),
        (b"\x80\x04]q\x00.", "no complete manifest"),
        (None, "not JSON"),
        (b"null", "not a manifest"),
        (b'{"format":"another"}', "not a manifest"),
        (b'{"format":"torchrec_cnr","version":2}', "keys"),
        (b'{"format":"torchrec_cnr","version":3}', "keys"),
        (b"[" * 100_000 + b"]" * 100_000, "not JSON"),
        (b'{"format":"torchrec_cnr","version":' + b"9" * 10_000 + b"}", ""),
    ],
)
def test_a_file_that_is_no_manifest_is_refused(run: SavingJob, text: bytes | None, words: str) -> None:
    """Nothing, a pickle, other JSON, JSON to break parsers with: refused, with the file's name."""
    body = b"\xff\xfe" if text is None else text
    framed = b'{"sha256":"%s","manifest":%s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)
    manifest(run, 2).write_bytes(text if text is not None and words == "no complete manifest" else framed)
    message = load_failure(run.path(2))
    assert message.startswith("DamagedError" if words else ("DamagedError", "VersionError"))
    assert str(manifest(run, 2)) in message
    assert words in message
    goes_on(run, last=1)


def test_loading_from_a_damaged_checkpoint_by_keys_is_a_typed_error(run: SavingJob) -> None:
    """DCP's way to load without a target gets the same errors."""
    faults.flip_middle(manifest(run, 2))
    cause = faults.failure_of(lambda: _load_state_dict_from_keys(storage_reader=cnr.CNRStorageReader(run.path(2))))
    assert isinstance(cause, cnr.DamagedError)
    assert str(manifest(run, 2)) in str(cause)
    cause = faults.failure_of(lambda: _load_state_dict_from_keys(storage_reader=cnr.CNRStorageReader(run.path(9))))
    assert isinstance(cause, cnr.CheckpointNotFoundError)


def test_errors_survive_the_way_between_ranks() -> None:
    """DCP pickles what a rank raised: type and message are still there on the others."""
    for name in cnr.__all__:
        kind = getattr(cnr, name)
        if isinstance(kind, type) and issubclass(kind, cnr.CNRError):
            copy = torch.load(io.BytesIO(_saved(kind("what, where"))), weights_only=False)
            assert type(copy) is kind
            assert str(copy) == "what, where"


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_a_file_system_that_refuses_to_be_read_is_a_store_error(run: SavingJob) -> None:
    """A manifest that is a directory stands for what cannot be read, though it is there."""
    content = manifest(run, 2).read_bytes()
    manifest(run, 2).unlink()
    os.mkdir(manifest(run, 2))
    assert load_failure(run.path(2)).startswith("StoreError")
    os.rmdir(manifest(run, 2))
    manifest(run, 2).write_bytes(content)
    goes_on(run)

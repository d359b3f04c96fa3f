"""Wrong calls of a save, and unusual contents: a typed error that helps, and nothing is lost by it."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

import torchrec_cnr as cnr
from tests.loading.bad_input.mishaps import goes_on
from tests.support import faults, models
from tests.support.jobs import SavingJob, load_into, save
from tests.support.models import Job, differing, plain_job, state, torchrec_job, train, whole
from tests.support.ranks import RankPools

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


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
    for planner in (cnr.CNRSavePlanner(run.tracker), cnr.CNRSavePlanner()):
        stock = dcp.FileSystemWriter(tmp_path / "stock")
        cause = faults.failure_of(partial(dcp.save, state(run.job), storage_writer=stock, planner=planner))
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
    ("value", "why"),
    [(DeviceMesh.__new__(DeviceMesh), "DeviceMesh"), (bytearray(b"\xff" * 9), None), ({1: Replicate()}, None)],
    ids=["mesh", "bytes", "placement"],
)
def test_an_object_that_acts_when_it_is_rebuilt_is_refused_at_save(run: SavingJob, value: Any, why: str | None) -> None:
    """A mesh of devices would start torch.distributed where it is loaded; plain values of other types are stored."""
    saved = state(run.job, value=value)
    if why is None:
        save(saved, run.path(3), run.planner)
        assert cnr.latest(run.root) == run.path(3)
        return
    cause = faults.failure_of(lambda: save(saved, run.path(3), run.planner))
    assert isinstance(cause, cnr.ConfigurationError)
    assert "reader.value" in str(cause)
    assert why in str(cause)
    goes_on(run)


@pytest.mark.parametrize(
    "value",
    [torch.zeros(2, dtype=torch.complex64), torch.eye(3).to_sparse(), torch.zeros(2).to(torch.float8_e4m3fn)],
    ids=["complex", "sparse", "float8"],
)
def test_a_tensor_that_cannot_be_stored_is_refused_at_save(run: SavingJob, value: Tensor) -> None:
    """Tensors of other layouts and dtypes: the error names the tensor and what it is."""
    saved = state(run.job, value=value)
    cause = faults.failure_of(lambda: dcp.save(saved, storage_writer=models.writer(run.path(3)), planner=run.planner))
    assert isinstance(cause, cnr.ConfigurationError)
    assert "reader.value" in str(cause)
    goes_on(run)


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

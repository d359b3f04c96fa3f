"""Modes of torch that a training script sets for everything: a default device, inference mode, default dtypes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchrec_cnr as cnr
from tests.support.jobs import SavingJob
from tests.support.models import plain_job, state, whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
POLICIES = [cnr.Consecutive(), cnr.Compacted(), cnr.OneShot()]


@contextmanager
def _default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device("cpu")


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("quantization", [cnr.NoQuantization(), cnr.Asymmetric(4), cnr.KMeans(4)], ids=repr)
def test_saves_and_loads_under_another_default_device(
    tmp_path: Path, policy: cnr.Policy, quantization: cnr.Scheme
) -> None:
    """Tensors of the library say where they lie, whatever the default is: 'meta' shows each that does not."""
    job = SavingJob(tmp_path, policy=policy, quantization=quantization)
    for step in range(3):
        job.train()
        live = state(job.job)
        job.saved[str(step)] = whole(live)
        options: dict[str, Any] = {"storage_writer": job.writer, "planner": job.planner}
        with _default_device("meta"):
            if step % 2:
                dcp.async_save(live, checkpoint_id=job.path(step), **options).result()  # type: ignore[union-attr]
            else:
                dcp.save(live, checkpoint_id=job.path(step), **options)
    with _default_device("meta"):
        job.restore(2)
        cnr.verify(job.path(2))
        cnr.load_table(job.path(2), next(iter(cnr.read_checkpoint(job.path(2)).manifest.tensors)))
    job.restart(1)  # torch's own optimizers make state on the default device when it is loaded
    job.train_and_save(3)
    if isinstance(quantization, cnr.NoQuantization):
        for step in range(4):
            job.assert_loads(step)
    job.close()


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_saves_inside_inference_mode(tmp_path: Path, policy: cnr.Policy) -> None:
    """A save inside ``torch.inference_mode`` makes no tensors that later saves cannot change."""
    job = SavingJob(tmp_path, policy=policy)
    for step in range(8):
        job.train()
        with torch.inference_mode(step % 4 < 2):
            if step % 2:
                job.async_save(step).result(timeout=60)
            else:
                job.save(step)
    for step in range(8):
        job.assert_loads(step)
    with torch.inference_mode():
        job.restore(7)
    job.train_and_save(8)
    job.assert_loads(8)
    job.close()


def test_tables_without_columns(tmp_path: Path) -> None:
    """Deltas of a table with no columns hold nothing of it, and load."""
    model = torch.nn.ModuleDict({"a": torch.nn.EmbeddingBag(10, 0), "b": torch.nn.EmbeddingBag(10, 4)})
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    writer = cnr.CNRStorageWriter(tmp_path / "unused", quantization=cnr.Asymmetric(4))
    for step in range(3):
        tracker.mark("a", torch.tensor([step]))
        tracker.mark("b", torch.tensor([step]))
        dcp.save(model.state_dict(), checkpoint_id=str(tmp_path / str(step)), storage_writer=writer, planner=planner)
        future = dcp.async_save(
            model.state_dict(), checkpoint_id=str(tmp_path / f"{step}b"), storage_writer=writer, planner=planner
        )
        future.result()  # type: ignore[union-attr]
    found = {fqn: torch.zeros_like(value) for fqn, value in model.state_dict().items()}
    dcp.load(found, storage_reader=cnr.CNRStorageReader(tmp_path / "2b"))
    assert found["a.weight"].shape == (10, 0)
    tracker.close()


def test_views_of_another_dtype_are_stored_as_what_they_are(tmp_path: Path) -> None:
    """Two tensors over one memory, of two dtypes, in one asynchronous save of a tracked job."""
    job = plain_job(1)
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker)
    floats = torch.randn(6)
    live = {"model": job.model.state_dict(), "floats": floats, "ints": floats.view(torch.int32)}
    writer = cnr.CNRStorageWriter(tmp_path / "0")
    dcp.async_save(live, storage_writer=writer, planner=planner).result()  # type: ignore[union-attr]
    found = {"floats": torch.zeros(6), "ints": torch.zeros(6, dtype=torch.int32)}
    dcp.load(found, storage_reader=cnr.CNRStorageReader(tmp_path / "0"))
    assert torch.equal(found["floats"], floats)
    assert torch.equal(found["ints"], floats.view(torch.int32))
    tracker.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_expanded_tensors_are_quantized(tmp_path: Path, is_async: bool) -> None:
    """A tensor whose rows lie in one memory is quantized as any other."""
    live = {"w": torch.randn(1, 8).expand(5, 8), "v": torch.randn(5, 1).expand(5, 8)}
    writer = cnr.CNRStorageWriter(tmp_path / "0", quantization={"*": cnr.Asymmetric(8)})
    if is_async:
        dcp.async_save(live, storage_writer=writer).result()  # type: ignore[union-attr]
    else:
        dcp.save(live, storage_writer=writer)
    found = {fqn: torch.zeros(5, 8) for fqn in live}
    dcp.load(found, storage_reader=cnr.CNRStorageReader(tmp_path / "0"))
    for fqn, value in live.items():
        assert torch.allclose(found[fqn], value, atol=0.02)
        assert not torch.equal(found[fqn], torch.zeros(5, 8))

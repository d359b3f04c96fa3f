"""Which tensors are quantized by which scheme."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import torchrec_cnr as cnr
from tests.quantization.bounds import assert_close
from tests.support import models
from tests.support.models import Job, differing, plain_job, state, train, whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def test_patterns_choose_schemes_for_any_tensor(tmp_path: Path) -> None:
    """A mapping sets schemes by FQN, tables or not; the first match wins, and what none matches is exact."""
    job = plain_job(1, "adagrad", dims=(8, 8))
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    schemes: Mapping[str, cnr.Scheme] = {
        "*.bag.weight": cnr.Asymmetric(4),
        "*optimizer.state.0.sum": cnr.Asymmetric(8),
        "model.over.weight": cnr.Asymmetric(2),
        "model.*": cnr.NoQuantization(),
        "*.item.weight": cnr.Asymmetric(2),  # comes too late
    }
    bits = {"model.bag.weight": 4, "all_optimizer.state.0.sum": 8, "model.over.weight": 2}
    for number in range(3):
        train(job, number)
        cut = whole(state(job))
        writer = models.writer(tmp_path / str(number), quantization=schemes)
        dcp.save(state(job), storage_writer=writer, planner=planner)
        got = models.load(_wide_job(), str(tmp_path / str(number)))
        assert set(differing(got, cut)) == set(bits)
        for fqn, num_bits in bits.items():
            assert_close(got[fqn], cut[fqn], num_bits)
    tracker.close()


def _wide_job() -> Job:
    return plain_job(9, "adagrad", dims=(8, 8))


def test_what_a_scheme_does_not_know_is_exact(tmp_path: Path) -> None:
    """A pattern may match integers, fp64 and scalars: they come back as they were."""
    saved: dict[str, Any] = {
        "int64": torch.arange(6).view(2, 3),
        "float64": torch.randn(2, 3, dtype=torch.float64),
        "bool": torch.tensor([True, False]),
        "value": 1.5,
    }
    writer = models.writer(tmp_path / "0", quantization={"*": cnr.Asymmetric(4)})
    dcp.save(saved, storage_writer=writer, planner=cnr.CNRSavePlanner())
    target = {fqn: torch.zeros_like(value) if isinstance(value, Tensor) else None for fqn, value in saved.items()}
    dcp.load(target, storage_reader=cnr.CNRStorageReader(tmp_path / "0"), planner=cnr.CNRLoadPlanner())
    assert differing(whole(target), whole(saved)) == []


@pytest.mark.parametrize("shape", [(), (7,), (0, 4), (3, 0), (2, 3, 5), (1, 1)])
def test_tensors_of_any_shape_can_be_quantized(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Scalars, vectors, empty tensors and more than two dimensions keep their shape."""
    torch.manual_seed(1)
    saved = {"value": torch.randn(shape)}
    writer = models.writer(tmp_path / "0", quantization={"*": cnr.Asymmetric(8)})
    dcp.save(saved, storage_writer=writer, planner=cnr.CNRSavePlanner())
    target = {"value": torch.full(shape, -3.0)}
    dcp.load(target, storage_reader=cnr.CNRStorageReader(tmp_path / "0"), planner=cnr.CNRLoadPlanner())
    assert target["value"].shape == shape
    if saved["value"].numel():
        rows = len(saved["value"]) if shape else 1
        assert_close(target["value"].reshape(rows, -1), saved["value"].reshape(rows, -1), 8)


def test_a_pattern_that_matches_nothing_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the names that are most like it; a pattern that comes too late matches."""
    saved = {"model": {"bag.weight": torch.randn(4, 4), "head.bias": torch.randn(4)}}
    schemes = {"model.bags.weight": cnr.Asymmetric(4), "model.*": cnr.NoQuantization(), "*.bias": cnr.NoQuantization()}
    writer = models.writer(tmp_path / "0", quantization=schemes)
    for number in range(2):
        dcp.save(saved, checkpoint_id=tmp_path / str(number), storage_writer=writer, planner=cnr.CNRSavePlanner())
    (told,) = [record.getMessage() for record in caplog.records if "no tensor matches" in record.getMessage()]
    assert "'model.bags.weight'; most similar: 'model.bag.weight'" in told

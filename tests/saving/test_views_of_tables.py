"""Views in a state dict that read memory of its other tensors in another way: each is saved as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import torchrec_cnr as cnr
from tests.support.jobs import SavingJob
from tests.support.models import plain_job

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _save(job: SavingJob, live: dict[str, Tensor], name: str, is_async: bool) -> None:
    options: dict[str, Any] = {"storage_writer": job.writer, "planner": job.planner, "no_dist": True}
    if is_async:
        dcp.async_save(live, checkpoint_id=job.path(name), **options).result(timeout=60)  # type: ignore[union-attr]
    else:
        dcp.save(live, checkpoint_id=job.path(name), **options)


def _loaded(path: str, live: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {fqn: torch.zeros_like(value) for fqn, value in live.items()}
    dcp.load(found, storage_reader=cnr.CNRStorageReader(path), no_dist=True)
    return found


@pytest.mark.parametrize("is_async", [False, True])
def test_a_view_of_another_dtype_is_no_table(tmp_path: Path, is_async: bool) -> None:
    """The table stays one, and is quantized, although the view has the first name and is stored exactly."""
    with SavingJob(tmp_path, plain_job, quantization=cnr.Asymmetric(4)) as job:
        weight = job.job.model.state_dict()["bag.weight"]
        live = {"bits": weight.view(torch.int32), **job.job.model.state_dict()}
        for name in ("0", "1"):
            job.train()
            _save(job, live, name, is_async)
            tensors = cnr.read_checkpoint(job.path(name)).manifest.tensors
            assert (tensors["bits"].is_table, tensors["bag.weight"].is_table) == (False, True)
            found = _loaded(job.path(name), live)
            assert torch.equal(found["bits"], live["bits"])
            assert not torch.equal(found["bag.weight"], weight)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_view_of_negated_values_has_its_own(tmp_path: Path, is_async: bool) -> None:
    """Torch negates lazily: a bit of the view says that its values are those in memory with the other sign."""
    with SavingJob(tmp_path, plain_job) as job:
        values = torch.randn(3, dtype=torch.cfloat)
        live = {**job.job.model.state_dict(), "plus": values.imag, "minus": values.conj().imag}
        _save(job, live, "0", is_async)
        found = _loaded(job.path("0"), live)
        assert {fqn for fqn, value in live.items() if not torch.equal(found[fqn], value)} == set()

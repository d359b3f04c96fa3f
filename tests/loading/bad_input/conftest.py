"""A job that something happens to."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import torchrec_cnr as cnr
from tests.support.jobs import SavingJob


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SavingJob]:
    """A job with three checkpoints, a baseline, a delta, and a delta of that, which has been trained since."""
    with SavingJob(tmp_path / "run") as run:
        run.train_and_save(0, 1, 2)
        assert [cnr.read_checkpoint(run.path(number)).kind for number in range(3)] == ["baseline", "delta", "delta"]
        run.train()
        yield run

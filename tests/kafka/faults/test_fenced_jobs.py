"""Jobs that were thought dead commit nothing to Kafka."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import torchrec_cnr as cnr
from tests.support import faults
from tests.support.jobs import SavingJob
from tests.support.kafka_jobs import (
    marked,
)
from tests.support.killing import in_child
from tests.support.models import train
from torchrec_cnr.kafka.marker_topic import MarkerTopic

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LIMIT_SECS = 100.0  # of processes that import torch


# Jobs that were thought dead


def _be_zombie(root: str, rows: cnr.KafkaRows, moment: str) -> str:
    """Save, and stop in the next save at a moment until a successor has saved; how that save ends."""
    job = SavingJob(root, row_log=rows)
    job.train_and_save("0", "1")
    owner, name = {
        "begin": (cnr.KafkaRows, "begin"),
        "rows": (cnr.KafkaRows, "target"),
        "check": (cnr.KafkaRows, "mark"),
        "marker": (MarkerTopic, "put"),
    }[moment]
    original = getattr(owner, name)

    def stop(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, original)
        Path(root, "stopped").touch()
        faults.wait_for(Path(root, "succeeded"))
        return original(*args, **kwargs)

    setattr(owner, name, stop)
    train(job.job, 8)
    cause = job.failure("zombie")
    return type(cause).__name__


def _succeed(root: str, rows: cnr.KafkaRows) -> None:
    faults.wait_for(Path(root, "stopped"))
    job = SavingJob(root, row_log=rows, seed=3)
    assert job.restore() == "1"
    train(job.job, 9)
    job.save("2")
    Path(root, "succeeded").touch()
    for number in range(3, 8):
        train(job.job, number)
        job.save(str(number))
    job.assert_loads("7")


@pytest.mark.parametrize("moment", [pytest.param("begin", marks=pytest.mark.slow), "rows", "check", "marker"])
def test_a_zombie_commits_nothing(tmp_path: Path, rows: cnr.KafkaRows, moment: str) -> None:
    """Wherever it stopped: it is fenced, its marker never comes, and its successor saves as if it were alone."""
    root = str(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        zombie = threads.submit(in_child, _be_zombie, root, rows, moment)
        successor = threads.submit(in_child, _succeed, root, rows)
        assert successor.result(LIMIT_SECS) is None
        assert zombie.result(LIMIT_SECS) == "FencedError"
    assert marked(rows) == [*"01234567"]
    assert cnr.latest(root, row_log=rows) == f"{root}/7"
    assert not (tmp_path / "zombie/manifest.json").exists()

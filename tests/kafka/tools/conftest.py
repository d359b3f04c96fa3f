"""Runs with rows in Kafka."""

import uuid
from pathlib import Path

import pytest

import torchrec_cnr as cnr
from tests.kafka.tools.logged_runs import NAMES, LoggedRun
from tests.servers.kafka_server import Broker
from tests.support import runs


@pytest.fixture(scope="session")
def run(kafka: Broker, tmp_path_factory: pytest.TempPathFactory) -> LoggedRun:
    """A baseline and two deltas, whose rows are in Kafka, cut into small records; tests leave it as it is."""
    root = tmp_path_factory.mktemp("logged")
    rows = cnr.KafkaRows(kafka.bootstrap, f"rows-{uuid.uuid4().hex}", num_partitions=2, part_bytes=200)
    held = runs.save_run(root, NAMES, quantization=cnr.Asymmetric(8), row_log=rows)
    found = LoggedRun(root, rows, dict(zip(NAMES, held, strict=True)))
    assert [len(found.packs_in_log(name)) for name in NAMES] == [0, 1, 1]
    return found


@pytest.fixture
def died(run: LoggedRun, tmp_path: Path) -> LoggedRun:
    """Another run, whose job died when the marker of its last checkpoint was there, and the manifest's name was not."""
    runs.save_run(tmp_path / "died", NAMES, quantization=cnr.Asymmetric(8), row_log=run.rows)
    found = LoggedRun(tmp_path / "died", run.rows, {})
    found.unpublish("step-3")
    return found

"""Models in service follow a job whose rows go through Kafka: its markers wake them up."""

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from confluent_kafka import TopicPartition
from torch import nn

import torchrec_cnr as cnr
from tests.servers.kafka_server import Broker
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.kafka import KafkaRows
from torchrec_cnr.lineage.marker_commit import uncommitted_name
from torchrec_cnr.serving.commit_sources import MarkerCommits
from torchrec_cnr.storage.row_log import root_id

pytestmark = pytest.mark.long

SECS = 60.0


class KafkaJob:
    """A table that is trained, and saved through Kafka."""

    def __init__(self, root: Path, rows: KafkaRows) -> None:
        self.root = root
        self.rows = rows
        self.model = nn.EmbeddingBag(2000, 16, mode="sum", sparse=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.planner = cnr.CNRSavePlanner(cnr.RowTracker(self.model), policy=cnr.Consecutive())
        self.writer = cnr.CNRStorageWriter(root / "step-0", row_log=rows)

    def save(self, step: int) -> None:
        """Train some rows, and save."""
        self.model(torch.randint(2000, (300,)), torch.arange(0, 300, 10)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        state: dict[str, Any] = {"model": self.model.state_dict()}
        path = str(self.root / f"step-{step}")
        dcp.save(state, checkpoint_id=path, storage_writer=self.writer, planner=self.planner, no_dist=True)


@pytest.fixture
def job(kafka: Broker, tmp_path: Path) -> KafkaJob:
    topic = f"serving-{root_id(str(tmp_path))}"
    return KafkaJob(tmp_path / "run", KafkaRows(kafka.bootstrap, topic, timeout_secs=20))


def test_markers_wake_a_subscriber_up(job: KafkaJob) -> None:
    """Each delta is served long before the next look at the root is due; what is looked up is what was trained."""
    job.save(0)
    served = nn.EmbeddingBag(2000, 16, mode="sum")
    woken = threading.Semaphore(0)
    with cnr.RowSubscriber(
        served, job.root, row_log=job.rows, interval_secs=10 * SECS, on_applied=lambda _: woken.release()
    ) as subscriber:
        assert woken.acquire(timeout=SECS)
        for step in range(1, 4):
            before = served.weight.detach().clone()
            job.save(step)
            assert woken.acquire(timeout=SECS)
            assert str(subscriber.applied).endswith(f"step-{step}")
            assert subscriber.lag.num_checkpoints == 0
            assert torch.equal(served.weight, job.model.weight)
            assert not torch.equal(served.weight, before)


def test_what_a_marker_has_committed_is_applied_before_its_manifest_has_its_name(job: KafkaJob) -> None:
    """A job that dies behind its marker leaves a checkpoint that is served all the same."""
    job.save(0)
    job.save(1)
    last = job.root / "step-1"
    save_id = cnr.read_checkpoint(last).committed.save_id
    (last / MANIFEST_FILE).rename(last / uncommitted_name(save_id))
    served = nn.EmbeddingBag(2000, 16, mode="sum")
    with cnr.RowSubscriber(served, job.root, row_log=job.rows) as subscriber:
        assert str(subscriber.applied).endswith("step-1")
        assert torch.equal(served.weight, job.model.weight)
    assert (last / MANIFEST_FILE).exists()


def test_markers_of_other_roots_are_not_ours(job: KafkaJob, tmp_path: Path) -> None:
    """Two jobs may share a topic: a follower of one looks at its own root only."""
    other = KafkaJob(tmp_path / "other", job.rows)
    job.save(0)
    commits = MarkerCommits(job.root, job.rows)
    assert [Path(commit.path).name for commit in commits.newest_first()] == ["step-0"]
    other.save(7)
    commits.wait(SECS)
    assert [Path(commit.path).name for commit in commits.newest_first()] == ["step-0"]
    commits.close()


def test_a_wait_ends_when_it_is_closed(job: KafkaJob) -> None:
    """No marker comes, and nobody waits for it any longer."""
    job.save(0)
    commits = MarkerCommits(job.root, job.rows)
    commits.newest_first()
    waiting = threading.Thread(target=commits.wait, args=(100 * SECS,), daemon=True)
    waiting.start()
    commits.close()
    waiting.join(SECS)
    assert not waiting.is_alive()


def test_a_follower_waits_although_retention_has_removed_all_markers(job: KafkaJob, kafka: Broker) -> None:
    """A job that rests longer than its markers are kept: a look at the root is not followed by another at once."""
    job.save(0)
    cut = TopicPartition(f"{job.rows.topic}-markers", 0, job.rows.end())
    admin = kafka.admin()
    admin.delete_records([cut])[cut].result(SECS)
    commits = MarkerCommits(job.root, job.rows)
    asked: list[int] = []
    for _ in range(2):
        assert [Path(commit.path).name for commit in commits.newest_first()] == ["step-0"]
        with mock.patch.object(KafkaRows, "markers_from", lambda _, offset, *rest: asked.append(offset) or ()):
            commits.wait(0.2)
    assert asked == [cut.offset] * 4
    job.save(1)
    commits.wait(SECS)
    assert [Path(commit.path).name for commit in commits.newest_first()] == ["step-1", "step-0"]
    commits.close()

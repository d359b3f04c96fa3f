"""A job with rows in a compacted topic."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kafka.compacted.topic_jobs import TopicJob, compacted
from tests.servers.kafka_server import Broker


@pytest.fixture
def run(tmp_path: Path, kafka: Broker) -> Iterator[TopicJob]:
    """A job whose first checkpoint, a baseline, is committed."""
    with TopicJob(tmp_path, compacted(kafka)) as found:
        found.commit()
        yield found

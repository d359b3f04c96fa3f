"""Jobs with rows in a topic that the broker compacts as soon as it can."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

import torchrec_cnr as cnr
from tests.servers.kafka_server import Broker
from tests.support import faults, models
from tests.support.jobs import SavingJob
from tests.support.models import Whole, differing, plain_job
from torchrec_cnr.format.manifest import Pack
from torchrec_cnr.kafka import KafkaRows
from torchrec_cnr.kafka.connection import KafkaLog
from torchrec_cnr.lineage.checkpoint import read_checkpoint
from torchrec_cnr.policies import Policy

SECS = 40.0
EAGER = {
    "cleanup_policy": "compact",
    "segment_ms": 100,
    "min_cleanable_dirty_ratio": 0.01,
    "delete_retention_ms": 100,
}
BLOCK_BYTES = 64  # four rows of the larger table, five of the smaller one
PART_BYTES = 300  # several parts for a pack


def compacted(broker: Broker, **options: Any) -> KafkaRows:
    """Rows in a topic that the broker compacts as soon as it can."""
    topic = broker.new_topic(num_partitions=2, **EAGER)
    options = {"row_block_bytes": BLOCK_BYTES, "part_bytes": PART_BYTES, "num_partitions": 2} | options
    return KafkaRows(broker.bootstrap, topic, compacted=True, **options)


def records(rows: KafkaRows) -> list[tuple[bytes, bytes | None]]:
    """Keys and values of all that is there, of both partitions, in order."""
    asked = {"enable.partition.eof": True, "enable.auto.commit": False, "log_level": 2, "group.id": "nobody"}
    consumer = confluent_kafka.Consumer({"bootstrap.servers": rows.bootstrap, **asked})
    consumer.assign([confluent_kafka.TopicPartition(rows.topic, partition, 0) for partition in (0, 1)])
    found, num_ended, deadline = [], 0, time.monotonic() + SECS
    while num_ended < 2:
        assert time.monotonic() < deadline, f"no end of {rows.topic}"
        message = consumer.poll(1)
        if message is not None and message.error() is not None:
            assert message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF, message.error()
            num_ended += 1
        elif message is not None and message.key() != b"roll":
            found.append((message.key(), message.value()))
    consumer.close()
    return found


def compact(rows: KafkaRows) -> tuple[int, int]:
    """Have the broker remove all that a newer record supersedes; how many records there were, and are."""
    before, deadline = len(records(rows)), time.monotonic() + SECS
    producer = confluent_kafka.Producer({"bootstrap.servers": rows.bootstrap, "log_level": 2})
    while len(keys := [key for key, _ in records(rows)]) != len(set(keys)):
        assert time.monotonic() < deadline, f"not compacted: {len(keys)} records of {len(set(keys))} keys"
        for partition in (0, 1):
            producer.produce(rows.topic, b"", b"roll", partition)  # or the last segment is never looked at
        assert producer.flush(SECS) == 0
        time.sleep(0.3)
    return before, len(keys)


def live(rows: KafkaRows) -> list[bytes]:
    """Keys that are not removed."""
    return [key for key, value in dict(records(rows)).items() if value is not None]


class TopicJob(SavingJob):
    """A job whose rows are in a compacted topic, and what its last committed checkpoint must hold."""

    def __init__(
        self,
        root: Path,
        rows: KafkaRows,
        policy: Policy | None = None,
        optimizer: str = "rowwise_adagrad",
        **writer: Any,
    ) -> None:
        build = partial(plain_job, optimizer=optimizer)
        super().__init__(root, build, policy=policy or cnr.OneShot(), row_log=rows, **writer)
        self.committed: Whole = {}

    def commit(self, planner: cnr.CNRSavePlanner | None = None, *, asynchronously: bool = False) -> None:
        """Save under the next name, with a value that no other checkpoint has."""
        number = len(self.saved) + 1
        if asynchronously:
            self.async_save(f"step-{number}", place=number).result()
        else:
            self.save(f"step-{number}", planner=planner, place=number)
        self.committed = self.saved[f"step-{number}"]

    def fail(self) -> None:
        """A save that fails, right before its marker at the latest."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KafkaLog, "mark", faults.raising("mark"))
            faults.failures_of(self.commit)

    @property
    def newest(self) -> str:
        """The newest checkpoint."""
        return str(cnr.latest(self.root, row_log=self.row_log))

    def load(self) -> Whole:
        """What the newest checkpoint gives another job."""
        return models.load(self.build(99), self.newest, row_log=self.row_log, place=-1)

    def packs(self) -> list[Pack]:
        """Those of the newest checkpoint that are in the topic."""
        return [pack for pack in read_checkpoint(self.newest).manifest.packs if pack.log is not None]

    def check(self) -> None:
        """The newest checkpoint is the one that was committed last, bit for bit."""
        assert differing(self.load(), self.committed) == []

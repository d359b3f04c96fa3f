"""What a Kafka client can do at its best: bytes sent in transactions by a bare producer."""

import os
import uuid
from collections.abc import Sequence

from confluent_kafka import Producer

RECORD_BYTES = 512 << 10
IN_FLIGHT_BYTES = 16 << 20
SECS = 60.0


class BareProducer:
    """Sends random bytes, one transaction after the other, each spread over one partition.

    Args:
        bootstrap: Of the broker.
        topic: Where to.
        sizes: Of each transaction.
    """

    def __init__(self, bootstrap: str, topic: str, sizes: Sequence[int]) -> None:
        settings: dict[str, str | int | float | bool] = {
            "bootstrap.servers": bootstrap,
            "transactional.id": f"bare-{uuid.uuid4()}",
            "message.max.bytes": 2 * RECORD_BYTES,
            "queue.buffering.max.kbytes": 4 * IN_FLIGHT_BYTES >> 10,
            "linger.ms": 0,
        }
        self._producer = Producer(settings)
        self._producer.init_transactions(SECS)
        self._topic = topic
        self._num_partitions = len(self._producer.list_topics(topic, SECS).topics[topic].partitions)
        self._transactions = [
            [os.urandom(min(RECORD_BYTES, size - at)) for at in range(0, size, RECORD_BYTES)] for size in sizes
        ]

    def send(self) -> None:
        """Send all of it; returns when it is committed."""
        for number, values in enumerate(self._transactions):
            self._producer.begin_transaction()
            for value in values:
                self._producer.produce(self._topic, value, partition=number % self._num_partitions)
            self._producer.commit_transaction(SECS)

"""Consumers that read ranges of records in order, by partition and offset, without subscriptions.

A load reads a pack in pieces, some of them twice. A seek costs a request and drops the records that were fetched ahead.
So a consumer skips a few records instead, and caches the last records that it has read.
"""

import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.kafka.clients import Cluster, OfProcess, Settings, logger

_POLL_SECS = 0.1
_QUEUED_BYTES = 16 << 20
_MAX_SKIPPED = 32  # offsets of records that were fetched ahead, of tombstones, and of records that compaction removed
_MAX_IDLE = 4  # consumers; few, since each continues to request records from the broker
_KEPT_BYTES = 17 << 20  # one pack, since its row numbers are read first, and then all of it
_GONE = (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)


class RangeConsumer:
    """One consumer, for one thread at a time.

    Args:
        cluster: The cluster.
        isolation: Kafka's ``isolation.level``.

    Attributes:
        place: Topic, partition and offset of the next record; None if the next read must seek.
    """

    def __init__(self, cluster: Cluster, isolation: str) -> None:
        self._cluster = cluster
        self.place: tuple[str, int, int] | None = None
        self._topics: set[str] = set()
        self._kept: deque[Message] = deque()  # the last records before ``place``
        self._kept_bytes = 0
        self._is_at_end = False  # librdkafka reports the end only once, until there are more records
        self._settings = cluster.settings(_settings(isolation))
        self._consumer = Consumer(self._settings, logger=logger)
        self._is_used = False

    def forget(self) -> None:
        """Fetch the next records from the broker, even if they are in the cache."""
        self.place = None

    def records(self, topic: str, partition: int, start: int, stop: int, wait_secs: float = 0.0) -> Iterator[Message]:
        """Yield the records from one offset up to another, or up to the last visible record.

        Args:
            topic: Name of the topic.
            partition: Partition of the topic.
            start: First offset.
            stop: Offset after the last.
            wait_secs: Seconds to wait for the first record if the partition ends at ``start``.

        Raises:
            DamagedError: The offset has been removed, or does not exist yet.
            KafkaException: The broker does not answer in time.
        """
        for kept_message in self._kept_from(topic, partition, start):
            if (offset := kept_message.offset() or 0) >= stop:
                return
            start = offset + 1
            yield kept_message
        is_anew = self.distance(topic, partition, start) is None or (self._is_at_end and wait_secs == 0)
        if is_anew:
            self._go_to(topic, partition, start)
        self.place = None
        began_secs = heard_secs = time.monotonic()
        while True:
            message = self._consumer.poll(min(_POLL_SECS, wait_secs) if self._is_at_end else _POLL_SECS)
            now = time.monotonic()
            if message is None and self._is_at_end and now > began_secs + wait_secs:
                self.place = (topic, partition, start)
                return
            if message is None:
                if now > heard_secs + self._cluster.timeout_secs and not self._is_at_end:
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
                continue
            if (message.topic(), message.partition()) not in ((topic, partition), (None, None)):
                continue  # fetched before the last seek
            heard_secs, error = now, message.error()
            if error is not None and error.code() == KafkaError._PARTITION_EOF:
                self._is_at_end = True
                if wait_secs == 0 and not is_anew:  # the reported end may be outdated
                    is_anew = True
                    self._go_to(topic, partition, start if self.place is None else self.place[2])
                    continue
                if wait_secs == 0 or self.place is not None:
                    return
                continue
            if error is not None and error.code() in _GONE:
                self._look_anew(topic, partition, start)
                continue
            if error is not None:
                raise KafkaException(error)
            offset, self._is_at_end = message.offset() or 0, False
            self.place = (topic, partition, offset + 1)
            self._keep(message)
            self._is_used = True
            if start <= offset < stop:
                start = offset + 1
                yield message
            if offset + 1 >= stop:
                return

    def _look_anew(self, topic: str, partition: int, start: int) -> None:
        """Retry once with a new client, since the old one may refer to a deleted topic of this name; else raise."""
        if self._is_used:
            self._renew()
            self._go_to(topic, partition, start)
            return
        raise DamagedError(
            f"topic {topic!r} partition {partition} of Kafka at {self._cluster.bootstrap}: there is no offset {start}: "
            "it was removed by the topic's retention, or the topic was created again; use another checkpoint"
        )

    def _renew(self) -> None:
        self._consumer.close()
        self._consumer = Consumer(self._settings, logger=logger)
        self._topics.clear()
        self._is_used = False

    def _go_to(self, topic: str, partition: int, start: int) -> None:
        if topic not in self._topics:
            self._consumer.list_topics(topic, self._cluster.timeout_secs)  # or the first record can take a second
            self._topics.add(topic)
        self._kept.clear()
        self._kept_bytes = 0
        self._is_at_end = False
        self._consumer.assign([TopicPartition(topic, partition, start)])

    def _keep(self, message: Message) -> None:
        self._kept.append(message)
        self._kept_bytes += len(message)
        while self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft())

    def _kept_from(self, topic: str, partition: int, start: int) -> list[Message]:
        """Return the cached records from an offset on; an empty list unless the cache contains all of them."""
        if self.place is None or self.place[:2] != (topic, partition) or not self._kept:
            return []
        if not (self._kept[0].offset() or 0) <= start < self.place[2]:
            return []
        return [message for message in self._kept if (message.offset() or 0) >= start]

    def distance(self, topic: str, partition: int, start: int) -> int | None:
        """Return the number of offsets that a read from ``start`` would skip; None if a seek is better."""
        if self.place is None or self.place[:2] != (topic, partition):
            return None
        if self._kept_from(topic, partition, start):
            return 0
        distance = start - self.place[2]
        return distance if 0 <= distance <= _MAX_SKIPPED else None

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()


def _settings(isolation: str) -> Settings:
    return {
        "group.id": f"torchrec_cnr-{uuid.uuid4().hex}",  # required by librdkafka; no offsets are committed to it
        "isolation.level": isolation,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "error",
        "fetch.wait.max.ms": 100,  # an idle consumer asks at this interval, and a seek waits for the answer
        "fetch.error.backoff.ms": 20,
        "fetch.queue.backoff.ms": 5,  # by default a fetch waits a second whenever the queue was full
        "queued.max.messages.kbytes": _QUEUED_BYTES >> 10,
        "fetch.message.max.bytes": 4 << 20,
    }


class Consumers:
    """A pool of consumers.

    Args:
        cluster: The cluster.
        isolation: Kafka's ``isolation.level``. With "read_committed", no record after an open transaction of any
            producer is visible. Use "read_uncommitted" for records that are known to be committed.
    """

    def __init__(self, cluster: Cluster, isolation: str) -> None:
        self._cluster = cluster
        self._isolation = isolation
        self._lock = threading.Lock()
        self._idle: list[RangeConsumer] = []

    @contextmanager
    def one(self, topic: str, partition: int, start: int) -> Iterator[RangeConsumer]:
        """Borrow the idle consumer that has the fewest records to skip, or a new one. Close it if the block fails."""
        with self._lock:
            distances = [consumer.distance(topic, partition, start) for consumer in self._idle]
            candidates = [(distance, n) for n, distance in enumerate(distances) if distance is not None]
            idle_consumer = self._idle[min(candidates)[1] if candidates else 0] if self._idle else None
            if idle_consumer is not None:
                self._idle.remove(idle_consumer)
        consumer = idle_consumer if idle_consumer is not None else RangeConsumer(self._cluster, self._isolation)
        try:
            yield consumer
        except BaseException:
            consumer.close()
            raise
        with self._lock:
            self._idle.append(consumer)
            surplus_consumers = self._idle[:-_MAX_IDLE]
            del self._idle[:-_MAX_IDLE]
        for surplus_consumer in surplus_consumers:
            surplus_consumer.close()

    def close(self) -> None:
        """Close the idle consumers."""
        with self._lock:
            idle_consumers, self._idle = self._idle, []
        for consumer in idle_consumers:
            consumer.close()


consumers_of_process: OfProcess[tuple[Cluster, str], Consumers] = OfProcess(lambda key: Consumers(*key))

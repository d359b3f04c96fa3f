"""Transactional producers: they send all records of a transaction or none, and each record only once.

A producer owns its transactional id until another producer takes it. The broker then rejects the first one's records,
and aborts its open transaction. A producer of rows may take its id back, since no marker refers to the rows of a job
that was replaced. A producer of markers may not, except in the newest job by its fence, at the start of its first save.

In a compacted topic, late records would replace newer ones. So a job that may have been replaced must not take an id
back there. Each save takes the id before it checks for newer jobs, holds it, and fails once it has lost the id.
"""

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from torchrec_cnr.errors import FencedError
from torchrec_cnr.kafka.clients import Cluster, Settings, is_fenced, logger, may_be_fenced

_IN_FLIGHT_BYTES = 16 << 20
_POLL_SECS = 0.05
_NOT_KNOWN_YET = (KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)


@dataclass(frozen=True)
class Record:
    """A record to send; a ``value`` of None makes it a tombstone."""

    key: bytes
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


@dataclass
class _Deliveries:
    """The delivery reports of a transaction's records."""

    bytes_in_flight: int = 0
    offsets: dict[int, int] = field(default_factory=dict)
    failure: KafkaError | None = None
    heard: float = field(default_factory=time.monotonic)

    def heard_of(self, number: int, num_bytes: int, error: KafkaError | None, message: Message) -> None:
        self.heard = time.monotonic()
        self.bytes_in_flight -= num_bytes
        offset = message.offset()
        if error is not None:
            self.failure = self.failure or error
        elif offset is None:  # sent, but to an unknown offset
            self.failure = self.failure or KafkaError(KafkaError._NO_OFFSET)
        else:
            self.offsets[number] = offset


class Producing:
    """A producer that is created when it is needed, and created again after it has failed.

    Methods that need the broker raise a ``KafkaException`` if it does not answer in time.

    Args:
        cluster: The cluster to send to.
        transactional_id: The transactional id of the producer.
    """

    def __init__(self, cluster: Cluster, transactional_id: str) -> None:
        self._cluster = cluster
        self._id = transactional_id
        self._lock = threading.Lock()
        self._producer: Producer | None = None
        self._held: Producer | None = None

    def hold(self) -> None:
        """Take the id, abort the open transaction of its previous owner, and hold the id for ``is_held`` sends."""
        self.take_over()
        self._held = self._producer

    def send(
        self,
        topic: str,
        partition: int,
        records: Iterable[Record],
        may_take_over: bool = False,
        is_held: bool = False,
    ) -> list[int]:
        """Send records in one transaction; return their offsets once they are committed.

        Args:
            topic: The topic to send to.
            partition: Partition of the topic.
            records: The records, in the order of their offsets.
            may_take_over: Whether to take the id back if another producer has taken it.
            is_held: Whether to fail unless this producer still holds the id since :meth:`hold`.

        Raises:
            FencedError: Another producer has taken the id, or may have, since the broker has forgotten its owner.
            KafkaException: The records were not sent, or it is not known yet whether they were.
        """
        records = list(records)
        deadline = time.monotonic() + self._cluster.timeout_secs
        with self._lock:
            if is_held and (self._producer is None or self._producer is not self._held):
                raise KafkaException(KafkaError(KafkaError._STATE, "an earlier transaction of this save has failed"))
            while True:
                try:
                    return self._transact(topic, partition, records)
                except KafkaException as error:
                    self._drop()
                    is_lost = is_fenced(error) if is_held else may_be_fenced(error)
                    if is_lost and not may_take_over:
                        raise self._shut_out(topic) from error
                    is_early = error.args[0].code() in _NOT_KNOWN_YET  # a broker that has just started
                    if is_held or not (is_lost or is_early) or time.monotonic() > deadline:
                        raise
                    may_take_over = is_early and may_take_over
                    time.sleep(_POLL_SECS)

    def _shut_out(self, topic: str) -> FencedError:
        return FencedError(
            f"topic {topic!r} of Kafka at {self._cluster.bootstrap}: another job has taken the transactional id "
            f"{self._id!r}; end this job, or load the latest checkpoint and continue from there; jobs that run in "
            "parallel need separate roots"
        )

    def ready(self) -> None:
        """Take the id unless this producer has taken it before; a send fails if another one has taken it since."""
        with self._lock:
            self._made()

    def take_over(self) -> None:
        """Take the id, and abort the open transaction of its previous owner."""
        with self._lock:
            self._drop()
            self._made()

    def close(self) -> None:
        """Close the producer after the current send."""
        with self._lock:
            self._drop()
            self._held = None

    def _transact(self, topic: str, partition: int, records: list[Record]) -> list[int]:
        producer = self._made()
        producer.begin_transaction()
        deliveries = _Deliveries()
        for number, record in enumerate(records):
            num_bytes = len(record.value or b"")
            self._wait(producer, deliveries, _IN_FLIGHT_BYTES - num_bytes)
            producer.produce(
                topic,
                record.value,
                record.key,
                partition,
                on_delivery=partial(deliveries.heard_of, number, num_bytes),
                headers=list(record.headers),
            )
            deliveries.bytes_in_flight += num_bytes
        self._wait(producer, deliveries, 0)
        producer.commit_transaction(self._cluster.timeout_secs)
        return [deliveries.offsets[number] for number in range(len(records))]

    def _wait(self, producer: Producer, deliveries: _Deliveries, most_bytes: int) -> None:
        """Wait until at most ``most_bytes`` are in flight, which applies back pressure to the writer of packs."""
        while deliveries.bytes_in_flight > max(0, most_bytes):
            producer.poll(_POLL_SECS)
            if deliveries.failure is not None:
                raise KafkaException(deliveries.failure)
            if time.monotonic() > deliveries.heard + self._cluster.timeout_secs:
                raise KafkaException(KafkaError(KafkaError._MSG_TIMED_OUT))

    def _made(self) -> Producer:
        if self._producer is None:
            timeout_ms = self._cluster.timeout_ms
            settings: Settings = {
                "transactional.id": self._id,
                "enable.idempotence": True,
                "acks": "all",
                "message.timeout.ms": timeout_ms,
                "transaction.timeout.ms": max(1000, timeout_ms),
                "linger.ms": 0,
                "queue.buffering.max.kbytes": 4 * _IN_FLIGHT_BYTES >> 10,
            }
            producer = Producer(self._cluster.settings(settings), logger=logger)
            producer.list_topics(timeout=self._cluster.timeout_secs)  # otherwise the next call takes half a second
            producer.init_transactions(self._cluster.timeout_secs)
            self._producer = producer
        return self._producer

    def _drop(self) -> None:
        """Drop the producer. The broker aborts its open transaction when the id is taken again, or after a timeout."""
        producer, self._producer = self._producer, None
        if producer is not None:
            with suppress(KafkaException):
                producer.purge()

"""Producers: records go out in transactions, all of them or none, and never twice.

A producer's transactional id is its own until somebody else takes it, who shuts it out and ends what it has left open.
Rows may take theirs back: what was sent by a job that nobody wants any more, no marker will name. Markers may not, but
for the one job that is the latest by its fence: at the beginning of its first save it takes their id.

In a compacted topic, what comes late takes the place of what lies there. So there nobody may take an id back who may
not be the latest any more: each save takes it before it looks for later jobs, holds it, and has failed once it is lost.
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
    """A record to be sent."""

    key: bytes
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


@dataclass
class _Deliveries:
    """What has become of a transaction's records."""

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
        elif offset is None:  # sent, but nobody knows where it lies
            self.failure = self.failure or KafkaError(KafkaError._NO_OFFSET)
        else:
            self.offsets[number] = offset


class Producing:
    """A producer that is made when it is needed, and made anew when it has failed.

    What needs the broker raises a ``KafkaException`` if it does not answer in time.

    Args:
        cluster: Where to.
        transactional_id: Its own.
    """

    def __init__(self, cluster: Cluster, transactional_id: str) -> None:
        self._cluster = cluster
        self._id = transactional_id
        self._lock = threading.Lock()
        self._producer: Producer | None = None
        self._held: Producer | None = None

    def hold(self) -> None:
        """Shut out whoever has the id, and end what it has left open; from now on, ``is_held`` sends are this job's."""
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
        """Send records in one transaction; returns their offsets once they are committed.

        Args:
            topic: Where to.
            partition: Of the topic.
            records: In the order in which they will lie there.
            may_take_over: Whether to take the id back from whoever has taken it.
            is_held: Whether to send only if the id is that which :meth:`hold` has taken.

        Raises:
            FencedError: Somebody else has taken the id, or may have since the broker has forgotten who had it.
            KafkaException: They were not sent, or nobody can tell yet.
        """
        records = list(records)
        deadline = time.monotonic() + self._cluster.timeout_secs
        with self._lock:
            if is_held and (self._producer is None or self._producer is not self._held):
                raise KafkaException(KafkaError(KafkaError._STATE, "what this save sent before has failed"))
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
            f"{self._id!r}; end this job, or load the newest checkpoint and go on from there; jobs that are to save "
            "side by side need roots of their own"
        )

    def ready(self) -> None:
        """Shut out whoever has the id, unless it is ours already; if it has changed hands since, a send will tell."""
        with self._lock:
            self._made()

    def take_over(self) -> None:
        """Shut out whoever has the id, and end what it has left open."""
        with self._lock:
            self._drop()
            self._made()

    def close(self) -> None:
        """Leave, once nothing is being sent."""
        with self._lock:
            self._drop()
            self._held = None

    def _transact(self, topic: str, partition: int, records: list[Record]) -> list[int]:
        producer = self._made()
        producer.begin_transaction()
        sent = _Deliveries()
        for number, record in enumerate(records):
            num_bytes = len(record.value or b"")
            self._wait(producer, sent, _IN_FLIGHT_BYTES - num_bytes)
            producer.produce(
                topic,
                record.value,
                record.key,
                partition,
                on_delivery=partial(sent.heard_of, number, num_bytes),
                headers=list(record.headers),
            )
            sent.bytes_in_flight += num_bytes
        self._wait(producer, sent, 0)
        producer.commit_transaction(self._cluster.timeout_secs)
        return [sent.offsets[number] for number in range(len(records))]

    def _wait(self, producer: Producer, sent: _Deliveries, most_bytes: int) -> None:
        """Until no more bytes than that are on their way; back-pressure is felt here, by who writes packs."""
        while sent.bytes_in_flight > max(0, most_bytes):
            producer.poll(_POLL_SECS)
            if sent.failure is not None:
                raise KafkaException(sent.failure)
            if time.monotonic() > sent.heard + self._cluster.timeout_secs:
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
            producer.list_topics(timeout=self._cluster.timeout_secs)  # or the next call takes half a second
            producer.init_transactions(self._cluster.timeout_secs)
            self._producer = producer
        return self._producer

    def _drop(self) -> None:
        """What it has left open, the broker ends: when the id is taken again, or in time."""
        producer, self._producer = self._producer, None
        if producer is not None:
            with suppress(KafkaException):
                producer.purge()

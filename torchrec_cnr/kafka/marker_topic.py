"""Markers: a topic of one partition, in which each record commits a checkpoint.

Whether a save was committed must have one answer, for all ranks and for ever. While a transaction is open it has none:
so whoever looks waits until the end of what is committed is the end of the topic.
"""

import time
from collections.abc import Callable, Iterator

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from torchrec_cnr.errors import FencedError, StoreError
from torchrec_cnr.kafka.clients import Cluster, logger
from torchrec_cnr.kafka.consumers import Consumers
from torchrec_cnr.kafka.producers import Producing, Record
from torchrec_cnr.kafka.records import marker_json, marker_of
from torchrec_cnr.storage.row_log import Marker

_LOOK_SECS = 0.02
_OPEN_SECS = 75.0  # a broker looks for transactions that have run out of time once a minute
_OFFSETS_PER_MARKER = 3  # the record, what ends its transaction, and room for those that were aborted


class MarkerTopic:
    """The markers of a log.

    Args:
        cluster: The cluster.
        topic: The topic.
        consumers: To read it by.
    """

    def __init__(self, cluster: Cluster, topic: str, consumers: Consumers) -> None:
        self._cluster = cluster
        self._topic = topic
        self._consumers = consumers
        self._admin = AdminClient(cluster.settings({}), logger=logger)

    def put(self, producing: Producing, marker: Marker, check: Callable[[], None], is_held: bool) -> None:
        """Commit; if the broker does not say whether it did, find out.

        Args:
            producing: The producer of markers.
            marker: The marker.
            check: Raises if this job may not commit; asked if the broker has shut it out, once the id is taken back. If
                it does not, that was another process of the same job, or a job before it that was about to commit.
            is_held: Whether to do so only if the producer holds its id, and to take nothing back.

        Raises:
            FencedError: This job may not commit, or another one has taken the id that was held.
            StoreError: It was not committed, or nobody can tell yet.
        """
        record = Record(marker.name.encode(), marker_json(marker))
        with self._cluster.errors(f"commit {marker.name!r} in topic {self._topic!r}"):
            try:
                try:
                    producing.send(self._topic, 0, [record], is_held=is_held)
                except FencedError:
                    if is_held:
                        check()
                        raise
                    producing.take_over()
                    check()  # whoever may commit from now on takes the id from us first
                    if not self._has(marker):
                        producing.send(self._topic, 0, [record])
            except KafkaException:
                producing.take_over()  # ends what may be open, one way or the other
                if not self._has(marker):
                    raise

    def _has(self, marker: Marker) -> bool:
        return any(found.sha256 == marker.sha256 for found in self.newest(marker.root, most=4))

    def newest(self, root: str, most: int) -> tuple[Marker, ...]:
        """The newest markers of a root, oldest first, once it is certain that there will be none before them.

        Raises:
            StoreError: The broker does not answer in time, or a transaction stays open.
        """
        with self._cluster.errors(f"read topic {self._topic!r}"):
            end = self._certain_end() - 1  # the last record ends a transaction, and to be told of the end takes a while
            first = self._offset(OffsetSpec.earliest(), IsolationLevel.READ_UNCOMMITTED)
            width = _OFFSETS_PER_MARKER * most
            while True:
                start = max(first, end - width)
                found = tuple(marker for marker in self.between(start, end) if marker.root == root)
                if len(found) >= most or start == first:
                    return found[-most:]
                width *= 4

    def between(self, start: int, stop: int, wait_secs: float = 0.0) -> Iterator[Marker]:
        """Markers at offsets from ``start`` to ``stop``; what is none is passed over with a warning.

        Args:
            start: First offset.
            stop: Offset behind the last.
            wait_secs: How long to wait for the first, if there is none yet.

        Raises:
            KafkaException: The broker does not answer in time.
        """
        if start >= stop:
            return
        with self._consumers.one(self._topic, 0, start) as consumer:
            for message in consumer.records(self._topic, 0, start, stop, wait_secs):
                offset = message.offset() or 0
                marker = marker_of(message.value(), offset)
                if marker is None:
                    logger.warning("topic %r: the record at offset %d is no marker of ours", self._topic, offset)
                else:
                    yield marker

    def _certain_end(self) -> int:
        deadline = time.monotonic() + self._cluster.timeout_secs + _OPEN_SECS
        while True:
            committed = self._offset(OffsetSpec.latest(), IsolationLevel.READ_COMMITTED)
            if committed >= self._offset(OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED):
                return committed
            if time.monotonic() > deadline:
                raise StoreError(
                    f"topic {self._topic!r} of Kafka at {self._cluster.bootstrap}: a transaction has been open since "
                    f"offset {committed}, so that nobody can tell whether a save was committed; try again"
                )
            time.sleep(_LOOK_SECS)

    def _offset(self, spec: OffsetSpec, isolation: IsolationLevel) -> int:
        place, timeout_secs = TopicPartition(self._topic, 0), self._cluster.timeout_secs
        deadline = time.monotonic() + timeout_secs
        while True:
            futures = self._admin.list_offsets({place: spec}, isolation_level=isolation, request_timeout=timeout_secs)
            try:
                return int(self._cluster.result(futures[place]).offset)
            except KafkaException:  # a broker that has just started does not lead its partitions yet
                if time.monotonic() > deadline:
                    raise
            time.sleep(_LOOK_SECS)
            self._admin = AdminClient(self._cluster.settings({}), logger=logger)  # the old one would not ask again

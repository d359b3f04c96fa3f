"""Markers: a topic of one partition, in which each record commits a checkpoint.

Whether a save was committed must have one answer, for all ranks and for ever. While a transaction is open that has its
marker, or one that lies before it, it has none: so whoever looks waits until there is one.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping

from confluent_kafka import IsolationLevel, KafkaException

from torchrec_cnr.errors import FencedError, StoreError
from torchrec_cnr.kafka.clients import Cluster, logger
from torchrec_cnr.kafka.consumers import Consumers, consumers_of_process
from torchrec_cnr.kafka.offsets import Offsets
from torchrec_cnr.kafka.producers import Producing, Record
from torchrec_cnr.kafka.records import marker_json, marker_of
from torchrec_cnr.storage.row_log import Marker

_LOOK_SECS = 0.02
_OPEN_SECS = 75.0  # a broker looks for transactions that have run out of time once a minute
_MIN_WINDOW = 24  # offsets: a marker takes two, as one more ends its transaction
_MAX_LOOKED_AT = 1 << 12  # offsets, for what may as well be found in the root


class MarkerTopic:
    """The markers of a log.

    Args:
        cluster: The cluster.
        topic: The topic.
    """

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self._committed = consumers_of_process.get((cluster, "read_committed"))
        self._all = consumers_of_process.get((cluster, "read_uncommitted"))
        self._offsets = Offsets(cluster)

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
        return bool(self.marked(marker.root, {marker.sha256: marker.parent_sha256}))

    def newest(self, root: str, most: int) -> tuple[Marker, ...]:
        """The newest markers of a root, oldest first, of the last part of the topic; some may not be committed.

        Raises:
            StoreError: The broker does not answer in time.
        """
        with self._cluster.errors(f"read topic {self._topic!r}"):
            end = self._end(IsolationLevel.READ_UNCOMMITTED)
            found: list[Marker] = []
            for window in self._windows_back(end, max(0, end - _MAX_LOOKED_AT), self._all):
                found[:0] = [marker for marker in window if marker.root == root]
                if len(found) >= most:
                    break
            return tuple(found[-most:])

    def marked(self, root: str, manifests: Mapping[str, str | None]) -> frozenset[str]:
        """Which of these manifests a marker has committed, once that is certain; see ``RowLog``.

        Raises:
            StoreError: The broker does not answer in time, or a transaction stays open that decides about one of them.
        """
        left, found = dict(manifests), set()
        with self._cluster.errors(f"read topic {self._topic!r}"):
            end = self._decided_end(root, manifests.keys())
            for window in self._windows_back(end, 0, self._committed):
                for marker in reversed([marker for marker in window if marker.root == root]):
                    if marker.sha256 in left:
                        found.add(marker.sha256)
                    # What is not found yet has none, if this is its parent's.
                    gone = [sha256 for sha256, parent in left.items() if marker.sha256 in (sha256, parent)]
                    for sha256 in gone:
                        del left[sha256]
                if not left:
                    break
        return frozenset(found)

    def _windows_back(self, end: int, first: int, consumers: Consumers) -> Iterator[list[Marker]]:
        """The markers from one offset to another in runs, the last run first, each larger than the one before."""
        first = max(first, self._offsets.first(self._topic, 0))
        stop = end - 1  # the last record ends a transaction, and to be told of the end takes a while
        width = _MIN_WINDOW
        while stop > first:
            start = max(first, stop - width)
            yield list(self._read(consumers, start, stop, 0.0))
            stop, width = start, 4 * width

    def between(self, start: int, stop: int, wait_secs: float = 0.0) -> Iterator[Marker]:
        """Markers at offsets from ``start`` to ``stop``; what is none is passed over with a warning.

        Args:
            start: First offset.
            stop: Offset behind the last.
            wait_secs: How long to wait for the first, if there is none yet.

        Raises:
            KafkaException: The broker does not answer in time.
        """
        yield from self._read(self._committed, start, stop, wait_secs)

    def _read(self, consumers: Consumers, start: int, stop: int, wait_secs: float) -> Iterator[Marker]:
        if start >= stop:
            return
        with consumers.one(self._topic, 0, start) as consumer:
            for message in consumer.records(self._topic, 0, start, stop, wait_secs):
                offset = message.offset() or 0
                marker = marker_of(message.value(), offset)
                if marker is None:
                    logger.warning("topic %r: the record at offset %d is no marker of ours", self._topic, offset)
                else:
                    yield marker

    def end(self) -> int:
        """The offset behind the last marker that is there to be seen.

        Raises:
            StoreError: The broker does not answer in time.
        """
        with self._cluster.errors(f"read topic {self._topic!r}"):
            return self._end(IsolationLevel.READ_COMMITTED)

    def _decided_end(self, root: str, sha256s: Collection[str]) -> int:
        """Where the records end whose fate is known, once no marker of these manifests lies behind that."""
        deadline = time.monotonic() + self._cluster.timeout_secs + _OPEN_SECS
        while True:
            decided = self._end(IsolationLevel.READ_COMMITTED)
            end = self._end(IsolationLevel.READ_UNCOMMITTED)
            # Others may have left a transaction open for as long as they like.
            behind = [marker for marker in self._read(self._all, decided, end, 0.0) if marker.root == root]
            if not any(marker.sha256 in sha256s for marker in behind):
                return decided
            if time.monotonic() > deadline:
                raise StoreError(
                    f"topic {self._topic!r} of Kafka at {self._cluster.bootstrap}: a transaction has been open since "
                    f"offset {decided}, so that nobody can tell whether checkpoint {behind[-1].name!r} was committed; "
                    "try again, or end that transaction with kafka-transactions --abort"
                )
            time.sleep(_LOOK_SECS)

    def _end(self, isolation: IsolationLevel) -> int:
        return self._offsets.end(self._topic, 0, isolation)

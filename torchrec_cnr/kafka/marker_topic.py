"""The topic of markers: it has one partition, and each of its records commits a checkpoint.

All ranks must get the same answer to whether a save was committed, and it must never change. There is no answer yet
while the transaction of the save's marker, or of an earlier marker, is open. So readers wait until it has ended.
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
_OPEN_SECS = 75.0  # brokers check once a minute for transactions that have timed out
_MIN_WINDOW = 24  # offsets; a marker takes two, since a control record ends its transaction
_MAX_LOOKED_AT = 1 << 12  # offsets; callers find older checkpoints in the root


class MarkerTopic:
    """The markers of a log.

    Args:
        cluster: The cluster of the topic.
        topic: Name of the topic.
    """

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self._committed = consumers_of_process.get((cluster, "read_committed"))
        self._all = consumers_of_process.get((cluster, "read_uncommitted"))
        self._offsets = Offsets(cluster)

    def put(self, producing: Producing, marker: Marker, check: Callable[[], None], is_held: bool) -> None:
        """Commit a checkpoint. If the broker does not answer, find out whether the marker was committed.

        Args:
            producing: The producer of markers.
            marker: The marker of the checkpoint.
            check: Raises an error if this job may not commit. Called after another producer had taken the id and this
                one has taken it back. If it raises nothing, the other producer was one of the same or of an older job.
            is_held: Whether to commit only if the producer still holds its id, without taking it back.

        Raises:
            FencedError: This job may not commit, or another job has taken the id that was held.
            StoreError: The marker was not committed, or it is not known yet whether it was.
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
                    check()  # from now on, any other job must take the id from us before it commits
                    if not self._has(marker):
                        producing.send(self._topic, 0, [record])
            except KafkaException:
                producing.take_over()  # ends a transaction that may be open
                if not self._has(marker):
                    raise

    def _has(self, marker: Marker) -> bool:
        return bool(self.marked(marker.root, {marker.sha256: marker.parent_sha256}))

    def newest(self, root: str, most: int) -> tuple[Marker, ...]:
        """Return the newest markers of a root in the last part of the topic, oldest first; some may not be committed.

        Raises:
            StoreError: The broker does not answer in time.
        """
        with self._cluster.errors(f"read topic {self._topic!r}"):
            end = self._end(IsolationLevel.READ_UNCOMMITTED)
            markers: list[Marker] = []
            for window in self._windows_back(end, max(0, end - _MAX_LOOKED_AT), self._all):
                markers[:0] = [marker for marker in window if marker.root == root]
                if len(markers) >= most:
                    break
            return tuple(markers[-most:])

    def marked(self, root: str, manifests: Mapping[str, str | None]) -> frozenset[str]:
        """Return which of these manifests a marker has committed, once that is certain; see ``RowLog``.

        Raises:
            StoreError: The broker does not answer in time, or a transaction with one of the markers does not end.
        """
        undecided, committed = dict(manifests), set()
        with self._cluster.errors(f"read topic {self._topic!r}"):
            end = self._decided_end(root, manifests.keys())
            for window in self._windows_back(end, 0, self._committed):
                for marker in reversed([marker for marker in window if marker.root == root]):
                    if marker.sha256 in undecided:
                        committed.add(marker.sha256)
                    # A manifest has no marker if the search has reached its parent's marker without finding its own.
                    decided = [sha256 for sha256, parent in undecided.items() if marker.sha256 in (sha256, parent)]
                    for sha256 in decided:
                        del undecided[sha256]
                if not undecided:
                    break
        return frozenset(committed)

    def _windows_back(self, end: int, first_offset: int, consumers: Consumers) -> Iterator[list[Marker]]:
        """Yield the markers between two offsets in windows, the last one first, each larger than the one before."""
        first_offset = max(first_offset, self._offsets.first(self._topic, 0))
        stop = end - 1  # the last record only ends a transaction, and a read up to the end takes longer
        width = _MIN_WINDOW
        while stop > first_offset:
            start = max(first_offset, stop - width)
            yield list(self._read(consumers, start, stop, 0.0))
            stop, width = start, 4 * width

    def between(self, start: int, stop: int, wait_secs: float = 0.0) -> Iterator[Marker]:
        """Yield the markers at offsets from ``start`` to ``stop``; skip other records with a warning.

        Args:
            start: First offset.
            stop: Offset after the last.
            wait_secs: Seconds to wait for the first marker if there is none yet.

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
                    logger.warning(
                        "topic %r: skipped the record at offset %d, which is not a commit record of this library",
                        self._topic,
                        offset,
                    )
                else:
                    yield marker

    def end(self) -> int:
        """Return the offset after the last committed marker before any open transaction.

        Raises:
            StoreError: The broker does not answer in time.
        """
        with self._cluster.errors(f"read topic {self._topic!r}"):
            return self._end(IsolationLevel.READ_COMMITTED)

    def _decided_end(self, root: str, sha256s: Collection[str]) -> int:
        """Return the end of the records whose outcome is known, once no marker of these manifests comes after it."""
        deadline = time.monotonic() + self._cluster.timeout_secs + _OPEN_SECS
        while True:
            decided_end = self._end(IsolationLevel.READ_COMMITTED)
            end = self._end(IsolationLevel.READ_UNCOMMITTED)
            # An open transaction of another root must not block this one.
            undecided = [marker for marker in self._read(self._all, decided_end, end, 0.0) if marker.root == root]
            if not any(marker.sha256 in sha256s for marker in undecided):
                return decided_end
            if time.monotonic() > deadline:
                raise StoreError(
                    f"topic {self._topic!r} of Kafka at {self._cluster.bootstrap}: cannot determine whether checkpoint "
                    f"{undecided[-1].name!r} was committed: a transaction has been open since offset {decided_end}; "
                    "try again, or abort that transaction with kafka-transactions --abort"
                )
            time.sleep(_LOOK_SECS)

    def _end(self, isolation: IsolationLevel) -> int:
        return self._offsets.end(self._topic, 0, isolation)

"""The connections of one process to a log: they write and read packs and markers."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from confluent_kafka import Message

from torchrec_cnr.errors import DamagedError
from torchrec_cnr.format.manifest import LogRange, Pack
from torchrec_cnr.kafka.clients import Cluster, OfProcess, logger
from torchrec_cnr.kafka.consumers import consumers_of_process
from torchrec_cnr.kafka.marker_topic import MarkerTopic
from torchrec_cnr.kafka.offsets import Offsets
from torchrec_cnr.kafka.pack_targets import KafkaBlocks, KafkaTarget, RowTopic, tombstones
from torchrec_cnr.kafka.producers import Producing, Record
from torchrec_cnr.kafka.records import pack_name, part_number
from torchrec_cnr.kafka.topics import TopicRules, Topics
from torchrec_cnr.storage.row_log import Marker

MARKER_SUFFIX = "-markers"
_MARKERS = "markers"  # in the transactional id of the producer of markers, instead of a rank
_MAX_TOMBSTONES = 1 << 16  # per transaction


@dataclass(frozen=True)
class LogRules:
    """The settings of a log.

    Attributes:
        cluster: The cluster that has its topics.
        rows: The required settings of the topic of rows.
        markers: The required settings of the topic of markers.
        part_bytes: Size of a pack's records in bytes.
    """

    cluster: Cluster
    rows: TopicRules
    markers: TopicRules
    part_bytes: int


class KafkaLog:
    """The connections of one process to one log.

    Args:
        rules: The settings of the log.
    """

    def __init__(self, rules: LogRules) -> None:
        rules.cluster.check()
        self.rules = rules
        self._lock = threading.Lock()
        self._num_partitions = 0
        self._heard_secs = time.monotonic()  # no marker may mean that the broker hangs
        self._is_checked = False  # only processes that write check the settings of the topics
        self._producing: dict[str, Producing] = {}
        self._consumers = consumers_of_process.get((rules.cluster, "read_uncommitted"))
        self._offsets = Offsets(rules.cluster)
        self._markers = MarkerTopic(rules.cluster, rules.markers.name)

    def open(self, may_make: bool) -> int:
        """Validate or create the topics; return the number of partitions of rows, or 0 if the topics do not exist."""
        with self._lock:
            if not self._num_partitions or (may_make and not self._is_checked):
                topics = Topics(self.rules.cluster)
                is_marked = topics.ensure(self.rules.markers, may_make) > 0
                num_partitions = topics.ensure(self.rules.rows, may_make)
                self._num_partitions = num_partitions if is_marked else 0
                self._is_checked = may_make
            return self._num_partitions

    def target(self, root: str, rank: int, is_coordinator: bool) -> KafkaTarget | KafkaBlocks:
        """Return the target of one rank for one save."""
        rules, producing = self.rules, self._producer(root, str(rank))
        rows = RowTopic(rules.cluster, rules.rows.name, self.open(may_make=True), rules.part_bytes)
        if not rules.rows.is_compacted:
            return KafkaTarget(rows, producing, rank)
        with rules.cluster.errors(f"begin to write to topic {rules.rows.name!r}"):
            producing.hold()
            if is_coordinator:
                self._producer(root, _MARKERS).hold()
        return KafkaBlocks(rows, producing, f"{root}.{rank}")

    def begin(self, root: str) -> None:
        """Begin a save that will end with a marker. In a compacted log, :meth:`target` has done that already."""
        self.open(may_make=True)
        if self.rules.rows.is_compacted:
            return
        with self.rules.cluster.errors(f"take over the markers of topic {self.rules.markers.name!r}"):
            self._producer(root, _MARKERS).ready()

    def mark(self, marker: Marker, check: Callable[[], None]) -> None:
        """Commit a checkpoint by its marker."""
        self._markers.put(self._producer(marker.root, _MARKERS), marker, check, is_held=self.rules.rows.is_compacted)

    def forget(self, root: str, packs: Sequence[Pack]) -> None:
        """Remove packs by sending tombstones, with the producer that has just committed."""
        by_partition: dict[int, list[Record]] = {}
        for pack in packs:
            log = pack.log
            if log is not None and log.key is not None and log.topic == self.rules.rows.name:
                part_tombstones = tombstones(log.key, range(log.num_parts(pack.num_bytes)))
                by_partition.setdefault(log.partition, []).extend(part_tombstones)
        rows = RowTopic(self.rules.cluster, self.rules.rows.name, self.open(may_make=False), self.rules.part_bytes)
        for partition, records in by_partition.items():
            for start in range(0, len(records), _MAX_TOMBSTONES):
                batch = records[start : start + _MAX_TOMBSTONES]
                rows.send(self._producer(root, _MARKERS), partition, batch, "remove packs from", is_held=True)

    def markers(self, root: str, most: int) -> tuple[Marker, ...]:
        """Return some of the newest markers of a root."""
        return self._markers.newest(root, most) if self.open(may_make=False) else ()

    def marked(self, root: str, manifests: Mapping[str, str | None]) -> frozenset[str]:
        """Return which of these manifests a marker has committed."""
        return self._markers.marked(root, manifests) if self.open(may_make=False) else frozenset()

    def end(self) -> int:
        """Return the offset after the last marker; 0 if the topic does not exist yet."""
        return self._markers.end() if self.open(may_make=False) else 0

    def markers_from(self, offset: int, timeout_secs: float) -> tuple[Marker, ...]:
        """Return the markers from an offset on, waiting for the first; check now and then that the broker answers."""
        with self.rules.cluster.errors(f"read topic {self.rules.markers.name!r}"):
            markers = tuple(self._markers.between(offset, 1 << 62, timeout_secs))
            if not markers and time.monotonic() > self._heard_secs + self.rules.cluster.timeout_secs:
                self._markers.end()
                self._heard_secs = time.monotonic()
            return markers

    def close(self) -> None:
        """Close the producers. A later save creates new ones."""
        with self._lock:
            producers = list(self._producing.values())
        for producer in producers:
            producer.close()

    def _producer(self, root: str, writer: str) -> Producing:
        name = f"{self.rules.rows.name}.{root}.{writer}"
        with self._lock:
            return self._producing.setdefault(name, Producing(self.rules.cluster, name))

    def holds(self, packs: Sequence[Pack]) -> bool:
        """Return whether each partition still contains the oldest of the packs, and the newest at the same offsets."""
        by_partition: dict[int, list[tuple[LogRange, Pack]]] = {}
        for pack in packs:
            if pack.log is not None and pack.log.topic == self.rules.rows.name:
                by_partition.setdefault(pack.log.partition, []).append((pack.log, pack))
        for partition, ranges_and_packs in by_partition.items():
            log_range, newest_pack = max(ranges_and_packs, key=lambda item: item[0].last)
            with self.rules.cluster.errors(f"read topic {log_range.topic!r}"):
                if self._offsets.first(log_range.topic, partition) > min(
                    log_range.first for log_range, _ in ranges_and_packs
                ):
                    return False
            try:
                self.read(
                    newest_pack.name,
                    newest_pack.num_bytes,
                    log_range,
                    newest_pack.num_bytes - 1,
                    newest_pack.num_bytes,
                    is_anew=True,
                )
            except DamagedError as error:
                logger.warning("%s", error)
                return False
        return True

    def read(
        self, name: str, num_bytes: int, place: LogRange, start: int, stop: int, is_anew: bool = False
    ) -> npt.NDArray[np.uint8]:
        """Return the bytes of a pack from ``start`` to ``stop``; with ``is_anew``, without the consumer's cache."""
        part_bytes = place.part_bytes
        where = f"topic {place.topic!r} partition {place.partition} of Kafka at {self.rules.cluster.bootstrap}"
        first_part, last_part = start // part_bytes, (stop - 1) // part_bytes
        content = bytearray()  # grows with the records that exist, since the sizes in a manifest are not trusted
        first_offset = place.first + first_part  # the part is there, or later if there are records of others in between
        expected = first_part
        with (
            self.rules.cluster.errors(f"read topic {place.topic!r}"),
            self._consumers.one(place.topic, place.partition, first_offset) as consumer,
        ):
            if is_anew:
                consumer.forget()
            for message in consumer.records(place.topic, place.partition, first_offset, place.last + 1):
                part = _part_of(message, name, place, num_bytes, where)
                if part is None or (part < first_part and expected == first_part):
                    continue
                size = min(part_bytes, num_bytes - part * part_bytes)
                value = message.value() or b""
                if part != expected or len(value) != size:
                    raise DamagedError(
                        f"{where}: corrupt: at offset {message.offset()}: expected part {expected} of {name}, got part "
                        f"{part} with {len(value)} of {size} bytes; use another checkpoint"
                    )
                content += value
                expected += 1
                if expected > last_part:
                    break
        if expected <= last_part:
            raise DamagedError(
                f"{where}: part {expected} of {place.num_parts(num_bytes)} of {name} is missing between offsets "
                f"{place.first} and {place.last}; use another checkpoint"
            )
        return np.frombuffer(content, dtype=np.uint8)[start - first_part * part_bytes : stop - first_part * part_bytes]


def _part_of(message: Message, name: str, log_range: LogRange, num_bytes: int, where: str) -> int | None:
    """Return the number of a part of a pack; None if the record belongs to another pack or is not from this library."""
    if message.value() is None:  # a tombstone
        return None
    num_parts = log_range.num_parts(num_bytes)
    part_and_count = part_number(message.headers())
    if part_and_count is None:
        logger.warning(
            "%s: skipped the record at offset %s, which is no part of a pack; let no other program write to this topic",
            where,
            message.offset(),
        )
        return None
    if (message.key() if log_range.key is None else pack_name(message.headers())) != name.encode():
        return None
    if part_and_count[1] != num_parts or not part_and_count[0] < num_parts:
        raise DamagedError(
            f"{where}: corrupt: at offset {message.offset()}: expected one of {num_parts} parts of {name}, got part "
            f"{part_and_count[0]} of {part_and_count[1]}; use another checkpoint"
        )
    return part_and_count[0]


logs_of_process = OfProcess(KafkaLog)

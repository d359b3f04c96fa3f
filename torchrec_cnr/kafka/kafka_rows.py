"""``KafkaRows``: names the Kafka topic of rows for a writer, a reader or a subscriber."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchrec_cnr.arguments import check_count, check_positive, check_type
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.format.manifest import LogRange, Pack
from torchrec_cnr.format.manifest_parser import TOPIC
from torchrec_cnr.human_text import given_text
from torchrec_cnr.kafka.clients import BATCH_BYTES, MAX_RECORD_BYTES, OWN_SETTINGS, Cluster
from torchrec_cnr.kafka.connection import MARKER_SUFFIX, KafkaLog, LogRules, logs_of_process
from torchrec_cnr.kafka.consumers import consumers_of_process
from torchrec_cnr.kafka.pack_targets import KafkaBlocks, KafkaTarget
from torchrec_cnr.kafka.topics import TopicRules
from torchrec_cnr.storage.row_log import Marker

_ENVELOPE_BYTES = 4 << 10  # bytes of a record in addition to its value
_MAX_TIMEOUT_SECS = 900.0  # the default limit of brokers for a transaction
_MAX_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class KafkaRows:
    """The Kafka topic that the rows of deltas are sent to. Commit records in ``<topic>-markers`` commit checkpoints.

    A topic either keeps everything for a limited time, or is ``compacted``. If it keeps everything, all checkpoints of
    that time can be loaded.

    Missing topics are created, with three replicas or as many as there are brokers. Topics that would lose rows are
    refused.

    Attributes:
        bootstrap: ``host:port`` of a broker, or several, separated by commas.
        topic: Name of the topic of rows.
        timeout_secs: Seconds without an answer from Kafka after which a save or load fails. The next save includes the
            rows of a failed save.
        num_partitions: Number of partitions if the topic is created. A load reads several partitions at once.
        num_replicas: Number of replicas if topics are created; None for three, or as many as there are brokers.
        retention_secs: Seconds for which the topic must keep rows, by default 604,800 (a week); None for forever.
            Topics with a shorter retention are refused.
        part_bytes: Size of a record in bytes, by default 512 KiB.
        compacted: Whether Kafka compacts the topic. It then contains one or two versions of each block of rows, so its
            size is bounded by the size of the model. Only baselines and the latest checkpoint can be loaded then, and
            ``retention_secs`` applies only to commit records.
        row_block_bytes: Size of a block of rows in a compacted topic, in bytes of values, by default 8 MiB. If one row
            of a block was modified since the last save, all rows of it that were modified since the baseline are sent.
            After a change of this size, all blocks are sent again.
        config: Further settings of librdkafka, such as those for security; none by default.

    Raises:
        ConfigurationError: An argument is invalid.

    Examples:
        >>> cnr.KafkaRows("broker-1:9092,broker-2:9092", "dlrm-rows", compacted=True)
        KafkaRows(bootstrap='broker-1:9092,broker-2:9092', topic='dlrm-rows', compacted=True)
    """

    bootstrap: str
    topic: str
    timeout_secs: float = 10.0
    num_partitions: int = 4
    num_replicas: int | None = None
    retention_secs: float | None = 7 * 24 * 3600.0
    part_bytes: int = 512 << 10
    compacted: bool = False
    row_block_bytes: int = 8 << 20
    config: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return given_text(self)

    def __post_init__(self) -> None:
        check_type("bootstrap", self.bootstrap, str, "'host:port' of a broker")
        check_type("topic", self.topic, str, "the name of a topic")
        check_type("compacted", self.compacted, bool, "True or False")
        if not self.bootstrap:
            raise ConfigurationError("'bootstrap' is empty; pass 'host:port' of a broker")
        if not TOPIC.fullmatch(self.topic) or len(self.topic) > 240:
            raise ConfigurationError(f"'topic' must be up to 240 of a-z, A-Z, 0-9, '.', '_', '-' (got {self.topic!r})")
        check_positive("timeout_secs", self.timeout_secs)
        if self.timeout_secs > _MAX_TIMEOUT_SECS:
            raise ConfigurationError(f"'timeout_secs' must be {_MAX_TIMEOUT_SECS} or less (got {self.timeout_secs})")
        check_count("num_partitions", self.num_partitions, least=1)
        if self.num_replicas is not None:
            check_count("num_replicas", self.num_replicas, least=1)
        if self.retention_secs is not None:
            check_positive("retention_secs", self.retention_secs)
        check_count("row_block_bytes", self.row_block_bytes, 1, _MAX_BLOCK_BYTES)
        check_count("part_bytes", self.part_bytes, 1, MAX_RECORD_BYTES)
        check_type("config", self.config, Mapping, "a mapping of librdkafka's settings")
        if forbidden := sorted(self.config.keys() & OWN_SETTINGS):
            raise ConfigurationError(
                f"'config' must not contain {', '.join(forbidden)}, which KafkaRows sets; remove it"
            )

    @property
    def _log(self) -> KafkaLog:
        cluster = Cluster(self.bootstrap, self.timeout_secs, tuple(sorted(self.config.items())))
        record_bytes = max(self.part_bytes + _ENVELOPE_BYTES, BATCH_BYTES)
        rows = TopicRules(
            self.topic, self.num_partitions, self.retention_secs, record_bytes, self.num_replicas, self.compacted
        )
        markers = TopicRules(self.topic + MARKER_SUFFIX, 1, self.retention_secs, BATCH_BYTES, self.num_replicas)
        with cluster.errors("set up a client"):
            return logs_of_process.get(LogRules(cluster, rows, markers, self.part_bytes))

    def open(self, *, may_make: bool = True) -> bool:
        """Validate the configuration of the topics; create missing topics if ``may_make`` is true.

        Returns:
            Whether the topics exist.

        Raises:
            StoreError: Kafka does not answer in time.
            ConfigurationError: The configuration of a topic would lose rows.
        """
        return self._log.open(may_make) > 0

    @property
    def block_bytes(self) -> int | None:
        """Bytes of values in a row block; None if the topic keeps everything."""
        return self.row_block_bytes if self.compacted else None

    def target(self, root: str, rank: int, is_coordinator: bool = False) -> KafkaTarget | KafkaBlocks:
        """Return the target of one rank for one save; see ``RowLog``."""
        return self._log.target(root, rank, is_coordinator)

    def forget(self, root: str, packs: Sequence[Pack]) -> None:
        """Remove packs by their keys; see ``RowLog``."""
        self._log.forget(root, packs)

    def read(self, name: str, num_bytes: int, place: LogRange, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return bytes of a pack; see ``RowLog``."""
        if place.topic != self.topic:
            raise ConfigurationError(
                f"the rows of {name} are in the Kafka topic {place.topic!r}, but KafkaRows has topic {self.topic!r}; "
                f"pass KafkaRows with topic {place.topic!r}"
            )
        return self._log.read(name, num_bytes, place, start, stop)

    def holds(self, packs: Sequence[Pack]) -> bool:
        """Return whether the log still has packs; see ``RowLog``."""
        return self._log.holds(packs)

    def begin(self, root: str) -> None:
        """Begin a save; see ``RowLog``."""
        self._log.begin(root)

    def mark(self, marker: Marker, check: Callable[[], None]) -> None:
        """Commit a checkpoint; see ``RowLog``."""
        self._log.mark(marker, check)

    def markers(self, root: str, most: int) -> tuple[Marker, ...]:
        """Return some of the newest markers of a root, oldest first; see ``RowLog``."""
        return self._log.markers(root, most)

    def marked(self, root: str, manifests: Mapping[str, str | None]) -> frozenset[str]:
        """Return which of these manifests a marker has committed; see ``RowLog``."""
        return self._log.marked(root, manifests)

    def end(self) -> int:
        """Return the offset after the last marker; see ``RowLog``."""
        return self._log.end()

    def markers_from(self, offset: int, timeout_secs: float) -> tuple[Marker, ...]:
        """Return markers from an offset on; see ``RowLog``."""
        return self._log.markers_from(offset, timeout_secs)


def disconnect() -> None:
    """Close all connections of this process to Kafka. Call it while the process neither saves nor loads.

    It is for a process that continues without Kafka. Otherwise producers remain open for the next save, and consumers
    request records from the broker several times a second. A later save or load connects again.

    Examples:
        >>> from torchrec_cnr.kafka import disconnect
        >>> disconnect()
    """
    logs_of_process.close()
    consumers_of_process.close()

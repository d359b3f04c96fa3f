"""``KafkaRows``: what a writer, reader or subscriber is told of the log that rows go to."""

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

_ENVELOPE_BYTES = 4 << 10  # of a record, beside its value
_MAX_TIMEOUT_SECS = 900.0  # the longest transaction that brokers let be, by default
_MAX_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class KafkaRows:
    """Rows of deltas go to a Kafka topic; markers in ``<topic>-markers`` commit checkpoints.

    A topic either keeps everything for a time, and all checkpoints of that time can be loaded; or it is ``compacted``.

    Topics that are missing are made, with replicas on three brokers if there are as many; topics that would lose rows
    are refused.

    Attributes:
        bootstrap: ``host:port`` of a broker, or several, separated by commas.
        topic: For rows.
        timeout_secs: How long Kafka may not answer, before a save or load fails. A save that failed is not lost: its
            rows are in the next one.
        num_partitions: If the topic must be made. Several are read at once.
        num_replicas: If topics must be made; None for three, or as many as there are brokers.
        retention_secs: How long rows must stay; topics that forget sooner are refused. None for ever.
        part_bytes: Size of records.
        compacted: Whether the topic is compacted by Kafka: it then holds the newest version of each block of rows, and
            no more than two of them, so that its size is bounded by the model's and does not grow with the job. Only
            the newest checkpoint can be loaded then, and baselines; ``retention_secs`` is that of markers alone.
        row_block_bytes: Size of such a block, as values. All rows of it that were modified since the baseline are sent
            whenever one was modified since the last save. Another size later has all blocks sent once more.
        config: Further settings of librdkafka, such as those for security.

    Raises:
        ConfigurationError: An argument cannot work.
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
        if own := sorted(self.config.keys() & OWN_SETTINGS):
            raise ConfigurationError(f"'config' may not have {', '.join(own)}: KafkaRows sets it itself")

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
        """See that the topics are as they must be, and make those that are missing, unless told not to.

        Returns:
            Whether they are there.

        Raises:
            StoreError: Kafka does not answer in time.
            ConfigurationError: A topic would lose rows.
        """
        return self._log.open(may_make) > 0

    @property
    def block_bytes(self) -> int | None:
        """Bytes of values in a row block; None if the topic keeps everything."""
        return self.row_block_bytes if self.compacted else None

    def target(self, root: str, rank: int, is_coordinator: bool = False) -> KafkaTarget | KafkaBlocks:
        """What one save of one rank writes to; see ``RowLog``."""
        return self._log.target(root, rank, is_coordinator)

    def forget(self, root: str, packs: Sequence[Pack]) -> None:
        """Remove packs by their keys; see ``RowLog``."""
        self._log.forget(root, packs)

    def read(self, name: str, num_bytes: int, place: LogRange, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Bytes of a pack; see ``RowLog``."""
        if place.topic != self.topic:
            raise ConfigurationError(f"rows lie in topic {place.topic!r}, but KafkaRows has topic {self.topic!r}")
        return self._log.read(name, num_bytes, place, start, stop)

    def holds(self, packs: Sequence[Pack]) -> bool:
        """Whether packs are there; see ``RowLog``."""
        return self._log.holds(packs)

    def begin(self, root: str) -> None:
        """A save begins; see ``RowLog``."""
        self._log.begin(root)

    def mark(self, marker: Marker, check: Callable[[], None]) -> None:
        """Commit a checkpoint; see ``RowLog``."""
        self._log.mark(marker, check)

    def markers(self, root: str, most: int) -> tuple[Marker, ...]:
        """Some of the newest markers of a root, oldest first; see ``RowLog``."""
        return self._log.markers(root, most)

    def marked(self, root: str, manifests: Mapping[str, str | None]) -> frozenset[str]:
        """Which of these manifests a marker has committed; see ``RowLog``."""
        return self._log.marked(root, manifests)

    def end(self) -> int:
        """The offset behind the last marker; see ``RowLog``."""
        return self._log.end()

    def markers_from(self, offset: int, timeout_secs: float) -> tuple[Marker, ...]:
        """Markers from an offset on; see ``RowLog``."""
        return self._log.markers_from(offset, timeout_secs)


def disconnect() -> None:
    """End all connections of this process to Kafka, while it neither saves nor loads; later ones connect anew.

    For a process that goes on without: producers stay for the next save, and consumers ask the broker for records
    several times a second.
    """
    logs_of_process.close()
    consumers_of_process.close()

"""Topics: created with the settings that rows and markers need, and refused if they have other settings.

A topic with a shorter retention than expected would lose rows silently, and so would one whose replicas may disagree.
So relevant settings are checked before the first save, and the error says what to change. A compacted topic keeps the
last record of each key, so its retention is not checked. But its ``cleanup.policy`` must be exactly that: a topic that
also removes old records would lose rows, and so would compaction in a topic that must keep everything.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.kafka.clients import Cluster, logger

_MAX_REPLICAS = 3
_NUMBER = re.compile(r"-?\d{1,19}", re.ASCII)
_LOOK_SECS = 0.1


@dataclass(frozen=True)
class TopicRules:
    """The required settings of a topic.

    Attributes:
        name: Name of the topic.
        num_partitions: Smallest number of partitions; if it is 1, the topic must have exactly one.
        retention_secs: Smallest number of seconds for which records are kept; None for forever.
        record_bytes: Size in bytes that the largest record can have.
        num_replicas: Number of replicas if the topic is created; None for three, or as many as there are brokers.
        is_compacted: Whether the topic keeps the last record of each key, forever.
    """

    name: str
    num_partitions: int
    retention_secs: float | None
    record_bytes: int
    num_replicas: int | None = None
    is_compacted: bool = False

    @property
    def settings(self) -> dict[str, str]:
        """Kafka's settings of the topic."""
        common_settings = {"unclean.leader.election.enable": "false", "max.message.bytes": str(self.record_bytes)}
        if self.is_compacted:
            return {"cleanup.policy": "compact", **common_settings}
        retention = "-1" if self.retention_secs is None else str(round(1e3 * self.retention_secs))
        return {"cleanup.policy": "delete", "retention.ms": retention, "retention.bytes": "-1", **common_settings}

    def complaints(self, found: Mapping[str, str], num_partitions: int) -> list[str]:
        """Return the wrong settings of an existing topic, each with the expected value."""
        complaints = []
        if num_partitions < self.num_partitions or (self.num_partitions == 1 and num_partitions != 1):
            complaints.append(f"{num_partitions} partitions, expected {self.num_partitions}: use another topic")
        exact_keys = ("cleanup.policy", "unclean.leader.election.enable")
        wrong_keys = [key for key in exact_keys if found.get(key, self.settings[key]) != self.settings[key]]
        complaints += [f"{key}={found[key]}, expected {self.settings[key]}" for key in wrong_keys]
        for key in sorted({"retention.ms", "retention.bytes"} & self.settings.keys()):
            expected, actual = int(self.settings[key]), _number(found.get(key, "-1"))
            if actual is None or (actual != -1 and (expected == -1 or actual < expected)):
                complaints.append(f"{key}={found[key]}, expected {expected}" + ("" if expected == -1 else " or more"))
        max_bytes = _number(found.get("max.message.bytes", str(self.record_bytes)))
        if max_bytes is None or max_bytes < self.record_bytes:
            complaints.append(f"max.message.bytes={found['max.message.bytes']}, expected {self.record_bytes} or more")
        return complaints


def _number(text: str) -> int | None:
    """Return a setting as an integer; None for any other text, such as that of a setting that the broker hides."""
    return int(text) if _NUMBER.fullmatch(text) else None


class Topics:
    """The topics of a cluster.

    Args:
        cluster: The cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._admin = AdminClient(cluster.settings({}), logger=logger)

    def ensure(self, rules: TopicRules, may_make: bool) -> int:
        """Validate a topic, or create it; return its number of partitions, or 0 if it does not exist.

        Without ``may_make``, the topic is neither created nor validated, since the caller only reads it.

        Raises:
            ConfigurationError: The topic has other settings.
            StoreError: The broker does not answer in time.
        """
        with self._cluster.errors(f"look up topic {rules.name!r}"):
            deadline = time.monotonic() + self._cluster.timeout_secs
            while rules.name not in (metadata := self._admin.list_topics(timeout=self._cluster.timeout_secs)).topics:
                if (num_created := self._make(rules, len(metadata.brokers), may_make)) is not None:
                    return num_created
                if time.monotonic() > deadline:
                    raise KafkaException(KafkaError(KafkaError._UNKNOWN_TOPIC))
                time.sleep(_LOOK_SECS)
            num_partitions = len(metadata.topics[rules.name].partitions)
            if not may_make:
                return num_partitions
            resource = ConfigResource(ResourceType.TOPIC, rules.name)
            future = self._admin.describe_configs([resource], request_timeout=self._cluster.timeout_secs)[resource]
            settings = {key: str(entry.value) for key, entry in self._cluster.result(future).items()}
        complaints = rules.complaints(settings, num_partitions)
        if complaints:
            raise ConfigurationError(
                f"topic {rules.name!r} of Kafka at {self._cluster.bootstrap} would lose rows: {'; '.join(complaints)}; "
                f"change it with kafka-configs --alter --entity-type topics --entity-name {rules.name} --add-config …, "
                "or pass other arguments to KafkaRows"
            )
        return num_partitions

    def _make(self, rules: TopicRules, num_brokers: int, may_make: bool) -> int | None:
        """Try to create a topic; return its number of partitions, or None if it exists already.

        Without ``may_make``, the request is only validated, and the result is 0 if the topic does not exist. The answer
        is reliable, unlike the broker's list of topics.
        """
        num_replicas = rules.num_replicas or max(1, min(_MAX_REPLICAS, num_brokers))
        topic = NewTopic(rules.name, rules.num_partitions, num_replicas, config=rules.settings)
        future = self._admin.create_topics(
            [topic],
            operation_timeout=self._cluster.timeout_secs,
            request_timeout=self._cluster.timeout_secs,
            validate_only=not may_make,
        )[rules.name]
        try:
            self._cluster.result(future)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
            return None  # another rank was faster, or a broker that has just started did not list it
        if not may_make:
            return 0
        logger.info("created topic %s: %d partitions, %s", rules.name, rules.num_partitions, rules.settings)
        return rules.num_partitions

"""Topics: made with the settings that rows and markers need, and refused where they have others.

A topic that forgets records sooner than its owner thinks, or that two replicas may disagree about, would lose rows
without a word; so what matters is looked at before the first save, and the complaint says what to change. A topic that
keeps the last record of each key forgets nothing else, so that nothing else matters there; but one that removes old
records besides would, and so would one that was made to keep all.
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
    """What a topic must be like.

    Attributes:
        name: The topic.
        num_partitions: At least so many; exactly one if it is 1.
        retention_secs: Records are kept at least so long; None for ever.
        record_bytes: Of the largest record.
        num_replicas: If it must be made; None for three, or as many as there are brokers.
        is_compacted: Whether it keeps the last record of each key, and for ever.
    """

    name: str
    num_partitions: int
    retention_secs: float | None
    record_bytes: int
    num_replicas: int | None = None
    is_compacted: bool = False

    @property
    def settings(self) -> dict[str, str]:
        """With which it is made."""
        safe = {"unclean.leader.election.enable": "false", "max.message.bytes": str(self.record_bytes)}
        if self.is_compacted:
            return {"cleanup.policy": "compact", **safe}
        retention = "-1" if self.retention_secs is None else str(round(1e3 * self.retention_secs))
        return {"cleanup.policy": "delete", "retention.ms": retention, "retention.bytes": "-1", **safe}

    def complaints(self, found: Mapping[str, str], num_partitions: int) -> list[str]:
        """What is wrong with a topic that is there, each with what to change."""
        complaints = []
        if num_partitions < self.num_partitions or (self.num_partitions == 1 and num_partitions != 1):
            complaints.append(f"{num_partitions} partitions, expected {self.num_partitions}: use another topic")
        exactly = ("cleanup.policy", "unclean.leader.election.enable")
        wrong = [key for key in exactly if found.get(key, self.settings[key]) != self.settings[key]]
        complaints += [f"{key}={found[key]}, expected {self.settings[key]}" for key in wrong]
        for key in sorted({"retention.ms", "retention.bytes"} & self.settings.keys()):
            wanted, has = int(self.settings[key]), _number(found.get(key, "-1"))
            if has is None or (has != -1 and (wanted == -1 or has < wanted)):
                complaints.append(f"{key}={found[key]}, expected {wanted}" + ("" if wanted == -1 else " or more"))
        largest = _number(found.get("max.message.bytes", str(self.record_bytes)))
        if largest is None or largest < self.record_bytes:
            complaints.append(f"max.message.bytes={found['max.message.bytes']}, expected {self.record_bytes} or more")
        return complaints


def _number(text: str) -> int | None:
    """A setting that is a whole number; None for any other text, such as that of a setting that the broker hides."""
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
        """Check a topic, or make it; returns how many partitions it has, 0 if it is not there and may not be made.

        Who may not make it only reads it, and its settings are no concern of his.

        Raises:
            ConfigurationError: It has other settings.
            StoreError: The broker does not answer in time.
        """
        with self._cluster.errors(f"look up topic {rules.name!r}"):
            deadline = time.monotonic() + self._cluster.timeout_secs
            while rules.name not in (metadata := self._admin.list_topics(timeout=self._cluster.timeout_secs)).topics:
                if (made := self._make(rules, len(metadata.brokers), may_make)) is not None:
                    return made
                if time.monotonic() > deadline:
                    raise KafkaException(KafkaError(KafkaError._UNKNOWN_TOPIC))
                time.sleep(_LOOK_SECS)
            num_partitions = len(metadata.topics[rules.name].partitions)
            if not may_make:
                return num_partitions
            resource = ConfigResource(ResourceType.TOPIC, rules.name)
            future = self._admin.describe_configs([resource], request_timeout=self._cluster.timeout_secs)[resource]
            found = {key: str(entry.value) for key, entry in self._cluster.result(future).items()}
        complaints = rules.complaints(found, num_partitions)
        if complaints:
            raise ConfigurationError(
                f"topic {rules.name!r} of Kafka at {self._cluster.bootstrap} would lose rows: {'; '.join(complaints)}; "
                f"change it with kafka-configs --alter --entity-type topics --entity-name {rules.name} --add-config …, "
                "or give KafkaRows other arguments"
            )
        return num_partitions

    def _make(self, rules: TopicRules, num_brokers: int, may_make: bool) -> int | None:
        """How many partitions it has now; None if it is there already. Only this is certain to tell which."""
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
            return None  # another rank was faster; or the broker has just started, and did not tell of it
        if not may_make:
            return 0
        logger.info("made topic %s: %d partitions, %s", rules.name, rules.num_partitions, rules.settings)
        return rules.num_partitions

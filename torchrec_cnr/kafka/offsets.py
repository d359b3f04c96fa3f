"""The first and last offsets of partitions, read from their brokers."""

import time

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from torchrec_cnr.kafka.clients import Cluster, logger

_LOOK_SECS = 0.02


class Offsets:
    """The first and last offsets of partitions.

    Args:
        cluster: The cluster of the topics.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._admin = AdminClient(cluster.settings({}), logger=logger)

    def first(self, topic: str, partition: int) -> int:
        """Return the first offset that has not been removed.

        Raises:
            KafkaException: The broker does not answer in time.
        """
        return self._offset(TopicPartition(topic, partition), OffsetSpec.earliest(), IsolationLevel.READ_UNCOMMITTED)

    def end(self, topic: str, partition: int, isolation: IsolationLevel) -> int:
        """Return the offset after the last record; with ``READ_COMMITTED``, not beyond the first open transaction.

        Raises:
            KafkaException: The broker does not answer in time.
        """
        return self._offset(TopicPartition(topic, partition), OffsetSpec.latest(), isolation)

    def _offset(self, topic_partition: TopicPartition, spec: OffsetSpec, isolation: IsolationLevel) -> int:
        timeout_secs = self._cluster.timeout_secs
        deadline = time.monotonic() + timeout_secs
        while True:
            futures = self._admin.list_offsets(
                {topic_partition: spec}, isolation_level=isolation, request_timeout=timeout_secs
            )
            try:
                return int(self._cluster.result(futures[topic_partition]).offset)
            except KafkaException:  # a broker that has just started does not lead its partitions yet
                if time.monotonic() > deadline:
                    raise
            time.sleep(_LOOK_SECS)
            self._admin = AdminClient(self._cluster.settings({}), logger=logger)  # the old one keeps old leaders

"""Logs on a broker that tests kill."""

import pytest

import torchrec_cnr as cnr
from tests.servers.kafka_server import KafkaServer


@pytest.fixture
def rows(server: KafkaServer) -> cnr.KafkaRows:
    """A log of this test's own."""
    return cnr.KafkaRows(server.bootstrap, server.new_name(), num_partitions=1)

"""What tests of Kafka share: a broker that they may kill, and logs of their own."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import torchrec_cnr as cnr

if TYPE_CHECKING:
    from tests.servers.kafka_server import Broker, KafkaServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[KafkaServer]":
    """A broker that tests kill and freeze, and leave as they found it."""
    kafka_server = pytest.importorskip("tests.servers.kafka_server", exc_type=ModuleNotFoundError)
    with kafka_server.running(tmp_path_factory.mktemp("kafka-mortal")) as started:
        yield started


@pytest.fixture
def rows(kafka: "Broker") -> "cnr.KafkaRows":
    """A log of this test's own."""
    return cnr.KafkaRows(kafka.bootstrap, kafka.new_name(), num_partitions=2)

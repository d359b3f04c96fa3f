"""Packs in Kafka are read in any pieces and any order, and each gives the bytes that were written."""

import itertools
import os
import pickle
import random
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("confluent_kafka")

from confluent_kafka import Producer

from tests.support.killing import in_child
from torchrec_cnr.format.manifest import LogRange
from torchrec_cnr.kafka import KafkaRows, consumers, disconnect
from torchrec_cnr.kafka.clients import Cluster
from torchrec_cnr.kafka.consumers import RangeConsumer

if TYPE_CHECKING:
    from tests.servers.kafka_server import Broker

PART_BYTES = 10
KEPT_BYTES = 12 * PART_BYTES  # less than two packs
SIZES = (95, 100, 1, 73, 250)


@pytest.fixture
def rows(kafka: "Broker", monkeypatch: pytest.MonkeyPatch) -> KafkaRows:
    """A log of small parts, whose consumers keep few of them."""
    monkeypatch.setattr(consumers, "_KEPT_BYTES", KEPT_BYTES)
    found = KafkaRows(kafka.bootstrap, f"reading-{uuid.uuid4()}", num_partitions=2, part_bytes=PART_BYTES)
    found.open(may_make=True)
    return found


def put(rows: KafkaRows) -> list[tuple[str, bytes, LogRange]]:
    """Packs with their names and contents, in turns in two partitions."""
    target, source = rows.target("root", 0), random.Random(0)
    packs = []
    for number, size in enumerate(SIZES):
        name, content = f"pack-{number}", source.randbytes(size)
        packs.append((name, content, target.put(name, [content])))
    return packs


@pytest.mark.long
def test_any_pieces_in_any_order_are_right(rows: KafkaRows) -> None:
    """Whatever a consumer passes over, keeps or begins anew, a piece is what was written there."""
    packs = put(rows)
    assert len({place.partition for _, _, place in packs}) == 2
    piece = st.tuples(st.sampled_from(packs), st.integers(0, 249), st.integers(1, 250))

    @settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(piece, min_size=1, max_size=12))
    def check(pieces: list[tuple[tuple[str, bytes, LogRange], int, int]]) -> None:
        for (name, content, place), start, num_bytes in pieces:
            start = start % len(content)
            stop = min(len(content), start + num_bytes)
            assert bytes(rows.read(name, len(content), place, start, stop)) == content[start:stop]

    check()


@pytest.mark.long
def test_a_pack_in_pieces_and_then_whole_is_one_request(rows: KafkaRows, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a load reads: some parts, then all, then the next pack of the partition; the consumer begins once."""
    packs = [pack for pack in put(rows) if pack[2].partition == put(rows)[0][2].partition]
    places = []
    go_to = RangeConsumer._go_to

    def counted(self: RangeConsumer, topic: str, partition: int, start: int) -> None:
        places.append((topic, partition, start))
        go_to(self, topic, partition, start)

    monkeypatch.setattr(RangeConsumer, "_go_to", counted)
    for name, content, place in packs[:2]:
        pieces = itertools.chain([(at, at + 1) for at in range(0, len(content), 30)], [(0, len(content))])
        for start, stop in pieces:
            assert bytes(rows.read(name, len(content), place, start, stop)) == content[start:stop]
    assert len(places) == 1


def produce(kafka: "Broker", topic: str, values: list[bytes]) -> None:
    """Append records to the topic's only partition."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for value in values:
        producer.produce(topic, value, partition=0)
    assert producer.flush(30) == 0


def test_an_end_that_was_told_of_is_no_end_for_ever(kafka: "Broker") -> None:
    """What is written behind the end is read by a consumer that has been there, whether it took note of it or not."""
    topic, values = kafka.new_topic(), [b"%d" % number for number in range(9)]
    consumer = RangeConsumer(Cluster(kafka.bootstrap, timeout_secs=5), "read_committed")
    for num_written in (3, 6, 9):
        produce(kafka, topic, values[num_written - 3 : num_written])
        ahead = consumer.records(topic, 0, num_written - 3, num_written)
        assert [message.value() for message in itertools.islice(ahead, 3)] == values[num_written - 3 : num_written]
        time.sleep(0.3)  # the client hears of the end, and tells it to who asks next
    for start in (8, 0, 7, 0):
        found = [message.value() for message in consumer.records(topic, 0, start, 1 << 62)]
        assert found == values[start:]
    consumer.close()


def test_a_consumer_waits_at_the_end_for_longer_than_a_broker_may_be_silent(kafka: "Broker") -> None:
    """Nothing new is no time-out; what comes then is seen."""
    topic = kafka.new_topic()
    produce(kafka, topic, [b"0"])
    consumer = RangeConsumer(Cluster(kafka.bootstrap, timeout_secs=1), "read_committed")
    assert [message.value() for message in consumer.records(topic, 0, 0, 1 << 62, 0.5)] == [b"0"]
    for _ in range(4):
        assert list(consumer.records(topic, 0, 1, 1 << 62, 0.7)) == []
    produce(kafka, topic, [b"1"])
    assert [message.value() for message in consumer.records(topic, 0, 1, 1 << 62, 30)] == [b"1"]
    consumer.close()


def test_kept_records_are_of_their_topic(kafka: "Broker") -> None:
    """Another topic, or partition, with records at the same offsets is read itself."""
    topics = [kafka.new_topic(num_partitions=2), kafka.new_topic(num_partitions=2)]
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for topic, partition, number in itertools.product(topics, (0, 1), range(5)):
        producer.produce(topic, f"{topic} {partition} {number}".encode(), partition=partition)
    assert producer.flush(30) == 0
    consumer = RangeConsumer(Cluster(kafka.bootstrap, timeout_secs=30), "read_committed")
    for topic, partition, (start, stop) in itertools.product(topics, (0, 1), ((0, 1), (3, 4), (0, 4), (1, 3))):
        found = [message.value() for message in consumer.records(topic, partition, start, stop)]
        assert found == [f"{topic} {partition} {number}".encode() for number in range(start, stop)]
    consumer.close()


def test_a_forked_child_has_connections_of_its_own(kafka: "Broker") -> None:
    """It reads and writes although its parent did before, and the parent goes on with its own."""
    assert in_child(use_in_fork, kafka.bootstrap, f"forked-{uuid.uuid4()}") == (0, [b"parent", b"child", b"again"])


def use_in_fork(bootstrap: str, topic: str) -> tuple[int, list[bytes]]:
    """The exit code of a fork of this process that reads and writes, and what three saves wrote."""
    rows = KafkaRows(bootstrap, topic, num_partitions=1, timeout_secs=10)

    def put(content: bytes) -> LogRange:
        return rows.target("root", 0).put("pack", [content])

    def read(content: bytes, place: LogRange) -> bytes:
        return bytes(rows.read("pack", len(content), place, 0, len(content)))

    places = {b"parent": put(b"parent")}
    assert read(b"parent", places[b"parent"]) == b"parent"
    assert rows.markers("root", 1) == ()
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            assert read(b"parent", places[b"parent"]) == b"parent"
            assert rows.markers("root", 1) == ()
            os.write(sending, pickle.dumps(put(b"child")))
            disconnect()
            os._exit(0)
        os._exit(1)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        found = pipe.read()
    exitcode = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if found:
        places[b"child"] = pickle.loads(found)
    places[b"again"] = rows.target("root", 1).put("pack", [b"again"])
    return exitcode, [read(content, place) for content, place in places.items()]

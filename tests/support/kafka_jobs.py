"""Jobs whose rows go to Kafka: what their topics hold, and saves whose broker vanishes or forgets."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Message, Producer, TopicPartition

import torchrec_cnr as cnr
from tests.servers.kafka_server import Broker, KafkaServer
from tests.support.faults import InjectedError
from tests.support.models import Job, plain_job
from torchrec_cnr.format.manifest import MANIFEST_FILE, LogRange
from torchrec_cnr.kafka.pack_targets import KafkaTarget
from torchrec_cnr.storage.store import Store

SECS = 30.0


def large_job(seed: int) -> Job:
    """A model whose deltas fill several packs of 1 KiB."""
    return plain_job(seed, "adagrad", rows=(400, 300), dims=(16, 8))


def ranges(path: str | Path) -> list[LogRange]:
    """Where the packs of a checkpoint lie in the log; nothing of a checkpoint that has files only."""
    return [pack.log for pack in cnr.read_checkpoint(path).manifest.packs if pack.log is not None]


def marked(rows: cnr.KafkaRows) -> list[str]:
    """Names of committed checkpoints, in the order of their markers, as a plain consumer sees them."""
    found = records(Broker(rows.bootstrap), f"{rows.topic}-markers", isolation="read_committed")
    return [json.loads(message.value() or b"")["name"] for message in found if message.key()]


def records(broker: Broker, topic: str, partition: int = 0, isolation: str = "read_uncommitted") -> list[Message]:
    """All records of a partition, but not what ends transactions."""
    settings: dict[str, Any] = {
        "bootstrap.servers": broker.bootstrap,
        "group.id": "tests",
        "enable.partition.eof": True,
    }
    settings["fetch.wait.max.ms"] = 10  # or there is no end for as long as somebody writes
    consumer = Consumer({**settings, "isolation.level": isolation, "log_level": 2})
    consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING)])
    found: list[Message] = []
    deadline = time.monotonic() + SECS
    while time.monotonic() < deadline:
        message = consumer.poll(1.0)
        if message is not None and message.error() is not None:
            consumer.close()
            return found
        if message is not None:
            found.append(message)
    raise AssertionError(f"no end of {topic}")


def produce(
    broker: Broker, topic: str, *sent: tuple[bytes, bytes, list[tuple[str, bytes]]], partition: int = 0
) -> None:
    """Send records without a transaction: keys, values and headers."""
    producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 2})
    for key, value, headers in sent:
        producer.produce(topic, value, key, partition, headers=headers)
        assert producer.flush(SECS) == 0  # one at a time: they must lie in this order


def rewrite(
    broker: Broker, topic: str, found: dict[int, tuple[bytes, bytes, list[tuple[str, bytes]]]], **settings: str
) -> None:
    """Delete a topic of one partition and make it anew with other records, by offset; others lie in between."""
    admin = broker.admin()
    admin.delete_topics([topic])[topic].result(SECS)
    deadline = time.monotonic() + SECS
    while topic in admin.list_topics(timeout=SECS).topics:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while True:  # the broker goes on deleting it
        try:
            broker.make_topic(topic, **settings)
        except KafkaException:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            break
    filler = (b"filler", b"", [])
    produce(broker, topic, *(found.get(offset, filler) for offset in range(max(found, default=-1) + 1)))


def part(message: Message) -> tuple[bytes, bytes, list[tuple[str, bytes]]]:
    """What a record was sent with."""
    return message.key() or b"", message.value() or b"", list(message.headers() or [])  # type: ignore[arg-type]


@contextlib.contextmanager
def failing_commit(
    when: str, error: Exception | None = None, num_times: int = 1 << 30, act: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Saves of this process fail ``before`` their marker is sent, or ``after`` that, before the manifest has its name.

    Args:
        when: Of the two.
        error: What they fail with.
        num_times: How many do.
        act: Done then.
    """
    left, is_marked = num_times, False
    mark, put_new = cnr.KafkaRows.mark, Store.put_new

    def fail() -> None:
        nonlocal left
        if left > 0:
            left -= 1
            act()
            raise error if error is not None else InjectedError(f"failed {when} the marker")

    def failing_mark(rows: cnr.KafkaRows, *rest: Any) -> None:
        nonlocal is_marked
        if when == "before":
            fail()
        mark(rows, *rest)
        is_marked = True

    def failing_put_new(store: Store, name: str, *rest: Any) -> None:
        if name == MANIFEST_FILE and is_marked:  # and none whose save was before
            fail()
        put_new(store, name, *rest)

    with (
        mock.patch.object(cnr.KafkaRows, "mark", failing_mark),
        mock.patch.object(Store, "put_new", failing_put_new),
    ):
        yield


def with_timeout(rows: cnr.KafkaRows, timeout_secs: float) -> cnr.KafkaRows:
    """The same log, with less patience."""
    return replace(rows, timeout_secs=timeout_secs)


@contextlib.contextmanager
def absent_at(moment: str, server: KafkaServer, how: str) -> Iterator[None]:
    """The broker of this process's saves is killed or frozen at a moment, and there again when the block is left.

    Args:
        moment: "begin" of the save, before "rows" are sent, before the "marker" is, or before the manifest's "name".
        how: "killed" or "frozen".
    """
    with contextlib.ExitStack() as stack:
        stack.callback(wait_until_well, server)
        stack.callback(server.start)
        gone = []

        def vanish() -> None:
            if gone:
                return
            gone.append(True)
            if how == "killed":
                server.kill()
            else:
                stack.enter_context(server.frozen())

        owner, name = _MOMENTS[moment]
        original = getattr(owner, name)

        def act(self: Any, *rest: Any, **more: Any) -> Any:
            if moment != "name" or rest[0] == MANIFEST_FILE:
                vanish()
            return original(self, *rest, **more)

        stack.enter_context(mock.patch.object(owner, name, act))
        yield
        assert gone, f"no {moment}"


def wait_until_well(server: KafkaServer) -> None:
    """Until a broker that was away does all of its work again, which may take it long on a busy machine."""
    deadline = time.monotonic() + 2 * SECS
    while True:
        try:
            server.new_topic()
        except (KafkaException, TimeoutError):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            return


_MOMENTS: dict[str, tuple[type, str]] = {
    "begin": (cnr.KafkaRows, "begin"),
    "rows": (KafkaTarget, "put"),
    "marker": (cnr.KafkaRows, "mark"),
    "name": (Store, "put_new"),
}

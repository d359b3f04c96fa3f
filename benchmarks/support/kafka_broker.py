"""A Kafka broker to measure with: one that was named on the command line, or one that the tests know how to start."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.support.rounds import Setup


@contextmanager
def broker(setup: Setup) -> Iterator[str | None]:
    """``host:port`` of a broker; None where there is none, and none can be started."""
    if setup.kafka is not None:
        yield setup.kafka
        return
    server = _server(setup)
    if server is None:
        yield None
        return
    try:
        server.start()
        yield str(server.bootstrap)
    finally:
        server.kill_all()


def _server(setup: Setup) -> Any:
    # By name, because benchmarks do without the tests, and without what they need, where there is a broker.
    try:
        kafka_server = importlib.import_module("tests.servers.kafka_server")
    except ModuleNotFoundError as error:
        setup.say(f"no broker: {error}")
        return None
    folder = setup.folder / "broker"
    folder.mkdir()
    try:
        return kafka_server.KafkaServer(folder)
    except kafka_server.kafka_release.UnavailableError as error:
        setup.say(f"no broker: {error}")
        return None

"""A Kafka broker and an S3 bucket to measure with, given on the command line or started as the tests do."""

import importlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec

from benchmarks.support.rounds import Setup
from torchrec_cnr.storage.urls import without_client


@contextmanager
def broker(setup: Setup) -> Iterator[str | None]:
    """Yield ``host:port`` of a broker, or None if none is given and none can be started."""
    if setup.kafka is not None:
        yield setup.kafka
        return
    server = _kafka_server(setup)
    if server is None:
        yield None
        return
    try:
        server.start()
        yield str(server.bootstrap)
    finally:
        server.kill_all()


def _kafka_server(setup: Setup) -> Any:
    # Imported by name, because benchmarks need neither the tests nor their dependencies if a server is given.
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


@contextmanager
def bucket(setup: Setup) -> Iterator[str | None]:
    """Yield an unused bucket and path, without a protocol, or None if none is given and none can be started."""
    if setup.s3 is not None:
        fs, path = fsspec.core.url_to_fs(f"{without_client(setup.s3).rstrip('/')}/{uuid.uuid4().hex}")
        try:
            yield path
        finally:  # the bucket belongs to the user, who pays for its storage
            fs.invalidate_cache()
            if fs.exists(path):
                fs.rm(path, recursive=True)
        return
    try:
        s3_servers = importlib.import_module("tests.servers.s3_servers")
    except ModuleNotFoundError as error:
        setup.say(f"no S3: {error}")
        yield None
        return
    folder = setup.folder / "server"
    folder.mkdir()
    with s3_servers.running(s3_servers.Moto(folder)) as server, s3_servers.configured(server.variables()):
        yield f"{s3_servers.BUCKET}/benchmark"

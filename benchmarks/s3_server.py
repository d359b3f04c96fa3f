"""A bucket to measure with: one that was named on the command line, or one of a server that the tests start."""

import importlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.rounds import Setup


@contextmanager
def bucket(setup: Setup) -> Iterator[str | None]:
    """Bucket and path, without a protocol, where nothing is yet; None where there is none, and none can be started."""
    if setup.s3 is not None:
        yield f"{setup.s3.removeprefix('s3://').rstrip('/')}/{uuid.uuid4().hex}"
        return
    # By name, because benchmarks do without the tests, and without what they need, where there is a bucket.
    try:
        s3_servers = importlib.import_module("tests.s3_servers")
    except ModuleNotFoundError as error:
        setup.say(f"no S3: {error}")
        yield None
        return
    folder = setup.folder / "server"
    folder.mkdir()
    with s3_servers.running(s3_servers.Moto(folder)) as server, s3_servers.configured(server.variables()):
        yield f"{s3_servers.BUCKET}/benchmark"

"""A bucket to measure with: one that was named on the command line, or one of a server that the tests start."""

import importlib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec

from benchmarks.support.rounds import Setup
from torchrec_cnr.storage.urls import without_client


@contextmanager
def bucket(setup: Setup) -> Iterator[str | None]:
    """Bucket and path, without a protocol, where nothing is yet; None where there is none, and none can be started."""
    if setup.s3 is not None:
        fs, path = fsspec.core.url_to_fs(f"{without_client(setup.s3).rstrip('/')}/{uuid.uuid4().hex}")
        try:
            yield path
        finally:  # it is somebody's own, and paid for
            fs.invalidate_cache()
            if fs.exists(path):
                fs.rm(path, recursive=True)
        return
    # By name, because benchmarks do without the tests, and without what they need, where there is a bucket.
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

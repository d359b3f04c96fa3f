"""S3 servers on loopback, started by the tests: moto, which has atomic conditional writes, and OpenStack Swift.

Swift is a production server: it checks signatures, keeps its objects on disk, and survives being killed. A conditional
write is refused when the name exists, but of several writers at once more than one may win.
"""

import getpass
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import boto3
import botocore.config
import pytest
from s3fs import S3FileSystem

from torchrec_cnr.storage.obstore_s3 import ObstoreS3
from torchrec_cnr.storage.s3fs_client import S3

START_SECS = 60.0
BUCKET = "bucket"
PROTOCOLS = ("s3", "s3+obstore")


def _missing(package: str) -> str | None:
    is_there = importlib.util.find_spec(package) is not None
    return None if is_there else f"{package} is not installed; it is in requirements/cpu.txt"


@dataclass(eq=False)
class S3Server:
    """A server, started by ``start`` and ended by ``kill``.

    Attributes:
        folder: Where it may write.
        key: Access key.
        secret: Secret key.
        port: It listens on this and, if it is several processes, on the ports behind.
        missing: Why it cannot be started here; None if it can.
    """

    missing: ClassVar[str | None] = None
    folder: Path
    key: str = "testing"
    secret: str = "testing"
    num_ports: int = 1
    port: int = 0
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def commands(self) -> list[list[str]]:
        """What to start, last the process that listens on ``port``."""
        raise NotImplementedError

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers.

        Of several processes, the last one is started when the others listen. Else it would know of no bucket.
        """
        self.port = self.port or _free_ports(self.num_ports)
        *others, front = self.commands()
        self._run(others, lambda: all(map(_listens, range(self.port + 1, self.port + self.num_ports))))
        self._run([front], self._answers)

    def _run(self, commands: list[list[str]], are_ready: Callable[[], bool]) -> None:
        with (self.folder / "log").open("ab") as log:
            for command in commands:
                self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
        deadline = time.monotonic() + START_SECS
        while not are_ready():
            dead = [process for process in self._processes if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"no server: {(self.folder / 'log').read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill all of it, at once."""
        for process in self._processes:
            os.kill(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def client(self) -> "boto3.client":
        """A client that knows nothing of fsspec."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
            config=botocore.config.Config(retries={"max_attempts": 10}),
        )

    def variables(self, endpoint: str | None = None) -> Mapping[str, str]:
        """What S3 clients are configured by."""
        return {
            "AWS_ENDPOINT_URL_S3": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=5).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


class Moto(S3Server):
    """An emulator. It forgets everything when it is killed."""

    missing = _missing("moto")

    def commands(self) -> list[list[str]]:
        """One process."""
        return [[sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]]


class Swift(S3Server):
    """OpenStack Swift with one disk, and no replicas."""

    missing = _missing("swift")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "test:tester", "testing", num_ports=len(_SWIFT))

    def commands(self) -> list[list[str]]:
        """Four processes, and their configuration."""
        (self.folder / "dev/d1").mkdir(parents=True, exist_ok=True)
        ports = {name: self.port + number for number, name in enumerate(_SWIFT)}
        (self.folder / "swift.conf").write_text(_SWIFT_CONF)
        for name in _SWIFT:
            common = _COMMON_CONF.format(port=ports[name], user=getpass.getuser(), folder=self.folder)
            pipeline = _PROXY_CONF if name == "proxy" else _SERVER_CONF.format(name=name)
            (self.folder / f"{name}.conf").write_text(common + pipeline)
        if not (self.folder / "object.ring.gz").exists():
            rings = {name: port for name, port in ports.items() if name != "proxy"}
            subprocess.run([sys.executable, "-c", _MAKE_RINGS, str(self.folder), repr(rings)], check=True)
        bin_ = Path(sys.executable).parent
        return [
            [sys.executable, f"{bin_}/swift-{name}-server", f"{self.folder}/{name}.conf"] for name in reversed(_SWIFT)
        ]


_SWIFT = ("proxy", "object", "container", "account")
_SWIFT_CONF = """[swift-hash]
swift_hash_path_suffix = local
swift_hash_path_prefix = local
[storage-policy:0]
name = p0
default = yes
[swift-constraints]
max_header_size = 16384
"""
_COMMON_CONF = """[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {folder}
devices = {folder}/dev
mount_check = false
log_level = WARNING
fallocate_reserve = 0
disable_fallocate = true
"""
_SERVER_CONF = """[pipeline:main]
pipeline = {name}-server
[app:{name}-server]
use = egg:swift#{name}
"""
_FILTERS = ("catch_errors", "gatekeeper", "healthcheck", "listing_formats", "bulk", "copy", "slo", "dlo")
_PROXY_CONF = f"""[pipeline:main]
pipeline = {" ".join(_FILTERS[:5])} s3api tempauth {" ".join(_FILTERS[5:])} proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
""" + "".join(f"[filter:{name}]\nuse = egg:swift#{name}\n" for name in _FILTERS)
_MAKE_RINGS = """
import ast, sys
from swift.common.ring import RingBuilder
folder, ports = sys.argv[1], ast.literal_eval(sys.argv[2])
for name, port in ports.items():
    builder = RingBuilder(4, 1, 1)
    place = {"id": 0, "region": 1, "zone": 1, "ip": "127.0.0.1", "port": port, "device": "d1", "weight": 1, "meta": ""}
    builder.add_dev({**place, "replication_ip": "127.0.0.1", "replication_port": port})
    builder.rebalance()
    builder.get_ring().save(f"{folder}/{name}.ring.gz")
"""


@contextmanager
def running(server: S3Server) -> Iterator[S3Server]:
    """A server with a bucket; the test is skipped where it is not installed."""
    if server.missing is not None:
        pytest.skip(server.missing)
    server.start()
    try:
        server.client().create_bucket(Bucket=BUCKET)
        yield server
    finally:
        server.kill()


@contextmanager
def configured(variables: Mapping[str, str]) -> Iterator[None]:
    """S3 clients of this process, and of those it starts, are configured so."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        _forget_clients()
        yield
    _forget_clients()


def _forget_clients() -> None:
    for client in (S3FileSystem, S3, ObstoreS3):
        client.clear_instance_cache()


def _free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
        sockets = [socket.socket() for _ in range(count)]
        try:
            for number, one in enumerate(sockets):
                one.bind(("127.0.0.1", port + number))
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
        return port

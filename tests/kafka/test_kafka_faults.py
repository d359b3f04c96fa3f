"""Kafka that is not there, dies, hangs, forgets or lies: nothing committed is lost, and errors say what to do."""

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.servers import kafka_server
from tests.servers.kafka_server import KafkaServer
from tests.support import faults, models
from tests.support.jobs import SavingJob
from tests.support.kafka_jobs import (
    SECS,
    absent_at,
    failing_commit,
    large_job,
    marked,
    part,
    produce,
    ranges,
    records,
    rewrite,
    wait_until_well,
    with_timeout,
)
from tests.support.killing import in_child
from tests.support.models import Whole, differing, state, torchrec_job, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.format.manifest import LogRange
from torchrec_cnr.kafka.marker_topic import MarkerTopic
from torchrec_cnr.kafka.producers import Producing

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

IMPATIENT_SECS = 2.0  # with less, a busy machine has not ended a transaction that was left open
FAIL_FAST_SECS = 10.0
LIMIT_SECS = 100.0  # of processes that import torch


@pytest.fixture
def rows(server: KafkaServer) -> cnr.KafkaRows:
    """A log of this test's own."""
    return cnr.KafkaRows(server.bootstrap, server.new_name(), num_partitions=1)


# A broker that is not there


def test_an_absent_broker_is_told_at_once() -> None:
    """Whoever begins without it fails within the time that the log has, and says where it should be."""
    bootstrap = f"127.0.0.1:{kafka_server.free_ports()}"
    rows = cnr.KafkaRows(bootstrap, "rows", timeout_secs=IMPATIENT_SECS)
    for act in (
        rows.open,
        lambda: rows.markers("root", 1),
        lambda: rows.begin("root"),
        lambda: rows.markers_from(0, 0),
    ):
        began = time.monotonic()
        with pytest.raises(cnr.StoreError, match=bootstrap):
            act()
        assert time.monotonic() - began < FAIL_FAST_SECS


def test_jobs_do_not_begin_without_a_broker(tmp_path: Path) -> None:
    """Neither writer nor manager nor restore; and nothing is left in the root."""
    rows = cnr.KafkaRows(f"127.0.0.1:{kafka_server.free_ports()}", "rows", timeout_secs=IMPATIENT_SECS)
    job = models.plain_job(1)
    tracker = cnr.RowTracker(job.model)
    acts: list[Callable[[], object]] = [
        lambda: cnr.CNRStorageWriter(tmp_path / "0", row_log=rows),
        lambda: cnr.CheckpointManager(tmp_path, tracker, row_log=rows),
        lambda: cnr.latest(tmp_path, row_log=rows),
        lambda: cnr.restore_newest(tmp_path, state(job), row_log=rows),
    ]
    for act in acts:
        began = time.monotonic()
        with pytest.raises(cnr.StoreError, match=rows.bootstrap):
            act()
        assert time.monotonic() - began < FAIL_FAST_SECS
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("moment", ["begin", "rows", "marker", "name"])
@pytest.mark.parametrize("how", ["frozen", pytest.param("killed", marks=pytest.mark.slow)])
def test_a_broker_that_is_gone_costs_nothing_but_the_save(
    tmp_path: Path, server: KafkaServer, rows: cnr.KafkaRows, moment: str, how: str
) -> None:
    """At whatever moment of a save: it fails with a StoreError, or its marker was there; the next has its rows."""
    job = SavingJob(tmp_path, row_log=with_timeout(rows, IMPATIENT_SECS))
    job.train_and_save("0", "1")
    train(job.job, 5)
    with absent_at(moment, server, how):
        if moment == "name":
            job.save("2")
        else:
            cause = job.failure("2")
            assert isinstance(cause, cnr.StoreError), cause
            assert server.bootstrap in str(cause)
    assert marked(rows) == ["0", "1", "2"][: 3 if moment == "name" else 2]
    train(job.job, 6)
    job.save("3")
    assert cnr.read_checkpoint(tmp_path / "3").parent == f"{tmp_path}/{2 if moment == 'name' else 1}"
    for name in marked(rows):
        job.assert_loads(name)
    job.close()


@pytest.mark.timeout(120)
def test_a_broker_that_hangs_fails_loads_and_looks(tmp_path: Path, server: KafkaServer, rows: cnr.KafkaRows) -> None:
    """Typed, on time, and not as damage; when it is back, all is there."""
    impatient = with_timeout(rows, IMPATIENT_SECS)
    job = SavingJob(tmp_path, row_log=impatient)
    job.train_and_save("0", "1", "2")
    job.assert_loads("2")
    other = with_timeout(rows, 1.5)  # which has no records at hand
    other.open()
    with ExitStack() as stack:
        stack.callback(wait_until_well, server)
        stack.enter_context(server.frozen())
        for act in (lambda: cnr.latest(tmp_path, row_log=impatient), lambda: impatient.markers_from(0, 0)):
            with pytest.raises(cnr.StoreError, match=server.bootstrap):
                act()
        with pytest.raises(CheckpointException) as raised:
            models.load(job.build(2), f"{tmp_path}/2", row_log=other)
        assert {type(cause) for cause in faults.causes(raised.value).values()} == {cnr.StoreError}
    job.row_log = rows
    job.assert_loads("2")
    assert cnr.latest(tmp_path, row_log=rows) == f"{tmp_path}/2"
    job.close()


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_marker_that_is_not_acknowledged_is_looked_for(
    tmp_path: Path, rows: cnr.KafkaRows, monkeypatch: pytest.MonkeyPatch, is_sent: bool
) -> None:
    """Where the broker does not say whether it has the marker, the topic does: that is the fate of the save."""
    job = SavingJob(tmp_path, row_log=rows)
    job.train_and_save("0", "1")
    transact = Producing._transact

    def unclear(producing: Producing, topic: str, *rest: Any, **more: Any) -> list[int]:
        if not topic.endswith("-markers"):
            return transact(producing, topic, *rest, **more)
        monkeypatch.undo()
        if is_sent:
            transact(producing, topic, *rest, **more)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    monkeypatch.setattr(Producing, "_transact", unclear)
    train(job.job, 7)
    if is_sent:
        job.save("2")
    else:
        assert isinstance(job.failure("2"), cnr.StoreError)
    assert marked(rows) == ["0", "1", "2"][: 3 if is_sent else 2]
    job.train_and_save("3")
    assert cnr.read_checkpoint(tmp_path / "3").parent == f"{tmp_path}/{marked(rows)[-2]}"
    job.assert_loads("3")
    job.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_manager_tries_again(tmp_path: Path, rows: cnr.KafkaRows, when: str) -> None:
    """A save that was refused is tried again; one whose marker was there already is committed, and no failure."""
    job = models.plain_job(1, "adagrad")
    manager = cnr.CheckpointManager(tmp_path, cnr.RowTracker(job.model), row_log=rows, policy=cnr.Consecutive())
    manager.save(1, state(job))
    train(job, 2)
    cut = whole(state(job))
    with failing_commit(when, cnr.StoreError("refused"), num_times=1):
        saved = manager.save(2, state(job))
    assert saved is not None
    assert marked(rows) == ["step-1", "step-2"]
    train(job, 3)
    assert manager.save(3, state(job)) is not None
    manager.close()
    assert cnr.read_checkpoint(tmp_path / "step-3").parent == f"{tmp_path}/step-2"
    assert differing(models.load(models.plain_job(2, "adagrad"), f"{tmp_path}/step-2", row_log=rows), cut) == []


# Processes that die


def _die_in_commit(root: str, rows: cnr.KafkaRows, when: str) -> None:
    """Go on from the newest checkpoint, train, and die in the commit of the next."""
    job = SavingJob(root, row_log=rows, seed=5)
    job.restore()
    train(job.job, 10)
    with failing_commit(when, act=lambda: os._exit(9)):
        job.save("2")


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_a_process_that_dies_in_its_commit(
    tmp_path: Path, rows: cnr.KafkaRows, rank_pool: RankPools, when: str
) -> None:
    """Before the marker, nothing was committed; behind it, the next who looks gives the manifest its name."""
    job = SavingJob(tmp_path, row_log=rows)
    job.train_and_save("0", "1")
    assert in_child(_die_in_commit, str(tmp_path), rows, when) == 9
    newest = "2" if when == "after" else "1"
    assert not (tmp_path / "2/manifest.json").exists()
    assert cnr.latest(tmp_path) == f"{tmp_path}/1", "who does not ask the log"
    assert rank_pool(2).run(_restore_on_ranks, str(tmp_path), rows) == [f"{tmp_path}/{newest}"] * 2
    assert cnr.latest(tmp_path) == f"{tmp_path}/{newest}", "now it has its name"
    train(job.job, 10)
    job.assert_loads(newest, whole(state(job.job)) if when == "after" else job.saved["1"])
    following = SavingJob(tmp_path, row_log=rows, seed=6)
    assert following.restore() == newest
    following.train_and_save("3")
    following.assert_loads("3")
    following.close()


def _restore_on_ranks(rank: int, root: str, rows: cnr.KafkaRows) -> str:
    job = models.plain_job(7, "adagrad")
    found = cnr.restore_newest(root, state(job), row_log=rows)
    assert found is not None
    return found[0]


def test_other_roots_do_not_hide_what_was_committed(tmp_path: Path, rows: cnr.KafkaRows) -> None:
    """However many markers others have written since: a checkpoint that lacks its name is found."""
    job, other = SavingJob(tmp_path / "a", row_log=rows), SavingJob(tmp_path / "b", row_log=rows)
    job.train_and_save("0", "1")
    assert in_child(_die_in_commit, job.root, rows, "after") == 9
    other.train_and_save(*(str(number) for number in range(12)))
    assert cnr.latest(job.root, row_log=rows) == f"{job.root}/2"
    other.close()


def _fail_on_ranks(rank: int, root: str, rows: cnr.KafkaRows, when: str) -> tuple[list[str], Whole]:
    job = SavingJob(root, row_log=rows, build=torchrec_job)
    job.train_and_save("0", "1")
    train(job.job, 7)
    with failing_commit(when) if rank == 0 else ExitStack(), pytest.raises(CheckpointException) as raised:
        job.save("2")
    assert set(faults.causes(raised.value)) == {0}
    newest = [cnr.latest(root, row_log=rows) or ""]
    dist.barrier()
    train(job.job, 8)
    job.save("3")
    newest.append(cnr.read_checkpoint(f"{root}/3").parent or "")
    job.close()
    return newest, job.saved["3"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_all_ranks_see_the_same_fate_of_a_save(
    tmp_path: Path, rows: cnr.KafkaRows, rank_pool: RankPools, when: str
) -> None:
    """A commit that fails on its way is committed for all ranks or for none, and the next save has every row."""
    expected = f"{tmp_path}/{2 if when == 'after' else 1}"
    (newest, saved), (of_other, _) = rank_pool(2).run(_fail_on_ranks, str(tmp_path), rows, when)
    assert newest == of_other == [expected, expected]
    assert rank_pool(2).run(_differing_on_ranks, f"{tmp_path}/3", rows, saved) == [[], []]


def _differing_on_ranks(rank: int, path: str, rows: cnr.KafkaRows, saved: Whole) -> list[str]:
    return differing(models.load(torchrec_job(9), path, row_log=rows), saved)


# Jobs that were thought dead


def _be_zombie(root: str, rows: cnr.KafkaRows, moment: str) -> str:
    """Save, and stop in the next save at a moment until a successor has saved; how that save ends."""
    job = SavingJob(root, row_log=rows)
    job.train_and_save("0", "1")
    owner, name = {
        "begin": (cnr.KafkaRows, "begin"),
        "rows": (cnr.KafkaRows, "target"),
        "check": (cnr.KafkaRows, "mark"),
        "marker": (MarkerTopic, "put"),
    }[moment]
    original = getattr(owner, name)

    def stop(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, original)
        Path(root, "stopped").touch()
        faults.wait_for(Path(root, "succeeded"))
        return original(*args, **kwargs)

    setattr(owner, name, stop)
    train(job.job, 8)
    cause = job.failure("zombie")
    return type(cause).__name__


def _succeed(root: str, rows: cnr.KafkaRows) -> None:
    faults.wait_for(Path(root, "stopped"))
    job = SavingJob(root, row_log=rows, seed=3)
    assert job.restore() == "1"
    train(job.job, 9)
    job.save("2")
    Path(root, "succeeded").touch()
    for number in range(3, 8):
        train(job.job, number)
        job.save(str(number))
    job.assert_loads("7")


@pytest.mark.parametrize("moment", [pytest.param("begin", marks=pytest.mark.slow), "rows", "check", "marker"])
def test_a_zombie_commits_nothing(tmp_path: Path, rows: cnr.KafkaRows, moment: str) -> None:
    """Wherever it stopped: it is fenced, its marker never comes, and its successor saves as if it were alone."""
    root = str(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        zombie = threads.submit(in_child, _be_zombie, root, rows, moment)
        successor = threads.submit(in_child, _succeed, root, rows)
        assert successor.result(LIMIT_SECS) is None
        assert zombie.result(LIMIT_SECS) == "FencedError"
    assert marked(rows) == [*"01234567"]
    assert cnr.latest(root, row_log=rows) == f"{root}/7"
    assert not (tmp_path / "zombie/manifest.json").exists()


# Records that are not what they should be


@dataclass(frozen=True)
class Case:
    """What is wrong with the records of a pack of four or more, and what is said of it.

    Attributes:
        spoil: Gets records by offset and the pack's place, and changes them.
        says: What the error has beside topic, partition and name of the pack.
    """

    spoil: Callable[[dict[int, Any], LogRange], None]
    says: str


def _doubled(found: dict[int, Any], place: LogRange) -> None:
    found[place.first + 1] = found[place.first]


def _swapped(found: dict[int, Any], place: LogRange) -> None:
    found[place.first], found[place.first + 1] = found[place.first + 1], found[place.first]


def _cut(found: dict[int, Any], place: LogRange) -> None:
    key, value, headers = found[place.first + 1]
    found[place.first + 1] = key, value[:-1], headers


def _other_total(found: dict[int, Any], place: LogRange) -> None:
    key, value, _ = found[place.first + 1]
    found[place.first + 1] = key, value, [("part", b"1/99")]


def _altered(found: dict[int, Any], place: LogRange) -> None:
    key, value, headers = found[place.first + 1]
    found[place.first + 1] = key, value[:-1] + bytes([value[-1] ^ 1]), headers


def _short(found: dict[int, Any], place: LogRange) -> None:
    for offset in [offset for offset in found if offset >= place.last]:
        del found[offset]


CASES = {
    "a part is missing": Case(lambda found, place: found.pop(place.first + 1), r"part 1\D"),
    "the first part is missing": Case(lambda found, place: found.pop(place.first), r"part 0\D"),
    "the last part is missing": Case(lambda found, place: found.pop(place.last), r"part \d+ of \d+"),
    "a part is there twice": Case(_doubled, r"part 0 of .*expected part 1"),
    "parts are in another order": Case(_swapped, r"part 1 of .*expected part 0"),
    "a part is too short": Case(_cut, r"offset \d+.* part 1 "),
    "a part is of another pack": Case(_other_total, r"offset \d+.* part 1 of 99"),
    "a bit is flipped": Case(_altered, r"crc32c"),
    "the topic ends too soon": Case(_short, r"part \d+ of \d+"),
    "the topic is empty": Case(lambda found, place: found.clear(), r"part 0 .* between offsets \d+ and \d+"),
}


@pytest.mark.parametrize("case", CASES)
def test_records_that_lie_are_damage(
    tmp_path: Path, server: KafkaServer, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What is missing, doubled, cut or in another order is told by topic, partition, offset and part."""
    rows = cnr.KafkaRows(server.bootstrap, server.new_name(), num_partitions=1, part_bytes=200)
    job = SavingJob(tmp_path, row_log=rows, build=large_job)
    job.train_and_save("0", "1")
    (place,) = ranges(tmp_path / "1")
    assert place.last - place.first >= 4
    found = {message.offset(): part(message) for message in records(server, rows.topic)}
    whole_ = dict(found)
    rewrite(server, rows.topic, whole_)
    job.assert_loads("1")
    assert "no part of a pack" not in caplog.text, "there is nothing between"
    CASES[case].spoil(found, place)
    rewrite(server, rows.topic, found)
    rows = with_timeout(rows, SECS)  # with connections that do not know the topic that was deleted
    with pytest.raises(CheckpointException) as raised:
        models.load(job.build(2), f"{tmp_path}/1", row_log=rows)
    (cause,) = faults.causes(raised.value).values()
    assert isinstance(cause, cnr.DamagedError)
    assert re.search(CASES[case].says, str(cause)), cause
    assert rows.topic in str(cause)
    assert "partition 0" in str(cause)
    assert re.search(r"offsets? \d+", str(cause))
    target = job.build(3)
    assert (cnr.restore_newest(tmp_path, state(target), row_log=rows) or ("",))[0] == f"{tmp_path}/0"
    job.close()


def test_records_of_strangers_are_passed_over(
    tmp_path: Path, server: KafkaServer, rows: cnr.KafkaRows, caplog: pytest.LogCaptureFixture
) -> None:
    """Among rows and among markers: they are warned of, and change nothing."""
    strange = (b"", b"knows", [("part", b"one of two")])
    rows = replace(rows, part_bytes=200)
    job = SavingJob(tmp_path, row_log=rows, build=large_job)
    job.train_and_save("0")
    produce(server, f"{rows.topic}-markers", strange, (b"", b"", []), (b"", b'{"format": "torchrec_cnr marker"}', []))
    job.train_and_save("1")
    (place,) = ranges(tmp_path / "1")
    found = {message.offset(): part(message) for message in records(server, rows.topic)}
    # Strangers in the middle of the pack: what is behind them lies further on than where it was sent to.
    moved = {offset + (3 if offset > place.first + 1 else 0): record for offset, record in found.items()}
    moved |= {place.first + 2: strange, place.first + 3: (b"", b"", []), place.first + 4: strange}
    rewrite(server, rows.topic, moved)
    longer = replace(place, last=place.last + 3)
    pack = next(pack for pack in cnr.read_checkpoint(tmp_path / "1").manifest.packs if pack.log is not None)
    data = rows.read(pack.name, pack.num_bytes, longer, 0, pack.num_bytes)
    assert data.tobytes() == b"".join(found[offset][1] for offset in sorted(found))
    assert "no part of a pack" in caplog.text
    assert cnr.latest(tmp_path, row_log=rows) == f"{tmp_path}/1"
    assert "no marker of ours" in caplog.text
    assert marked(rows) == ["0", "1"]
    job.close()


def test_rows_that_retention_has_removed_are_damage(tmp_path: Path, server: KafkaServer, rows: cnr.KafkaRows) -> None:
    """It is said that they were removed; a restore goes back to what is there."""
    job = SavingJob(tmp_path, row_log=rows)
    job.train_and_save("0", "1", "2")
    (place,) = ranges(tmp_path / "2")
    admin = server.admin()
    cut = TopicPartition(rows.topic, 0, place.first)
    admin.delete_records([cut])[cut].result(SECS)
    with pytest.raises(CheckpointException, match="removed by the topic's retention") as raised:
        models.load(job.build(2), f"{tmp_path}/2", row_log=rows)
    assert {type(cause) for cause in faults.causes(raised.value).values()} == {cnr.DamagedError}
    assert (cnr.restore_newest(tmp_path, state(job.build(3)), row_log=rows) or ("",))[0] == f"{tmp_path}/0"
    job.close()


def test_markers_that_retention_has_removed_are_not_missed(
    tmp_path: Path, server: KafkaServer, rows: cnr.KafkaRows
) -> None:
    """Manifests have their names by then."""
    job = SavingJob(tmp_path, row_log=rows)
    job.train_and_save("0", "1", "2")
    admin = server.admin()
    cut = TopicPartition(f"{rows.topic}-markers", 0, rows.markers_from(0, 0)[-1].offset)
    admin.delete_records([cut])[cut].result(SECS)
    assert marked(rows) == ["2"]
    assert cnr.latest(tmp_path, row_log=rows) == f"{tmp_path}/2"
    job.train_and_save("3")
    job.assert_loads("3")
    job.close()


# Topics that would lose rows


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "compacted": ("", {"cleanup_policy": "compact"}, "cleanup.policy=compact, expected delete"),
    "forgets early": ("", {"retention_ms": 3_600_000}, "retention.ms=3600000, expected 604800000 or more"),
    "forgets by size": ("", {"retention_bytes": 1 << 20}, "retention.bytes=1048576, expected -1"),
    "small records": ("", {"max_message_bytes": 1000}, "max.message.bytes=1000, expected .* or more"),
    "unclean": ("", {"unclean_leader_election_enable": "true"}, "unclean.leader.election.enable=true, expected false"),
    "compacted markers": ("-markers", {"cleanup_policy": "compact"}, "cleanup.policy=compact, expected delete"),
    "many partitions of markers": ("-markers", {"num_partitions": 2}, "2 partitions, expected 1"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_topic_that_would_lose_rows_is_refused(tmp_path: Path, server: KafkaServer, wrong: str) -> None:
    """Before the first save, and the error says what to change, and how."""
    suffix, settings, says = WRONG[wrong]
    name = server.new_name()
    server.make_topic(name + suffix, **{"num_partitions": 1} | settings)
    with pytest.raises(cnr.ConfigurationError, match=says) as raised:
        cnr.CNRStorageWriter(tmp_path / "0", row_log=cnr.KafkaRows(server.bootstrap, name, num_partitions=1))
    assert f"topic {name + suffix!r}" in str(raised.value)
    assert "kafka-configs" in str(raised.value) or "use another topic" in str(raised.value)
    assert not (tmp_path / "0").exists()


def test_topics_that_were_made_pass(server: KafkaServer) -> None:
    """Topics that the log has made itself are right for processes that come later, of whatever size records are."""
    for part_bytes in (1000, 512 << 10, 1 << 20):
        rows = cnr.KafkaRows(server.bootstrap, server.new_name(), part_bytes=part_bytes)
        rows.open()
        replace(rows, timeout_secs=9.0).open()


@pytest.mark.parametrize("part_bytes", [100 << 10, 1 << 20])
def test_packs_of_full_records_are_taken(tmp_path: Path, server: KafkaServer, part_bytes: int) -> None:
    """A topic that takes the largest record takes as many of them as the client puts into one request."""
    name = server.new_name()
    if part_bytes < 1 << 20:
        server.make_topic(name, max_message_bytes=1_000_000)
    rows = cnr.KafkaRows(server.bootstrap, name, num_partitions=1, part_bytes=part_bytes)
    rows.open()
    data = os.urandom(5 * part_bytes + 17)
    place = rows.target("root", 0).put("pack", [data])
    assert rows.read("pack", len(data), place, 0, len(data)).tobytes() == data


# Arguments


ARGUMENTS: dict[str, dict[str, Any]] = {
    "bootstrap": {"bootstrap": ""},
    "topic": {"topic": "a/b"},
    "'topic'": {"topic": "x" * 241},
    "timeout_secs": {"timeout_secs": 0},
    "'timeout_secs'": {"timeout_secs": float("nan")},
    "'timeout_secs' must": {"timeout_secs": float("inf")},
    "num_partitions": {"num_partitions": 0},
    "num_replicas": {"num_replicas": 0},
    "retention_secs": {"retention_secs": -1.0},
    "part_bytes": {"part_bytes": 0},
    "'part_bytes'": {"part_bytes": (1 << 20) + 1},
    "isolation.level": {"config": {"isolation.level": "read_uncommitted"}},
    "transactional.id": {"config": {"transactional.id": "mine"}},
    "bootstrap.servers": {"config": {"bootstrap.servers": "elsewhere:1"}},
}


@pytest.mark.parametrize("says", ARGUMENTS)
def test_arguments_that_cannot_work_are_refused(says: str) -> None:
    """Before anything is sent anywhere."""
    with pytest.raises(cnr.ConfigurationError, match=re.escape(says)):
        cnr.KafkaRows(**{"bootstrap": "127.0.0.1:1", "topic": "rows"} | ARGUMENTS[says])


def test_settings_that_clients_do_not_know_are_refused() -> None:
    """As an error of ours."""
    for config in ({"no.such.setting": "1"}, {"enable.sparse.connections": "maybe"}):
        with pytest.raises(cnr.ConfigurationError, match=next(iter(config))):
            cnr.KafkaRows("127.0.0.1:1", "rows", timeout_secs=IMPATIENT_SECS, config=config).open()


def test_secrets_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """What is in the settings is in no message: passwords are."""
    caplog.set_level(logging.DEBUG)
    config = {
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "someone",
        "sasl.password": "hunter2",
    }
    bootstrap = f"127.0.0.1:{kafka_server.free_ports()}"
    rows = cnr.KafkaRows(bootstrap, "rows", timeout_secs=IMPATIENT_SECS, config=config)
    told = [repr(rows), str(rows)]
    for act in (rows.open, lambda: rows.markers("root", 1), lambda: rows.begin("root")):
        with pytest.raises(cnr.StoreError) as raised:
            act()
        told += [str(raised.value), repr(raised.value.__cause__)]
    assert not [text for text in (*told, caplog.text) if "hunter2" in text]


def test_a_missing_client_is_named() -> None:
    """Without confluent-kafka, all but KafkaRows works, and that says what to install."""
    program = """
import sys
sys.modules["confluent_kafka"] = None
import torchrec_cnr as cnr
cnr.CNRStorageWriter("somewhere"), cnr.CheckpointManager, cnr.latest("nowhere")
try:
    cnr.KafkaRows
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "KafkaRows needs confluent-kafka: pip install 'torchrec_cnr[kafka]'"


# Random lives


@dataclass
class Life:
    """What a job does, beside a dictionary of what must be loaded.

    Attributes:
        root: Of its checkpoints.
        rows: The log.
        server: Is frozen and killed.
        saved: What checkpoints hold, by name: those that were committed, or may have been.
        newest: Names of what may be the newest one: the last that was committed, then those whose saves failed.
    """

    root: str
    rows: cnr.KafkaRows
    server: KafkaServer
    saved: dict[str, Whole] = field(default_factory=dict)
    newest: list[str | None] = field(default_factory=lambda: [None])
    _in_flight: "Future[Any] | None" = None

    def __post_init__(self) -> None:
        self.job = SavingJob(self.root, row_log=self.rows)

    def run(self, operation: str, seed: int) -> None:
        """Train, and do one operation."""
        train(self.job.job, seed)
        if operation == "train":
            return
        self.land()
        name = str(len(self.saved))
        match operation.split():
            case ["save"]:
                self.saved[name] = self.job.save(name)
                self.newest = [name]
            case ["save", "behind"]:
                self._in_flight = self.job.async_save(name)
                self.saved[name] = self.job.saved[name]
            case ["fail", when]:
                with failing_commit(when):
                    assert isinstance(self.job.failure(name), faults.InjectedError)
                self.saved[name] = self.job.saved[name]
                self.newest = [name] if when == "after" else self.newest
            case [("killed" | "frozen") as how, moment]:
                with absent_at(moment, self.server, how):
                    assert isinstance(self.job.failure(name), cnr.StoreError)
                self.saved[name] = self.job.saved[name]
                self.newest = [*self.newest, name]
            case ["restore"]:
                self.check()
            case ["restart"]:
                self.job.close()
                self.job = SavingJob(self.root, row_log=self.rows, seed=seed)
                self.check()

    def land(self) -> None:
        """Wait for a save behind training."""
        if self._in_flight is not None:
            self._in_flight.result(timeout=SECS)
            self._in_flight = None
            self.newest = [list(self.saved)[-1]]

    def check(self) -> None:
        """The newest checkpoint is one that may be it, and gives the job exactly what was saved."""
        self.land()
        newest = cnr.latest(self.root, row_log=self.rows)
        assert (newest and Path(newest).name) in self.newest
        if newest is not None:
            name = self.job.restore()
            assert differing(whole(state(self.job.job)), self.saved[name]) == []
            self.newest = [name]


MILD = ("train", "save", "save", "save behind", "fail before", "fail after", "restore", "restart")
ROUGH = ("frozen begin", "frozen marker")


def _live(server: KafkaServer, folder: Path, operations: list[str]) -> None:
    rows = cnr.KafkaRows(server.bootstrap, server.new_name(), num_partitions=2, timeout_secs=IMPATIENT_SECS)
    life = Life(str(folder), rows, server)
    for seed, operation in enumerate(operations):
        life.run(operation, seed)
    life.run("save", 1000)
    life.check()
    life.run("restart", 1001)
    for name in marked(rows):
        life.job.assert_loads(name, life.saved[name])
    life.job.close()


@settings(max_examples=3, derandomize=True, phases=[Phase.generate])  # the slow test below shrinks what fails
@given(operations=st.lists(st.sampled_from(MILD + MILD + MILD + ROUGH), min_size=5, max_size=12))
def test_the_newest_checkpoint_is_what_the_dictionary_says(
    tmp_path_factory: pytest.TempPathFactory, server: KafkaServer, operations: list[str]
) -> None:
    """Whatever a job goes through between its saves, what loads is what was saved."""
    _live(server, tmp_path_factory.mktemp("life"), operations)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))  # each within the time that a test has
@settings(max_examples=6)
@given(operations=st.lists(st.sampled_from(MILD + MILD + ROUGH + ("killed begin", "killed marker")), max_size=25))
def test_many_lives(
    tmp_path_factory: pytest.TempPathFactory, server: KafkaServer, part: int, operations: list[str]
) -> None:
    """As above, and the broker is killed too."""
    _live(server, tmp_path_factory.mktemp(f"life{part}-"), operations)

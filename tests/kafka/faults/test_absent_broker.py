"""Kafka that is not there, dies or hangs: nothing committed is lost, and errors say what to do."""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from confluent_kafka import KafkaError, KafkaException
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.servers import kafka_server
from tests.servers.kafka_server import KafkaServer
from tests.serving.served_models import wait_until
from tests.support import faults, models
from tests.support.jobs import SavingJob
from tests.support.kafka_jobs import (
    absent_at,
    failing_commit,
    marked,
    wait_until_well,
    with_timeout,
)
from tests.support.killing import in_child
from tests.support.models import Whole, differing, state, torchrec_job, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.kafka.producers import Producing

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

IMPATIENT_SECS = 2.0  # with less, a busy machine has not ended a transaction that was left open
FAIL_FAST_SECS = 10.0
RECOVERY_SECS = 60.0  # in which a broker on a busy machine ends the transactions that were open when it was killed


# A broker that is not there


@pytest.mark.long
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


@pytest.mark.long
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
    expected = ["0", "1", "2"][: 3 if moment == "name" else 2]
    deadline = time.monotonic() + RECOVERY_SECS
    while marked(rows) != expected:  # a broker may say that it has committed, be killed, and do so when it is back
        assert time.monotonic() < deadline, (marked(rows), expected)
        time.sleep(0.1)
    train(job.job, 6)
    job.save("3")
    assert cnr.read_checkpoint(tmp_path / "3").parent == f"{tmp_path}/{2 if moment == 'name' else 1}"
    for name in marked(rows):
        job.assert_loads(name)
    job.close()


@pytest.mark.long
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
        for act in (impatient.end, lambda: impatient.markers("root", 1), lambda: impatient.markers_from(0, 0)):
            with pytest.raises(cnr.StoreError, match=server.bootstrap):
                act()
        assert cnr.latest(tmp_path, row_log=impatient) == f"{tmp_path}/2", "no manifest waits for its marker"
        with pytest.raises(CheckpointException) as raised:
            models.load(job.build(2), f"{tmp_path}/2", row_log=other)
        assert {type(cause) for cause in faults.causes(raised.value).values()} == {cnr.StoreError}
    job.row_log = rows
    job.assert_loads("2")
    assert cnr.latest(tmp_path, row_log=rows) == f"{tmp_path}/2"
    job.close()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_follower_tells_of_a_broker_that_hangs(tmp_path: Path, server: KafkaServer, rows: cnr.KafkaRows) -> None:
    """It says that it hears of nothing, and applies what lies in files; when the broker is back, all is well."""
    first, third = (SavingJob(tmp_path, row_log=rows, seed=seed) for seed in (1, 3))
    second = SavingJob(tmp_path, seed=2)
    first.train_and_save("0")
    served = models.plain_job(2, "adagrad").model
    impatient = with_timeout(rows, IMPATIENT_SECS)
    with cnr.RowSubscriber(served, tmp_path, row_log=impatient, allow_partial_load=True) as subscriber:
        with ExitStack() as stack:
            stack.callback(wait_until_well, server)
            stack.enter_context(server.frozen())
            wait_until(lambda: isinstance(subscriber.failure, cnr.StoreError))
            second.train_and_save("1")
            wait_until(lambda: str(subscriber.applied).endswith("/1"))
            wait_until(lambda: isinstance(subscriber.failure, cnr.StoreError))
        wait_until(lambda: subscriber.failure is None)
        third.train_and_save("2")
        wait_until(lambda: str(subscriber.applied).endswith("/2"))
    for job in (first, second, third):
        job.close()


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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

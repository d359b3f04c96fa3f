"""Rows that go to Kafka: what is loaded is what was saved, bit for bit, whoever saves how, and whoever loads."""

import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchrec.optim import RowWiseAdagrad

import torchrec_cnr as cnr
from tests.servers.kafka_server import Broker, transactional
from tests.support import faults, models
from tests.support.jobs import SavingJob
from tests.support.kafka_jobs import large_job, marked, ranges
from tests.support.killing import in_child
from tests.support.models import Whole, differing, plain_job, state, torchrec_job, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.kafka import disconnect
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.maintenance.background_upkeep import Upkeep

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

POLICIES: dict[str, cnr.Policy] = {
    "Consecutive": cnr.Consecutive(),
    "OneShot": cnr.OneShot(),
    "Intermittent": cnr.Intermittent(),
    "Compacted": cnr.Compacted(),
}


# How it is saved


def _save_in_every_way(rank: int, root: str, rows: cnr.KafkaRows, ways: tuple[str, ...]) -> list[str]:
    job = SavingJob(root, row_log=rows, build=large_job, thread_count=3, pack_bytes=1024)
    for number, way in enumerate(ways):
        for batch in range(20):
            train(job.job, 20 * number + batch)
        if way == "save":
            job.save(str(number))
        else:
            future = job.async_save(str(number), AsyncCheckpointerType[way])
            train(job.job, 100 + number)
            future.result(timeout=100)
    for name in job.saved:
        job.assert_loads(name)
    job.close()
    return list(job.saved)


@pytest.mark.parametrize(
    "ways",
    [
        ("save", "save", "save"),
        ("THREAD", "THREAD", "THREAD"),
        ("PROCESS", "save", "PROCESS", "THREAD"),
    ],
    ids=lambda ways: "-".join(ways),
)
def test_rows_take_a_round_trip_however_they_are_saved(
    tmp_path: Path, rank_pool: RankPools, rows: cnr.KafkaRows, ways: tuple[str, ...]
) -> None:
    """By stock DCP, in the foreground or behind training, in one process or two: rows of deltas are in the log only."""
    (names,) = rank_pool(1).run(_save_in_every_way, str(tmp_path), rows, ways)
    assert marked(rows) == names
    for name in names:
        packs = cnr.read_checkpoint(tmp_path / name).manifest.packs
        assert any(pack.log is None for pack in packs), "the dense part"
        assert cnr.read_checkpoint(tmp_path / name).kind == ("delta" if name != "0" else "baseline")
        assert (len(ranges(tmp_path / name)) > 3) == (name != "0")
        files = {pack.name for pack in packs if pack.log is None} | {"manifest.json"}
        assert set(os.listdir(tmp_path / name)) == files


def test_who_does_not_know_the_log_is_told(tmp_path: Path, rows: cnr.KafkaRows, kafka: Broker) -> None:
    """A reader without it, or with another one, says which topic it needs; a baseline needs none."""
    job = SavingJob(tmp_path, row_log=rows)
    job.train_and_save("0", "1")
    for other in (None, cnr.KafkaRows(kafka.bootstrap, f"{rows.topic}-other")):
        with pytest.raises(dcp.api.CheckpointException, match=rows.topic) as raised:
            models.load(plain_job(2, "adagrad"), f"{tmp_path}/1", row_log=other)
        assert {type(cause) for cause in faults.causes(raised.value).values()} == {cnr.ConfigurationError}
        assert differing(models.load(plain_job(2, "adagrad"), f"{tmp_path}/0", row_log=other), job.saved["0"]) == []
    job.close()


@pytest.mark.long
def test_rows_of_four_bits_are_those_that_files_hold(tmp_path: Path, rows: cnr.KafkaRows) -> None:
    """Quantized rows lose as much in the log as in files, and no more than half a step of their codes."""
    found = {}
    for log in (None, rows):
        job = plain_job(1, "sgd", rows=(300, 200), dims=(16, 8))
        planner = cnr.CNRSavePlanner(cnr.RowTracker(job.model), policy=cnr.Consecutive())
        root = tmp_path / ("files" if log is None else "log")
        for name in ("0", "1", "2"):
            train(job, int(name))
            writer = models.writer(root / name, row_log=log, quantization=cnr.Asymmetric(4))
            dcp.save(state(job), storage_writer=writer, planner=planner)
        target = plain_job(2, "sgd", rows=(300, 200), dims=(16, 8))
        found[log is None] = models.load(target, str(root / "2"), row_log=log)
    exact = whole(state(job))
    assert differing(found[True], found[False]) == []
    assert "model.bag.weight" in differing(found[True], exact)
    for fqn in ("model.bag.weight", "model.item.weight"):
        # Those rows that were stored last are codes of what is exact now.
        low, high = exact[fqn].min(1, keepdim=True).values, exact[fqn].max(1, keepdim=True).values
        assert bool(((found[False][fqn] - exact[fqn]).abs() <= 0.51 * (high - low) / 15 + 1e-6).all())


def test_packs_of_many_records_in_several_partitions(tmp_path: Path, kafka: Broker) -> None:
    """Threads write and read packs at once, each of many records; all partitions have some."""
    rows = cnr.KafkaRows(kafka.bootstrap, kafka.new_name(), num_partitions=3, part_bytes=300)
    job = SavingJob(tmp_path, row_log=rows, build=large_job, thread_count=4, pack_bytes=1024)
    job.save("0")
    for name in ("1", "2"):
        for number in range(60):
            train(job.job, number)
        job.save(name)
    found = ranges(tmp_path / "2")
    assert {place.partition for place in found} == {0, 1, 2}
    assert max(place.last - place.first for place in found) >= 3
    for thread_count in (1, 3):
        job.assert_loads("2", thread_count=thread_count)
    job.close()


# Ranks


def _rank_job(root: str, rows: cnr.KafkaRows, sharding: str, seed: int) -> SavingJob:
    return SavingJob(
        root,
        row_log=rows,
        seed=seed,
        build=lambda seed: torchrec_job(seed, sharding, fused=RowWiseAdagrad),
        group=dist.new_group(backend="gloo"),
    )


def _live_on_ranks(rank: int, root: str, rows: cnr.KafkaRows, sharding: str, first: int) -> dict[str, Whole]:
    """Go on from the newest checkpoint, if there is one, and save two or three times, the last time behind training."""
    job = _rank_job(root, rows, sharding, seed=first + 1)
    if first:
        assert job.restore() == str(first - 1)
    for number in range(first, first + 2):
        train(job.job, number)
        job.save(str(number))
    train(job.job, first + 2)
    future = job.async_save(str(first + 2))
    train(job.job, first + 3)
    future.result(timeout=60)
    job.close()
    return job.saved


def _load_on_ranks(rank: int, root: str, rows: cnr.KafkaRows, sharding: str, saved: dict[str, Whole]) -> None:
    for number, (name, expected) in enumerate(saved.items()):
        job = torchrec_job(90 + number, sharding, fused=RowWiseAdagrad)
        assert differing(whole(state(job)), expected)
        assert differing(models.load(job, f"{root}/{name}", row_log=rows), expected) == []


def test_ranks_of_any_sharding_load_what_others_saved(
    tmp_path: Path, rank_pool: RankPools, rows: cnr.KafkaRows
) -> None:
    """Row-wise tables on two ranks become table-wise ones, and those of one rank; each goes on with the lineage."""
    root, saved = str(tmp_path), {}
    for world_size, sharding, first in ((2, "row", 0), (2, "table", 3), (1, "row", 6)):
        saved |= rank_pool(world_size).run(_live_on_ranks, root, rows, sharding, first)[0]
        assert cnr.read_checkpoint(f"{root}/{first}").kind == ("delta" if first else "baseline")
    assert marked(rows) == [str(number) for number in range(9)]
    assert len(read_lineage(f"{root}/8").checkpoints) == 9
    for world_size, sharding in ((2, "table"), (1, "row")):
        rank_pool(world_size).run(_load_on_ranks, root, rows, sharding, saved)


# Roots, managers and policies


@pytest.mark.long
def test_two_roots_share_a_topic(tmp_path: Path, rows: cnr.KafkaRows) -> None:
    """Each has its own newest checkpoint, names and rows, though names are the same."""
    jobs = [SavingJob(tmp_path / name, row_log=rows, seed=seed) for seed, name in enumerate(("a", "b"))]
    for number in range(4):
        for job in jobs:
            train(job.job, 10 * number + jobs.index(job))
            job.save(str(number))
    assert marked(rows) == [str(number) for number in range(4) for _ in jobs]
    for job in jobs:
        assert cnr.latest(job.root, row_log=rows) == f"{job.root}/3"
        for name in job.saved:
            job.assert_loads(name)
        job.close()
    assert differing(jobs[0].saved["3"], jobs[1].saved["3"])


def test_an_open_transaction_of_others_hides_no_rows(tmp_path: Path, rows: cnr.KafkaRows, kafka: Broker) -> None:
    """Another job may be in mid-save in the same topic, or have died there: what is committed behind it is loaded."""
    rows.open()
    others = [transactional(kafka) for _ in range(2)]
    for partition, other in enumerate(others):
        other.begin_transaction()
        other.produce(rows.topic, b"open", partition=partition)
        other.flush(30)
    job = SavingJob(tmp_path, row_log=rows)
    job.train_and_save("0", "1", "2")
    job.assert_loads("2")
    for other in others:
        other.abort_transaction(30)
    job.assert_loads("2")
    job.close()


def _manage(root: str, rows: cnr.KafkaRows, seed: int, steps: range, **options: Any) -> tuple[int | None, Whole]:
    """Restore, train and save as a manager does; the step that it went on from, and what the last checkpoint holds."""
    job = plain_job(seed, "adagrad")
    values = state(job)
    manager = cnr.CheckpointManager(root, cnr.RowTracker(job.model), row_log=rows, **options)
    restored = manager.restore(values)
    saved: Whole = {}
    for step in steps:
        train(job, step)
        save = manager.save if step % 3 else manager.async_save
        if save(step, state(job)):
            saved = whole(state(job))
    manager.close()
    return restored, saved


@pytest.mark.long
def test_a_manager_saves_to_the_log_and_restores_from_it(tmp_path: Path, rows: cnr.KafkaRows) -> None:
    """At every so many steps, and the next job goes on from there."""
    root = str(tmp_path / "run")
    restored, _ = _manage(root, rows, 1, range(1, 10), every_steps=2, policy=cnr.Consecutive())
    assert restored is None
    restored, saved = _manage(root, rows, 2, range(9, 14), every_steps=2, policy=cnr.Consecutive())
    assert restored == 8
    assert marked(rows) == [f"step-{step}" for step in (2, 4, 6, 8, 10, 12)]
    assert differing(models.load(plain_job(3, "adagrad"), f"{root}/step-12", row_log=rows), saved) == []
    assert len(read_lineage(f"{root}/step-12").checkpoints) == 6


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_may_keep_rows_in_the_log(tmp_path: Path, rows: cnr.KafkaRows, policy: str) -> None:
    """Each checkpoint of its lineage loads."""
    job = SavingJob(tmp_path, row_log=rows, policy=POLICIES[policy])
    job.train_and_save(*"012345")
    assert any(ranges(tmp_path / name) for name in job.saved)
    for name in job.saved:
        job.assert_loads(name)
    job.close()


@pytest.mark.long
def test_lineages_in_the_log_are_compacted_and_pruned(tmp_path: Path, rows: cnr.KafkaRows) -> None:
    """A manager folds deltas of the log into files, and prunes; what is kept loads, as the next job finds."""
    root = str(tmp_path / "run")
    options: dict[str, Any] = {"policy": cnr.Compacted(), "keep": cnr.Keep(last=2)}
    _, before = _manage(root, rows, 1, range(1, 9), **options)
    newest = cnr.latest(root, row_log=rows)
    assert newest == f"{root}/step-8"
    assert len(read_lineage(newest).checkpoints) < 8, "it was compacted"
    assert len([name for name in os.listdir(root) if name.startswith("step-")]) < 8, "and pruned"
    assert differing(models.load(plain_job(3, "adagrad"), newest, row_log=rows), before) == []
    restored, after = _manage(root, rows, 2, range(9, 13), **options)
    assert restored == 8
    assert differing(before, after)
    assert differing(models.load(plain_job(3, "adagrad"), f"{root}/step-12", row_log=rows), after) == []


@pytest.mark.long
def test_compacted_by_hand_it_stands_on_files_and_log(tmp_path: Path, rows: cnr.KafkaRows) -> None:
    """A compaction that is given the log loses no row of it."""
    job = SavingJob(tmp_path, row_log=rows)
    job.train_and_save(*"01234")
    upkeep = Upkeep(str(tmp_path), None, compacts=True, row_log=rows, max_ratio=1.0, pack_bytes=1024)
    upkeep.run_for(cnr.read_checkpoint(tmp_path / "4"))
    assert len(read_lineage(tmp_path / "4").checkpoints) == 1
    job.assert_loads("4")
    job.train_and_save("5")
    job.assert_loads("5")
    job.close()


@pytest.mark.long
def test_a_consumer_that_was_at_the_end_reads_what_came_since(rows: cnr.KafkaRows) -> None:
    """A process that has read up to the end, sees all that is written afterwards."""
    rows = replace(rows, num_partitions=1, part_bytes=100)
    rows.open()
    target = rows.target("root", 0)
    places = []
    for number in range(4):
        data = bytes([number]) * 250
        places.append(target.put(f"pack-{number}", [data]))
        time.sleep(0.2)  # the end is told before it is another one
        for again in (number, number, 0):
            found = rows.read(f"pack-{again}", 250, places[again], 0, 250)
            assert found.tobytes() == bytes([again]) * 250


def _client_threads() -> int:
    """How many threads of librdkafka this process has."""
    count = 0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            count += (thread / "comm").read_text().startswith("rdk:")
    return count


def _disconnect(root: Path, rows: cnr.KafkaRows) -> None:
    assert _client_threads() == 0
    job = SavingJob(root, row_log=rows)
    job.train_and_save("0", "1")
    job.assert_loads("1")
    assert _client_threads() > 0
    disconnect()
    assert _client_threads() == 0
    job.train_and_save("2")
    assert cnr.read_checkpoint(root / "2").parent == f"{root}/1"
    job.assert_loads("2")
    job.close()


@pytest.mark.long
def test_a_process_disconnects_and_connects_anew(tmp_path: Path, rows: cnr.KafkaRows) -> None:
    """Its threads end; what it saves and loads afterwards is what it would have been."""
    assert in_child(_disconnect, tmp_path, rows) is None  # where no other test has left clients

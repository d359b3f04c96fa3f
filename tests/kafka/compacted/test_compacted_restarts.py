"""Jobs that restart, are overtaken or shard otherwise, with rows in a compacted topic."""

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.kafka.compacted.topic_jobs import TopicJob, compact, compacted, live
from tests.servers.kafka_server import Broker, KafkaServer
from tests.support import models
from tests.support.models import Whole, differing, plain_job, torchrec_job, train, whole
from tests.support.ranks import RankPool, RankPools
from torchrec_cnr.errors import ConfigurationError, DamagedError, FencedError, StoreError
from torchrec_cnr.format import manifest_json
from torchrec_cnr.kafka import KafkaRows, consumers
from torchrec_cnr.kafka.connection import KafkaLog
from torchrec_cnr.lineage.checkpoint import read_checkpoint
from torchrec_cnr.policies import Policy
from torchrec_cnr.saving.row_blocks import BlockKey
from torchrec_cnr.storage.row_log import root_id


def test_a_job_that_was_restarted_takes_over_blocks(tmp_path: Path, kafka: Broker) -> None:
    """After a load, too, only touched blocks are written, and the others stay those of the job before."""
    run = TopicJob(tmp_path, compacted(kafka), optimizer="sgd")
    run.commit()
    for _ in range(3):
        run.train()
        run.commit()
    before = {pack.name for pack in run.packs()}
    run.restart(2, place=-1)
    run.train()
    run.commit()
    after = {pack.name for pack in run.packs()}
    assert before & after
    assert after - before
    compact(run.row_log)
    run.check()
    run.close()


@pytest.mark.long
def test_a_job_that_goes_on_from_an_older_checkpoint_leaves_the_newest_alone(run: TopicJob) -> None:
    """Until it has committed, the newest checkpoint can still be loaded, although that is not what it goes on from."""
    for _ in range(3):
        run.train()
        run.commit()
    newest = run.committed
    run.close()
    run.begin(seed=3)
    run.restore("step-1", place=-1)
    run.train()
    run.fail()
    compact(run.row_log)
    assert differing(run.load(), newest) == []
    run.commit()
    compact(run.row_log)
    run.check()


@pytest.mark.long
def test_who_was_overtaken_writes_nothing(run: TopicJob) -> None:
    """A later job shuts an earlier one out before it writes: its packs, its markers and its tombstones are refused."""
    early = replace(run.row_log, timeout_secs=9.0)  # with connections of its own
    begun = early.target("0" * 16, 0, True)
    run.row_log.target("0" * 16, 0, True)
    with pytest.raises(FencedError):
        begun.keyed("0/t/1x0/0", 100).put("late.safetensors", [b"late"])  # type: ignore[union-attr] - as above
    with pytest.raises(StoreError):  # nor does it take the id back by itself
        begun.keyed("0/t/1x0/0", 100).put("later.safetensors", [b"later"])  # type: ignore[union-attr] - as above
    run.train()
    run.commit()
    with pytest.raises(FencedError):
        early.forget("0" * 16, run.packs())
    assert b"0/t/1x0/0/0" not in live(run.row_log)
    run.check()


@pytest.mark.long
def test_who_comes_late_does_not_disturb_a_later_job(run: TopicJob) -> None:
    """A job that tries to save after another has begun is refused, and the other writes on."""
    Path(run.root, "fence-00000002.json").write_text("{}")
    later = replace(run.row_log, timeout_secs=7.0)  # with connections of its own
    target = later.target(root_id(run.root), 0, True)
    run.train()
    with pytest.raises(CheckpointException) as raised:
        run.commit()
    assert any(isinstance(error, FencedError) for error, _ in raised.value.failures.values())
    target.keyed("0/t/1x0/0", 100).put("of-the-later.safetensors", [b"later"])  # type: ignore[union-attr] - as above
    assert b"0/t/1x0/0/0" in live(run.row_log)


@pytest.mark.slow
def test_a_broker_that_is_killed_loses_nothing(tmp_path: Path, server: KafkaServer) -> None:
    """A save during which the broker dies fails; when it is back, the head is there, and the next save has all rows."""
    run = TopicJob(tmp_path, compacted(server, timeout_secs=4.0))
    run.commit()
    for _ in range(2):
        run.train()
        run.commit()
    run.train()
    mark = KafkaLog.mark

    def mark_of_the_dead(*args: Any) -> None:
        server.kill()
        mark(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KafkaLog, "mark", mark_of_the_dead)
        with pytest.raises(CheckpointException):
            run.commit()
    server.start()
    compact(run.row_log)
    run.check()
    run.train()
    run.commit()
    compact(run.row_log)
    run.check()
    run.close()


@pytest.mark.long
def test_packs_are_read_in_the_order_in_which_they_lie(run: TopicJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load goes through each partition in one direction, so that most packs are reached without another request."""
    for _ in range(12):
        run.train()
    run.commit()
    sought: list[int] = []

    class Counted(confluent_kafka.Consumer):  # type: ignore[misc] - the package has no types
        def assign(self, places: list[Any]) -> None:
            sought.extend(place.offset for place in places if place.topic == run.row_log.topic)
            super().assign(places)

    monkeypatch.setattr(consumers, "Consumer", Counted)
    run.row_log = replace(run.row_log, config={"client.id": uuid.uuid4().hex})  # with consumers of its own
    run.check()
    assert len(run.packs()) == 13
    assert 0 < len(sought) < len(run.packs())  # each is read several times


def test_quantized_rows_stay_what_they_were_stored_as(tmp_path: Path, kafka: Broker) -> None:
    """Blocks that are taken over keep their codes, whatever scheme others have meanwhile."""
    run = TopicJob(tmp_path, compacted(kafka), quantization=cnr.AdaptiveAsymmetric(4))
    run.commit()
    for _ in range(4):
        run.train()
        run.commit()
    before = run.load()
    compact(run.row_log)
    assert differing(run.load(), before) == []
    run.close()


def _train_ranks(rank: int, root: str, rows: KafkaRows, sharding: str, num: int) -> Whole:
    """Go on from the newest checkpoint, if there is one, and save some more."""
    job = torchrec_job(seed=num, sharding=sharding)
    tracker = cnr.RowTracker(job.model)
    path = cnr.latest(root, row_log=rows)
    if path is not None:
        reader = cnr.CNRStorageReader(path, row_log=rows)
        dcp.load(models.state(job, place=0), storage_reader=reader, planner=cnr.CNRLoadPlanner(tracker))
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.OneShot())
    writer = models.writer(root, row_log=rows)
    first = 0 if path is None else int(path.rsplit("-", 1)[1])
    for step in range(first + 1, first + 4):
        train(job, seed=step)
        dcp.save(
            models.state(job, place=step), checkpoint_id=f"{root}/step-{step}", storage_writer=writer, planner=planner
        )
    tracker.close()
    return whole(models.state(job, place=first + 3))


def _load_ranks(rank: int, root: str, rows: KafkaRows, sharding: str) -> Whole:
    job = torchrec_job(seed=77, sharding=sharding)
    state = models.state(job, place=0)
    reader = cnr.CNRStorageReader(str(cnr.latest(root, row_log=rows)), row_log=rows)
    dcp.load(state, storage_reader=reader, planner=cnr.CNRLoadPlanner())
    return whole(state)


def test_ranks_save_and_shard_anew(tmp_path: Path, kafka: Broker, rank_pool: RankPools) -> None:
    """Two ranks save, others go on with other shards, the topic is compacted meanwhile: the newest state is there."""
    pool: RankPool = rank_pool(2)
    rows, root = compacted(kafka, row_block_bytes=128), str(tmp_path)
    for sharding in ("row", "table"):
        committed, _ = pool.run(_train_ranks, root, rows, sharding, 5)
        before, after = compact(rows)
        assert after <= before
        tables = {fqn for fqn in committed if fqn.endswith(".weight")}
        for target in (sharding, "row"):
            loaded, _ = pool.run(_load_ranks, root, rows, target)
            assert not tables & set(differing(loaded, committed))
            assert target != sharding or differing(loaded, committed) == []
    deltas = read_checkpoint(str(cnr.latest(root, row_log=rows))).manifest
    assert {str(pack.log and pack.log.key).split("/")[0][-2:] for pack in deltas.packs if pack.log} == {".0", ".1"}


BAD_TOPICS: dict[str, Callable[[Broker], KafkaRows]] = {
    "keeps everything": lambda broker: KafkaRows(broker.bootstrap, broker.new_topic(4), compacted=True),
    "removes what is old": lambda broker: KafkaRows(
        broker.bootstrap, broker.new_topic(4, cleanup_policy="compact,delete"), compacted=True
    ),
    "compacts what must stay": lambda broker: KafkaRows(
        broker.bootstrap, broker.new_topic(4, cleanup_policy="compact", retention_ms=-1)
    ),
}


@pytest.mark.parametrize("made", BAD_TOPICS.values(), ids=BAD_TOPICS)
def test_topics_that_would_lose_rows_are_refused(kafka: Broker, made: Callable[[Broker], KafkaRows]) -> None:
    """A topic is compacted and nothing else if it is said to be, and not if not."""
    with pytest.raises(ConfigurationError, match=r"cleanup\.policy=.*, expected"):
        made(kafka).open()


def test_a_topic_that_is_missing_is_made_compacted(kafka: Broker) -> None:
    """And is then what it must be."""
    rows = KafkaRows(kafka.bootstrap, f"{kafka.new_topic()}-made", compacted=True)
    rows.open()
    KafkaRows(kafka.bootstrap, rows.topic, compacted=True, timeout_secs=8.0).open()
    with pytest.raises(ConfigurationError, match="=compact, expected delete"):
        KafkaRows(kafka.bootstrap, rows.topic).open()


@pytest.mark.parametrize("policy", [cnr.Consecutive(), cnr.Compacted()], ids=lambda policy: type(policy).__name__)
def test_deltas_of_deltas_are_refused(tmp_path: Path, kafka: Broker, policy: Policy) -> None:
    """Their rows would be gone; a manager says so when it is made, a planner at the first save."""
    run = TopicJob(tmp_path, compacted(kafka), policy)
    with pytest.raises(CheckpointException) as raised:
        run.commit()
    assert "keeps only the newest rows" in str(raised.value.failures)
    with pytest.raises(ConfigurationError, match="keeps only the newest rows"):
        cnr.CheckpointManager(tmp_path, run.tracker, policy=policy, row_log=run.row_log)
    run.close()


def test_a_manager_needs_no_policy(tmp_path: Path, kafka: Broker) -> None:
    """With rows in a compacted topic, deltas are of the last baseline."""
    job = plain_job(1, "sgd")
    tracker, rows = cnr.RowTracker(job.model), compacted(kafka)
    manager = cnr.CheckpointManager(tmp_path, tracker, row_log=rows)
    for step in range(3):
        train(job, step)
        manager.save(step, models.state(job))
    manager.close()
    checkpoint = read_checkpoint(str(tmp_path / "step-2"))
    assert checkpoint.parent == str(tmp_path / "step-0")
    assert checkpoint.committed.policy == "OneShot"
    tracker.close()


def test_two_packs_with_one_key_are_refused(run: TopicJob) -> None:
    """Of two records with one key the topic keeps the last, so a manifest that names both is damaged."""
    run.train()
    run.commit()
    manifest = read_checkpoint(run.newest).manifest
    data, _ = manifest_json.dumps(manifest)
    assert manifest_json.loads(data, "here")[0] == manifest
    key = next(pack.log.key for pack in manifest.packs if pack.log is not None)
    same = [pack if pack.log is None else replace(pack, log=replace(pack.log, key=key)) for pack in manifest.packs]
    data, _ = manifest_json.dumps(replace(manifest, packs=tuple(same)))
    with pytest.raises(DamagedError, match="two packs have the same key"):
        manifest_json.loads(data, "here")


def test_keys_are_told_from_other_text() -> None:
    """A key names the block and the slot, whatever the table is called."""
    assert BlockKey.parsed("job.0/a/b[0, 0]/4x7/1") == BlockKey("job.0/a/b[0, 0]/4x7", 1)
    assert BlockKey.parsed("something else") is None

"""Rows in a compacted topic that the broker really compacts: what is committed can be loaded, and no more stays."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.jobs import SavingJob
from tests.support.models import Whole, differing, plain_job, torchrec_job, train, whole
from tests.support.ranks import RankPool, RankPools
from torchrec_cnr.errors import ConfigurationError, DamagedError, FencedError, StoreError
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.manifest import Pack
from torchrec_cnr.lineage.checkpoint import read_checkpoint
from torchrec_cnr.policies import Policy
from torchrec_cnr.saving.row_blocks import BlockKey
from torchrec_cnr.storage.row_log import root_id

confluent_kafka = pytest.importorskip("confluent_kafka")

from tests.servers.kafka_server import Broker, KafkaServer  # noqa: E402 - needs Kafka's client
from torchrec_cnr.kafka import KafkaRows, consumers  # noqa: E402
from torchrec_cnr.kafka.connection import KafkaLog  # noqa: E402
from torchrec_cnr.kafka.pack_targets import KeyedTarget  # noqa: E402

SECS = 40.0
EAGER = {
    "cleanup_policy": "compact",
    "segment_ms": 100,
    "min_cleanable_dirty_ratio": 0.01,
    "delete_retention_ms": 100,
}
BLOCK_BYTES = 64  # four rows of the larger table, five of the smaller one
PART_BYTES = 300  # several parts for a pack


def compacted(broker: Broker, **options: Any) -> KafkaRows:
    """Rows in a topic that the broker compacts as soon as it can."""
    topic = broker.new_topic(num_partitions=2, **EAGER)
    options = {"row_block_bytes": BLOCK_BYTES, "part_bytes": PART_BYTES, "num_partitions": 2} | options
    return KafkaRows(broker.bootstrap, topic, compacted=True, **options)


def records(rows: KafkaRows) -> list[tuple[bytes, bytes | None]]:
    """Keys and values of all that is there, of both partitions, in order."""
    asked = {"enable.partition.eof": True, "enable.auto.commit": False, "log_level": 2, "group.id": "nobody"}
    consumer = confluent_kafka.Consumer({"bootstrap.servers": rows.bootstrap, **asked})
    consumer.assign([confluent_kafka.TopicPartition(rows.topic, partition, 0) for partition in (0, 1)])
    found, num_ended, deadline = [], 0, time.monotonic() + SECS
    while num_ended < 2:
        assert time.monotonic() < deadline, f"no end of {rows.topic}"
        message = consumer.poll(1)
        if message is not None and message.error() is not None:
            assert message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF, message.error()
            num_ended += 1
        elif message is not None and message.key() != b"roll":
            found.append((message.key(), message.value()))
    consumer.close()
    return found


def compact(rows: KafkaRows) -> tuple[int, int]:
    """Have the broker remove all that a newer record supersedes; how many records there were, and are."""
    before, deadline = len(records(rows)), time.monotonic() + SECS
    producer = confluent_kafka.Producer({"bootstrap.servers": rows.bootstrap, "log_level": 2})
    while len(keys := [key for key, _ in records(rows)]) != len(set(keys)):
        assert time.monotonic() < deadline, f"not compacted: {len(keys)} records of {len(set(keys))} keys"
        for partition in (0, 1):
            producer.produce(rows.topic, b"", b"roll", partition)  # or the last segment is never looked at
        assert producer.flush(SECS) == 0
        time.sleep(0.3)
    return before, len(keys)


def live(rows: KafkaRows) -> list[bytes]:
    """Keys that are not removed."""
    return [key for key, value in dict(records(rows)).items() if value is not None]


class TopicJob(SavingJob):
    """A job whose rows are in a compacted topic, and what its last committed checkpoint must hold."""

    def __init__(
        self,
        root: Path,
        rows: KafkaRows,
        policy: Policy | None = None,
        optimizer: str = "rowwise_adagrad",
        **writer: Any,
    ) -> None:
        build = partial(plain_job, optimizer=optimizer)
        super().__init__(root, build, policy=policy or cnr.OneShot(), row_log=rows, **writer)
        self.committed: Whole = {}

    def commit(self, planner: cnr.CNRSavePlanner | None = None, *, asynchronously: bool = False) -> None:
        """Save under the next name, with a value that no other checkpoint has."""
        number = len(self.saved) + 1
        if asynchronously:
            self.async_save(f"step-{number}", place=number).result()
        else:
            self.save(f"step-{number}", planner=planner, place=number)
        self.committed = self.saved[f"step-{number}"]

    def fail(self) -> None:
        """A save that fails, right before its marker at the latest."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KafkaLog, "mark", faults.raising("mark"))
            faults.failures_of(self.commit)

    @property
    def newest(self) -> str:
        """The newest checkpoint."""
        return str(cnr.latest(self.root, row_log=self.row_log))

    def load(self) -> Whole:
        """What the newest checkpoint gives another job."""
        return models.load(self.build(99), self.newest, row_log=self.row_log, place=-1)

    def packs(self) -> list[Pack]:
        """Those of the newest checkpoint that are in the topic."""
        return [pack for pack in read_checkpoint(self.newest).manifest.packs if pack.log is not None]

    def check(self) -> None:
        """The newest checkpoint is the one that was committed last, bit for bit."""
        assert differing(self.load(), self.committed) == []


@pytest.fixture
def run(tmp_path: Path, kafka: Broker) -> Iterator[TopicJob]:
    """A job whose first checkpoint, a baseline, is committed."""
    with TopicJob(tmp_path, compacted(kafka)) as found:
        found.commit()
        yield found


def test_a_compacted_topic_holds_the_newest_checkpoint(run: TopicJob) -> None:
    """After many saves the broker has removed most records, and the newest checkpoint loads bit for bit."""
    for _ in range(6):
        run.train()
        run.commit()
    before, after = compact(run.row_log)
    assert after < before
    run.check()
    fresh = whole(models.state(plain_job(99, "rowwise_adagrad"), place=-1))
    assert differing(fresh, run.committed)


def test_blocks_that_were_not_touched_are_taken_over(run: TopicJob) -> None:
    """A save writes the row blocks that were touched since the head, and names packs of earlier saves for others."""
    for _ in range(4):
        run.train()
        run.commit()
    saves = {pack.name.split("-")[0] for pack in run.packs()}
    assert len(saves) > 1
    before = {pack.name for pack in run.packs()}
    run.commit()  # nothing was trained
    assert {pack.name for pack in run.packs()} == before
    compact(run.row_log)
    run.check()


def test_a_failed_save_overwrites_nothing_that_is_committed(run: TopicJob) -> None:
    """Records of a save that died before its marker take the place of no record that the head needs."""
    run.train()
    run.commit()
    for _ in range(3):
        run.train()
        run.fail()
    before, after = compact(run.row_log)
    assert after < before
    run.check()
    run.commit()
    compact(run.row_log)
    run.check()


def test_without_slots_a_failed_save_would_destroy_the_head(run: TopicJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test before relies on them: with one slot, compaction removes what the head needs, and a load says so."""
    run.train()
    run.commit()
    free = BlockKey.free
    monkeypatch.setattr(BlockKey, "free", lambda *args: replace(free(*args), slot=0))
    run.train()
    run.fail()
    compact(run.row_log)
    with pytest.raises(CheckpointException) as raised:
        run.load()
    assert any(isinstance(error, DamagedError) for error, _ in raised.value.failures.values())


STEPS = st.lists(
    st.sampled_from(("train", "save", "save", "fail", "half", "restart", "compact", "behind")), max_size=14
)


@contextmanager
def puts_that_fail(num: int) -> Iterator[None]:
    """Packs of row blocks, but for the first ones, are not written."""
    put, count = KeyedTarget.put, iter(range(num))

    def put_or_fail(*args: Any) -> Any:
        if next(count, None) is None:
            raise faults.InjectedError("no more")
        return put(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeyedTarget, "put", put_or_fail)
        yield


@settings(
    max_examples=3,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=STEPS, num_puts=st.integers(0, 6), optimizer=st.sampled_from(("sgd", "rowwise_adagrad")))
def test_the_newest_checkpoint_is_what_was_committed_last(
    tmp_path_factory: pytest.TempPathFactory, kafka: Broker, steps: Sequence[str], num_puts: int, optimizer: str
) -> None:
    """Whatever trains, saves, fails, starts again and is compacted: the newest checkpoint equals the perfect model."""
    run = TopicJob(tmp_path_factory.mktemp("run"), compacted(kafka), optimizer=optimizer)
    run.commit()
    for step in (*steps, "train", "fail", "compact"):
        match step:
            case "save":
                run.train()
                run.commit()
            case "half":
                run.train()
                with puts_that_fail(num_puts):
                    run.fail()
            case "behind":
                run.train()
                run.commit(asynchronously=True)
            case "compact":
                compact(run.row_log)
                run.check()
            case "restart":
                run.restart(2, place=-1)
            case _:
                getattr(run, step)()
    run.check()
    run.close()


def test_the_topic_does_not_grow(run: TopicJob) -> None:
    """However many saves, no more than two packs of each row block are there, and no part of any other."""
    num_blocks = 10 + 3  # of both tables
    for _ in range(15):
        run.train()
        run.commit()
    compact(run.row_log)
    slots = {key.rsplit(b"/", 1)[0] for key in live(run.row_log)}
    assert len({slot.rsplit(b"/", 1)[0] for slot in slots}) == num_blocks
    assert num_blocks < len(slots) <= 2 * num_blocks
    run.check()
    used = {str(pack.log and pack.log.key).encode() for pack in run.packs()}
    assert used < slots


def test_a_smaller_pack_leaves_no_parts_of_a_larger_one(run: TopicJob) -> None:
    """Tombstones take the place of what an earlier pack of the same slot had besides."""
    target = run.row_log.target("0" * 16, 0, True)
    key = target.keyed("0/t/1x0/0", 10 * PART_BYTES)  # type: ignore[union-attr] - the topic is compacted
    key.put("large.safetensors", [bytes(5 * PART_BYTES)])
    assert len(live(run.row_log)) == 5
    key.put("small.safetensors", [bytes(2 * PART_BYTES)])
    assert sorted(live(run.row_log)) == [b"0/t/1x0/0/0", b"0/t/1x0/0/1"]


def test_a_new_baseline_removes_the_rows_before_it(run: TopicJob) -> None:
    """Once a baseline is committed, nothing is left of the rows of older deltas; and the next deltas are right."""
    for _ in range(4):
        run.train()
        run.commit()
    assert live(run.row_log)
    run.commit(cnr.CNRSavePlanner(run.tracker, policy=cnr.Full()))
    assert live(run.row_log) == []
    compact(run.row_log)
    run.check()
    run.planner = cnr.CNRSavePlanner(run.tracker, policy=cnr.OneShot())
    for _ in range(2):
        run.train()
        run.commit()
    compact(run.row_log)
    run.check()


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
    assert "keeps the newest rows only" in str(raised.value.failures)
    with pytest.raises(ConfigurationError, match="keeps the newest rows only"):
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
    with pytest.raises(DamagedError, match="two packs have one key"):
        manifest_json.loads(data, "here")


def test_keys_are_told_from_other_text() -> None:
    """A key names the block and the slot, whatever the table is called."""
    assert BlockKey.parsed("job.0/a/b[0, 0]/4x7/1") == BlockKey("job.0/a/b[0, 0]/4x7", 1)
    assert BlockKey.parsed("something else") is None

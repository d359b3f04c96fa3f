"""Markers that others have written, or have left undecided: they cost a root nothing that has no use for them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import Producer

import torchrec_cnr as cnr
from tests.servers.kafka_server import Broker, KafkaServer, transactional
from tests.support.faults import InjectedError
from tests.support.jobs import SavingJob
from tests.support.kafka_jobs import SECS, failing_commit, marked, produce, records, with_timeout
from tests.support.models import state
from torchrec_cnr.kafka import marker_topic
from torchrec_cnr.kafka.marker_topic import MarkerTopic
from torchrec_cnr.kafka.records import marker_json, marker_of
from torchrec_cnr.storage.row_log import Marker, root_id

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture
def rows(rows: cnr.KafkaRows, monkeypatch: pytest.MonkeyPatch) -> cnr.KafkaRows:
    """A log that waits for no transaction to be ended."""
    monkeypatch.setattr(marker_topic, "_OPEN_SECS", 0.0)
    return with_timeout(rows, 3.0)


@pytest.fixture
def open_transaction(server: KafkaServer, rows: cnr.KafkaRows) -> Iterator[Producer]:
    """Of another root's job, which has died in its commit."""
    rows.open()
    producer = transactional(server)
    producer.begin_transaction()
    marker = Marker("0" * 16, "other", "save", "1" * 64, None, 1)
    producer.produce(f"{rows.topic}-markers", marker_json(marker), b"other", partition=0)
    assert producer.flush(SECS) == 0
    yield producer
    producer.abort_transaction(SECS)


def test_a_transaction_of_others_holds_nobody_up(
    tmp_path: Path, rows: cnr.KafkaRows, open_transaction: Producer
) -> None:
    """Neither a save nor a look nor a restore of a job whose manifests have their names, or wait for no marker."""
    job = SavingJob(tmp_path, row_log=rows)
    job.train_and_save("0", "1")
    assert marked(rows) == [], "they lie behind what is open"
    assert cnr.latest(tmp_path, row_log=rows) == f"{tmp_path}/1"
    job.train()
    with failing_commit("before"):
        assert isinstance(job.failure("2"), InjectedError)
    assert cnr.latest(tmp_path, row_log=rows) == f"{tmp_path}/1"
    assert (cnr.restore_newest(tmp_path, state(job.build(3)), row_log=rows) or ("",))[0] == f"{tmp_path}/1"
    job.train_and_save("3")
    job.assert_loads("3")
    job.close()


def test_a_torn_end_of_the_topic_holds_no_new_job_up(tmp_path: Path, server: KafkaServer, rows: cnr.KafkaRows) -> None:
    """The marker of a save is in a transaction without an end, and its manifest is there: nothing depends on it."""
    first = SavingJob(tmp_path, row_log=rows)
    first.train_and_save("0", "1")
    first.close()
    torn, sha256 = transactional(server), cnr.read_checkpoint(tmp_path / "1").sha256
    torn.begin_transaction()
    marker = Marker(root_id(str(tmp_path)), "1", "save", sha256, None, 1)
    torn.produce(f"{rows.topic}-markers", marker_json(marker), b"1", partition=0)
    assert torn.flush(SECS) == 0
    job = SavingJob(tmp_path, row_log=rows, seed=2)
    assert job.restore() == "1"
    assert cnr.latest(tmp_path, row_log=rows) == f"{tmp_path}/1"
    job.train_and_save("2")
    job.assert_loads("2")
    job.close()
    torn.abort_transaction(SECS)


def test_a_marker_that_is_undecided_is_waited_for(
    tmp_path: Path, rows: cnr.KafkaRows, open_transaction: Producer
) -> None:
    """A manifest waits for it, and nobody can tell yet: the error names the checkpoint. Once it is known, it counts."""
    job = SavingJob(tmp_path, row_log=rows)
    job.train_and_save("0")
    job.train()
    with failing_commit("after", cnr.StoreError("died")):
        job.failure("1")
    with pytest.raises(cnr.StoreError, match=r"whether checkpoint '1' was committed.*--abort"):
        cnr.latest(tmp_path, row_log=rows)
    open_transaction.abort_transaction(SECS)
    assert cnr.latest(tmp_path, row_log=rows) == f"{tmp_path}/1"
    job.close()
    open_transaction.begin_transaction()


@pytest.mark.parametrize("compacted", [False, True])
def test_a_marker_of_a_name_that_no_file_has(
    tmp_path: Path, server: KafkaServer, rows: cnr.KafkaRows, compacted: bool
) -> None:
    """A file's name has 255 bytes at most: such a checkpoint is not there."""
    rows = replace(rows, compacted=compacted)
    job = SavingJob(tmp_path, row_log=rows, policy=cnr.OneShot())
    job.train_and_save("0", "1")
    marker = Marker(root_id(str(tmp_path)), "n" * 300, "save", "1" * 64, None, 1)
    produce(server, f"{rows.topic}-markers", *[(b"key", marker_json(marker), [])] * 2)
    assert cnr.latest(tmp_path, row_log=rows) == f"{tmp_path}/1"
    assert cnr.latest(tmp_path / ("n" * 300), row_log=rows) is None
    job.train_and_save("2")
    job.assert_loads("2")
    job.close()


def test_markers_are_read_only_where_a_manifest_waits(
    tmp_path: Path, rows: cnr.KafkaRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are. Where one waits, those before its parent's are not read."""
    job = SavingJob(tmp_path / "run", row_log=rows)
    other = SavingJob(tmp_path / "other", row_log=rows)
    other.train_and_save(*(str(number) for number in range(30)))
    job.train_and_save("0")
    other.train_and_save("30")
    starts: list[int] = []
    read = MarkerTopic._read

    def recorded(topic: MarkerTopic, consumers: object, start: int, stop: int, *rest: float) -> object:
        if start < stop:
            starts.append(start)
        return read(topic, consumers, start, stop, *rest)

    monkeypatch.setattr(MarkerTopic, "_read", recorded)
    assert cnr.latest(tmp_path / "run", row_log=rows) == f"{tmp_path}/run/0"
    assert starts == []
    job.train()
    with failing_commit("before"):
        job.failure("1")
    starts.clear()
    assert cnr.latest(tmp_path / "run", row_log=rows) == f"{tmp_path}/run/0"
    in_topic = records(Broker(rows.bootstrap), f"{rows.topic}-markers")
    found = [marker_of(record.value(), record.offset() or 0) for record in in_topic]
    parents = [marker.offset for marker in found if marker is not None and marker.root == root_id(f"{tmp_path}/run")]
    assert len(starts) == 1
    assert starts[0] <= parents[0]
    for each in (job, other):
        each.close()

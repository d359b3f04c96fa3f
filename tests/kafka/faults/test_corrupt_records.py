"""Records in Kafka that are not what they should be, or are gone."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_END, TopicPartition
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.servers.kafka_server import KafkaServer
from tests.support import faults, models
from tests.support.jobs import SavingJob
from tests.support.kafka_jobs import (
    SECS,
    large_job,
    marked,
    part,
    produce,
    ranges,
    records,
    rewrite,
    with_timeout,
)
from tests.support.models import state
from torchrec_cnr.format.manifest import LogRange
from torchrec_cnr.storage.row_log import root_id

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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
    "a part is there twice": Case(_doubled, r"expected part 1 of .*got part 0 with"),
    "parts are in another order": Case(_swapped, r"expected part 0 of .*got part 1 with"),
    "a part is too short": Case(_cut, r"offset \d+.* part 1 "),
    "a part is of another pack": Case(_other_total, r"offset \d+.* part 1 of 99"),
    "a bit is flipped": Case(_altered, r"crc32c"),
    "the topic ends too soon": Case(_short, r"part \d+ of \d+"),
    "the topic is empty": Case(lambda found, place: found.clear(), r"part 0 .* between offsets \d+ and \d+"),
}


@pytest.mark.long
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


@pytest.mark.long
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
    assert [marker.name for marker in rows.markers(root_id(str(tmp_path)), 8)] == ["0", "1"]
    assert "not a commit record of this library" in caplog.text
    assert marked(rows) == ["0", "1"]
    job.close()


@pytest.mark.long
def test_rows_that_retention_has_removed_are_damage(tmp_path: Path, server: KafkaServer, rows: cnr.KafkaRows) -> None:
    """It is said that they were removed; a restore goes back to what is there."""
    job = SavingJob(tmp_path, row_log=rows)
    job.train_and_save("0", "1", "2")
    (place,) = ranges(tmp_path / "2")
    admin = server.admin()
    cut = TopicPartition(rows.topic, 0, place.first)
    admin.delete_records([cut])[cut].result(SECS)
    rows = with_timeout(rows, SECS)  # with connections that have not read ahead
    with pytest.raises(CheckpointException, match="removed by the topic's retention") as raised:
        models.load(job.build(2), f"{tmp_path}/2", row_log=rows)
    assert {type(cause) for cause in faults.causes(raised.value).values()} == {cnr.DamagedError}
    assert (cnr.restore_newest(tmp_path, state(job.build(3)), row_log=rows) or ("",))[0] == f"{tmp_path}/0"
    job.close()


def _made_anew(found: dict[int, Any], place: LogRange) -> None:
    found.clear()


def _lost_tail(found: dict[int, Any], place: LogRange) -> None:
    del found[place.last]


def _rewritten_tail(found: dict[int, Any], place: LogRange) -> None:
    found[place.last] = found[place.first]
    found[place.last + 1] = found[place.first]


@pytest.mark.long
@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("lose", [_made_anew, _lost_tail, _rewritten_tail])
def test_a_save_is_no_delta_on_rows_that_are_gone(
    tmp_path: Path, server: KafkaServer, lose: Callable[[dict[int, Any], LogRange], None], compacted: bool
) -> None:
    """A topic that was made anew, or has lost its last records, whoever has written there since."""
    name = server.new_name()
    rows = cnr.KafkaRows(server.bootstrap, name, num_partitions=1, part_bytes=200, compacted=compacted)
    policy = cnr.OneShot() if compacted else cnr.Consecutive()
    job = SavingJob(tmp_path, row_log=rows, build=large_job, policy=policy)
    job.train_and_save("0", "1", "2")
    assert cnr.read_checkpoint(tmp_path / "2").kind == "delta"
    place = max(ranges(tmp_path / "2"), key=lambda place: place.last)
    found = {message.offset(): part(message) for message in records(server, name)}
    lose(found, place)
    rewrite(server, name, found, **({"cleanup_policy": "compact"} if compacted else {}))
    job.train_and_save("3")
    assert cnr.read_checkpoint(tmp_path / "3").kind == "baseline"
    job.assert_loads("3")
    job.train_and_save("4")
    assert cnr.read_checkpoint(tmp_path / "4").kind == "delta"
    job.assert_loads("4")
    job.close()


@pytest.mark.long
def test_saves_go_on_when_retention_has_removed_all_records(
    tmp_path: Path, server: KafkaServer, rows: cnr.KafkaRows
) -> None:
    """A job that rests longer than its records are kept: the broker then knows none of its producers any more."""
    job = SavingJob(tmp_path, row_log=rows, policy=cnr.Intermittent())
    job.train_and_save("0", "1")
    admin = server.admin()
    for topic in (rows.topic, f"{rows.topic}-markers"):
        cut = TopicPartition(topic, 0, OFFSET_END)
        admin.delete_records([cut])[cut].result(SECS)
    job.train_and_save("2")
    assert marked(rows) == ["2"]
    assert cnr.latest(tmp_path, row_log=rows) == f"{tmp_path}/2"
    job.close()


@pytest.mark.long
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

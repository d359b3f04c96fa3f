"""Id maps whose changed values go to Kafka: they load bit for bit, also if the broker keeps the newest records only."""

from pathlib import Path

import pytest

import torchrec_cnr as cnr
from tests.kafka.compacted import topic_jobs
from tests.servers.kafka_server import Broker
from tests.tracking.id_map_jobs import IdMapJob, assert_equal, loaded, stored_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),
]


@pytest.mark.parametrize("is_compacted", [False, True])
def test_maps_load_from_a_topic(tmp_path: Path, kafka: Broker, rows: cnr.KafkaRows, is_compacted: bool) -> None:
    """With a failed save, an asynchronous one, and a restore in between."""
    log = topic_jobs.compacted(kafka) if is_compacted else rows
    job = IdMapJob(tmp_path, cnr.OneShot(), log)
    job.model.look_up([5, 6, 7])
    job.save()
    for number, raw_ids in enumerate(([1, 9], [6, 30], [2, 7], [31], [3, 4])):
        job.model.look_up(raw_ids)
        job.model.place(number, number)
        if number == 1:
            job.fail("write_data")
        checkpoint = job.save(is_async=number == 2)
        assert checkpoint.kind == "delta"
        assert any(pack.log is not None for pack in checkpoint.manifest.packs)
        if is_compacted:
            topic_jobs.compact(log)
        assert_equal(loaded(job.saved[-1][0], log), job.saved[-1][1])
        if number == 0:
            assert stored_rows(checkpoint)["_mch_sorted_raw_ids"] == [2]
        if number == 3:
            job.restore()
    job.tracker.close()

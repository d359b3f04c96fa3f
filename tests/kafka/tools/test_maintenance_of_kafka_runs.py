"""Maintenance of a run whose rows went to Kafka: it reads them there, and never loses a commit."""

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from confluent_kafka import Producer
from confluent_kafka.admin import NewTopic

import torchrec_cnr as cnr
from tests.golden import copy_of, log, write
from tests.kafka.tools.logged_runs import NAMES, LoggedRun
from tests.servers.kafka_server import ADMIN_SECS, Broker
from tests.support import models
from tests.support.command_line import cnr_result
from tests.support.models import Whole
from tests.support.without_us import differing, load_torch
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.manifest import MANIFEST_FILE, Pack
from torchrec_cnr.lineage.checkpoint import read_checkpoint
from torchrec_cnr.maintenance.background_upkeep import Upkeep
from torchrec_cnr.maintenance.catalog import read_catalog
from torchrec_cnr.maintenance.comparison.compare import compare
from torchrec_cnr.maintenance.export.export import export
from torchrec_cnr.maintenance.file_names import log_bytes
from torchrec_cnr.maintenance.verification.verify import verify
from torchrec_cnr.storage.row_log import root_id

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
TABLE = "model.bag.weight"


def _loaded(path: Path, rows: cnr.KafkaRows | None) -> Whole:
    """All that a checkpoint holds, by a load into another job."""
    state = models.state(models.plain_job(7, "rowwise_adagrad", rows=(40, 12)), position=0)
    reader = cnr.CNRStorageReader(path, row_log=rows)
    torch.distributed.checkpoint.load(state, storage_reader=reader, planner=cnr.CNRLoadPlanner(), no_dist=True)
    return models.whole(state)


# Reading


def test_a_table_is_read_out_of_the_log(run: LoggedRun) -> None:
    """With the log, a table is what a load of it gives; without, the error says what to pass."""
    loaded = _loaded(run.root / "step-3", run.rows)
    assert torch.equal(cnr.load_table(run.root / "step-3", TABLE, row_log=run.rows), loaded[TABLE])
    assert not torch.equal(cnr.load_table(run.root / "step-1", TABLE), loaded[TABLE])
    with pytest.raises(cnr.ConfigurationError, match=rf"KafkaRows\(bootstrap, '{run.rows.topic}'\).*--kafka HOST:PORT"):
        cnr.load_table(run.root / "step-3", TABLE)


def test_another_topic_is_refused(run: LoggedRun) -> None:
    """Rows are not looked for where they are not."""
    other = replace(run.rows, topic="another")
    with pytest.raises(cnr.ConfigurationError, match=f"are in the Kafka topic '{run.rows.topic}'.*'another'"):
        cnr.load_table(run.root / "step-3", TABLE, row_log=other)


def test_a_lineage_in_the_log_is_right(run: LoggedRun) -> None:
    """All of it is read, also where the root is given."""
    for path in (run.root / "step-3", run.root):
        report = verify(path, row_log=run.rows)
        assert report.problems == ()
        assert len(report.checkpoints) == 3
    with pytest.raises(cnr.ConfigurationError, match="its rows are in the Kafka topic"):
        verify(run.root / "step-3")


def _change_pack(run: LoggedRun, name: str, change: Callable[[Pack], Pack]) -> Pack:
    """Have a manifest say something else of its pack in the log; returns that."""
    path = run.root / name / MANIFEST_FILE
    manifest, _ = manifest_json.loads(path.read_bytes(), name)
    packs = tuple(change(pack) if pack.log is not None else pack for pack in manifest.packs)
    path.write_bytes(manifest_json.dumps(replace(manifest, packs=packs))[0])
    return run.packs_in_log(name)[0]


def _moved(pack: Pack, num_offsets: int) -> Pack:
    assert pack.log is not None
    first, last = pack.log.first + num_offsets, pack.log.last + num_offsets
    return replace(pack, log=replace(pack.log, first=first, last=last))


@pytest.mark.long
def test_a_missing_record_is_found_and_named(run: LoggedRun, tmp_path: Path) -> None:
    """Where one of a pack's records is not there, verification names topic, partition and offsets, and goes on."""
    damaged = run.copy(tmp_path)
    pack = _change_pack(damaged, "step-3", lambda pack: _moved(pack, 1))
    report = verify(damaged.root / "step-3", row_log=run.rows)
    assert pack.log is not None
    place = f"topic '{pack.log.topic}' partition {pack.log.partition} offsets {pack.log.first} to {pack.log.last}"
    assert report.problems
    assert {problem.file for problem in report.problems} == {f"{damaged.root}/step-3: {pack.name} in {place}"}
    assert all(re.search(r"part \d+ of .* is missing|expected part \d", found.message) for found in report.problems)
    result = cnr_result("verify", damaged.root / "step-3", run.option)
    assert result.exit_code == 1
    assert place in result.stdout


def test_an_altered_record_is_found_and_named(run: LoggedRun, tmp_path: Path) -> None:
    """Bytes in the log that are not those of the manifest's digests: the blob is named, and where it lies."""
    damaged = run.copy(tmp_path)
    path = damaged.root / "step-3" / MANIFEST_FILE
    manifest, _ = manifest_json.loads(path.read_bytes(), "step-3")
    entry = manifest.tensors[TABLE]
    blob = replace(entry.shards[0].blobs[0], crc32c=entry.shards[0].blobs[0].crc32c ^ 1)
    shard = replace(entry.shards[0], blobs=(blob, *entry.shards[0].blobs[1:]))
    tensors = {**manifest.tensors, TABLE: replace(entry, shards=(shard, *entry.shards[1:]))}
    path.write_bytes(manifest_json.dumps(replace(manifest, tensors=tensors))[0])
    (problem,) = verify(damaged.root / "step-3", row_log=run.rows).problems
    (pack,) = damaged.packs_in_log("step-3")
    assert problem.blob == f"tensor '{TABLE}' region [0, 0] block 0"
    assert problem.file is not None
    assert problem.file.endswith(str(pack.log))
    assert "crc32c" in problem.message


def test_exports_and_comparisons_read_the_log(run: LoggedRun, tmp_path: Path) -> None:
    """What is exported is what a load gives; what differs is told with the rows out of the log."""
    loaded = _loaded(run.root / "step-3", run.rows)
    export(run.root / "step-3", tmp_path / "model.pt", to="torch", row_log=run.rows)
    found = load_torch(tmp_path / "model.pt", {})
    tensors = {fqn: value for fqn, value in loaded.items() if isinstance(value, torch.Tensor)}
    assert differing({fqn: found[fqn] for fqn in tensors}, tensors) == []
    before = compare(run.root / "step-1", run.root / "step-3", row_log=run.rows)
    table = next(tensor for tensor in before.tensors if tensor.fqn == TABLE)
    first = _loaded(run.root / "step-1", None)
    assert table.num_differing == int((first[TABLE] != loaded[TABLE]).any(1).sum()) > 0


def test_the_golden_log_is_read_by_kafka(kafka: Broker, tmp_path: Path) -> None:
    """The golden checkpoints with packs in a log load by a real broker that has the golden log's records."""
    folder = copy_of(Path(__file__).parents[2] / "golden" / "v1" / write.LOGGED, tmp_path / "run")
    records = log.KeptLog(folder / "log.json").records()
    admin = kafka.admin()
    admin.create_topics([NewTopic(log.TOPIC, 1, 1)])[log.TOPIC].result(ADMIN_SECS)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for record in records:
        headers = [(name, record[name].encode()) for name in ("part", "pack") if name in record]
        producer.produce(log.TOPIC, bytes.fromhex(record["value"]), record["key"], partition=0, headers=headers)
    assert producer.flush(ADMIN_SECS) == 0
    rows = cnr.KafkaRows(kafka.bootstrap, log.TOPIC)
    kept = log.KeptLog(folder / "log.json")
    fqns = list(read_checkpoint(folder / "step-3").manifest.tensors)
    try:
        for fqn in fqns:
            path = folder / "step-3"
            found, expected = (cnr.load_table(path, fqn, row_log=found).reshape(-1) for found in (rows, kept))
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), fqn
    finally:
        admin.delete_topics([log.TOPIC])[log.TOPIC].result(ADMIN_SECS)


@pytest.mark.long
def test_markers_are_read_again_and_again(run: LoggedRun) -> None:
    """Whoever has read to the end of the markers, and comes back when there are no more, gets the same at once."""
    rows = replace(run.rows, timeout_secs=5)
    first = rows.markers(root_id(str(run.root)), 8)
    assert [marker.name for marker in first] == list(NAMES)
    assert [rows.markers(root_id(str(run.root)), 8) for _ in range(3)] == [first] * 3


# Compaction


def test_compaction_may_leave_rows_in_the_log(run: LoggedRun, tmp_path: Path) -> None:
    """Packs that are worth keeping stay in the log; the new manifest says where, and loads as before."""
    compacted = run.copy(tmp_path)
    before = _loaded(compacted.root / "step-3", run.rows)
    found = cnr.compact(compacted.root / "step-3", max_ratio=100, row_log=run.rows)
    assert found.is_compacted
    assert found.is_compacted
    assert {pack.name for pack in compacted.packs_in_log("step-3")} == {
        pack.name for name in NAMES for pack in run.packs_in_log(name)
    }
    assert differing(_loaded(compacted.root / "step-3", run.rows), before) == []
    assert verify(compacted.root / "step-3", row_log=run.rows).is_right
    again = cnr.compact(compacted.root / "step-3", self_contained=True, row_log=run.rows)
    assert log_bytes(again.manifest) == 0
    assert differing(_loaded(compacted.root / "step-3", None), before) == []


def test_a_self_contained_compaction_needs_no_log(run: LoggedRun, tmp_path: Path) -> None:
    """All rows are in files then: it loads and verifies without Kafka, also when all else is pruned."""
    compacted = run.copy(tmp_path)
    before = _loaded(compacted.root / "step-3", run.rows)
    plan = cnr.plan_compaction(compacted.root / "step-3", self_contained=True, row_log=run.rows)
    assert cnr.execute(plan).is_compacted
    assert compacted.packs_in_log("step-3") == []
    assert differing(_loaded(compacted.root / "step-3", None), before) == []
    assert verify(compacted.root / "step-3").is_right
    result = cnr.execute(cnr.plan_prune(compacted.root, cnr.Keep(last=1)))
    assert result.removed == ("step-2", "step-1")
    assert verify(compacted.root / "step-3").is_right
    assert differing(_loaded(compacted.root / "step-3", None), before) == []


def test_upkeep_compacts_and_prunes_a_run_in_the_log(run: LoggedRun, tmp_path: Path) -> None:
    """As a manager's thread does it: the newest is a baseline that loads as before, what it does not need is gone."""
    kept = run.copy(tmp_path)
    before = _loaded(kept.root / "step-3", run.rows)
    Upkeep(str(kept.root), cnr.Keep(last=1), compacts=True, row_log=run.rows).run_for(
        read_checkpoint(kept.root / "step-3")
    )
    assert read_checkpoint(kept.root / "step-3").is_compacted
    assert list(read_catalog(kept.root).checkpoints) == ["step-3"]
    assert differing(_loaded(kept.root / "step-3", run.rows), before) == []


# What a marker has committed


@pytest.mark.long
def test_what_a_marker_committed_is_found(run: LoggedRun, died: LoggedRun) -> None:
    """A checkpoint that has its marker and not yet its name is seen by whoever is given the log."""
    assert list(read_catalog(died.root).checkpoints) == ["step-1", "step-2"]
    assert list(read_catalog(died.root, row_log=run.rows).checkpoints) == list(NAMES)
    assert list(read_catalog(died.root).checkpoints) == list(NAMES)
    died.unpublish("step-3")
    assert verify(died.root / "step-3", row_log=run.rows).is_right


def test_prune_does_not_remove_what_a_marker_may_have_committed(run: LoggedRun, died: LoggedRun) -> None:
    """Without the log it stays, and the plan says why; with it, it is a checkpoint, or goes if it has no marker."""
    plan = cnr.plan_prune(died.root, cnr.Keep(last=5))
    assert "--kafka" in plan.stays["step-3"][0]
    assert plan.removals == ()
    shutil.copytree(died.root / "step-3", died.root / "step-4")  # which no marker names
    assert "step-4" in cnr.plan_prune(died.root, cnr.Keep(last=5)).stays
    with pytest.raises(cnr.ConfigurationError, match="no topic 'mistyped'"):
        cnr.plan_prune(died.root, cnr.Keep(last=5), row_log=replace(run.rows, topic="mistyped"))
    plan = cnr.plan_prune(died.root, cnr.Keep(last=5), row_log=run.rows)
    assert plan.died == ("step-4",)
    assert plan.pruned == ()
    assert "step-3" in plan.catalog.checkpoints
    assert cnr.execute(plan).failed == {}
    assert verify(died.root / "step-3", row_log=run.rows).is_right


def test_a_save_under_way_is_left_alone(run: LoggedRun, tmp_path: Path) -> None:
    """While a lease holds, a manifest that waits for its marker stays, with or without the log."""
    saving = run.copy(tmp_path)
    shutil.copytree(saving.root / "step-3", saving.root / "step-4")
    saving.unpublish("step-4")
    marker_less = next((saving.root / "step-4").glob("*.uncommitted.json"))
    marker_less.rename(marker_less.with_name(f"{'a' * 16}.uncommitted.json"))
    (saving.root / "step-4" / f"{'1' * 16}.{time.time_ns() + 3600 * 10**9}.save.lease").touch()
    for rows in (None, run.rows):
        assert cnr.plan_prune(saving.root, cnr.Keep(last=5), row_log=rows).removals == ()


def test_prune_asks_for_no_file_of_a_pack_in_the_log(run: LoggedRun, tmp_path: Path) -> None:
    """Checkpoints with rows in the log are whole without files of them; those that go leave the log as it is."""
    pruned = run.copy(tmp_path)
    models_held = _loaded(run.root / "step-2", run.rows)
    plan = cnr.plan_prune(pruned.root, cnr.Keep(last=1))
    assert plan.removals == ()  # it is a delta of all others
    cnr.compact(pruned.root / "step-3", max_ratio=100, row_log=run.rows)
    result = cnr.execute(cnr.plan_prune(pruned.root, cnr.Keep(last=1)))
    assert (result.failed, result.removed) == ({}, ("step-2", "step-1"))
    (told,) = [found for found in read_catalog(pruned.root).pruned if found.name == "step-2"]
    assert told.log_bytes == run.packs_in_log("step-2")[0].num_bytes
    assert differing(_loaded(run.root / "step-2", run.rows), models_held) == []

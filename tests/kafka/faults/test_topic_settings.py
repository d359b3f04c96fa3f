"""Topics that would lose rows, and arguments that cannot work."""

import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import torchrec_cnr as cnr
from tests.servers import kafka_server
from tests.servers.kafka_server import KafkaServer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

IMPATIENT_SECS = 2.0  # with less, a busy machine has not ended a transaction that was left open


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


@pytest.mark.long
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
    "'topic' must": {"topic": None},
    "'timeout_secs' must be": {"timeout_secs": "10"},
    "'num_partitions' must": {"num_partitions": "4"},
    "'num_partitions' must be": {"num_partitions": 1.5},
    "'compacted' must": {"compacted": "no"},
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


@pytest.mark.long
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


@pytest.mark.long
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

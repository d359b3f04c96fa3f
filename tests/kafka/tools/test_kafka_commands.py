"""The command line on a run whose rows went to Kafka."""

import json
import re
import uuid
from pathlib import Path
from typing import Any

import pytest

import torchrec_cnr as cnr
from tests.kafka.tools.logged_runs import NAMES, LoggedRun
from tests.servers.kafka_server import Broker
from tests.support.command_line import cnr_result, cnr_text
from torchrec_cnr.cli import options
from torchrec_cnr.human_text import bytes_text
from torchrec_cnr.maintenance.catalog import read_catalog
from torchrec_cnr.maintenance.read_run_history import read_run_history
from torchrec_cnr.maintenance.verification.verify import verify
from torchrec_cnr.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
SECRET = "open-sesame"
LONG_SECS = 3 * 3600


# What people are told


def test_sizes_tell_files_from_the_log(run: LoggedRun) -> None:
    """What lies in a directory, and what in Kafka, is told apart, and both where a run's history is told."""
    document = json.loads(cnr_text("ls", run.root, "--json"))
    in_log = [pack.num_bytes for name in NAMES[1:] for pack in run.packs_in_log(name)]
    assert [found["log_bytes"] for found in document["checkpoints"]] == [0, *in_log]
    for found in document["checkpoints"]:
        files = sum(path.stat().st_size for path in (run.root / found["name"]).iterdir())
        assert found["num_bytes"] == files
        assert found["written_bytes"] == found["num_bytes"] + found["log_bytes"]
    text = cnr_text("ls", run.root)
    assert re.search(rf"written  in Kafka  .*\nstep-1 .*\n.* {bytes_text(in_log[0])} ", text)
    assert f" kept and {bytes_text(sum(in_log))} in Kafka, " in text
    history = read_run_history(read_catalog(run.root))
    assert history.log_bytes == sum(in_log)
    assert history.vanished_bytes == 0
    assert history.written_bytes == history.kept_bytes


def test_inspect_says_where_a_pack_lies(run: LoggedRun) -> None:
    """Topic, partition and offsets, for people and for programs; no Kafka is needed for that."""
    (pack,) = run.packs_in_log("step-3")
    assert pack.log is not None
    text = cnr_text("inspect", run.root / "step-3")
    assert (
        f"topic '{pack.log.topic}' partition {pack.log.partition} offsets {pack.log.first} to {pack.log.last}" in text
    )
    assert "more in Kafka" in text
    document: dict[str, Any] = json.loads(cnr_text("inspect", run.root / "step-3", "--json"))
    logs = [found["log"] for found in document["packs"] if found["log"] is not None]
    assert [(log["topic"], log["first"], log["last"]) for log in logs] == [
        (pack.log.topic, pack.log.first, pack.log.last)
    ]
    assert document["log_bytes"] == pack.num_bytes


@pytest.mark.parametrize("command", ["verify", "diff", "export", "compact", "ls", "prune", "latest"])
def test_every_command_knows_the_log(run: LoggedRun, tmp_path: Path, command: str) -> None:
    """Each takes --kafka, and works with it; those that read rows say what to pass where it is missing."""
    copy = run.copy(tmp_path)
    args = {
        "diff": [copy.root / "step-1", copy.root],
        "export": [copy.root, tmp_path / "plain", "--to", "safetensors"],
    }.get(command, [copy.root])
    if command in ("verify", "diff", "export", "compact"):
        refused = cnr_result(command, *args)
        assert refused.exit_code == 2
        assert f"--kafka HOST:PORT/{run.rows.topic}" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    assert cnr_text(command, *args, run.option)


@pytest.mark.long
def test_the_newest_of_a_root_is_what_a_marker_says(run: LoggedRun, died: LoggedRun) -> None:
    """Commands that look for the newest see one that waits for its name."""
    assert re.search("step-3 .*unfinished.*pass --kafka to check", cnr_text("ls", died.root))
    assert json.loads(cnr_text("inspect", died.root, "--json"))["checkpoint_id"] == "step-2"
    assert cnr_text("latest", died.root, run.option) == f"{died.root}/step-3\n"
    assert json.loads(cnr_text("inspect", died.root, "--json"))["checkpoint_id"] == "step-3"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--kafka=nonsense"], "HOST:PORT/TOPIC"),
        (["--kafka=localhost:1/"], "HOST:PORT/TOPIC"),
        (["-X", "a=b"], "need --kafka HOST:PORT/TOPIC"),
        (["--kafka=localhost:1/t", "-X", SECRET], "KEY=VALUE"),
        (["--kafka=localhost:1/t", "-F", "/nowhere"], "cannot be read"),
        (["--kafka=localhost:1/t", "-X", "no.such.setting=1"], "no.such.setting"),
        (["--kafka=localhost:1/not a topic"], "'topic' must be"),
    ],
)
def test_wrong_options_are_refused_in_a_line(run: LoggedRun, args: list[str], message: str) -> None:
    """What is wrong is said, and no value of a setting."""
    result = cnr_result("ls", run.root, *args)
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert SECRET not in result.output


def test_a_topic_that_is_not_there_is_not_made(run: LoggedRun, kafka: Broker) -> None:
    """Who mistypes a topic is told so, and finds no empty topic later."""
    result = cnr_result("ls", run.root, f"--kafka={kafka.bootstrap}/mistyped")
    assert result.exit_code == 2
    assert "lacks topic 'mistyped'" in result.stderr
    assert not {"mistyped", "mistyped-markers"} & set(kafka.admin().list_topics(timeout=30).topics)


def test_a_topic_of_any_settings_is_read(kafka: Broker) -> None:
    """Tools write nothing: it is none of their business how long a topic keeps rows, and how many partitions it has."""
    rows = cnr.KafkaRows(kafka.bootstrap, f"short-{uuid.uuid4().hex}", num_partitions=1, retention_secs=LONG_SECS)
    rows.open()
    with pytest.raises(cnr.ConfigurationError, match="would lose rows"):
        cnr.KafkaRows(rows.bootstrap, rows.topic).open()
    assert options.rows_log(f"{rows.bootstrap}/{rows.topic}", None, None) is not None


def test_settings_come_from_options_and_a_file(run: LoggedRun, tmp_path: Path) -> None:
    """Lines of a file, and options, which count more; what they say reaches Kafka, and no message."""
    file = tmp_path / "client.properties"
    file.write_text(f"# who we are\nclient.id = a\nsasl.password={SECRET}\n\nclient.rack=x=y\n")
    rows = options.rows_log(f"{run.rows.bootstrap}/{run.rows.topic}", ["client.id=b"], file)
    assert isinstance(rows, cnr.KafkaRows)
    assert dict(rows.config) == {"client.id": "b", "sasl.password": SECRET, "client.rack": "x=y"}
    assert SECRET not in repr(rows)
    assert "in Kafka" in cnr_text("ls", run.root, run.option, "-F", file, "-X", "client.id=b")


@pytest.mark.long
def test_a_broker_that_does_not_answer_is_an_error(run: LoggedRun) -> None:
    """One line, and no traceback."""
    result = cnr_result("verify", run.root, "--kafka=127.0.0.1:1/rows")
    assert result.exit_code == 1
    assert re.fullmatch(r"cnr: error: cannot .* of Kafka at 127.0.0.1:1: .*\n", result.stderr)


def test_without_confluent_kafka_it_says_what_to_install(run: LoggedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named."""
    monkeypatch.setattr(cnr, "KafkaRows", None)
    monkeypatch.delattr(cnr, "KafkaRows")
    monkeypatch.setitem(__import__("sys").modules, "confluent_kafka", None)
    for name in [name for name in __import__("sys").modules if name.startswith("torchrec_cnr.kafka")]:
        monkeypatch.delitem(__import__("sys").modules, name)
    result = cnr_result("ls", run.root, run.option)
    assert result.exit_code == 2
    assert "pip install 'torchrec-cnr[kafka]'" in result.stderr


@pytest.mark.long
def test_the_log_follows_a_store(run: LoggedRun) -> None:
    """A store with a log is taken wherever a path is."""
    store = Store.open(run.root, row_log=run.rows)
    assert verify(store).is_right
    assert list(read_catalog(store).checkpoints) == list(NAMES)

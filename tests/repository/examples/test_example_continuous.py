"""The example of continuous checkpoints, as users run it: saved, stopped, loaded, through files and Kafka."""

import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from continuous_dlrm import parse_options

from tests.repository.examples.example_runs import LIMIT_SECS, ROOT, run, succeed

if TYPE_CHECKING:
    from tests.servers.kafka_server import Broker

SCRIPT = str(ROOT / "examples" / "continuous_dlrm.py")
NUM_SAMPLES, EVERY = 1_000, 7  # 20 steps an epoch: the last checkpoint of 3 lies in the midst of the third
SMALL = ("--num-samples", str(NUM_SAMPLES), "--num-rows", "300", "--dim", "8", "--every", str(EVERY))
CHECKED = "equal those of an uninterrupted run, bit for bit"


@pytest.fixture(params=["files", "Kafka"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Options that say where checkpoints lie."""
    options = ["--root", str(tmp_path / "run")]
    if request.param == "Kafka":
        kafka: Broker = request.getfixturevalue("kafka")
        options += ["--kafka", f"{kafka.bootstrap}/continuous-{uuid.uuid4()}"]
    return options


@pytest.mark.parametrize("place", [pytest.param("files", marks=pytest.mark.slow), "Kafka"], indirect=True)
def test_a_run_is_saved_stopped_and_loaded(place: list[str]) -> None:
    """3 epochs, stop, load, on to 8: the run goes on at the last checkpoint, and ends as one that was never stopped."""
    saved = succeed(SCRIPT, "save", *place, *SMALL)
    where = "Kafka" if "--kafka" in place else "files"
    assert len(re.findall(rf"delta .* rows, .* MB to {where}", saved.output)) == 60 // EVERY - 1
    loaded = succeed(SCRIPT, "load", *place, *SMALL, "--check")
    assert "resumed after step 56: epoch 3, sample 800\n" in loaded.output
    assert "epoch 8 of 8: mean loss" in loaded.output
    assert f"{160 - 56} losses and " in loaded.output
    assert CHECKED in loaded.output


@pytest.mark.parametrize("place", [pytest.param("files", marks=pytest.mark.slow), "Kafka"], indirect=True)
def test_a_run_that_is_killed_anywhere_is_loaded(place: list[str]) -> None:
    """SIGKILL, whatever the run is at: it goes on from the newest checkpoint."""
    with _started("save", *place, *SMALL, "--epochs", "1000") as process:
        assert process.stdout is not None
        lines = []
        for line in iter(process.stdout.readline, ""):
            lines.append(line)
            if sum("delta" in line for line in lines) == 4:
                process.kill()
    step = max(int(found[1]) for line in lines if (found := re.match(r"  step +(\d+):", line)))
    loaded = succeed(SCRIPT, "load", *place, *SMALL, "--epochs", str(step // 20 + 3), "--check")
    resumed = re.search(r"resumed after step (\d+):", loaded.output)
    assert resumed is not None
    assert step <= int(resumed[1]) <= step + 2 * EVERY
    assert CHECKED in loaded.output


@pytest.mark.slow
def test_a_broker_that_goes_away_does_not_stop_the_run(tmp_path: Path) -> None:
    """Saves fail, training goes on; once the broker is back, a delta holds what they lacked."""
    kafka_server = pytest.importorskip("tests.servers.kafka_server", exc_type=ModuleNotFoundError)
    (tmp_path / "broker").mkdir()
    with kafka_server.running(tmp_path / "broker") as server:
        place = ["--root", str(tmp_path / "run"), "--kafka", f"{server.bootstrap}/dlrm"]
        with _started("save", *place, *SMALL, "--epochs", "100000") as process:
            assert process.stdout is not None
            assert process.stderr is not None
            deltas = (line for line in process.stdout if "delta" in line)
            next(deltas)
            server.kill()
            assert "save failed, the next checkpoint includes its rows" in process.stderr.readline()
            server.start()
            step = int(next(deltas).split()[1].rstrip(":"))
            process.kill()
        loaded = succeed(SCRIPT, "load", *place, *SMALL, "--epochs", str(step // 20 + 3), "--check")
        assert CHECKED in loaded.output


@pytest.mark.long
def test_a_run_that_is_stopped_by_hand_says_how_to_go_on(tmp_path: Path) -> None:
    """Ctrl-C ends it with a line, and no traceback."""
    with _started("save", "--root", str(tmp_path / "run"), *SMALL, "--epochs", "1000") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_SECS)
    assert process.returncode == 130
    assert errors == "stopped; `load` continues from the last checkpoint\n"


@pytest.mark.slow
def test_runs_do_not_mix(tmp_path: Path) -> None:
    """Nothing to load, or something there already: one line and status 2."""
    root = ["--root", str(tmp_path / "run")]
    ended = run(SCRIPT, "load", *root)
    assert (ended.status, ended.errors.count("\n")) == (2, 1)
    assert "contains no checkpoint to load; create some with `save`" in ended.errors
    succeed(SCRIPT, "save", *root, *SMALL, "--epochs", "1")
    ended = run(SCRIPT, "save", *root, *SMALL)
    assert (ended.status, ended.errors.count("\n")) == (2, 1)
    assert "already contains checkpoints; continue with `load`" in ended.errors


@pytest.mark.slow
def test_loading_without_the_topic_names_it(kafka: "Broker", tmp_path: Path) -> None:
    """The rows are not in the files: the error says where they are."""
    root, topic = ["--root", str(tmp_path / "run")], f"continuous-{uuid.uuid4()}"
    succeed(SCRIPT, "save", *root, *SMALL, "--epochs", "1", "--kafka", f"{kafka.bootstrap}/{topic}")
    ended = run(SCRIPT, "load", *root, *SMALL)
    assert (ended.status, ended.errors.count("\n")) == (2, 1)
    assert f"its rows are in the Kafka topic '{topic}'" in ended.errors


@pytest.mark.long
def test_an_absent_broker_is_one_line_and_status_2(tmp_path: Path) -> None:
    """Nobody answers: that is said before anything is trained, and the root stays empty."""
    ended = run(SCRIPT, "save", "--root", str(tmp_path / "run"), "--kafka", "localhost:1/dlrm")
    assert (ended.status, ended.errors.count("\n")) == (2, 1)
    assert "cannot look up topic 'dlrm-markers' of Kafka at localhost:1" in ended.errors
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["save"], "required: --root"),
        (["delete", "--root", "r"], "invalid choice: 'delete'"),
        (["save", "--root", "r", "--every", "0"], "--every: must be at least 1, got 0"),
        (["save", "--root", "r", "--kafka", "localhost:9092"], "--kafka must be HOST:PORT/TOPIC, got localhost:9092"),
        (["save", "--root", "r", "--kafka", "/dlrm"], "--kafka must be HOST:PORT/TOPIC, got /dlrm"),
    ],
)
def test_a_wrong_call_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong, and where help is; no usage, no traceback."""
    with pytest.raises(SystemExit) as ended:
        parse_options(arguments)
    errors = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in errors
    assert errors.count("\n") == 1


def test_help_shows_the_four_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Save and load, files and Kafka."""
    with pytest.raises(SystemExit) as ended:
        parse_options(["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.count("  python examples/continuous_dlrm.py ") == 4


def _started(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, SCRIPT, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes)

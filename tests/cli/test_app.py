"""The command line: its help, how it fails, and what it needs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import torchrec_cnr as cnr
from tests.cli.empty_commits import LIMIT_SECS, commit
from tests.support import runs
from tests.support.command_line import cnr_result, cnr_text
from torchrec_cnr.cli import app as application
from torchrec_cnr.cli.app import COMMANDS, Command
from torchrec_cnr.cli.commands import ls

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

ROOT = Path(__file__).parents[2]


# Help


def test_every_command_explains_itself() -> None:
    """The table's summaries are the first lines of docstrings; each command's help has an example of it."""
    for name, command in COMMANDS.items():
        lines = (resolve_name(command.function).__doc__ or "").splitlines()
        assert lines[0] == command.summary
        assert f"cnr {name} " in cnr_text(name, "--help")


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_help_shows_no_types_of_flags_and_arguments(name: str | None) -> None:
    """A flag has no value, and an argument is named; other options name their value."""
    text = cnr_text(*filter(None, [name]), "--help")
    assert re.findall(r"<\w+( range)?>", text) == []
    assert re.search(r"--help +-h +Show this message", text)


READ_ROWS = {"verify", "diff", "export", "compact"}
FIND_COMMITS = {"ls", "latest", "prune"}  # that a job made in Kafka before it died


@pytest.mark.parametrize("name", COMMANDS)
def test_options_of_kafka_come_last_and_only_where_they_act(name: str) -> None:
    """They are a group of their own, after all other options."""
    panels = re.split(r"╭─ ([\w ]+) ─", cnr_text(name, "--help"))
    assert panels[3] == "Options"
    assert not re.search("--kafka|-X|-F", panels[4])
    assert (panels[-2] == "Rows in Kafka") == (name in READ_ROWS | FIND_COMMITS)
    if panels[-2] == "Rows in Kafka":
        assert set(re.findall(r"--[\w-]+|-[XF]\b", panels[-1])) == {"--kafka", "--kafka-config", "-X", "-F"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_output_for_programs(name: str) -> None:
    """With --json."""
    assert re.search(r"--json +Print one JSON document", cnr_text(name, "--help"))


def test_without_a_command_there_is_help() -> None:
    """All commands are listed."""
    for text in (cnr_text(), cnr_text("--help")):
        assert {name for name in COMMANDS if re.search(rf"\b{name}\b +{COMMANDS[name].summary[:10]}", text)} == set(
            COMMANDS
        )
    assert cnr_text("--version") == f"cnr {cnr.__version__}\n"


@pytest.mark.long
def test_help_needs_no_torch() -> None:
    """What torch takes to import is paid by commands alone."""
    program = (
        "import sys\nfrom torchrec_cnr.cli import main\nsys.argv = ['cnr', *sys.argv[1:]]\n"
        "try:\n    main()\nfinally:\n    assert ('torch' in sys.modules) == (len(sys.argv) > 2)"
    )
    for args in (["--help"], ["ls", "--help"]):
        done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_script_is_the_command_line() -> None:
    """What pip installs as ``cnr`` is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert callable(resolve_name(project["scripts"]["cnr"]))


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    """One line, and no traceback."""
    program = f"import sys; sys.modules[{missing!r}] = None; from torchrec_cnr.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"cnr: error: {missing} not installed: pip install 'torchrec-cnr[cli]'\n"


def test_a_command_may_need_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that only one command needs is named when that command is called."""
    monkeypatch.setattr(application, "COMMANDS", {**COMMANDS, "ls": Command("no_such_package.x:ls", "")})
    result = cnr_result("ls", "x")
    assert result.exit_code == 1
    assert result.stderr == "cnr: error: no_such_package is not installed: pip install 'torchrec-cnr[cli]'\n"


# Failures


@pytest.fixture
def broken(run: Path, tmp_path: Path) -> Path:
    """Places that are no checkpoints, each broken in its own way, by name."""
    for name in ("empty", "foreign", "half-written"):
        (tmp_path / name).mkdir()
    (tmp_path / "foreign" / "notes").write_bytes(b"notes")
    (tmp_path / "half-written" / "5a7e-0-0.safetensors").write_bytes(b"data")
    for name in ("manifest", "newer", "pack"):
        shutil.copytree(run / "step-1", tmp_path / name)
    manifest = tmp_path / "manifest" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    runs.change_manifest(tmp_path / "newer", rb'"version":\d+', b'"version":99')
    (pack,) = (tmp_path / "pack").glob("*.safetensors")
    data = pack.read_bytes()
    pack.write_bytes(data[: 8 + int.from_bytes(data[:8], "little") + 10])
    shutil.copytree(run / "step-1", tmp_path / "right")
    return tmp_path


FAILURES = {
    "missing": ("does not exist", {"ls": 1, "inspect": 1, "verify": 1, "diff": 1}),
    "empty": ("an empty directory", {"ls": 0, "inspect": 1, "verify": 1, "diff": 1}),
    "foreign": ("neither a checkpoint nor", {"ls": 1, "inspect": 1, "verify": 1, "diff": 1}),
    "half-written": ("data files, but no manifest.json", {"ls": 1, "inspect": 1, "verify": 1, "diff": 1}),
    "manifest": ("not a complete manifest", {"ls": 2, "inspect": 1, "verify": 1, "diff": 1}),
    "newer": ("format version 99", {"ls": 2, "inspect": 1, "verify": 1, "diff": 1}),
    "pack": ("truncated", {"ls": 2, "inspect": 0, "verify": 1, "diff": 1}),
}


@pytest.mark.parametrize("place", FAILURES)
@pytest.mark.parametrize("command", sorted(COMMANDS.keys() & {"ls", "inspect", "verify", "diff"}))
def test_failures_are_one_line(broken: Path, place: str, command: str) -> None:
    """Whatever is at a place, an error says it in one line on stderr; nothing is on stdout, and no traceback."""
    words, statuses = FAILURES[place]
    args = [broken / "right", broken / place] if command == "diff" else [broken / place]
    for options in ([], ["--json"]):
        result = cnr_result(command, *args, *options)
        assert result.exit_code == statuses[command], result.output
        if result.exit_code == 0 or (command, place) in (("verify", "manifest"), ("verify", "pack")):
            assert result.stderr == ""  # a finding is no failure
        else:
            assert result.stdout == ""
            assert re.fullmatch(rf"cnr: error: {re.escape(str(broken / place))}.*\n", result.stderr)
            assert words in result.stderr or command == "ls"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nothing"], "No such command 'nothing'; see 'cnr --help'"),
        (["lsx"], "No such command 'lsx'. Did you mean 'ls'?; see 'cnr --help'"),
        (["ls"], "Missing argument 'ROOT'; see 'cnr ls --help'"),
        (["ls", "x", "--bogus"], "No such option: --bogus; see 'cnr ls --help'"),
        (["ls", "x", "--last", "0"], "'--last'"),
        (["ls", "x", "--last", "3", "--all"], "--last and --all exclude each other"),
        (["verify", "x", "--threads", "none"], "'--threads'"),
        (["inspect", "no-such-protocol://x"], "not a path or URL that fsspec can open"),
        (["inspect", "jupyter://x"], "not a path or URL that fsspec can open"),  # fsspec's own TypeError
        (["diff", "x"], "Missing argument 'B'; see 'cnr diff --help'"),
    ],
)
def test_wrong_usage_has_its_own_status(args: list[str], words: str) -> None:
    """What is wrong with the command line is said in one line, too."""
    result = cnr_result(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("cnr: error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_a_server_that_does_not_answer_is_an_error(name: str, run: Path, tmp_path: Path) -> None:
    """In one line: fsspec connects to some servers already when it opens a URL."""
    place = "ftp://127.0.0.1:9/run"
    args = {
        "diff": [place, run], "tag": [place, "t"], "untag": [place, "t"], "import": [place, tmp_path / "new"],
        "export": [place, tmp_path / "new", "--to", "torch"], "report": [run, "-o", place],
    }.get(name, [place])  # fmt: skip
    result = cnr_result(name, *args)
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(r"cnr: error: 'ftp://127.0.0.1:9/run': .*Connection refused.*\n", result.stderr)


def test_messages_are_one_line_whatever_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Line breaks and escape sequences of an error do not reach the terminal."""

    def fail(*args: Any, **options: Any) -> None:
        raise cnr.DamagedError("first\n  second \x1b[31mred [bold]not bold")

    monkeypatch.setattr(ls, "read_catalog", fail)
    result = cnr_result("ls", "x")
    assert result.stderr == "cnr: error: first second \\x1b[31mred [bold]not bold\n"


def test_warnings_do_not_reach_the_terminal_as_they_are(tmp_path: Path) -> None:
    """A checkpoint's name is in a warning: line breaks and escape sequences of it are shown."""
    commit(tmp_path, "good", 1)
    commit(tmp_path, "bad\x1b[2Jname\n", 2)
    manifest = tmp_path / "bad\x1b[2Jname\n" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    for command in ("inspect", "compact"):
        result = cnr_result(command, tmp_path)
        assert "\\x1b[2Jname" in result.stderr
        assert "\x1b" not in result.stderr
        assert result.stderr.count("\n") == result.stderr.count("cnr: ")


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """Names that look like markup, and those with escape sequences, are names."""
    commit(tmp_path, "[red]x[", 1)
    (tmp_path / "y\x1b[31m").mkdir()
    text = cnr_text("ls", tmp_path)
    assert "[red]x[ " in text
    assert "y\\x1b[31m  empty" in text
    assert "\x1b" not in text


def test_warnings_are_lines_on_stderr(run: Path, tmp_path: Path) -> None:
    """What the library passes over is told."""
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run" / "branch-4" / "manifest.json"
    file.write_bytes(file.read_bytes()[:-1])
    result = cnr_result("inspect", tmp_path / "run")
    assert result.exit_code == 0
    assert result.stderr.startswith("cnr: warning: skipped while looking for the latest checkpoint")
    assert f"{tmp_path}/run/branch-3" in result.stdout


def test_bugs_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is none of the package's own keeps its traceback."""

    def fail(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ls, "read_catalog", fail)
    assert isinstance(cnr_result("ls", "x").exception, ZeroDivisionError)


@pytest.mark.long
@pytest.mark.parametrize("args", [(), ("--json",)], ids=["text", "json"])
def test_output_that_cannot_be_written_is_an_error(run: Path, args: tuple[str, ...]) -> None:
    """One line, and no traceback."""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "torchrec_cnr.cli", "ls", str(run), *args]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_SECS, check=False)
    assert (done.returncode, done.stderr) == (1, "cnr: error: cannot write the output: No space left on device\n")


@pytest.mark.long
def test_an_encoding_without_marks_is_no_error(run: Path) -> None:
    """A checkpoint is not corrupt because its check mark cannot be printed."""
    command = [sys.executable, "-m", "torchrec_cnr.cli", "verify", str(run)]
    variables = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_SECS, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("? no problems")


# As root everything may be read. Nobody may not even be able to import, so that a first round, as root, does it.
AS_NOBODY = """
import json, os, sys
from torchrec_cnr.cli import app
from typer.testing import CliRunner
commands = json.loads(sys.argv[1])
results = [CliRunner().invoke(app.app, args) for args in commands]
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    results = [CliRunner().invoke(app.app, args) for args in commands]
print(json.dumps([(result.exit_code, result.stdout, result.stderr) for result in results]))
"""


@pytest.fixture
def unreadable() -> Iterator[Path]:
    """A root with a manifest, and directories, that nobody may read; another has a chain with an unreadable link."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        commit(root, "step-1", 1)
        commit(root, "step-2", 2)
        (root / "closed").mkdir()
        first = commit(Path(folder) / "chain", "step-1", 1)
        commit(Path(folder) / "chain", "step-2", 2, first)
        (Path(folder) / "chain" / "step-1").chmod(0)
        Path(folder).chmod(0o755)
        (root / "step-2" / "manifest.json").chmod(0)
        (root / "closed").chmod(0)
        yield root
        for path in (root / "closed", Path(folder) / "chain" / "step-1"):
            path.chmod(0o755)


@pytest.mark.long
def test_what_may_not_be_read_is_told(unreadable: Path) -> None:
    """Directories and manifests without permission are listed as such; a root without is an error."""

    commands = [
        ["ls", "--json", ""],
        *([name, "closed"] for name in ("ls", "inspect", "verify")),
        ["inspect", "step-2"],
        ["inspect", "../chain/step-2"],
        ["tag", "step-1", "t"],
        ["compact", "step-1"],
        ["report", "--out", "step-1/page.html", ""],
    ]
    args = [
        [command, *(arg if arg.startswith("-") or arg == "t" else str(unreadable / arg) for arg in rest)]
        for command, *rest in commands
    ]
    line = [sys.executable, "-c", AS_NOBODY, json.dumps(args)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_SECS, check=True)
    (status, out, err), *others = json.loads(done.stdout)
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert [entry["name"] for entry in document["checkpoints"]] == ["step-1"]
    states = {entry["name"]: entry["state"] for entry in document["others"]}
    assert states == {"closed": "unreadable", "step-2": "unreadable"}
    assert len(others) == 8
    status, out, err = others.pop(4)
    assert (status, err) == (0, "")
    assert re.search("problem +cannot read .*/chain/step-1/manifest.json: PermissionError", out)
    status, out, err = others.pop(5)  # there is nothing to compact in a checkpoint without tensors
    assert (status, err) == (0, "")
    for status, out, err in others:
        assert (status, out) == (1, "")
        assert re.fullmatch(r"cnr: error: cannot (list|read|look up|write) .*PermissionError.*\n", err)


@pytest.mark.long
def test_an_interrupt_ends_it_quietly(tmp_path: Path) -> None:
    """Ctrl-C gives the status that shells expect, and no traceback."""
    program = (
        "import signal, sys, time\nfrom torchrec_cnr.cli import main\nfrom torchrec_cnr.cli.commands import ls\n"
        # A shell that runs the tests in the background has its children ignore interrupts.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def read_catalog(*args):\n    print('reading', flush=True)\n    time.sleep(60)\n"
        "ls.read_catalog = read_catalog\nsys.argv = ['cnr', 'ls', 'x']\nmain()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_SECS)
    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.long
def test_nobody_needs_to_read_everything(long_run: Path) -> None:
    """A pipe that is closed early ends the command, without a word."""
    command = f"{sys.executable} -m torchrec_cnr.cli ls {long_run} --all"
    for pipe, expected in (("| head -c 10", "checkpoint"), ("--json | head -c 10", '{\n  "root"')):
        line = ["bash", "-c", f"{command} {pipe}"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_SECS, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")

"""Every benchmark runs at a small size and prints its figures. The figures themselves are not tested."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.support.registry import Benchmark, find_benchmarks
from benchmarks.support.report import Figure, Report, Table, text_of
from benchmarks.support.rounds import Candidate, Setup, Taken, interleave, ratios
from tests.repository.test_plots import problems

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECS = 240
FOLDERS = sorted(path.parent for path in (ROOT / "benchmarks").rglob("__init__.py"))
MAX_SIBLINGS = 16
MAX_MODULE_LINES = 450


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """The command line."""
    command = [sys.executable, "-m", "benchmarks", *arguments]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECS,
        check=False,
    )


# The longest, and those whose parts other tests run: loads by ranks, requests to S3, Kafka, a served model, methods to
# save, compaction, and what is made for GPUs.
SLOW = (
    "compaction",
    "movement",
    "growth",
    "every-second",
    "local-copies",
    "kills",
    "tracker",
    "gpu-marking",
    "headline",
    "cost",
    "integrity",
    "training",
    "transforms",
    "transform-accuracy",
    "transform-memory",
    "transform-saves",
    "search",
    "coding",
    "time",
    "async",
    "alternatives",
    "bandwidth",
    "memory",
    "scale",
    "s3",
    "serving",
    "gpu-kernels",
    "preemption",
    "kafka",
    "accuracy",
    "gpu-loads",
    "gpu-stall",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in BENCHMARKS]
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_benchmark_gives_its_figures(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Each benchmark says what it does, and gives positive figures that print as a table."""
    said: list[str] = []
    kafka = request.getfixturevalue("kafka").bootstrap if name == "kafka" else None
    report = BENCHMARKS[name].run(Setup(tmp_path, quick=True, num_threads=1, say=said.append, kafka=kafka))
    assert said
    assert report.figures or (name == "gpu" and not torch.cuda.is_available())
    assert all(figure.value >= 0 for figure in report.figures)
    text = text_of(name, report, is_judged=True)
    assert text.startswith(f"== {name}: {report.title}\n")
    assert all(figure.what in text for figure in report.figures)
    check_plot(BENCHMARKS[name], report, tmp_path)


def check_plot(benchmark: Benchmark, report: Report, folder: Path) -> None:
    """A plot is legible, and the same when it is drawn again from the JSON of its report."""
    content = report.to_json()
    again = json.loads(json.dumps(content))
    if benchmark.plot:
        benchmark.plot.write(content, folder / "plots" / "measured.svg")
        benchmark.plot.write(again, folder / "plots" / "again.svg")
        svg = (folder / "plots" / "measured.svg").read_text()
        assert svg == (folder / "plots" / "again.svg").read_text()
        assert problems(svg) == []


@pytest.mark.long
def test_command_line_prints_and_removes_its_files(tmp_path: Path) -> None:
    """The figures are printed and written as JSON, progress goes to stderr, and no file is left."""
    folder, figures = tmp_path / "disk", tmp_path / "figures.json"
    folder.mkdir()
    done = run("bytes", "--quick", "--dir", str(folder), "--json", str(figures))
    assert done.returncode == 0, done.stderr
    assert "== bytes: " in done.stdout
    assert "4 bits" in done.stdout
    assert "bytes: saving" in done.stderr
    assert list(folder.iterdir()) == []
    content = json.loads(figures.read_text())
    assert content["quick"] is True
    assert content["bytes"]["figures"][0]["value"] > 1
    assert "torch" in content["machine"]["versions"]


def test_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is none is answered with those that are."""
    with pytest.raises(SystemExit, match="2"):
        main(["speed"])
    assert f"unknown benchmark speed; benchmarks: {', '.join(BENCHMARKS)}" in capsys.readouterr().err


def test_help_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    """The help has a line for each, with what it measures; long ones are marked."""
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for name, benchmark in BENCHMARKS.items():
        assert f"{name:12} {'*' if benchmark.is_long else ' '} {benchmark.description}" in lines


RUNNER = """
from benchmarks.support.registry import Benchmark
from benchmarks.support.registry import find_benchmarks
from benchmarks.support.report import Report

BENCHMARK = Benchmark(lambda setup: Report(__name__, (), ()), "made up")
"""


def made_runners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> Path:
    """A folder of runners with these files, in a package that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / f"made_{tmp_path.name}" / "runners"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(RUNNER)
    return folder


def test_registry_is_read_from_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's name is the benchmark's: underscores are dashes; the one that a keyword needs at its end is left out."""
    folder = made_runners(tmp_path, monkeypatch, "x/__init__.py", "x/row_bytes.py", "y/async_.py")
    assert list(find_benchmarks(folder)) == ["row-bytes", "async"]


def test_registry_refuses_two_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them the command line meant could not be told."""
    folder = made_runners(tmp_path, monkeypatch, "x/time.py", "y/time.py")
    with pytest.raises(ValueError, match="another benchmark is named 'time' too"):
        find_benchmarks(folder)


def test_registry_refuses_a_module_without_a_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that cannot be run belongs elsewhere."""
    folder = made_runners(tmp_path, monkeypatch, "x/time.py")
    (folder / "x" / "time.py").write_text("")
    with pytest.raises(TypeError, match="expected BENCHMARK to be a Benchmark, got None"):
        find_benchmarks(folder)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_folders_are_narrow_and_described(folder: Path) -> None:
    """A folder has at most 16 modules of at most 450 lines, and its docstring names each of them and its folders."""
    modules = [path for path in folder.glob("*.py") if path.stem != "__init__"]
    assert len(modules) <= MAX_SIBLINGS
    assert [path for path in modules if len(path.read_text().splitlines()) > MAX_MODULE_LINES] == []
    described = re.findall(r"^- ``(\w+)``: \w", (folder / "__init__.py").read_text(), re.MULTILINE)
    packages = [path.parent.name for path in folder.glob("*/__init__.py")]
    assert sorted(described) == sorted([*(path.stem for path in modules), *packages])


@pytest.mark.long
def test_rounds_are_interleaved_and_the_first_is_a_warm_up() -> None:
    """Every candidate runs once a round, in an order that changes, and the warm-up is not counted."""
    order: list[str] = []

    def candidate(name: str) -> Candidate:
        return Candidate(run=lambda number: order.append(f"{name}{number}"))

    timings = interleave({"a": candidate("a"), "b": candidate("b")}, 2)
    assert order == ["a0", "b0", "b1", "a1", "a2", "b2"]
    assert {name: len(taken) for name, taken in timings.items()} == {"a": 2, "b": 2}


def test_ratio_is_that_within_a_round() -> None:
    """A machine that is slow for one round does not change the ratio."""
    timings = {"a": [Taken(2.0, 2.0), Taken(20.0, 2.0)], "b": [Taken(1.0, 1.0), Taken(10.0, 1.0)]}
    assert ratios(timings, "a", "b") == [2.0, 2.0]


def test_figures_are_judged_by_their_targets() -> None:
    """A target from below, one from above, and none; the median counts."""
    low = Figure.over_rounds("low", [1.0, 2.0, 9.0], "×", at_least=3)
    high = Figure.over_rounds("high", [1.0, 2.0, 9.0], "×", at_most=3)
    assert (low.value, low.is_met, high.is_met, Figure("none", 1, "s").is_met) == (2.0, False, True, None)
    text = text_of("x", Report("a title", ("a note",), (low, high), (Table(("head",), (("cell",),)),)), is_judged=True)
    assert "at least 3 ×  NOT MET" in text
    assert "at most 3 ×   met" in text
    assert "met" not in text_of("x", Report("a title", (), (low, high)), is_judged=False).lower()

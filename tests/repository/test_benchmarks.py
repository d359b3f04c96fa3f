"""Every benchmark runs at a small size and prints its figures; what they are is nobody's promise here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.__main__ import BENCHMARKS
from benchmarks.support.report import Figure, Report, Table, text_of
from benchmarks.support.rounds import Candidate, Setup, Taken, interleave, ratios

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECS = 240


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


SLOW = ("training", "search", "coding", "time", "async", "rivals", "bandwidth")  # the longest


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in BENCHMARKS]
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_benchmark_gives_its_figures(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Each benchmark says what it does, and gives positive figures that print as a table."""
    said: list[str] = []
    kafka = request.getfixturevalue("kafka").bootstrap if name == "kafka" else None
    report = BENCHMARKS[name](Setup(tmp_path, quick=True, num_threads=1, say=said.append, kafka=kafka))
    assert said
    assert report.figures or (name == "gpu" and not torch.cuda.is_available())
    assert all(figure.value >= 0 for figure in report.figures)
    text = text_of(name, report, is_judged=True)
    assert text.startswith(f"== {name}: {report.title}\n")
    assert all(figure.what in text for figure in report.figures)
    json.dumps(report.to_json())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accuracy", "movement"])
def test_plots_name_their_units(name: str, tmp_path: Path) -> None:
    """Asked for plots, a benchmark draws one, whose axes say what they show and in which unit."""
    BENCHMARKS[name](Setup(tmp_path, quick=True, num_threads=1, say=lambda _: None, plots=tmp_path / "plots"))
    plot = (tmp_path / "plots" / f"{name}.svg").read_text()
    labels = {
        "accuracy": ("restores", "change from bit-exact, %"),
        "movement": ("% of rows that moved no further", "bits an element, scale or step included"),
    }
    assert ElementTree.fromstring(plot).tag == "{http://www.w3.org/2000/svg}svg"
    assert all(label in plot for label in labels[name])


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


def test_unknown_name_is_refused() -> None:
    """A name that is none is answered with those that are."""
    done = run("speed")
    assert done.returncode == 2
    assert f"no benchmark speed; there are {', '.join(BENCHMARKS)}" in done.stderr


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

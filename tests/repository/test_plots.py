"""Plots and drawings are legible on a phone and on a dark page, and plots are drawn again without measuring."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.__main__ import main
from benchmarks.plots.style import DARK, OURS, Bar, Plot, draw_bars, label_lines

ROOT = Path(__file__).parents[2]
IMAGES = sorted((ROOT / "docs" / "images").glob("*.svg"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
HEADLINE = ROOT / "docs" / "benchmarks" / "headline.json"
WIDTH, PHONE_WIDTH, MIN_TEXT = 720, 360, 9  # pixels
MAX_BYTES = 100_000
LABELS = {
    "accuracy.svg": ("change, % (up is worse)", "restores", "8 bits"),
    "alternatives.svg": ("Training waits, seconds", "Memory of a save, MiB", "torchrec_cnr"),
    "bandwidth.svg": ("× less than full", "fp32 checkpoints", "Compacted", "2 bits"),
    "hero.svg": (
        "Bytes per checkpoint",
        "Training waits for",
        "a save, seconds",
        "million rows × 64",
        "torchrec_cnr",
    ),
    "load.svg": ("merge", "rank 3"),
    "modified-rows.svg": ("% of all rows", "intervals"),
    "movement.svg": ("% of modified rows", "Bits per value", "4-bit codes"),
    "policies.svg": ("× a full checkpoint with as many bits", "Compacted"),
    "quantization.svg": ("Bytes per row", "(fp32: 256)", "Mean error,", "% of norm", "AdaptiveAsymmetric(4)"),
    "save.svg": ("freeze", "manifest.json"),
}


def problems(svg: str) -> list[str]:
    """Return the reasons for which an SVG is illegible on a phone or on a dark page."""
    found = []
    root = ElementTree.fromstring(svg)
    if (root.get("width"), root.get("viewBox", "").split()[2:3]) != (str(WIDTH), [str(WIDTH)]):
        found.append(f"width {root.get('width')}, viewBox {root.get('viewBox')}")
    sizes = {float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", svg)}
    if not sizes or min(sizes) * PHONE_WIDTH / WIDTH < MIN_TEXT:
        found.append(f"text of {sizes} pixels")
    if "@media (prefers-color-scheme: dark)" not in svg:
        found.append("no colors for dark pages")
    colors = {color for style in re.findall(r'style="([^"]*)"', svg) for color in re.findall(r"#[0-9a-f]{6}", style)}
    if colors - set(DARK):
        found.append(f"colors without one for dark pages: {colors - set(DARK)}")
    if re.search(r'fill[=:] ?"?(white|#fff)', re.sub(r"<style>.*?</style>", "", svg, flags=re.DOTALL)):
        found.append("a white area")
    return found


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_image_is_legible_and_shown(path: Path) -> None:
    """Text has nine pixels on a phone, each color has one for dark pages, labels name units, and a page shows it."""
    svg = path.read_text()
    assert problems(svg) == []
    assert path.stat().st_size < MAX_BYTES
    texts = "\n".join(text for text in ElementTree.fromstring(svg).itertext() if text.strip())
    assert [label for label in LABELS[path.name] if label not in texts] == []
    assert any(f"images/{path.name})" in page.read_text() for page in PAGES)


def test_hero_shows_the_figures_of_the_file(tmp_path: Path) -> None:
    """The picture of the README has the figures of the file from which its table is written; ``--redraw`` draws it."""
    assert main(["--redraw", str(HEADLINE), "--plots", str(tmp_path)]) == 0
    drawn, shown = (
        [text for text in ElementTree.parse(folder / "hero.svg").getroot().itertext() if text.strip()]
        for folder in (tmp_path, ROOT / "docs" / "images")
    )
    assert drawn == shown


def write_figures(path: Path, **reports: dict[str, Any]) -> str:
    """Write a file as ``--json`` does, and return its path."""
    path.write_text(json.dumps({"machine": {}, "quick": False, **reports}))
    return str(path)


def test_redraw_draws_each_report_with_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is measured, the paths are printed, and a report of a benchmark without a plot is skipped."""
    policies = {"Full": {"written": 1.0, "capacity": 2.0, "restore": 1.0}}
    figures = write_figures(tmp_path / "a.json", policies={"plot": {"ours": "Full", "policies": policies}}, bytes={})
    assert main(["--redraw", figures, "--plots", str(tmp_path / "plots")]) == 0
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["policies.svg"]
    assert capsys.readouterr().out == f"{tmp_path / 'plots' / 'policies.svg'}\n"
    svg = (tmp_path / "plots" / "policies.svg").read_text()
    assert problems(svg) == []
    assert ">2.00<" in svg


def test_redraw_names_a_report_that_lacks_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of an earlier version has no values for plots."""
    figures = write_figures(tmp_path / "a.json", accuracy={"figures": []})
    assert main(["--redraw", figures, "--plots", str(tmp_path)]) == 1
    assert f"accuracy: the report in {figures} has no 'plot'; measure it again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--redraw", "/none.json"], "needs --plots"), (["--redraw", "/none.json", "--plots", "/tmp"], "no such file")],
)
def test_redraw_refuses_what_cannot_work(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a folder or a file there is nothing to draw."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_long_bars_are_cut_and_lines_keep_their_labels_apart(tmp_path: Path) -> None:
    """A longer bar has a gap and a piece beyond the given value; labels of equal values do not overlap."""
    heights: list[float] = []

    def draw(report: object, figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        draw_bars(left, [Bar("a", 1.0, "1", OURS), Bar("b", 99.0, "99", OURS)], end=2.0)
        pieces = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in left.patches]
        assert pieces == [(0.0, 1.0), (0.0, 2.0), (pytest.approx(2.16), pytest.approx(2.4))]
        assert left.get_xlim() == (0.0, 2.4)
        right.set_ylim(0, 10)
        label_lines(right, [(5.0, "x", OURS), (5.0, "y", OURS), (0.0, "z", OURS)], 0.1)
        heights.extend(text.xy[1] for text in right.texts)

    Plot("a.svg", 200, draw).write({}, tmp_path / "a.svg")
    assert heights == pytest.approx([0.0, 0.5, 0.6])

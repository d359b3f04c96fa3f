"""docs/concepts/quantization.md, and the script that makes its plot and tables. The figures are not tested."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.plots import quantization
from benchmarks.support.quantization_errors import SERIES, WIDTHS, Point, error_table, measure, restore_table

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "concepts" / "quantization.md"
NUM_ROWS = 60


@pytest.fixture(scope="module")
def points() -> list[Point]:
    """The figures, of few rows."""
    return measure(WIDTHS, NUM_ROWS, say=lambda line: None)


def first_cells(markdown: str, head: str, num_cells: int) -> list[list[str]]:
    """The first cells of each line of the table that begins with this line."""
    lines = markdown.splitlines()
    start = lines.index(head)
    stop = next((at for at in range(start, len(lines)) if not lines[at].startswith("|")), len(lines))
    return [line.strip("|").split("|")[:num_cells] for line in lines[start:stop]]


@pytest.mark.long
def test_every_scheme_is_measured(points: list[Point]) -> None:
    """Each scheme of the script has points at each width, and less error the more bits it has."""
    for num_cols in WIDTHS:
        for series in SERIES:
            errors = [point.error for point in points if (point.num_cols, point.series) == (num_cols, series.name)]
            assert len(errors) >= 2
            assert errors == sorted(errors, reverse=True)
            assert all(0 < error < 1 for error in errors)


def test_page_has_every_scheme(points: list[Point]) -> None:
    """The tables of the page have the headings, schemes and bits of those that the script prints."""
    page = PAGE.read_text()
    for printed, num_cells in ((error_table(points), 2), (restore_table(points), 1)):
        head = printed.splitlines()[0]
        assert first_cells(page, head, num_cells) == first_cells(printed, head, num_cells)


@pytest.mark.long
def test_plot_is_the_same_for_the_same_figures(points: list[Point], tmp_path: Path) -> None:
    """Drawn twice, the files have the same bytes, and hold neither a date nor a random id."""
    for name in ("a.svg", "b.svg"):
        quantization.PLOT.write({"plot": {"points": [asdict(point) for point in points]}}, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_script_writes_plot_tables_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line writes the plot and the figures, prints the tables, and tells on stderr what goes on."""
    plot, figures = tmp_path / "plot.svg", tmp_path / "figures.json"
    arguments = ["--rows", str(NUM_ROWS), "--output", str(plot), "--json", str(figures)]
    assert quantization.main(arguments) == 0
    said = capsys.readouterr()
    assert plot.read_text().startswith("<?xml")
    content = json.loads(figures.read_text())
    assert content["rows"] == NUM_ROWS
    measured = [Point(**point) for point in content["points"]]
    assert said.out.endswith(f"\n\n{error_table(measured)}\n\n{restore_table(measured)}\n")
    assert "quantization: 16 columns, KMeans" in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--rows", "0"], "--rows must be at least 1 (got 0)"), (["--output", "/none/a.svg"], "no folder /none")],
)
def test_script_refuses_what_cannot_work(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments are checked before anything is measured."""
    with pytest.raises(SystemExit, match="2"):
        quantization.main(arguments)
    assert message in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    """The help tells what the script writes by default."""
    with pytest.raises(SystemExit, match="0"):
        quantization.main(["--help"])
    assert "python -m benchmarks.plots.quantization --rows 500" in capsys.readouterr().out

"""The README's table of figures is that of the file which a benchmark wrote."""

import json

from tests.repository.pages.headline_table import FIGURES, MARKS, README, with_table


def test_the_table_has_the_figures_of_the_file() -> None:
    """``python -m tests.repository.pages.headline_table`` writes the table after a new measurement."""
    page, content = README.read_text(), json.loads(FIGURES.read_text())
    assert MARKS[0] in page
    assert page == with_table(page, content)


def test_the_figures_are_of_whole_sizes() -> None:
    """Figures of ``--quick`` have no meaning."""
    assert not json.loads(FIGURES.read_text())["quick"]


def test_another_figure_makes_another_table() -> None:
    """Each figure of the table is taken from the file."""
    page, content = README.read_text(), json.loads(FIGURES.read_text())
    for figure in content["headline"]["figures"]:
        if figure["what"] == "bytes, 4-bit":
            figure["value"] *= 2
    assert with_table(page, content) != page

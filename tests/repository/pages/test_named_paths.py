"""The files that pages name are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PATH = re.compile(r"(?<![\w./:-])(?:torchrec_cnr|tests|benchmarks|examples|docs|requirements)/[\w./-]*[\w/]")
LINK = re.compile(r"\]\([^)]*\)")  # relative to its page; the build of the site looks for what it leads to
NUM_CHANGES = 12  # rows of "To change X, read Y"


def missing_paths(text: str) -> list[str]:
    """The paths that a text names and that are not there."""
    return [path for path in PATH.findall(text) if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_files_exist(page: Path) -> None:
    """Every file of the library, its tests, benchmarks and examples that a page names is there."""
    text = page.read_text() if page.parent == ROOT else LINK.sub("]", page.read_text())
    lines = enumerate(text.splitlines(), 1)
    assert [f"line {number}: {path}" for number, line in lines for path in missing_paths(line)] == []


def test_missing_files_are_found() -> None:
    """What is not there is found; parts of other paths, and what ends a sentence, are no names."""
    text = "See `tests/nowhere.py`, `torchrec_cnr/errors.py` and tests/. Not https://host/tests/x, s3://bucket/tests/1."
    assert missing_paths(text) == ["tests/nowhere.py"]


def test_changes_name_files() -> None:
    """The table of what to read before a change has the likely changes, and names files for each."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## To change X, read Y")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= NUM_CHANGES
    assert [row for row in rows if not re.search(PATH, row)] == []

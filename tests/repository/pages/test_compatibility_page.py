"""The page of compatibility shows what was measured, for the versions that the package accepts."""

import json
import tomllib
from pathlib import Path

from tests.versions.environments import ROOT, VERSIONS
from tests.versions.page import PAGE, RESULTS, with_tables
from torchrec_cnr.dependencies import PAIRS


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def test_the_page_is_up_to_date() -> None:
    """docs/reference/compatibility.md is what ``python -m tests.versions`` wrote."""
    assert with_tables(PAGE.read_text()) == PAGE.read_text()


def test_each_version_is_tested() -> None:
    """The pairs that are accepted, those that are tested, those with results, and the bounds of the package agree."""
    tested = {_minor(versions.torch): _minor(versions.torchrec) for versions in VERSIONS}
    assert tested == PAIRS
    assert all(_minor(versions.torchrec) == _minor(versions.fbgemm) for versions in VERSIONS)
    assert sorted(json.loads(RESULTS.read_text())["versions"]) == [versions.torch for versions in VERSIONS]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, last = min(PAIRS), max(PAIRS)
    after = f"2.{int(last.split('.')[1]) + 1}"
    assert f"torch>={first},<{after}" in project["dependencies"]


def test_the_development_version_is_one_of_them() -> None:
    """That which the tests run with is in the table, as it is pinned."""
    pins = Path(ROOT / "requirements/cpu.txt").read_text().splitlines()
    assert any(set(versions.pins) <= set(pins) for versions in VERSIONS)

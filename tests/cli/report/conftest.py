"""A browser, and pages that are rendered once."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers.browser import Browser, open_browser
from tests.support.run_histories import run_of
from torchrec_cnr.cli.report.page import render


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all tests of this module."""
    with open_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="session")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Files of the pages of `run_of`, rendered once."""
    folder = tmp_path_factory.mktemp("pages")

    def page_of(num: int) -> Path:
        path = folder / f"{num}.html"
        if not path.exists():
            path.write_text(render(run_of(num)), encoding="utf-8")
        return path

    return page_of

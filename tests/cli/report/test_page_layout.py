"""Report pages as Chromium shows them: nothing scrolls sideways, overlaps or cannot be read."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.report.pages import SIZES, TOO_WIDE, any_width, check_texts, some_size
from tests.servers.browser import Browser
from torchrec_cnr.cli.report.svg import PALETTE

MAX_BYTES = 3_000_000
any_size = pytest.mark.parametrize("num", SIZES)


@any_size
@any_width
def test_page_never_scrolls_sideways(browser: Browser, page_of: Callable[[int], Path], num: int, width: int) -> None:
    """Nothing reaches over the window's right edge but what scrolls in a box of its own."""
    browser.open(page_of(num), width)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run("return document.body.scrollWidth") <= width
    assert browser.run(TOO_WIDE) == []
    heading = browser.run("return document.querySelector('header').innerText")
    assert heading.split()[:3] == ["Checkpoints", "of", "s3://bucket/runs/dlrm"]


@some_size
@any_width
def test_texts_of_plots_can_be_read(browser: Browser, page_of: Callable[[int], Path], num: int, width: int) -> None:
    """No two texts of a plot overlap, none leaves its plot, and on a wide screen they have 9 pixels or more."""
    browser.open(page_of(num), width)
    sizes = check_texts(browser)
    assert len(sizes) >= 6 * (4 if num == 1 else 5)  # of one checkpoint there is no plot of deltas
    assert width < 1_280 or min(sizes) >= 9


@any_size
def test_page_needs_nothing_else(browser: Browser, page_of: Callable[[int], Path], num: int) -> None:
    """Nothing is requested but the page itself, the console is silent, and there is no script."""
    page = page_of(num)
    browser.open(page, 1_280)
    requested = browser.requested()
    assert [url for url in requested if not url.startswith("data:")] == [page.as_uri()]
    assert browser.log("browser") == []
    assert browser.run("return document.scripts.length") == 0
    assert page.stat().st_size < MAX_BYTES


@some_size
def test_plots_can_be_told_without_seeing(browser: Browser, page_of: Callable[[int], Path], num: int) -> None:
    """Each plot is an image with a label that has its heading and its caption, and no id occurs twice."""
    browser.open(page_of(num), 1_280)
    script = """return [...document.querySelectorAll('figure')].map(figure => [
        figure.querySelector('h2').textContent, figure.querySelector('figcaption')?.textContent,
        figure.querySelector('svg')?.getAttribute('role'), figure.querySelector('svg')?.getAttribute('aria-label')])"""
    figures = [figure for figure in browser.run(script) if figure[2]]
    assert len(figures) >= 4
    for heading, caption, role, label in figures:
        assert (role, label) == ("img", f"{heading}. {caption}")
        assert len(caption) > 10
    ids = browser.run("return [...document.querySelectorAll('[id]')].map(element => element.id)")
    assert len(ids) > 20
    assert len(set(ids)) == len(ids)


def luminance(color: str) -> float:
    """Relative luminance of ``rgb(…)``, as WCAG defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(
    ("media", "scheme", "is_dark"),
    [("screen", "light", False), ("screen", "dark", True), ("print", "dark", False)],
)
def test_colours_have_contrast(
    browser: Browser, page_of: Callable[[int], Path], media: str, scheme: str, is_dark: bool
) -> None:
    """Texts stand out from the paper 4.5 times, marks 3 times: by day, by night, and on (white) paper."""
    browser.open(page_of(2), 1_280)
    browser.emulate(media, scheme)
    script = """const color = (selector, name) => getComputedStyle(document.querySelector(selector))[name]
        return {paper: color('html', 'backgroundColor'), texts: [
            color('h1', 'color'), color('figcaption', 'color'), color('th', 'color'), color('svg text', 'fill')],
            marks: [color('#written-baseline use', 'fill'), color('#written-delta use', 'fill'),
                    color('#capacity-level path', 'stroke')]}"""
    colors = browser.run(script)
    paper = luminance(colors["paper"])
    assert (paper < 0.1) == is_dark

    def contrast(color: str) -> float:
        low, high = sorted((paper, luminance(color)))
        return (high + 0.05) / (low + 0.05)

    assert all(contrast(color) >= 4.5 for color in colors["texts"]), colors
    assert all(contrast(color) >= 3 for color in colors["marks"]), colors
    assert len({*colors["texts"], *colors["marks"]}) >= 5


def test_palette_has_no_colour_twice() -> None:
    """A colour of a plot stands for one role of the page."""
    assert len({light for light, _ in PALETTE.values()}) == len(PALETTE)

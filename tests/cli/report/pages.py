"""Report pages of made-up runs, opened in a browser."""

import pytest

from tests.servers.browser import Browser

SIZES = (0, 1, 2, 2_000)
WIDTHS = (400, 1_280)
some_size = pytest.mark.parametrize("num", SIZES[1:])
any_width = pytest.mark.parametrize("width", WIDTHS)


TOO_WIDE = """
return [...document.querySelectorAll('body *')].filter(element =>
    !element.parentElement.closest('.scroll') && element.getBoundingClientRect().right > window.innerWidth + .5
).map(element => element.outerHTML.slice(0, 200))
"""
TEXTS = """
return [...document.querySelectorAll('svg')].map(svg => {
    const box = element => { const {left, right, top, bottom} = element.getBoundingClientRect();
                             return {left, right, top, bottom} }
    const texts = [...svg.querySelectorAll('text')].filter(text => text.textContent.trim())
    return {box: box(svg), texts: texts.map(text => ({
        text: text.textContent, box: box(text),
        size: parseFloat(getComputedStyle(text).fontSize) * Math.sqrt(Math.abs(
            text.getScreenCTM().a * text.getScreenCTM().d - text.getScreenCTM().b * text.getScreenCTM().c)),
    }))}
})
"""


def do_overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    """Whether two boxes share more than an edge."""
    across = min(one["right"], other["right"]) - max(one["left"], other["left"])
    return across > 0 and min(one["bottom"], other["bottom"]) - max(one["top"], other["top"]) > 0


def check_texts(browser: Browser) -> list[float]:
    """Fail if two texts of a plot overlap, or one leaves its plot. Returns the sizes of texts in CSS pixels."""
    plots = browser.run(TEXTS)
    for plot in plots:
        texts, outer = plot["texts"], plot["box"]
        for place, text in enumerate(texts):
            inner = text["box"]
            assert outer["left"] <= inner["left"] < inner["right"] <= outer["right"], text
            assert outer["top"] <= inner["top"] < inner["bottom"] <= outer["bottom"], text
            assert [other["text"] for other in texts[:place] if do_overlap(inner, other["box"])] == [], text
    return [text["size"] for plot in plots for text in plot["texts"]]

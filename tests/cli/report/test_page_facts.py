"""Report pages say what the events of a run say."""

import io
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rc_context
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from tests.cli.report.pages import TOO_WIDE, any_width, check_texts, some_size
from tests.servers.browser import Browser
from tests.support.run_histories import MODEL, PARTIAL, random_run, run_of, saves_of
from torchrec_cnr.cli.report.page import render
from torchrec_cnr.cli.report.svg import PALETTE
from torchrec_cnr.human_text import bytes_text
from torchrec_cnr.maintenance.run_history import Event, RunHistory

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}


def show(browser: Browser, folder: Path, history: RunHistory, width: int) -> None:
    """Render a page and open it."""
    path = folder / "page.html"
    path.write_text(render(history), encoding="utf-8")
    browser.open(path, width)


def amount(text: str) -> float:
    """The first number in a text, with what unit there is: ``1.32 TB`` as bytes."""
    found = re.search(r"([\d,]+(?:\.\d+)?)\s?(\w*)", text)
    assert found, text
    return float(found[1].replace(",", "")) * UNITS.get(found[2], 1)


def close(value: float) -> Any:
    """Equal to three digits."""
    return pytest.approx(value, rel=0.0051)


# -------- what it says

TOTALS = (
    "return [...document.querySelectorAll('.totals > div')].map(div => [...div.children].map(one => one.textContent))"
)
POINTS = """
const [plot, kind] = arguments
const middle = element => { const box = element.getBBox(); return [box.x + box.width / 2, box.y + box.height / 2] }
const number = tick => parseFloat(tick.querySelector('text').textContent.replace(/,/g, ''))
const texts = (axis, part, at) => [...document.querySelectorAll(`[id^="${plot}-${axis}tick_"]`)].map(
    tick => [middle(tick.querySelector(part))[at], number(tick)])
return {x: texts('x', 'use', 0), y: texts('y', 'path', 1),
        points: [...document.querySelectorAll(`#${plot}-${kind} use`)].map(middle),
        top: document.querySelector(`#${plot}-${kind}`)?.getBBox().y}
"""


def on_axis(ticks: list[tuple[float, float]], place: float) -> float:
    """The value that a place in a plot stands for, by the labels of the axis."""
    (low, low_value), (high, high_value) = ticks[0], ticks[-1]
    return low_value + (place - low) / (high - low) * (high_value - low_value)


def points_of(browser: Browser, plot: str, kind: str) -> list[tuple[float, float]]:
    """The marks of a kind in a plot, as a reader would take them from its axes; x is 1 where there is one tick."""
    found = browser.run(POINTS, plot, kind)
    xs = found["x"]
    return [(on_axis(xs, x) if len(xs) > 1 else 1.0, on_axis(found["y"], y)) for x, y in found["points"]]


def top_of(browser: Browser, plot: str, kind: str) -> float:
    """The highest value of an area or a line in a plot."""
    found = browser.run(POINTS, plot, kind)
    return on_axis(found["y"], found["top"])


@some_size
def test_totals_are_those_of_the_events(browser: Browser, page_of: Callable[[int], Path], num: int) -> None:
    """The numbers at the top, added up here from the events."""
    history = run_of(num)
    browser.open(page_of(num), 1_280)
    saved, written, capacity, restore = browser.run(TOTALS)
    deltas = sum(event.kind == "delta" for event in history.events)
    kinds = f"{num - deltas:,} baseline{'s' * (num - deltas > 1)}" + f" and {deltas:,} delta{'s' * (deltas > 1)}" * (
        deltas > 0
    )
    assert saved[1:] == [f"{num:,}", f"{kinds}; {len(history.kept)} {'are' if num > 1 else 'is'} kept"]

    all_written = sum(event.written_bytes for event in history.events)
    assert amount(written[1]) == close(all_written)
    full = num * MODEL
    relation, _, rest = written[2].partition(" full checkpoint")
    assert rest.removeprefix("s").startswith(" at the same bit width (")
    if num == 1:
        assert relation == "as large as a"
    elif full > all_written:
        assert relation.endswith(f"x smaller than {num:,}")
        assert amount(relation.replace("x", " ")) == close(full / all_written)
    else:
        assert relation.endswith(f"x larger than {num:,}")
        assert amount(relation.replace("x", " ")) == close(all_written / full)
    assert amount(rest.partition("(")[2]) == close(full)

    level = most = 0
    for event in history.events:
        most = max(most, level + event.written_bytes)
        level += event.written_bytes - event.freed_bytes
    assert amount(capacity[1]) == close(level)
    assert amount(capacity[2].replace("x", " ")) == close(level / MODEL)
    assert amount(capacity[2].partition("at most")[2].replace("x", " ")) == close(most / MODEL)

    newest = max(history.kept, key=lambda kept: kept.created_ns)
    assert amount(restore[1]) == close(newest.restore_bytes)
    assert amount(restore[2].replace("x", " ")) == close(newest.restore_bytes / MODEL)


@some_size
def test_span_is_that_of_the_events(browser: Browser, page_of: Callable[[int], Path], num: int) -> None:
    """From the first event to the last."""
    browser.open(page_of(num), 1_280)
    span = browser.run("return document.querySelector('.span').textContent")
    times = [event.at_ns // 10**9 for event in run_of(num).events]
    script = "return arguments[0].map(secs => new Date(secs * 1000).toISOString().slice(0, 19).replace('T', ' '))"
    first, last = browser.run(script, [times[0], times[-1]])
    days, hours = (times[-1] - times[0]) // 86_400, (times[-1] - times[0]) // 3_600 % 24
    expected = {
        1: f"At {first} UTC",
        2: f"From {first} UTC to {last} UTC: {(times[-1] - times[0]) // 60} minutes",
        2_000: f"From {first} UTC to {last} UTC: {days} days {hours} hours",
    }
    assert re.sub(r"(minutes) \d+ seconds?$", r"\1", span) == expected[num]


@some_size
def test_marks_stand_where_the_data_says(browser: Browser, page_of: Callable[[int], Path], num: int) -> None:
    """Read from the axes: each mark where there are few, and of many the extremes, at their own checkpoints."""
    browser.open(page_of(num), 1_280)
    unit, share = 10**9, 100
    plots: dict[str, Callable[[Event], float | None]] = {
        "written": lambda event: event.written_bytes / unit,
        "modified": lambda event: None if event.modified_share is None else share * event.modified_share,
        "restores": lambda event: None if event.restore_bytes is None else event.restore_bytes / MODEL,
    }
    num_seen = 0
    for plot, height in plots.items():
        for kind in ("baseline", "delta", "compaction"):
            expected, number = [], 0
            for event in run_of(num).events:
                number += event.kind in ("baseline", "delta")
                value = height(event)
                if event.kind == kind and value is not None:
                    expected.append((number + 0.5 * (kind == "compaction"), value))
            points = points_of(browser, plot, kind)
            assert bool(points) == bool(expected), (plot, kind)
            if not expected:
                continue
            num_seen += 1
            if num <= 2:
                assert points == [pytest.approx(point, rel=0.01) for point in expected]
            else:
                for which in (min, max):
                    place, value = which(points, key=lambda point: point[1])
                    truth = which(value for _, value in expected)
                    assert value == pytest.approx(truth, rel=0.01), (plot, kind)
                    at = [at for at, value in expected if value == truth]
                    assert min(abs(at - place) for at in at) < 0.6, (plot, kind)
                assert points[0][0] == pytest.approx(expected[0][0], abs=0.6)
                assert points[-1][0] == pytest.approx(expected[-1][0], abs=0.6)
    assert num_seen == {1: 2, 2: 5, 2_000: 7}[num]


@pytest.mark.parametrize("plot", ["written", "cumulative", "restores"])
def test_no_kind_hides_another(browser: Browser, page_of: Callable[[int], Path], plot: str) -> None:
    """However many there are, each kind is seen: pixels beneath the legend have its colour."""
    browser.open(page_of(2_000), 1_280)
    pixels = imread(io.BytesIO(browser.picture(f"#{plot} svg")))[40:, :, :3]
    for kind in ("baseline", "delta", "compaction"):
        apart = abs(pixels - to_rgb(PALETTE[kind][0])).max(axis=2)
        assert (apart < 0.1).sum() > 200, kind


@some_size
def test_areas_reach_what_the_data_says(browser: Browser, page_of: Callable[[int], Path], num: int) -> None:
    """Read from the axes: bytes written so far, the same if each were full, and the greatest capacity."""
    history = run_of(num)
    browser.open(page_of(num), 1_280)
    label = browser.run("return [...document.querySelectorAll('#cumulative text')].map(text => text.textContent)")
    unit = UNITS[next(text for text in label if text.endswith(" so far")).split()[0]]
    assert unit * top_of(browser, "cumulative", "full") == pytest.approx(num * MODEL, rel=0.01)
    top_kind = {1: "baseline", 2: "delta", 2_000: "compaction"}[num]
    written = sum(event.written_bytes for event in history.events)
    assert unit * top_of(browser, "cumulative", top_kind) == pytest.approx(written, rel=0.01)
    saved = sum(event.written_bytes for event in history.events if event.kind != "compaction")
    if num > 1:
        assert unit * top_of(browser, "cumulative", "delta") == pytest.approx(saved, rel=0.03)
    level, most = 0, 0
    for event in history.events:
        most = max(most, level + event.written_bytes)
        level += event.written_bytes - event.freed_bytes
    assert top_of(browser, "capacity", "level") == pytest.approx(most / MODEL, rel=0.01)


def test_captions_and_table_of_kinds_agree_with_the_events(browser: Browser, page_of: Callable[[int], Path]) -> None:
    """How many of each kind, and what they wrote and removed; how many restores keep to the goal."""
    history = run_of(2_000)
    browser.open(page_of(2_000), 1_280)
    script = "return [...document.querySelectorAll('#kinds tbody tr')].map(row => row.innerText)"
    for line, kind in zip(browser.run(script), ("baseline", "delta", "compaction", "prune"), strict=True):
        events = [event for event in history.events if event.kind == kind]
        assert line.lower().startswith(kind)
        num, written, freed = re.split(r"\t", line)[-3:]
        assert num == f"{len(events):,}"
        assert amount(written) == close(sum(event.written_bytes for event in events))
        assert amount(freed) == close(sum(event.freed_bytes for event in events))
    captions = browser.run("return [...document.querySelectorAll('figcaption')].map(one => one.textContent)")
    loads = [event.restore_bytes for event in history.events if event.restore_bytes is not None]
    within = sum(load <= 1.2 * MODEL for load in loads)
    assert 0 < within < len(loads)
    assert f"at most 1.90x. {within:,} of {len(loads):,} are within 1.2x." in captions[3]
    assert "at most 90.0 % of all rows" in captions[4]


KEPT = "return [...document.querySelectorAll('#kept tbody tr')].map(row => [...row.children].map(one => one.innerText))"


@pytest.mark.parametrize(("num", "num_lines"), [(1, 1), (2, 2), (50, 50), (51, 50), (2_000, 50)])
def test_table_has_the_newest(browser: Browser, tmp_path: Path, num: int, num_lines: int) -> None:
    """At most 50 lines, the newest first, and one line that sums up the others."""
    history = saves_of(num)
    show(browser, tmp_path, history, 1_280)
    lines = browser.run(KEPT)
    by_age = sorted(history.kept, key=lambda kept: -kept.created_ns)
    assert [line[0] for line in lines] == [kept.name for kept in by_age[:num_lines]]
    for line, kept in zip(lines, by_age, strict=False):
        assert (line[1], line[5]) == (kept.kind, kept.parent or "–")
        assert amount(line[3]) == close(kept.num_bytes)
        assert amount(line[4]) == close(kept.restore_bytes)
        assert amount(line[4].partition("(")[2].replace("x", " ")) == close(kept.restore_bytes / MODEL)
    older = by_age[num_lines:]
    said = browser.run("return document.querySelector('#kept > .quiet')?.textContent")
    assert (said is None) == (not older)
    if older:
        assert said.startswith(f"And {len(older):,} older: ")
        for kind in ("baseline", "delta"):
            num_older = sum(kept.kind == kind for kept in older)
            assert (f"{num_older:,} {kind}" in said) == (num_older > 0)
        assert amount(said.rpartition(", ")[2]) == close(sum(kept.num_bytes for kept in older))


def test_savings_and_compactions_are_shown(browser: Browser, tmp_path: Path) -> None:
    """The bytes written are compared with full checkpoints without quantization; a compacted delta stays a delta."""
    history = run_of(2)
    written = sum(event.written_bytes for event in history.events)
    newest = replace(max(history.kept, key=lambda kept: kept.created_ns), is_compacted=True, parent=None)
    assert newest.kind == "delta"
    show(browser, tmp_path, replace(history, exact_bytes=10 * written, kept=(newest,)), 1_280)
    note = browser.run(TOTALS)[1][2]
    size = bytes_text(20 * written)
    assert note.startswith(f"20.0x smaller than 2 full checkpoints without quantization ({size})")
    assert [line[1] for line in browser.run(KEPT)] == ["delta, compacted"]


@any_width
def test_empty_root_is_told_kindly(browser: Browser, page_of: Callable[[int], Path], width: int) -> None:
    """Without a checkpoint there is no table and no plot, but a word on what to expect."""
    browser.open(page_of(0), width)
    text = browser.run("return document.body.innerText")
    assert "No checkpoints yet" in text
    assert "this page shows what it wrote" in text
    assert browser.run("return document.querySelectorAll('svg, table, dl').length") == 0


@pytest.mark.parametrize("history", PARTIAL.values(), ids=PARTIAL)
def test_odd_histories_can_be_read(browser: Browser, tmp_path: Path, history: RunHistory) -> None:
    """Whatever part of a history is missing or extreme, the page stands, and texts of plots stay apart."""
    show(browser, tmp_path, history, 400)
    assert browser.run("return document.documentElement.scrollWidth") <= 400
    assert browser.run("return document.querySelectorAll('.totals dt').length") == 4
    check_texts(browser)
    assert browser.log("browser") == []


@pytest.mark.parametrize("seed", range(12))
def test_any_run_can_be_read(browser: Browser, tmp_path: Path, seed: int) -> None:
    """At widths in between too, nothing is too wide, and texts of plots stay apart and in their plots."""
    width = (320, 400, 560, 700, 893, 1_000, 1_280)[seed % 7]
    show(browser, tmp_path, random_run(seed), width)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run(TOO_WIDE) == []
    assert browser.run("return document.querySelectorAll('figure').length") == 5
    check_texts(browser)


def test_gaps_in_a_history_are_told(browser: Browser, tmp_path: Path) -> None:
    """What lay there before the first event, and what is gone without an event, is said and not hidden."""
    script = "return [...document.querySelectorAll('.note')].map(note => note.textContent)"
    show(browser, tmp_path, run_of(2), 1_280)
    assert browser.run(script) == []
    show(browser, tmp_path, replace(run_of(2), kept=()), 1_280)
    assert [line.partition(" have disappeared")[1] for line in browser.run(script)] == [" have disappeared"]
    show(browser, tmp_path, replace(run_of(2), events=run_of(2).events[1:]), 1_280)
    assert browser.run(script) == ["178 GB were stored here before the first known event."]


HOSTILE = (
    "<script>document.title = 'mine'</script>",
    "\"><img src='http://127.0.0.1:9/x' onerror='document.title = 1'>",
    "</style></title></svg>&amp;&lt;",
    "{{ 7 * 7 }}{% include 'x' %}",
    "https://example.com/" + "a" * 400,
    "safe\u202egnp.exe",
    "line\nbreak\ttab\0nul\x1b[31m",
    "lone \udc80 surrogate",
)


@any_width
@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_only_text(browser: Browser, tmp_path: Path, name: str, width: int) -> None:
    """A name is shown as it is, with escapes for what does not print; it runs, loads, hides and widens nothing."""
    history = saves_of(2)
    base, delta = sorted(history.kept, key=lambda kept: kept.created_ns)
    kept = (replace(base, name=name), replace(delta, parent=name))
    events = tuple(replace(event, name=name) for event in history.events)
    show(browser, tmp_path, RunHistory(name, events, kept), width)
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in name)
    script = "return [...document.querySelectorAll('bdi')].map(one => one.textContent)"
    assert browser.run(script) == [shown, "step-2", shown, shown]
    assert browser.run("return document.title") == f"Checkpoints of {shown}"
    assert browser.run("return document.querySelectorAll('script, img').length") == 0
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run(TOO_WIDE) == []
    assert len([url for url in browser.requested() if not url.startswith("data:")]) == 1
    assert browser.log("browser") == []


# -------- without a browser


@pytest.mark.long
def test_page_is_the_same_for_the_same_history() -> None:
    """No date, no random id; another history gives another page."""
    assert render(run_of(2)) == render(run_of(2))
    assert render(run_of(2)) != render(run_of(3))


def test_settings_of_the_machine_do_not_matter() -> None:
    """A matplotlibrc with other fonts and no grid changes nothing."""
    before = render(run_of(2))
    with rc_context({"font.size": 30, "axes.grid": False, "svg.fonttype": "path", "xtick.labelsize": 40}):
        assert render(run_of(2)) == before


def test_library_needs_none_of_it() -> None:
    """The package imports where matplotlib and Jinja2 are not installed."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('matplotlib', 'jinja2', 'markupsafe')))\n"
        "import torchrec_cnr; import torchrec_cnr.maintenance.run_history; print(torchrec_cnr.__version__)\n"
        "try:\n    import torchrec_cnr.cli.report.page\nexcept ModuleNotFoundError as error:\n    print(error.name)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=240, check=True, text=True)
    assert ran.stdout.split()[1:] in (["jinja2"], ["matplotlib"])

"""The documentation is built as a site: whole, from this checkout alone, and without a link that leads nowhere."""

import html
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import torchrec_cnr
import torchrec_cnr.testing

ROOT = Path(__file__).parents[3]
PACKAGES = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers")
PAGES = sorted(page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md"))
LIMIT_SECS = 120
FETCHED = re.compile(r'<(?:script|img|iframe)[^>]*\ssrc="(?:https?:)?//|<link[^>]*rel="(?:style|pre)[^>]*//')
LEFT_OVER = re.compile(r"<p>(?:[^<]|<(?!/p>))*?\n(?:[-*] |\||```)")  # Markdown that only GitHub understands

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in PACKAGES),
    reason="mkdocs-material or mkdocstrings is not installed; they are in requirements/cpu.txt",
)


def build(project: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    """Build the site of a project, as ``make docs`` does."""
    # Without --quiet: of what is not said, nothing is an error.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=LIMIT_SECS, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of this checkout."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=Path.as_posix)
def test_page_is_in_the_site(site: Path, page: Path) -> None:
    """Each page of docs/ is a page of the site, with its own title, and nothing is left of its Markdown."""
    text = (site / page.with_suffix(".html")).read_text()
    title = (ROOT / "docs" / page).read_text().splitlines()[0].removeprefix("# ")
    assert f">{html.escape(title, quote=False)}<" in text
    assert LEFT_OVER.search(text) is None


def test_nothing_is_fetched_by_who_reads(site: Path) -> None:
    """No page takes scripts, styles, fonts or pictures from elsewhere."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    assert [page.name for page in pages if FETCHED.search(page.read_text())] == []


def test_site_works_from_a_disk(site: Path) -> None:
    """The search needs its index as a script there, and a worker that is none; each page links its neighbours."""
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")
    page = (site / "reference" / "cli.html").read_text()
    assert '<script src="../javascripts/iframe-worker.js">' in page
    assert re.findall(r'<link rel="(prev|next)" href="([^"]+)">', page) == [
        ("prev", "api/types.html"),
        ("next", "format.html"),
    ]
    assert page.count('class="md-footer__link ') == 2


def test_numbers_stay_with_their_units(site: Path) -> None:
    """A line is not broken between the two, but code is as it is."""
    page = (site / "guides" / "sizing.html").read_text()
    assert "rows × (4 D + 4)" in page
    assert re.search(r"<td>\d[\d.]*\N{NO-BREAK SPACE}×</td>", page)
    assert not re.search(r"<code[^>]*>[^<]*\N{NO-BREAK SPACE}", page)


@pytest.mark.parametrize("module", [torchrec_cnr, torchrec_cnr.testing], ids=lambda module: module.__name__)
def test_public_names_are_in_the_reference(site: Path, module: object) -> None:
    """The pages of the reference have each public name, by its docstring."""
    text = "".join(page.read_text() for page in (site / "reference" / "api").glob("*.html"))
    names = [name for name in module.__all__ if not name.startswith("__")]
    assert [name for name in names if f'id="{module.__name__}.{name}"' not in text] == []
    assert ":func:" not in text


@pytest.mark.parametrize("name", ["save.svg", "load.svg"])
def test_drawings_say_in_words_what_they_show(site: Path, name: str) -> None:
    """Screen readers read the title and the description."""
    text = (site / "images" / name).read_text()
    assert "<title>" in text
    assert "<desc>" in text


def test_figures_of_policies_are_the_measured_ones() -> None:
    """The page on choosing repeats figures of policies; they are those of the page of figures."""
    pages = "guides/policy-and-bits.md", "benchmarks/figures.md"
    choosing, measured = ((ROOT / "docs" / page).read_text() for page in pages)
    chosen = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+)", choosing, re.M)
    assert len(chosen) == 5
    for policy, *figures in chosen:
        written, capacity, restore = figures
        assert re.search(rf"^{policy} +{written} +[\d.]+ +{capacity} +{restore} ", measured, re.M), policy


def _append(page: Path, text: str) -> None:
    page.write_text(page.read_text() + text)


def _spoil_pages(docs: Path) -> tuple[str, ...]:
    """Links and pages that lead nowhere; what the build says of them."""
    (docs / "reference" / "glossary.md").unlink()
    (docs / "forgotten.md").write_text("# Forgotten\n")
    _append(docs / "index.md", "\n[gone](nowhere.md)\n[gone](reference/cli.md#nowhere)\n[outside](../README.md)\n")
    return "glossary.md", "forgotten.md", "nowhere.md", "#nowhere", "../README.md"


def _spoil_names(docs: Path) -> tuple[str, ...]:
    """A name in the reference that is not there, which ends the build."""
    _append(docs / "reference" / "api.md", "\n::: torchrec_cnr.nothing\n")
    return ("torchrec_cnr.nothing",)


@pytest.mark.long
@pytest.mark.parametrize("spoil", [pytest.param(_spoil_pages, marks=pytest.mark.slow), _spoil_names])
def test_what_leads_nowhere_fails_the_build(tmp_path: Path, spoil: Callable[[Path], tuple[str, ...]]) -> None:
    """A link, a section, a page or a name that is not there is an error that names it."""
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "torchrec_cnr").symlink_to(ROOT / "torchrec_cnr")
    names = spoil(tmp_path / "docs")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    told = re.split(r"^(?=[A-Z]+ +-)", done.stdout + done.stderr, flags=re.M)  # a message may go on in further lines
    warned = [message for message in told if message.startswith(("WARNING", "ERROR"))]
    for name in names:
        assert any(name in message for message in warned), (name, warned)

"""The docstrings of packages name their modules, and the maps in the documentation are those docstrings."""

from pathlib import Path

import pytest

from tests.repository.package_map import FOLDER, MARKS, PAGES, Package, parse_entries, read_packages, with_map
from tests.repository.package_order import RANK_OF

every_package = pytest.mark.parametrize("package", read_packages(), ids=lambda package: package.name)


def test_entries_are_parsed() -> None:
    """An entry goes on in indented lines; prose, words of the inside and names within a text are no entries."""
    docstring = "About ``a``.\n\n- ``b``: see ``c``\n  and more.\n- ``d/``: a package.\n\nWords:\n\n- *e*: a word.\n"
    assert parse_entries(docstring) == {"b": "see ``c`` and more.", "d/": "a package."}


@every_package
def test_docstring_names_every_module(package: Package) -> None:
    """A package's docstring has an entry for each of its modules and packages, and for nothing else."""
    wrong = [
        *(f"lacks an entry '- ``{name}``: what it is for.'" for name in sorted(package.modules - set(package.entries))),
        *(f"names ``{name}``, which is not there" for name in sorted(set(package.entries) - package.modules)),
    ]
    assert not wrong, f"the docstring of {package.name}/__init__.py {'; '.join(wrong)}"


@every_package
def test_docstring_says_what_for(package: Package) -> None:
    """The first line of a package's docstring, and each of its entries, is a sentence."""
    texts = {package.name: package.summary, **package.entries}
    assert [name for name, text in texts.items() if not text.endswith(".")] == []


def test_top_is_in_the_order_of_imports() -> None:
    """The top docstring names packages from the highest layer to the lowest."""
    units = [name.removesuffix("/") for name in Package.read(FOLDER).entries]
    assert units == sorted(units, key=lambda unit: -RANK_OF[unit])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_carries_the_map(page: Path) -> None:
    """The map in a page is the one that the docstrings give."""
    text = page.read_text()
    assert with_map(text, PAGES[page]()) == text, "run: python -m tests.repository.package_map"


def test_stale_map_is_replaced() -> None:
    """A map takes the place of what is between the marks; what is around them stays."""
    page = f"# A page\n\n{MARKS[0]}\nold\n{MARKS[1]}\n\nmore\n"
    assert with_map(page, "new") == f"# A page\n\n{MARKS[0]}\n\nnew\n\n{MARKS[1]}\n\nmore\n"
    with pytest.raises(ValueError, match="lacks the marks"):
        with_map("# A page\n", "new")


def test_modules_are_those_of_the_folder(tmp_path: Path) -> None:
    """What a docstring has to name is what lies in its folder."""
    for file in ("__init__.py", "a.py", "data.json", "inner/__init__.py", "templates/page.html"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "__init__.py").write_text('"""A package.\n\n- ``gone``: a module.\n"""\n')
    package = Package.read(tmp_path)
    assert package.modules == {"a", "inner/"}
    assert package.entries == {"gone": "a module."}

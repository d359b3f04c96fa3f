"""The pages of docs/reference/api say of each public name what a reader needs besides its docstring.

Each type in a signature is on a page, each class, function and method that is shown has a line about ranks and threads,
and each default that the code names by a constant is given as a value in the docstring.
"""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.repository.pages import api_names
from tests.repository.pages.test_docstring_examples import PUBLIC

FOLDER = Path(__file__).parents[3] / "docs" / "reference" / "api"
SHOWN = re.compile(r"^::: ([\w.]+)\n((?: +.*\n)*)", re.M)
OVERVIEW = FOLDER.with_suffix(".md")
TYPES_PAGE = FOLDER / "types.md"
# Its names raise nothing, and are called by no one.
PAGES_OF_NAMES = [page for page in sorted(FOLDER.glob("*.md")) if page.name not in ("types.md", "errors.md")]


@dataclass(frozen=True)
class Shown:
    """A class or function on a page.

    Attributes:
        name: Its dotted name.
        value: The class or function.
        members: The members that the page chooses; None for all.
        hidden: What the page leaves out: of ``signature`` and ``docstring_attributes``.
    """

    name: str
    value: Any
    members: tuple[str, ...] | None
    hidden: frozenset[str]

    @cached_property
    def node(self) -> ast.ClassDef | ast.FunctionDef:
        """Its source; of an overloaded function, that of its last definition."""
        body = _source(self.value).body
        return [node for node in body if getattr(node, "name", None) == self.value.__name__][-1]  # type: ignore[return-value]

    @property
    def methods(self) -> list[ast.FunctionDef]:
        """The public methods and properties that the page shows."""
        if not isinstance(self.node, ast.ClassDef):
            return []
        found = [node for node in self.node.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
        return [node for node in found if self.members is None or node.name in self.members]

    def annotations(self) -> Iterator[ast.expr]:
        """Yield the annotations of its arguments, fields and results."""
        functions = [self.node] if isinstance(self.node, ast.FunctionDef) else self.methods
        if isinstance(self.node, ast.ClassDef) and "signature" not in self.hidden:
            functions += [node for node in self.node.body if getattr(node, "name", None) == "__init__"]  # type: ignore[misc]
        if isinstance(self.node, ast.ClassDef) and "docstring_attributes" not in self.hidden:
            fields = (node for node in self.node.body if isinstance(node, ast.AnnAssign))
            yield from (node.annotation for node in fields if not ast.unparse(node.target).startswith("_"))
        for function in functions:
            arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
            yield from (argument.annotation for argument in arguments if argument.annotation is not None)
            yield from filter(None, [function.returns])

    def own_types(self) -> set[str]:
        """Return the names in annotations that this project defines."""
        ours = set(_names_of_ours(_source(self.value)))
        return {name for annotation in self.annotations() for name in _names_in(annotation) if name in ours}

    def named_defaults(self) -> Iterator[str]:
        """Yield the arguments and fields whose default is a constant with a name, or is computed."""
        if isinstance(self.node, ast.ClassDef):
            fields = (node for node in self.node.body if isinstance(node, ast.AnnAssign) and node.value is not None)
            pairs = [(ast.unparse(node.target), node.value) for node in fields]
            functions = [node for node in self.node.body if getattr(node, "name", None) == "__init__"]
        else:
            pairs, functions = [], [self.node]
        for function in functions:
            arguments = function.args  # type: ignore[attr-defined]
            last = arguments.args[len(arguments.args) - len(arguments.defaults) :]
            pairs += zip((argument.arg for argument in last), arguments.defaults, strict=True)
            pairs += zip((argument.arg for argument in arguments.kwonlyargs), arguments.kw_defaults, strict=True)
        yield from (name for name, default in pairs if isinstance(default, ast.Name | ast.BinOp | ast.Attribute))


def _source(value: Any) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[value.__module__]))


def _names_of_ours(module: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines, except type variables, or imports from another module of ours."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchrec_cnr"):
            yield from (alias.asname or alias.name for alias in node.names)
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and "TypeVar(" not in ast.unparse(node.value):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _names_in(annotation: ast.expr) -> Iterator[str]:
    """Yield the names in an annotation, also in quoted parts of it."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "|" in node.value:
            yield from _names_in(ast.parse(node.value, mode="eval").body)


def shown_on(page: Path) -> list[Shown]:
    """Return the classes and functions of a page."""
    found = []
    for match in SHOWN.finditer(page.read_text() + "\n"):
        chosen = re.search(r"^ +members: (.*)$", match[2], re.M)
        members = None if chosen is None else tuple(re.findall(r"\w+", chosen[1].replace("false", "")))
        module, _, name = match[1].rpartition(".")
        value = getattr(importlib.import_module(module), name)
        if inspect.isclass(value) or inspect.isfunction(value):
            hidden = frozenset(re.findall(r"^ +show_(\w+): false$", match[2], re.M))
            found.append(Shown(match[1], value, members, hidden))
    return found


PAGES = {page: shown_on(page) for page in sorted(FOLDER.glob("*.md"))}
SHOWN_PUBLIC = [shown for page in PAGES_OF_NAMES for shown in PAGES[page]]


def test_public_names_are_on_a_page() -> None:
    """Each, also those of the smaller modules."""
    values = {id(shown.value) for shown in SHOWN_PUBLIC}
    assert [name for name, value in PUBLIC.items() if id(value) not in values] == []


def _aliases() -> set[str]:
    """Return the names in the table of aliases, which is above those that are made of docstrings."""
    return set(re.findall(r"^\| `(\w+)` \|", TYPES_PAGE.read_text().partition(api_names.BEGIN)[0], re.M))


@pytest.mark.parametrize("shown", [*SHOWN_PUBLIC, *PAGES[TYPES_PAGE]], ids=lambda shown: shown.name)
def test_types_in_signatures_are_on_a_page(shown: Shown) -> None:
    """Each type of ours that a shown signature or field names: as a class, or in the table of aliases."""
    named = {other.name.rpartition(".")[2] for page in PAGES.values() for other in page}
    aliases = _aliases()
    assert sorted(shown.own_types() - named - aliases) == []


@pytest.mark.parametrize("page", PAGES_OF_NAMES, ids=lambda page: page.name)
def test_the_overview_has_the_names_of_each_page(page: Path) -> None:
    """In the order of the page."""
    row = re.search(rf"^\| \[[\w ]+\]\(api/{page.name}\) \| (.*) \|$", OVERVIEW.read_text(), re.M)
    assert row is not None
    assert re.findall(r"`(\w+)`", row[1]) == [shown.name.rpartition(".")[2] for shown in PAGES[page]]


def test_types_on_their_page_are_named() -> None:
    """The page of types has no type that no signature names."""
    named = set[str]().union(*(shown.own_types() for page in PAGES.values() for shown in page))
    classes = [shown.name.rpartition(".")[2] for shown in PAGES[TYPES_PAGE]]
    assert sorted({*_aliases(), *classes} - named) == []


@pytest.mark.parametrize("page", PAGES_OF_NAMES, ids=lambda page: page.name)
def test_pages_say_who_calls(page: Path) -> None:
    """The table of a page has each name and each method that it shows: who must call it, and whether threads may."""
    table = "\n".join(line for line in page.read_text().splitlines() if line.startswith("|"))
    assert "every rank must call it" in table
    assert "thread-safe" in table
    words = {word for code in re.findall(r"`([\w.]+)", table) for word in code.split(".")}
    for shown in PAGES[page]:
        name = shown.value.__name__
        assert name in words
        if not re.search(rf"\b{name}`?(?:, `\w+`)* and (?:its|their) (?:methods|attributes)", table):
            assert {f"{name}.{node.name}" for node in shown.methods if node.name not in words} == set()


@pytest.mark.parametrize("shown", SHOWN_PUBLIC, ids=lambda shown: shown.name)
def test_defaults_are_given_as_values(shown: Shown) -> None:
    """The site shows the name of a constant in the signature, so the docstring has the value."""
    docstring = inspect.getdoc(shown.value) or ""
    for name in shown.named_defaults():
        entry = re.search(rf"^    {name}: (.*(?:\n {{8}}.*)*)", docstring, re.M)
        assert entry is None or "default" in entry[1], f"{name}: {entry[1]}"


def test_names_in_annotations_are_seen() -> None:
    """Also those in quotes, and within other types."""
    (annotation,) = (node.value for node in ast.parse("Mapping[str, 'A'] | 'B | C[D]' | e.F").body)  # type: ignore[attr-defined]
    assert {"A", "B", "C", "D"} <= set(_names_in(annotation))


@pytest.mark.parametrize("page", api_names.PAGES, ids=lambda page: page.stem)
def test_tables_of_names_are_those_of_the_code(page: Path) -> None:
    """``python -m tests.repository.pages.api_names`` writes them."""
    assert page.read_text() == api_names.with_table(page.read_text(), page.stem)
    assert api_names.BEGIN in page.read_text()

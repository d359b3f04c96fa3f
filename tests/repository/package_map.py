"""The map of the packages, read from their docstrings, and the pages that carry it.

A package's docstring names its modules in the order in which to read them, each with what it is for::

    - ``planner``: decides what is saved.
    - ``commands/``: a package in it.

``python -m tests.repository.package_map`` writes the map into the pages, between its two marks.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torchrec_cnr
from tests.repository.marks import between
from tests.repository.package_order import ORDER

ROOT = Path(__file__).parents[2]
FOLDER = Path(torchrec_cnr.__file__).parent
MARKS = ("<!-- map: begin; written by python -m tests.repository.package_map -->", "<!-- map: end -->")

_ENTRY = re.compile(r"^- ``(?P<name>\w+/?)``: (?P<text>.*(?:\n  .*)*)$", re.MULTILINE)


@dataclass(frozen=True)
class Package:
    """A package, as its docstring and its folder tell.

    Attributes:
        path: Its folder.
        summary: The first line of its docstring.
        entries: What its docstring says of each module, and of each package in it, whose names end in a slash.
    """

    path: Path
    summary: str
    entries: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> "Package":
        docstring = ast.get_docstring(ast.parse((path / "__init__.py").read_text())) or ""
        return cls(path, docstring.partition("\n")[0], parse_entries(docstring))

    @property
    def name(self) -> str:
        """Its path, such as ``torchrec_cnr/cli/report``."""
        return self.path.relative_to(FOLDER.parent).as_posix()

    @property
    def modules(self) -> set[str]:
        """What its docstring has to name; the top counts as a module of itself, since it has a place in the order."""
        modules = {path.stem for path in self.path.glob("*.py")} - (set() if self.path == FOLDER else {"__init__"})
        return modules | {f"{path.parent.name}/" for path in self.path.glob("*/__init__.py")}

    @property
    def parts(self) -> "list[Package]":
        """The packages in it, in the order of its docstring."""
        folders = (self.path / name for name in self.entries if name.endswith("/"))
        return [Package.read(path) for path in folders if (path / "__init__.py").exists()]


def parse_entries(docstring: str) -> dict[str, str]:
    """What a docstring says of each module that it names."""
    return {entry["name"]: " ".join(entry["text"].split()) for entry in _ENTRY.finditer(docstring)}


def read_packages() -> list[Package]:
    """Every package there is, whether a docstring names it or not."""
    return [Package.read(path.parent) for path in sorted(FOLDER.rglob("__init__.py"))]


def layer_table() -> str:
    """What may import what: a row for each package and module at the top, the highest layer first."""
    entries = Package.read(FOLDER).entries
    lines = ["| layer | package | what it is for | its modules, in reading order |", "|---|---|---|---|"]
    for rank, units in reversed(list(enumerate(ORDER))):
        for name, text in entries.items():
            if name.removesuffix("/") in units:
                modules = Package.read(FOLDER / name).entries if name.endswith("/") else ()
                listed = ", ".join(f"`{module}`" for module in modules)
                lines.append(f"| {rank} | `{name}` | {_markdown(text)} | {listed} |")
    return "\n".join(lines)


def module_list() -> str:
    """Every module with what it is for, package by package, in the order of the docstrings."""
    top = Package.read(FOLDER)
    names = {name: text for name, text in top.entries.items() if not name.endswith("/")}
    rest = "\n".join([f"**`{FOLDER.name}/`** At the top:", "", *_items(names)])
    return "\n\n".join([*(_section(package) for part in top.parts for package in _with_parts(part)), rest])


def _with_parts(package: Package) -> Iterator[Package]:
    yield package
    for part in package.parts:
        yield from _with_parts(part)


def _section(package: Package) -> str:
    name = package.path.relative_to(FOLDER).as_posix()
    return "\n".join([f"**`{name}/`** {_markdown(package.summary)}", "", *_items(package.entries)])


def _items(entries: Mapping[str, str]) -> Iterator[str]:
    return (f"- `{name}`: {_markdown(text)}" for name, text in entries.items())


def _markdown(text: str) -> str:
    return text.replace("``", "`")


PAGES: Mapping[Path, Callable[[], str]] = {
    ROOT / "CONTRIBUTING.md": layer_table,
    ROOT / "docs" / "design" / "modules.md": module_list,
}


def with_map(page: str, text: str) -> str:
    """A page, with this map between its marks."""
    return between(page, MARKS, text)


if __name__ == "__main__":
    for path, render in PAGES.items():
        path.write_text(with_map(path.read_text(), render()))

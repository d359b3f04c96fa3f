"""``python -m tests.repository.pages.api_names``: write what docstrings say of each name on the pages of the API.

The site builds these pages from docstrings. In the repository, each name has the same as Markdown: arguments, defaults,
results, errors and an example. There, the directive for the site is in a comment, and ``docs/hooks.py`` puts it in the
place of the Markdown. Above the names is a table of all.
"""

import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import griffe

FOLDER = Path(__file__).parents[3] / "docs/reference/api"
PAGES = sorted(FOLDER.glob("*.md"))
VALUES = ("errors", "types")  # pages of what is returned or raised, and not made by users
BEGIN, END = "<!-- names: begin; written by python -m tests.repository.pages.api_names -->", "<!-- names: end -->"
_NAME = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
_DIRECTIVE = re.compile(
    r"^(?:<!-- site\n)?(::: ([\w.]+)\n(?: +[^\n]*\n)*)(?:-->\n.*?<!-- end of name -->\n)?", re.M | re.DOTALL
)
_BLOCK = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}\n\n", re.DOTALL)
_MEMBER = re.compile(r"<\w+\.(\w+): [^>]*>")  # of an enumeration
_MODULE = re.compile(r"~|\b(?:\w+\.)+(?=\w)")  # before the name of a type
_UNKNOWN = inspect.Parameter("unknown", inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ROLE = re.compile(r":\w+:`~?([^`]+)`")


def with_table(page: str, stem: str) -> str:
    """Return the text of a page with its table right before the first name, and with what docstrings say of names."""
    text = _DIRECTIVE.sub(lambda found: _described(found[1], found[2]), _BLOCK.sub("", page).rstrip("\n") + "\n")
    names = [name for name in _NAME.findall(text) if not inspect.ismodule(pkgutil.resolve_name(name))]
    if not names:
        return text
    place = text.index(f"<!-- site\n::: {names[0]}")
    lines = [BEGIN, "", "| name | what it is |", "|---|---|", *(_line(name, stem) for name in names), "", END, "", ""]
    return text[:place] + "\n".join(lines) + text[place:]


def _line(path: str, stem: str) -> str:
    found, name = pkgutil.resolve_name(path), path.rpartition(".")[2]
    arguments = "" if stem in VALUES or not callable(found) else _arguments(found)
    summary = (inspect.getdoc(found) or "").partition("\n\n")[0]
    return f"| `{name}{arguments}` | {_cell(summary)} |"


def _described(directive: str, path: str) -> str:
    """Return the directive of a name as a comment, and what its docstring and those of its methods say."""
    found, name = pkgutil.resolve_name(path), path.rpartition(".")[2]
    parts = [f"<!-- site\n{directive}-->"]
    level = "###" if "heading_level: 3" in directive else "##"
    if not inspect.ismodule(found):
        parts.append(f"{level} {name}")
    parts += _sections(found, are_attributes_shown="show_docstring_attributes: false" not in directive)
    for method, function in _methods(found, directive):
        parts += [f"{level}# {name}.{method}", *_sections(function)]
    return "\n\n".join([*parts, "<!-- end of name -->\n"])


def _methods(found: Any, directive: str) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class that its page shows, with their arguments."""
    chosen = re.search(r"^ +members: (.*)$", directive, re.M)
    if not inspect.isclass(found) or (chosen is not None and chosen[1] == "false"):
        return
    shown = None if chosen is None else re.findall(r"\w+", chosen[1])
    for name, member in vars(found).items():
        if not name.startswith("_") and (shown is None or name in shown):
            if isinstance(member, property):
                yield name, member.fget
            elif inspect.isfunction(member) or isinstance(member, classmethod | staticmethod):
                function = inspect.unwrap(getattr(found, name))
                arguments = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
                yield f"{name}({', '.join(_shown(arguments))})", function


def _sections(found: Any, are_attributes_shown: bool = True) -> Iterator[str]:
    """Yield the sections of a docstring as Markdown."""
    for section in griffe.Docstring(inspect.getdoc(found) or "").parse("google", warnings=False):
        kind, value = section.kind.value, section.value
        if kind == "text":
            yield _plain(value)
        elif kind in ("parameters", "attributes"):
            if kind == "parameters" or are_attributes_shown:
                yield "\n".join(_fields(kind[:-1].replace("parameter", "argument"), value, _known(found)))
        elif kind == "examples":
            yield from (f"```pycon\n{text}\n```" if each.value == kind else _plain(text) for each, text in value)
        elif kind in ("returns", "yields"):
            yield f"{kind.capitalize()}: {' '.join(_plain(each.description) for each in value)}"
        elif kind == "raises":
            yield "Raises:\n\n" + "\n".join(f"- `{each.annotation}`: {_cell(each.description)}" for each in value)
        else:
            raise ValueError(f"{found!r} has a section {kind!r}, which no page shows")


def _fields(kind: str, described: Iterable[Any], known: Mapping[str, inspect.Parameter]) -> Iterator[str]:
    """Yield the lines of a table of arguments or attributes, without the columns that none of them has."""
    rows = [(kind, "type", "default", "meaning")]
    for each in described:
        parameter = known.get(each.name, _UNKNOWN)
        cells = (each.name, _type(parameter.annotation), _default(parameter.default)[1:])
        rows.append((*(f"`{cell}`" if cell else "" for cell in cells), _cell(each.description)))  # type: ignore[arg-type]
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    head, *others = zip(*columns, strict=True)
    yield from (f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *others))


def _type(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    text = _MODULE.sub("", annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))
    return text.strip("'").replace("|", "\\|")


def _known(found: Any) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a function or class, by name."""
    if not callable(found) or getattr(found, "_is_protocol", False):
        return {}
    try:
        return inspect.signature(found).parameters
    except ValueError:  # an exception that is made in C
        return {}


def _plain(text: str) -> str:
    """Return text of a docstring as Markdown."""
    return _ROLE.sub(r"`\1`", text).replace("``", "`")


def _cell(text: str) -> str:
    return _plain(" ".join(text.split())).replace("|", "\\|")


def _arguments(found: Any) -> str:
    """Return the arguments with their defaults, without types."""
    if getattr(found, "_is_protocol", False):
        return ""
    parameters = inspect.signature(found).parameters.values()
    return f"({', '.join(_shown(list(parameters)))})"


def _shown(parameters: list[inspect.Parameter]) -> Iterator[str]:
    is_after_star = False
    for parameter in parameters:
        if parameter.name.startswith("_"):
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not is_after_star:
            is_after_star = True
            yield "*"
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        is_after_star |= stars == "*"
        yield stars + parameter.name + _default(parameter.default)


def _default(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return ""
    text = _MEMBER.sub(r"\1", repr(default))
    return "=…" if text.startswith("<") else f"={text}"


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(with_table(each.read_text(), each.stem))

"""``python -m tests.repository.pages.api_names``: a table of names, arguments and defaults on each page of the API.

The pages are built from docstrings, so on GitHub they would have only names. The table shows there what each name is.
"""

import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "docs/reference/api"
PAGES = sorted(FOLDER.glob("*.md"))
VALUES = ("errors", "types")  # pages of what is returned or raised, and not made by users
BEGIN, END = "<!-- names: begin; written by python -m tests.repository.pages.api_names -->", "<!-- names: end -->"
_NAME = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
_BLOCK = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}\n\n", re.DOTALL)
_MEMBER = re.compile(r"<\w+\.(\w+): [^>]*>")  # of an enumeration
_ROLE = re.compile(r":\w+:`~?([^`]+)`")


def with_table(page: str, stem: str) -> str:
    """Return the text of a page with its table, right before the first name."""
    text = _BLOCK.sub("", page)
    names = [name for name in _NAME.findall(text) if not inspect.ismodule(pkgutil.resolve_name(name))]
    if not names:
        return text
    place = text.index(f"::: {names[0]}")
    lines = [BEGIN, "", "| name | what it is |", "|---|---|", *(_line(name, stem) for name in names), "", END, "", ""]
    return text[:place] + "\n".join(lines) + text[place:]


def _line(path: str, stem: str) -> str:
    found, name = pkgutil.resolve_name(path), path.rpartition(".")[2]
    arguments = "" if stem in VALUES or not callable(found) else _arguments(found)
    summary = (inspect.getdoc(found) or "").partition("\n\n")[0].replace("\n", " ")
    plain = _ROLE.sub(r"`\1`", summary).replace("``", "`").replace("|", "\\|")
    return f"| `{name}{arguments}` | {plain} |"


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

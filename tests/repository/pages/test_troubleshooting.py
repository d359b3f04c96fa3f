"""The page on troubleshooting quotes every warning as the log has it, so that a search for the message finds it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[3]
PAGE = REPO / "docs" / "operations" / "troubleshooting.md"
MIN_QUOTED = 12  # characters of a message that a reader would search for
WARN = {"warning", "warn", "error", "log"}


def _words(text: str) -> str:
    return " ".join(text.split())


def _messages(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each call that logs a warning or error, or warns; values are ``%s``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WARN):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id in ("logger", "warnings")):
            continue
        for arg in node.args[:2]:
            if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
                yield f"{path.relative_to(REPO)}:{node.lineno}", arg.value
            elif isinstance(arg, ast.JoinedStr):
                parts = [value.value if isinstance(value, ast.Constant) else "%s" for value in arg.values]
                yield f"{path.relative_to(REPO)}:{node.lineno}", "".join(map(str, parts))


def _quotable(message: str) -> list[str]:
    """Return the fixed parts of a message that are long enough to be searched for."""
    parts = [_words(part).strip(" :;,.()") for part in re.split(r"%[srdx]", message)]
    return [part for part in parts if len(part) >= MIN_QUOTED]


MESSAGES = [item for path in sorted((REPO / "torchrec_cnr").rglob("*.py")) for item in _messages(path)]
OWN = [(place, text) for place, text in MESSAGES if "/cli/" not in place and _quotable(text)]


@pytest.mark.parametrize(("place", "message"), OWN, ids=[place for place, _ in OWN])
def test_each_warning_is_quoted(place: str, message: str) -> None:
    """Its fixed beginning stands in the page word for word."""
    page = _words(PAGE.read_text())
    assert any(part[:40] in page for part in _quotable(message)), f"{place}: {message}"


def test_there_are_messages_to_find() -> None:
    """Otherwise the test above would test nothing."""
    assert len(OWN) > 30

"""The examples in the docstrings of public names: each name has one, and each example prints what it shows.

The code that the examples begin with is that of docs/reference/api.md. It is run again for each name, in an empty
directory, so that no example depends on another one.
"""

import doctest
import importlib
import inspect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.repository.pages.test_snippets import parse_blocks

ROOT = Path(__file__).parents[3]
OVERVIEW = ROOT / "docs" / "reference" / "api.md"
MODULES = ("", ".kafka", ".quantization", ".serving", ".testing")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Public names without an example, with the reason.
EXEMPT = {
    "Quantization": "an interface that schemes and rules implement; these have examples, and nothing is made of it",
    "Scheme": "an interface that schemes implement; these have examples, and a new one would need a format version",
}


def _public() -> Mapping[str, Any]:
    """All public classes and functions but errors, by module and name, each once."""
    found: dict[int, tuple[str, Any]] = {}
    for suffix in MODULES:
        module = importlib.import_module(f"torchrec_cnr{suffix}")
        for name in module.__all__:
            value = getattr(module, name)
            is_error = inspect.isclass(value) and issubclass(value, BaseException)
            if (inspect.isclass(value) or inspect.isfunction(value)) and not is_error:
                found.setdefault(id(value), (f"{module.__name__}.{name}", value))
    return dict(found.values())


PUBLIC = _public()
# Said by libraries about calls that are meant.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
]
(SETUP, *_) = (block for block in parse_blocks(OVERVIEW.read_text()) if block.info == "python")


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that the code of the overview defines, in an empty directory with the checkpoints that it saves."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # half of the time
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("\n".join(SETUP.lines), names)
    tracker = names["tracker"]
    yield names
    tracker.close()


def examples_of(name: str, value: object, names: dict[str, Any]) -> doctest.DocTest:
    """Return the examples in a docstring."""
    return doctest.DocTestParser().get_doctest(inspect.getdoc(value) or "", names, name, None, None)


def failures(test: doctest.DocTest) -> str:
    """Run examples; return what failed, with the expected and the actual output."""
    reports: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=reports.append, clear_globs=False)
    return "".join(reports)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_examples_print_what_they_show(name: str, names: dict[str, Any]) -> None:
    """Each public class or function has examples, and they run."""
    test = examples_of(name, PUBLIC[name], names)
    if name.rpartition(".")[2] in EXEMPT:
        assert not test.examples, f"{name} has an example by now: remove it from EXEMPT"
        return
    assert test.examples, f"{name} has no example; write one, or say in EXEMPT why there is none"
    assert failures(test) == ""


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_examples_are_shown_as_code(name: str) -> None:
    """They are in a section that is called as the site expects it: it would show any other as text."""
    lines = (inspect.getdoc(PUBLIC[name]) or "").splitlines()
    numbers = [number for number, line in enumerate(lines) if line.lstrip().startswith(">>>")]
    if numbers:
        assert lines[numbers[0] - 1] == "Examples:"
        assert "" not in lines[numbers[0] :], "a blank line would end the block of code"


def test_exempt_names_exist() -> None:
    """No exemption outlives its name."""
    assert EXEMPT.keys() <= {name.rpartition(".")[2] for name in PUBLIC}


def _right() -> None:
    """Print a path.

    Examples:
        >>> print("/tmp/a/run/step-1")
        /.../run/step-1
    """


def _wrong() -> None:
    """Print a path.

    Examples:
        >>> print("/tmp/a/run/step-1")
        /.../run/step-2
    """


def test_wrong_outputs_are_seen() -> None:
    """What differs from the output is a failure that shows both."""
    assert failures(examples_of("right", _right, {})) == ""
    found = failures(examples_of("wrong", _wrong, {}))
    assert "/.../run/step-2" in found
    assert "/tmp/a/run/step-1" in found

"""The public names of the package."""

import inspect
import subprocess
import sys

import pytest

import torchrec_cnr

NAMES = list(torchrec_cnr.__all__)


def test_names_are_listed_in_order_and_once() -> None:
    """``__all__`` is sorted and names nothing twice."""
    assert sorted(set(NAMES)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_name_exists_and_is_documented(name: str) -> None:
    """Each public name is there; a class or function has a docstring of its own."""
    value = getattr(torchrec_cnr, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        assert own, f"{name} has no docstring"
        assert not own.startswith(f"{name}("), f"{name} has only the docstring that dataclass makes"


@pytest.mark.long
@pytest.mark.parametrize(
    ("imported", "absent"),
    [("torchrec_cnr", "torch"), ("torchrec_cnr.reading.load_table", "torchrec")],
)
def test_only_what_is_asked_for_is_imported(imported: str, absent: str) -> None:
    """Names are imported on demand: the package alone is there without torch, and reading needs no TorchRec."""
    asked = f"import sys, {imported}; sys.exit({absent!r} in sys.modules)"
    present = f"import sys, torchrec_cnr; torchrec_cnr.RowTracker; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0
    assert subprocess.run([sys.executable, "-c", present], check=False).returncode == 1

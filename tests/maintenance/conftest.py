"""A root on each kind of file system."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.support.roots import Root

numbers = count()


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Root]:
    """An empty root in each kind of file system."""
    found = Root(tmp_path / "job" if request.param == "local" else f"memory://retention-{next(numbers)}/job")
    yield found
    if request.param == "memory":
        found.store.fs.rm(found.store.path, recursive=True)

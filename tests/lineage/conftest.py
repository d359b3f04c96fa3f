"""A root on each kind of file system."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lineage.tensorless_roots import TensorlessRoot, numbers


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TensorlessRoot]:
    """An empty directory in each kind of file system."""
    found = TensorlessRoot(
        str(tmp_path / "job") if request.param == "local" else f"memory://lineage-{next(numbers)}/job"
    )
    yield found
    if request.param == "memory":
        found.store.fs.rm(found.store.path, recursive=True)

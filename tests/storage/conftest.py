"""An empty store of each kind."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from torchrec_cnr.storage.store import Store

numbers = count()


@pytest.fixture(params=["local", "local, synced", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty directory in each kind of file system."""
    url = f"memory://stores-{next(numbers)}/dir" if request.param == "memory" else str(tmp_path / "dir")
    found = Store.open(url, sync_files=request.param == "local, synced")
    found.make()
    yield found
    if request.param == "memory":
        found.fs.rm(found.path, recursive=True)

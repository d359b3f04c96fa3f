"""What all tests share: markers, Hypothesis' profile, and pools of ranks."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

import torchrec_cnr
from tests.ranks import RankPools

# No deadline: the first example pays for imports and for caches that are cold.
hypothesis.settings.register_profile("project", deadline=None, print_blob=True)
hypothesis.settings.load_profile("project")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without CUDA."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """An empty directory that processes of other users can come to, if they can come to the code too."""
    code = Path(torch.__file__).resolve(), Path(torchrec_cnr.__file__).resolve()
    closed = [folder for file in code for folder in file.parents if not folder.stat().st_mode & 0o001]
    if os.geteuid() == 0 and closed:
        pytest.skip(f"a child without root's privileges could not import anything: {closed[0]} is closed to others")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPools]:
    """Call it with a world size for a pool of ranks that other tests use too, see `tests.ranks.RankPool`."""
    pools = RankPools()
    yield pools
    pools.close()

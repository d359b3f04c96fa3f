"""Runs that tests of the command line look at."""

from pathlib import Path

import pytest

import torchrec_cnr as cnr
from tests.cli.empty_commits import NAMES, commit
from tests.support import runs


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of three checkpoints, and a branch of two from its second, which is left alone by tests."""
    root = tmp_path_factory.mktemp("run")
    runs.save_run(root, NAMES[:3], quantization=cnr.Asymmetric(4))
    runs.save_run(root, NAMES[3:], load="step-2", seed=2, quantization=cnr.HalfPrecision())
    return root


@pytest.fixture(scope="session")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of 2,000 checkpoints."""
    root, ref = tmp_path_factory.mktemp("long"), None
    for number in range(2000):
        ref = commit(root, f"step-{number}", number + 1, ref)
    return root

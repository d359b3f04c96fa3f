"""Runs that commands change."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

import torchrec_cnr as cnr
from tests.cli.maintenance_commands.checks import NAMES
from tests.support import runs
from tests.support.roots import HOUR_NS, Root
from torchrec_cnr.maintenance.tags_and_metrics import tag, write_metrics


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline and three deltas, quantized, which is left alone by tests."""
    root = tmp_path_factory.mktemp("run")
    runs.save_run(root, NAMES, quantization=cnr.Asymmetric(4), rows=(400, 12))
    return root


@pytest.fixture
def run(saved_run: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved_run, tmp_path / "run"))


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A baseline and a delta on one day, a baseline on the next, and a baseline and a delta on the last."""
    root = Root(tmp_path / "root")
    root.save("a", HOUR_NS)
    root.save("a-1", 2 * HOUR_NS, "a", range(8))
    root.save("b", 25 * HOUR_NS)
    root.save("c", 49 * HOUR_NS)
    root.save("c-1", 50 * HOUR_NS, "c", range(6, 12))
    for name, auc in (("a", 0.9), ("b", 0.5), ("c", 0.7)):
        write_metrics(root.at(name), {"auc": auc, "loss": 1 - auc})
    tag(root.at("b"), "release")
    return root


@pytest.fixture
def stock(tmp_path: Path) -> dict[str, Any]:
    """What ``stock`` in the folder holds: a table by TorchRec's name, another matrix, and more, saved by DCP alone."""
    torch.manual_seed(3)
    state = {
        "ebc": {"embedding_bags": {"t": {"weight": torch.rand(300, 16)}}},
        "mine": {"weight": torch.rand(200, 16)},
        "bias": torch.rand(9),
        "progress": {"epoch": 3, "betas": (0.9, 0.99)},
    }
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "stock", sync_files=False))
    return state

"""Transforms and bases that a delta shares with older checkpoints, while those are compacted and pruned."""

from pathlib import Path

import pytest
import torch

import torchrec_cnr as cnr
from tests.quantization.test_transformed_checkpoints import Run, assert_near, running

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

SOME_ROWS = torch.arange(300)


def _directories(checkpoint: cnr.Checkpoint) -> set[str | None]:
    return {pack.directory for pack in checkpoint.manifest.packs}


def _merge_and_prune(root: Path, name: str) -> None:
    """Leave one checkpoint of a root, with no more files than it needs."""
    cnr.compact(root / name, self_contained=True)
    cnr.execute(cnr.plan_prune(root, cnr.Keep(last=1)))
    assert [path.parent.name for path in root.glob("*/manifest.json")] == [name]


def _two_saves(run: Run) -> None:
    """A baseline and a delta, whose transforms are in two directories."""
    run.save()
    run.change(SOME_ROWS, 1)
    assert None in _directories(run.save())


# Another root


def test_a_delta_in_another_root_stores_transforms_again(tmp_path: Path) -> None:
    """Once, so that compactions and prunes of the first root remove nothing that it needs but its tagged parent."""
    for root in (tmp_path / "a", tmp_path / "b"):
        root.mkdir()
    with running(tmp_path / "a") as run:
        _two_saves(run)
        run.root = tmp_path / "b"
        deltas = []
        for number in (2, 3):
            run.change(SOME_ROWS, number)
            deltas.append(run.save())
        assert [delta.kind for delta in deltas] == ["delta", "delta"]
        assert [_directories(delta) for delta in deltas] == [{None}, {None, "../2"}]
        _merge_and_prune(tmp_path / "a", "1")
        assert_near(tmp_path / "b" / "3", run.table)
        assert not cnr.verify(tmp_path / "b" / "3").problems

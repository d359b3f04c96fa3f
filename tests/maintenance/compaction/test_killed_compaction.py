"""A compaction that is killed before any of its storage operations: nothing is lost, the next one does the work."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import torchrec_cnr as cnr
from tests.support.killing import every_kill
from tests.support.models import plain_job, state, train
from torchrec_cnr.maintenance.verification.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

STEPS = (1, 2, 3, 4)
PACK_BYTES = 1024


@pytest.fixture(scope="module")
def lineage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline and three deltas in small packs."""
    root = tmp_path_factory.mktemp("lineage") / "run"
    job = plain_job(1)
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Compacted())
    for step in STEPS:
        train(job, step)
        writer = cnr.CNRStorageWriter(root / f"step-{step}", sync_files=False, pack_bytes=PACK_BYTES)
        dcp.save(state(job), storage_writer=writer, planner=planner)
    tracker.close()
    return root


def _tensors(root: str | Path, step: int) -> dict[str, Tensor]:
    path = f"{root}/step-{step}"
    return {fqn: cnr.load_table(path, fqn) for fqn in cnr.read_checkpoint(path).manifest.tensors}


def _is_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[fqn], second[fqn]) for fqn in first)


def _compact(root: str) -> None:
    cnr.compact(f"{root}/step-4", max_ratio=1.0, pack_bytes=PACK_BYTES, thread_count=1)


@pytest.mark.long
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_compaction_loses_nothing_and_is_done_again(lineage: Path, tmp_path: Path, step: int) -> None:
    """Killed before each operation, all checkpoints load as before and verify; then it is compacted all the same."""
    expected = {step: _tensors(lineage, step) for step in STEPS}
    assert not _is_equal(expected[3], expected[4])
    shutil.copytree(lineage, tmp_path / "done")
    _compact(str(tmp_path / "done"))
    done = cnr.read_checkpoint(tmp_path / "done" / "step-4")
    assert done.is_compacted
    assert done.parent is None
    num_kills = num_left_undone = 0

    def prepare(number: int) -> str:
        return str(shutil.copytree(lineage, tmp_path / str(number)))

    for kill in every_kill(prepare, _compact, step):
        num_kills += not kill.finished
        is_done = cnr.read_checkpoint(f"{kill.root}/step-4").is_compacted
        assert is_done or not kill.finished
        num_left_undone += not is_done
        assert all(_is_equal(_tensors(kill.root, step), expected[step]) for step in STEPS), kill.number
        report = verify(kill.root, all_heads=True)
        assert report.is_right, (kill.number, report.problems)
        if not is_done:
            _compact(kill.root)
        again = cnr.read_checkpoint(f"{kill.root}/step-4")
        assert again.manifest.blob_bytes == done.manifest.blob_bytes
        assert _is_equal(_tensors(kill.root, 4), expected[4])
        shutil.rmtree(kill.root)
    assert 0 < num_left_undone < num_kills
    assert num_kills * step > 10

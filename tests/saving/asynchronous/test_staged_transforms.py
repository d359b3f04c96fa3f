"""Rows of asynchronous saves that are transformed before they are copied: when, and with which transform."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.quantization.test_transform_coded import DIM, few_dimensions
from tests.quantization.test_transformed_checkpoints import FQN, NUM_ROWS, Run, running, scheme_of
from tests.support import models
from torchrec_cnr.saving import staged_values, staging

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@contextmanager
def _quantized_first(device: str) -> Iterator[None]:
    """As where tables lie on a GPU."""
    if device != "cpu":
        yield
        return
    with mock.patch.object(staging, "is_quantized_first", return_value=True):
        yield


def _save_behind(run: Run, device: str) -> tuple[bool, cnr.Checkpoint]:
    """Save in the background; whether rows were transformed before they were copied, and the checkpoint."""
    path = run.root / str(run.num_saves)
    run.num_saves += 1
    with _quantized_first(device), mock.patch.object(staging, "start_codes", wraps=staged_values.start_codes) as spy:
        future = models.save_behind({"model": run.model.state_dict()}, str(path), run.writer, run.planner)
    future.result(timeout=60)
    return spy.called, cnr.read_checkpoint(path)


def _change(run: Run, rows: Tensor, values: Tensor) -> None:
    run.table[rows.to(run.table.device)] = values.to(run.table)
    run.tracker.mark("users", rows.to(run.table.device))


def _error(run: Run, rows: Tensor) -> float:
    """The mean error of rows of the last checkpoint, as a part of that of 4 bits."""
    table = run.table.cpu()[rows]
    other = cnr.AdaptiveAsymmetric(4).choose(lambda: table, 0)
    wanted = (other.decode(other.encode(table).codes, DIM, table.dtype) - table).norm(dim=1).mean()
    loaded = cnr.load_table(run.root / str(run.num_saves - 1), FQN)[rows]
    return float((loaded - table).norm(dim=1).mean() / wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_known_transforms_are_used_before_the_copy(tmp_path: Path, device: str) -> None:
    """The others are learned in the background: the first, after a drift, and where the error is another one."""
    rows = torch.arange(1, NUM_ROWS, 2)

    def values(seed: int, num_turned: int = 0) -> Tensor:
        values = few_dimensions(len(rows), seed)
        values[:num_turned] = values[:num_turned].flip(1)
        return values

    changes = [values(1), values(2) * 0.7, values(3) * 0.7, values(4, 300), values(5, 300), values(6, 300)]
    changes += [values(7) * 0.3, values(8)]
    found = []
    with running(tmp_path, device=device) as run:
        found.append(_save_behind(run, device))
        for change in changes:
            _change(run, rows, change)
            found.append(_save_behind(run, device))
            assert 0.6 < _error(run, rows) < 1.05
            assert not cnr.verify(tmp_path / str(run.num_saves - 1)).problems
        run.writer.close()
    bases = [scheme_of(checkpoint).basis for _, checkpoint in found]
    digests = [scheme_of(checkpoint).digest for _, checkpoint in found]
    assert [is_before for is_before, _ in found] == [False, True, False, True, True, False, True, False, False]
    assert len(set(bases[:5])) == 1
    assert digests[0] == digests[1] != digests[2] == digests[3]  # another step
    assert digests[4] != digests[5]  # learned in the background, as more bits were needed
    assert all(checkpoint.kind == "delta" for _, checkpoint in found[1:])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_transformed_first_may_be_exact(tmp_path: Path, device: str) -> None:
    """Their values are copied, too, and come back bit for bit."""
    with running(tmp_path, device=device) as run:
        _save_behind(run, device)
        _change(run, torch.arange(0, NUM_ROWS, 2), few_dimensions(NUM_ROWS // 2, 1))
        run.table[4, 5], run.table[6] = float("inf"), 1e9
        is_before, checkpoint = _save_behind(run, device)
        run.writer.close()
        loaded = cnr.load_table(tmp_path / "1", FQN)
        assert is_before
        assert checkpoint.num_exact_rows == 2
        assert torch.equal(loaded[[4, 6]], run.table[[4, 6]].cpu())
        assert _error(run, torch.arange(8, NUM_ROWS, 2)) < 1.05


def test_a_baseline_has_the_transform_of_its_rows(tmp_path: Path) -> None:
    """Also if another checkpoint has it, or only a save that failed."""
    with running(tmp_path, policy=cnr.Full()) as run:
        for number in range(3):
            if number == 1:
                (tmp_path / "1").mkdir()
                (tmp_path / "1" / "manifest.json").write_text("{}")
                with pytest.raises(CheckpointException):
                    _save_behind(run, "cpu")
                continue
            is_before, checkpoint = _save_behind(run, "cpu")
            assert is_before == (number > 0)
            assert {pack.directory for pack in checkpoint.manifest.packs} == {None}
            assert scheme_of(checkpoint).basis is not None
            assert _error(run, torch.arange(NUM_ROWS)) < 1.05

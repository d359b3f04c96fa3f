"""Asynchronous saves whose baseline was pruned after a compaction: no save fails, and no row is lost."""

from pathlib import Path

import pytest
import torch
from torch import nn

import torchrec_cnr as cnr
from tests.support import models
from torchrec_cnr.maintenance.pruning.execute import run_prune


def test_staged_rows_are_saved_without_their_baseline(tmp_path: Path) -> None:
    """Rows since the baseline are saved as a delta of the newest checkpoint; then the policy begins anew."""
    table = nn.EmbeddingBag(200, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    root = str(tmp_path / "run")
    planner = cnr.CNRSavePlanner(cnr.RowTracker(table), policy=cnr.OneShot())
    writer = cnr.CNRStorageWriter(root)
    kinds = []
    for step in range(1, 7):
        for _ in range(step):
            table(torch.randint(200, (8, 2))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        path, saved = f"{root}/step-{step}", table.weight.detach().clone()
        models.save_behind({"model": table.state_dict()}, path, writer, planner).result(timeout=100)
        planner.resolve_last_save()
        kinds.append(cnr.read_checkpoint(path).committed.kind)
        assert torch.equal(_loaded(path), saved)
        if step == 2:
            cnr.compact(path, max_ratio=1.0)
            assert run_prune(cnr.plan_prune(root, cnr.Keep(last=1))).removed == ("step-1",)
    writer.close()
    assert kinds == ["baseline", "delta", "delta", "baseline", "delta", "delta"]
    parent = cnr.read_checkpoint(f"{root}/step-3").committed.parent
    assert parent is not None
    assert parent.path == "../step-2"


@pytest.mark.parametrize(("is_pruned", "parent"), [(True, "../step-2"), (False, "../step-1")])
def test_state_that_was_swapped_back_is_stored_whole(tmp_path: Path, is_pruned: bool, parent: str) -> None:
    """The newest checkpoint holds the values of another tensor, which rows since the baseline do not replace."""
    table = nn.EmbeddingBag(200, 4, sparse=True)
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
    root = str(tmp_path / "run")
    planner = cnr.CNRSavePlanner(cnr.RowTracker(table), policy=cnr.OneShot())
    writer = cnr.CNRStorageWriter(root)
    state = optimizer.state[table.weight]
    first_sum, saved_sum = state["sum"], torch.empty(0)
    for step in range(1, 4):
        state["sum"] = first_sum if step != 2 else torch.full_like(first_sum, 7.0)
        table(torch.randint(200, (8, 2))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        path, saved_sum = f"{root}/step-{step}", state["sum"].clone()
        live = {"model": table.state_dict(), "sum": state["sum"]}
        models.save_behind(live, path, writer, planner).result(timeout=100)
        planner.resolve_last_save()
        if step == 2 and is_pruned:
            cnr.compact(path, max_ratio=1.0)
            assert run_prune(cnr.plan_prune(root, cnr.Keep(last=1))).removed == ("step-1",)
    writer.close()
    link = cnr.read_checkpoint(f"{root}/step-3").committed.parent
    assert link is not None
    assert link.path == parent
    target = {"model": table.state_dict(), "sum": torch.zeros_like(first_sum)}
    torch.distributed.checkpoint.load(target, storage_reader=cnr.CNRStorageReader(f"{root}/step-3"))
    assert torch.equal(target["sum"], saved_sum)


def _loaded(path: str) -> torch.Tensor:
    target = nn.EmbeddingBag(200, 4, sparse=True)
    state = {"model": target.state_dict()}
    torch.distributed.checkpoint.load(state, storage_reader=cnr.CNRStorageReader(path))
    return target.weight.detach()

"""Asynchronous saves whose baseline was pruned after a compaction: no save fails, and no row is lost."""

from pathlib import Path

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


def _loaded(path: str) -> torch.Tensor:
    target = nn.EmbeddingBag(200, 4, sparse=True)
    state = {"model": target.state_dict()}
    torch.distributed.checkpoint.load(state, storage_reader=cnr.CNRStorageReader(path))
    return target.weight.detach()

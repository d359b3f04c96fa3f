"""Random number generators go on after a restore as if the job had not stopped, each rank with its own."""

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchrec_cnr as cnr
from tests.support.ranks import RankPools

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def _draw() -> list[float]:
    """Numbers of all generators. A normal of each library, as these keep the second one of a pair for the next call."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
        float(torch.randn(())),
    ]


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def test_all_generators_go_on() -> None:
    """Also with the half of a pair of normals that is still to come."""
    _seed(1)
    _draw()
    state = cnr.RandomState().state_dict()
    expected = [_draw() for _ in range(3)]
    assert expected[0] != expected[1]
    _seed(2)
    assert _draw() != expected[0]
    cnr.RandomState().load_state_dict(state)
    assert [_draw() for _ in range(3)] == expected


def _train(rank: int, root: str, first: int, last: int, seed: int, is_async: bool) -> list[Any]:
    """Train with dropout, which draws, from the newest checkpoint on; the losses, and what the model holds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Dropout(0.5), nn.Linear(8, 1))
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model.state_dict(), "optimizer": optimizer, "random": cnr.RandomState()}
    tracker = cnr.RowTracker(model)
    manager = cnr.CheckpointManager(root, tracker, every_steps=3)
    _seed(100 * seed + rank)
    assert (manager.restore(state) or 0) == first
    losses = []
    for step in range(first + 1, last + 1):
        loss = model(torch.randint(50, (4, 2))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((float(loss), *_draw()))
        (manager.async_save if is_async else manager.save)(step, state)
    manager.close()
    tracker.close()
    return [losses, [parameter.detach().clone() for parameter in model.parameters()]]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_resumed_run_draws_what_it_would_have_drawn(tmp_path: Path, rank_pool: RankPools, is_async: bool) -> None:
    """Losses, draws and weights are those of a run that was not stopped, on each rank; ranks draw differently."""
    pool = rank_pool(2)
    whole = pool.run(_train, str(tmp_path / "whole"), 0, 9, 1, is_async, timeout_secs=100.0)
    pool.run(_train, str(tmp_path / "run"), 0, 7, 1, is_async, timeout_secs=100.0)  # stops after the save of step 6
    resumed = pool.run(_train, str(tmp_path / "run"), 6, 9, 2, is_async, timeout_secs=100.0)
    assert whole[0][0] != whole[1][0]
    for (losses, weights), (later_losses, later_weights) in zip(whole, resumed, strict=True):
        assert later_losses == losses[6:]
        assert all(torch.equal(left, right) for left, right in zip(weights, later_weights, strict=True))


def _save(rank: int, root: str) -> None:
    model = nn.parallel.DistributedDataParallel(nn.EmbeddingBag(10, 4))
    manager = cnr.CheckpointManager(root, cnr.RowTracker(model))
    manager.save(1, {"model": model.state_dict(), "random": cnr.RandomState()})
    manager.close()


def test_another_number_of_ranks_is_refused_or_keeps_its_generators(
    tmp_path: Path, rank_pool: RankPools, caplog: pytest.LogCaptureFixture
) -> None:
    """As the user says; the message names both ways out."""
    rank_pool(2).run(_save, str(tmp_path), timeout_secs=60.0)
    model = nn.EmbeddingBag(10, 4)
    key_of_ddp = {f"module.{key}": value for key, value in model.state_dict().items()}
    with pytest.raises(cnr.StateMismatchError, match=r'by 2 ranks, and there are 1 now.*other_world_size="keep"'):
        cnr.restore_newest(tmp_path, {"model": key_of_ddp, "random": cnr.RandomState()})
    _seed(3)
    before = cnr.RandomState().state_dict()
    cnr.restore_newest(tmp_path, {"model": key_of_ddp, "random": cnr.RandomState(other_world_size="keep")})
    assert cnr.RandomState().state_dict() == before
    assert "their streams of numbers cannot go on: they stay as they are" in caplog.text


def _bytes_of(state: object) -> bytes:
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def test_what_is_no_state_of_generators_changes_none() -> None:
    """A typed error, and all generators are as before."""
    _seed(4)
    good = cnr.RandomState().state_dict()
    for state in ({}, {"python": 1}, {"numpy": ["MT19937", torch.zeros(3), 0, 0, 0.0]}, "text"):
        wrong = {name: _bytes_of(state) for name in good}
        with pytest.raises(cnr.DamagedError, match="random number generators"):
            cnr.RandomState().load_state_dict(wrong)
        assert cnr.RandomState().state_dict() == good
    with pytest.raises(cnr.DamagedError, match="must be bytes"):
        cnr.RandomState().load_state_dict(dict.fromkeys(good, 3))
    with pytest.raises(cnr.ConfigurationError, match="'other_world_size'"):
        cnr.RandomState(other_world_size="reseed")  # type: ignore[arg-type]

"""Learning rates of schedulers go on after a restore, or a warning says that they will not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torchrec.optim.keyed import KeyedOptimizer

import torchrec_cnr as cnr
from tests.support.models import Whole, backward, differing, plain_job, torchrec_job, whole
from tests.support.ranks import RankPools

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
WARNING = "the state has a learning rate scheduler (scheduler), but no 'param_groups' of an optimizer"


def _run(rank: int, root: str, num_steps: int, stops_at: int, with_rates: bool) -> Whole:
    """Train with a rate that falls at each step, in another job after ``stops_at``: the weights at the end."""
    step = 0
    while step < num_steps:
        job = torchrec_job(1 + step)
        optimizer = job.model.fused_optimizer
        scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
        state = {
            "model": job.model.state_dict(),
            "fused": optimizer.state_dict(),
            "scheduler": scheduler,
            "dense": job.optimizers["dense"],
            **({"groups": cnr.ParamGroups(optimizer)} if with_rates else {}),
        }
        manager = cnr.CheckpointManager(root, cnr.RowTracker(job.model), quantization=cnr.NoQuantization())
        assert (manager.restore(state) or 0) == step
        end = stops_at if step < stops_at else num_steps
        while step < end:
            step += 1
            backward(job, step)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        manager.save(step, state, force=True)
        manager.close()
    return whole({"model": job.model.state_dict(), "fused": optimizer.state_dict()["state"]})


def test_rates_of_fused_optimizers_go_on(tmp_path: Path, rank_pool: RankPools) -> None:
    """With ``ParamGroups``, bit for bit; without it, the first step has another rate, which a warning says."""
    ranks = rank_pool(2)
    (expected, _), (found, _), (wrong, _) = (
        ranks.run(_run, str(tmp_path / name), 5, stops_at, with_rates, timeout_secs=100.0)
        for name, stops_at, with_rates in (("whole", 5, True), ("stopped", 3, True), ("without", 3, False))
    )
    assert differing(found, expected) == []
    assert differing(wrong, expected) != []


@pytest.mark.parametrize("has_rates", [True, False])
def test_rates_that_are_not_saved_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, has_rates: bool) -> None:
    """Once; optimizers of torch have them in their state dict."""
    job = plain_job(1)
    optimizer = job.optimizers["all"]
    optimizer_state = {"optimizer": optimizer} if has_rates else {}
    state = {"model": job.model.state_dict(), "scheduler": StepLR(optimizer, 1), **optimizer_state}
    manager = cnr.CheckpointManager(tmp_path, cnr.RowTracker(job.model))
    for step in (1, 2):
        manager.save(step, state, force=True)
    manager.close()
    assert sum(WARNING in record.getMessage() for record in caplog.records) == (not has_rates)


def test_other_state_is_no_scheduler(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is said of a state without one."""
    job = plain_job(1)
    manager = cnr.CheckpointManager(tmp_path, cnr.RowTracker(job.model))
    manager.save(1, {"model": job.model.state_dict(), "last": {"lr": torch.ones(1)}}, force=True)
    manager.close()
    assert "learning rate" not in caplog.text


def test_other_optimizers_are_refused() -> None:
    """They have no names for parameters, and need none."""
    for optimizer, words in (
        (plain_job(1).optimizers["all"], "put them into the state as they are"),
        ("adam", "must be"),
    ):
        with pytest.raises(cnr.ConfigurationError, match=words):
            cnr.ParamGroups(optimizer)  # type: ignore[arg-type]


def test_parameters_that_share_a_group_must_agree() -> None:
    """One group cannot hold two rates; nothing is written then."""
    first, second = torch.zeros(2), torch.zeros(3)
    apart = KeyedOptimizer(
        {"a": first, "b": second}, {}, [{"params": [first], "lr": 0.9}, {"params": [second], "lr": 0.1}]
    )
    together = KeyedOptimizer({"a": first, "b": second}, {}, [{"params": [first, second], "lr": 0.5}])
    saved = cnr.ParamGroups(apart).state_dict()
    with pytest.raises(cnr.StateMismatchError, match="'b' has other values in the checkpoint"):
        cnr.ParamGroups(together).load_state_dict(saved)
    assert [group["lr"] for group in together.param_groups] == [0.5]
    cnr.ParamGroups(apart).load_state_dict(cnr.ParamGroups(together).state_dict())
    assert [group["lr"] for group in apart.param_groups] == [0.5, 0.5]


def test_groups_that_cannot_be_saved_are_refused() -> None:
    """A value that no load would accept, and a parameter without a name; numbers of numpy are numbers."""
    weight = torch.zeros(2)

    def groups(value: object, name: str = "a") -> cnr.ParamGroups:
        optimizer = KeyedOptimizer({name: weight}, {}, [{"params": [weight], "lr": value}])
        return cnr.ParamGroups(optimizer)

    saved = groups((np.float32(0.5), [torch.tensor(1.0), None])).state_dict()
    assert saved == {"param_groups": {"a": (("lr", (0.5, [1.0, None])),)}}
    assert type(saved["param_groups"]["a"][0][1][0]) is float
    with pytest.raises(cnr.ConfigurationError, match="'lr' of a group of 'optimizer' is a function"):
        groups(lambda step: 0.1).state_dict()
    nameless = groups(0.1)
    nameless.optimizer.param_groups[0]["params"].append(torch.zeros(3))
    with pytest.raises(cnr.ConfigurationError, match="a parameter that its 'params' does not name"):
        nameless.state_dict()


@pytest.mark.parametrize("state", [{"param_groups": None}, {}, {"param_groups": {}}])
def test_groups_that_were_not_saved_are_told(state: dict[str, Any]) -> None:
    """A typed error, and the groups are what they were."""
    weight = torch.zeros(2)
    optimizer = KeyedOptimizer({"a": weight}, {}, [{"params": [weight], "lr": 0.5}])
    with pytest.raises(cnr.StateMismatchError, match="load without ParamGroups"):
        cnr.ParamGroups(optimizer).load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5

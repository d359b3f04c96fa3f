"""Asynchronous saves with the stock ``dcp.async_save``: what training does behind them is in the next checkpoint."""

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torchrec_cnr as cnr
from tests import models
from tests.models import Job, Whole, differing, plain_job, state, torchrec_job, train, whole
from tests.ranks import RankPools

POLICIES = [cnr.Full(), cnr.OneShot(), cnr.Consecutive(), cnr.Intermittent(), cnr.Compacted()]
EXECUTORS = [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS]


def _build(kind: str, seed: int) -> Job:
    return torchrec_job(seed) if kind == "torchrec" else plain_job(seed, kind)


def _save_while_training(
    rank: int,
    root: str,
    kind: str,
    policy: cnr.Policy,
    executor: AsyncCheckpointerType,
    num_saves: int,
    staging_bytes: int = 1 << 30,
) -> list[tuple[Whole, str]]:
    """Train and save; what each save was of, and of what kind its checkpoint is."""
    job = _build(kind, seed=1)
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=policy)
    writer = models.writer(root, staging_bytes=staging_bytes)
    group = dist.new_group(backend="gloo")
    cuts, futures = [], []
    for number in range(num_saves):
        train(job, number)
        cuts.append(whole(state(job)))
        futures.append(
            dcp.async_save(
                state(job),
                checkpoint_id=f"{root}/{number}",
                storage_writer=writer,
                planner=planner,
                process_group=group,
                async_checkpointer_type=executor,
            )
        )
        train(job, 1000 + number)
        assert differing(cuts[-1], whole(state(job)))
    for future in futures:
        future.result(timeout=100)  # type: ignore[union-attr]  # no stager of ours returns a future
    planner.settle()
    assert tracker.head is not None
    assert tracker.head.ref.path == f"{root}/{num_saves - 1}"
    writer.close()
    tracker.close()
    return [(cut, cnr.read_checkpoint(f"{root}/{number}").kind) for number, cut in enumerate(cuts)]


def _check(rank: int, root: str, kind: str, cuts: list[tuple[Whole, str]]) -> None:
    target = _build(kind, seed=2)
    for number, (cut, _) in enumerate(cuts):
        assert differing(models.load(target, f"{root}/{number}"), cut) == []


@pytest.mark.parametrize("executor", EXECUTORS, ids=lambda executor: executor.value)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("kind", ["torchrec", "sgd", "adagrad"])
def test_a_checkpoint_is_of_the_moment_of_its_cut(
    tmp_path: Path, rank_pool: RankPools, kind: str, policy: cnr.Policy, executor: AsyncCheckpointerType
) -> None:
    """Training goes on at once; each checkpoint holds what was there when ``async_save`` was called, bit for bit."""
    ranks = rank_pool(2 if kind == "torchrec" else 1)
    found = ranks.run(_save_while_training, str(tmp_path), kind, policy, executor, 5)
    kinds = [kind for _, kind in found[0]]
    assert kinds[0] == "baseline"
    assert ("delta" in kinds) != isinstance(policy, cnr.Full)
    ranks.run(_check, str(tmp_path), kind, found[0])


@pytest.mark.parametrize("staging_bytes", [0, 700, 2_000])
def test_training_waits_for_what_exceeds_the_budget(tmp_path: Path, rank_pool: RankPools, staging_bytes: int) -> None:
    """Tables that must not be copied are written before training goes on."""
    ranks = rank_pool(2)
    executor = AsyncCheckpointerType.THREAD
    found = ranks.run(_save_while_training, str(tmp_path), "torchrec", cnr.Consecutive(), executor, 4, staging_bytes)
    assert [kind for _, kind in found[0]] == ["baseline", "delta", "delta", "delta"]
    ranks.run(_check, str(tmp_path), "torchrec", found[0])

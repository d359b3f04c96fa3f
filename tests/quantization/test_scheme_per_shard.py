"""A scheme belongs to a shard: ranks quantize the shards of one table each in its own way, and all of it loads."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torchrec_cnr as cnr
from tests.support import models
from tests.support.models import Whole, state, torchrec_job, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.format.manifest import Shard
from torchrec_cnr.saving import writer as writer_module
from torchrec_cnr.saving.agreement import RankPlan

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

TABLE = "model.ebc.embedding_bags.t0.weight"
BY_RANK = (cnr.NoQuantization(), cnr.Asymmetric(4))


def _save(rank: int, root: str) -> list[Whole]:
    """Ranks have other schemes here, which a save refuses; a search gives shards of one table others, too."""

    def agreeing(**plan: Any) -> RankPlan:
        return RankPlan(**{**plan, "quantization": "any"})

    with mock.patch.object(writer_module, "RankPlan", agreeing):
        return _save_by_rank(rank, root)


def _save_by_rank(rank: int, root: str) -> list[Whole]:
    """A baseline and a delta, each rank with a scheme of its own, in the delta with the other's."""
    job = torchrec_job(1, "row")
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    cuts = []
    for number in range(2):
        train(job, number)
        cuts.append(whole(state(job)))
        writer = models.writer(f"{root}/{number}", quantization=BY_RANK[(rank + number) % 2])
        dcp.save(state(job), storage_writer=writer, planner=planner)
    tracker.close()
    dist.barrier()
    return cuts


def _load(rank: int, path: str, sharding: str) -> Whole:
    job = torchrec_job(99, sharding)
    return models.load(job, path)


def _shards(path: Path) -> tuple[Shard, ...]:
    return cnr.read_checkpoint(path).manifest.tensors[TABLE].shards


@pytest.mark.parametrize("sharding", ["row", "column", "table"])
def test_shards_of_a_table_may_have_different_schemes(tmp_path: Path, rank_pool: RankPools, sharding: str) -> None:
    """Each rank's rows come back as its own scheme has them, under any sharding; the other rank's are not touched."""
    pool = rank_pool(2)
    first, second = pool.run(_save, str(tmp_path))[0]
    assert [shard.scheme for shard in _shards(tmp_path / "0")] == list(BY_RANK)
    assert [shard.scheme for shard in _shards(tmp_path / "1")] == list(reversed(BY_RANK))
    baseline = pool.run(_load, str(tmp_path / "0"), sharding)[0][TABLE]
    num_exact = _shards(tmp_path / "0")[0].box.num_rows
    assert torch.equal(baseline[:num_exact], first[TABLE][:num_exact])
    assert _is_coarse(baseline[num_exact:], first[TABLE][num_exact:])
    delta = pool.run(_load, str(tmp_path / "1"), sharding)[0][TABLE]
    modified = (first[TABLE] != second[TABLE]).any(dim=1)
    upper = torch.arange(len(delta)) >= num_exact
    assert int((modified & upper).sum()) > 0
    assert int((modified & ~upper).sum()) > 0
    assert torch.equal(delta[modified & upper], second[TABLE][modified & upper])
    assert _is_coarse(delta[modified & ~upper], second[TABLE][modified & ~upper])
    assert torch.equal(delta[~modified], baseline[~modified])


def _is_coarse(loaded: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether values came back as 4 bits have them: near, but not the same."""
    steps = (saved.amax(dim=1) - saved.amin(dim=1)) / 15
    return not torch.equal(loaded, saved) and bool(((loaded - saved).abs() <= 0.51 * steps[:, None] + 1e-3).all())

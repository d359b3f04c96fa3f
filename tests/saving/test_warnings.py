"""Warnings of torch: none of them names a line of this package."""

import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torchrec_cnr as cnr
from tests.support import models
from tests.support.models import state, torchrec_job, train
from tests.support.ranks import RankPools


def _warned_lines(rank: int, root: str) -> list[str]:
    """Save, load and follow sharded tables: the lines of this package that warnings name."""
    job, served = torchrec_job(1, "row"), torchrec_job(2, "row")
    group = dist.new_group(backend="gloo")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        tracker = cnr.RowTracker(job.model)
        manager = cnr.CheckpointManager(f"{root}/run", tracker, quantization=cnr.Asymmetric(4))
        for step in range(2):
            train(job, step)
            manager.save(step, state(job))
        manager.async_save(2, state(job))
        manager.wait()
        manager.restore(state(job))
        manager.close()
        tracker.close()
        future: Any = dcp.async_save(
            state(job), checkpoint_id=f"{root}/0", storage_writer=models.writer(f"{root}/0"), process_group=group
        )
        future.result()
        models.load(served, f"{root}/0")
        subscriber = cnr.RowSubscriber(served.model, f"{root}/run", allow_partial_load=True)
        subscriber.update()
        subscriber.close()
    package = Path(cnr.__file__).parent
    return [
        f"{each.filename}:{each.lineno}: {each.message}" for each in found if package in Path(each.filename).parents
    ]


def test_no_warning_names_a_line_of_the_package(tmp_path: Path, rank_pool: RankPools) -> None:
    """Each operation on a ShardedTensor warns, so that its size and dtype are taken from its metadata."""
    assert rank_pool(2).run(_warned_lines, str(tmp_path)) == [[]] * 2

"""TorchRec's train pipelines: the manager's few lines work in them, although a pipeline looks ahead of its step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

import torchrec_cnr as cnr
from examples.dlrm_model import Trainer, build_trainer, to_batch
from examples.synthetic_clicks import SyntheticClicks
from tests.support.models import Whole, differing, whole
from tests.support.ranks import RankPools

PIPELINES = {"base": TrainPipelineBase, "sparse_dist": TrainPipelineSparseDist}
_BATCH, _NUM_ROWS = 16, 300


def _batches(trainer: Trainer, stream: SyntheticClicks, rank: int, first: int) -> Iterator[Batch]:
    """This rank's batches from a step on."""
    for step in range(first, 100):
        samples = next(iter(stream.samples(2 * _BATCH * step)))
        yield to_batch(samples[rank * _BATCH : (rank + 1) * _BATCH], trainer.features, trainer.num_rows)


def _train(rank: int, root: str, seed: int, pipeline_name: str, is_async: bool, last: int) -> tuple[int, Whole, Whole]:
    """Resume, and train until a step: from where, the state then, and what the newest checkpoint loads as."""
    stream = SyntheticClicks(seed=1)
    trainer = build_trainer(stream, _NUM_ROWS, 8, "mixed", seed)
    tracker = cnr.RowTracker(trainer.model)
    manager = cnr.CheckpointManager(root, tracker, every_steps=3, keep=cnr.Keep(last=2))
    first = manager.restore(trainer.state({})) or 0
    pipeline: Any = PIPELINES[pipeline_name](trainer.model, trainer.dense_optimizer, torch.device("cpu"))
    batches = _batches(trainer, stream, rank, first + 1)
    save = manager.async_save if is_async else manager.save
    for step in range(first + 1, last + 1):
        pipeline.progress(batches)
        save(step, lambda: trainer.state({}))
    manager.close()
    tracker.close()
    loaded = build_trainer(stream, _NUM_ROWS, 8, "mixed", seed=99).state({})
    assert cnr.restore_newest(root, loaded) is not None
    return first, whole(trainer.state({})), whole(loaded)


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_run_in_a_pipeline_is_resumed(tmp_path: Path, rank_pool: RankPools, name: str, is_async: bool) -> None:
    """Rows that a pipeline has looked up for a later step are not missed when that step modifies them."""
    ranks = rank_pool(2)
    _, in_one_go, loaded = ranks.run(_train, str(tmp_path / "one"), 1, name, is_async, 12)[0]
    assert differing(loaded, in_one_go) == []
    _, half_way, _ = ranks.run(_train, str(tmp_path / "two"), 1, name, is_async, 6)[0]
    first, in_two, _ = ranks.run(_train, str(tmp_path / "two"), 2, name, is_async, 12)[0]
    assert first == 6
    assert differing(half_way, in_one_go)
    assert differing(in_two, in_one_go) == []
    kinds = [cnr.read_checkpoint(tmp_path / "one" / f"step-{step}").committed.kind for step in (9, 12)]
    assert kinds == ["delta", "delta"]

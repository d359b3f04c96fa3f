"""Warnings: torch's name no line of this package, and ours tell of rows that codes cannot represent."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torchrec_cnr as cnr
from tests.quantization.test_transform_coded import few_dimensions
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


@pytest.mark.parametrize(
    ("num_nan", "text"),
    [(0, ""), (1, "1 rows are stored exactly"), (190, "codes cannot represent 95 % of its rows")],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_rows_without_codes_are_told_of_once(
    tmp_path: Path, num_nan: int, text: str, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Few of them are stored exactly; with many, the table is. A run that has diverged must not go on in silence."""
    table = torch.nn.EmbeddingBag(200, 16)
    with torch.no_grad():
        table.weight[:num_nan] = float("nan")
    planner = cnr.CNRSavePlanner(cnr.RowTracker(table), policy=cnr.Full())
    writer = models.writer(tmp_path / "0", quantization=cnr.Asymmetric(4))
    caplog.set_level("INFO")
    warned = []
    for number in range(2):
        caplog.clear()
        if is_async:
            models.save_behind(table.state_dict(), str(tmp_path / str(number)), writer, planner).result(timeout=100)
        else:
            dcp.save(table.state_dict(), checkpoint_id=tmp_path / str(number), storage_writer=writer, planner=planner)
        told = [record for record in caplog.records if "codes cannot represent" in record.getMessage()]
        assert len(told) == (num_nan > 0)
        assert all(text in record.getMessage() for record in told)
        warned += [record.levelname for record in told]
    assert warned == ["WARNING", "INFO"][: 2 * (num_nan > 0)]


def test_exact_rows_of_a_transform_are_told_of_as_such(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are those with values of too many steps. No fp16 is stored with these codes."""
    table = few_dimensions(3_000)
    table[4] = -1e9
    for number, rule in enumerate((cnr.TransformCoded(), cnr.AdaptiveAsymmetric(4))):
        caplog.clear()
        writer = models.writer(tmp_path / str(number), quantization={"*": rule})
        dcp.save({"table": table}, storage_writer=writer, no_dist=True)
        (told,) = [record.getMessage() for record in caplog.records if "codes cannot represent" in record.getMessage()]
        assert ("1 rows are stored exactly" in told, "values of more than 32,767 steps" in told, "fp16" in told) == (
            True,
            number == 0,
            number == 1,
        )

"""Every kind of model, saved and loaded under every other: see ``tests.properties.matrix`` for the cells."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torchrec.optim.keyed import KeyedOptimizerWrapper

import torchrec_cnr as cnr
from tests.properties.matrix import COLLISIONS, REFUSALS, Cell, Refusal, all_cells, is_meant, pairwise_cells, refusal
from tests.repository.pages.support_page import PAGE, page
from tests.support import zoo
from tests.support.models import Whole, differing, writer
from tests.support.ranks import RankPools
from tests.support.zoo import MODULES, OPTIMIZERS, SHARDINGS, Kind, ZooJob

SHARDED = Kind("EmbeddingBagCollection", "row_wise", "RowWiseAdagrad")


def _train_and_save(rank: int, root: str, kind: Kind) -> None:
    job = zoo.build(kind, seed=1)
    tracker = cnr.RowTracker(job.model)
    for number in range(2):
        zoo.train(job, seed=number)
        saved = zoo.save(job, tracker, f"{root}/{number}")
    _assert_small(saved, root, kind)
    _write_contents(job, f"{root}/1.pt")
    tracker.close()


def _go_on(rank: int, root: str, kind: Kind) -> None:
    job = zoo.build(kind, seed=2)
    tracker = cnr.RowTracker(job.model)
    _load(job, f"{root}/1", tracker)
    zoo.train(job, seed=2)
    _assert_small(zoo.save(job, tracker, f"{root}/2"), root, kind)  # loading has modified nothing
    _write_contents(job, f"{root}/2.pt")
    tracker.close()


def _come_back(rank: int, root: str, kind: Kind) -> None:
    job = zoo.build(kind, seed=3)
    tracker = cnr.RowTracker(job.model)
    _load(job, f"{root}/2", tracker)
    tracker.close()


def _assert_small(saved: cnr.Checkpoint, root: str, kind: Kind) -> None:
    """A checkpoint is a delta of some rows."""
    assert saved.kind == "delta"
    if not kind.optimizer.endswith("Adam"):  # which moves rows without a gradient, too
        assert 0 < saved.num_rows < cnr.read_checkpoint(f"{root}/0").num_rows


def _write_contents(job: ZooJob, path: str) -> None:
    found = zoo.contents(job)
    if dist.get_rank() == 0:
        torch.save(found, path)


def _load(job: ZooJob, path: str, tracker: cnr.RowTracker) -> None:
    """Load a checkpoint: before, nothing is what was saved, and afterwards everything is."""
    wanted: Whole = torch.load(f"{path}.pt")
    before = zoo.contents(job)
    tables = [name for name in wanted if name.startswith("model.") and name.endswith(".weight")]
    assert tables
    assert {*tables, "progress.step"} <= set(differing(before, wanted))
    zoo.take(job, zoo.load(job, path, tracker))
    _assert_same(zoo.contents(job), wanted)


def _assert_same(got: Whole, wanted: Whole) -> None:
    missing = set(got) ^ set(wanted)
    assert all(name.endswith(".step") for name in missing), missing  # fused kernels count none
    for name in set(got) & set(wanted):
        if isinstance(wanted[name], torch.Tensor):  # the mean over column shards is rounded
            assert torch.allclose(got[name], wanted[name], rtol=1e-6, atol=0), name
        else:
            assert got[name] == wanted[name], name


def _run(rank_pool: RankPools, root: Path, cell: Cell) -> None:
    num_source, num_target = cell.num_ranks
    rank_pool(num_source).run(_train_and_save, str(root), cell.source)
    rank_pool(num_target).run(_go_on, str(root), cell.target)
    # An id map that fewer ranks have trained is not divided among more.
    num_back = num_target if cell.source.module in COLLISIONS else num_source
    rank_pool(num_back).run(_come_back, str(root), cell.source)


# Every run takes each third cell, the full suite all of them: a second each.
THIRD = [
    pytest.param(cell, id=str(cell), marks=[pytest.mark.slow] if number % 3 else [])
    for number, cell in enumerate(pairwise_cells())
]


@pytest.mark.parametrize("cell", THIRD)
def test_a_lineage_goes_from_one_kind_to_another_and_back(tmp_path: Path, rank_pool: RankPools, cell: Cell) -> None:
    """Baseline and delta load into another sharding on other ranks, which goes on with a delta, and back."""
    _run(rank_pool, tmp_path, cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", list(all_cells()), ids=str)
def test_every_sharding_loads_into_every_other(tmp_path: Path, rank_pool: RankPools, cell: Cell) -> None:
    """The whole product of modules, shardings and optimizers."""
    _run(rank_pool, tmp_path, cell)


def _gotten_state(job: ZooJob) -> dict[str, Any]:
    optimizers = [one._optimizer for _, one in job.optimizer.optimizers if isinstance(one, KeyedOptimizerWrapper)]
    model, stepped = get_state_dict(job.model.module, optimizers)
    return {"model": model, "stepped": stepped, "fused": job.model.fused_optimizer.state_dict()}


def _get_state_dict(rank: int, root: str, kind: Kind) -> None:
    job = zoo.build(kind, seed=1)
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    for number in range(2):
        zoo.train(job, seed=number)
        dcp.save(_gotten_state(job), storage_writer=writer(f"{root}/{number}"), planner=planner)
    saved = cnr.read_checkpoint(f"{root}/1")
    assert (saved.kind, saved.num_rows < cnr.read_checkpoint(f"{root}/0").num_rows) == ("delta", True)
    tracker.close()
    other = zoo.build(kind, seed=2)
    other.progress = job.progress
    end = zoo.contents(job)
    assert differing(zoo.contents(other), end)
    dcp.load(_gotten_state(other), storage_reader=cnr.CNRStorageReader(f"{root}/1"), planner=cnr.CNRLoadPlanner())
    assert differing(zoo.contents(other), end) == []


@pytest.mark.parametrize("form", ["sharded tensors", "DTensors"])
@pytest.mark.parametrize("sharding", ["row_wise", "data_parallel"])
def test_state_that_get_state_dict_returns(tmp_path: Path, rank_pool: RankPools, sharding: str, form: str) -> None:
    """PyTorch's own functions name the state of ``torch.optim`` optimizers by FQNs."""
    kind = Kind("EmbeddingBagCollection", sharding, "Adagrad", form)
    rank_pool(2).run(_get_state_dict, str(tmp_path), kind)


def _change_learning_rate(rank: int, root: str) -> None:
    job = zoo.build(SHARDED, seed=1)
    job.optimizer.save_param_groups(True)
    for group in job.optimizer.param_groups:
        group["lr"] = 0.125
    zoo.train(job, 1)
    dcp.save(zoo.state(job), storage_writer=writer(f"{root}/0"), planner=cnr.CNRSavePlanner())
    other = zoo.build(SHARDED, seed=2)
    other.optimizer.save_param_groups(True)
    assert 0.125 not in [group["lr"] for group in other.optimizer.param_groups]
    zoo.take(other, zoo.load(other, f"{root}/0"))
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.125] * len(other.optimizer.param_groups)


def test_param_groups_travel_whole(tmp_path: Path, rank_pool: RankPools) -> None:
    """Those of fused and of other optimizers, where TorchRec is told to have them in its state dicts."""
    rank_pool(2).run(_change_learning_rate, str(tmp_path))


def _outcomes(rank: int, kinds: list[Kind]) -> list[str]:
    """What building and training each kind ends with."""
    return [_outcome(kind) for kind in kinds]


def _outcome(kind: Kind) -> str:
    try:
        job = zoo.build(kind, seed=1)
        for seed in range(4):
            zoo.train(job, seed)
    except Exception as error:  # noqa: BLE001 - whatever TorchRec, FBGEMM and PyTorch refuse with
        return f"{type(error).__name__}: {error}"
    return "works"


def _is_as_said(outcome: str, expected: Refusal | None) -> bool:
    if expected is None:
        return outcome == "works"
    return outcome.startswith(f"{expected.error}: ") and expected.match in outcome


def test_what_cannot_be_built_is_refused_as_said(rank_pool: RankPools) -> None:
    """Every module, sharding and optimizer works here, or is refused with the error that the matrix tells."""
    kinds = [kind for kind in (Kind(*factors) for factors in product(MODULES, SHARDINGS, OPTIMIZERS)) if is_meant(kind)]
    outcomes = rank_pool(2).run(_outcomes, kinds, timeout_secs=240.0)
    wrong = [
        f"{kind}: {outcome[:100]!r}, expected {expected}"
        for of_rank in outcomes
        for kind, outcome in zip(kinds, of_rank, strict=True)
        if not _is_as_said(outcome, expected := refusal(kind))
    ]
    assert not wrong, "\n".join(wrong)
    assert {refusal(kind) for kind in kinds} >= {one for one in REFUSALS if not one.forms}


def _outcome_of_a_load(rank: int, root: str, kind: Kind) -> str:
    """What a load of a kind into itself ends with."""
    try:
        job = zoo.build(kind, seed=1)
        tracker = cnr.RowTracker(job.model)
        zoo.save(job, tracker, f"{root}/0")
        zoo.load(job, f"{root}/0", tracker)
    except Exception as error:  # noqa: BLE001 - whatever TorchRec refuses with
        return f"{type(error).__name__}: {error}"
    return "works"


def test_forms_of_state_dicts_are_refused_as_said(tmp_path: Path, rank_pool: RankPools) -> None:
    """What TorchRec cannot do with some forms fails with its errors, not later."""
    num_shown = 0
    for one in (one for one in REFUSALS if one.forms):
        kind = Kind((one.modules or tuple(MODULES))[0], "table_column_wise", "Adagrad", one.forms[0])
        assert refusal(kind, 4) is one
        for outcome in rank_pool(4 if one.num_ranks > 1 else 2).run(
            _outcome_of_a_load, str(tmp_path / str(num_shown)), kind
        ):
            assert _is_as_said(outcome, one)
        num_shown += 1
    assert num_shown == 2


@pytest.mark.long
def test_the_page_is_up_to_date() -> None:
    """docs/reference/support.md is what ``python -m tests.repository.pages.support_page`` writes."""
    assert PAGE.read_text() == page()

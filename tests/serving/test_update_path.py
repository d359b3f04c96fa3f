"""Updates of sharded models, and past checkpoints that are corrupt, compacted or replaced."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec.inference.modules import quantize_embeddings

import torchrec_cnr as cnr
from tests.loading.quantized_models import float_model, load, load_quantized, looked_up, quantized, step_of
from tests.serving.served_models import DIM, NUM_ROWS, SCHEMES, Served, all_rows, following, save_tables
from tests.support import hand_made, lineages, models
from tests.support.faults import flip
from tests.support.hand_made import Content, Part
from tests.support.models import differing, torchrec_job, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.quantization import NoQuantization

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]


def _serve_on_ranks(rank: int, root: str, shardings: Sequence[str], served: str) -> list[str]:
    """A job that is resumed with one sharding after another, followed by a model with its own."""
    target = torchrec_job(50, served)
    small = quantized(float_model(60 + rank), torch.qint8)
    kinds, number = [], 0
    with following(target.model, root) as subscriber, following(small, root) as quantizing:
        for sharding in shardings:
            job = torchrec_job(number, sharding)
            tracker = cnr.RowTracker(job.model)
            planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
            if number:
                dcp.load(
                    {"model": job.model.state_dict()},
                    storage_reader=cnr.CNRStorageReader(f"{root}/{number - 1}"),
                    planner=cnr.CNRLoadPlanner(tracker),
                )
            for _ in range(2):
                train(job, number)
                path = f"{root}/{number}"
                writer = models.writer(path, quantization=cnr.Asymmetric(8))
                dcp.save({"model": job.model.state_dict()}, storage_writer=writer, planner=planner)
                applied = subscriber.update()
                assert applied is not None
                kinds.append(applied.kind)
                fresh = torchrec_job(70, served)
                dcp.load(
                    {"model": fresh.model.state_dict()},
                    storage_reader=cnr.CNRStorageReader(path),
                    planner=cnr.CNRLoadPlanner(),
                )
                expected, got = whole({"model": fresh.model.state_dict()}), whole({"model": target.model.state_dict()})
                assert differing(got, expected) == []
                assert quantizing.update() is not None
                number += 1
            tracker.close()
        _assert_close(small, f"{root}/{number - 1}")
    return kinds


def _assert_close(model: nn.Module, path: str) -> None:
    trained = float_model(101)
    planner = cnr.CNRLoadPlanner(allow_partial_load=True)
    reader = cnr.CNRStorageReader(path)
    dcp.load({"model": trained.state_dict()}, storage_reader=reader, planner=planner, no_dist=True)
    for table, rows in looked_up(trained).items():
        assert bool(((looked_up(model)[table] - rows).abs() <= step_of(rows, 8) * 1.01 + 1e-6).all()), table


@pytest.mark.parametrize(
    ("shardings", "served"), [(("row", "column"), "table"), (("table", "row"), "column"), (("mixed", "table"), "row")]
)
def test_a_sharded_model_follows_a_job_that_is_sharded_otherwise(
    tmp_path: Path, rank_pool: RankPools, shardings: Sequence[str], served: str
) -> None:
    """Each rank applies its own shards, also when the job goes on with another sharding; deltas stay deltas."""
    for kinds in rank_pool(2).run(_serve_on_ranks, str(tmp_path), shardings, served):
        assert kinds == ["baseline", "delta", "delta", "delta"]


def test_a_damaged_delta_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    """It is named in a typed error, as often as it is tried; the next one on a good parent is applied."""
    model = quantized(float_model(1), torch.qint8)
    good = save_tables(tmp_path / "0", 0, SCHEMES[0], None, 1.0)
    with following(model, tmp_path) as subscriber:
        subscriber.update()
        before = looked_up(model)
        bad = save_tables(tmp_path / "1", 1, SCHEMES[0], good, 0.5)
        flip(next((tmp_path / "1").glob("*.safetensors")), -3)
        for _ in range(2):
            with pytest.raises(cnr.DamagedError, match="crc32c"):
                subscriber.update()
            assert all(torch.equal(rows, before[table]) for table, rows in looked_up(model).items())
            assert (subscriber.applied, subscriber.lag.num_checkpoints) == (str(tmp_path / "0"), 1)
            assert isinstance(subscriber.failure, cnr.DamagedError)
        save_tables(tmp_path / "2", 2, SCHEMES[0], bad, 0.5)
        with pytest.raises(cnr.DamagedError, match="crc32c"):
            subscriber.update()
        save_tables(tmp_path / "3", 3, SCHEMES[0], good, 0.5)
        applied = subscriber.update()
        assert applied is not None
        assert (applied.kind, applied.num_checkpoints, subscriber.failure) == ("delta", 1, None)
    expected = load_quantized(quantized(float_model(2), torch.qint8), tmp_path / "3")
    assert all(torch.equal(rows, expected[table]) for table, rows in looked_up(model).items())


def test_what_is_damaged_is_passed_over_for_what_is_not(tmp_path: Path) -> None:
    """The newest that can be read is applied, and the error comes when nothing is left to do."""
    model = float_model(1)
    first = save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    second = save_tables(tmp_path / "1", 1, SCHEMES[2], first, 0.5)
    save_tables(tmp_path / "2", 2, SCHEMES[2], second, 0.5)
    (tmp_path / "2" / "manifest.json").write_bytes(b"{}")
    with following(model, tmp_path) as subscriber:
        applied = subscriber.update()
        assert applied is not None
        assert applied.path == str(tmp_path / "1")
        with pytest.raises(cnr.DamagedError):
            subscriber.update()
    expected = load(float_model(2), tmp_path / "1")
    assert all(torch.equal(rows, expected[table]) for table, rows in looked_up(model).items())


def test_what_is_damaged_after_it_was_applied_stays_applied(tmp_path: Path) -> None:
    """Nothing needs to be read of it any more, so that nothing is wrong."""
    save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    with following(float_model(1), tmp_path) as subscriber:
        subscriber.update()
        (tmp_path / "0" / "manifest.json").write_bytes(b"{}")
        assert subscriber.update() is None
        assert (subscriber.lag.num_checkpoints, subscriber.failure) == (0, None)


@pytest.mark.parametrize("loses_packs", [False, True])
def test_a_compaction_behind_its_back(tmp_path: Path, loses_packs: bool) -> None:
    """Links are read as they were committed if they are there still; else the lineage is read as it is now."""
    run = lineages.HotLineage(tmp_path, cnr.Asymmetric(4))
    model = nn.Module()
    model.register_buffer("t", torch.zeros(lineages.ROWS, lineages.COLS))
    with following(model, tmp_path, key=None) as subscriber:
        run.save(1)
        assert subscriber.update() is not None
        run.save(3)
        cnr.compact(run.path, self_contained=True, max_ratio=1.0)
        if loses_packs:
            lineages.remove_all_but(run.path)
        applied = subscriber.update()
        assert applied is not None
        assert (applied.kind, applied.num_checkpoints) == (("baseline", 1) if loses_packs else ("delta", 3))
    assert torch.equal(model.t, run.load()[0])


def test_a_checkpoint_that_was_replaced_under_its_name(tmp_path: Path) -> None:
    """Another one in the same directory, as after a restart that cleared it, is found and applied whole."""
    model = float_model(1)
    first = save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    save_tables(tmp_path / "1", 1, SCHEMES[2], first, 0.5)
    with following(model, tmp_path) as subscriber:
        subscriber.update()
        for file in (tmp_path / "1").iterdir():
            file.unlink()
        save_tables(tmp_path / "1", 2, SCHEMES[2], first, 0.5)
        applied = subscriber.update()
        assert applied is not None
        assert (applied.path, applied.kind, applied.num_checkpoints) == (str(tmp_path / "1"), "baseline", 2)
    expected = load(float_model(2), tmp_path / "1")
    assert all(torch.equal(rows, expected[table]) for table, rows in looked_up(model).items())


def test_pieces_of_quantized_rows_are_not_enough(tmp_path: Path) -> None:
    """A delta that has some columns of a row only is quantized from the whole lineage, as a load does it."""
    fqn, size = "model.ebc.embedding_bags.a.weight", (NUM_ROWS, DIM)
    boxes = (Box((0, 0), (NUM_ROWS, 4)), Box((0, 4), (NUM_ROWS, 4)))
    generator = torch.Generator().manual_seed(0)

    def save(number: int, parent: Checkpoint | None, rows: Sequence[Sequence[int]]) -> Checkpoint:
        parts = [
            Part(box, torch.randn(box.sizes, generator=generator), mask, NoQuantization())
            for box, chosen in zip(boxes, rows, strict=True)
            for mask in [None if parent is None else hand_made.mask_of(chosen, NUM_ROWS)]
        ]
        other = {"model.ebc.embedding_bags.b.weight": hand_made.whole(torch.ones(size), is_table=True)}
        content = {fqn: Content(size, tuple(parts), is_table=True), **other}
        return hand_made.write(tmp_path / str(number), content, parent=parent)

    model, fresh = (quantize_embeddings(Served(), torch.qint8, inplace=False) for _ in range(2))
    newest = first = save(0, None, ((), ()))
    kinds = []
    with following(model, tmp_path) as subscriber:
        columns: list[tuple[Sequence[int], Sequence[int], bool]] = [
            ((1, 5), (1, 5), False),
            ((1, 5, 6), (1, 5, 6), True),
            ((1, 5), (1, 9), False),
            ((7, 8), (7, 8), False),
        ]
        for number, (left, right, is_on_first) in enumerate(columns, 1):
            subscriber.update()
            newest = save(number, first if is_on_first else newest, (left, right))
            applied = subscriber.update()
            assert applied is not None
            kinds.append(applied.kind)
            planner = cnr.CNRLoadPlanner(inference=cnr.InferenceTables(fresh))
            reader = cnr.CNRStorageReader(newest.store.url)
            dcp.load({"model": fresh.state_dict()}, storage_reader=reader, planner=planner)
            assert torch.equal(model(all_rows()), fresh(all_rows()))
    assert kinds == ["delta", "delta", "baseline", "delta"]


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """What checkpoints do not have, or have otherwise, is an error, and nothing is overwritten."""
    save_tables(tmp_path / "0", 0, SCHEMES[2], None, 1.0)
    model = nn.Module()
    model.over, model.other = nn.Linear(32, 1), nn.Linear(2, 2)
    before = model.over.weight.detach().clone()
    with following(model, tmp_path) as subscriber, pytest.raises(cnr.StateMismatchError, match="allow_partial_load"):
        subscriber.update()
    with following(float_model(1), tmp_path, key="modle") as subscriber, pytest.raises(cnr.StateMismatchError):
        subscriber.update()
    model.over.bias = nn.Parameter(torch.zeros(3))
    with following(model, tmp_path, allow_partial_load=True) as subscriber, pytest.raises(cnr.StateMismatchError):
        subscriber.update()
    assert torch.equal(model.over.weight, before)
    with pytest.raises(cnr.ConfigurationError, match="interval_secs"):
        cnr.RowSubscriber(model, tmp_path, interval_secs=0)

"""Parts of the benchmarks of accuracy and of movement: were one of them wrong, their figures would mean nothing."""

import gzip
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import torchrec_cnr as cnr
from benchmarks.runners.quantization.accuracy import check_same
from benchmarks.runners.quantization.movement import movement
from benchmarks.support.confidence_intervals import num_seeds_for, relative_change
from benchmarks.support.data import clicks as clicks_module
from benchmarks.support.data.click_model import ADAGRAD_EPSILON, TABLE_LEARNING_RATE, ClickModel, labels, update_rows
from benchmarks.support.data.clicks import BATCH_CLICKS, Batch, Clicks, Lookup, batches, read_clicks
from benchmarks.support.data.tiled_rows import NOISE, tiled
from benchmarks.support.jobs.policy_runs import FIRST_SHARE, least_written
from benchmarks.support.jobs.restored_runs import (
    Restores,
    auc_of,
    decoded_rows,
    restore_steps,
    train,
    with_other_last_bits,
)
from benchmarks.support.limited_store import limited_store, remove
from benchmarks.support.residuals import ResidualReader, Tally, entropy, plain_codes
from benchmarks.support.transformed_rows import TransformedRows, TransformTally
from torchrec_cnr.quantization.row_transform import basis_bytes, transform_bytes

SCHEMES = [cnr.AdaptiveAsymmetric(2), cnr.AdaptiveAsymmetric(3), cnr.AdaptiveAsymmetric(4), cnr.Asymmetric(8)]


def some_clicks(num_batches: int) -> Clicks:
    """Few readers and articles, so that rows are modified again and again."""
    random = np.random.default_rng(0)
    num = num_batches * BATCH_CLICKS
    readers, articles = random.integers(0, 300, num), random.integers(0, 80, num)
    return Clicks(readers, articles, random.integers(0, 12, (num, 2)), 60 * np.arange(num, dtype=np.float64))


def table_of(num_rows: int, dim: int, seed: int = 0) -> Tensor:
    """float32 [num_rows, dim], as unlike each other as rows of a trained table."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, dim, generator=generator) * torch.rand(num_rows, 1, generator=generator)


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=30))
def test_auc_is_the_share_of_pairs_in_order(samples: list[tuple[int, bool]]) -> None:
    """It is the chance that a click is above what is none, an equal one counting half, as all pairs together tell."""
    clicked = [score for score, is_click in samples if is_click]
    others = [score for score, is_click in samples if not is_click]
    if clicked and others:
        wins = [(score > other) + 0.5 * (score == other) for score in clicked for other in others]
        logits, is_click = (torch.tensor(column, dtype=torch.float64) for column in zip(*samples, strict=True))
        assert auc_of(logits, is_click) == pytest.approx(sum(wins) / len(wins))


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=2, max_size=12))
def test_interval_is_that_of_a_paired_t_test(pairs: list[tuple[float, float]]) -> None:
    """Mean and ends are SciPy's, of the changes in per cent."""
    found = relative_change(*zip(*pairs, strict=True))
    changes = [100 * (value - base) / base for value, base in pairs]
    assert found.mean == pytest.approx(np.mean(changes), abs=1e-9)
    if np.std(changes) > 1e-6:
        expected = stats.ttest_1samp(changes, 0).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_interval_of_one_pair_is_refused() -> None:
    """One seed tells nothing of how far off its mean is; pairs must be pairs."""
    with pytest.raises(ValueError, match="two pairs"):
        relative_change([1.0], [2.0])
    with pytest.raises(ValueError, match="argument 2"):
        relative_change([1.0, 2.0], [2.0])


def test_narrower_intervals_take_more_seeds() -> None:
    """A tenth of the width takes a hundred times as many; with as many as that, the interval is about this narrow."""
    assert num_seeds_for(0.1, spread=0.5) == 96
    assert num_seeds_for(0.01, spread=0.5) == 9604
    assert stats.t.ppf(0.975, 95) * 0.5 / 96**0.5 == pytest.approx(0.1, rel=0.02)


def test_restores_are_evenly_spaced() -> None:
    """Neither at the beginning nor at the end; more than there are steps for are refused."""
    assert restore_steps(100, 0) == set()
    assert restore_steps(100, 1) == {50}
    assert restore_steps(100, 3) == {25, 50, 75}
    assert len(restore_steps(292, 100)) == 100
    with pytest.raises(ValueError, match="do not fit"):
        restore_steps(10, 30)


@pytest.mark.parametrize("scheme", [*SCHEMES, cnr.NoQuantization()], ids=str)
@pytest.mark.filterwarnings("ignore:torch.distributed")  # no process group: a single process saves and loads
def test_decoded_rows_are_those_of_a_load(scheme: cnr.Scheme, tmp_path: Path) -> None:
    """Bit by bit what ``dcp.load`` gives for a table that ``dcp.save`` stored, exact rows too."""
    table = table_of(700, 16)
    table[3, 5] = torch.nan
    table[600] = 1e6
    table[600, 0] = 3.0
    state = {"table": table}
    writer = cnr.CNRStorageWriter(str(tmp_path), quantization={"*": scheme})
    dcp.save(state, checkpoint_id=tmp_path / "step-1", storage_writer=writer)  # type: ignore[attr-defined]
    loaded = {"table": torch.zeros_like(table)}
    dcp.load(loaded, storage_reader=cnr.CNRStorageReader(str(tmp_path / "step-1")))  # type: ignore[attr-defined]
    expected = decoded_rows(table, torch.arange(len(table)), scheme)
    assert torch.equal(loaded["table"].view(torch.int32), expected.view(torch.int32))
    assert torch.equal(expected[:3], table[:3]) == (scheme == cnr.NoQuantization())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_restoring_modified_rows_is_restoring_all(scheme: cnr.Scheme) -> None:
    """Rows that were not modified since the restore before would come back as they are."""
    if isinstance(scheme, cnr.AdaptiveAsymmetric):
        scheme = cnr.AdaptiveAsymmetric.best(scheme.bits)  # a chosen search depends on which rows are encoded
    ours, theirs = (ClickModel((300, 80, 12), 16, seed=0) for _ in range(2))
    modified = Restores(ours, lambda table, rows: decoded_rows(table, rows, scheme))
    for batch in batches(some_clicks(3), 0, 3 * BATCH_CLICKS, seed=0):
        ours.train(batch)
        modified.mark(batch)
        modified.restore()
        theirs.train(batch)
        for table in theirs.tables:
            table.copy_(decoded_rows(table, torch.arange(len(table)), scheme))
    check_same(ours, theirs)


def test_bit_exact_restores_change_nothing_and_others_do() -> None:
    """The state after a run is the same with exact restores, and another one with last bits changed."""
    models = []
    trained = batches(some_clicks(6), 0, 6 * BATCH_CLICKS, seed=0)
    exact = Restores(
        ClickModel((300, 80, 12), 8, seed=0), lambda table, rows: decoded_rows(table, rows, cnr.NoQuantization())
    )
    others = Restores(ClickModel((300, 80, 12), 8, seed=0), with_other_last_bits)
    for restores, num_restores in ((exact, 5), (others, 5)):
        train(restores.model, trained, restores, num_restores)
        models.append(restores.model)
    plain = Restores(ClickModel((300, 80, 12), 8, seed=0), with_other_last_bits)
    train(plain.model, trained, plain, 0)
    check_same(models[0], plain.model)
    assert exact.error_sum == plain.error_sum == 0 < others.error_sum < 1e-10
    with pytest.raises(RuntimeError, match="bit-exact restores changed"):
        check_same(models[1], plain.model)


def test_error_sums_are_those_of_tables_and_of_stored_rows() -> None:
    """Squared errors over squared values, of all tables together and of the rows that were encoded."""
    model = ClickModel((300, 80, 12), 8, seed=0)
    restores = Restores(model, lambda table, rows: table[rows] * 0.9)
    restores.restore()
    assert (restores.error_sum, restores.stored_error_sum) == pytest.approx((0.01, 0.01), rel=1e-4)
    (batch,) = batches(some_clicks(1), 0, BATCH_CLICKS, seed=0)
    model.tables[0][:] = 0  # all that the batch does not hold
    model.tables[0][batch.lookups[0].rows[0]] = 1
    nothing = [Lookup(look.rows[:0], look.places) for look in batch.lookups[1:]]
    restores.mark(Batch((batch.lookups[0], *nothing), batch.dense))
    whole = sum(float(table.square().sum()) for table in model.tables)
    restores.restore()
    assert restores.error_sum == pytest.approx(0.01 + 0.01 * 8 / whole, rel=1e-4)
    assert restores.stored_error_sum == pytest.approx(0.02, rel=1e-4)


def test_tables_have_torchrecs_row_wise_adagrad() -> None:
    """Rows and sums after some steps are those of TorchRec's optimizer, up to rounding."""
    table, state = table_of(20, 8), torch.zeros(20)
    parameter = nn.Parameter(table.clone())
    theirs = RowWiseAdagrad([parameter], lr=TABLE_LEARNING_RATE, eps=ADAGRAD_EPSILON)
    for seed in range(4):
        rows = torch.arange(seed, 20, 3)
        gradient = table_of(len(rows), 8, seed)
        update_rows(table, state, rows, gradient)
        parameter.grad = torch.zeros_like(table)
        parameter.grad[rows] = gradient
        theirs.step()
    torch.testing.assert_close(table, parameter.detach())
    assert not torch.equal(table, table_of(20, 8))


def test_model_learns_what_readers_click() -> None:
    """Where each reader clicks one article only, clicks are told from their partners."""
    clicks = some_clicks(40)
    clicks.articles[:] = clicks.readers % 80
    *trained, later = batches(clicks, 0, len(clicks), seed=0)
    model = ClickModel(clicks.num_rows(), 8, seed=0)
    before = auc_of(model.predict(later), labels(2 * BATCH_CLICKS))
    losses = train(model, trained, Restores(model, with_other_last_bits), 0)
    assert before < 0.6 < 0.9 < auc_of(model.predict(later), labels(2 * BATCH_CLICKS))
    assert losses[0] == pytest.approx(np.log(2), rel=0.1)


def test_batches_pair_each_click_with_one_before_it() -> None:
    """The same seed draws the same partners, another one others; each is the article of an earlier click."""
    clicks = some_clicks(2)
    clicks.articles[:] = np.arange(len(clicks))
    first, again, other = (batches(clicks, BATCH_CLICKS, 2 * BATCH_CLICKS, seed)[0] for seed in (0, 0, 1))
    articles = [batch.lookups[1].rows[batch.lookups[1].places[:, 0]] for batch in (first, again, other)]
    clicked, partners = articles[0].split(BATCH_CLICKS)
    assert clicked.tolist() == list(range(BATCH_CLICKS, 2 * BATCH_CLICKS))
    assert (partners < clicked).all()
    assert torch.equal(articles[0], articles[1])
    assert not torch.equal(articles[0], articles[2])
    assert labels(2 * BATCH_CLICKS).tolist() == [1.0] * BATCH_CLICKS + [0.0] * BATCH_CLICKS


HEADER = "user_id,session_id,click_article_id,click_timestamp,click_environment,click_deviceGroup,click_os,a,b,c\n"


def test_clicks_are_read_from_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers, articles and times are the columns; equal values of two columns of context are different rows."""
    path = tmp_path / "clicks.csv.gz"
    lines = "7,1,50,1500000000500,4,1,17,1,25,2\n9,2,60,1500000001000,4,3,17,1,4,2\n"
    path.write_bytes(gzip.compress((HEADER + lines).encode()))
    monkeypatch.setattr(clicks_module, "CLICKS", path)
    clicks = read_clicks(10)
    assert clicks.num_rows() == (10, 61, 8)
    assert (clicks.readers.tolist(), clicks.articles.tolist()) == ([7, 9], [50, 60])
    assert clicks.secs.tolist() == [1_500_000_000.5, 1_500_000_001.0]
    assert clicks.context.tolist() == [[0, 1, 3, 4, 6, 7], [0, 2, 3, 4, 5, 7]]


def test_made_up_clicks_are_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no file, half of the clicks are on what the context leads to."""
    monkeypatch.setattr(clicks_module, "CLICKS", tmp_path / "none")
    clicks, again = read_clicks(2000), read_clicks(2000)
    assert np.array_equal(clicks.articles, again.articles)
    assert 0.5 < (clicks.articles % 8 == clicks.context[:, 0]).mean() < 0.65
    assert (np.diff(clicks.secs) > 0).all()
    assert clicks.num_rows()[2] == 48


@given(st.lists(st.integers(0, 6), max_size=60))
def test_entropy_is_that_of_a_direct_count(symbols: Sequence[int]) -> None:
    """The mean over symbols of how unlikely each is, in bits."""
    counts = Counter(symbols)
    direct = np.mean([-np.log2(counts[symbol] / len(symbols)) for symbol in symbols]) if symbols else 0.0
    assert entropy(counts.values()) == pytest.approx(direct, abs=1e-12)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_reader_of_residuals_is_off_by_half_a_step_at_most(bits: int) -> None:
    """Whatever rows did in how many checkpoints, and errors do not add up."""
    table = table_of(200, 16)
    reader = ResidualReader(torch.zeros_like(table), bits)
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        rows = torch.randperm(200, generator=generator)[:120]
        table[rows] += 0.1 * table_of(120, 16, seed=2)
        tally = reader.store(table, rows)
        steps = cnr.Asymmetric(bits).encode(table, rows).codes[:, -4:-2].contiguous().view(torch.float16).float()
        assert ((reader.values[rows] - table[rows]).abs() <= 0.5001 * steps).all()
        assert tally.num_rows == 120
    assert reader.store(table, rows).num_zero == 120  # nothing moved, nothing is stored


def test_tally_counts_flags_residuals_and_steps() -> None:
    """Of two rows of four elements, one does not move: a bit a row, and two bits an element of the other."""
    before = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(2, 1)
    reader = ResidualReader(before, 2)  # steps of 1
    after = before.clone()
    after[1] = torch.tensor([0.0, 2.0, 0.2, 3.0])
    tally = reader.store(after, torch.tensor([0, 1]))
    assert (tally.num_rows, tally.num_zero) == (2, 1)
    assert tally.residuals == {0: 2, 1: 1, -2: 1}
    assert tally.residual_bits == pytest.approx(1 / 4 + 0.5 * 1.5)
    assert tally.step_bits == pytest.approx(0.5 * 16 / 4)
    assert tally.squared_error == pytest.approx(0.2**2)
    doubled = tally + tally
    assert doubled.residual_bits == pytest.approx(tally.residual_bits)
    assert doubled.num_rows == 4
    assert Tally(4).residual_bits == 0


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_plain_codes_are_those_that_decode(bits: int) -> None:
    """Scale times code plus bias is what the scheme decodes."""
    scheme = cnr.Asymmetric(bits)
    codes = scheme.encode(table_of(50, 10)).codes
    scale, bias = codes[:, -4:].contiguous().view(torch.float16).float().split(1, dim=1)
    torch.testing.assert_close(plain_codes(codes, bits, 10) * scale + bias, scheme.decode(codes, 10, torch.float32))


def test_movement_is_relative_to_the_row() -> None:
    """A row that moved by half of its norm, one that did not move, and one that is where it was: at zero."""
    rows, before = (
        torch.tensor([[3.0, 4.0], [1.0, 1.0], [0.0, 0.0]]),
        torch.tensor([[3.0, 1.5], [1.0, 1.0], [0.0, 0.0]]),
    )
    assert movement(rows, before).tolist() == [0.5, 0.0, 0.0]


@pytest.mark.parametrize("num_rows", [7, 50, 123])
def test_tiled_rows_are_those_of_a_table_with_noise(num_rows: int) -> None:
    """Each row is that of the table, but for about a thousandth of its norm, and no two rows are equal."""
    rows = table_of(50, 64)
    table = tiled(rows, num_rows)
    expected = rows.repeat(3, 1)[:num_rows]
    moved = (table - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(moved.max()) < 2 * NOISE
    assert float(moved.min()) > NOISE / 2
    assert len(table.unique(dim=0)) == num_rows


@pytest.mark.long
def test_limited_store_takes_so_many_bytes_per_second() -> None:
    """Files of two threads follow one another, and another store does not wait for them."""
    slow, fast = limited_store(1e6), limited_store(1e12)
    fs = fsspec.filesystem("limited")
    began = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        writes = [threads.submit(fs.pipe_file, f"{slow}/{name}", bytes(150_000)) for name in "ab"]
        fs.pipe_file(f"{fast}/a", b"abc")
        assert not all(write.done() for write in writes)
    assert time.monotonic() - began >= 0.3
    assert all(write.result() is None for write in writes)
    assert fs.cat_file(f"{slow}/b") == bytes(150_000)
    remove(slow)
    assert not fs.exists(f"{slow}/b")
    assert fs.cat_file(f"{fast}/a") == b"abc"
    remove(fast)


def test_transforms_count_when_they_are_learned() -> None:
    """The first checkpoint has transform and basis; the next one of the same rows has the rows alone."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(3000, 4, generator=generator) @ torch.randn(4, 64, generator=generator)
    transformed, rows = TransformedRows(4), torch.arange(3000)
    first, second = transformed.store(table, rows), transformed.store(table, rows)
    assert (first.num_values, first.num_bases, second.num_bases) == (table.numel(), 1, 0)
    assert first.num_bytes - second.num_bytes == transform_bytes(64) + basis_bytes(64)
    assert second.bits < 2
    assert second.error < 1.1
    assert (first + second).num_bytes == first.num_bytes + second.num_bytes
    assert transformed.store(table, rows[:0]) == TransformTally()


def test_rows_without_structure_count_as_uniform_codes() -> None:
    """All values equal: the rule has no error to meet, and takes uniform codes."""
    tally = TransformedRows(4).store(torch.full((100, 64), 0.5), torch.arange(100))
    assert tally.bits == 4 + 32 / 64
    assert (tally.num_bases, tally.error) == (0, 1.0)


def test_a_perfect_compaction_writes_between_a_delta_and_a_full_checkpoint() -> None:
    """Without dead rows it rewrites everything, with any number of them only what was modified."""
    written = [least_written(share) for share in (0.0, 0.05, 0.1, 0.2, 1e6)]
    assert written == sorted(written, reverse=True)
    assert written[0] == pytest.approx(1.0)
    assert written[-1] == pytest.approx(FIRST_SHARE, rel=0.02)
    assert 0.35 < least_written(0.1) < 0.39  # found by simulation of such a compaction: 0.36

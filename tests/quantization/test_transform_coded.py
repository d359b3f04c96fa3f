"""Transform-coded rows: never larger nor worse than the scheme whose error they meet, each row within its bound."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torchrec_cnr as cnr
from torchrec_cnr.format.blob_bytes import split
from torchrec_cnr.quantization import NoQuantization, Scheme, SchemeRules, TransformCoded, Transformed
from torchrec_cnr.quantization.learned_transform import MAX_ZONE, ErrorLimit, learned
from torchrec_cnr.quantization.packed_rows import STRIP_ROWS, least_bytes, pack_rows, unpack_rows
from torchrec_cnr.quantization.row_transform import Basis, RowTransform
from torchrec_cnr.quantization.uniform import mean_error, row_errors
from torchrec_cnr.saving.encoding import choose_scheme

RULES = [
    TransformCoded(),
    TransformCoded(cnr.AdaptiveAsymmetric(2)),
    TransformCoded(cnr.AdaptiveAsymmetric(3)),
    TransformCoded(cnr.Asymmetric(8)),
    TransformCoded(cnr.ByExpectedRestores(2)),
    TransformCoded(cnr.ByErrorBudget(10)),
]
NUM_ROWS, DIM = 3_000, 32


def _random() -> np.random.Generator:
    return np.random.default_rng(0)


def few_dimensions(num_rows: int = NUM_ROWS, seed: int = 0) -> Tensor:
    """Rows like those of trained tables: of different norms, and mostly in few dimensions."""
    random = np.random.default_rng(seed)
    basis = np.linalg.qr(_random().normal(size=(DIM, DIM)))[0]
    scales = np.exp(-np.arange(DIM) / 3) + 0.002
    norms = np.exp(random.normal(size=(num_rows, 1)) * 0.8)
    return torch.from_numpy(random.normal(size=(num_rows, DIM)) * scales @ basis * norms).float()


def _huge_component() -> Tensor:
    rows = few_dimensions()
    rows[:, 5] += torch.where(torch.arange(NUM_ROWS) % 700 == 3, 1e4, 0.0)
    return rows


def _huge_row() -> Tensor:
    rows = few_dimensions()
    rows[17] *= 1e6
    return rows


def _two_clusters() -> Tensor:
    random = torch.Generator().manual_seed(0)
    centers = torch.randn(2, DIM, generator=random)
    return centers[torch.arange(NUM_ROWS) % 2] + 1e-4 * torch.randn(NUM_ROWS, DIM, generator=random)


def _large_first_row(factor: float) -> Callable[[], Tensor]:
    def rows() -> Tensor:
        table = torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(1))
        table[0] *= factor
        return table

    return rows


def _large_coded_rows() -> Tensor:
    """Rows that a transform must store exactly, and uniform codes need not."""
    rows = few_dimensions()
    chosen = torch.arange(NUM_ROWS) % 50 == 7
    rows[chosen] = 1e5 * torch.randint(0, 2, (int(chosen.sum()), DIM), generator=torch.Generator().manual_seed(1))
    return rows


ROWS: Mapping[str, Callable[[], Tensor]] = {
    "few dimensions": few_dimensions,
    "gaussian": lambda: torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(1)),
    "uniform": lambda: torch.rand(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(1)),
    "constant": lambda: torch.full((NUM_ROWS, DIM), 0.25),
    "constant rows": lambda: torch.rand(NUM_ROWS, 1, generator=torch.Generator().manual_seed(1)).expand(-1, DIM) + 0,
    "zeros": lambda: torch.zeros(NUM_ROWS, DIM),
    "huge component": _huge_component,
    "huge row": _huge_row,
    "large first row": _large_first_row(1e3),
    "very large first row": _large_first_row(3e4),
    "large coded rows": _large_coded_rows,
    "norms over four decades": lambda: few_dimensions() * torch.logspace(-4, 0, NUM_ROWS)[:, None],
    "half of the rows small": lambda: (
        few_dimensions() * torch.where(torch.arange(NUM_ROWS) % 2 == 0, 1.0, 1e-3)[:, None]
    ),
    "two clusters": _two_clusters,
    "tiny": lambda: few_dimensions() * 1e-30,
    "tinier": lambda: few_dimensions() * 1e-38,
    "large": lambda: few_dimensions() * 1e4,
    "one row": lambda: few_dimensions(1),
    "few rows": lambda: few_dimensions(30),
}


def limit_of(rows: npt.NDArray[np.float64], mean_error: float) -> ErrorLimit:
    """A limit of the mean error, in which all rows count alike."""
    return ErrorLimit.of(np.linalg.norm(rows, axis=1), np.full(len(rows), mean_error), math.inf)


def sample_and_limit(mean_error: float) -> tuple[npt.NDArray[np.float64], ErrorLimit]:
    rows = few_dimensions().double().numpy()
    return rows, limit_of(rows, mean_error)


def size_and_error(scheme: Scheme, rows: Tensor) -> tuple[int, float]:
    """Bytes of the rows in a data file, and the mean l2 norm of their errors, exact rows among them."""
    encoded = scheme.encode(rows)
    exact_bytes = len(encoded.exact) * (4 + 4 * DIM)
    error = float(row_errors(scheme, rows).mean())
    if isinstance(scheme, Transformed):
        return len(pack_rows(encoded.codes.view(torch.int16).numpy(), scheme.known)) + exact_bytes, error
    divided = split(encoded.codes.numpy(), scheme.tail_bytes(DIM, rows.dtype)) if scheme.row_bytes else None
    return (encoded.codes.numel() if divided is None else len(divided)) + exact_bytes, error


def chosen_by_a_save(
    rule: cnr.Quantization, rows: Tensor, known: RowTransform | None = None, num_restores: int = 0
) -> Scheme:
    """The scheme that a save of a table with these rows chooses."""
    return choose_scheme(SchemeRules.of(rule), "table", True, rows, None, num_restores, known=known)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("kind", ROWS)
def test_it_is_never_larger_nor_worse(kind: str, rule: TransformCoded) -> None:
    """Than the scheme that it is measured by, of which 2 % of error are left to chance: a sample chose the step."""
    rows = ROWS[kind]()
    other, chosen = chosen_by_a_save(rule.error_of, rows), chosen_by_a_save(rule, rows)
    other_size, other_error = size_and_error(other, rows)
    size, error = size_and_error(chosen, rows)
    if isinstance(chosen, Transformed):
        size += len(chosen.known.data) + (len(chosen.known.basis.data) if chosen.known.basis else 0)
    assert size <= other_size
    assert error <= 1.02 * other_error + 1e-12
    norms = rows.double().norm(dim=1).clamp(min=1e-300)
    assert float((row_errors(chosen, rows) / norms).mean()) <= 2.1 * float((row_errors(other, rows) / norms).mean())
    assert isinstance(chosen, Transformed) or kind not in ("few dimensions", "gaussian", "huge row")


def test_rows_that_are_stored_exactly_stay_exact() -> None:
    """If codes of the other scheme are as large as the values, neither loses anything."""
    rows = few_dimensions()[:, :2].half()
    assert chosen_by_a_save(TransformCoded(cnr.Asymmetric(8)), rows) == NoQuantization()


def test_few_dimensions_take_few_bits() -> None:
    """Where it helps, it helps much."""
    rows = few_dimensions(20_000)
    size, _ = size_and_error(TransformCoded().choose(lambda: rows[:2048], 0), rows)
    assert 8 * size / rows.numel() < 1.2


@given(scale=st.floats(-12, 12), seed=st.integers(0, 2**32), has_basis=st.booleans(), step=st.floats(-3, 0))
@settings(deadline=None)
def test_each_row_keeps_its_bound(scale: float, seed: int, has_basis: bool, step: float) -> None:
    """0.85 steps times the root of the number of columns, for rows that the sample did not have; or it is exact."""
    sample, rows = few_dimensions(200, 0).double().numpy(), few_dimensions(300, seed) * 10.0**scale
    basis = Basis.principal(sample) if has_basis else None
    transform = learned(sample, limit_of(sample, float(np.linalg.norm(sample, axis=1).mean()) * 10.0**step), basis)
    scheme = Transformed.by(transform)
    encoded = scheme.encode(rows)
    decoded = scheme.decode(encoded.codes, DIM, torch.float32)
    errors = (decoded - rows).double().norm(dim=1)
    errors[encoded.exact] = 0.0
    bound = (0.5 + MAX_ZONE) * transform.step * DIM**0.5
    assert bool((errors <= bound + 1e-6 * rows.double().norm(dim=1)).all())
    assert bool((rows[encoded.exact].abs().sum(1) > 30_000 * transform.step).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_saving_what_was_loaded_changes_nothing(dtype: torch.dtype) -> None:
    """The numbers of decoded rows are the same, by the same transform."""
    rows = few_dimensions().to(dtype)
    scheme = TransformCoded().choose(lambda: rows[:2048], 0)
    assert isinstance(scheme, Transformed)
    codes = scheme.encode(rows).codes
    decoded = scheme.decode(codes, DIM, torch.float32)
    assert torch.equal(scheme.encode(decoded).codes, codes)
    assert not torch.equal(decoded, rows.float())


def test_columns_and_positions_are_those_asked_for() -> None:
    """Some rows and columns decode to what all of them do."""
    rows = few_dimensions()
    scheme = TransformCoded().choose(lambda: rows[:2048], 0)
    codes = scheme.encode(rows, torch.tensor([7, 3, 2_000])).codes
    whole = scheme.decode(codes, DIM, torch.float32)
    target = torch.zeros(5, 9)
    scheme.decode_into(codes, torch.tensor([2, 0]), 4, target, torch.tensor([1, 4]))
    assert torch.equal(target[[1, 4]], whole[[2, 0], 4:13])
    assert not target[[0, 2, 3]].any()


def test_a_known_transform_is_kept_until_rows_drift() -> None:
    """Another step if the error is too large; after a tenth more bits, a new basis that is worth its bytes."""
    rule = TransformCoded()
    first = chosen_by_a_save(rule, few_dimensions(50_000))
    assert isinstance(first, Transformed)
    known = first.known
    again = chosen_by_a_save(rule, few_dimensions(50_000, seed=1), known)
    assert isinstance(again, Transformed)
    assert again.digest == first.digest
    smaller = chosen_by_a_save(rule, few_dimensions(50_000, seed=1) * 0.7, known)
    assert isinstance(smaller, Transformed)
    assert smaller.digest != first.digest  # with the old step, the error would be too large
    assert smaller.basis == first.basis
    turned = few_dimensions(50_000, seed=1).flip(1)
    drifted = chosen_by_a_save(rule, turned, known)
    assert isinstance(drifted, Transformed)
    assert drifted.basis not in (None, first.basis)
    few_rows = chosen_by_a_save(rule, turned[:30], known)
    assert not isinstance(few_rows, Transformed) or few_rows.basis in (None, first.basis)


def test_a_basis_is_found_once_there_is_one() -> None:
    """Training begins with random rows, which have none."""
    random_rows = torch.randn(50_000, DIM, generator=torch.Generator().manual_seed(1)) * 0.01
    first = chosen_by_a_save(TransformCoded(), random_rows)
    assert isinstance(first, Transformed)
    assert first.basis is None
    later = chosen_by_a_save(TransformCoded(), few_dimensions(50_000) + random_rows, first.known)
    assert isinstance(later, Transformed)
    assert later.basis is not None


def test_drift_adds_up() -> None:
    """Rows that turn little by little: each step keeps the error with the old basis, but not for ever."""
    start, end = few_dimensions(20_000), few_dimensions(20_000, seed=1).flip(1)
    known, bases = None, []
    for share in np.linspace(0, 1, 12):
        chosen = chosen_by_a_save(TransformCoded(), start * (1 - share) + end * share, known)
        assert isinstance(chosen, Transformed)
        known = chosen.known
        bases.append(chosen.basis)
    assert 2 < len(set(bases)) < 12
    alone = chosen_by_a_save(TransformCoded(), end)
    assert size_and_error(chosen, end)[0] <= 1.12 * size_and_error(alone, end)[0]


def test_small_deltas_use_a_known_transform() -> None:
    """Although the means of few rows differ by chance."""
    first = chosen_by_a_save(TransformCoded(), few_dimensions(50_000))
    assert isinstance(first, Transformed)
    kept = [chosen_by_a_save(TransformCoded(), few_dimensions(60, seed), first.known) == first for seed in range(50)]
    assert sum(kept) >= 35
    without = replace(first.known, is_stored=False)  # its bytes count then
    assert not isinstance(chosen_by_a_save(TransformCoded(), few_dimensions(60), without), Transformed)
    assert not isinstance(chosen_by_a_save(TransformCoded(), few_dimensions(60)), Transformed)


@pytest.mark.parametrize("factor", [1e-5, 1e5])
def test_a_known_transform_of_other_sizes_is_replaced(factor: float) -> None:
    """Rows that it would store exactly, or as zeros."""
    first = chosen_by_a_save(TransformCoded(), few_dimensions(50_000))
    assert isinstance(first, Transformed)
    rows = few_dimensions(50_000, seed=1) * factor
    chosen = chosen_by_a_save(TransformCoded(), rows, first.known)
    assert isinstance(chosen, Transformed)
    assert not len(chosen.encode(rows).exact)
    assert size_and_error(chosen, rows)[0] <= 1.05 * size_and_error(chosen_by_a_save(TransformCoded(), rows), rows)[0]


def test_a_known_transform_of_other_columns_is_not_used() -> None:
    """Such as after a table was sharded anew by columns."""
    first = chosen_by_a_save(TransformCoded(), few_dimensions(50_000))
    assert isinstance(first, Transformed)
    chosen = chosen_by_a_save(TransformCoded(), few_dimensions(50_000)[:, : DIM // 2].contiguous(), first.known)
    assert isinstance(chosen, Transformed)
    assert chosen.known.num_cols == DIM // 2


def test_a_rule_sets_the_error_by_the_number_of_restores() -> None:
    """The error is that of the bits that the rule chooses, also where a known transform takes fewer bits, or more."""
    rule, known, found = TransformCoded(cnr.ByExpectedRestores(10)), None, []
    for seed, num_restores in enumerate((0, 10, 11, 12, 3)):
        rows = few_dimensions(50_000, seed)
        scheme = chosen_by_a_save(rule, rows, known, num_restores)
        assert isinstance(scheme, Transformed)
        wanted = mean_error(cnr.Asymmetric(8) if num_restores > 10 else cnr.AdaptiveAsymmetric.best(4), rows)
        assert 0.9 * wanted < mean_error(scheme, rows) <= 1.03 * wanted
        known = scheme.known
        found.append((scheme.digest, scheme.basis))
    coarse, same, fine, still_fine, again_coarse = found
    assert coarse == same
    assert fine == still_fine
    assert len({coarse[0], fine[0], again_coarse[0]}) == 3
    assert coarse[1] == fine[1] == again_coarse[1]  # the basis is the same


def test_a_finer_step_is_kept_where_another_takes_more_bytes() -> None:
    """Such as for a few rows, which are not worth a transform of their own."""
    first = chosen_by_a_save(TransformCoded(cnr.AdaptiveAsymmetric(4)), few_dimensions(50_000))
    assert isinstance(first, Transformed)
    rule = TransformCoded(cnr.AdaptiveAsymmetric(3))
    assert chosen_by_a_save(rule, few_dimensions(60), first.known) == first
    assert chosen_by_a_save(rule, few_dimensions(50_000), first.known) != first


def test_a_budget_that_nothing_keeps_stores_rows_exactly() -> None:
    """As without a transform, whether one is known or not."""
    rows = few_dimensions()
    known = TransformCoded().choose(lambda: rows, 0)
    assert isinstance(known, Transformed)
    rule = TransformCoded(cnr.ByErrorBudget(3, budget=0))
    assert rule.choose(lambda: rows, 0) == NoQuantization()
    assert chosen_by_a_save(rule, rows, known.known) == NoQuantization()
    assert isinstance(chosen_by_a_save(TransformCoded(cnr.ByErrorBudget(3)), rows), Transformed)


def test_without_learning_a_transform_is_kept_or_not() -> None:
    """It is kept where its error is about what is asked, and it is known how many bytes its rows should take."""
    rows, four_bits = few_dimensions(), cnr.AdaptiveAsymmetric.best(4)
    first = TransformCoded(four_bits).choose(lambda: rows, 0)
    assert isinstance(first, Transformed)
    known = first.known

    def is_kept(rows: Tensor, error_of: Scheme = four_bits, known: RowTransform = known) -> bool:
        found = TransformCoded().choose_known(rows, error_of, known)
        assert found is None or found == first
        return found is not None

    assert is_kept(rows)
    assert is_kept(rows * 1.2)
    for factor in (0.0, 0.7, 2.0, 1e5, float("nan")):
        assert not is_kept(rows * factor), factor
    assert not is_kept(rows, cnr.AdaptiveAsymmetric.best(3))
    assert not is_kept(rows, cnr.Asymmetric(8))
    assert not is_kept(rows, NoQuantization())
    assert not is_kept(rows[:0])
    assert not is_kept(rows[:, : DIM // 2].contiguous())
    assert not is_kept(rows, known=replace(known, bits_per_value=0.0))


@given(num_rows=st.integers(0, 40), seed=st.integers(0, 2**32))
@settings(deadline=None)
def test_blobs_come_back(num_rows: int, seed: int) -> None:
    """With whatever follows them."""
    transform = learned(*sample_and_limit(0.1), None)
    numbers = np.random.default_rng(seed).integers(-40, 40, (num_rows, DIM)).astype(np.int16)
    data = np.concatenate([pack_rows(numbers, transform), np.arange(5, dtype=np.uint8)])
    found, rest = unpack_rows(data, num_rows, 5, transform, "blob")
    assert (found == numbers).all()
    assert rest.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_bytes", [0, 1, 4, 6, 260])
def test_other_numbers_of_bytes_are_refused(num_bytes: int) -> None:
    """Exact rows follow the numbers, as many bytes as the manifest says, and nothing else."""
    transform = learned(*sample_and_limit(0.1), None)
    numbers = np.random.default_rng(0).integers(-40, 40, (30, DIM)).astype(np.int16)
    data = np.concatenate([pack_rows(numbers, transform), np.zeros(num_bytes, dtype=np.uint8)])
    with pytest.raises(cnr.DamagedError, match="5 of exact rows expected"):
        unpack_rows(data, 30, 5, transform, "blob")


def test_strips_are_decoded_apart() -> None:
    """A blob of several strips, the last one shorter. Those without wanted rows are not decoded."""
    rows = few_dimensions(2 * STRIP_ROWS + 5)
    scheme = TransformCoded().choose(lambda: rows[:2048], 0)
    assert isinstance(scheme, Transformed)
    numbers = scheme.encode(rows).codes.view(torch.int16).numpy()
    data = pack_rows(numbers, scheme.known)
    found, rest = unpack_rows(data, len(rows), 0, scheme.known, "blob")
    assert (found == numbers).all()
    assert len(rest) == 0
    data[least_bytes(len(rows)) : least_bytes(len(rows)) + 40] ^= 0xFF  # in the words of the first strip
    wanted = np.array([STRIP_ROWS, 2 * STRIP_ROWS + 4])
    found, rest = unpack_rows(data, len(rows), 0, scheme.known, "blob", wanted)
    assert (found[STRIP_ROWS:] == numbers[STRIP_ROWS:]).all()
    with pytest.raises(cnr.DamagedError, match="corrupt"):
        unpack_rows(data, len(rows), 0, scheme.known, "blob", wanted - STRIP_ROWS)


@given(data=st.data())
@settings(deadline=None)
def test_corrupt_blobs_are_refused_or_other_rows(data: st.DataObject) -> None:
    """Any change of bytes, or of their number, gives a typed error or other numbers, never a crash."""
    transform = learned(*sample_and_limit(0.1), None)
    numbers = _random().integers(-9, 9, (30, DIM)).astype(np.int16)
    blob = pack_rows(numbers, transform)
    changed = blob.copy()
    for place in data.draw(st.lists(st.integers(0, len(blob) - 1), min_size=1, max_size=4, unique=True)):
        changed[place] ^= data.draw(st.integers(1, 255))
    changed = changed[: data.draw(st.integers(0, len(blob)))]
    with suppress(cnr.DamagedError):
        found, rest = unpack_rows(changed, 30, 0, transform, "blob")
        assert not len(rest)
        assert not (found == numbers).all()


@given(data=st.data())
def test_corrupt_transforms_are_refused(data: st.DataObject) -> None:
    """The digest in the manifest would show it, too; this shows that nothing invalid reaches the kernels."""
    rows = few_dimensions().double().numpy()
    transform = learned(rows, limit_of(rows, 0.1), Basis.principal(rows))
    assert transform.basis is not None
    stored = bytearray(transform.data)
    assert RowTransform.parsed(bytes(stored), transform.basis, "x").digest == transform.digest
    place = data.draw(st.integers(0, len(stored) - 1))
    stored[place] ^= data.draw(st.integers(1, 255))
    scheme = Transformed.by(transform)
    with pytest.raises(cnr.DamagedError, match="corrupt"):
        scheme.with_data(bytes(stored), transform.basis, DIM, "x")
    with pytest.raises(cnr.DamagedError, match="corrupt"):
        scheme.with_data(transform.data, None, DIM, "x")
    with pytest.raises(cnr.DamagedError, match="corrupt"):
        scheme.with_data(transform.data[:-1], transform.basis, DIM, "x")


def test_bases_that_are_not_finite_are_refused() -> None:
    """As are those of another size."""
    with pytest.raises(cnr.DamagedError, match="not finite"):
        Basis.parsed(np.full((DIM, DIM), np.nan, np.float32).tobytes(), DIM, "x")
    with pytest.raises(cnr.DamagedError, match="not a basis"):
        Basis.parsed(bytes(12), DIM, "x")


@pytest.mark.parametrize("error_of", [cnr.NoQuantization(), cnr.KMeans(4), TransformCoded(), 4, None])
def test_other_errors_are_refused(error_of: object) -> None:
    """Only uniform schemes have errors to meet, and the rules that choose them."""
    with pytest.raises(cnr.ConfigurationError, match="must be a uniform scheme, ByExpectedRestores or ByErrorBudget"):
        TransformCoded(error_of)  # type: ignore[arg-type]


def test_the_mean_error_is_met() -> None:
    """On the sample it is met exactly, and nearly used up."""
    rows = few_dimensions()
    other = cnr.AdaptiveAsymmetric(4).choose(lambda: rows, 0)
    error = mean_error(other, rows)
    chosen = TransformCoded().choose(lambda: rows, 0)
    assert 0.97 * error < mean_error(chosen, rows) <= error

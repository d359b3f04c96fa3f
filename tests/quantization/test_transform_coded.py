"""Transform-coded rows: never larger nor worse than the scheme whose error they meet, each row within its bound."""

from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torchrec_cnr as cnr
from torchrec_cnr.quantization import Scheme, TransformCoded, Transformed
from torchrec_cnr.quantization.packed_rows import STRIP_ROWS, pack_rows, unpack_rows
from torchrec_cnr.quantization.row_transform import Basis, RowTransform, learned, principal_components
from torchrec_cnr.quantization.uniform import mean_error
from torchrec_cnr.saving.encoding import sampled_rows

RULES = [
    TransformCoded(),
    TransformCoded(cnr.AdaptiveAsymmetric(2)),
    TransformCoded(cnr.AdaptiveAsymmetric(3)),
    TransformCoded(cnr.Asymmetric(8)),
]
NUM_ROWS, DIM = 3_000, 32


def _random() -> np.random.Generator:
    return np.random.default_rng(0)


def few_directions(num_rows: int = NUM_ROWS, seed: int = 0) -> Tensor:
    """Rows like those of trained tables: of different norms, and mostly in few directions."""
    random = np.random.default_rng(seed)
    basis = np.linalg.qr(_random().normal(size=(DIM, DIM)))[0]
    scales = np.exp(-np.arange(DIM) / 3) + 0.002
    norms = np.exp(random.normal(size=(num_rows, 1)) * 0.8)
    return torch.from_numpy(random.normal(size=(num_rows, DIM)) * scales @ basis * norms).float()


def _huge_component() -> Tensor:
    rows = few_directions()
    rows[:, 5] += torch.where(torch.arange(NUM_ROWS) % 700 == 3, 1e4, 0.0)
    return rows


def _huge_row() -> Tensor:
    rows = few_directions()
    rows[17] *= 1e6
    return rows


def _two_clusters() -> Tensor:
    random = torch.Generator().manual_seed(0)
    centers = torch.randn(2, DIM, generator=random)
    return centers[torch.arange(NUM_ROWS) % 2] + 1e-4 * torch.randn(NUM_ROWS, DIM, generator=random)


ROWS: Mapping[str, Callable[[], Tensor]] = {
    "few directions": few_directions,
    "gaussian": lambda: torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(1)),
    "uniform": lambda: torch.rand(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(1)),
    "constant": lambda: torch.full((NUM_ROWS, DIM), 0.25),
    "constant rows": lambda: torch.rand(NUM_ROWS, 1, generator=torch.Generator().manual_seed(1)).expand(-1, DIM) + 0,
    "zeros": lambda: torch.zeros(NUM_ROWS, DIM),
    "huge component": _huge_component,
    "huge row": _huge_row,
    "two clusters": _two_clusters,
    "tiny": lambda: few_directions() * 1e-30,
    "large": lambda: few_directions() * 1e4,
}


def size_and_error(scheme: Scheme, rows: Tensor) -> tuple[int, float]:
    """Bytes of the rows in a data file, and the mean l2 norm of their errors, exact rows among them."""
    encoded = scheme.encode(rows)
    decoded = scheme.decode(encoded.codes, DIM, rows.dtype)
    decoded[encoded.exact] = rows[encoded.exact]
    exact_bytes = len(encoded.exact) * (4 + 4 * DIM)
    error = float((decoded - rows).double().norm(dim=1).mean())
    if isinstance(scheme, Transformed):
        return len(pack_rows(encoded.codes.view(torch.int16).numpy(), scheme.known)) + exact_bytes, error
    return len(encoded.codes) * scheme.row_bytes(DIM, rows.dtype) + exact_bytes, error


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("kind", ROWS)
def test_it_is_never_larger_nor_worse(kind: str, rule: TransformCoded) -> None:
    """Than the scheme that it is measured by, of which 2 % of error are left to chance: a sample chose the step."""
    rows = ROWS[kind]()
    sample = sampled_rows(rows, None, 2048)
    other = rule.error_of.choose(lambda: sample, 0)
    chosen = rule.choose_for(sample, 0, len(rows), None)
    other_size, other_error = size_and_error(other, rows)
    size, error = size_and_error(chosen, rows)
    basis_size = 4 * DIM * DIM if isinstance(chosen, Transformed) and chosen.basis else 0
    assert size + basis_size <= other_size
    assert error <= 1.02 * other_error + 1e-12
    assert isinstance(chosen, Transformed) or kind not in ("few directions", "gaussian")


def test_few_directions_take_few_bits() -> None:
    """Where it helps, it helps much."""
    rows = few_directions(20_000)
    size, _ = size_and_error(TransformCoded().choose(lambda: rows[:2048], 0), rows)
    assert 8 * size / rows.numel() < 1.2


@given(scale=st.floats(-12, 12), seed=st.integers(0, 2**32), has_basis=st.booleans(), step=st.floats(-3, 0))
@settings(deadline=None)
def test_each_row_keeps_its_bound(scale: float, seed: int, has_basis: bool, step: float) -> None:
    """Half a step times the root of the number of columns, for rows that the sample did not have; or it is exact."""
    sample, rows = few_directions(200, 0).double().numpy(), few_directions(300, seed) * 10.0**scale
    basis = principal_components(sample) if has_basis else None
    transform = learned(sample, float(np.linalg.norm(sample, axis=1).mean()) * 10.0**step, basis)
    scheme = Transformed.by(transform)
    encoded = scheme.encode(rows)
    decoded = scheme.decode(encoded.codes, DIM, torch.float32)
    errors = (decoded - rows).double().norm(dim=1)
    errors[encoded.exact] = 0.0
    assert bool((errors <= transform.step / 2 * DIM**0.5 + 1e-6 * rows.double().norm(dim=1)).all())
    assert bool((rows[encoded.exact].abs().sum(1) > 30_000 * transform.step).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_saving_what_was_loaded_changes_nothing(dtype: torch.dtype) -> None:
    """The numbers of decoded rows are the same, by the same transform."""
    rows = few_directions().to(dtype)
    scheme = TransformCoded().choose(lambda: rows[:2048], 0)
    assert isinstance(scheme, Transformed)
    codes = scheme.encode(rows).codes
    decoded = scheme.decode(codes, DIM, torch.float32)
    assert torch.equal(scheme.encode(decoded).codes, codes)
    assert not torch.equal(decoded, rows.float())


def test_columns_and_positions_are_those_asked_for() -> None:
    """Some rows and columns decode to what all of them do."""
    rows = few_directions()
    scheme = TransformCoded().choose(lambda: rows[:2048], 0)
    codes = scheme.encode(rows, torch.tensor([7, 3, 2_000])).codes
    whole = scheme.decode(codes, DIM, torch.float32)
    target = torch.zeros(5, 9)
    scheme.decode_into(codes, torch.tensor([2, 0]), 4, target, torch.tensor([1, 4]))
    assert torch.equal(target[[1, 4]], whole[[2, 0], 4:13])
    assert not target[[0, 2, 3]].any()


def test_a_known_transform_is_kept_until_rows_drift() -> None:
    """Another step if the error is too large; after a tenth more bits, a new basis that is worth its bytes."""
    rule, rows = TransformCoded(), few_directions()
    first = rule.choose_for(rows, 0, 100_000, None)
    assert isinstance(first, Transformed)
    known = first.known
    again = rule.choose_for(few_directions(seed=1), 0, 100_000, known)
    assert isinstance(again, Transformed)
    assert again.digest == first.digest
    smaller = rule.choose_for(few_directions(seed=1) * 0.7, 0, 100_000, known)
    assert isinstance(smaller, Transformed)
    assert smaller.digest != first.digest  # with the old step, the error would be too large
    assert smaller.basis == first.basis
    turned = few_directions(seed=1).flip(1)
    drifted = rule.choose_for(turned, 0, 100_000, known)
    assert isinstance(drifted, Transformed)
    assert drifted.basis not in (None, first.basis)
    few_rows = rule.choose_for(turned, 0, 20, known)
    assert not isinstance(few_rows, Transformed) or few_rows.basis in (None, first.basis)


@given(num_rows=st.integers(0, 40), seed=st.integers(0, 2**32))
@settings(deadline=None)
def test_blobs_come_back(num_rows: int, seed: int) -> None:
    """With whatever follows them."""
    transform = learned(few_directions().double().numpy(), 0.1, None)
    numbers = np.random.default_rng(seed).integers(-40, 40, (num_rows, DIM)).astype(np.int16)
    data = np.concatenate([pack_rows(numbers, transform), np.arange(5, dtype=np.uint8)])
    found, rest = unpack_rows(data, num_rows, transform, "blob")
    assert (found == numbers).all()
    assert rest.tolist() == [0, 1, 2, 3, 4]


def test_strips_are_decoded_apart() -> None:
    """A blob of several strips, the last one shorter."""
    rows = few_directions(2 * STRIP_ROWS + 5)
    scheme = TransformCoded().choose(lambda: rows[:2048], 0)
    assert isinstance(scheme, Transformed)
    numbers = scheme.encode(rows).codes.view(torch.int16).numpy()
    found, rest = unpack_rows(pack_rows(numbers, scheme.known), len(rows), scheme.known, "blob")
    assert (found == numbers).all()
    assert len(rest) == 0


@given(data=st.data())
@settings(deadline=None)
def test_corrupt_blobs_are_refused_or_other_rows(data: st.DataObject) -> None:
    """Any change of bytes, or of their number, gives a typed error or other numbers, never a crash."""
    transform = learned(few_directions().double().numpy(), 0.1, None)
    numbers = _random().integers(-9, 9, (30, DIM)).astype(np.int16)
    blob = pack_rows(numbers, transform)
    changed = blob.copy()
    for place in data.draw(st.lists(st.integers(0, len(blob) - 1), min_size=1, max_size=4, unique=True)):
        changed[place] ^= data.draw(st.integers(1, 255))
    changed = changed[: data.draw(st.integers(0, len(blob)))]
    with suppress(cnr.DamagedError):
        found, rest = unpack_rows(changed, 30, transform, "blob")
        assert len(rest) or not (found == numbers).all()


@given(data=st.data())
def test_corrupt_transforms_are_refused(data: st.DataObject) -> None:
    """The digest in the manifest would show it, too; this shows that nothing invalid reaches the kernels."""
    rows = few_directions().double().numpy()
    transform = learned(rows, 0.1, principal_components(rows))
    assert transform.basis is not None
    stored = bytearray(transform.data)
    assert RowTransform.parsed(bytes(stored), transform.basis, "x").digest == transform.digest
    place = data.draw(st.integers(0, len(stored) - 1))
    stored[place] ^= data.draw(st.integers(1, 255))
    scheme = Transformed.by(transform)
    with pytest.raises(cnr.DamagedError, match="corrupt"):
        scheme.with_data(bytes(stored), transform.basis.data, DIM, "x")
    with pytest.raises(cnr.DamagedError, match="corrupt"):
        scheme.with_data(transform.data, None, DIM, "x")
    with pytest.raises(cnr.DamagedError, match="corrupt"):
        scheme.with_data(transform.data[:-1], transform.basis.data, DIM, "x")


def test_bases_that_are_not_finite_are_refused() -> None:
    """As are those of another size."""
    with pytest.raises(cnr.DamagedError, match="not finite"):
        Basis.parsed(np.full((DIM, DIM), np.nan, np.float32).tobytes(), DIM, "x")
    with pytest.raises(cnr.DamagedError, match="not a basis"):
        Basis.parsed(bytes(12), DIM, "x")


@pytest.mark.parametrize("error_of", [cnr.NoQuantization(), cnr.KMeans(4), 4, None])
def test_other_errors_are_refused(error_of: object) -> None:
    """Only uniform schemes are measured by."""
    with pytest.raises(cnr.ConfigurationError, match="must be a uniform scheme"):
        TransformCoded(error_of)  # type: ignore[arg-type]


def test_the_mean_error_is_met() -> None:
    """On the sample it is met exactly, and nearly used up."""
    rows = few_directions()
    other = cnr.AdaptiveAsymmetric(4).choose(lambda: rows, 0)
    error = mean_error(other, rows)
    chosen = TransformCoded().choose(lambda: rows, 0)
    assert 0.97 * error < mean_error(chosen, rows) <= error

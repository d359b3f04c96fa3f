"""Quantization schemes: how close values come back, how many bytes they take, and what is left alone."""

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from torchrec_cnr.format.blob_bytes import exact_row_bytes
from torchrec_cnr.format.manifest import DTYPES
from torchrec_cnr.quantization import (
    AdaptiveAsymmetric,
    Asymmetric,
    GreedySearch,
    HalfPrecision,
    KMeans,
    LeastSquares,
    NoQuantization,
    Scheme,
    Symmetric,
)

BITS = (2, 3, 4, 8)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Half a unit in the last place of a value close to 1, and of the smallest values, which rounding to a dtype may add.
ROUNDING = {torch.float32: (2.0**-24, 2.0**-150), torch.float16: (2.0**-11, 2.0**-25), torch.bfloat16: (2.0**-8, 0.0)}

ASYMMETRIC: list[Scheme] = [Asymmetric(bits) for bits in BITS]
SYMMETRIC: list[Scheme] = [Symmetric(bits) for bits in BITS]
ADAPTIVE: list[Scheme] = [
    scheme
    for bits in BITS
    for scheme in (
        AdaptiveAsymmetric(bits),
        AdaptiveAsymmetric.best(bits),
        AdaptiveAsymmetric(bits, GreedySearch(10, 0.5)),
        AdaptiveAsymmetric(bits, LeastSquares((0.0, 0.2), rounds=3, kept=1, polish=0)),
    )
]
UNIFORM = SYMMETRIC + ASYMMETRIC + ADAPTIVE
CLUSTERS: list[Scheme] = [KMeans(bits) for bits in BITS]
HALVES: list[Scheme] = [HalfPrecision(), HalfPrecision(torch.bfloat16)]
CODES = UNIFORM + CLUSTERS + HALVES
SCHEMES: list[Scheme] = [NoQuantization(), *CODES]
every_width = pytest.mark.parametrize("bits", BITS)
every_code = pytest.mark.parametrize("scheme", CODES, ids=str)
every_uniform = pytest.mark.parametrize("scheme", UNIFORM, ids=str)
moderately = hypothesis.settings(max_examples=30)


@st.composite
def tables(draw: st.DrawFn) -> Tensor:
    """Rows of any width, scale and offset, in any dtype; some are constant, on a grid, or hold what codes cannot."""
    size = (draw(st.integers(1, 12)), draw(st.integers(1, 40)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    noise = torch.randn(size, generator=generator) ** draw(st.sampled_from([1, 1, 3]))
    scales = 10.0 ** torch.empty(size[0], 1).uniform_(*draw(st.sampled_from([(-3, 3), (-12, 9)])), generator=generator)
    offsets = draw(st.sampled_from([0.0, 0.0, 1.0, -1000.0, 60_000.0]))
    values = noise * scales + offsets
    if draw(st.booleans()):
        values[0] = values[0, 0]
        values[-1] = (noise[-1] * 2).round() * scales[-1]
    if draw(st.booleans()):
        odd = draw(
            st.sampled_from([torch.nan, torch.inf, -torch.inf, 3e38, -7e4, 65_504.0, 65_519.0, 0.0, 1e-7, 1e-40])
        )
        values[draw(st.integers(0, size[0] - 1)), draw(st.integers(0, size[1] - 1))] = odd
    return values.to(draw(st.sampled_from(FLOATS)))


def stored(scheme: Scheme, values: Tensor) -> Tensor:
    """What a reader gets: rows decoded, but for those that are stored exactly."""
    encoded = scheme.encode(values)
    decoded = scheme.decode(encoded.codes, values.shape[1], values.dtype)
    decoded[encoded.exact] = values[encoded.exact]
    return decoded


def in_codes(scheme: Scheme, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows that are not stored exactly, as they were and as they are decoded, and their codes."""
    encoded = scheme.encode(values)
    is_coded = torch.ones(len(values), dtype=torch.bool).index_fill(0, encoded.exact, False)
    decoded = scheme.decode(encoded.codes, values.shape[1], values.dtype)
    return values[is_coded], decoded[is_coded], encoded.codes[is_coded]


def halves(codes: Tensor, number: int) -> Tensor:
    """float16 [n, number], from the ends of rows of codes."""
    return torch.from_numpy(codes[:, -2 * number :].numpy().copy().view(np.float16))


def scale_and_bias(codes: Tensor) -> tuple[Tensor, Tensor]:
    """float64 [n, 1] each, from fused rows."""
    scale, bias = halves(codes, 2).double().split(1, 1)
    return scale, bias


def bits_of(scheme: Scheme) -> int:
    """Bits of a code."""
    return int(scheme.to_json()["bits"])


def gaussian(num_rows: int = 200, num_cols: int = 64) -> Tensor:
    """Rows like those of an embedding."""
    return torch.randn(num_rows, num_cols, generator=torch.Generator().manual_seed(1)) * 0.05


# The bound


@every_uniform
@moderately
@hypothesis.given(values=tables())
def test_uniform_codes_are_off_by_half_a_step(scheme: Scheme, values: Tensor) -> None:
    """Within the stored range an error is half a step at most; what lies outside comes back as the nearest end."""
    saved, got, codes = (tensor.double() for tensor in in_codes(scheme, values))
    scale, bias = scale_and_bias(codes.to(torch.uint8))
    end = bias + scale * (2 ** bits_of(scheme) - 1)
    relative, least = ROUNDING[values.dtype]
    rounding = got.abs() * (relative + 2.0**-24) + least
    is_inside = (saved >= bias) & (saved <= end)
    error = (got - saved).abs()
    assert (error <= scale * 0.5001 + rounding)[is_inside].all()
    for is_outside, nearest in ((saved < bias, bias), (saved > end, end)):
        wanted = nearest.float().to(values.dtype).double().expand_as(got)
        assert torch.equal(got[is_outside], wanted[is_outside])


@every_width
@moderately
@hypothesis.given(values=tables())
def test_asymmetric_codes_reach_over_all_values(bits: int, values: Tensor) -> None:
    """Whatever a row holds, its range reaches it up to half a step, and is no more than twice as wide as the row."""
    saved, _, codes = in_codes(Asymmetric(bits), values)
    scale, bias = scale_and_bias(codes)
    low, high = saved.double().amin(1, keepdim=True), saved.double().amax(1, keepdim=True)
    relative, least = ROUNDING[values.dtype]
    slack = scale * 0.5001 + torch.maximum(low.abs(), high.abs()) * (relative + 2.0**-24) + least
    assert (bias <= low + slack).all()
    assert (bias + scale * (2**bits - 1) >= high - slack).all()
    assert (scale * (2**bits - 1) <= 2.001 * (high - low)).all()


@every_width
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_embedding_comes_back_within_half_a_step(bits: int, dtype: torch.dtype) -> None:
    """Rows of the usual scale are off by half a step of their own range at most, none is exact, and all are changed."""
    values = gaussian().to(dtype)
    assert len(Asymmetric(bits).encode(values).exact) == 0
    error = (stored(Asymmetric(bits), values).double() - values.double()).abs()
    steps = (values.double().amax(1) - values.double().amin(1)) / (2**bits - 1)
    assert (error.amax(1) <= 0.53 * steps + values.abs().amax().double() * ROUNDING[dtype][0]).all()
    assert (error.amax(1) > 0.1 * steps).all()


@pytest.mark.parametrize("scheme", CLUSTERS, ids=str)
@moderately
@hypothesis.given(values=tables())
def test_clusters_give_the_nearest_value_of_the_codebook(scheme: Scheme, values: Tensor) -> None:
    """Each element comes back as the value of its row's codebook that is nearest to it."""
    saved, got, codes = in_codes(scheme, values)
    book = halves(codes, 2 ** bits_of(scheme)).double()
    distances = (book[:, None, :] - saved.double()[:, :, None]).abs()
    is_met = book.to(values.dtype)[:, None, :] == got[:, :, None]
    assert is_met.any(2).all()
    chosen = torch.where(is_met, distances, torch.inf).amin(2)
    assert (chosen <= distances.amin(2) * (1 + 1e-6) + saved.double().abs() * 2.0**-23).all()


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)], ids=str)
@moderately
@hypothesis.given(values=tables())
def test_half_precision_is_off_by_half_a_unit(dtype: torch.dtype, relative: float, values: Tensor) -> None:
    """An error is half a unit in the last place of 16 bits; values that they hold come back as they were."""
    saved, got, _ = in_codes(HalfPrecision(dtype), values.float())
    error = (got.double() - saved.double()).abs()
    assert (error <= saved.double().abs() * relative + (2.0**-25 if dtype is torch.float16 else 2.0**-134)).all()
    is_held = saved.to(dtype).to(saved.dtype) == saved
    assert torch.equal(got[is_held], saved[is_held])
    rough = gaussian()
    assert not torch.equal(stored(HalfPrecision(dtype), rough), rough)


@every_code
@moderately
@hypothesis.given(values=tables())
def test_quantizing_twice_is_quantizing_once(scheme: Scheme, values: Tensor) -> None:
    """What was decoded is encoded without any further error, exactly."""
    once = stored(scheme, values)
    twice = stored(scheme, once)
    assert torch.equal(twice.nan_to_num(nan=-7.0), once.nan_to_num(nan=-7.0))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_no_quantization_keeps_every_bit(dtype: torch.dtype) -> None:
    """Whatever the bytes are, NaN with a payload too, they come back as they were."""
    values = (torch.arange(48 * dtype.itemsize, dtype=torch.int64) * 37 % 256).to(torch.uint8)
    values = (values % 2 if dtype is torch.bool else values).view(dtype).reshape(6, 8)
    encoded = NoQuantization().encode(values)
    codes = encoded.codes.contiguous().reshape(-1).view(torch.uint8)
    assert len(codes) == 6 * NoQuantization().row_bytes(8, dtype)
    assert len(encoded.exact) == 0
    decoded = NoQuantization().decode(codes, 8, dtype)
    assert decoded.dtype is dtype
    assert decoded.shape == values.shape
    assert decoded.view(torch.uint8).equal(values.view(torch.uint8))


# The layout


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@moderately
@hypothesis.given(values=tables(), data=st.data())
def test_rows_take_their_bytes_wherever_they_lie(scheme: Scheme, values: Tensor, data: st.DataObject) -> None:
    """Rows by number, repeated and in any order, give the codes of their copies, and as many bytes as they say."""
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=30)))
    chosen = scheme.choose(lambda: values, 0)
    by_number, copied = chosen.encode(values, rows), chosen.encode(values[rows])
    assert by_number.codes.dtype is torch.uint8
    assert by_number.codes.shape == (len(rows), scheme.row_bytes(values.shape[1], values.dtype))
    assert torch.equal(by_number.codes, copied.codes)
    assert torch.equal(by_number.exact, copied.exact)
    wide = torch.cat((values, values), 1)[:, : values.shape[1]]
    assert torch.equal(chosen.encode(wide, rows).codes, copied.codes)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_columns_and_rows_are_decoded_into_a_target(scheme: Scheme) -> None:
    """Some columns of some rows land where they are asked for, and nothing else of the target is touched."""
    values = gaussian(9, 23)
    codes, whole = scheme.encode(values).codes, torch.full((30, 40), -7.0)
    positions, rows = torch.tensor([8, 0, 3, 3]), torch.tensor([1, 29, 0, 17])
    scheme.decode_into(codes, positions, 5, whole[:, 10:27], rows)
    wanted = torch.full_like(whole, -7.0)
    wanted[rows, 10:27] = stored(scheme, values)[positions, 5:22]
    assert torch.equal(whole, wanted)


FIVE_COLUMNS = {
    NoQuantization(): 20,
    HalfPrecision(): 10,
    Asymmetric(2): 6,
    Symmetric(3): 6,
    Asymmetric(4): 8,
    AdaptiveAsymmetric(8): 10,
    KMeans(2): 10,
    KMeans(3): 18,
    KMeans(4): 35,
    KMeans(8): 517,
}


@pytest.mark.parametrize(("scheme", "num_bytes"), FIVE_COLUMNS.items(), ids=str)
def test_five_columns_take_so_many_bytes(scheme: Scheme, num_bytes: int) -> None:
    """Codes take whole bytes, FBGEMM's pairs of them, and each row has its range or codebook behind them."""
    assert scheme.row_bytes(5, torch.float32) == num_bytes


def test_exact_rows_take_a_position_and_their_values() -> None:
    """Behind a block's codes such a row takes four bytes more than without quantization."""
    assert exact_row_bytes(5, 4) == 4 + NoQuantization().row_bytes(5, torch.float32)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_no_rows_are_no_codes(scheme: Scheme) -> None:
    """A table without rows gives no bytes, and no rows come of them."""
    encoded = scheme.encode(torch.empty(0, 5))
    assert encoded.codes.shape == (0, scheme.row_bytes(5, torch.float32))
    assert scheme.decode(encoded.codes, 5, torch.float32).shape == (0, 5)


# What cannot be represented

BROKEN = {
    "NaN": [1.0, torch.nan, 2.0],
    "only NaN": [torch.nan] * 3,
    "infinity": [1.0, torch.inf, 2.0],
    "minus infinity at the end": [1.0, 2.0, -torch.inf],
    "both infinities": [torch.inf, -torch.inf, 0.0],
    "bias beyond fp16": [-1e6, 0.0, 1.0],
    "constant beyond fp16": [65536.0, 65536.0, 65536.0],
    "range beyond fp32": [-3e38, 3e38, 0.0],
    "constant between two of fp16": [0.1, 0.1, 0.1],
    "constant below fp16": [1e-9, 1e-9, 1e-9],
}


@pytest.mark.parametrize("row", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("scheme", UNIFORM + CLUSTERS + HALVES[:1], ids=str)
def test_rows_that_codes_cannot_represent_are_named(scheme: Scheme, row: list[float]) -> None:
    """Such a row is named, or comes back exactly; wherever it stands, its neighbours are not named."""
    good = [0.5, -1.0, 2.0]
    values = torch.tensor([row, good, good, row, good])
    named = scheme.encode(values).exact.tolist()
    assert named in ([0, 3], [])
    if not named:
        assert torch.equal(stored(scheme, values)[0], values[0])
    assert scheme.encode(values[1:3]).exact.tolist() == []


CLOSE = {
    "about 0": torch.tensor([[0.0, 1.0, -1.0, 0.4, 0.3]]) * 1e-9,
    "above 0": torch.tensor([[1.0, 0.2, 0.5, 0.4, 0.3]]) * 2e-8,
    "subnormal": torch.tensor([[0.0, 1.0, -1.0, 0.4, 0.3]]) * 1e-40,
    "about 60000": 60_000.0 + torch.tensor([[0.0, 1.0, -1.0, 0.0, 1.0]]) * 2.0**-8,
}


@pytest.mark.parametrize("row", CLOSE.values(), ids=CLOSE)
@pytest.mark.parametrize("scheme", ASYMMETRIC + ADAPTIVE + CLUSTERS, ids=str)
def test_rows_whose_values_fp16_cannot_tell_apart_are_exact(scheme: Scheme, row: Tensor) -> None:
    """Where scale and bias, or a codebook, would be rounded away, a row comes back as it was."""
    assert len(row.unique()) > 2
    assert len(row.abs().half().unique()) == 1
    got = stored(scheme, row)
    assert (got - row).abs().amax() <= (row.amax() - row.amin()) * 1.0001 / (2 ** bits_of(scheme) - 1)


@pytest.mark.parametrize("scheme", ASYMMETRIC + ADAPTIVE + CLUSTERS, ids=str)
@moderately
@hypothesis.given(values=tables())
def test_rows_of_several_values_keep_several(scheme: Scheme, values: Tensor) -> None:
    """No row that holds different values comes back as one, in whichever dtype."""
    saved, got, _ = in_codes(scheme, values)
    is_one = (got == got[:, :1]).all(1)
    assert torch.equal(is_one, (saved == saved[:, :1]).all(1))


@every_code
@hypothesis.given(value=st.floats(width=32), num_cols=st.integers(1, 20), dtype=st.sampled_from(FLOATS))
@moderately
def test_constant_rows_come_back_exactly(scheme: Scheme, value: float, num_cols: int, dtype: torch.dtype) -> None:
    """A row of one value is not changed, in whichever dtype, whether fp16 holds the value or not."""
    hypothesis.assume(num_cols > 1 or not isinstance(scheme, HalfPrecision))  # which rounds single values
    values = torch.full((2, num_cols), value).to(dtype)
    assert torch.equal(stored(scheme, values).nan_to_num(nan=-7.0), values.nan_to_num(nan=-7.0))


@pytest.mark.parametrize("scheme", UNIFORM + CLUSTERS, ids=str)
@moderately
@hypothesis.given(values=tables())
def test_what_is_coded_is_finite(scheme: Scheme, values: Tensor) -> None:
    """A row with NaN or infinity is never coded, and no number becomes one."""
    saved, got, _ = in_codes(scheme, values)
    assert saved.isfinite().all()
    assert got.isfinite().all()

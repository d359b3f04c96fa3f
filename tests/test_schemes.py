"""Quantization schemes: how close values come back, how many bytes they take, and what is left alone."""

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from torchrec_cnr.errors import ConfigurationError, DamagedError
from torchrec_cnr.manifest import DTYPES
from torchrec_cnr.schemes import (
    Asymmetric,
    NoQuantization,
    Scheme,
    SchemeRules,
    exact_row_bytes,
    scheme_from_json,
)

BITS = (8, 4, 2)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
every_width = pytest.mark.parametrize("bits", BITS)
widths = st.integers(1, 40)


@st.composite
def _rows(draw: st.DrawFn, smallest_exponent: int = -4) -> Tensor:
    """Random rows of any width and scale, some of them constant."""
    size = (draw(st.integers(1, 6)), draw(widths))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(size, generator=generator) * 10.0 ** draw(st.integers(smallest_exponent, 4))
    if draw(st.booleans()):
        values[0] = values[0, 0]
    return values


def _decoded(scheme: Scheme, values: Tensor) -> Tensor:
    return scheme.decode(scheme.encode(values).codes, values.shape[1], values.dtype)


def _scale_and_bias(codes: Tensor) -> tuple[Tensor, Tensor]:
    halves = codes[:, -4:].contiguous().view(torch.float16).double()
    return halves[:, :1], halves[:, 1:]


def _ulps(halves: Tensor) -> Tensor:
    """Distance from fp16 values to the next."""
    array = halves.abs().to(torch.float16).numpy()
    return torch.from_numpy(np.spacing(array).astype(np.float64))


# The bound


@every_width
@hypothesis.given(values=_rows())
def test_values_come_back_within_the_bound(bits: int, values: Tensor) -> None:
    """An error is at most half a step, half a unit in the last place of the bias, and codes times that of the scale."""
    codes = Asymmetric(bits).encode(values).codes
    scale, bias = _scale_and_bias(codes)
    error = (_decoded(Asymmetric(bits), values).double() - values.double()).abs()
    bound = scale / 2 + _ulps(bias) / 2 + (2**bits - 1) * _ulps(scale) / 2
    assert (error <= bound * 1.0001).all()


@every_width
@pytest.mark.parametrize("num_cols", [1, 2, 7, 64])
def test_an_embedding_comes_back_within_half_a_step(bits: int, num_cols: int) -> None:
    """Rows of the usual scale are off by half a step of their own range at most, and by more than none."""
    values = torch.empty(500, num_cols).uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(1))
    error = (_decoded(Asymmetric(bits), values) - values).abs()
    step = (values.amax(1) - values.amin(1)) / (2**bits - 1)
    assert (error.amax(1) <= 0.5 * step * 1.02 + 2.0**-12).all()  # fp16 has 11 bits for a bias of up to .5
    if num_cols > 2:
        assert (error.amax(1) / step).mean() > 0.3


def test_more_bits_are_closer() -> None:
    """Each width of codes is several times as exact as the next smaller one."""
    values = torch.empty(500, 64).uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(1))
    errors = {bits: float((_decoded(Asymmetric(bits), values) - values).norm(dim=1).mean()) for bits in BITS}
    assert errors[2] > 4 * errors[4] > 4 * 12 * errors[8] > 0


@every_width
@pytest.mark.parametrize("constant", [0.0, 1.0, -3.5, 2.0**-24, 65504.0])
def test_constant_rows_come_back_exactly(bits: int, constant: float) -> None:
    """A row of one value that fp16 holds, such as zeros, is not changed."""
    values = torch.full((2, 5), constant)
    assert _decoded(Asymmetric(bits), values).equal(values)


@every_width
def test_grid_comes_back_exactly(bits: int) -> None:
    """Values that lie on the codes of their row are not changed: quantizing twice is quantizing once."""
    values = (torch.arange(2**bits).float() * 0.25 - 3).repeat(2, 1)
    assert _decoded(Asymmetric(bits), values).equal(values)
    rough = torch.randn(50, 9, generator=torch.Generator().manual_seed(1))
    once = _decoded(Asymmetric(bits), rough)
    assert not once.equal(rough)
    assert (_decoded(Asymmetric(bits), once) - once).abs().amax() < 0.01


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


@every_width
@hypothesis.given(values=_rows())
def test_bytes_are_those_of_fbgemm(bits: int, values: Tensor) -> None:
    """Rows whose codes fill pairs of bytes are FBGEMM's fused rows, which its kernels take as they are."""
    multiple = 16 // bits
    even = values.repeat(1, multiple)
    expected = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(even, bits)
    assert Asymmetric(bits).encode(even).codes.equal(expected)


@every_width
@hypothesis.given(values=_rows())
def test_codes_mean_what_the_page_says(bits: int, values: Tensor) -> None:
    """Codes, lowest bits first, times scale plus bias are the values, worked out without FBGEMM."""
    num_cols = values.shape[1]
    codes = Asymmetric(bits).encode(values).codes
    packed: npt.NDArray[np.uint8] = codes.numpy()[:, :-4]
    numbers = (packed[:, :, None] >> (np.arange(8 // bits) * bits).astype(np.uint8)) & (2**bits - 1)
    scale, bias = (half.float().numpy() for half in _scale_and_bias(codes))
    expected = numbers.reshape(len(values), -1)[:, :num_cols].astype(np.float32) * scale + bias
    assert Asymmetric(bits).decode(codes, num_cols, torch.float32).numpy().tobytes() == expected.tobytes()


@every_width
@hypothesis.given(values=_rows())
def test_row_bytes_are_those_of_the_codes(bits: int, values: Tensor) -> None:
    """A row takes as many bytes as it says: codes in pairs of bytes, two for the scale and two for the bias."""
    num_cols = values.shape[1]
    codes = Asymmetric(bits).encode(values).codes
    assert codes.dtype is torch.uint8
    assert codes.shape == (len(values), Asymmetric(bits).row_bytes(num_cols, torch.float32))
    assert codes.shape[1] == -(-num_cols * bits // 16) * 2 + 4


@every_width
@hypothesis.given(values=_rows())
def test_padding_changes_nothing(bits: int, values: Tensor) -> None:
    """A width that does not fill its bytes gives the values that the same row gives with its last value repeated."""
    padded = torch.cat((values, values[:, -1:].expand(-1, -values.shape[1] % (16 // bits))), dim=1)
    assert _decoded(Asymmetric(bits), values).equal(_decoded(Asymmetric(bits), padded)[:, : values.shape[1]])


@every_width
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_narrower_dtypes_are_quantized_as_fp32(bits: int, dtype: torch.dtype) -> None:
    """A table of another floating dtype gives the codes of its values, and comes back in its own dtype."""
    values = torch.randn(20, 9, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert Asymmetric(bits).encode(values).codes.equal(Asymmetric(bits).encode(values.float()).codes)
    decoded = _decoded(Asymmetric(bits), values)
    assert decoded.dtype is dtype
    assert decoded.equal(_decoded(Asymmetric(bits), values.float()).to(dtype))


def test_rows_are_encoded_wherever_they_lie() -> None:
    """Views with strides, as slices of columns are, give the codes of their copies."""
    whole = torch.randn(20, 30, generator=torch.Generator().manual_seed(1))
    for view in (whole[:, 3:14], whole[::2], whole.T):
        assert Asymmetric(4).encode(view).codes.equal(Asymmetric(4).encode(view.clone()).codes)


# What cannot be represented


@every_width
@pytest.mark.parametrize(
    "row",
    [
        pytest.param([1.0, float("nan"), 2.0], id="NaN"),
        pytest.param([float("nan")] * 3, id="only NaN"),
        pytest.param([1.0, float("inf"), 2.0], id="infinity"),
        pytest.param([1.0, 2.0, float("-inf")], id="minus infinity at the end"),
        pytest.param([float("inf"), float("-inf"), 0.0], id="both infinities"),
        pytest.param([-1e6, 0.0, 1.0], id="bias beyond fp16"),
        pytest.param([65536.0, 65536.0, 65536.0], id="constant beyond fp16"),
        pytest.param([-3e38, 3e38, 0.0], id="range beyond fp32"),
        pytest.param([0.0, 3e38, 3e38], id="scale beyond fp16"),
    ],
)
def test_rows_that_codes_cannot_represent_are_named(bits: int, row: list[float]) -> None:
    """Such a row is named, wherever it stands, and its neighbours are not."""
    good = [0.5, -1.0, 2.0]
    values = torch.tensor([row, good, good, row, good])
    assert Asymmetric(bits).encode(values).exact.tolist() == [0, 3]
    assert Asymmetric(bits).encode(values[1:3]).exact.tolist() == []


@every_width
@hypothesis.given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=9).map(lambda row: [row])
)
def test_any_row_is_close_or_named(bits: int, rows: list[list[float]]) -> None:
    """Whatever floats a row holds, it comes back finite and within its range, unless it is named."""
    values = torch.tensor(rows)
    encoded = Asymmetric(bits).encode(values)
    if len(encoded.exact):
        assert encoded.exact.tolist() == [0]
        return
    assert values.isfinite().all()
    scale, bias = _scale_and_bias(encoded.codes)
    error = (_decoded(Asymmetric(bits), values).double() - values.double()).abs()
    assert (error <= (scale / 2 + _ulps(bias) / 2 + (2**bits - 1) * _ulps(scale) / 2) * 1.0001).all()


def test_exact_rows_take_a_position_and_their_values() -> None:
    """Behind a block's codes such a row takes four bytes more than without quantization."""
    assert exact_row_bytes(5, 4) == 4 + NoQuantization().row_bytes(5, torch.float32)


# Schemes as values


@pytest.mark.parametrize("bits", [0, 1, 3, 16, -8, 8.0, "8", True, None])
def test_other_widths_are_refused(bits: object) -> None:
    """Only widths that FBGEMM has are accepted, and only as integers."""
    with pytest.raises(ConfigurationError, match="'bits' must be 8, 4 or 2"):
        Asymmetric(bits)  # type: ignore[arg-type]


SCHEMES: list[Scheme] = [NoQuantization(), *map(Asymmetric, BITS)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_schemes_come_back_from_a_manifest(scheme: Scheme) -> None:
    """What a manifest records of a scheme is read as the same scheme."""
    assert scheme_from_json(scheme.to_json(), "here") == scheme
    assert hash(scheme_from_json(scheme.to_json(), "here")) == hash(scheme)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"name": "other"},
        {"name": "none", "bits": 8},
        {"name": "asymmetric"},
        {"name": "asymmetric", "bits": 3},
        {"name": "asymmetric", "bits": 8.0},
        {"name": "asymmetric", "bits": True},
        {"name": "asymmetric", "bits": "8"},
        {"name": "asymmetric", "bits": [8]},
        {"name": "asymmetric", "bits": 8, "more": 1},
        {"bits": 8},
    ],
    ids=str,
)
def test_other_schemes_are_damage(value: dict[str, object]) -> None:
    """A scheme that this version does not know is refused, not guessed."""
    with pytest.raises(DamagedError, match=r"here: .*not a quantization scheme"):
        scheme_from_json(value, "here")


@every_width
def test_only_floats_of_up_to_32_bits_are_quantized(bits: int) -> None:
    """Integers have no range to share, and fp64 would lose what it is used for."""
    assert {dtype for dtype in DTYPES.values() if Asymmetric(bits).supports(dtype)} == set(FLOATS)
    assert all(NoQuantization().supports(dtype) for dtype in DTYPES.values())


# Which tensor gets which


def test_one_scheme_is_for_tables() -> None:
    """A single scheme quantizes tables of a dtype that it knows, and nothing else."""
    rules = SchemeRules.of(Asymmetric(4))
    assert rules.scheme_for("t", torch.float32, is_table=True) == Asymmetric(4)
    assert rules.scheme_for("t", torch.float64, is_table=True) == NoQuantization()
    assert rules.scheme_for("dense", torch.float32, is_table=False) == NoQuantization()


def test_patterns_are_for_all_tensors() -> None:
    """The first pattern that matches an FQN gives its scheme, tables or not; what none matches is exact."""
    rules = SchemeRules.of(
        {"*.t1.weight": NoQuantization(), "*.weight": Asymmetric(8), "*.momentum[12]": Asymmetric(4)}
    )
    assert rules.scheme_for("m.t1.weight", torch.float32, is_table=True) == NoQuantization()
    assert rules.scheme_for("m.t2.weight", torch.float32, is_table=False) == Asymmetric(8)
    assert rules.scheme_for("m.t2.weight", torch.int64, is_table=False) == NoQuantization()
    assert rules.scheme_for("m.momentum1", torch.float32, is_table=False) == Asymmetric(4)
    assert rules.scheme_for("m.momentum3", torch.float32, is_table=True) == NoQuantization()
    assert rules.scheme_for("M.T2.WEIGHT", torch.float32, is_table=True) == NoQuantization()


@pytest.mark.parametrize("quantization", [8, "asymmetric", [Asymmetric(8)], {"*": 8}, {"*": Asymmetric}, Asymmetric])
def test_what_is_no_scheme_is_refused(quantization: object) -> None:
    """A wrong argument is named before anything is saved."""
    with pytest.raises(ConfigurationError, match="'quantization' must be a scheme or a mapping to schemes"):
        SchemeRules.of(quantization)  # type: ignore[arg-type]

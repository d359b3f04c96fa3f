"""Kernels on CPUs: the bytes of the plain-torch reference, whatever the rows, the way they are read, and the threads.

Bytes are also decoded by FBGEMM, and by NumPy from what the page on the format says of them.
"""

from collections.abc import Iterator
from itertools import combinations

import fbgemm_gpu  # noqa: F401  # registers torch.ops.fbgemm
import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.cluster import KMeans as SklearnKMeans
from torch import Tensor

from tests.kernels import reference
from torchrec_cnr import kernels
from torchrec_cnr.kernels.search_plan import COVERING, GREEDY, LEAST_SQUARES, MIRRORED, SearchPlan, search_plan
from torchrec_cnr.quantization import Asymmetric, KMeans

BITS = (2, 3, 4, 8)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MAX_COLS = 70

_CUTS = np.array([0.0, 0.04, 0.13, 0.3], np.float32)
PLANS = {
    "covering": search_plan(COVERING),
    "mirrored": search_plan(MIRRORED),
    "greedy": search_plan(GREEDY, num_bins=25, num_steps=24),
    "greedy, few bins": search_plan(GREEDY, num_bins=6, num_steps=3),
    "least squares": search_plan(LEAST_SQUARES, cuts=_CUTS, rounds=1, kept=3, polish=2),
    "least squares, one start": search_plan(LEAST_SQUARES, cuts=_CUTS[:1], rounds=1, kept=1, polish=0),
    "least squares, many rounds": search_plan(LEAST_SQUARES, cuts=_CUTS[:3], rounds=4, kept=2, polish=5),
}
every_width = pytest.mark.parametrize("bits", BITS)
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def odd_rows(num_cols: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Rows of all kinds: random of any scale, offset, heavy-tailed, on a grid, constant, and what codes cannot hold."""
    generator = torch.Generator().manual_seed(1000 * seed + num_cols)
    noise = torch.randn(20, num_cols, generator=generator)
    scaled = noise * torch.logspace(-10, 9, 20)[:, None]
    offset = torch.tensor([1.0, -3.0, 1000.0, -60_000.0, 65_500.0])[:, None] + noise[:5] * 0.01
    subnormal = noise[:6] * torch.tensor([1e-45, 1e-42, 1e-39, 3e-8, 1e-7, 1e-6])[:, None]
    constant = torch.tensor([0.0, -0.0, 1.0, 1 / 3, -2.5, 65_504.0, 65_520.0, 1e6, 1e-9, 1e-40])[:, None]
    grid = torch.randint(0, 4, (3, num_cols), generator=generator) * torch.tensor([[1.0], [0.25], [1e-3]]) - 0.5
    broken = noise[:9].clone()
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 65_504.0, 65_520.0, 1e5, -7e4)):
        broken[row, (7 * row) % num_cols] = value
    far = noise[:3] * 1e-3  # all but some, which are as far away as fp16 reaches
    far[0, num_cols // 2], far[1, num_cols // 3] = -60_000.0, 60_000.0
    far[2, 0], far[2, -1] = -60_000.0, 60_000.0
    parts = (scaled, offset, subnormal, constant.expand(-1, num_cols), grid, broken, noise[:4] ** 5, far)
    return torch.cat(parts).to(dtype)


def row_bytes_of(num_cols: int, bits: int) -> int:
    """Bytes of a fused row."""
    return Asymmetric(bits).row_bytes(num_cols, torch.float32)


def encoded(table: Tensor, bits: int, plan: SearchPlan, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What the kernels make of a table's rows."""
    numbers = torch.arange(len(table)) if rows is None else rows
    return kernels.encode_rows(table, numbers, bits, plan, row_bytes_of(table.shape[1], bits))


def expected(values: Tensor, bits: int, plan: SearchPlan) -> tuple[Tensor, Tensor]:
    """What the reference makes of rows, laid out as fused rows."""
    codes, scale, bias, is_exact = reference.encode(values, bits, plan)
    packed = reference.pack(codes, bits)
    padding = row_bytes_of(values.shape[1], bits) - 4 - packed.shape[1]
    halves = torch.stack((scale, bias), 1).view(torch.uint8)
    return torch.cat((torch.nn.functional.pad(packed, (0, padding)), halves), 1), is_exact


def assert_same(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """The same bytes, and the same rows to be stored exactly."""
    for mine, other in zip(got, wanted, strict=True):
        assert mine.dtype is other.dtype
        assert mine.shape == other.shape
        assert torch.equal(mine, other), f"rows {(mine != other).view(len(mine), -1).any(1).nonzero().flatten()}"


def bit_stream(codes: Tensor, num_cols: int, bits: int) -> npt.NDArray[np.int64]:
    """Codes read as the page on the format has it: one after another, lowest bits first."""
    stream = np.unpackbits(codes.numpy(), axis=1, bitorder="little")[:, : num_cols * bits]
    return np.asarray(stream.reshape(len(codes), num_cols, bits) @ (1 << np.arange(bits)))


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Give torch its number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# The reference


@every_width
@every_dtype
@every_plan
def test_bytes_are_those_of_the_reference(bits: int, dtype: torch.dtype, plan: SearchPlan) -> None:
    """Rows of every kind give the bytes that plain torch gives; the cases together go through all widths to 70."""
    number = [*map(id, PLANS.values())].index(id(plan)) + len(PLANS) * ((BITS.index(bits) + FLOATS.index(dtype)) % 2)
    for num_cols in range(1 + number, MAX_COLS + 1, 2 * len(PLANS)):
        values = odd_rows(num_cols, dtype)
        codes, is_exact = encoded(values, bits, plan)
        assert_same((codes, is_exact), expected(values, bits, plan))
        assert not codes[is_exact].any()
        assert 0 < int(is_exact.sum()) < len(values)


_ANY_FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
_ROWS = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.integers(1, 20)),
    elements=_ANY_FLOATS | st.floats(-1, 1, width=32) | st.sampled_from([0.0, -0.0, 1.0, 6e-8, 3e-8, 65504.0]),
)


@pytest.mark.long
@every_plan
@hypothesis.settings(max_examples=40)
@hypothesis.given(values=_ROWS, bits=st.sampled_from(BITS), dtype=st.sampled_from(FLOATS))
def test_any_floats_give_the_bytes_of_the_reference(
    plan: SearchPlan, values: npt.NDArray[np.float32], bits: int, dtype: torch.dtype
) -> None:
    """Whatever floats a row holds, kernel and reference agree on its bytes."""
    rows = torch.from_numpy(values).to(dtype)
    assert_same(encoded(rows, bits, plan), expected(rows, bits, plan))


# How rows are read


@every_width
@every_dtype
@every_plan
def test_rows_are_read_wherever_they_lie(bits: int, dtype: torch.dtype, plan: SearchPlan) -> None:
    """Rows by their numbers, in any order and repeated, from a slice of columns, give the bytes of their copies."""
    whole = torch.cat([odd_rows(40, dtype, seed) for seed in (1, 2)], 1)
    rows = torch.randint(0, len(whole), (150,), generator=torch.Generator().manual_seed(bits))
    assert len(rows.unique()) < len(rows)
    view = whole[:, 5:42]
    codes, is_exact = encoded(view, bits, plan, rows)
    assert_same((codes, is_exact), encoded(view[rows].contiguous(), bits, plan))
    assert_same(encoded(whole[1::2, 5:42], bits, plan), encoded(whole[1::2, 5:42].clone(), bits, plan))
    assert not torch.equal(codes, encoded(view, bits, plan, rows.flip(0))[0])


@every_width
@every_plan
def test_a_row_does_not_depend_on_its_neighbours(bits: int, plan: SearchPlan) -> None:
    """Alone, and in whatever place of a block of 16, a row gives the same bytes."""
    values = odd_rows(21, torch.float32)
    codes, is_exact = encoded(values, bits, plan)
    for row in range(len(values)):
        assert_same(encoded(values, bits, plan, torch.tensor([row])), (codes[row : row + 1], is_exact[row : row + 1]))
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(1))
    assert_same(encoded(values, bits, plan, order), (codes[order], is_exact[order]))
    assert not torch.equal(codes, codes[order])


@every_width
@pytest.mark.parametrize("method", ["greedy", "least squares", "k-means"])
@pytest.mark.usefixtures("num_threads")
def test_rows_do_not_depend_on_the_threads(bits: int, method: str) -> None:
    """Divided over any number of threads, rows give the same bytes, and these the same values."""
    values = torch.cat([odd_rows(9, torch.float32, seed) for seed in range(90)])
    assert len(values) > 4 * 1024
    results = []
    for number in (1, 2, 3, 4):
        torch.set_num_threads(number)
        if method == "k-means":
            row_bytes = KMeans(bits).row_bytes(9, torch.float32)
            codes, is_exact = kernels.encode_clusters(values, torch.arange(len(values)), bits, row_bytes)
        else:
            codes, is_exact = encoded(values, bits, PLANS[method])
        decode = kernels.decode_clusters if method == "k-means" else kernels.decode_rows
        target = torch.full_like(values, -7.0)
        decode(codes, torch.arange(len(values)), bits, 0, target, torch.arange(len(values)))
        results.append((codes, is_exact, target))
    for other in results[1:]:
        assert all(torch.equal(mine, its) for mine, its in zip(results[0], other, strict=True))
    assert len(results[0][0].unique(dim=0)) > 1000


@every_width
@every_plan
def test_no_rows_are_no_bytes(bits: int, plan: SearchPlan) -> None:
    """No rows of a table, or of a table without any, give no bytes, and decoding none changes nothing."""
    none = torch.empty(0, dtype=torch.int64)
    for table in (torch.randn(5, 9), torch.empty(0, 9)):
        codes, is_exact = encoded(table, bits, plan, none)
        assert codes.shape == (0, row_bytes_of(9, bits))
        assert is_exact.shape == (0,)
        before = table.clone()
        kernels.decode_rows(codes, none, bits, 0, table, none)
        assert torch.equal(table, before)


# What others decode


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("num_cols", [1, 5, 16, 33, 64])
@every_plan
def test_fbgemm_decodes_the_bytes(bits: int, num_cols: int, plan: SearchPlan) -> None:
    """FBGEMM's operator makes of the bytes, bit for bit, the values that the kernels make of them."""
    values = odd_rows(num_cols, torch.float32)
    codes, is_exact = encoded(values, bits, plan)
    theirs = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(codes, bits)[:, :num_cols].contiguous()
    ours, numbers = torch.full_like(values, -7.0), torch.arange(len(values))
    kernels.decode_rows(codes, numbers, bits, 0, ours, numbers)
    assert torch.equal(theirs.view(torch.int32), ours.view(torch.int32))
    assert torch.equal(ours[~is_exact], values[~is_exact]) == (num_cols == 1)


@every_width
@every_dtype
@hypothesis.settings(max_examples=25)
@hypothesis.given(data=st.data(), num_cols=st.integers(1, MAX_COLS), seed=st.integers(0, 99))
def test_codes_mean_what_the_page_says(
    bits: int, dtype: torch.dtype, data: st.DataObject, num_cols: int, seed: int
) -> None:
    """Any columns of any rows, decoded into any rows of a slice, are codes times scale plus bias; all else stays."""
    codes, _ = encoded(odd_rows(num_cols, torch.float32, seed), bits, PLANS["covering"])
    first_col = data.draw(st.integers(0, num_cols - 1))
    width = data.draw(st.integers(1, num_cols - first_col))
    positions = torch.tensor(data.draw(st.lists(st.integers(0, len(codes) - 1), min_size=1, max_size=20)))
    rows = torch.randperm(30, generator=torch.Generator().manual_seed(seed))[: len(positions)]
    whole = torch.full((30, width + 7), -7.0, dtype=dtype)
    kernels.decode_rows(codes, positions, bits, first_col, whole[:, 3 : 3 + width], rows)

    scale, bias = codes[:, -4:].contiguous().view(torch.float16).float().numpy().T
    numbers = bit_stream(codes[:, :-4], num_cols, bits).astype(np.float32)
    values = torch.from_numpy(numbers * scale[:, None] + bias[:, None])
    wanted = torch.full_like(whole, -7.0)
    wanted[rows, 3 : 3 + width] = values[positions, first_col : first_col + width].to(dtype)
    assert torch.equal(whole, wanted)
    assert int((whole == -7.0).sum()) >= 30 * 7


@every_width
@every_dtype
def test_a_codebook_means_what_the_page_says(bits: int, dtype: torch.dtype) -> None:
    """Codes of k-means are places in a codebook of fp16, in increasing order, at the end of the row."""
    for num_cols in (1, 5, 16, 33, 64):
        values = odd_rows(num_cols, dtype)
        row_bytes = KMeans(bits).row_bytes(num_cols, dtype)
        codes, is_exact = kernels.encode_clusters(values, torch.arange(len(values)), bits, row_bytes)
        book = codes[:, -2 * 2**bits :].contiguous().view(torch.float16).float()
        assert (book[:, 1:] >= book[:, :-1])[~is_exact].all()
        numbers = torch.from_numpy(bit_stream(codes[:, : -2 * 2**bits], num_cols, bits))
        whole = torch.full((len(values), num_cols + 2), -7.0, dtype=dtype)
        order = torch.randperm(len(values), generator=torch.Generator().manual_seed(1))
        kernels.decode_clusters(codes, order, bits, num_cols // 2, whole[:, 1 : 1 + num_cols - num_cols // 2], order)
        wanted = torch.full_like(whole, -7.0)
        wanted[:, 1 : 1 + num_cols - num_cols // 2] = book.gather(1, numbers)[:, num_cols // 2 :].to(dtype)
        assert torch.equal(whole, wanted)
        assert 0 < int(is_exact.sum()) < len(values)


# K-means is the best


def _squared_error(values: Tensor, bits: int) -> npt.NDArray[np.float64]:
    """Of each row, to the means of the clusters that its codes make: before fp16 rounds the codebook."""
    row_bytes = KMeans(bits).row_bytes(values.shape[1], values.dtype)
    codes, is_exact = kernels.encode_clusters(values, torch.arange(len(values)), bits, row_bytes)
    assert not is_exact.any()
    numbers = bit_stream(codes[:, : -2 * 2**bits], values.shape[1], bits)
    errors = []
    for row, labels in zip(values.double().numpy(), numbers, strict=True):
        errors.append(sum(float(((part - part.mean()) ** 2).sum()) for part in _parts(row, labels)))
    return np.array(errors)


def _parts(row: npt.NDArray[np.float64], labels: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.float64]]:
    for label in np.unique(labels):
        yield row[labels == label]


def _least_squared_error(row: npt.NDArray[np.float64], num_clusters: int) -> float:
    """Of all ways to cut the sorted values into clusters."""
    ordered = np.sort(row)
    ways = combinations(range(1, len(row)), min(num_clusters, len(row)) - 1)
    return min(sum(float(((part - part.mean()) ** 2).sum()) for part in np.split(ordered, way)) for way in ways)


@hypothesis.settings(max_examples=40)
@hypothesis.given(bits=st.sampled_from([2, 3]), num_cols=st.integers(2, 11), seed=st.integers(0, 2**20))
def test_clusters_are_the_best_there_are(bits: int, num_cols: int, seed: int) -> None:
    """No other way to cut a row's sorted values into clusters has a smaller squared error, but for fp16."""
    values = torch.randn(3, num_cols, generator=torch.Generator().manual_seed(seed))
    values = torch.where(torch.arange(num_cols) % 2 == 0, values, values**3)
    got = _squared_error(values, bits)
    least = np.array([_least_squared_error(row, 2**bits) for row in values.double().numpy()])
    assert (got <= least * 1.01 + 1e-6).all()
    assert (got >= least * (1 - 1e-9) - 1e-12).all()


@pytest.mark.parametrize(("bits", "num_cols"), [(2, 64), (3, 64), (4, 64), (4, 150)])
def test_clusters_are_no_worse_than_those_of_many_starts(bits: int, num_cols: int) -> None:
    """scikit-learn's k-means, from twenty starts, finds none that are better by a ten-thousandth."""
    values = torch.randn(6, num_cols, generator=torch.Generator().manual_seed(bits))
    values[4:] **= 3
    got = _squared_error(values, bits)
    for row, mine in zip(values.double().numpy(), got, strict=True):
        theirs = SklearnKMeans(2**bits, n_init=20, random_state=0).fit(row[:, None]).inertia_
        assert 0 < mine <= theirs * 1.0001


@every_width
def test_clusters_beside_a_value_far_away_are_as_good_on_either_side(bits: int) -> None:
    """What lies close together is told apart however far another value lies, to the left as to the right."""
    values = torch.randn(32, 64, generator=torch.Generator().manual_seed(bits)) * 1e-3
    values[:, 0] = -60_000.0
    if bits == 8:  # fewer values than clusters would be exact
        values = torch.cat(
            [values, values[:, 1:] * 0.7, values[:, 1:] * 0.3, values[:, 1:] * 1.7, values[:, 1:] * 0.1], 1
        )
    errors = _squared_error(values, bits)
    assert (errors > 0).all()
    np.testing.assert_allclose(errors, _squared_error(-values, bits), rtol=1e-3)


@every_width
@every_dtype
def test_clustered_rows_are_read_wherever_they_lie(bits: int, dtype: torch.dtype) -> None:
    """Rows by their numbers, in any order and repeated, from a slice of columns, give the bytes of their copies."""
    whole = torch.cat([odd_rows(40, dtype, seed) for seed in (1, 2)], 1)[:, 5:42]
    rows = torch.randint(0, len(whole), (150,), generator=torch.Generator().manual_seed(bits))
    row_bytes = KMeans(bits).row_bytes(37, dtype)
    copies = whole[rows].contiguous()
    got = kernels.encode_clusters(whole, rows, bits, row_bytes)
    assert_same(got, kernels.encode_clusters(copies, torch.arange(150), bits, row_bytes))
    assert not torch.equal(got[0], kernels.encode_clusters(whole, rows.flip(0), bits, row_bytes)[0])


@every_width
def test_clusters_of_a_row_do_not_depend_on_the_rows_beside_it(bits: int) -> None:
    """Sixteen rows are clustered at once, each as if it were alone."""
    for num_cols in (1, 7, 64, 300):
        values = odd_rows(num_cols, torch.float32)
        row_bytes = KMeans(bits).row_bytes(num_cols, torch.float32)
        codes, is_exact = kernels.encode_clusters(values, torch.arange(len(values)), bits, row_bytes)
        for row in range(len(values)):
            alone = kernels.encode_clusters(values, torch.tensor([row]), bits, row_bytes)
            assert torch.equal(alone[0][0], codes[row])
            assert alone[1][0] == is_exact[row]

"""Digests of rows: every bit of a row counts, whatever its dtype, its place in memory and the size of the table."""

import math
from collections.abc import Callable

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from torchrec_cnr.tracking import row_digests
from torchrec_cnr.tracking.row_digests import digest_rows

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, which they share: uint8 [num_rows, row_bytes]."""
    return tensor.view(-1).view(torch.uint8).view(len(tensor), -1)


def _random(dtype: torch.dtype, *size: int, seed: int = 0) -> Tensor:
    """Any bits, but for bools, which have one."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.zeros(size, dtype=dtype)
    if tensor.numel():
        high = 2 if dtype is torch.bool else 256
        _bytes(tensor).copy_(torch.randint(high, _bytes(tensor).shape, dtype=torch.uint8, generator=generator))
    return tensor


def _digest(tensor: Tensor) -> Tensor:
    blocks = [block for _, block in digest_rows(tensor)]
    return torch.cat([torch.empty(0, dtype=torch.int64, device=tensor.device), *blocks])


def _expected(tensor: Tensor) -> list[int]:
    """The formula, in integers without bounds, over the rows' bytes."""
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    word_bytes = next(size for size in (4, 2, 1) if row_bytes % size == 0)
    multipliers = row_digests._multipliers(row_bytes // word_bytes).tolist()
    found = []
    for row in range(len(tensor)):
        data = bytes(_bytes(tensor[row : row + 1].clone()).flatten().tolist()) if row_bytes else b""
        words = [data[at : at + word_bytes] for at in range(0, row_bytes, word_bytes)]
        numbers = [int.from_bytes(word, "little", signed=word_bytes > 1) for word in words]
        total = sum(a * b for a, b in zip(multipliers, numbers, strict=True)) % 2**64
        found.append(total - 2**64 if total >= 2**63 else total)
    return found


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(0, -1).contiguous().transpose(0, -1),
    "every second row": lambda tensor: tensor.repeat_interleave(2, dim=0)[::2],
    "from the second element on": lambda tensor: torch.cat((tensor.flatten()[:1], tensor.flatten()))[1:].view(
        tensor.shape
    ),
    "a slice of columns": lambda tensor: torch.cat((tensor, tensor), dim=-1)[..., : tensor.shape[-1]],
}


@pytest.mark.long
@hypothesis.settings(max_examples=300, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    dtype=st.sampled_from(DTYPES),
    size=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    layout=st.sampled_from(sorted(LAYOUTS)),
    block_words=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_digests_follow_their_formula(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: list[int], layout: str, block_words: int, seed: int
) -> None:
    """For any dtype, shape, layout in memory and size of block; rows come in order, each once."""
    monkeypatch.setattr(row_digests, "_BLOCK_WORDS", block_words)
    values = _random(dtype, *size, seed=seed)
    tensor = LAYOUTS[layout](values)
    assert torch.equal(_bytes(tensor.clone(memory_format=torch.contiguous_format)), _bytes(values))
    blocks = list(digest_rows(tensor))
    assert [row for rows, _ in blocks for row in range(rows.start, rows.stop)] == list(range(len(values)))
    assert [len(block) for _, block in blocks] == [rows.stop - rows.start for rows, _ in blocks]
    assert torch.cat([block for _, block in blocks]).tolist() == _expected(values)


@pytest.mark.parametrize("size", [(0, 4), (0,), (3, 0)])
def test_tensors_without_values_have_digests(size: tuple[int, ...]) -> None:
    """Shards without rows, and rows without values, which are all alike."""
    assert _digest(torch.zeros(size)).tolist() == [0] * size[0]


@every_dtype
@pytest.mark.parametrize("num_cols", [1, 3, 4])
def test_every_bit_counts(dtype: torch.dtype, num_cols: int) -> None:
    """Whichever bit of a row is flipped, the digest of that row is another, and those of the others stay."""
    values = _random(dtype, 3, num_cols)
    before = _digest(values)
    row_bytes = _bytes(values)
    for place in range(row_bytes.shape[1]):
        for bit in range(1 if dtype is torch.bool else 8):
            row_bytes[1, place] ^= 1 << bit
            assert (_digest(values) != before).tolist() == [False, True, False]
            row_bytes[1, place] ^= 1 << bit
    assert _digest(values).equal(before)


def test_bits_count_rather_than_values() -> None:
    """Zeros of both signs differ, and so do NaNs with other payloads; a NaN does not differ from itself."""
    values = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [math.nan, 1.0], [math.nan, 1.0], [math.nan, 1.0]])
    values.view(torch.int32)[4, 0] += 1
    assert values[0].equal(values[1])
    assert values.isnan()[:, 0].tolist() == [False, False, True, True, True]
    found = _digest(values)
    assert found[2] == found[3]
    assert len(found.unique()) == 4


@every_dtype
@pytest.mark.parametrize("num_cols", [2, 64])
def test_rows_that_differ_in_many_words_have_other_digests(dtype: torch.dtype, num_cols: int) -> None:
    """Also where all words differ in their highest bit alone, as those of a row and its negative do."""
    values = _random(dtype, 1000, num_cols)
    negative = values.clone()
    _bytes(negative)[:, dtype.itemsize - 1 :: dtype.itemsize] ^= 1 if dtype is torch.bool else 0x80
    assert not (_digest(values) == _digest(negative)).any()
    others = _random(dtype, 1000, num_cols, seed=1)
    is_same = (_bytes(values) == _bytes(others)).all(dim=1)
    assert (_digest(values) == _digest(others)).equal(is_same)


def test_multipliers_are_odd_and_do_not_repeat() -> None:
    """Each place in a row has one of its own, the same every time, without touching torch's own generator."""
    state = torch.get_rng_state()
    multipliers = row_digests._multipliers(10_000)
    assert torch.get_rng_state().equal(state)
    assert (multipliers % 2 == 1).all()
    assert len(multipliers.unique()) == 10_000
    assert row_digests._multipliers(10_000).equal(multipliers)
    assert 0.49 < float((multipliers > 0).double().mean()) < 0.51


@pytest.mark.gpu
@every_dtype
def test_digests_on_a_gpu_are_the_same(dtype: torch.dtype) -> None:
    """A table may move between devices; blocks are larger there."""
    values = _random(dtype, 5000, 7)
    assert _digest(values.to("cuda")).cpu().equal(_digest(values))

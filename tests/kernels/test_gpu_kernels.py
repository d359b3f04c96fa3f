"""The kernels for GPUs give the bytes of the reference, and they compile for a GPU.

Without a GPU, Triton's interpreter runs them, in a process of its own: it must be asked for before kernels are defined.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tests.kernels import reference
from tests.kernels.interpreter import LIMIT_SECS, interpret
from torchrec_cnr import kernels
from torchrec_cnr.kernels import cpu
from torchrec_cnr.kernels.gpu import fused_rows
from torchrec_cnr.kernels.search_plan import COVERING, GREEDY, LEAST_SQUARES, MIRRORED, SearchPlan, search_plan

PLANS = {
    "covering": search_plan(COVERING),
    "mirrored": search_plan(MIRRORED),
    "greedy": search_plan(GREEDY, num_bins=9, num_steps=2),
    "least squares": search_plan(LEAST_SQUARES, cuts=np.array([0.0, 0.15], np.float32), rounds=1, kept=2, polish=1),
}
BITS = (2, 3, 4, 8)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = (1, 2, 5, 16, 33, 64)
WIDE = 16  # from here on, only as many rows as are searched at a time: the interpreter takes long
NUM_ROWS, NUM_WIDE_ROWS = 50, 31
NUM_MANY_ROWS = 400_000
NUM_KINDS = 30  # rows of special kinds, which are always among them


def table_of(num_cols: int, dtype: torch.dtype) -> Tensor:
    """[100, num_cols] rows of all kinds; between two of them lie elements of neither."""
    generator = torch.Generator().manual_seed(num_cols)
    noise = torch.randn(100, num_cols, generator=generator)
    rows = noise * 10.0 ** torch.randint(-4, 2, (100, 1), generator=generator)
    rows[0:4] = torch.tensor([0.0, -0.0, 1 / 3, -7e-8])[:, None]  # of one value
    rows[4] *= 1e-40
    rows[5] *= 1e-7
    rows[6] = 3e5 + 1e4 * noise[6]  # beyond fp16 in this and the next: as bias, and as scale
    rows[7] = 5e8 * noise[7]
    rows[8:11] = torch.tensor([1000.0, -1.0, 64000.0])[:, None] + 0.01 * noise[8:11]
    rows[11] = noise[11].abs() + 0.1
    rows[12] = -rows[11]
    rows[13] = torch.where(noise[13] > 0, 0.0, -0.0)
    rows[14] = (noise[14] * 3).round() * 0.25  # on a grid
    for number, value in enumerate((torch.nan, torch.inf, -torch.inf, 90.0, -1e-30)):
        rows[15 + number, number % num_cols] = value
    rows[20] = torch.inf
    rows[21:30, 1::2] = -rows[21:30, : num_cols - 1 : 2]  # symmetric: both sides cost the same
    table = torch.full((100, num_cols + 3), torch.nan)
    table[:, :num_cols] = rows
    return table.to(dtype)[:, :num_cols]


def row_bytes_of(num_cols: int, bits: int) -> int:
    """As the schemes have it."""
    code_bytes = -(-num_cols * 3 // 8) if bits == 3 else -(-num_cols * bits // 16) * 2
    return code_bytes + 4


def expected_rows(table: Tensor, bits: int, plan: SearchPlan) -> tuple[Tensor, Tensor]:
    """Encoded rows, and which are stored exactly, as the reference says."""
    codes, scale, bias, is_exact = reference.encode(table, bits, plan)
    packed = reference.pack(codes, bits)
    padding = row_bytes_of(table.shape[1], bits) - packed.shape[1] - 4
    ends = torch.stack((scale, bias), 1).view(torch.uint8)
    return torch.cat((torch.nn.functional.pad(packed, (0, padding)), ends), 1), is_exact


def expected_target(
    encoded: Tensor, positions: Tensor, bits: int, first_col: int, target: Tensor, rows: Tensor
) -> Tensor:
    """The target after decoding, as the reference says: codes read bit by bit."""
    stream = (encoded[positions, :-4, None] >> torch.arange(8)) & 1
    first_bit, num_bits = first_col * bits, target.shape[1] * bits
    digits = stream.flatten(1)[:, first_bit : first_bit + num_bits].view(len(positions), -1, bits)
    codes = (digits.int() << torch.arange(bits)).sum(2)
    ends = encoded[positions, -4:].contiguous().view(torch.float16)
    expected = target.clone()
    expected[rows] = reference.decode(codes, ends[:, 0], ends[:, 1], target.dtype)
    return expected


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have the same bytes."""
    return torch.equal(found.cpu().contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def mismatches(method: str, bits: int, dtype: torch.dtype, num_cols: int, device: torch.device) -> Iterator[str]:
    """What one case gets wrong."""
    plan, row_bytes = PLANS[method], row_bytes_of(num_cols, bits)
    table = table_of(num_cols, dtype)
    generator = torch.Generator().manual_seed(bits)
    shuffled = torch.randperm(len(table), generator=generator)
    first_of_few = 100 - (NUM_WIDE_ROWS if num_cols >= WIDE else NUM_ROWS) + NUM_KINDS
    rows = shuffled[(shuffled < NUM_KINDS) | (shuffled >= first_of_few)]
    base = torch.as_strided(table, (100, num_cols + 3), (num_cols + 3, 1)).to(device)
    codes, is_exact = fused_rows.encode_rows(base[:, :num_cols], rows.to(device), bits, plan, row_bytes)
    expected, expected_exact = expected_rows(table[rows], bits, plan)
    if not (0 < int(expected_exact.sum()) < len(rows)):
        yield "the case has no rows of one kind"
    if not torch.equal(is_exact.cpu(), expected_exact):
        yield f"exact rows {rows[is_exact.cpu() != expected_exact].tolist()}"
    if not torch.equal(codes.cpu(), expected):
        yield f"codes of rows {rows[(codes.cpu() != expected).any(1)].tolist()}"
    if not torch.equal(codes.cpu(), cpu.encode_rows(table, rows, bits, plan, row_bytes)[0]):
        yield "not the CPU's codes"
    first_col, last_col = num_cols // 3, num_cols - num_cols // 4
    positions = torch.randperm(len(rows), generator=generator)[:20]
    places = torch.randperm(50, generator=generator)[: len(positions)]
    base = torch.zeros(50, last_col - first_col + 2, dtype=dtype)
    target, seen = base[:, :-2], base.to(device)
    fused_rows.decode_rows(codes, positions.to(device), bits, first_col, seen[:, :-2], places.to(device))
    if not same_bits(seen[:, :-2], expected_target(expected, positions, bits, first_col, target, places)):
        yield "decoded values"
    if seen[:, -2:].any():
        yield "elements between the target's rows"


def all_mismatches(device: torch.device, *methods: str) -> Iterator[str]:
    """What all cases get wrong, a line for each."""
    for case in product(methods, BITS, DTYPES, WIDTHS):
        for what in mismatches(*case, device):
            yield f"{case}: {what}"


def some_mismatches(device: torch.device, *methods: str) -> Iterator[str]:
    """What a third of the cases get wrong: every two of bits, dtype and width meet, but not all three."""
    for method, (number, bits), (place, width) in product(methods, enumerate(BITS), enumerate(WIDTHS)):
        case = method, bits, DTYPES[(number + place) % len(DTYPES)], width
        for what in mismatches(*case, device):
            yield f"{case}: {what}"


# "mirrored" is nearly "covering"; the others take a minute or more.
EVERY_TIME = [
    pytest.param(method, marks=[] if method == "covering" else [pytest.mark.slow])
    for method in PLANS
    if method != "mirrored"
]


@pytest.mark.long
@pytest.mark.parametrize("method", EVERY_TIME)
def test_interpreted_kernels_give_the_bytes_of_the_reference(method: str) -> None:
    """All bits, dtypes and widths, on rows of all kinds."""
    interpret("tests.kernels.test_gpu_kernels", some_mismatches.__name__, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", PLANS)
def test_interpreted_kernels_give_the_bytes_of_the_reference_in_all_cases(method: str) -> None:
    """All combinations of them."""
    interpret("tests.kernels.test_gpu_kernels", all_mismatches.__name__, method)


@pytest.mark.gpu
@pytest.mark.timeout(LIMIT_SECS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", PLANS)
def test_compiled_kernels_give_the_bytes_of_the_reference(method: str, dtype: torch.dtype) -> None:
    """The same on a GPU, where each case compiles kernels of its own."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)  # not the first if there are several
    cases = [(method, bits, dtype, width) for bits, width in product(BITS, WIDTHS)]
    assert [f"{case}: {what}" for case in cases for what in mismatches(*case, device)] == []


@pytest.mark.gpu
@pytest.mark.timeout(LIMIT_SECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_kernels_give_the_bytes_of_the_cpu_at_scale(dtype: torch.dtype) -> None:
    """Hundreds of thousands of rows of all magnitudes, which differ in where ranges are rounded and closed."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-6, 3, (NUM_MANY_ROWS, 1), generator=generator)
    table = (torch.randn(NUM_MANY_ROWS, 64, generator=generator) * 10.0**exponents).to(dtype)
    rows = torch.randperm(NUM_MANY_ROWS, generator=generator)[: NUM_MANY_ROWS * 3 // 4]
    on_device, rows_on_device = table.cuda(), rows.cuda()
    for method, bits in product(PLANS, (8, 4)):
        row_bytes = row_bytes_of(64, bits)
        found, is_exact = fused_rows.encode_rows(on_device, rows_on_device, bits, PLANS[method], row_bytes)
        expected, expected_exact = cpu.encode_rows(table, rows, bits, PLANS[method], row_bytes)
        assert torch.equal(is_exact.cpu(), expected_exact), (method, bits)
        assert torch.equal(found.cpu(), expected), (method, bits)


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """The last rows of a table of three billion elements."""
    num_rows = 48_000_000
    table = torch.zeros(num_rows, 64, dtype=torch.float16, device="cuda")
    last = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0)).half()
    table[-1000:] = last.cuda()
    rows = torch.arange(num_rows - 1000, num_rows, device="cuda")
    codes, _ = fused_rows.encode_rows(table, rows, 4, PLANS["covering"], 36)
    expected, _ = cpu.encode_rows(last, torch.arange(1000), 4, PLANS["covering"], 36)
    assert torch.equal(codes.cpu(), expected)
    table[-1000:] = 0
    fused_rows.decode_rows(codes, torch.arange(1000, device="cuda"), 4, 0, table, rows)
    decoded = torch.empty_like(last)
    cpu.decode_rows(expected, torch.arange(1000), 4, 0, decoded, torch.arange(1000))
    assert torch.equal(table[-1000:].cpu(), decoded)
    assert not table[:1000].any()


@pytest.mark.gpu
def test_many_rows_share_the_tiles() -> None:
    """Far more rows than are searched at a time."""
    table = torch.randn(300_000, 16, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(len(table))
    for plan in PLANS.values():
        found = fused_rows.encode_rows(table.cuda(), rows.cuda(), 4, plan, 12)
        assert torch.equal(found[0].cpu(), cpu.encode_rows(table, rows, 4, plan, 12)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_table_is_as_it_was_after_a_warm_up(dtype: torch.dtype) -> None:
    """What is decoded goes elsewhere."""
    table = table_of(16, dtype).cuda()
    before = table.clone()
    kernels.warm_up(table, 4, PLANS["least squares"], 12)
    assert same_bits(table, before.cpu())


def test_no_rows() -> None:
    """Nothing is launched for nothing."""
    table, none = torch.ones(3, 5), torch.empty(0, dtype=torch.int64)
    codes, is_exact = fused_rows.encode_rows(table, none, 4, PLANS["greedy"], 8)
    assert (codes.shape, is_exact.shape, is_exact.dtype) == ((0, 8), (0,), torch.bool)
    fused_rows.decode_rows(codes, none, 4, 0, table, none)
    assert torch.equal(table, torch.ones(3, 5))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """PTX of the kernels that are called, by name: they are compiled for a GPU that need not be there, and not run."""
    found: dict[str, str] = {}
    device = {"get_current_device": lambda: -1, "get_current_stream": lambda _: 0}
    target = GPUTarget("cuda", 90, 32)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(**device, get_current_target=lambda: target))
    for name in ("_encode", "_decode"):
        kernel = getattr(fused_rows, name)

        def compile_only(*args: Any, warmup: bool, run: Any = kernel.run, name: str = name, **options: Any) -> None:
            found[name] = run(*args, warmup=True, **options).asm["ptx"]

        monkeypatch.setattr(kernel, "run", compile_only)
    return found


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", PLANS)
def test_kernels_compile_to_plain_arithmetic(method: str, dtype: torch.dtype, compiled: dict[str, str]) -> None:
    """For a GPU: no product is fused with a sum, divisions are rounded to nearest, small numbers are not flushed."""
    table, rows = torch.ones(100, 16, dtype=dtype), torch.arange(100)
    codes, _ = fused_rows.encode_rows(table, rows, 3, PLANS[method], 10)
    fused_rows.decode_rows(codes, rows, 3, 0, table, rows)
    assert sorted(compiled) == ["_decode", "_encode"]
    assert "div.rn.f32" in compiled["_encode"]
    for ptx in compiled.values():
        assert "mul.rn.f32" in ptx or "mul.f32" in ptx
        assert re.findall(r"\S*(?:fma\.|mad\.\S*f\d|\.ftz|\.approx|div\.full|rcp\.)\S*", ptx) == []


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 1])
def test_what_was_warmed_up_is_not_compiled_again(
    first: int, compiled: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a table that begins at a multiple of 16 bytes or not: neither by many rows of it, nor by samples of them."""
    both = fused_rows._encode, fused_rows._decode
    for kernel in both:
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    table, rows = torch.ones(first + 190)[first:].view(-1, 19)[:, :16], torch.arange(10)
    assert (table.data_ptr() % 16 != 0) == bool(first)
    fused_rows.warm_up(table, 4, PLANS["covering"], 12)
    numbers = [[len(cache[0]) for cache in kernel.device_caches.values()] for kernel in both]
    assert numbers == [[2], [1]]
    sample = table.index_select(0, rows)
    for block in rows.split(3):  # the second begins at 8 bytes past a multiple of 16
        fused_rows.encode_rows(table, block, 4, PLANS["covering"], 12)
    fused_rows.encode_rows(table, rows, 4, PLANS["covering"], 12)
    codes, _ = fused_rows.encode_rows(sample, rows, 4, PLANS["covering"], 12)
    fused_rows.decode_rows(codes, rows, 4, 0, torch.empty_like(sample), rows)
    assert numbers == [[len(cache[0]) for cache in kernel.device_caches.values()] for kernel in both]


if __name__ == "__main__":
    function, *methods = sys.argv[1:]
    cases = {each.__name__: each for each in (some_mismatches, all_mismatches)}
    sys.exit("\n".join(cases[function](torch.device("cpu"), *methods)) or 0)


def test_the_cuts_of_a_plan_are_copied_to_a_device_once() -> None:
    """Each copy of them would wait for the device."""
    cpu_device = torch.device("cpu")
    plans = [search_plan(LEAST_SQUARES, cuts=np.array(cuts, np.float32)) for cuts in ([0.0, 0.15], [0.0, 0.15], [0.1])]
    first, same, other = (fused_rows._cuts_on(cpu_device, plan.cuts.tobytes()) for plan in plans)
    assert first is same
    assert [first.tolist(), other.tolist()] == [[0.0, pytest.approx(0.15)], [pytest.approx(0.1)]]
    assert fused_rows._cuts_on(cpu_device, PLANS["covering"].cuts.tobytes()).shape == (0,)

"""The throughput of the GPU kernels, relative to FBGEMM's CUDA operators and to a copy of the rows."""

from collections.abc import Callable, Mapping
from functools import partial

import fbgemm_gpu  # noqa: F401  registers the operators used here
import torch
from torch import Tensor

from benchmarks.support.devices import benchmark_device, device_name, nothing_timed, wait_for
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Candidate, Setup, interleave, ratios, times_table
from torchrec_cnr import kernels
from torchrec_cnr.kernels.search_plan import COVERING, MIRRORED, SearchPlan, search_plan
from torchrec_cnr.quantization.uniform import LADDERS, GreedySearch

DIM = 64
STD = 0.05
NUM_ROWS, NUM_QUICK_ROWS = 1 << 22, 1 << 12
NUM_ROUNDS, NUM_QUICK_ROUNDS = 7, 1
CALLS_PER_ROUND = 3
MODIFIED = 0.26
COPY, FBGEMM, GATHERED = "copy", "FBGEMM", "index_select and FBGEMM"

_OPS = torch.ops.fbgemm
Call = Callable[[], object]


def run(setup: Setup) -> Report:
    """Time encoding and decoding alternately with FBGEMM and a copy; without a CUDA device, report that."""
    device = benchmark_device(setup)
    if device is None:
        return nothing_timed(setup)
    num_rows = NUM_QUICK_ROWS if setup.quick else NUM_ROWS
    generator = torch.Generator(device).manual_seed(0)
    table = torch.randn(num_rows, DIM, generator=generator, device=device) * STD
    is_modified = torch.rand(num_rows, generator=generator, device=device) < MODIFIED
    figures: list[Figure] = []
    tables: list[Table] = []
    for bits in (8, 4):
        for what, calls in (
            (f"encoding, {bits} bits", _encoders(table, bits)),
            (f"encoding of gathered rows, {bits} bits", _gatherers(table, is_modified.nonzero().squeeze(1), bits)),
            (f"decoding, {bits} bits", _decoders(table, bits)),
        ):
            setup.say(f"timing {what}")
            found, times = _compared(what, calls, device, setup.quick)
            figures += found
            tables.append(times)
    return Report(
        title=f"kernels on {device_name(device)}, {num_rows:,} rows of {DIM} fp32",
        notes=(
            f"Throughput in turns, {CALLS_PER_ROUND} calls a round, each round until the device is done. All write "
            "into fresh memory.",
            f"Gathered: {MODIFIED:.0%} of the rows, by their numbers. A copy is one of the rows that are coded.",
        ),
        figures=tuple(figures),
        tables=tuple(tables),
    )


def _plans(bits: int) -> Mapping[str, SearchPlan]:
    """Return the searches to time, by name."""
    ladder = LADDERS[bits]
    return {
        "Asymmetric": search_plan(COVERING),
        "Symmetric": search_plan(MIRRORED),
        "greedy": GreedySearch().plan,
        "least squares, cheapest": ladder[0].plan,
        "least squares, best": ladder[-1].plan,
    }


def _row_bytes(bits: int) -> int:
    return DIM * bits // 8 + 4


def _encoders(table: Tensor, bits: int) -> dict[str, Call]:
    rows = torch.arange(len(table), device=table.device)
    others: dict[str, Call] = {
        COPY: table.clone,
        FBGEMM: lambda: _OPS.FloatToFusedNBitRowwiseQuantizedSBHalf(table, bits),
    }
    return others | {
        name: lambda plan=plan: kernels.encode_rows(table, rows, bits, plan, _row_bytes(bits))
        for name, plan in _plans(bits).items()
    }


def _gatherers(table: Tensor, rows: Tensor, bits: int) -> dict[str, Call]:
    plan = search_plan(COVERING)
    return {
        COPY: lambda: table.index_select(0, rows),
        GATHERED: lambda: _OPS.FloatToFusedNBitRowwiseQuantizedSBHalf(table.index_select(0, rows), bits),
        "Asymmetric": lambda: kernels.encode_rows(table, rows, bits, plan, _row_bytes(bits)),
    }


def _decoders(table: Tensor, bits: int) -> dict[str, Call]:
    rows = torch.arange(len(table), device=table.device)
    codes, _ = kernels.encode_rows(table, rows, bits, search_plan(COVERING), _row_bytes(bits))
    return {
        COPY: table.clone,
        FBGEMM: lambda: _OPS.FusedNBitRowwiseQuantizedSBHalfToFloat(codes, bits),
        "ours": lambda: kernels.decode_rows(codes, rows, bits, 0, torch.empty_like(table), rows),
    }


def _compared(what: str, calls: Mapping[str, Call], device: torch.device, quick: bool) -> tuple[list[Figure], Table]:
    """Return our throughput relative to each other candidate; ours is the last of ``calls``."""
    timings = interleave(
        {name: Candidate(partial(_repeat, call, device)) for name, call in calls.items()},
        NUM_QUICK_ROUNDS if quick else NUM_ROUNDS,
    )
    names = list(calls)
    figures = [
        Figure.over_rounds(f"{what}: {ours}, throughput of {other}", ratios(timings, other, ours), "×")
        for ours in names[2:]
        for other in names[:2]
    ]
    return figures, times_table(what, timings, CALLS_PER_ROUND)


def _repeat(call: Call, device: torch.device, _: int) -> None:
    for _ in range(CALLS_PER_ROUND):
        call()
    wait_for(device)


BENCHMARK = Benchmark(run, "speed of the kernels on a CUDA device, relative to FBGEMM and a copy")

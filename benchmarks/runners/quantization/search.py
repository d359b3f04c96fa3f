"""Error and speed of adaptive quantization, relative to the greedy search of the paper and of PyTorch."""

import os
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

import torchrec_cnr as cnr
from benchmarks.support.data.clicks import trained_on
from benchmarks.support.data.embedding_rows import DISTRIBUTIONS, drawn_rows, trained_rows
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Candidate, Setup, interleave, ratios, times_table
from torchrec_cnr.quantization import Scheme
from torchrec_cnr.saving.encoding import sampled_rows

DIM = 64
NUM_ROWS, NUM_QUICK_ROWS = 1 << 16, 1 << 9
NUM_SLOW_ROWS = 1 << 13  # for searches of 200 bins
NUM_ROUNDS, NUM_QUICK_ROUNDS = 5, 1
WIDTHS = (16, 32, 64, 128)
BITS = (2, 3, 4)
NUM_ERROR_ROWS, NUM_QUICK_ERROR_ROWS = 2000, 50
BINS = {2: 25, 3: 25, 4: 45}  # the numbers of bins in the paper
MAX_BINS = 200
PREPACK: dict[int, Callable[..., Tensor]] = {
    2: torch.ops.quantized.embedding_bag_2bit_prepack,
    4: torch.ops.quantized.embedding_bag_4bit_prepack,
}
UNPACK: dict[int, Callable[..., Tensor]] = {
    2: torch.ops.quantized.embedding_bag_2bit_unpack,
    4: torch.ops.quantized.embedding_bag_4bit_unpack,
}
TRAINED = "trained"


def run(setup: Setup) -> Report:
    """Compare throughput at one width, then errors at all widths, bits and kinds of rows."""
    torch.set_num_threads(os.cpu_count() or 1)
    figures: list[Figure] = []
    tables: list[Table] = []
    for bits, kind in product(PREPACK, (TRAINED, "gaussian")):
        setup.say(f"timing {bits} bits on {kind} rows")
        found, table = _throughput(setup, bits, kind)
        figures += found
        tables.append(table)
    setup.say("measuring errors")
    errors, table = _errors(setup)
    return Report(
        title=f"adaptive quantization against greedy search; throughput at {DIM} columns",
        notes=(
            f"Throughput in turns, with {torch.get_num_threads()} threads. PyTorch's search is",
            "torch.ops.quantized.embedding_bag_{4,2}bit_prepack(optimized_qparams=True, ratio=1.0). Trained rows come",
            f"from {trained_on()}. Errors are mean l2 norms of rows as a reader gets them. Where all widths are",
            "compared, greedy is the better one of torch.choose_qparams_optimized and our GreedySearch, over the whole",
            "range with 25 bins at 2 and 3 bits and 45 at 4.",
        ),
        figures=(*figures, *errors),
        tables=(*tables, table),
    )


def _throughput(setup: Setup, bits: int, kind: str) -> tuple[list[Figure], Table]:
    num_rows = NUM_QUICK_ROWS if setup.quick else NUM_ROWS
    rows = _rows(kind, num_rows, DIM)
    slow_rows = rows[: min(num_rows, NUM_SLOW_ROWS)].clone()
    best = cnr.AdaptiveAsymmetric.best(bits)
    names = f"prepack, {BINS[bits]} bins", f"prepack, {MAX_BINS} bins"
    settings = {"optimized_qparams": True, "ratio": 1.0}
    candidates = {
        names[0]: Candidate(lambda _: PREPACK[bits](rows, nbins=BINS[bits], **settings)),
        "default": Candidate(lambda _: _chosen(bits, rows).encode(rows)),
        names[1]: Candidate(lambda _: PREPACK[bits](slow_rows, nbins=MAX_BINS, **settings)),
        "best": Candidate(lambda _: best.encode(slow_rows)),
    }
    timings = interleave(candidates, NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS)
    targets = {} if kind != TRAINED else {"default": 40.0, "best": 10.0}
    figures = []
    for ours, theirs, data, bins in (("default", names[0], rows, BINS[bits]), ("best", names[1], slow_rows, MAX_BINS)):
        what = f"{bits} bits, {kind} rows, {ours} against {theirs}"
        figures.append(
            Figure.over_rounds(
                f"{what}: throughput", ratios(timings, theirs, ours), "×", at_least=targets.get(ours, 0) or None
            )
        )
        packed = PREPACK[bits](data, nbins=bins, **settings)
        scheme = _chosen(bits, data) if ours == "default" else best
        error = _mean_l2(data, _decoded(scheme, data)) / _mean_l2(data, UNPACK[bits](packed))
        figures.append(Figure(f"{what}: mean l2", error, "×", at_most=1.0))
    table = times_table(f"{bits} bits, {kind}", timings)
    return figures, table


def _errors(setup: Setup) -> tuple[list[Figure], Table]:
    """Compare the error of both settings with greedy searches of few and of many bins, for all kinds of rows."""
    num_rows = NUM_QUICK_ERROR_ROWS if setup.quick else NUM_ERROR_ROWS
    lines = []
    worst = {"default": 0.0, "best": 0.0}
    for width, kind, bits in product(WIDTHS, (*DISTRIBUTIONS, TRAINED), BITS):
        rows = _rows(kind, num_rows, width)
        few, many = (_greedy_error(rows, bits, bins) for bins in (BINS[bits], MAX_BINS))
        default = _mean_l2(rows, _decoded(_chosen(bits, rows), rows))
        best = _mean_l2(rows, _decoded(cnr.AdaptiveAsymmetric.best(bits), rows))
        worst["default"] = max(worst["default"], default / few)
        worst["best"] = max(worst["best"], best / many)
        cells = (f"{few:.5f}", f"{default / few:.4f}", f"{many:.5f}", f"{best / many:.4f}")
        lines.append((f"{width} columns, {kind}, {bits} bits", *cells))
    what = f"the worst of {len(lines)} kinds of rows: mean l2 of"
    figures = [
        Figure(f"{what} the default, of greedy's with 25 or 45 bins", worst["default"], "×", at_most=1.01),
        Figure(f"{what} the best, of greedy's with {MAX_BINS} bins", worst["best"], "×", at_most=1.0),
    ]
    columns = ("rows", "greedy", "default / greedy", f"greedy, {MAX_BINS} bins", "best / that")
    return figures, Table(columns, tuple(lines))


def _rows(kind: str, num_rows: int, width: int) -> Tensor:
    return trained_rows(num_rows, width) if kind == TRAINED else drawn_rows(kind, num_rows, width)


def _chosen(bits: int, rows: Tensor) -> Scheme:
    """Return the default scheme, with the search that a save chooses."""
    return cnr.AdaptiveAsymmetric(bits).choose(lambda: sampled_rows(rows, None), 0)


def _decoded(scheme: Scheme, rows: Tensor) -> Tensor:
    return scheme.decode(scheme.encode(rows).codes, rows.shape[1], rows.dtype)


def _mean_l2(rows: Tensor, decoded: Tensor) -> float:
    return float((rows.double() - decoded.double()).norm(dim=1).mean())


def _greedy_error(rows: Tensor, bits: int, num_bins: int) -> float:
    """Return the lesser mean l2 error of PyTorch's greedy search and of ours, both over the whole range."""
    ours = _decoded(cnr.AdaptiveAsymmetric(bits, cnr.GreedySearch(num_bins)), rows)
    return min(_mean_l2(rows, ours), _mean_l2(rows, _torch_greedy(rows, bits, num_bins)))


def _torch_greedy(rows: Tensor, bits: int, num_bins: int) -> Tensor:
    """Return the rows decoded after ``torch.choose_qparams_optimized``, with scale and bias rounded to fp16."""
    ends = [torch.choose_qparams_optimized(row, row.numel(), num_bins, 1.0, bits) for row in rows]
    high, low = (torch.cat([pair[end] for pair in ends]) for end in (0, 1))
    top = (1 << bits) - 1
    bias = low.half().float()[:, None]
    scale = ((high[:, None] - bias) / top).half().float()
    return ((rows - bias) / scale).round().clamp(0, top) * scale + bias


BENCHMARK = Benchmark(
    run, "error and speed of adaptive quantization, relative to the greedy searches of the paper and PyTorch"
)

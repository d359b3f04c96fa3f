"""The throughput of plain quantization, relative to FBGEMM, and of k-means."""

import os
from collections.abc import Callable, Iterator
from functools import partial

import fbgemm_gpu  # noqa: F401  registers the operators used here
import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits
from torch import Tensor

import torchrec_cnr as cnr
from benchmarks.support.data.embedding_rows import drawn_rows, trained_rows
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Candidate, Setup, interleave, ratios, times_table
from torchrec_cnr.storage.pack_writer import BLOCK_BYTES

DIM = 64
NUM_ROWS, NUM_QUICK_ROWS = 1 << 20, 1 << 9
NUM_ROUNDS, NUM_QUICK_ROUNDS = 15, 1
BLOCK_ROWS = BLOCK_BYTES // (4 * DIM)
NUM_CLUSTERED, NUM_CLUSTERED_BY_SKLEARN, NUM_QUICK_CLUSTERED = 1 << 14, 300, 5
MODIFIED = 0.26

_OPS = torch.ops.fbgemm
Coder = Callable[[Tensor], Tensor]
FP16_SCALE, FP32_SCALE = "FBGEMM", "FBGEMM, fp32 scale"  # the same bytes as ours, and a faster 8-bit layout


def _encoders(bits: int) -> dict[str, Coder]:
    found: dict[str, Coder] = {FP16_SCALE: lambda rows: _OPS.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, bits)}
    return found | ({FP32_SCALE: _OPS.FloatToFused8BitRowwiseQuantized} if bits == 8 else {})


def _decoders(bits: int) -> dict[str, Coder]:
    found: dict[str, Coder] = {FP16_SCALE: lambda codes: _OPS.FusedNBitRowwiseQuantizedSBHalfToFloat(codes, bits)}
    return found | ({FP32_SCALE: _OPS.Fused8BitRowwiseQuantizedToFloat} if bits == 8 else {})


def _candidate(run: Callable[[Tensor], object], tensor: Tensor) -> Candidate:
    """Return a candidate that runs block by block, as saves and loads do, so that blocks reuse the same memory."""

    def run_blocks(_: int) -> None:
        for block in tensor.split(BLOCK_ROWS):
            run(block)

    return Candidate(run_blocks)


def run(setup: Setup) -> Report:
    """Time both implementations alternately, and k-means separately."""
    torch.set_num_threads(os.cpu_count() or 1)
    rows = drawn_rows("gaussian", NUM_QUICK_ROWS if setup.quick else NUM_ROWS, DIM)
    figures: list[Figure] = []
    tables: list[Table] = []
    for bits in (8, 4, 2):
        for found, table in (_encoding(setup, rows, bits), _decoding(setup, rows, bits), _gathering(setup, rows, bits)):
            figures += found
            tables.append(table)
    figures += _clusters(setup)
    return Report(
        title=f"Asymmetric and FBGEMM's operators, {len(rows):,} rows of {DIM} fp32; KMeans and scikit-learn",
        notes=(
            f"Throughput in turns, with {torch.get_num_threads()} threads, in blocks of {BLOCK_ROWS:,} rows. FBGEMM's",
            "operators are those that make and read the same bytes; for 8 bits it has a faster one, with scale and",
            "bias in fp32. We decode into a target, as a load does; FBGEMM into memory that is used again.",
            "Gathered: a quarter of the rows, by their numbers, where FBGEMM encodes what index_select has copied.",
        ),
        figures=tuple(figures),
        tables=tuple(tables),
    )


def _encoding(setup: Setup, rows: Tensor, bits: int) -> tuple[list[Figure], Table]:
    candidates = {"ours": _candidate(cnr.Asymmetric(bits).encode, rows)}
    candidates |= {name: _candidate(encode, rows) for name, encode in _encoders(bits).items()}
    return _compared(setup, f"Asymmetric({bits}) encodes", candidates, at_least=0.9)


def _decoding(setup: Setup, rows: Tensor, bits: int) -> tuple[list[Figure], Table]:
    scheme, target = cnr.Asymmetric(bits), torch.empty(BLOCK_ROWS, DIM)
    numbers = torch.arange(BLOCK_ROWS)

    def decode(codes: Tensor) -> None:
        scheme.decode_into(codes, numbers[: len(codes)], 0, target, numbers[: len(codes)])

    candidates = {"ours": _candidate(decode, scheme.encode(rows).codes)}
    encoders = _encoders(bits)
    candidates |= {name: _candidate(decode, encoders[name](rows)) for name, decode in _decoders(bits).items()}
    return _compared(setup, f"Asymmetric({bits}) decodes", candidates, at_least=0.9)


def _gathering(setup: Setup, rows: Tensor, bits: int) -> tuple[list[Figure], Table]:
    scheme = cnr.Asymmetric(bits)
    is_modified = torch.rand(len(rows), generator=torch.Generator().manual_seed(0)) < MODIFIED
    numbers = is_modified.nonzero().squeeze(1)
    candidates = {"ours": _candidate(lambda block: scheme.encode(rows, block), numbers)}
    for name, encode in _encoders(bits).items():
        candidates[name] = _candidate(partial(_encode_copies, encode, rows), numbers)
    return _compared(setup, f"Asymmetric({bits}) encodes gathered rows", candidates, at_least=None)


def _encode_copies(encode: Coder, rows: Tensor, numbers: Tensor) -> Tensor:
    return encode(rows.index_select(0, numbers))


def _compared(
    setup: Setup, what: str, candidates: dict[str, Candidate], at_least: float | None
) -> tuple[list[Figure], Table]:
    setup.say(f"timing how {what}")
    timings = interleave(candidates, NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS)
    figures = [
        Figure.over_rounds(
            f"{what}, throughput of {name}'s", ratios(timings, name, "ours"), "×",
            at_least=at_least if name == FP16_SCALE else None,
        )
        for name in candidates
        if name != "ours"
    ]  # fmt: skip
    return figures, times_table(what, timings)


def _clusters(setup: Setup) -> Iterator[Figure]:
    """Compare our k-means with that of scikit-learn, which is run only on the first rows, with scaled times."""
    setup.say("clustering")
    num_rows = NUM_QUICK_CLUSTERED if setup.quick else NUM_CLUSTERED
    rows = trained_rows(num_rows, DIM)
    few = rows[: min(num_rows, NUM_CLUSTERED_BY_SKLEARN)].numpy()
    scheme = cnr.KMeans(4)
    candidates = {
        "ours": Candidate(lambda _: scheme.encode(rows)),
        "scikit-learn": Candidate(lambda _: _sklearn_l2(few)),
    }
    timings = interleave(candidates, 1 if setup.quick else 3)
    speeds = [ratio * num_rows / len(few) for ratio in ratios(timings, "scikit-learn", "ours")]
    yield Figure.over_rounds("KMeans(4), throughput of scikit-learn's", speeds, "×", at_least=100.0)
    ours = scheme.decode(scheme.encode(torch.from_numpy(few)).codes, DIM, torch.float32)
    error = float((ours - torch.from_numpy(few)).norm(dim=1).mean())
    yield Figure("KMeans(4), mean l2 of scikit-learn's", error / _sklearn_l2(few), "×", at_most=1.02)


def _sklearn_l2(rows: NDArray[np.float32]) -> float:
    """Return the mean l2 error of one fit per row, with scikit-learn's default settings."""
    with threadpool_limits(1):  # more threads are slower, because a row is little work
        inertias = [KMeans(n_clusters=16, random_state=0).fit(row[:, None]).inertia_ for row in rows]
    return float(np.sqrt(inertias).mean())


BENCHMARK = Benchmark(run, "speed of plain quantization and of k-means, relative to FBGEMM and scikit-learn")

"""The throughput of plain quantization, relative to FBGEMM, of entropy coding, k-means, and transform-coded rows.

Transform-coded rows are those of trained tables. Their entropy coding counts, as do all threads.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import fbgemm_gpu  # noqa: F401  registers the operators used here
import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits
from torch import Tensor

import torchrec_cnr as cnr
from benchmarks.support.data.click_model import Head
from benchmarks.support.data.clicks import trained_on
from benchmarks.support.data.embedding_rows import drawn_rows, trained_rows
from benchmarks.support.data.tiled_rows import tiled, trained_table
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Candidate, Setup, interleave, ratios, times_table
from torchrec_cnr.format.blob_bytes import join, split
from torchrec_cnr.quantization import Scheme, SchemeRules, Transformed
from torchrec_cnr.quantization.packed_rows import pack_rows, unpack_bytes
from torchrec_cnr.saving.encoding import choose_scheme
from torchrec_cnr.storage.pack_writer import BLOCK_BYTES

DIM = 64
NUM_ROWS, NUM_QUICK_ROWS = 1 << 20, 1 << 9
NUM_ROUNDS, NUM_QUICK_ROUNDS = 15, 1
BLOCK_ROWS = BLOCK_BYTES // (4 * DIM)
NUM_CLUSTERED, NUM_CLUSTERED_BY_SKLEARN, NUM_QUICK_CLUSTERED = 1 << 14, 300, 5
MODIFIED = 0.26
NUM_TRAINED_ROWS, NUM_QUICK_TRAINED_ROWS = 1 << 18, 1 << 13
TRANSFORM_THREADS = 2
HEADS: tuple[Head, ...] = ("dot products", "DCN-v2")
TABLES = ("readers", "articles")
MIN_ENCODED, MIN_DECODED = 0.4, 1.0  # GB of fp32 per second
TRANSFORM, UNIFORM, COPY = "TransformCoded", "AdaptiveAsymmetric(4)", "copy"

_OPS = torch.ops.fbgemm
Coder = Callable[[Tensor], Tensor]
BlockT = TypeVar("BlockT")
FP16_SCALE, FP32_SCALE = "FBGEMM", "FBGEMM, fp32 scale"  # the same bytes as ours, and a faster 8-bit layout


def _encoders(bits: int) -> dict[str, Coder]:
    found: dict[str, Coder] = {FP16_SCALE: lambda rows: _OPS.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, bits)}
    return found | ({FP32_SCALE: _OPS.FloatToFused8BitRowwiseQuantized} if bits == 8 else {})


def _decoders(bits: int) -> dict[str, Coder]:
    found: dict[str, Coder] = {FP16_SCALE: lambda codes: _OPS.FusedNBitRowwiseQuantizedSBHalfToFloat(codes, bits)}
    return found | ({FP32_SCALE: _OPS.Fused8BitRowwiseQuantizedToFloat} if bits == 8 else {})


def _candidate(run: Callable[[Tensor], object], tensor: Tensor) -> Candidate:
    """Return a candidate that runs block by block, as saves and loads do, so that blocks reuse the same memory."""
    return _each(run, tensor.split(BLOCK_ROWS))


def _each(run: Callable[[BlockT], object], blocks: Sequence[BlockT]) -> Candidate:
    def run_blocks(_: int) -> None:
        for block in blocks:
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
        tables.append(_entropy_coding(setup, rows, bits))
    figures += _clusters(setup)
    for found, table in _transforms(setup):
        figures += found
        tables.append(table)
    return Report(
        title=f"Asymmetric and FBGEMM's operators, {len(rows):,} rows of {DIM} fp32; KMeans; TransformCoded",
        notes=(
            f"Throughput in turns, with {torch.get_num_threads()} threads, in blocks of {BLOCK_ROWS:,} rows. FBGEMM's",
            "operators are those that make and read the same bytes; for 8 bits it has a faster one, with scale and",
            "bias in fp32. We decode into a target, as a load does; FBGEMM into memory that is used again.",
            "Gathered: a quarter of the rows, by their numbers, where FBGEMM encodes what index_select has copied.",
            f"TransformCoded has the error of 4 bits. Its entropy coder counts, with {TRANSFORM_THREADS} threads. Its",
            f"rows are those of tables trained on {trained_on()}, repeated with noise. GB are of fp32. Copies are made",
            "into memory that is used again.",
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


def _entropy_coding(setup: Setup, rows: Tensor, bits: int) -> Table:
    """Time the bytes of blobs whose codes are compressed, and of those of which only scale and bias are."""
    setup.say(f"timing entropy-coded codes of {bits} bits")
    schemes = {
        "plain": cnr.Asymmetric(bits),
        "entropy-coded": cnr.Asymmetric(bits, entropy_coded=True),
    }
    candidates = {}
    for name, scheme in schemes.items():
        blobs = [(len(block), _blob(scheme, block)) for block in rows.split(BLOCK_ROWS)]
        num_bytes = sum(blob.nbytes for _, blob in blobs) / len(rows)
        candidates[f"{name}, {num_bytes:.1f} bytes a row, encodes"] = _candidate(partial(_blob, scheme), rows)
        candidates[f"{name}, decodes"] = _each(partial(_decode_blob, scheme, torch.empty(BLOCK_ROWS, DIM)), blobs)
    timings = interleave(candidates, NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS)
    return times_table(f"Asymmetric({bits}), blobs", timings)


def _decode_blob(scheme: Scheme, target: Tensor, sized: tuple[int, NDArray[np.uint8]]) -> None:
    """Decode a number of rows and their blob into the first rows of ``target``."""
    num_rows, blob = sized
    row_bytes, tail_bytes = scheme.row_bytes(DIM, target.dtype), scheme.tail_bytes(DIM, target.dtype)
    codes = torch.from_numpy(join(blob, num_rows, row_bytes, tail_bytes, "here")).view(num_rows, -1)
    numbers = torch.arange(num_rows)
    scheme.decode_into(codes, numbers, 0, target, numbers)


def _blob(scheme: Scheme, block: Tensor) -> NDArray[np.uint8]:
    codes = scheme.encode(block).codes.numpy()
    divided = split(codes, scheme.tail_bytes(DIM, block.dtype))
    return codes.reshape(-1) if divided is None else divided


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


def _transforms(setup: Setup) -> Iterator[tuple[list[Figure], Table]]:
    """Compare transform-coded rows of trained tables with uniform codes and with a copy, one table after another."""
    torch.set_num_threads(TRANSFORM_THREADS)
    for head in HEADS:
        for name in TABLES:
            setup.say(f"timing transform-coded {name}, {head}")
            trained = trained_table(head, name, setup.quick).rows
            rows = tiled(trained, NUM_QUICK_TRAINED_ROWS if setup.quick else NUM_TRAINED_ROWS)
            chosen, uniform = (
                choose_scheme(SchemeRules.of(rule), "table", is_table=True, values=rows, rows=None, num_restores=0)
                for rule in (cnr.TransformCoded(cnr.AdaptiveAsymmetric(4)), cnr.AdaptiveAsymmetric(4))
            )
            if isinstance(chosen, Transformed):  # always, but for small sizes
                what = f"{name}, {head}"
                yield _speeds(setup, f"encodes {what}", _transform_encoders(rows, chosen, uniform), rows, MIN_ENCODED)
                yield _speeds(setup, f"decodes {what}", _transform_decoders(rows, chosen, uniform), rows, MIN_DECODED)


def _transform_encoders(rows: Tensor, transformed: Transformed, uniform: Scheme) -> dict[str, Candidate]:
    target = torch.empty(BLOCK_ROWS, DIM)
    return {
        TRANSFORM: _candidate(lambda block: _packed(transformed, block), rows),
        UNIFORM: _candidate(uniform.encode, rows),
        COPY: _candidate(lambda block: target[: len(block)].copy_(block), rows),
    }


def _packed(scheme: Transformed, block: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of rows in a data file. No row of a trained table must be stored exactly."""
    return pack_rows(scheme.encode(block).codes.view(torch.int16).numpy(), scheme.known)


def _transform_decoders(rows: Tensor, transformed: Transformed, uniform: Scheme) -> dict[str, Candidate]:
    target, numbers = torch.empty(BLOCK_ROWS, DIM), torch.arange(BLOCK_ROWS)
    blocks = rows.split(BLOCK_ROWS)

    def unpack(packed: tuple[NDArray[np.uint8], int]) -> None:
        data, num_rows = packed
        codes = torch.from_numpy(unpack_bytes(data, num_rows, 0, transformed.known, "a block")).view(num_rows, -1)
        decode(transformed, codes)

    def decode(scheme: Scheme, codes: Tensor) -> None:
        scheme.decode_into(codes, numbers[: len(codes)], 0, target, numbers[: len(codes)])

    return {
        TRANSFORM: _each(unpack, [(_packed(transformed, block), len(block)) for block in blocks]),
        UNIFORM: _each(partial(decode, uniform), [uniform.encode(block).codes for block in blocks]),
        COPY: _candidate(lambda block: target[: len(block)].copy_(block), rows),
    }


def _speeds(
    setup: Setup, what: str, candidates: dict[str, Candidate], rows: Tensor, at_least: float
) -> tuple[list[Figure], Table]:
    timings = interleave(candidates, NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS)
    speeds = {name: [rows.nbytes / 1e9 / took.secs for took in taken] for name, taken in timings.items()}
    figures = [
        Figure.over_rounds(f"{TRANSFORM} {what}", speeds[TRANSFORM], "GB/s", at_least=at_least),
        Figure.over_rounds(f"{TRANSFORM} {what}, throughput of a copy's", ratios(timings, COPY, TRANSFORM), "×"),
        Figure.over_rounds(f"{UNIFORM} {what}", speeds[UNIFORM], "GB/s"),
    ]
    return figures, times_table(f"{TRANSFORM} {what}", timings)


def _sklearn_l2(rows: NDArray[np.float32]) -> float:
    """Return the mean l2 error of one fit per row, with scikit-learn's default settings."""
    with threadpool_limits(1):  # more threads are slower, because a row is little work
        inertias = [KMeans(n_clusters=16, random_state=0).fit(row[:, None]).inertia_ for row in rows]
    return float(np.sqrt(inertias).mean())


BENCHMARK = Benchmark(
    run, "speed of plain quantization, relative to FBGEMM, of k-means, and of transform-coded rows of trained tables"
)

"""Kernels for CPUs, compiled by numba, on as many threads as torch uses.

The functions of this module pass tensors to the compiled kernels.

- ``compiling``: compiles kernels and caches the machine code, and runs them on several threads.
- ``lanes``: vectors of 16 values for numba, with one row in each lane.
- ``memory``: moves lanes and single values between memory and registers.
- ``fused_rows``: encodes rows with uniform codes, and decodes them.
- ``range_search``: searches the range of 16 rows at a time.
- ``kmeans``: clusters rows and encodes them with a codebook; decodes them.
- ``row_transform``: rows as multiples of a step in an orthonormal basis, and back.
- ``symbol_coder``: an entropy coder of whole numbers.
- ``gather_rows``: copies scattered rows of a table into contiguous memory.
- ``bitsets``: sets of rows with one bit for each row.

Terms of this package:

- *tile*: 16 rows, transposed so that each column is one vector.
- *scratch*: working memory of a kernel, passed by the caller, because compiled code allocates nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrec_cnr.kernels.cpu import fused_rows, kmeans, row_transform, symbol_coder
from torchrec_cnr.kernels.cpu.compiling import Kernel, in_parallel
from torchrec_cnr.kernels.cpu.fused_rows import scratch_for
from torchrec_cnr.kernels.cpu.kmeans import cluster_scratch_for
from torchrec_cnr.kernels.cpu.lanes import LANES
from torchrec_cnr.kernels.cpu.row_transform import PaddedBasis
from torchrec_cnr.kernels.cpu.symbol_coder import NUM_STATES, EncodingPlan, SymbolTables, most_words
from torchrec_cnr.kernels.search_plan import SearchPlan


def encode_rows(table: Tensor, rows: Tensor, bits: int, plan: SearchPlan, row_bytes: int) -> tuple[Tensor, Tensor]:
    """Encode rows of a table; see ``kernels.encode_rows``."""
    make_scratch = partial(scratch_for, table.shape[1], plan)
    return _encode(fused_rows.encode, table, rows, (bits, plan, row_bytes), row_bytes, make_scratch, chunk_rows=1024)


def decode_rows(codes: Tensor, positions: Tensor, bits: int, first_col: int, target: Tensor, rows: Tensor) -> None:
    """Decode rows into a target; see ``kernels.decode_rows``."""
    # A thread decodes half of 8 MiB of fp32 in about the time of waking another thread.
    _decode(fused_rows.decode, codes, positions, bits, first_col, target, rows, chunk_elements=1 << 21)


def encode_clusters(table: Tensor, rows: Tensor, bits: int, row_bytes: int) -> tuple[Tensor, Tensor]:
    """Encode rows of a table by k-means; see ``kernels.encode_clusters``."""
    make_scratch = partial(cluster_scratch_for, table.shape[1], 1 << bits)
    return _encode(kmeans.encode, table, rows, (bits, row_bytes), row_bytes, make_scratch, chunk_rows=64)


def decode_clusters(codes: Tensor, positions: Tensor, bits: int, first_col: int, target: Tensor, rows: Tensor) -> None:
    """Decode rows of k-means into a target; see ``kernels.decode_clusters``."""
    # Looking up codes takes about fourteen times as long, so smaller chunks are worth another thread.
    _decode(kmeans.decode, codes, positions, bits, first_col, target, rows, chunk_elements=1 << 17)


Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int16]


def transform_rows(
    table: Tensor, rows: Tensor, basis: Floats, step: float, dead_zone: Floats, most_value: float
) -> tuple[Tensor, Tensor]:
    """Transform rows of a table; see ``kernels.transform_rows``."""
    numbers, is_exact = np.empty((len(rows), table.shape[1]), np.int16), np.empty(len(rows), np.bool_)
    transform = rows_transformer(table, rows, basis, step, dead_zone, most_value, is_exact)
    in_parallel(lambda start, stop: transform(start, stop, numbers[start:stop]), len(rows))
    return torch.from_numpy(numbers), torch.from_numpy(is_exact)


def rows_transformer(
    table: Tensor,
    rows: Tensor,
    basis: Floats,
    step: float,
    dead_zone: Floats,
    most_value: float,
    is_exact: npt.NDArray[np.bool_],
) -> Callable[[int, int, Numbers], None]:
    """Return a function that transforms some of the rows; see ``kernels.rows_transformer``."""
    num_cols = table.shape[1]
    flat, stride, row_numbers = _flat(table), table.stride(0), rows.contiguous().numpy()
    by_column, width = PaddedBasis.of(basis.T.astype(np.float32)), -(-num_cols // LANES) * LANES
    zones = np.zeros(width, np.float32)
    zones[:num_cols] = dead_zone
    settings = (by_column, np.float32(1 / step), zones, np.float32(most_value))

    def transform(start: int, stop: int, numbers: Numbers) -> None:
        scratch = np.zeros(4 * width, np.float32), np.empty(4 * width, np.int32)
        row_transform.forward(
            *(flat, stride, row_numbers[start:stop], num_cols, *settings, *scratch),
            *(numbers.reshape(-1), is_exact[start:stop]),
        )

    return transform


def restore_rows(
    numbers: Tensor, positions: Tensor, basis: Floats, step: float, first_col: int, target: Tensor, rows: Tensor
) -> None:
    """Compute rows from their components, and write them to a target; see ``kernels.restore_rows``."""
    flat, stride, num_wanted, num_cols = _flat(target), target.stride(0), target.shape[1], numbers.shape[1]
    source, by_component = numbers.reshape(-1).numpy(), PaddedBasis.of(basis)
    number_positions, row_numbers = positions.contiguous().numpy(), rows.contiguous().numpy()

    def restore(start: int, stop: int) -> None:
        places, used = number_positions[start:stop], np.empty(num_cols, np.int64)
        row_transform.inverse(
            *(source, num_cols, places, by_component, step, used),
            *(first_col, flat, stride, row_numbers[start:stop], num_wanted),
        )

    in_parallel(restore, len(number_positions))


def encode_numbers(
    numbers: Numbers,
    first_class: int,
    choices: npt.NDArray[np.uint8],
    class_tables: SymbolTables,
    tables: SymbolTables,
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
    """Entropy-code rows of numbers, int16 [n, num_cols]; return the first states, uint32 [4], and the words."""
    num_rows, num_cols = numbers.shape
    words, used = np.empty(most_words(num_rows, num_cols) + 1, np.uint16), np.zeros(1, np.int64)
    states = np.empty(NUM_STATES, np.uint32)
    flat = np.ascontiguousarray(numbers).reshape(-1)
    symbol_coder.encode(
        *(flat, num_cols, choices.reshape(-1), first_class, class_tables, tables),
        *(EncodingPlan.empty(num_cols), words, states, used),
    )
    return states, words[len(words) - int(used[0]) :].copy()


def decode_numbers(
    words: npt.NDArray[np.uint16],
    states: npt.NDArray[np.uint32],
    choices: npt.NDArray[np.uint8],
    class_tables: SymbolTables,
    tables: SymbolTables,
    numbers: Numbers,
) -> bool:
    """Decode rows into ``numbers``, int16 [n, num_cols]; return whether the words are those of so many rows."""
    is_right, own_states, num_cols = np.zeros(1, np.bool_), states.astype(np.uint32), numbers.shape[1]
    flat, padded = numbers.reshape(-1), np.zeros(len(words) + 1, np.uint16)
    padded[:-1] = words
    symbol_coder.decode(padded, own_states, num_cols, choices.reshape(-1), class_tables, tables, flat, is_right)
    return bool(is_right[0])


def _encode(
    kernel: Kernel,
    table: Tensor,
    rows: Tensor,
    settings: tuple[Any, ...],
    row_bytes: int,
    make_scratch: Callable[[], Any],
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    num_rows, num_cols = len(rows), table.shape[1]
    codes, is_exact = np.empty(num_rows * row_bytes, np.uint8), np.empty(num_rows, np.bool_)
    flat, stride, row_numbers = _flat(table), table.stride(0), rows.contiguous().numpy()

    def encode(start: int, stop: int) -> None:
        chunk = codes[start * row_bytes : stop * row_bytes]
        kernel(flat, stride, row_numbers[start:stop], num_cols, *settings, chunk, is_exact[start:stop], make_scratch())

    in_parallel(encode, num_rows, chunk_rows)
    return torch.from_numpy(codes).view(num_rows, row_bytes), torch.from_numpy(is_exact)


def _decode(
    kernel: Kernel,
    codes: Tensor,
    positions: Tensor,
    bits: int,
    first_col: int,
    target: Tensor,
    rows: Tensor,
    chunk_elements: int,
) -> None:
    flat, stride, num_cols = _flat(target), target.stride(0), target.shape[1]
    source, row_bytes = codes.reshape(-1).numpy(), codes.shape[1]
    code_positions, row_numbers = positions.contiguous().numpy(), rows.contiguous().numpy()

    def decode(start: int, stop: int) -> None:
        chunk_positions = code_positions[start:stop]
        kernel(source, row_bytes, chunk_positions, bits, first_col, flat, stride, row_numbers[start:stop], num_cols)

    in_parallel(decode, len(code_positions), max(1, chunk_elements // max(1, num_cols)))


def _flat(table: Tensor) -> Any:
    """Return the memory of a table as a flat array that kernels accept (see ``memory``), without copying."""
    span = (table.shape[0] - 1) * table.stride(0) + table.shape[1] if table.numel() else 0
    flat = torch.as_strided(table.detach(), (span,), (1,))
    if table.dtype is torch.float32:
        return flat.numpy()
    bits = flat.view(torch.int16).numpy()
    return bits if table.dtype is torch.float16 else bits.view(np.uint16)

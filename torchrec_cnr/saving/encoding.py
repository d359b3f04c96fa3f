"""Encoding: choose a shard's quantization scheme by a sample of its rows, and write the rows block by block.

Items that share a row mask (a table and the optimizer state of its rows) are written together. Each block of row
numbers is computed and encoded once. Then every item's rows of that block are encoded, straight from the shard. This
takes the memory of one block and of the data files being written, whatever the size of the shard.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from torchrec_cnr.format.blob_bytes import Bytes, exact_row_bytes, split, with_exact_rows
from torchrec_cnr.format.manifest import DTYPES
from torchrec_cnr.format.row_sets import Blob, RowSet, UnplacedRowBlock, encode_row_numbers
from torchrec_cnr.quantization import (
    Encoded,
    NoQuantization,
    Scheme,
    SchemeRules,
    TransformCoded,
    Transformed,
    fused_bits,
    warm_up,
)
from torchrec_cnr.quantization.packed_rows import pack_rows, pack_strips
from torchrec_cnr.quantization.row_transform import RowTransform
from torchrec_cnr.quantization.scheme import positions
from torchrec_cnr.quantization.transform_coded import bytes_of_rows, has_drifted
from torchrec_cnr.saving.staged_values import StagedCodes, is_quantized_first
from torchrec_cnr.storage.pack_writer import BLOCK_BYTES, PackWriter
from torchrec_cnr.tracking.modified_rows import RowList, RowMask, SelectedRows
from torchrec_cnr.tracking.tracked_tables import TrackedRows, trackers

logger = logging.getLogger(__name__)

SAMPLE_ROWS = 512  # of a shard; enough that the errors of different schemes differ by more than chance
LEARNING_ROWS = 2048  # of a shard whose transform is learned: with fewer, frequencies of components are too uncertain

_ALIGNED_BYTES = 16  # Triton compiles one kernel for addresses that are multiples of it, and another for the rest
_GOLDEN_RATIO = (5**0.5 - 1) / 2


@dataclass(frozen=True, eq=False)
class EncodingInput:
    """An item to encode.

    Attributes:
        name: Prefix for the names of its blocks in data files, unique within the rank.
        values: The shard, on any device; a shard without dimensions counts as one row.
        dtype: Name of the values' dtype.
        scheme: The quantization scheme.
        codes: Codes, if the values were quantized before; the values themselves are not available then.
    """

    name: str
    values: Tensor
    dtype: str
    scheme: Scheme
    codes: StagedCodes | None = None

    @property
    def device(self) -> torch.device:
        """The device on which rows are encoded."""
        return self.values.device if self.codes is None else torch.device("cpu")

    @property
    def rows(self) -> Tensor:
        """The values, with at least one dimension."""
        return self.values if self.values.dim() else self.values[None]

    @property
    def is_quantized(self) -> bool:
        """Whether the scheme makes codes."""
        return not isinstance(self.scheme, NoQuantization)

    def table(self) -> Tensor | None:
        """Return a view [num_rows, num_cols] of the values, or None if the elements of a row are not contiguous."""
        rows = self.rows
        if rows.is_contiguous():
            return rows.view(len(rows), math.prod(rows.shape[1:]))
        return rows if rows.dim() == 2 and rows.stride(1) == 1 else None


@dataclass(frozen=True)
class EncodedShard:
    """An encoded item.

    Attributes:
        blobs: For each block, the number of its blob; see ``PackWriter.add``.
        exact_of_blobs: For each of them, the number of exact rows.
    """

    blobs: tuple[int, ...]
    exact_of_blobs: tuple[int, ...]

    @property
    def num_exact(self) -> int:
        """The number of rows that the scheme cannot represent. They are stored exactly."""
        return sum(self.exact_of_blobs)


@dataclass(frozen=True)
class EncodedRowSet:
    """Encoded blocks of row numbers, whose blobs have no position in a data file yet."""

    blocks: tuple[UnplacedRowBlock, ...]

    def located(self, blobs: Sequence[Blob]) -> RowSet:
        """Return the row set for a manifest."""
        return RowSet(tuple(block.placed(blobs.__getitem__) for block in self.blocks))


def choose_scheme(
    rules: SchemeRules,
    fqn: str,
    is_table: bool,
    values: Tensor,
    rows: Sequence[SelectedRows] | Tensor | None,
    num_restores: int,
    on_unsuitable: Callable[[float], None] = lambda exact_share: None,
    known: RowTransform | None = None,
) -> Scheme:
    """Choose the quantization scheme of a shard by its rule.

    The shard is stored exactly if codes and exact rows would take more bytes than the values.

    Args:
        rules: The quantization rules.
        fqn: FQN of the shard's tensor.
        is_table: Whether that is a table.
        values: [num_rows, ...], the shard.
        rows: The rows to store: in parts, as the planner resolves them, or by their numbers, int64 [k]; None for all.
        num_restores: Number of restores in the history of the state.
        on_unsuitable: Called if codes cannot represent so many rows that the shard is stored exactly, with their share.
        known: A transform of the shard's rows that an older checkpoint of the chain has, or whose basis it has.
    """
    rule = rules.rule_for(fqn, values.dtype, is_table)
    if isinstance(rule, NoQuantization) or values.numel() == 0:
        return NoQuantization()
    num_sampled = LEARNING_ROWS if isinstance(rule, TransformCoded) else SAMPLE_ROWS
    sample = sampled_rows(values, rows if isinstance(rows, Tensor) else _mask_of(rows), num_sampled)
    plain_rule = rule.error_of if isinstance(rule, TransformCoded) else rule
    # On as many rows as without a transform, so that a rule chooses the same bits as then.
    scheme = plain_rule.choose(lambda: sample[:SAMPLE_ROWS], num_restores)
    num_cols, itemsize = sample.shape[1], sample.dtype.itemsize
    encoded = scheme.encode(sample)
    exact_share = len(encoded.exact) / max(1, len(sample))
    exact_bytes = exact_share * exact_row_bytes(num_cols, itemsize)
    if scheme.row_bytes(num_cols, sample.dtype) + exact_bytes >= num_cols * itemsize:
        if exact_share > 0:
            on_unsuitable(exact_share)
        return NoQuantization()
    if isinstance(rule, TransformCoded) and len(sample):
        divided = split(_bytes(encoded.codes).reshape(len(sample), -1), scheme.tail_bytes(num_cols, sample.dtype))
        row_bytes = (encoded.codes.numel() if divided is None else divided.nbytes) / len(sample)
        return rule.choose_for(sample, scheme, row_bytes + exact_bytes, _num_stored(values, rows), known)
    return scheme


def is_outdated(codes: StagedCodes, known: RowTransform) -> bool:
    """Return whether rows that a device has transformed take so many bytes that a transform should be learned again."""
    numbers = sampled_rows(codes.codes.tensor(), None, LEARNING_ROWS).view(torch.int16).numpy()
    exact_share = len(codes.exact) / max(1, codes.shape[0])
    return len(numbers) > 0 and has_drifted(known, bytes_of_rows(known, numbers, exact_share, codes.dtype.itemsize))


def _num_stored(values: Tensor, rows: Sequence[SelectedRows] | Tensor | None) -> int:
    if rows is None:
        return len(values)
    return len(rows) if isinstance(rows, Tensor) else sum(map(len, rows))


class KernelWarmUps:
    """Compiles the kernels of GPUs when a writer and a planner are made. In a save, training would wait for it.

    The tables and the quantization rules are known when the second of the two is made. A kernel is compiled once for
    each kind of table and scheme.
    """

    def __init__(self) -> None:
        self._rules: WeakKeyDictionary[object, SchemeRules] = WeakKeyDictionary()
        self._done: set[object] = set()

    def writer_made(self, writer: object, rules: SchemeRules) -> None:
        """Compile kernels for a writer with these rules."""
        self._rules[writer] = rules
        self._warm_up(trackers.planned(), [rules])

    def planner_made(self, tracker: TrackedRows) -> None:
        """Compile kernels for a planner that saves the tables of a tracker."""
        self._warm_up([tracker], list(self._rules.values()))

    def _warm_up(self, row_trackers: Sequence[TrackedRows], rules: Sequence[SchemeRules]) -> None:
        began, num_new = time.monotonic(), 0
        tensors = (tensor for tracker in row_trackers for shard in tracker.shards for tensor in shard.tensors())
        for table in {_kind_of(tensor): tensor for tensor in tensors if _is_warmed_up(tensor)}.values():
            for scheme in (scheme for scheme_rules in rules for scheme in scheme_rules.possible(table.dtype)):
                key = _kind_of(table), scheme
                if fused_bits(scheme) is None or key in self._done:
                    continue
                if not num_new:
                    logger.warning(
                        "compiling kernels for GPUs, which takes seconds; later processes load them from Triton's cache"
                    )
                warm_up(scheme, table.detach())
                self._done.add(key)
                num_new += 1
        if num_new:
            logger.info("%d kernels for tables on GPUs are ready, after %.1f s", num_new, time.monotonic() - began)


def _is_warmed_up(tensor: Tensor) -> bool:
    """Return whether a kernel that must be compiled quantizes the rows of a table, or of its optimizer state."""
    return is_quantized_first(tensor) and tensor.dim() == 2 and tensor.numel() > 0 and tensor.stride(1) == 1


def _kind_of(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two tables if they use the same kernels."""
    is_aligned = tensor.data_ptr() % _ALIGNED_BYTES == 0
    return tensor.device, tensor.dtype, tensor.shape[1], tensor.stride(0), is_aligned


kernel_warm_ups = KernelWarmUps()


def sampled_rows(values: Tensor, rows: RowMask | Tensor | None, num_sampled: int = SAMPLE_ROWS) -> Tensor:
    """Return some of the rows to store, always the same ones.

    Args:
        values: [num_rows, ...], the shard.
        rows: The rows to store, as a mask or as numbers, int64 [k]; None for all.
        num_sampled: The most rows to return.

    Returns:
        [n, num_cols], where n is at most ``num_sampled``.
    """
    num_cols = math.prod(values.shape[1:])
    max_rows = min(num_sampled, max(1, BLOCK_BYTES // max(1, num_cols * values.element_size())))
    row_numbers = _spread(len(rows) if isinstance(rows, Tensor) else len(values))
    if isinstance(rows, Tensor):
        row_numbers = rows.index_select(0, row_numbers[:max_rows].to(rows.device))
    elif rows is not None:
        row_numbers = row_numbers[rows.mask[row_numbers.to(rows.mask.device)].cpu()]
        if len(row_numbers) < SAMPLE_ROWS // 8:  # at most two rows in a thousand are stored
            row_numbers = next(rows.blocks(SAMPLE_ROWS), row_numbers)
    sample = values.index_select(0, row_numbers[:max_rows].to(values.device))
    return sample.reshape(len(sample), num_cols)


def _mask_of(rows: Sequence[SelectedRows] | None) -> RowMask | None:
    """Return the mask of the rows to store; None for all of them."""
    masks = tuple(part for part in rows or () if isinstance(part, RowMask))
    return RowMask.union(masks) if masks else None


def _spread(num_rows: int) -> Tensor:
    """Return row numbers, all or many of them. Multiples of the golden ratio share no period with patterns of rows."""
    if num_rows <= SAMPLE_ROWS:
        return torch.arange(num_rows, device="cpu")
    return (_fractions() * num_rows).long()


@lru_cache(maxsize=1)
def _fractions() -> Tensor:
    """Return numbers from 0 to 1, float64."""
    return (torch.arange(64 * SAMPLE_ROWS, dtype=torch.float64, device="cpu") * _GOLDEN_RATIO).frac()


def write_all_rows(packs: PackWriter, sources: Sequence[EncodingInput]) -> tuple[RowSet, Sequence[EncodedShard]]:
    """Encode every row of a shard, for all sources together; all sources have the same number of rows."""
    block_rows = _block_rows(sources, packs.block_bytes)
    num_rows = len(sources[0].rows) if sources[0].values.numel() else 0
    blocks = [
        _write(packs, sources, number, range(first_row, min(first_row + block_rows, num_rows)), heat=0)
        for number, first_row in enumerate(range(0, num_rows, block_rows))
    ]
    return RowSet.all(num_rows, block_rows), _encoded(blocks, len(sources))


def write_rows(
    packs: PackWriter, sources: Sequence[EncodingInput], rows: SelectedRows, heat: int = 0
) -> tuple[EncodedRowSet, Sequence[EncodedShard]]:
    """Encode some rows, for all sources together, into data files of this heat."""
    block_rows = _block_rows(sources, packs.block_bytes)
    position = rows.first if isinstance(rows, RowList) else None
    blocks: list[WrittenBlock] = []
    for number, block in enumerate(rows.blocks(block_rows)):
        blocks.append(write_block(packs, sources, number, block, position, heat))
        position = None if position is None else position + len(block)
    return join_blocks(blocks, len(sources))


Codes = tuple[tuple[int, int], ...]  # of one block, for each source: its blob's number, and its number of exact rows


@dataclass(frozen=True)
class WrittenBlock:
    """An encoded block of row numbers, and the encoded rows."""

    rows: UnplacedRowBlock
    codes: Codes


def write_block(
    packs: PackWriter, sources: Sequence[EncodingInput], number: int, rows: Tensor, place: int | None, heat: int
) -> WrittenBlock:
    """Encode one block of rows.

    Args:
        packs: Writes data files.
        sources: The items.
        number: Number of the block.
        rows: Row numbers, int64 [n].
        place: Index in the sources' values of the first row, if the rows were copied there; None to index by row
            number.
        heat: Heat of the rows.
    """
    coded = encode_row_numbers(rows.cpu().numpy())
    data = np.frombuffer(coded.data, dtype=np.uint8)
    blob = packs.add(f"{sources[0].name}/rows/{number}", "uint8", data.shape, data, heat)
    codes = _write(packs, sources, number, rows if place is None else range(place, place + len(rows)), heat)
    return WrittenBlock(UnplacedRowBlock(coded.coding, coded.first, coded.span, len(rows), blob), codes)


def join_blocks(blocks: Sequence[WrittenBlock], num_sources: int) -> tuple[EncodedRowSet, Sequence[EncodedShard]]:
    """Combine consecutive blocks of rows into one row set and one shard per source."""
    shards = _encoded([block.codes for block in blocks], num_sources)
    return EncodedRowSet(tuple(block.rows for block in blocks)), shards


def _encoded(blocks: Sequence[Codes], num_sources: int) -> Sequence[EncodedShard]:
    codes_by_source = [[codes[index] for codes in blocks] for index in range(num_sources)]
    return [
        EncodedShard(tuple(blob for blob, _ in shard_codes), tuple(exact for _, exact in shard_codes))
        for shard_codes in codes_by_source
    ]


def _block_rows(sources: Sequence[EncodingInput], block_bytes: int) -> int:
    widest = max(math.prod(source.rows.shape[1:]) * source.values.element_size() for source in sources)
    return max(1, block_bytes // max(1, widest))


def _write(packs: PackWriter, sources: Sequence[EncodingInput], number: int, rows: Tensor | range, heat: int) -> Codes:
    """Write a blob for each source: the rows with these numbers, int64 [n] or a range."""
    codes = []
    for source in sources:
        if source.is_quantized:
            row_numbers = torch.from_numpy(np.arange(rows.start, rows.stop)) if isinstance(rows, range) else rows
            codes.append(_write_codes(packs, source, number, row_numbers.to(source.device), heat))
            continue
        if isinstance(rows, range):
            # On the host, this is a view of the live tensor: training does not continue before the save returns.
            values = source.rows[rows.start : rows.stop]
        else:
            values = source.rows.index_select(0, rows.to(source.values.device))
        codes.append((_add(packs, source, number, _bytes(values), source.dtype, tuple(values.shape), heat), 0))
    return tuple(codes)


def _write_codes(packs: PackWriter, source: EncodingInput, number: int, rows: Tensor, heat: int) -> tuple[int, int]:
    """Write one blob: the codes of rows, then the exact rows. Return its number and the number of exact rows."""
    if isinstance(source.scheme, Transformed):
        data, exact, exact_values = _pack(source, source.scheme, rows)
        data = with_exact_rows(data, exact.cpu().numpy(), _bytes(exact_values))
        return packs.add(f"{source.name}/{number}", "uint8", data.shape, data, heat), len(exact)
    encoded, exact_values = _encode(source, rows) if source.codes is None else source.codes.encoded(rows)
    data = _bytes(encoded.codes)
    if len(encoded.exact) == 0:
        return _add(packs, source, number, data, "uint8", tuple(encoded.codes.shape), heat), 0
    data = with_exact_rows(data, encoded.exact.cpu().numpy(), _bytes(exact_values))
    return packs.add(f"{source.name}/{number}", "uint8", data.shape, data, heat), len(encoded.exact)


def _add(
    packs: PackWriter, source: EncodingInput, number: int, data: Bytes, dtype: str, shape: tuple[int, ...], heat: int
) -> int:
    """Write a blob of rows without exact ones; byte-split it if that makes it smaller."""
    tail_bytes = source.scheme.tail_bytes(math.prod(source.rows.shape[1:]), DTYPES[source.dtype])
    divided = split(data.reshape(shape[0], -1), tail_bytes) if tail_bytes else None
    if divided is not None:
        data, dtype, shape = divided, "uint8", divided.shape
    return packs.add(f"{source.name}/{number}", dtype, shape, data, heat)


def _pack(source: EncodingInput, scheme: Transformed, rows: Tensor) -> tuple[Bytes, Tensor, Tensor]:
    """Return the bytes of rows as a transform codes them, the positions of exact rows, and the values of these."""
    if source.codes is not None or source.device.type != "cpu":
        encoded, exact_values = _encode(source, rows) if source.codes is None else source.codes.encoded(rows)
        numbers = encoded.codes.cpu().view(torch.int16).numpy()
        return pack_rows(numbers, scheme.known), encoded.exact, exact_values
    table, rows = _table_and_rows(source, rows)
    is_exact = np.zeros(len(rows), np.bool_)
    data = pack_strips(len(rows), scheme.numbers_of(table, rows, is_exact), scheme.known)
    exact = positions(torch.from_numpy(is_exact))
    return data, exact, table.index_select(0, rows[exact])


def _encode(source: EncodingInput, rows: Tensor) -> tuple[Encoded, Tensor]:
    """Return rows as the scheme encodes them, and the values of the rows that it cannot represent."""
    table, rows = _table_and_rows(source, rows)
    encoded = source.scheme.encode(table, rows)
    return encoded, table.index_select(0, rows[encoded.exact.to(rows.device)])


def _table_and_rows(source: EncodingInput, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return a table whose rows are contiguous, [num_rows, num_cols], and the numbers of the rows in it."""
    table = source.table()
    if table is None:
        table = source.rows.index_select(0, rows).reshape(len(rows), -1)
        rows = torch.arange(len(rows), device=rows.device)
    return table, rows


def _bytes(tensor: Tensor) -> Bytes:
    """Return a tensor's elements, in order, as little-endian bytes in host memory."""
    flat = tensor.cpu().contiguous().resolve_neg().reshape(-1)
    array: Bytes = flat.view(torch.uint8).numpy()
    return array

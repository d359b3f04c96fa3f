"""The staging buffer, and the codes of rows that a GPU quantizes on the device.

A GPU copies codes to the host, not values. New memory costs more than the copy, because the first write to each of its
pages allocates the page. So rows are staged in one buffer, and the next save uses it again. If the buffer is shared
with another process, it also takes only one file descriptor, however many tensors are in it.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchrec_cnr.kernels import check_numbers
from torchrec_cnr.kernels.gpu.pinned_memory import PinnedMemory
from torchrec_cnr.quantization import Encoded, KMeans, NoQuantization, Scheme
from torchrec_cnr.quantization.scheme import DeviceScheme, positions
from torchrec_cnr.saving.running_saves import RunningSave
from torchrec_cnr.tracking.modified_rows import DeviceRows
from torchrec_cnr.tracking.tracked_tables import TrackedRows

# Bytes of rows that a device gathers or encodes in one step.
DEVICE_BLOCK_BYTES = 256 << 20
ALIGNMENT = 64  # bytes: a cache line
SLACK = 1.25  # the number of modified rows varies from save to save
_MAX_SPARE = 3.0  # a buffer so many times larger than needed, as after a baseline, is given back
_SMALL_BYTES = 1 << 20  # except a small one


@dataclass(frozen=True, eq=False)
class BufferTensor:
    """A tensor in a staging buffer.

    Attributes:
        memory: uint8 [num_bytes], the buffer.
        first_byte: Position of the tensor's first byte.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
    """

    memory: Tensor
    first_byte: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """Return the tensor, which shares the buffer's memory."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return self.memory[self.first_byte : self.first_byte + num_bytes].view(self.dtype).view(self.shape)


def padded_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the number of bytes that a tensor takes in a staging buffer."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


class StagingBuffer:
    """One piece of host memory, from which tensors are taken.

    Attributes:
        taken_bytes: Bytes that were taken.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._pinned: PinnedMemory | None = None
        self.taken_bytes = 0

    def clear(self, num_bytes: int, is_pinned: bool) -> None:
        """Release all tensors, and allocate at least this many bytes; pinned, so that devices copy without waiting."""
        self.taken_bytes = 0
        if not num_bytes <= len(self._memory) <= _MAX_SPARE * max(num_bytes, _SMALL_BYTES):
            self.free()
            size = round(SLACK * num_bytes)
            if is_pinned:
                self._pinned = PinnedMemory(size)
                self._memory = self._pinned.memory
            else:
                self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        elif self._pinned is not None:
            self._pinned.settle()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> BufferTensor:
        """Return a tensor that shares no memory with others."""
        buffer_tensor = BufferTensor(self._memory, self.taken_bytes, shape, dtype)
        self.taken_bytes += padded_bytes(shape, dtype)
        return buffer_tensor

    def free(self) -> None:
        """Free the memory."""
        self._pinned = None
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")


@dataclass(frozen=True, eq=False)
class StagedCodes:
    """Encoded rows of a shard, in host memory.

    Attributes:
        shape: Shape of the values, [num_rows, num_cols].
        dtype: Dtype of the values.
        scheme: Scheme by which they were encoded.
        codes: uint8 [num_rows, row_bytes].
        exact: int64 [k], increasing: the rows that codes cannot represent.
        exact_values: [k, num_cols], the values of these rows.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    scheme: Scheme
    codes: BufferTensor
    exact: Tensor
    exact_values: Tensor

    def tensor(self) -> Tensor:
        """Return a tensor on the meta device, with the shape and dtype of the values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def encoded(self, rows: Tensor) -> tuple[Encoded, Tensor]:
        """Return some rows as the scheme encoded them, and the values of those that it cannot represent.

        Args:
            rows: int64 [n], increasing.
        """
        num_before = torch.searchsorted(self.exact, rows)
        is_exact = torch.cat((self.exact, self.exact.new_tensor([-1])))[num_before] == rows
        codes = self.codes.tensor().index_select(0, rows)
        return Encoded(codes, is_exact.nonzero().squeeze(1)), self.exact_values[num_before[is_exact]]


class StagingBuffers:
    """The staging buffers of a tracker. One save at a time uses a buffer, and later saves use it again.

    All writers of the tracker's saves share them, since many jobs make a new writer for each save.
    """

    _by_tracker: ClassVar[WeakKeyDictionary[TrackedRows, "StagingBuffers"]] = WeakKeyDictionary()

    @classmethod
    def of(cls, tracker: TrackedRows) -> "StagingBuffers":
        """Return the buffers of a tracker, which live as long as the tracker."""
        return cls._by_tracker.setdefault(tracker, cls())

    def __init__(self) -> None:
        self._buffers: list[tuple[StagingBuffer, RunningSave]] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int, is_pinned: bool, running: RunningSave) -> StagingBuffer:
        """Return a buffer of this size while a save runs; pinned, so that devices copy without waiting."""
        with self._lock:
            buffer = next((buffer for buffer, user in self._buffers if user.has_ended), StagingBuffer())
            self._buffers = [(other_buffer, user) for other_buffer, user in self._buffers if other_buffer is not buffer]
            self._buffers.append((buffer, running))
        buffer.clear(num_bytes, is_pinned)
        return buffer

    def free(self) -> None:
        """Free the buffers of saves that have ended; those of the others are freed with their saves."""
        with self._lock:
            for buffer, user in self._buffers:
                if user.has_ended:
                    buffer.free()
            self._buffers = []


StagedValue = Tensor | BufferTensor | StagedCodes


def is_quantized_first(source: Tensor) -> bool:
    """Return whether rows are quantized before they are copied: on a GPU, this is faster than copying values."""
    return source.device.type == "cuda"


def has_kernel(scheme: Scheme) -> TypeGuard[DeviceScheme]:
    """Return whether a scheme's codes can be computed on the device; those of k-means cannot."""
    return not isinstance(scheme, KMeans | NoQuantization)


class Copies:
    """Copies from a device to pinned memory, beside the device's other work: each begins when its source is complete.

    Args:
        device: The device of the sources; copies from the host's memory are complete when the call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, target: Tensor, source: Tensor) -> None:
        """Copy a tensor that nothing changes before the device has finished."""
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._stream)  # or its memory could be used again before it is copied

    def wait(self) -> None:
        """Wait until all copies are complete."""
        if self._stream is not None:
            self._stream.synchronize()


def number_blocks(
    rows: Tensor | DeviceRows | None, num_rows: int, max_rows: int, device: torch.device
) -> Iterator[Tensor]:
    """Yield the numbers of some rows of a shard in blocks, int64 [at most max_rows] on its device.

    Args:
        rows: The rows, on the device; or their numbers, int64 [k] on the host; None for all.
        num_rows: Number of rows of the shard.
        max_rows: Numbers in a block.
        device: The device.
    """
    if rows is None:
        for start in range(0, num_rows, max_rows):
            yield torch.arange(start, min(num_rows, start + max_rows), device=device)
    elif isinstance(rows, DeviceRows):
        yield from (block.to(device) for block in rows.blocks(max_rows))  # the optimizer's state may be on the host
    elif len(rows):
        yield from (block.to(device) for block in rows.split(max_rows))


@dataclass(frozen=True, eq=False)
class StartedCodes:
    """Rows of a shard that are being encoded and copied to the host. The host has not waited for the device yet.

    Attributes:
        source: The shard, [num_rows, num_cols].
        numbers: int64 [k], on the host: the rows, complete when the copies are; None for all.
        scheme: Scheme by which they are encoded.
        codes: Memory for the codes.
        is_exact: For each block of rows, bool [n] on the shard's device: rows that codes cannot represent.
    """

    source: Tensor
    numbers: Tensor | None
    scheme: DeviceScheme
    codes: BufferTensor
    is_exact: tuple[Tensor, ...]

    def finished(self, has_exact: Sequence[bool]) -> StagedCodes:
        """Return the codes with the exact rows. For each block with exact rows, this waits for the device.

        Args:
            has_exact: Which blocks have exact rows.
        """
        source = self.source
        exact = [torch.empty(0, dtype=torch.int64, device="cpu")]
        exact_values = [torch.empty(0, source.shape[1], dtype=source.dtype, device="cpu")]
        first_row = 0
        for is_exact, has_exact_rows in zip(self.is_exact, has_exact, strict=True):
            if has_exact_rows:
                exact.append(positions(is_exact).cpu() + first_row)
                rows = exact[-1] if self.numbers is None else self.numbers[exact[-1]]
                exact_values.append(source.index_select(0, rows.to(source.device)).cpu())
            first_row += len(is_exact)
        shape = (self.codes.shape[0], source.shape[1])
        return StagedCodes(shape, source.dtype, self.scheme, self.codes, torch.cat(exact), torch.cat(exact_values))


def start_codes(
    source: Tensor,
    rows: Tensor | DeviceRows | None,
    numbers: Tensor | None,
    scheme: DeviceScheme,
    codes: BufferTensor,
    copies: Copies,
) -> StartedCodes:
    """Begin to encode rows of a table on its device, and to copy the codes to the host; do not wait for the device.

    Args:
        source: [num_rows, num_cols], with contiguous rows.
        rows: The rows, or their numbers on the host; None for all.
        numbers: Where the numbers will be on the host, int64 [k]; None for all rows.
        scheme: Scheme by which rows are encoded.
        codes: Memory for the codes.
        copies: The copies from the source's device.

    Raises:
        ConfigurationError: A row number is out of range.
    """
    if isinstance(rows, Tensor):
        check_numbers(rows, len(source))  # on the host: the result of a check on the device has to be waited for
    target, are_exact, start = codes.tensor(), [], 0
    block_rows = max(1, DEVICE_BLOCK_BYTES // max(1, source[:1].nbytes))
    for block in number_blocks(rows, len(source), block_rows, source.device):
        encoded, is_exact = scheme.encode_without_waiting(source, block)
        copies.begin(target[start : start + len(block)], encoded)
        are_exact.append(is_exact)
        start += len(block)
    return StartedCodes(source, numbers, scheme, codes, tuple(are_exact))


def finish_codes(started: Sequence[StartedCodes], wait: Callable[[], None]) -> list[StagedCodes]:
    """Wait once for each device to learn which blocks have exact rows, and copy these rows.

    Codes may still be in transit to the host.

    Args:
        started: The codes of all tables.
        wait: Called before the row numbers are read, if there are exact rows: waits for the copies.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for codes in started:
        by_device.setdefault(codes.source.device, []).extend(is_exact.any() for is_exact in codes.is_exact)
    found = {device: torch.stack(flags).tolist() if flags else [] for device, flags in by_device.items()}
    if any(map(any, found.values())):
        wait()
    has_exact = {device: iter(flags) for device, flags in found.items()}
    return [codes.finished(list(islice(has_exact[codes.source.device], len(codes.is_exact)))) for codes in started]

"""Pinned memory is as large as it is asked for, and nothing stays pinned."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchrec_cnr as cnr
from torchrec_cnr.kernels.gpu.pinned_memory import PinnedMemory
from torchrec_cnr.saving.staged_values import StagingBuffer, StagingBuffers

NUM_BYTES = 100_001


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Sizes of what is pinned, by address, as a runtime would be told that is not there."""
    sizes: dict[int, int] = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, num_bytes, flags: sizes.update({address: num_bytes}) or 0,
        cudaHostUnregister=sizes.pop,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return sizes


def test_no_more_is_pinned_than_was_asked_for(pinned: dict[int, int]) -> None:
    """And it is given back as soon as nobody has a part of it."""
    memory = PinnedMemory(NUM_BYTES).memory
    assert pinned == {memory.data_ptr(): NUM_BYTES}
    part = memory[5:10].fill_(7)
    del memory
    assert len(pinned) == 1
    assert part.tolist() == [7] * 5
    del part
    assert pinned == {}


def test_a_staging_buffer_gives_back_what_it_has_outgrown(pinned: dict[int, int]) -> None:
    """It is pinned once, and not at all after it was closed."""
    buffer = StagingBuffer()
    for num_bytes in (1000, 900, 50_000):
        buffer.clear(num_bytes, is_pinned=True)
        assert len(pinned) == 1
        assert sum(pinned.values()) in (1250, round(1.25 * num_bytes))
    buffer.free()
    assert pinned == {}


def test_a_staging_buffer_gives_back_what_a_baseline_needed(pinned: dict[int, int]) -> None:
    """Deltas need less, but the next save may need a little more than the last."""
    buffer, mib = StagingBuffer(), 1 << 20
    sizes = []
    for num_bytes in (40 * mib, 20 * mib, 10 * mib, 9 * mib, 10, 40 * mib):
        buffer.clear(num_bytes, is_pinned=True)
        sizes.append(sum(pinned.values()) / mib)
    assert [round(size, 1) for size in sizes] == [50.0, 50.0, 12.5, 12.5, 0.0, 50.0]


def test_a_writer_that_is_closed_gives_back_its_buffers(tmp_path: Path, pinned: dict[int, int]) -> None:
    """Those of saves that have ended at once; the others when their save lets go of them."""
    writer, buffers = cnr.CNRStorageWriter(tmp_path / "0"), StagingBuffers()
    writer._buffers.add(buffers)
    saves: list[Any] = [SimpleNamespace(has_ended=False) for _ in range(2)]
    for save in saves:
        buffer = buffers.take(NUM_BYTES, is_pinned=True, running=save)
    saves[0].has_ended = True
    assert len(pinned) == 2
    writer.close()
    assert len(pinned) == 1
    del buffer
    assert pinned == {}


def test_what_is_shared_is_pinned_where_it_lies_then(pinned: dict[int, int]) -> None:
    """Sharing memory with another process moves it: what was left behind does not stay pinned."""
    buffer = StagingBuffer()
    buffer.clear(NUM_BYTES, is_pinned=True)
    place = buffer.take((10,), torch.uint8)
    place.memory.share_memory_()
    buffer.clear(NUM_BYTES, is_pinned=True)
    assert list(pinned) == [place.memory.data_ptr()]
    del place
    buffer.free()
    assert pinned == {}


def test_memory_that_cannot_be_pinned_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its size, and what to do."""
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(cnr.ConfigurationError, match=f"{NUM_BYTES} bytes .*'staging_bytes'"):
        PinnedMemory(NUM_BYTES)


@pytest.mark.gpu
def test_devices_copy_to_it() -> None:
    """Torch knows that it is pinned, and copies to it are right."""
    memory = PinnedMemory(1 << 20).memory
    assert memory.is_pinned()
    values = torch.randint(256, (1 << 20,), dtype=torch.uint8, device="cuda")
    memory.copy_(values, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(memory, values.cpu())

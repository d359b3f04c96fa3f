"""Rows that are quantized when they are staged: the same bytes as of rows that are quantized in the background."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torchrec_cnr as cnr
from tests.support import models
from tests.support.models import Whole, differing, state, torchrec_job, train
from tests.support.ranks import RankPools
from torchrec_cnr import kernels
from torchrec_cnr.kernels import cpu
from torchrec_cnr.progress import SavePhases
from torchrec_cnr.quantization import HalfPrecision, Transformed
from torchrec_cnr.quantization.learned_transform import ErrorLimit, learned
from torchrec_cnr.quantization.row_transform import Basis
from torchrec_cnr.saving import staged_values, staging
from torchrec_cnr.saving.plug_in_messages import STAGED
from torchrec_cnr.saving.staged_values import (
    BufferTensor,
    Copies,
    StagingBuffer,
    StartedCodes,
    finish_codes,
    start_codes,
)
from torchrec_cnr.sharding import local_shards
from torchrec_cnr.tracking import modified_rows
from torchrec_cnr.tracking.modified_rows import DeviceRows, RowMask

_SAMPLE = np.random.default_rng(0).normal(size=(100, 7))
_LIMIT = ErrorLimit.of(np.linalg.norm(_SAMPLE, axis=1), np.full(100, 0.1), 2.0)
SCHEMES: list[Any] = [
    cnr.Asymmetric(4),
    cnr.AdaptiveAsymmetric.best(3),
    cnr.Symmetric(8),
    HalfPrecision(torch.bfloat16),
    Transformed.by(learned(_SAMPLE, _LIMIT, Basis.principal(_SAMPLE))),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def start(
    table: Tensor, rows: Tensor | DeviceRows | None, numbers: Tensor | None, scheme: Any, take: Callable[..., Any]
) -> StartedCodes:
    """Begin to encode rows of a table."""
    num_rows = len(table) if rows is None else len(rows)
    codes = take((num_rows, scheme.row_bytes(table.shape[1], table.dtype)), torch.uint8)
    return start_codes(table, rows, numbers, scheme, codes, Copies(table.device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_rows=st.integers(1, 60),
    num_bad=st.integers(0, 5),
    is_part=st.booleans(),
    is_by_mask=st.booleans(),
    block_rows=st.integers(1, 70),
    window_rows=st.integers(1, 70),
)
def test_any_rows_of_codes_are_those_of_the_scheme(
    scheme: Any,
    device: str,
    seed: int,
    num_rows: int,
    num_bad: int,
    is_part: bool,
    is_by_mask: bool,
    block_rows: int,
    window_rows: int,
) -> None:
    """Also where some cannot be represented."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(num_rows, 7, generator=generator)
    table[torch.randint(num_rows, (num_bad,), generator=generator)] = float("nan")
    numbers = torch.randperm(num_rows, generator=generator)[: num_rows // 2 + 1].sort().values if is_part else None
    arena = StagingBuffer()
    arena.clear(1 << 16, is_pinned=False)
    selected: Tensor | DeviceRows | None = numbers
    if numbers is not None and is_by_mask:
        mask = torch.zeros(num_rows, dtype=torch.bool).index_fill(0, numbers, True)
        selected = DeviceRows(mask.to(device), None, ())
    with (
        mock.patch.object(staged_values, "DEVICE_BLOCK_BYTES", block_rows * 7 * 4),
        mock.patch.object(modified_rows, "_WINDOW_ROWS", window_rows),
    ):
        if isinstance(selected, DeviceRows):
            selected = DeviceRows.of(selected.mask, None)  # counted in these windows
        started = start(table.to(device), selected, numbers, scheme, arena.take)
        (staged,) = finish_codes([started], partial(_wait, device))
    _wait(device)
    rows = table if numbers is None else table[numbers]
    assert staged.tensor().shape == rows.shape

    some = torch.randperm(len(rows), generator=generator)[: len(rows) // 2 + 1].sort().values
    found, exact_values = staged.encoded(some)
    wanted = scheme.encode(rows[some])
    is_coded = torch.ones(len(some), dtype=torch.bool).index_fill(0, wanted.exact.cpu(), False)
    assert torch.equal(found.codes[is_coded], wanted.codes.cpu()[is_coded])
    assert torch.equal(found.exact, wanted.exact.cpu())
    assert torch.equal(exact_values.view(torch.int32), rows[some][wanted.exact.cpu()].view(torch.int32))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _on_nowhere(shape: tuple[int, ...], dtype: torch.dtype) -> BufferTensor:
    memory = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device="meta")
    return BufferTensor(memory, 0, shape, dtype)


@pytest.mark.parametrize("kind", ["all", "numbers", "mask"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rows_are_encoded_and_copied_without_a_look_at_them(
    scheme: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device without values, whoever wants to know one fails, as he would wait on another device."""

    def encode_rows(table: Tensor, rows: Tensor, bits: int, plan: object, row_bytes: int) -> tuple[Tensor, Tensor]:
        return table.new_empty(len(rows), row_bytes, dtype=torch.uint8), table.new_empty(len(rows), dtype=torch.bool)

    monkeypatch.setattr(kernels, "_on_host", lambda table, rows: (table, rows))
    monkeypatch.setattr(cpu, "encode_rows", encode_rows)
    monkeypatch.setattr(staged_values, "DEVICE_BLOCK_BYTES", 700)
    table = torch.empty(100, 7, device="meta")
    numbers = torch.arange(0, 100, 2)
    mask = DeviceRows(torch.empty(100, dtype=torch.bool, device="meta"), None, ((50,),))
    selected = {"all": None, "numbers": numbers, "mask": mask}[kind]
    started = start(table, selected, numbers, scheme, _on_nowhere)
    assert [len(part) for part in started.is_exact] == ([25] * 4 if kind == "all" else [25, 25])
    with pytest.raises((NotImplementedError, RuntimeError)):
        scheme.encode(table)


def test_a_device_is_waited_for_once_for_all_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more for each block of rows among which some are stored exactly: no other block's rows are looked at."""
    waits: list[str] = []
    asked_for: list[Tensor] = []
    tolist, positions = Tensor.tolist, staged_values.positions

    def asked(self: Tensor) -> Any:
        if self.dtype is torch.bool and not any(
            self is other for other in asked_for
        ):  # it calls itself once more if there is a default device
            asked_for.append(self)
            waits.append("flags")
        return tolist(self)

    monkeypatch.setattr(Tensor, "tolist", asked)
    monkeypatch.setattr(staged_values, "positions", lambda mask: waits.append(f"{len(mask)} rows") or positions(mask))
    monkeypatch.setattr(staged_values, "DEVICE_BLOCK_BYTES", 6 * 16)
    tables = [torch.randn(10, 4) for _ in range(20)]
    tables[3][8, 0] = float("inf")
    arena = StagingBuffer()
    arena.clear(1 << 16, is_pinned=False)
    started = [start(table, None, None, cnr.Asymmetric(4), arena.take) for table in tables]
    found = finish_codes(started, lambda: waits.append("copies"))
    assert waits == ["flags", "copies", "4 rows"]
    assert [codes.exact.tolist() for codes in found] == [[]] * 3 + [[8]] + [[]] * 16
    assert found[3].exact_values.equal(tables[3][8:9])


@pytest.mark.parametrize("row", [-1, 10])
def test_rows_that_are_not_there_are_not_staged(row: int) -> None:
    """Kernels would read beyond the table."""
    arena = StagingBuffer()
    arena.clear(1 << 16, is_pinned=False)
    with pytest.raises(cnr.ConfigurationError, match=f"rows {row} to {row} are asked for, of 10"):
        start(torch.ones(10, 4), torch.tensor([row]), torch.tensor([row]), cnr.Asymmetric(4), arena.take)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", [cnr.Consecutive(), cnr.Intermittent()], ids=repr)
def test_which_rows_were_modified_is_told_on_the_host(tmp_path: Path, device: str, policy: cnr.Policy) -> None:
    """However many rows all tables have: on a device there are the numbers of one block at a time."""
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 8, sparse=True, mode="sum")).to(device)
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=policy)
    writer = cnr.CNRStorageWriter(tmp_path / "0")
    live = {"model": model.state_dict()}
    dcp.save(live, checkpoint_id=tmp_path / "0", storage_writer=writer, planner=planner, no_dist=True)
    tracker.mark("0.weight", torch.arange(0, 1000, 7, device=device))
    staged = writer.stage(live)[STAGED]
    (item,) = staged.cut.items.values()
    tensors = [part.mask if isinstance(part, RowMask) else part.numbers for part in item.rows.parts]
    assert [tensor.device.type for tensor in tensors] == ["cpu"]
    tracker.close()


@contextmanager
def _quantized_first() -> Iterator[None]:
    """As where tables lie on a GPU."""
    original = staging.is_quantized_first
    staging.is_quantized_first = lambda source: True
    try:
        yield
    finally:
        staging.is_quantized_first = original


def _save(rank: int, root: str, name: str, policy: cnr.Policy, executor: Any, staging_bytes: int) -> list[SavePhases]:
    """Save behind training; what each save took."""
    job = torchrec_job(1)
    for shard in (shard for value in job.model.state_dict().values() for shard in local_shards(value)):
        if shard.tensor.dim() == 2:
            shard.tensor.detach()[0] = 1.0001  # which fp16 does not hold
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=policy)
    writer = models.writer(root, staging_bytes=staging_bytes, quantization={"*t*.weight": cnr.Asymmetric(4)})
    group = dist.new_group(backend="gloo")
    found = []
    for number in range(4):
        train(job, number)
        with _quantized_first() if name == "codes" else nullcontext():
            place = f"{root}/{name}-{number}"
            future = models.save_behind(state(job), place, writer, planner, group=group, executor=executor)
        train(job, 1000 + number)
        found.append(future.result(timeout=100).phases[rank])
    writer.close()
    tracker.close()
    return found


def _loaded(rank: int, root: str, name: str) -> list[Whole]:
    job = torchrec_job(2)
    return [models.load(job, f"{root}/{name}-{number}") for number in range(4)]


@pytest.mark.parametrize(
    ("executor", "staging_bytes"),
    [
        (AsyncCheckpointerType.THREAD, 1 << 30),
        (AsyncCheckpointerType.THREAD, 700),
        (AsyncCheckpointerType.PROCESS, 1 << 30),
    ],
)
@pytest.mark.parametrize("policy", [cnr.Consecutive(), cnr.Compacted()], ids=lambda policy: type(policy).__name__)
def test_staged_codes_are_saved_as_staged_values_are(
    tmp_path: Path, rank_pool: RankPools, policy: cnr.Policy, executor: AsyncCheckpointerType, staging_bytes: int
) -> None:
    """Training goes on at once; fewer bytes are copied; what is loaded is the same, bit for bit."""
    ranks, loaded = rank_pool(2), {}
    staged: dict[str, list[list[SavePhases]]] = {}
    for name in ("codes", "values"):
        staged[name] = ranks.run(_save, str(tmp_path), name, policy, executor, staging_bytes)
        loaded[name] = ranks.run(_loaded, str(tmp_path), name)[0]
    for codes, values in zip(loaded["codes"], loaded["values"], strict=True):
        assert differing(codes, values) == []
    assert differing(loaded["codes"][0], loaded["codes"][-1])
    if staging_bytes > 700:
        for codes, values in zip(staged["codes"][0], staged["values"][0], strict=True):
            assert 0 < codes.staged_bytes < values.staged_bytes

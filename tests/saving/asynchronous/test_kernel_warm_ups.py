"""Kernels of GPUs are compiled when writer and planner are made, and not in the first save, while training waits."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

import torchrec_cnr as cnr
from torchrec_cnr import kernels
from torchrec_cnr.kernels import cpu
from torchrec_cnr.kernels.search_plan import SearchPlan
from torchrec_cnr.quantization import Quantization, SchemeRules
from torchrec_cnr.saving import encoding
from torchrec_cnr.saving.encoding import KernelWarmUps, choose_scheme
from torchrec_cnr.tracking.tracked_tables import trackers

RULES: list[Any] = [
    cnr.Symmetric(8),
    cnr.Asymmetric(4),
    cnr.AdaptiveAsymmetric(2),
    cnr.AdaptiveAsymmetric(4, cnr.GreedySearch()),
    cnr.ByExpectedRestores(2),
    cnr.ByErrorBudget(1000),
]
Variant = tuple[Any, ...]


def variant(table: Tensor, bits: int, plan: SearchPlan) -> Variant:
    """What a kernel is compiled for."""
    return table.dtype, table.shape[1], table.stride(0), bits, plan.method, plan.kept, len(plan.cuts), plan.polish == 1


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """What is compiled ahead, as if tables lay on a GPU."""
    found: list[Variant] = []

    def warm_up(table: Tensor, bits: int, plan: SearchPlan, row_bytes: int) -> None:
        found.append(variant(table, bits, plan))

    monkeypatch.setattr(kernels, "warm_up", warm_up)
    monkeypatch.setattr(encoding, "is_quantized_first", lambda source: True)
    monkeypatch.setattr(encoding, "kernel_warm_ups", KernelWarmUps())
    monkeypatch.setattr(trackers, "_trackers", WeakSet())  # other tests may have left some
    for module in ("writer", "planner"):
        monkeypatch.setattr(f"torchrec_cnr.saving.{module}.kernel_warm_ups", encoding.kernel_warm_ups)
    return found


def model() -> nn.Module:
    """Tables of two kinds, one of them twice."""
    tables = [nn.EmbeddingBag(9, 8), nn.EmbeddingBag(5, 8), nn.EmbeddingBag(9, 16, dtype=torch.float16)]
    return nn.Sequential(*tables)


@pytest.mark.parametrize("is_writer_last", [True, False])
def test_kernels_are_compiled_once_tables_and_schemes_are_known(
    tmp_path: Path, compiled: list[Variant], is_writer_last: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each kind of table and scheme, whichever of planner and writer is made last; a word says so."""
    tracker = cnr.RowTracker(model())
    rules = {"*0.weight": cnr.Asymmetric(4), "*": cnr.Symmetric(8)}
    steps: list[Callable[[], object]] = [
        lambda: cnr.CNRSavePlanner(tracker),
        lambda: cnr.CNRStorageWriter(tmp_path / "0", quantization=rules),
    ]
    with caplog.at_level(logging.INFO):
        first = (steps if is_writer_last else steps[::-1])[0]()
        assert compiled == []
        last = (steps if is_writer_last else steps[::-1])[1]()
        kinds = {(dtype, num_cols, bits) for dtype, num_cols, _, bits, *_ in compiled}
        assert kinds == {(torch.float32, 8, 4), (torch.float32, 8, 8), (torch.float16, 16, 4), (torch.float16, 16, 8)}
        assert len(compiled) == 4
        more = [step() for step in steps]
    assert len(compiled) == 4
    assert [record.message[:9] for record in caplog.records if "kernels" in record.message] == [
        "compiling",
        "4 kernels",
    ]
    del first, last, more
    tracker.close()


def test_tables_on_the_host_compile_nothing_ahead(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their kernels are in a cache."""
    tracker = cnr.RowTracker(model())
    with caplog.at_level(logging.INFO):
        planner = cnr.CNRSavePlanner(tracker)
        cnr.CNRStorageWriter(tmp_path / "0", quantization=cnr.Asymmetric(4))
    assert not any("kernels" in record.message for record in caplog.records)
    del planner
    tracker.close()


@pytest.mark.parametrize("num_restores", [0, 5])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_save_needs_nothing_that_was_not_compiled(
    rule: Quantization, num_restores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither to choose a scheme nor to encode by it, whatever the values are."""
    used: set[Variant] = set()
    ahead: set[Variant] = set()
    encode = cpu.encode_rows

    def encode_rows(table: Tensor, rows: Tensor, bits: int, plan: SearchPlan, row_bytes: int) -> tuple[Tensor, Tensor]:
        used.add(variant(table, bits, plan))
        return encode(table, rows, bits, plan, row_bytes)

    monkeypatch.setattr(cpu, "encode_rows", encode_rows)
    monkeypatch.setattr(kernels, "warm_up", lambda table, bits, plan, _: ahead.add(variant(table, bits, plan)))
    monkeypatch.setattr(encoding, "is_quantized_first", lambda source: True)
    rules = SchemeRules.of(rule)
    generator = torch.Generator().manual_seed(0)
    for scale in (0.0, 1.0):
        table = torch.randn(600, 16, generator=generator) * scale
        choose_scheme(rules, "0.weight", True, table, None, num_restores).encode(table)
    tracker = cnr.RowTracker(nn.Sequential(nn.EmbeddingBag(600, 16)))
    warm_ups, writer = KernelWarmUps(), nn.Identity()
    warm_ups.writer_made(writer, rules)
    warm_ups.planner_made(tracker)
    assert used
    assert used <= ahead
    tracker.close()

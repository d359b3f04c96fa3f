"""Compiled code checks nothing itself: what it must not be given is refused before."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
TABLE = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
every_scheme = pytest.mark.parametrize("scheme", [cnr.Asymmetric(4), cnr.KMeans(2)], ids=str)


@every_scheme
@pytest.mark.parametrize(
    ("table", "rows", "message"),
    [
        (TABLE, [8], "rows 8 to 8 are asked for, of 8"),
        (TABLE, [-1], "rows -1 to -1"),
        (TABLE, [10**8], "of 8"),
        (TABLE.double(), [0], "fp32, fp16 or bf16"),
        (TABLE.t(), [0], "side by side"),
        (TABLE[:1].expand(8, 16), [0], "side by side"),
        (TABLE[:, :0], [0], "without columns"),
    ],
)
def test_encoding_refuses_what_is_not_there(scheme: cnr.Scheme, table: Tensor, rows: list[int], message: str) -> None:
    """Rows outside of the table, other dtypes and other layouts are refused, and say so."""
    with pytest.raises(cnr.ConfigurationError, match=message):
        scheme.encode(table, torch.tensor(rows))


@every_scheme
def test_decoding_refuses_what_is_not_there(scheme: cnr.Scheme) -> None:
    """Codes that are too short, and rows outside of codes or target, are refused."""
    codes = scheme.encode(TABLE).codes
    numbers = torch.arange(8)
    refused: list[Callable[[], object]] = [
        lambda: scheme.decode(codes, 5000, torch.float32),
        lambda: scheme.decode_into(codes, numbers + 1, 0, torch.empty(8, 16), numbers),
        lambda: scheme.decode_into(codes, numbers, 0, torch.empty(8, 16), numbers + 1),
        lambda: scheme.decode_into(codes, numbers, 8, torch.empty(8, 16), numbers),
        lambda: scheme.decode_into(codes.int(), numbers, 0, torch.empty(8, 16), numbers),
    ]
    for decode in refused:
        with pytest.raises(cnr.ConfigurationError):
            decode()


@pytest.mark.parametrize("quantization", [cnr.NoQuantization(), cnr.Asymmetric(4)], ids=str)
def test_a_planner_that_gives_too_small_a_target_is_refused(tmp_path: Path, quantization: cnr.Quantization) -> None:
    """What a planner resolves must have the size that is to be read, with and without quantization."""
    model = nn.ModuleDict({"embeddings": nn.ModuleDict({"t": nn.Embedding(10, 16)})})
    dcp.save(model.state_dict(), storage_writer=cnr.CNRStorageWriter(tmp_path / "a", quantization=quantization))

    class Small(cnr.CNRLoadPlanner):
        def resolve_tensor(self, read_item: dcp.planner.ReadItem) -> Tensor:
            return torch.empty(5, 16)

    with pytest.raises(CheckpointException, match=r"\[10, 16\].* cannot be loaded into a tensor of size \[5, 16\]"):
        dcp.load(model.state_dict(), storage_reader=cnr.CNRStorageReader(tmp_path / "a"), planner=Small())


def test_half_precision_of_state_takes_half_the_bytes(tmp_path: Path) -> None:
    """A vector, every value of which is a row of its own, is rounded too; small values stay what they are in bf16."""
    state = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 1e-6
    for name, scheme in (("none", cnr.NoQuantization()), ("half", cnr.HalfPrecision(torch.bfloat16))):
        writer = cnr.CNRStorageWriter(tmp_path / name, quantization={"*": scheme})
        dcp.save({"momentum": state}, storage_writer=writer)
    sizes = {name: cnr.read_checkpoint(tmp_path / name).num_bytes for name in ("none", "half")}
    assert sizes["half"] < 0.52 * sizes["none"]


def test_values_that_fp16_would_make_zeros_are_kept() -> None:
    """Below the smallest fp16 value, rows are stored exactly; zeros are no such values."""
    values = torch.tensor([[1e-9, 1.0], [0.0, 1.0], [2.0, -1e-9]])
    assert cnr.HalfPrecision().encode(values).exact.tolist() == [0, 2]


def test_a_sample_of_zeros_tells_nothing() -> None:
    """An error budget takes 8 bits where all rows of the sample are zeros: others may be there."""
    assert cnr.ByErrorBudget(50).choose(lambda: torch.zeros(512, 16), 0) == cnr.Asymmetric(8)


def test_a_table_of_exact_rows_is_stored_as_it_is(tmp_path: Path) -> None:
    """Where codes could hold hardly any row of a sample, they would only take room."""
    table = torch.full((5_000, 16), 0.1)
    for name, scheme in (("none", cnr.NoQuantization()), ("coded", cnr.AdaptiveAsymmetric(4))):
        writer = cnr.CNRStorageWriter(tmp_path / name, quantization={"*": scheme})
        dcp.save({"table": table}, storage_writer=writer)
    none, coded = (cnr.read_checkpoint(tmp_path / name) for name in ("none", "coded"))
    assert coded.manifest.pack_bytes == none.manifest.pack_bytes

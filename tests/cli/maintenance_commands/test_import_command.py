"""cnr import: what it does, says and refuses."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import torchrec_cnr as cnr
from tests.cli.maintenance_commands.checks import bytes_in, differing, refused, tensors_of
from tests.support.command_line import cnr_json, cnr_text
from tests.support.faults import flip
from torchrec_cnr.human_text import bytes_text

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


TABLE, MINE = "ebc.embedding_bags.t.weight", "mine.weight"


def _stock_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {fqn: value for fqn, value in flatten_state_dict(state)[0].items() if isinstance(value, Tensor)}


def test_import_and_back_is_exact(stock: dict[str, Any], tmp_path: Path) -> None:
    """A stock checkpoint becomes a baseline, and that a stock checkpoint again, bit for bit, objects included."""
    expected, path = _stock_tensors(stock), tmp_path / "runs" / "b" / "step-0"
    document = cnr_json("import", tmp_path / "stock", path)
    assert document == {
        "checkpoint": str(path),
        "bytes": bytes_in(path),
        "rows": 300,
        "tensors": 3,
        "tables": [TABLE],
        "quantized": [],
    }
    assert cnr.read_checkpoint(path).kind == "baseline"
    assert differing(tensors_of(path), expected) == []
    cnr_text("export", path.parent, tmp_path / "back", "--to", "dcp")
    target = {
        "ebc": {"embedding_bags": {"t": {"weight": torch.zeros(300, 16)}}},
        "mine": {"weight": torch.zeros(200, 16)},
        "bias": torch.zeros(9),
        "progress": {"epoch": 0, "betas": None},
    }
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "back"))
    assert differing(_stock_tensors(target), expected) == []
    assert target["progress"] == stock["progress"]


@pytest.mark.parametrize(
    ("bits", "tables", "quantized"),
    [
        (8, [], [TABLE]),
        (4, [], [TABLE]),
        (2, [], [TABLE]),
        (4, ["mine.*"], [MINE]),
        (4, ["mine.*", "*.weight"], [TABLE, MINE]),
    ],
)
def test_import_quantizes_tables(
    stock: dict[str, Any], tmp_path: Path, bits: int, tables: Sequence[str], quantized: list[str]
) -> None:
    """By TorchRec's names or by patterns: they are tables, smaller and close, and all else is exact."""
    expected, path = _stock_tensors(stock), tmp_path / "step-0"
    cnr_text("import", tmp_path / "stock", tmp_path / "exact")
    options = [word for pattern in tables for word in ("--table", pattern)]
    assert cnr_json("import", tmp_path / "stock", path, "--bits", bits, *options)["quantized"] == quantized
    found = tensors_of(path)
    assert differing(found, expected) == quantized
    entries = cnr.read_checkpoint(path).manifest.tensors
    assert [fqn for fqn, entry in entries.items() if entry.is_table] == quantized
    for fqn in quantized:
        schemes = [shard.scheme for shard in entries[fqn].shards]
        assert [scheme.to_json()["bits"] for scheme in schemes] == [bits]
        assert float((found[fqn] - expected[fqn]).abs().max()) < 1.1 / (2**bits - 1)
    values = sum(expected[fqn].nbytes for fqn in quantized)
    saved = bytes_in(tmp_path / "exact") - bytes_in(path)
    assert saved == pytest.approx(values * (1 - bits / 32), rel=0.2)  # scales and biases take their part


def test_import_says_what_it_did(stock: dict[str, Any], tmp_path: Path) -> None:
    """In text, too."""
    path = tmp_path / "step-0"
    text = cnr_text("import", tmp_path / "stock", path, "--bits", 4)
    assert text == f"{path}: a baseline, 3 tensors (1 table, 1 quantized), {bytes_text(bytes_in(path))}\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--bits", "5"], "--bits must be one of 2, 3, 4, 8, exact (got '5')"),
        (["--bits", "-4"], "--bits must be one of 2, 3, 4, 8, exact (got '-4')"),
        (["--bits", "32"], "--bits must be one of 2, 3, 4, 8, exact (got '32')"),
        (
            ["--bits", "4", "--table", "model.*"],
            f"there would be fewer tables: no tensor is named model.*; pass patterns that match its tables; its "
            f"matrices are '{TABLE}', '{MINE}'\n",
        ),
        (["--threads", "0"], "'--threads'"),
    ],
)
def test_import_refuses_what_cannot_work(stock: dict[str, Any], tmp_path: Path, options: list[str], words: str) -> None:
    """Before anything is written."""
    assert words in refused(tmp_path, "import", tmp_path / "stock", tmp_path / "step-0", *options, status=2)


def test_bits_that_no_table_gets_are_refused(tmp_path: Path) -> None:
    """A model of other names than TorchRec's is not imported exactly, against what was asked for."""
    state = {f"t{number}": torch.rand(9, 16) for number in range(7)}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "stock", sync_files=False))
    line = refused(tmp_path, "import", tmp_path / "stock", tmp_path / "step-0", "--bits", 4, status=2)
    assert "no tensor is named *embedding_bags.*.weight or *embeddings.*.weight" in line
    assert line.endswith("its matrices are 't0', 't1', 't2', 't3', 't4' and 2 more\n")


def test_import_writes_over_nothing(stock: dict[str, Any], tmp_path: Path, saved_run: Path) -> None:
    """A checkpoint that is there stays, and files are no directories."""
    shutil.copytree(saved_run / "step-1", tmp_path / "step-1")
    (tmp_path / "file").write_bytes(b"mine")
    source = tmp_path / "stock"
    assert "already contains a committed checkpoint" in refused(tmp_path, "import", source, tmp_path / "step-1")
    for out in ("file", "file/step-1"):
        assert "cannot create" in refused(tmp_path, "import", source, tmp_path / out)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_import_refuses_what_is_damaged(stock: dict[str, Any], tmp_path: Path, damage: str) -> None:
    """Nothing is left of it, and the file is named."""
    metadata, values = tmp_path / "stock" / ".metadata", tmp_path / "stock" / "__0_0.distcp"
    if damage == "flipped":
        flip(metadata, 0)
    elif damage == "truncated":
        values.write_bytes(values.read_bytes()[:-900])
    else:
        values.unlink()
    line = refused(tmp_path, "import", tmp_path / "stock", tmp_path / "step-0")
    assert str(metadata if damage == "flipped" else values) in line

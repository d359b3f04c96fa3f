"""What tests of commands that change something look at."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import torchrec_cnr as cnr
from tests.support.command_line import cnr_result
from tests.support.lineages import is_same

NAMES = ("step-1", "step-2", "step-3", "step-4")
FORMATS = ("dcp", "safetensors", "torch")

Files = dict[str, bytes | None]


def refused(folder: Path, *args: str | Path | int, status: int = 1) -> str:
    """The one line on stderr of a command that fails, with and without --json, and changes nothing in a folder."""
    before, lines = files_in(folder), set()
    for options in ([], ["--json"]):
        result = cnr_result(*args, *options)
        assert (result.exit_code, result.stdout) == (status, ""), result.output
        assert re.fullmatch(r"cnr: error: .*\n", result.stderr)
        assert files_in(folder) == before
        lines.add(result.stderr)
    (line,) = lines
    return line


def files_in(folder: Path) -> Files:
    """All that lies in a folder; directories have no bytes."""
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tensors_of(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, as a load gives them."""
    return {fqn: cnr.load_table(path, fqn) for fqn in cnr.read_checkpoint(path).manifest.tensors}


def differing(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that are not the same, bit for bit."""
    assert first.keys() == second.keys()
    return [fqn for fqn in first if not is_same(first[fqn], second[fqn])]


def read_export(path: Path, to: str, like: Mapping[str, Tensor]) -> dict[str, Any]:
    """What an export holds, by stock means, by FQN."""
    if to == "safetensors":
        return dict(load_file(path / "model.safetensors"))
    if to == "torch":
        return dict(flatten_state_dict(torch.load(path, weights_only=True))[0])
    target = {fqn: torch.full_like(value, 7) for fqn, value in like.items()}
    dcp.load(target, storage_reader=FileSystemReader(path))
    return target

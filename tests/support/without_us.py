"""Exports as their users load them: by PyTorch and safetensors alone. Run as a script, which prints what differs.

python without_us.py expected.pt dcp=DIRECTORY torch=FILE safetensors=DIRECTORY ...
"""

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict


def load_dcp(path: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """By a stock load into a state dict of the same names."""
    target = torch.utils._pytree.tree_map(lambda v: torch.zeros_like(v) if isinstance(v, Tensor) else "?", expected)
    dcp.load(target, storage_reader=dcp.FileSystemReader(path))
    return flatten_state_dict(target)[0]


def load_torch(path: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """The nested state dict, read and memory-mapped."""
    mapped = flatten_state_dict(torch.load(path, weights_only=True, mmap=True))[0]
    loaded = flatten_state_dict(torch.load(path, weights_only=True))[0]
    assert differing(mapped, loaded) == []
    return loaded


def load_safetensors(path: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """One file, or those of the index, and the objects beside."""
    files = [path / "model.safetensors"]
    if not files[0].exists():
        index = json.loads((path / "model.safetensors.index.json").read_text())
        files = [path / name for name in sorted(set(index["weight_map"].values()))]
        assert {fqn: name for name in files for fqn in load_file(name)} == {
            fqn: path / name for fqn, name in index["weight_map"].items()
        }
    found: dict[str, Any] = {fqn: tensor for name in files for fqn, tensor in load_file(name).items()}
    objects = path / "objects.json"
    return found | (json.loads(objects.read_text()) if objects.exists() else {})


LOADERS: Mapping[str, Callable[[Path, Mapping[str, Any]], dict[str, Any]]] = {
    "dcp": load_dcp,
    "torch": load_torch,
    "safetensors": load_safetensors,
}


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """FQNs of what is not the same, bit for bit, or only on one side."""
    return sorted(fqn for fqn in {*first, *second} if not _is_same(first.get(fqn, "?"), second.get(fqn, "?")))


def _is_same(first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return type(first) is type(second) and bool(first == second)
    if first.dtype is not second.dtype or first.shape != second.shape:
        return False
    one, other = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second))
    return torch.equal(one, other)


def main(arguments: list[str]) -> None:
    """Print the names that differ, for each export."""
    warnings.simplefilter("ignore")
    expected = torch.load(arguments[0], weights_only=True)
    flat = flatten_state_dict(expected)[0]
    found = {}
    for argument in arguments[1:]:
        to, _, path = argument.partition("=")
        found[argument] = differing(LOADERS[to](Path(path), expected), flat)
    assert not [name for name in sys.modules if name.startswith("torchrec")]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])

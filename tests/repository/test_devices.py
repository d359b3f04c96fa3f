"""Tensors that the library makes say on which device: ``torch.set_default_device`` must not move them."""

import ast
from pathlib import Path

import torchrec_cnr

FACTORIES = {
    "arange",
    "as_tensor",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
}


def test_every_tensor_is_made_on_a_named_device() -> None:
    """No call of a factory leaves the device to a default."""
    package = Path(torchrec_cnr.__file__).parent
    calls = 0
    unnamed = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch" and node.func.attr in FACTORIES:
                calls += 1
                if not any(keyword.arg == "device" for keyword in node.keywords):
                    unnamed.append(f"{path.relative_to(package)}:{node.lineno}")
    assert calls > 30
    assert unnamed == []

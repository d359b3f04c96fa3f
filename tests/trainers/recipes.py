"""The callbacks as a user copies them: blocks of the page, run as modules."""

from pathlib import Path
from types import ModuleType
from typing import Any

from torch.optim import Optimizer

import torchrec_cnr as cnr
from tests.repository.pages.test_snippets import parse_blocks
from tests.support.models import Whole, whole

PAGE = Path(__file__).parents[2] / "docs/guides/trainers.md"


def recipe(name: str) -> Any:
    """Return a file of the page as a module."""
    (block,) = (block for block in parse_blocks(PAGE.read_text()) if block.file == name)
    module = ModuleType(name.removesuffix(".py"))
    text = "\n" * (block.first_line - 1) + "\n".join(block.lines)  # so that errors name lines of the page
    exec(compile(text, str(PAGE), "exec"), module.__dict__)
    return module


def values(state: dict[str, Any]) -> Whole:
    """Return all values of a state that a callback saves, as plain tensors and numbers that share no memory with it.

    The position of the loader is left out: it counts complete passes, and a trainer may leave a pass after its last
    batch before that is known to be the last one.
    """
    plain = {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in state.items()
        if not isinstance(value, cnr.ReaderState)
    }
    for name, value in state.items():
        if isinstance(value, Optimizer):
            rows = {str(number): dict(states) for number, states in plain[name]["state"].items()}
            plain[name] = {**plain[name], "state": rows}
    return whole(plain)

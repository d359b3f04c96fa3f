"""Mutants, and how they replace functions of the library for a while."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest.mock import patch

from tests.simulator.engine.disk_plan import DiskPlan


@dataclass(frozen=True)
class Mutant:
    """A way to break the protocol.

    Attributes:
        name: What is wrong with it.
        apply: Breaks it for a while.
        disks: The local disks on which the code runs; None for those and all other stores.
    """

    name: str
    apply: Callable[[], AbstractContextManager[Any]]
    disks: Callable[[DiskPlan], bool] | None = None


def replacing(owner: Any, name: str, other: Any) -> AbstractContextManager[Any]:
    """Another value of an attribute."""
    return patch.object(owner, name, other)


def wrapping(owner: Any, name: str, other: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Another function, which is given the one that it replaces before all other arguments."""
    found = getattr(owner, name)

    @wraps(found)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return other(found, *args, **kwargs)

    return patch.object(owner, name, wrapped)


def nothing(*_: Any, **__: Any) -> None:
    """Does nothing."""


@contextmanager
def both(*parts: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(part)
        yield

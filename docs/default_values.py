"""An extension of griffe: signatures show the values of defaults instead of the names of constants."""

import importlib
from collections.abc import Iterator
from typing import Any

import griffe


class DefaultValues(griffe.Extension):
    """Replaces each default that names a number of its module."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Replace the defaults of all functions, and of the fields of dataclasses, when all modules are there."""
        for holder in _holders(pkg):
            if isinstance(holder, griffe.Function):
                for parameter in holder.parameters:
                    parameter.default = _value(holder, parameter.default)
            else:
                holder.value = _value(holder, holder.value)


def _holders(parent: griffe.Object) -> Iterator[griffe.Function | griffe.Attribute]:
    for member in parent.members.values():
        if isinstance(member, griffe.Function) or (isinstance(member, griffe.Attribute) and parent.is_class):
            yield member
        elif isinstance(member, griffe.Module | griffe.Class):
            yield from _holders(member)


def _value(holder: griffe.Object, default: Any) -> Any:
    if str(default).isidentifier():
        value = getattr(importlib.import_module(holder.module.path), str(default), None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return f"{value:_}" if isinstance(value, int) and value >= 10_000 else repr(value)
    return default

"""Lineages as lines of text: what stands on what.

A chain goes straight down, however long it is: a checkpoint stands on the one above it. Where several stand on one,
each begins a branch, but for the one that leads to the newest checkpoint, with which the chain goes on; if that is not
yet anybody's parent, all of them are branches.

    step-10
    step-20
    ├─ step-30     was left, when the job went back to step-20
    │  step-40
    step-35
    step-45
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchrec_cnr.maintenance.catalog import Catalog


@dataclass(frozen=True)
class Line:
    """A checkpoint in the drawing.

    Attributes:
        name: The checkpoint's.
        guide: What stands before it.
        root: The checkpoint that its tree begins with.
    """

    name: str
    guide: str
    root: str


def draw(catalog: Catalog) -> list[Line]:
    """All checkpoints, tree by tree; the newest comes last."""
    children: dict[str | None, list[str]] = {}
    parents = {name: catalog.parent(checkpoint) for name, checkpoint in catalog.checkpoints.items()}
    for name, parent in parents.items():
        children.setdefault(parent, []).append(name)
    newest = _newest_above(parents)
    for siblings in children.values():
        siblings.sort(key=lambda name: newest[name])
    return [line for root in children.get(None, ()) for line in _tree(root, children)]


def _newest_above(parents: Mapping[str, str | None]) -> dict[str, int]:
    """For each checkpoint, the number of the newest that stands on it, or its own; ``parents`` are oldest first."""
    newest = {name: number for number, name in enumerate(parents)}
    for name, parent in reversed(list(parents.items())):
        if parent is not None:
            newest[parent] = max(newest[parent], newest[name])
    return newest


def _tree(root: str, children: Mapping[str | None, Sequence[str]]) -> Iterator[Line]:
    waiting = [(root, "", "")]  # what comes next last: a name, what stands before it, and before all that follows it
    while waiting:
        name, guide, indent = waiting.pop()
        yield Line(name, guide, root)
        above = children.get(name, ())
        goes_on = len(above) == 1 or (len(above) > 1 and above[-1] in children)
        branches = above[:-1] if goes_on else above
        if goes_on:
            waiting.append((above[-1], indent, indent))
        for number, branch in reversed(list(enumerate(branches, 1))):
            is_last = number == len(branches) and not goes_on
            waiting.append((branch, indent + ("└─ " if is_last else "├─ "), indent + ("   " if is_last else "│  ")))


@dataclass(frozen=True)
class Gap:
    """Checkpoints that are left out of a drawing."""

    names: tuple[str, ...]


def visible(lines: Sequence[Line], shown: Collection[str]) -> Iterator[Line | Gap | None]:
    """What is left of a drawing if only some checkpoints are shown, and the beginning of each of their trees.

    Yields:
        Lines, gaps, and None where a blank line sets trees apart.
    """
    roots = {line.root for line in lines if line.name in shown}
    sizes = Counter(line.root for line in lines)
    hidden: list[str] = []
    root = None
    for line in lines:
        if line.name not in shown and line.name not in roots:
            hidden.append(line.name)
            continue
        if hidden:
            yield Gap(tuple(hidden))
            hidden = []
        if root not in (None, line.root) and max(sizes[root], sizes[line.root]) > 1:
            yield None
        root = line.root
        yield line
    if hidden:
        yield Gap(tuple(hidden))

"""The matrix of what is saved and loaded: which cells are tested, and what is refused, by whom, with which error.

A cell trains a model for real, saves a baseline and a delta, loads them into another model on another number of ranks
that is sharded otherwise, trains that, saves a delta on top, and loads that into a model sharded as the first. All
modules, shardings, optimizers, forms of state dicts and numbers of ranks meet in pairs.
``tests.repository.pages.support_page`` makes a page of the documentation of it, whose every entry a test has shown.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any

from tests.support.zoo import MODULES, OPTIMIZERS, REPLICATED, SHARDINGS, Kind

FORMS = (  # of what is saved and of what is loaded into; their FQNs must agree
    ("sharded tensors", "sharded tensors"),
    ("sharded tensors", "DTensors"),
    ("DTensors", "Stateful objects"),
    ("Stateful objects", "sharded tensors"),
    ("nested", "nested"),
)
NUM_RANKS = ((4, 2), (2, 4), (1, 2), (4, 4), (2, 3), (3, 1))


@dataclass(frozen=True)
class Refusal:
    """A kind of model that cannot be built or trained here at all.

    Attributes:
        by: Who refuses.
        error: Type of the error.
        match: A part of its message.
        why: What is behind it.
        modules: To which it applies; empty stands for all.
        shardings: To which it applies; empty stands for all.
        optimizers: To which it applies; empty stands for all.
        forms: To which it applies; empty stands for all.
        num_ranks: The fewest on which it applies.
    """

    by: str
    error: str
    match: str
    why: str
    modules: tuple[str, ...] = ()
    shardings: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    num_ranks: int = 1

    def applies(self, kind: Kind) -> bool:
        """Whether this kind is refused so."""
        wanted = (self.modules, self.shardings, self.optimizers, self.forms)
        has = (kind.module, kind.sharding, kind.optimizer, kind.form)
        return all(not values or value in values for values, value in zip(wanted, has, strict=True))


COLLISIONS = ("ManagedCollisionEmbeddingBagCollection", "ManagedCollisionEmbeddingCollection")
SHARDED = tuple(module for module in MODULES if module not in REPLICATED)
SPLIT = tuple(sharding for sharding in SHARDINGS if sharding != "data_parallel")
FUSED_ONLY = ("PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB", "LarsSGD")
OPTIMIZERS_TESTED = [optimizer for optimizer in OPTIMIZERS if optimizer not in FUSED_ONLY]

REFUSALS = (
    Refusal(
        "TorchRec",
        "ValueError",
        "Sharding type not supported",
        "all tables of a tower are on one host",
        modules=("EmbeddingTower",),
        shardings=("table_wise", "row_wise", "column_wise", "grid_shard", "data_parallel"),
    ),
    Refusal(
        "TorchRec",
        "ValueError",
        "Cannot cast",
        "it has no fused kernel",
        modules=SHARDED,
        shardings=SPLIT,
        optimizers=("SparseAdam",),
    ),
    Refusal(
        "TorchRec",
        "ValueError",
        "Sharding not supported",
        "sequence embeddings do not support this sharding",
        modules=("EmbeddingCollection", "ManagedCollisionEmbeddingCollection"),
        shardings=("table_row_wise", "table_column_wise", "grid_shard"),
    ),
    Refusal(
        "FBGEMM, on CPUs",
        "AssertionError",
        "is not supported in CPU mode",
        "its fused kernel does not run on CPUs",
        modules=SHARDED,
        shardings=SPLIT,
        optimizers=("Adam", *FUSED_ONLY),
    ),
    Refusal(
        "TorchRec",
        "AssertionError",
        "Only ROW_WISE sharding is supported",
        "id maps are sharded by rows",
        modules=COLLISIONS,
        shardings=tuple(sharding for sharding in SHARDINGS if sharding != "row_wise"),
    ),
    Refusal(
        "TorchRec",
        "AttributeError",
        "object has no attribute 'state'",
        "it exists as a fused optimizer only",
        optimizers=FUSED_ONLY,
    ),
    Refusal(
        "PyTorch",
        "RuntimeError",
        "does not support dense gradients",
        "it requires sparse gradients",
        modules=tuple(module for module in MODULES if not module.endswith(", sparse")),
        optimizers=("SparseAdam",),
    ),
    Refusal(
        "PyTorch, TorchRec",
        "RuntimeError",
        "sparse gradients",
        "it requires dense gradients",
        modules=("nn.EmbeddingBag, nn.Embedding, sparse",),
        optimizers=("Adam", "RowWiseAdagrad"),
    ),
    Refusal(
        "FBGEMM, on CPUs",
        "RuntimeError",
        "split_with_sizes expects split_sizes",
        "its dense CPU kernel pools sequences",
        modules=("EmbeddingCollection",),
        shardings=("data_parallel",),
    ),
    Refusal(
        "FBGEMM, on CPUs",
        "NotImplementedError",
        "reset_weight_momentum",
        "eviction has no CPU kernel",
        modules=COLLISIONS,
        shardings=("row_wise",),
        optimizers=("RowWiseAdagrad",),
    ),
    Refusal(
        "TorchRec, on more than two ranks",
        "RuntimeError",
        "Please pass both shape and stride",
        "ranks without a column have no DTensor",
        shardings=("table_column_wise",),
        forms=("DTensors",),
        num_ranks=3,
    ),
    Refusal(
        "TorchRec, on loading",
        "RuntimeError",
        "Unexpected key(s) in state_dict",
        "a tower's load_state_dict does not accept the keys of its state_dict; pass dmp.state_dict()",
        modules=("EmbeddingTower",),
        forms=("Stateful objects",),
    ),
)


@cache
def refusal(kind: Kind, num_ranks: int = 2) -> Refusal | None:
    """What refuses a kind on so many ranks, if anything does."""
    return next((one for one in REFUSALS if one.applies(kind) and num_ranks >= one.num_ranks), None)


def is_meant(kind: Kind) -> bool:
    """Whether such a kind exists: only TorchRec's modules are sharded."""
    return kind.module not in REPLICATED or kind.sharding == "data_parallel"


@dataclass(frozen=True)
class Cell:
    """One way from a checkpoint's source to its target and back.

    Attributes:
        source: What is saved, on ``num_ranks[0]`` ranks.
        target: What it is loaded into, on ``num_ranks[1]`` ranks.
    """

    source: Kind
    target: Kind
    num_ranks: tuple[int, int]

    def __str__(self) -> str:
        source, target = self.source, self.target
        ways = (f"{k.sharding} {k.form} x{n}" for k, n in zip((source, target), self.num_ranks, strict=True))
        return f"{source.module}, {source.optimizer}: {' -> '.join(ways)}"

    def pairs(self) -> list[tuple[Any, ...]]:
        """All pairs of its factors; the shardings with the optimizer are one factor, too."""
        source, target = self.source, self.target
        factors = (source.module, source.sharding, target.sharding, source.optimizer, self.num_ranks)
        forms = (source.form, target.form)
        pairs = list(combinations(enumerate((*factors, forms)), 2))
        return [*pairs, (source.sharding, target.sharding, source.optimizer)]

    @property
    def is_possible(self) -> bool:
        """Whether source and target can be built, and the id maps of managed collisions be divided."""
        kinds = list(zip((self.source, self.target), self.num_ranks, strict=True))
        if any(not is_meant(kind) or refusal(kind, num_ranks) for kind, num_ranks in kinds):
            return False
        return self.source.module not in COLLISIONS or self.num_ranks[0] % self.num_ranks[1] == 0


def possible_cells() -> Iterator[Cell]:
    """The whole product, without what is refused."""
    for module, source, target, optimizer, forms, num_ranks in product(
        MODULES, SHARDINGS, SHARDINGS, OPTIMIZERS_TESTED, FORMS, NUM_RANKS
    ):
        kinds = (Kind(module, source, optimizer, forms[0]), Kind(module, target, optimizer, forms[1]))
        cell = Cell(*kinds, num_ranks)
        if cell.is_possible:
            yield cell


def pairwise_cells() -> list[Cell]:
    """Cells in which every two factors that can meet do meet, and all pairs of shardings do for each optimizer.

    Greedy: each pair that has not met yet is looked for, in the cell with the most other such pairs.
    """
    cells_of: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in possible_cells():
        for pair in cell.pairs():
            cells_of.setdefault(pair, []).append(cell)
    chosen: list[Cell] = []
    left = dict.fromkeys(cells_of)
    while left:
        candidates = cells_of[next(iter(left))]
        best = max(candidates[:: len(candidates) // 200 + 1], key=lambda cell: len(left.keys() & set(cell.pairs())))
        chosen.append(best)
        for pair in best.pairs():
            left.pop(pair, None)
    return chosen


def all_cells() -> Iterator[Cell]:
    """Every module, source and target sharding and optimizer; forms and numbers of ranks in turn."""
    cells_of: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in possible_cells():
        key = (cell.source.module, cell.source.sharding, cell.target.sharding, cell.source.optimizer)
        cells_of.setdefault(key, []).append(cell)
    for number, cells in enumerate(cells_of.values()):
        yield cells[number % len(cells)]

"""Generate the page of supported models, and of the errors for those that are not supported.

``python -m tests.repository.pages.support_page`` writes it from the matrix that the tests run.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from tests.properties.matrix import COLLISIONS, FORMS, REFUSALS, Refusal, all_cells, is_meant, pairwise_cells, refusal
from tests.support.zoo import MODULES, OPTIMIZERS, SHARDINGS, Kind

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "support.md"

WAYS = {  # how an optimizer is used, shown with this module and sharding
    "fused": ("EmbeddingBagCollection", "row_wise"),
    "data-parallel, `KeyedOptimizer`": ("EmbeddingBagCollection", "data_parallel"),
    "`nn.EmbeddingBag`, dense": ("nn.EmbeddingBag, nn.Embedding", "data_parallel"),
    "`nn.EmbeddingBag`, sparse": ("nn.EmbeddingBag, nn.Embedding, sparse", "data_parallel"),
}

TEXT = """# Supported models

This page lists the TorchRec modules, shardings, optimizers and forms of state dicts that the tests save and load.
The tests run on CPUs, and `python -m tests.repository.pages.support_page` makes the page from them.

| entry | meaning |
|---|---|
| ✓ | tested, see [below](#how-it-is-tested) |
| a number | TorchRec, FBGEMM or PyTorch cannot build or train such a model; see the [note](#notes) |
| ✓ and a number | tested, except for what the note describes |
| empty | the combination does not exist |

## Modules and shardings

{modules}

- **Unsharded collections and PyTorch's own tables** are replicated under DistributedDataParallel.
- **Quantized modules** can be loaded into, see [Inference](../guides/inference.md).
- **A dense part under FSDP2** (`fully_shard`) beside sharded tables is saved with them, and loads with FSDP2 or without
  it (`tests/tracking/test_fsdp_beside_tables.py`). Tables themselves must not be under FSDP.
- **2-D parallel models** (`DMPCollection`) are supported table-, row- and column-wise, and are saved at any time, also
  between two synchronizations (`tests/tracking/test_replicas.py`). `ShardingStrategy.FULLY_SHARDED` and
  `submodule_configs` raise `ConfigurationError`.

## Optimizers

{optimizers}

Fused optimizers without a CPU kernel are saved by the same code, but no test runs them. This code only relies on their
state having a row, or a value, for each row of the table.

## Forms of state dicts

- **Tensors**: `ShardedTensor`, `DTensor` (`output_dtensor=True`) and plain tensors.
- **Structure**: `Stateful` objects (`{{"model": dmp, "optim": optimizer}}`), nested dictionaries and lists.
- **Other values**: all that load without running code.
- **`get_state_dict(dmp.module, optimizers)`** of `torch.distributed.checkpoint.state_dict` works for the model and its
  `torch.optim` optimizers. It does not include fused optimizers; save `dmp.fused_optimizer.state_dict()`.

Each form loads into each other form that has the same names.

## Refused loads and saves

A load raises `StateMismatchError` if

- a name is on one side only, and you did not pass `allow_partial_load=True`;
- a tensor has another size or dtype, and is not in `resize` of a [warm start](../guides/warm-start.md);
- the number of ranks does not divide the number that saved the id maps of managed collisions.

A save raises `ConfigurationError` if ranks have different tensors under one name that is not sharded. `torch.optim`
creates such state for sharded tables with dense kernels.

## How it is tested

A test trains a model, saves a baseline and a delta, and loads both into a model with another sharding on another number
of ranks (1 to 4). It trains and saves there, loads that back, and compares all values. {num_pairwise} such tests cover
each pair of module, source sharding, target sharding, optimizer, form of state dict and numbers of ranks. `make test`
runs a third of them each time. `make test-full` runs all, and {num_all} more: each combination of module, shardings
and optimizer.

## Notes

Each note names the library that raises the error, the error, and the reason.

{notes}
"""


def page() -> str:
    """The page."""
    notes = [one for one in REFUSALS if any(one is refusal(kind, 4) for kind in _all_kinds())]
    return TEXT.format(
        num_pairwise=len(pairwise_cells()),
        num_all=sum(1 for _ in all_cells()),
        modules=_grid("module", MODULES, SHARDINGS, lambda module, sharding: _entry(notes, module, sharding)),
        optimizers=_grid("optimizer", OPTIMIZERS, WAYS, lambda optimizer, way: _entry(notes, *WAYS[way], optimizer)),
        notes="\n".join(f"{number}. {_note(one)}" for number, one in enumerate(notes, 1)),
    )


def _all_kinds() -> Iterator[Kind]:
    forms = dict.fromkeys(form for pair in FORMS for form in pair)
    kinds = (Kind(*factors) for factors in product(MODULES, SHARDINGS, OPTIMIZERS, forms))
    return (kind for kind in kinds if is_meant(kind))


def _grid(corner: str, rows: Iterable[str], columns: Iterable[str], entry: Callable[[str, str], str]) -> str:
    columns = list(columns)
    lines = [[corner, *(column.replace("_", " ") for column in columns)], ["---"] * (len(columns) + 1)]
    lines += [[row, *(entry(row, column) for column in columns)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _entry(notes: Sequence[Refusal], module: str, sharding: str, optimizer: str = "Adagrad") -> str:
    kind = Kind(module, sharding, optimizer)
    if not is_meant(kind):
        return ""
    refused = refusal(kind)
    if refused is not None:
        return str(1 + notes.index(refused))
    partly = (number for number, one in enumerate(notes, 1) if _applies_partly(one, kind))
    return ", ".join(["✓", *map(str, partly)])


def _applies_partly(one: Refusal, kind: Kind) -> bool:
    """Whether a kind that works otherwise is refused in some form, or with an optimizer that other modules may have."""
    if one.forms:
        return one.applies(replace(kind, form=one.forms[0]))
    optimizers = one.optimizers if one.modules == COLLISIONS else ()
    return any(one.applies(replace(kind, optimizer=optimizer)) for optimizer in optimizers)


def _note(one: Refusal) -> str:
    of = ", ".join((*one.optimizers, *one.forms) if one.modules == COLLISIONS or one.forms else ())
    return f'{one.by}{f" ({of})" if of else ""}: `{one.error}`, "{one.match}": {one.why}.'


if __name__ == "__main__":
    PAGE.write_text(page())

"""The page of the documentation that tells what is supported, and what is refused with which error.

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

TEXT = """# What is saved and loaded

Made by `python -m tests.repository.pages.support_page` from what the tests run on CPUs; do not edit.

A ✓ stands for models that are trained, saved as baseline and delta, loaded into models sharded otherwise on other
numbers of ranks (1 to 4), trained on and saved there, loaded back, and found equal. On {num_pairwise} such ways
any two of module, source sharding, target sharding, optimizer, form of state dict and numbers of ranks meet: every test
run goes each third of them. `make test-full` goes all, and {num_all} more: all modules, shardings and optimizers with
one another. A number refers to a note below: such a model cannot be built or trained, with or without `torchrec_cnr`.

## Modules and shardings

{modules}

Unsharded collections and PyTorch's own tables are replicated, under DistributedDataParallel. Quantized modules are a
target of loads: see [inference](inference.md). 2-D parallel models (`DMPCollection`) are saved after synchronisations
and between them, table-, row- and column-wise (`tests/tracking/test_replicas.py`); `ShardingStrategy.FULLY_SHARDED` and
`submodule_configs` are refused with a `ConfigurationError`.

## Optimizers

{optimizers}

Fused optimizers without a kernel for CPUs are saved by the same code, which knows of their state only that it has a row
or a value for each row of its table; they were not run.

## Forms of state dicts

`ShardedTensor`, `DTensor` (`output_dtensor=True`), plain tensors, `Stateful` objects (`{{"model": dmp, "optim":
optimizer}}`), nested dictionaries and lists, with values of any kind that loads without running code. Each loads into
each other that has the same names. `get_state_dict(dmp.module, optimizers)` of
`torch.distributed.checkpoint.state_dict` works for the model and its `torch.optim` optimizers; it knows nothing of
fused ones, whose state is `dmp.fused_optimizer.state_dict()`.

## Notes

{notes}

A load is refused with a `StateMismatchError` where the state does not fit: names that are on one side only, unless
`allow_partial_load=True` asks for less; tensors of another size or dtype; id maps of managed collisions under a number
of ranks that does not divide theirs. A save is refused with a `ConfigurationError` where ranks hold different tensors
under one name that is not sharded, as `torch.optim` makes them for tables with dense kernels.
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

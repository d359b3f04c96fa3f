"""Fitting: what of a checkpoint goes where in the state dicts of all ranks, or why it cannot.

A rank need not hold every tensor, so this is decided once, by the coordinator, from what all ranks want together.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from torchrec_cnr.errors import StateMismatchError
from torchrec_cnr.load_report import LoadReport, Size, listed, some
from torchrec_cnr.manifest import Manifest, TensorEntry


@dataclass(frozen=True)
class Wanted:
    """An item of a rank's state dict.

    Attributes:
        fqn: Its name.
        size: Its global size, or None for what is no tensor.
        dtype: Name of its dtype, such as ``float32``, or None.
    """

    fqn: str
    size: Size | None = None
    dtype: str | None = None


@dataclass
class _Mismatches:
    """What can be loaded in no mode, as parts of a message."""

    sizes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)


def fit(wanted: Collection[Wanted], manifest: Manifest, url: str, *, allow_partial: bool) -> LoadReport:
    """What a load is to do.

    Args:
        wanted: What the state dicts of all ranks hold.
        manifest: Of the checkpoint.
        url: The checkpoint.
        allow_partial: Whether what is on one side only may be left out.

    Raises:
        StateMismatchError: Something does not fit; the message names all of it, or the first few and their number.
    """
    names, saved = {item.fqn for item in wanted}, {*manifest.tensors, *manifest.objects}
    missing, unexpected = sorted(names - saved), sorted(saved - names)
    mismatches, reshaped = _Mismatches(), {}
    fitting = _fitting_tables(wanted, manifest)
    for item in sorted((item for item in wanted if item.fqn in saved), key=lambda item: item.fqn):
        entry = manifest.tensors.get(item.fqn)
        _compare(item, entry, fitting, mismatches)
        if entry is not None and item.size is not None and item.size != entry.size:
            reshaped[item.fqn] = (entry.size, item.size)
    lines = list(_lines(mismatches, () if allow_partial else missing, () if allow_partial else unexpected))
    if lines:
        raise StateMismatchError("\n".join([f"the state dict does not fit {url}:", *lines]))
    return LoadReport(url, tuple(sorted(names & saved)), tuple(missing), tuple(unexpected), reshaped)


def _fitting_tables(wanted: Collection[Wanted], manifest: Manifest) -> set[str]:
    """FQNs of tables of the right size, by which row-wise optimizer state can be placed."""
    sizes = {fqn: entry.size for fqn, entry in manifest.tensors.items() if entry.is_table}
    return {item.fqn for item in wanted if item.size is not None and sizes.get(item.fqn) == item.size}


def _compare(item: Wanted, entry: TensorEntry | None, tables: Collection[str], mismatches: _Mismatches) -> None:
    if (entry is None) != (item.size is None):
        side = "the state dict" if entry is None else "the checkpoint"
        mismatches.kinds.append(f"{item.fqn!r} (in {side})")
    elif entry is not None and item.size is not None:
        # Row-wise state is as large as its table's sharding makes it; the table's boxes place it.
        if item.size != entry.size and entry.table not in tables:
            mismatches.sizes.append(f"{item.fqn!r} (saved {list(entry.size)}, wanted {list(item.size)})")
        if item.dtype != entry.dtype:
            mismatches.dtypes.append(f"{item.fqn!r} (saved {entry.dtype}, wanted {item.dtype})")


def _lines(mismatches: _Mismatches, missing: Collection[str], unexpected: Collection[str]) -> Iterator[str]:
    """What to tell of a load that cannot be, and what to do about it."""
    if missing:
        yield f"  {len(missing)} not in the checkpoint: {some(missing)}"
    if unexpected:
        yield f"  {len(unexpected)} not in the state dict: {some(unexpected)}"
    if mismatches.sizes:
        yield f"  {len(mismatches.sizes)} of another size: {listed(mismatches.sizes, len(mismatches.sizes))}"
    if mismatches.dtypes:
        yield f"  {len(mismatches.dtypes)} of another dtype: {listed(mismatches.dtypes, len(mismatches.dtypes))}"
    if mismatches.kinds:
        count = len(mismatches.kinds)
        yield f"  {count} a tensor on one side only: {listed(mismatches.kinds, count)}"
    if missing or unexpected:
        yield (
            "make both sides the same, or pass CNRLoadPlanner(allow_partial_load=True), which loads what both have and "
            "reports the rest"
        )
    if mismatches.sizes or mismatches.kinds:
        yield (
            "a tensor is loaded only as what it was saved as: build it in the saved size, or leave it out of the state "
            "dict and pass CNRLoadPlanner(allow_partial_load=True)"
        )
    if mismatches.dtypes:
        yield "a dtype is not converted: load into a tensor of the saved dtype, and convert it afterwards"

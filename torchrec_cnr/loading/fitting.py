"""Fitting: decide what of a checkpoint is loaded into the state dicts of all ranks, or why it cannot be; and report it.

The coordinator decides this once, from what all ranks want together, because one rank need not have every tensor.

Objects that each rank has one of, such as its data loader state, have ranked names. DCP would keep only one of the
objects that ranks save under one name. A ranked name also contains the number of ranks, so that a load on another
number of ranks finds all objects.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torchrec_cnr.errors import StateMismatchError
from torchrec_cnr.format.manifest import DTYPES, Manifest, TensorEntry
from torchrec_cnr.human_text import url_text
from torchrec_cnr.loading.optimizer_state import Size, StateName, is_count, pair, weight_of
from torchrec_cnr.loading.read_items import RowsLayout, SavedItem, TargetTables, ValueLayout
from torchrec_cnr.sharding import dtype_name, size_of

_NUM_LISTED = 5
_RANKED_NAME = re.compile(r"(?P<before>(?:.*\.)?)rank_(?P<rank>\d{1,9})_of_(?P<world_size>[1-9]\d{0,8})")


@dataclass(frozen=True)
class LoadReport:
    """The result of one load, the same on all ranks.

    Attributes:
        url: The checkpoint, a path or URL.
        loaded: FQNs that were loaded, sorted.
        missing: FQNs that only a state dict has, sorted. Their values are unchanged.
        unexpected: FQNs that only the checkpoint has, sorted. They were not loaded.
        reshaped: FQNs whose size differs from the saved one. The values are the saved size and the size in the state
            dict.
        renamed: FQNs that have another FQN in the checkpoint, which is the value.
        skipped: FQNs of the state dict that the planner's ``only`` excludes, sorted. Their values are unchanged.

    Examples:
        >>> path, report = cnr.restore_newest("run", state, tracker)
        >>> report.loaded[0]
        'model.users.weight'
        >>> report.missing, report.unexpected
        ((), ())
    """

    url: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: Mapping[str, tuple[Size, Size]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()

    def __repr__(self) -> str:
        kinds = ("missing", "unexpected", "reshaped", "renamed", "skipped")
        counts = [f"{len(names):,} {what}" for what in kinds if (names := getattr(self, what))]
        return f"LoadReport({', '.join([f'{len(self.loaded):,} loaded', *counts])}, {url_text(self.url)})"

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} loaded from {self.url}"]
        sizes = [f"{fqn!r} from {list(old)} to {list(new)}" for fqn, (old, new) in self.reshaped.items()]
        names_by_kind = {
            "missing, left as they were": [repr(fqn) for fqn in self.missing],
            "unexpected, left out": [repr(fqn) for fqn in self.unexpected],
            "reshaped": sizes,
            "renamed": [f"{fqn!r} was {saved!r}" for fqn, saved in self.renamed.items()],
            "skipped, left as they were": [repr(fqn) for fqn in self.skipped],
        }
        lines += [f"{len(names)} {what}: {listed(names)}" for what, names in names_by_kind.items() if names]
        return "\n".join(lines)


def listed(parts: Sequence[str]) -> str:
    """Return the first few names as one text."""
    return ", ".join(parts[:_NUM_LISTED]) + (", ..." if len(parts) > _NUM_LISTED else "")


QUANTIZED = "quantized"  # dtype of a quantized model's table, which accepts any float dtype, and must be loaded


@dataclass(frozen=True)
class Wanted:
    """An item of a rank's state dict.

    Attributes:
        fqn: Its FQN.
        name: The last key of its path; for a parameter, its name in the model.
        size: Its global size, or None if it is not a tensor.
        dtype: Name of its dtype, such as ``float32``, `QUANTIZED`, or None.
    """

    fqn: str
    name: str
    size: Size | None = None
    dtype: str | None = None

    @classmethod
    def of(cls, fqn: str, value: Any, path: Sequence[str | int], tables: TargetTables) -> "Wanted":
        """Return the item at ``path`` in the state dict; it may be one of a quantized model's ``tables``."""
        name, table = str(path[-1]), tables.find(value)
        if table is not None:
            return cls(fqn, name, table.size, QUANTIZED)
        return cls(fqn, name, size_of(value), dtype_name(value)) if isinstance(value, Tensor) else cls(fqn, name)


@dataclass(frozen=True)
class Fit:
    """The decision of what a load does.

    Attributes:
        report: Report for the user.
        sources: By FQN, the source of each item.
        left_out: FQNs on one side only that a strict load would refuse.
    """

    report: LoadReport
    sources: Mapping[str, SavedItem]
    left_out: frozenset[str]


@dataclass
class _Mismatches:
    """The reasons why something cannot be loaded, as parts of a message."""

    ambiguous: list[str]
    quantized: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    sizes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    has_codes: bool = False


def fit(
    wanted: Collection[Wanted],
    manifest: Manifest,
    url: str,
    *,
    allow_partial: bool,
    resized: Collection[str] = (),
    skipped: Collection[str] = (),
    ignores_unexpected: bool = False,
) -> Fit:
    """Decide what a load does.

    Args:
        wanted: The items of the state dicts of all ranks.
        manifest: Manifest of the checkpoint.
        url: The checkpoint.
        allow_partial: Whether items on one side only may be left out.
        resized: FQNs of tensors whose number of rows may differ. The rows that both sides have are loaded.
        skipped: FQNs of wanted items that are not loaded. They only show what the others are.
        ignores_unexpected: Whether the checkpoint may have items that are not wanted.

    Raises:
        StateMismatchError: Something does not fit; the message names all of it, or the first few and their number.
    """
    sizes = {item.fqn: item.size for item in wanted}
    saved_sizes = {fqn: entry.size for fqn, entry in manifest.tensors.items()} | dict.fromkeys(manifest.objects)
    tables = _Tables.of(sizes, manifest, resized)
    pairing = pair(sizes, saved_sizes, {item.name for item in wanted} | set(tables.fqns))
    missing = set(sizes) - set(saved_sizes) - set(pairing.renamed) - set(skipped)
    unexpected = set(saved_sizes) - set(sizes) - set(pairing.renamed.values())
    left_out = frozenset((missing | unexpected) - pairing.tolerated)
    ambiguous = [(fqn, others) for fqn, others in pairing.ambiguous.items() if fqn not in skipped]
    mismatches = _Mismatches([f"{fqn!r} (may be {' or '.join(map(repr, others))})" for fqn, others in ambiguous])
    mismatches.roles += map(repr, sorted(pairing.of_others - set(skipped)))
    quantized = {item.fqn for item in wanted if item.dtype == QUANTIZED}
    mismatches.quantized += map(repr, sorted(missing & quantized))
    if not allow_partial:
        mismatches.missing += map(repr, sorted((missing & left_out) - quantized))
        mismatches.unexpected += map(repr, () if ignores_unexpected else sorted(unexpected & left_out))
    sources: dict[str, SavedItem] = {}
    reshaped = {}
    loaded = [item for item in wanted if item.fqn not in missing and item.fqn not in skipped]
    for item in sorted(loaded, key=lambda item: item.fqn):
        origin = pairing.renamed.get(item.fqn, item.fqn)
        entry = manifest.tensors.get(origin)
        source = _source(item, origin, entry, tables) or _resized_source(item, origin, entry, tables, resized)
        _compare(item, entry, source, mismatches)
        sources[item.fqn] = source or SavedItem(origin)
        if entry is not None and item.size is not None and item.size != entry.size:
            reshaped[item.fqn] = (entry.size, item.size)
    lines = list(_lines(mismatches))
    if lines:
        raise StateMismatchError("\n".join([f"the state dict does not fit {url}:", *lines]))
    report = LoadReport(
        url, tuple(sources), tuple(sorted(missing)), tuple(sorted(unexpected)), reshaped, pairing.renamed
    )
    return Fit(report, sources, left_out)


@dataclass(frozen=True)
class _Tables:
    """The checkpoint's tables.

    Attributes:
        sizes: Sizes by FQN.
        fqns: FQNs by the table's name in the model; there are several if a state dict contains several models.
        fitting: FQNs of tables that are wanted in the saved size. Their shards can place row-wise state.
        resized: FQNs of tables that are wanted with another number of rows, as the caller allows.
        others: FQNs of further tables that are wanted in another size; their row-wise state cannot be placed.
        wanted_rows: The wanted number of rows of each tensor, as a size of one dimension.
    """

    sizes: Mapping[str, Size]
    fqns: Mapping[str, Collection[str]]
    fitting: Collection[str]
    resized: Collection[str]
    others: Collection[str]
    wanted_rows: Mapping[str, Size]

    @classmethod
    def of(cls, wanted: Mapping[str, Size | None], manifest: Manifest, resized: Collection[str]) -> "_Tables":
        sizes = {fqn: entry.size for fqn, entry in manifest.tensors.items() if entry.is_table}
        fqns: dict[str, set[str]] = defaultdict(set)
        for fqn in sizes:
            fqns[str(manifest.paths.get(fqn, (fqn,))[-1])].add(fqn)
        fitting = {fqn for fqn, size in sizes.items() if wanted.get(fqn) == size}
        widths = {fqn: size[1:] for fqn, size in wanted.items() if size is not None and fqn in resized}
        rows = {fqn: size[:1] for fqn, size in wanted.items() if size}
        may_differ = {fqn for fqn, size in sizes.items() if widths.get(fqn) == size[1:]} - fitting
        return cls(sizes, fqns, fitting, may_differ, (sizes.keys() & wanted.keys()) - fitting - may_differ, rows)

    def placing(self, fqn: str, num_rows: int) -> str | None:
        """Return the one table whose shards can place the row-wise state ``fqn`` of this many rows."""
        state = StateName.parse(fqn)
        tables = self.fqns.get(weight_of(state.key, self.fqns), ()) if state else ()
        return next((table for table in tables if len(tables) == 1 and self.sizes[table][0] == num_rows), None)


def _source(item: Wanted, saved_fqn: str, entry: TensorEntry | None, tables: _Tables) -> SavedItem | None:
    """Return the source of an item, or None if its size differs from the saved one."""
    if entry is None or item.size is None:
        return SavedItem(saved_fqn)
    if item.size != entry.size and len(item.size) <= 1 and len(entry.size) <= 1 and is_count(item.fqn, saved_fqn):
        return SavedItem(saved_fqn, ValueLayout())
    if entry.table in tables.fitting and len(item.size) == 1:
        # The size of row-wise state depends on its table's sharding, so the table's shard regions place it.
        return SavedItem(saved_fqn, RowsLayout(entry.table))
    if item.size == entry.size and entry.table is None:
        return SavedItem(saved_fqn)
    if entry.table in tables.resized or entry.table in tables.others:
        return None  # even if it has the saved size: it may belong to other rows, in several column shards
    if saved_fqn != item.fqn and _is_row_wise(item.size) and _is_row_wise(entry.size):
        num_rows, num_cols = (entry.size[0], 1) if entry.table is None else tables.sizes[entry.table]
        table = tables.placing(item.fqn, num_rows)
        if table in tables.resized or table in tables.others:
            return None
        if len(item.size) == 1 and table in tables.fitting:
            return SavedItem(saved_fqn, RowsLayout(table))
        if item.size[0] == num_rows:
            return SavedItem(saved_fqn, RowsLayout(num_cols=num_cols))
    return SavedItem(saved_fqn) if item.size == entry.size else None


def _resized_source(
    item: Wanted, saved_fqn: str, entry: TensorEntry | None, tables: _Tables, resized: Collection[str]
) -> SavedItem | None:
    """Return the source of an item that has another number of rows; None if that may not be, or more differs."""
    if entry is None or not item.size or item.dtype == QUANTIZED or item.fqn not in resized:
        return None
    if entry.table is not None:
        num_rows = tables.sizes[entry.table][0]
        is_placed = entry.table in tables.resized and len(item.size) == 1
        return SavedItem(saved_fqn, RowsLayout(entry.table, max_rows=num_rows)) if is_placed else None
    if len(item.size) == 1 and StateName.parse(item.fqn) is not None and not _is_one_shard(item, entry, tables):
        return None
    return SavedItem(saved_fqn) if entry.size and item.size[1:] == entry.size[1:] else None


def _is_one_shard(item: Wanted, entry: TensorEntry, tables: _Tables) -> bool:
    """Return whether row-wise state has one value per row on both sides, so that its rows are those of its table.

    A checkpoint without a tracker does not record the table of the state. State of column shards is one after another.
    """
    state = StateName.parse(item.fqn)
    names = tables.fqns.get(weight_of(state.key, tables.fqns), ()) if state is not None else ()
    fqn = next(iter(names)) if len(names) == 1 else None
    return fqn is not None and entry.size == tables.sizes[fqn][:1] and item.size == tables.wanted_rows.get(fqn)


def _is_row_wise(size: Size) -> bool:
    """Return whether this is the size of state with one value per row."""
    return len(size) == 1 or (len(size) == 2 and size[1] == 1)


def _compare(item: Wanted, entry: TensorEntry | None, source: SavedItem | None, mismatches: _Mismatches) -> None:
    if (entry is None) != (item.size is None):
        side = "the state dict" if entry is None else "the checkpoint"
        mismatches.kinds.append(f"{item.fqn!r} (in {side})")
    elif entry is not None and item.size is not None:
        if source is None:
            mismatches.sizes.append(f"{item.fqn!r} (saved {list(entry.size)}, wanted {list(item.size)})")
        is_taken = item.dtype == entry.dtype or (item.dtype == QUANTIZED and DTYPES[entry.dtype].is_floating_point)
        if not is_taken and (source is None or not source.layout.converts):
            mismatches.dtypes.append(f"{item.fqn!r} (saved {entry.dtype}, wanted {item.dtype})")
            mismatches.has_codes |= item.dtype == "uint8"


def _lines(mismatches: _Mismatches) -> Iterator[str]:
    """Yield the lines of the message: what does not fit, then what to do."""
    names_by_kind = {
        "quantized and not in the checkpoint": mismatches.quantized,
        "not in the checkpoint": mismatches.missing,
        "not in the state dict": mismatches.unexpected,
        "optimizer state with an ambiguous counterpart": mismatches.ambiguous,
        "of another size": mismatches.sizes,
        "of another dtype": mismatches.dtypes,
        "a tensor on one side only": mismatches.kinds,
        "state of another kind of optimizer under the same name": mismatches.roles,
    }
    for what, names in names_by_kind.items():
        if names:
            yield f"  {len(names)} {what}: {listed(names)}"
    if mismatches.quantized:
        yield (
            "a quantized table must be loaded: give it the key that it was trained under, or remove it from the state "
            "dict"
        )
    if mismatches.missing or mismatches.unexpected:
        yield (
            "make both sides the same, or pass CNRLoadPlanner(allow_partial_load=True) to dcp.load, which loads what "
            "both have and reports the rest"
        )
    if any(".state." in fqn for fqn in mismatches.unexpected):
        yield (
            "an optimizer that has made no step, such as a new Adam, has no state to load into: use restore_newest or "
            "CheckpointManager.restore, which create it, or make a step before dcp.load"
        )
    if mismatches.ambiguous:
        yield (
            "optimizer state that has another name in the checkpoint is found by its table and role, which must be "
            "unique: remove it from the state dict, and pass CNRLoadPlanner(allow_partial_load=True)"
        )
    if mismatches.sizes or mismatches.kinds:
        yield (
            "a tensor must have the saved size: build the model with that size; or pass CNRLoadPlanner(resize=[...]), "
            "which loads the rows that both have, for a table and its optimizer state; or remove the tensor from the "
            "state dict and pass CNRLoadPlanner(allow_partial_load=True)"
        )
    if mismatches.roles:
        yield (
            "state of Adam and of Adagrad is not interchangeable: build the optimizer that was saved, or remove its "
            "state from the state dict and pass CNRLoadPlanner(allow_partial_load=True)"
        )
    if mismatches.dtypes:
        yield "dtypes are not converted: load into a tensor of the saved dtype, and convert it afterwards"
    if mismatches.has_codes:
        yield (
            "for a quantized TorchRec model pass CNRLoadPlanner(inference=InferenceTables(model)), and load into "
            "model.state_dict() itself, not a copy"
        )


def ranked_name(rank: int, world_size: int) -> str:
    """Return the last part of the name of an object that each rank has one of."""
    return f"rank_{rank}_of_{world_size}"


def saved_by_others(fqn: str, saved: Collection[str]) -> tuple[str, ...]:
    """Return the names, by rank, under which another number of ranks has saved an object.

    The result is empty if ``fqn`` itself is in the checkpoint.

    Args:
        fqn: The object that one rank wants.
        saved: All names in the checkpoint.
    """
    match = _RANKED_NAME.fullmatch(fqn)
    if match is None or fqn in saved:
        return ()
    for name in saved:
        other_match = _RANKED_NAME.fullmatch(name)
        if other_match and other_match["before"] == match["before"] and int(other_match["world_size"]) <= len(saved):
            world_size = int(other_match["world_size"])
            names = tuple(match["before"] + ranked_name(rank, world_size) for rank in range(world_size))
            if all(name in saved for name in names):
                return names
    return ()

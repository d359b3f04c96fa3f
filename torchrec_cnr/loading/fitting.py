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
from torchrec_cnr.loading.id_maps import is_id_map
from torchrec_cnr.loading.load_report import LoadReport, listed
from torchrec_cnr.loading.optimizer_state import Size, StateName, is_count, pair, weight_of
from torchrec_cnr.loading.read_items import MappedLayout, RowsLayout, SavedItem, TargetTables, ValueLayout
from torchrec_cnr.loading.row_maps import RowMap
from torchrec_cnr.sharding import dtype_name, first_rows, size_of

_RANKED_NAME = re.compile(r"(?P<before>(?:.*\.)?)rank_(?P<rank>\d{1,9})_of_(?P<world_size>[1-9]\d{0,8})")


QUANTIZED = "quantized"  # dtype of a quantized model's table, which accepts any float dtype, and must be loaded


@dataclass(frozen=True)
class Wanted:
    """An item of a rank's state dict.

    Attributes:
        fqn: Its FQN.
        name: The last key of its path; for a parameter, its name in the model.
        size: Its global size, or None if it is not a tensor.
        dtype: Name of its dtype, such as ``float32``, `QUANTIZED`, or None.
        first_rows: For ids of managed collisions, the first rows of the shards of all ranks.
    """

    fqn: str
    name: str
    size: Size | None = None
    dtype: str | None = None
    first_rows: tuple[int, ...] = ()

    @classmethod
    def of(cls, fqn: str, value: Any, path: Sequence[str | int], tables: TargetTables) -> "Wanted":
        """Return the item at ``path`` in the state dict; it may be one of a quantized model's ``tables``."""
        name, table = str(path[-1]), tables.find(value)
        if table is not None:
            return cls(fqn, name, table.size, QUANTIZED)
        if not isinstance(value, Tensor):
            return cls(fqn, name)
        return cls(fqn, name, size_of(value), dtype_name(value), first_rows(value) if is_id_map(fqn) else ())


@dataclass(frozen=True)
class Resize:
    """The tensors whose number of rows may differ, by saved FQN. By default the rows that both sides have are loaded.

    Attributes:
        fqns: All of them.
        row_maps: The row maps of those that have one.
        renumbered: Those of which the values are numbers of rows.
    """

    fqns: Collection[str] = ()
    row_maps: Mapping[str, RowMap] = field(default_factory=dict)
    renumbered: Collection[str] = ()


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
    row_maps: list[str] = field(default_factory=list)
    has_codes: bool = False


def fit(
    wanted: Collection[Wanted],
    manifest: Manifest,
    url: str,
    *,
    allow_partial: bool,
    resize: Resize = Resize(),
    skipped: Collection[str] = (),
    ignores_unexpected: bool = False,
) -> Fit:
    """Decide what a load does.

    Args:
        wanted: The items of the state dicts of all ranks.
        manifest: Manifest of the checkpoint.
        url: The checkpoint.
        allow_partial: Whether items on one side only may be left out.
        resize: The tensors whose number of rows may differ.
        skipped: FQNs of wanted items that are not loaded. They only show what the others are.
        ignores_unexpected: Whether the checkpoint may have items that are not wanted.

    Raises:
        StateMismatchError: Something does not fit; the message names all of it, or the first few and their number.
    """
    sizes = {item.fqn: item.size for item in wanted}
    saved_sizes = {fqn: entry.size for fqn, entry in manifest.tensors.items()} | dict.fromkeys(manifest.objects)
    tables = _Tables.of(sizes, manifest, resize)
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
    reshaped, mapped_rows = {}, {}
    loaded = [item for item in wanted if item.fqn not in missing and item.fqn not in skipped]
    for item in sorted(loaded, key=lambda item: item.fqn):
        origin = pairing.renamed.get(item.fqn, item.fqn)
        entry = manifest.tensors.get(origin)
        row_map = resize.row_maps.get(item.fqn)
        if row_map is None or _is_count(item, origin, entry):
            source = _source(item, origin, entry, tables) or _resized_source(item, origin, entry, tables, resize.fqns)
        elif (source := _mapped_source(item, origin, entry, tables, resize)) is not None:
            mapped_rows[item.fqn] = row_map.num_loaded
        _compare(item, entry, source, row_map, mismatches)
        sources[item.fqn] = source or SavedItem(origin)
        if entry is not None and item.size is not None and item.size != entry.size:
            reshaped[item.fqn] = (entry.size, item.size)
    lines = list(_lines(mismatches))
    if lines:
        raise StateMismatchError("\n".join([f"the state dict does not fit {url}:", *lines]))
    left = tuple(sorted(missing)), tuple(sorted(unexpected))
    report = LoadReport(url, tuple(sources), *left, reshaped, mapped_rows, pairing.renamed)
    return Fit(report, sources, left_out)


@dataclass(frozen=True)
class _Tables:
    """The checkpoint's tables.

    Attributes:
        sizes: Sizes by FQN.
        fqns: FQNs by the table's name in the model; there are several if a state dict contains several models.
        fitting: FQNs of tables that are wanted with the saved rows. Their shards can place row-wise state.
        resized: FQNs of tables that are wanted with other rows, as the caller allows.
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
    def of(cls, wanted: Mapping[str, Size | None], manifest: Manifest, resize: Resize) -> "_Tables":
        sizes = {fqn: entry.size for fqn, entry in manifest.tensors.items() if entry.is_table}
        fqns: dict[str, set[str]] = defaultdict(set)
        for fqn in sizes:
            fqns[str(manifest.paths.get(fqn, (fqn,))[-1])].add(fqn)
        fitting = {fqn for fqn, size in sizes.items() if wanted.get(fqn) == size and fqn not in resize.row_maps}
        widths = {fqn: size[1:] for fqn, size in wanted.items() if size is not None and fqn in resize.fqns}
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
    if item.size != entry.size and _is_count(item, saved_fqn, entry):
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


def _is_count(item: Wanted, saved_fqn: str, entry: TensorEntry | None) -> bool:
    """Return whether an item is a count of steps."""
    sizes = [] if entry is None or item.size is None else [item.size, entry.size]
    return all(len(size) <= 1 for size in sizes) and is_count(item.fqn, saved_fqn)


def _mapped_source(
    item: Wanted, saved_fqn: str, entry: TensorEntry | None, tables: _Tables, resize: Resize
) -> SavedItem | None:
    """Return the source of an item that has a row map; None if the map does not fit it."""
    row_map = resize.row_maps[item.fqn]
    if entry is None or not item.size or not entry.size or item.dtype == QUANTIZED:
        return None
    table = entry.table
    wanted_rows = tables.wanted_rows.get(item.fqn if table is None else table)
    num_saved = entry.size[0] if table is None else tables.sizes[table][0]
    if wanted_rows != (row_map.num_rows,) or row_map.num_saved > num_saved:
        return None
    if table is not None:
        fits = resize.row_maps.get(table) == row_map and _is_row_wise(item.size)
    elif len(item.size) == 1 and StateName.parse(item.fqn) is not None:
        fits = _is_one_shard(item, entry, tables)
    else:
        fits = item.size[1:] == entry.size[1:]
    return SavedItem(saved_fqn, MappedLayout(row_map, table, item.fqn in resize.renumbered)) if fits else None


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


def _compare(
    item: Wanted,
    entry: TensorEntry | None,
    source: SavedItem | None,
    row_map: RowMap | None,
    mismatches: _Mismatches,
) -> None:
    if (entry is None) != (item.size is None):
        side = "the state dict" if entry is None else "the checkpoint"
        mismatches.kinds.append(f"{item.fqn!r} (in {side})")
    elif entry is not None and item.size is not None:
        if source is None:
            sizes = f"saved {list(entry.size)}, wanted {list(item.size)}"
            if row_map is None:
                mismatches.sizes.append(f"{item.fqn!r} ({sizes})")
            else:
                entries = f"{row_map.num_rows} entries, the largest {row_map.num_saved - 1}"
                mismatches.row_maps.append(f"{item.fqn!r} ({sizes}, {entries})")
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
        "with a row map that does not fit": mismatches.row_maps,
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
    if mismatches.row_maps:
        yield (
            "a row map has one entry for each row in the state dict: the number of a saved row, which must exist, or "
            "-1; the numbers of columns must be the same, and the table must have the map that its state has"
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

"""Id maps of managed collisions after a load, and in a warm start with more rows, in which ids keep their rows.

TorchRec's ``MCHManagedCollisionModule`` keeps its buffers sorted by raw id. Checkpoints have them in the order of the
table's rows (``tracking.id_map_buffers``), or sorted for each rank that saved them. So a load sorts them again.

A managed-collision module maps ids to rows of its table. Each of its shards has the ids of one range of hash values,
and assigns them rows of the same shard of the table. In a table with more rows every shard has more, so the rows of all
but the first shard have other numbers. The rows that a shard had become its first rows. If several saved shards become
one, they are put one after another.

TorchRec's ``HashZchManagedCollisionModule`` places an id by its hash and the number of rows. Its ids cannot be carried
over to another number.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torchrec_cnr.format.manifest import Manifest, TensorEntry
from torchrec_cnr.loading.optimizer_state import Size, StateName, weight_of
from torchrec_cnr.loading.row_maps import RowMap
from torchrec_cnr.sharding import local_shards
from torchrec_cnr.tracking.id_map_buffers import ROW_NUMBERS, SORTED_IDS, SORTED_PREFIX

_IDS = re.compile(
    r"(?P<before>.*)(?P<module>_managed_collision_collection\._managed_collision_modules\.(?P<table>[^.]+)\.)"
    r"(?P<name>_mch_sorted_raw_ids|_hash_zch_identities)"
)
_BY_HASH = "its module places ids by their hash and the number of rows. Leave its tensors out, with 'only'"
_SORTED, _ROWS, _SEGMENTS = SORTED_IDS, ROW_NUMBERS, "_output_segments_tensor"


@dataclass
class CarriedIds:
    """What is done with the id maps of resized tables.

    Attributes:
        row_maps: By saved FQN, the row maps of id maps, of their tables, and of these tables' optimizer state.
        renumbered: Saved FQNs of tensors whose values are numbers of rows.
        kept: Saved FQNs of tensors that describe the shards and so keep their values.
        problems: What cannot be carried over, as lines of a message.
    """

    row_maps: dict[str, RowMap] = field(default_factory=dict)
    renumbered: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def is_id_map(fqn: str) -> bool:
    """Return whether a tensor has the ids of a managed-collision module."""
    return _IDS.fullmatch(fqn) is not None


def sorted_maps(fqns: Collection[str]) -> Mapping[str, Sequence[str]]:
    """Return the tensors with raw ids that TorchRec keeps sorted, each with all those that are sorted with it."""
    prefixes = {fqn: fqn.removesuffix(_SORTED) + SORTED_PREFIX for fqn in fqns if fqn.endswith(f".{_SORTED}")}
    return {ids: [fqn for fqn in fqns if fqn.startswith(prefix)] for ids, prefix in prefixes.items()}


def order_of(ids: Tensor) -> Tensor | None:
    """Return where each value of a sorted id map is in one that is not, int64 [num_rows]; None if it is sorted."""
    return None if bool((ids[:-1] <= ids[1:]).all()) else ids.argsort(stable=True)


def sort_id_maps(state_dict: Mapping[str, Any], fqns: Collection[str]) -> Collection[str]:
    """Sort the id maps that were loaded, as TorchRec searches them.

    Args:
        state_dict: The flattened state dict.
        fqns: What of it was loaded.

    Returns:
        Those tensors of maps that were not saved in the order of rows.
    """
    unordered: set[str] = set()
    for ids_fqn, members in sorted_maps(state_dict.keys() & set(fqns)).items():
        shards = {fqn: [shard.tensor.detach() for shard in local_shards(state_dict[fqn])] for fqn in members}
        numbers = shards.get(ids_fqn.removesuffix(SORTED_IDS) + ROW_NUMBERS, [])
        if not numbers or not all(bool((each.diff() == 1).all()) for each in numbers):
            unordered.update(members)
        for index, ids in enumerate(shards[ids_fqn]):
            if (order := order_of(ids)) is not None:
                for tensor in [of_fqn[index] for of_fqn in shards.values()]:
                    tensor.copy_(tensor.index_select(0, order))
    return unordered


def carried_ids(
    sizes: Mapping[str, Size | None],
    first_rows: Mapping[str, Sequence[int]],
    resized: AbstractSet[str],
    mapped: AbstractSet[str],
    manifest: Manifest,
) -> CarriedIds:
    """Decide how the ids of tables with another number of rows are carried over.

    Args:
        sizes: The wanted sizes, by saved FQN.
        first_rows: The first rows of all shards of each wanted id map, by saved FQN.
        resized: Saved FQNs that may have another number of rows.
        mapped: Those of them whose rows a user maps.
        manifest: Manifest of the checkpoint.
    """
    carried = CarriedIds()
    for fqn in sorted(sizes):
        match, entry, size = _IDS.fullmatch(fqn), manifest.tensors.get(fqn), sizes[fqn]
        if match is None or entry is None or not size:
            continue
        of_table = _of_table(match, resized & sizes.keys(), manifest)
        row_map: RowMap | str = ""
        if of_table & mapped:
            row_map = f"they keep their rows, which {min(of_table & mapped)!r} maps. Resize it without a map"
        elif size != entry.size and fqn in resized:
            row_map = _row_map(entry, size[0], first_rows[fqn]) if match["name"] == _SORTED else _BY_HASH
        if isinstance(row_map, RowMap):
            module = match["before"] + match["module"]
            carried.row_maps |= dict.fromkeys(of_table, row_map)
            carried.renumbered |= {module + _ROWS} & of_table
            carried.kept.add(module + _SEGMENTS)
        elif row_map:
            carried.problems.append(f"  ids of {fqn!r} cannot be carried over: {row_map}")
    return carried


def _row_map(entry: TensorEntry, num_rows: int, first_rows: Sequence[int]) -> RowMap | str:
    """Return the row map of an id map, or why there is none."""
    saved = [*sorted({place.box.offsets[0] for place in entry.places}), entry.size[0]]
    wanted = [*first_rows, num_rows]
    num_saved, num_wanted = len(saved) - 1, len(wanted) - 1
    if not num_wanted or num_saved % num_wanted:
        return f"{num_saved} saved shards cannot be divided among {num_wanted}"
    bounds = saved[:: num_saved // num_wanted]
    runs = []
    for first, stop, saved_first, saved_stop in zip(wanted, wanted[1:], bounds, bounds[1:], strict=False):
        if saved_stop - saved_first > stop - first:
            return (
                f"rows {saved_first:,} to {saved_stop:,} need {saved_stop - saved_first:,} rows of one shard, which "
                f"has {stop - first:,}"
            )
        runs.append((first, saved_first, saved_stop - saved_first))
    return RowMap.of_runs(num_rows, runs)


def _of_table(match: re.Match[str], resized: Collection[str], manifest: Manifest) -> set[str]:
    """Return those of some FQNs that have the rows of an id map's table: the map, the table, and optimizer state."""
    module, table = f"{match['before']}{match['module']}_mch_", f".{match['table']}.weight"
    tables = {
        fqn
        for fqn, entry in manifest.tensors.items()
        if entry.is_table and fqn.startswith(f"{match['before']}_embedding_module.") and fqn.endswith(table)
    }
    names = {str(manifest.paths.get(fqn, (fqn,))[-1]) for fqn in tables}
    states = {fqn: StateName.parse(fqn) for fqn in resized}
    of_tables = {fqn for fqn, state in states.items() if state is not None and weight_of(state.key, names) in names}
    return {fqn for fqn in resized if fqn in tables or fqn.startswith(module)} | of_tables

"""Assembly: from what every rank reports having written to the manifest of the whole checkpoint.

Ranks number packs by themselves; here they are numbered through. DCP's own writer reports success for
tensors that were never written, so every chunk of the plan must be matched by exactly one record, and nothing else.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from torchrec_cnr.boxes import Box
from torchrec_cnr.errors import SaveError
from torchrec_cnr.manifest import Pack, Shard, TensorEntry
from torchrec_cnr.phases import SavePhases
from torchrec_cnr.renumbering import Renumbering
from torchrec_cnr.row_sets import Blob

Key = tuple[tuple[int, ...], tuple[int, ...]] | None  # offsets and sizes of a shard; None for an object
RANK_RECORD = ""  # the fqn under which each rank reports its packs; DCP has no other way to pass them


@dataclass(frozen=True)
class RankRecord:
    """The files of one rank, and what they took."""

    packs: tuple[Pack, ...]
    phases: SavePhases


@dataclass(frozen=True)
class ShardRecord:
    """A shard that was written: what a rank knows of a ``TensorEntry``, with its own numbers of packs.

    Its rows may be stored in parts, as shards of one place that have no row in common.
    """

    size: tuple[int, ...]
    dtype: str
    is_table: bool
    table: str | None
    parts: tuple[Shard, ...]


@dataclass(frozen=True)
class ObjectRecord:
    """A non-tensor item that was written."""

    blob: Blob


@dataclass(frozen=True)
class Assembled:
    """The parts of a manifest that the ranks' records give; and what each rank took."""

    packs: tuple[Pack, ...]
    phases: tuple[SavePhases, ...]
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, Blob]


def assemble(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> Assembled:
    """Number all ranks' records through and check them against the plan.

    Args:
        metadata: DCP's metadata of the global plan.
        results: What ``write_data`` returned on each rank.

    Raises:
        SaveError: Something planned was not written, something else was, or ranks disagree about a tensor.
    """
    packs: list[Pack] = []
    phases: list[SavePhases] = []
    shards: dict[str, list[tuple[ShardRecord, tuple[Shard, ...]]]] = {}  # each with its parts, renumbered
    objects: dict[str, Blob] = {}
    for rank, rank_results in enumerate(results):
        records = [(result.index.fqn, result.storage_data) for result in rank_results]
        files = [record for _, record in records if isinstance(record, RankRecord)]
        if len(files) != 1:
            raise SaveError(f"rank {rank} reported its packs {len(files)} times, expected once; save again")
        renumbered = Renumbering(partial(_behind, len(packs)))
        packs += files[0].packs
        phases.append(files[0].phases)
        for fqn, record in records:
            if isinstance(record, ShardRecord):
                shards.setdefault(fqn, []).append((record, tuple(map(renumbered.shard, record.parts))))
            elif isinstance(record, ObjectRecord):
                objects[fqn] = renumbered.blob(record.blob)
    tensors = {fqn: _tensor_entry(fqn, records) for fqn, records in shards.items()}
    _check_against_plan(metadata, tensors, objects)
    return Assembled(tuple(packs), tuple(phases), dict(sorted(tensors.items())), dict(sorted(objects.items())))


def _behind(num_packs: int, blob: Blob) -> Blob:
    return Blob(blob.pack + num_packs, blob.offset, blob.num_bytes, blob.crc32c)


def _tensor_entry(fqn: str, written: Sequence[tuple[ShardRecord, tuple[Shard, ...]]]) -> TensorEntry:
    # What an empty shard belongs to, its rank cannot tell.
    filled = [record for record, parts in written if 0 not in parts[0].box.sizes] or [written[0][0]]
    first = filled[0]
    shared = {(r.size, r.dtype, r.is_table, r.table) for r in filled}
    if len(shared) != 1:
        raise SaveError(f"tensor {fqn!r}: its shards do not agree in size, dtype or table: {shared}")
    ordered = sorted([parts for _, parts in written], key=lambda parts: parts[0].box.offsets)
    shards = tuple(itertools.chain.from_iterable(ordered))
    places = tuple([parts[0].place for parts in ordered]) if len(shards) > len(ordered) else None
    return TensorEntry(first.dtype, first.size, shards, first.is_table, first.table, folded=places)


def _check_against_plan(metadata: Metadata, tensors: Mapping[str, TensorEntry], objects: Mapping[str, Blob]) -> None:
    planned: dict[str, set[Key]] = {}
    for fqn, plan in metadata.state_dict_metadata.items():
        chunks = plan.chunks if isinstance(plan, TensorStorageMetadata) else None
        planned[fqn] = {None} if chunks is None else {(c.offsets, c.sizes) for c in chunks}
    written: dict[str, set[Key]] = {fqn: {None} for fqn in objects}
    for fqn, entry in tensors.items():
        places = [(place.box.offsets, place.box.sizes) for place in entry.sharding]
        written.setdefault(fqn, set()).update(places)
        if len(set(places)) != len(places):
            raise SaveError("a shard was written twice; save again")
    if written != planned:
        missing, surplus = _difference(planned, written), _difference(written, planned)
        raise SaveError(
            f"what was written is not what was planned: missing {missing or 'nothing'}, not planned "
            f"{surplus or 'nothing'}; nothing was committed, save again"
        )


def _difference(some: Mapping[str, set[Key]], others: Mapping[str, set[Key]]) -> list[str]:
    """The first of what is in one and not in the other."""
    found = [(fqn, key) for fqn, keys in some.items() for key in keys - others.get(fqn, set())]
    return sorted(str((fqn, key and Box(*key))) for fqn, key in found)[:3]

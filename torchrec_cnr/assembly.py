"""Assembly: from what every rank reports having written to the manifest of the whole checkpoint.

Ranks number packs by themselves; here they are numbered through. DCP's own writer reports success for
tensors that were never written, so every chunk of the plan must be matched by exactly one record, and nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from torchrec_cnr.errors import SaveError
from torchrec_cnr.manifest import Blob, Pack, Place, Shard, TensorEntry
from torchrec_cnr.phases import SavePhases
from torchrec_cnr.renumbering import Renumbering
from torchrec_cnr.rows import Box

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

    @property
    def place(self) -> Place:
        """Where it lies."""
        return self.parts[0].place


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
    shards: dict[str, list[ShardRecord]] = {}
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
                shards.setdefault(fqn, []).append(replace(record, parts=tuple(map(renumbered.shard, record.parts))))
            elif isinstance(record, ObjectRecord):
                objects[fqn] = renumbered.blob(record.blob)
    tensors = {fqn: _tensor_entry(fqn, records) for fqn, records in shards.items()}
    _check_against_plan(metadata, tensors, objects)
    return Assembled(tuple(packs), tuple(phases), dict(sorted(tensors.items())), dict(sorted(objects.items())))


def _behind(num_packs: int, blob: Blob) -> Blob:
    return replace(blob, pack=blob.pack + num_packs)


def _tensor_entry(fqn: str, records: Sequence[ShardRecord]) -> TensorEntry:
    # What an empty shard belongs to, its rank cannot tell.
    filled = [record for record in records if 0 not in record.place.box.sizes] or records
    first = filled[0]
    shared = {(r.size, r.dtype, r.is_table, r.table) for r in filled}
    if len(shared) != 1:
        raise SaveError(f"tensor {fqn!r}: its shards do not agree in size, dtype or table: {shared}")
    ordered = sorted(records, key=lambda record: record.place.box.offsets)
    shards = tuple(shard for record in ordered for shard in record.parts)
    places = tuple(record.place for record in ordered)
    is_folded = len(shards) > len(places)
    return TensorEntry(
        first.dtype, first.size, shards, first.is_table, first.table, folded=places if is_folded else None
    )


def _check_against_plan(metadata: Metadata, tensors: Mapping[str, TensorEntry], objects: Mapping[str, Blob]) -> None:
    written: set[tuple[str, Box | None]]
    written = {(fqn, place.box) for fqn, entry in tensors.items() for place in entry.places}
    written |= {(fqn, None) for fqn in objects}
    if len(written) != sum(len(entry.places) for entry in tensors.values()) + len(objects):
        raise SaveError("a shard was written twice; save again")
    planned: set[tuple[str, Box | None]] = set()
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            planned |= {(fqn, Box(tuple(chunk.offsets), tuple(chunk.sizes))) for chunk in entry.chunks}
        else:
            planned.add((fqn, None))
    if written != planned:
        missing = sorted(str(item) for item in planned - written)[:3]
        surplus = sorted(str(item) for item in written - planned)[:3]
        raise SaveError(
            f"what was written is not what was planned: missing {missing or 'nothing'}, not planned "
            f"{surplus or 'nothing'}; nothing was committed, save again"
        )

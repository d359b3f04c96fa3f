"""How ``write`` writes one checkpoint: through the library's own encoding, packs and manifest.

Ranks, ids and times are made up, so that every run writes the same bytes.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tests.golden import mixed, split
from tests.golden.state import EXP_AVG, MOMENTUM, T0, T8, TABLES, paths_of, scheme_of
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import (
    MANIFEST_FILE,
    CheckpointRef,
    History,
    Manifest,
    Pack,
    Place,
    Shard,
    TensorEntry,
)
from torchrec_cnr.format.row_sets import Blob, RowSet
from torchrec_cnr.saving.encoding import EncodedRowSet, EncodedShard, EncodingInput, write_all_rows, write_rows
from torchrec_cnr.sharding import dtype_name
from torchrec_cnr.storage import pack_writer
from torchrec_cnr.storage.pack_writer import PackWriter
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking.modified_rows import RowMask

PACK_BYTES = 4096  # small, so that a rank writes several packs

Rows = list[int] | None  # of a box, to be stored; None for all


@dataclass
class Rank:
    """What one rank has written, with its own numbers of packs."""

    packs: PackWriter
    shards: list[tuple[str, Place, RowSet | EncodedRowSet, EncodedShard]] = field(default_factory=list)
    objects: dict[str, int] = field(default_factory=dict)


@dataclass
class Save:
    """One checkpoint on its way, a delta of the one before unless it is the first."""

    folder: Path
    number: int
    num_ranks: int
    state: dict[str, Tensor]
    policy: str = "Consecutive"
    ranks: list[Rank] = field(init=False)
    stored: list[tuple[str, Place, Rows]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.save_id = f"5a7e{self.number:012d}"
        self.store = Store.open(self.folder / f"step-{self.number}", sync_files=False)
        self.store.make()
        self.ranks = [
            Rank(PackWriter(self.store, f"{self.save_id}-{rank}", 1, PACK_BYTES)) for rank in range(self.num_ranks)
        ]

    def add(self, rank: int, fqn: str, box: Box, rows: Rows = None, table_box: Box | None = None) -> None:
        """Store one shard by itself."""
        self.add_sharing(rank, {fqn: Place(box, table_box)}, rows)

    def add_sharing(self, rank: int, members: Mapping[str, Place], rows: Rows, heat: int = 0) -> None:
        """Store shards that share their row numbers, in packs of this heat."""
        to = self.ranks[rank]
        sources = [self._source(fqn, place.box) for fqn, place in members.items()]
        block_bytes = 1024 if sources[0].name.startswith((T0, EXP_AVG, *mixed.TABLES, split.PREFIX)) else 64
        with mock.patch.object(pack_writer, "BLOCK_BYTES", block_bytes):
            found: list[tuple[RowSet | EncodedRowSet, EncodedShard]]
            if rows is None:
                found = [
                    (rows_, shard) for source in sources for rows_, (shard,) in [write_all_rows(to.packs, [source])]
                ]
            else:
                mask = torch.zeros(len(sources[0].rows), dtype=torch.bool)
                mask[rows] = True
                coded, encoded = write_rows(to.packs, sources, RowMask(mask), heat)
                found = [(coded, shard) for shard in encoded]
        for (fqn, place), (row_set, shard) in zip(members.items(), found, strict=True):
            to.shards.append((fqn, place, row_set, shard))
            self.stored.append((fqn, place, rows))

    def add_object(self, rank: int, fqn: str, value: object) -> None:
        """Store an object as ``torch.save`` writes it."""
        stream = io.BytesIO()
        torch.save(value, stream)
        data = np.frombuffer(stream.getvalue(), dtype=np.uint8)
        self.ranks[rank].objects[fqn] = self.ranks[rank].packs.add(fqn, "uint8", data.shape, data)

    def _source(self, fqn: str, box: Box) -> EncodingInput:
        values = self.state[fqn]
        values = values[box.slices(Box.whole(tuple(values.shape)))]
        name = f"{fqn}{list(box.offsets)}"
        return EncodingInput(name, values, dtype_name(values), scheme_of(self.number, fqn, box))

    def commit(self, history: History | None) -> History:
        """Write the manifest; returns the bytes of its lineage."""
        packs: list[Pack] = []
        shards: dict[str, list[Shard]] = {}
        objects: dict[str, Blob] = {}
        for rank in self.ranks:
            own_packs, own_blobs = rank.packs.finish()
            rank.packs.close()
            blobs = [replace(blob, pack=blob.pack + len(packs)) for blob in own_blobs]
            for fqn, place, row_set, encoded in rank.shards:
                rows = row_set if isinstance(row_set, RowSet) else row_set.located(blobs)
                codes = tuple(blobs[number] for number in encoded.blobs)
                scheme = scheme_of(self.number, fqn, place.box)
                shards.setdefault(fqn, []).append(Shard(place.box, rows, codes, scheme, place.table_box))
            objects |= {fqn: blobs[number] for fqn, number in rank.objects.items()}
            packs += own_packs
        num_bytes = sum(pack.num_bytes for pack in packs)
        total = (
            History(num_bytes) if history is None else replace(history, delta_bytes=(*history.delta_bytes, num_bytes))
        )
        manifest = Manifest(
            created_ns=1_700_000_000_000_000_000 + self.number,
            checkpoint_id=f"step-{self.number}",
            save_id=self.save_id,
            parent=self._parent(),
            policy=self.policy,
            history=total,
            num_restores=int(self.number > 2),
            world_size=self.num_ranks,
            writer="torchrec_cnr 0.1.0",
            packs=tuple(packs),
            tensors={fqn: self._entry(fqn, found) for fqn, found in sorted(shards.items())},
            objects=dict(sorted(objects.items())),
            paths=dict(sorted(paths_of([*shards, *objects]).items())),
        )
        self.store.put_new(MANIFEST_FILE, manifest_json.dumps(manifest)[0], self.save_id)
        return total

    def _parent(self) -> CheckpointRef | None:
        if self.number == 1:
            return None
        path = f"../step-{self.number - 1}"
        data = self.store.at(path).read(MANIFEST_FILE)
        return CheckpointRef(path, manifest_json.loads(data, path)[1])

    def _entry(self, fqn: str, shards: list[Shard]) -> TensorEntry:
        values, is_table = self.state[fqn], fqn in TABLES
        table = T8 if fqn == MOMENTUM else None
        places = tuple(dict.fromkeys(shard.place for shard in shards))
        folded = places if len(places) < len(shards) else None  # a shard's rows are in parts, by heat
        return TensorEntry(dtype_name(values), tuple(values.shape), tuple(shards), is_table, table, folded)

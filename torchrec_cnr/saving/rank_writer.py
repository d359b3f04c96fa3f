"""One rank's part of a save: every item of its plan is encoded into packs, and recorded for the coordinator."""

import io
import logging
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.profiler import record_function

from torchrec_cnr.errors import ConfigurationError, SaveError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import DTYPES, Place, Shard
from torchrec_cnr.format.row_sets import Blob, RowSet
from torchrec_cnr.progress import Count, SavePhases
from torchrec_cnr.quantization import Scheme, SchemeRules
from torchrec_cnr.saving.block_writer import BlockWriter, WrittenBlocks
from torchrec_cnr.saving.commit import RANK_RECORD, ObjectRecord, RankRecord, ShardRecord
from torchrec_cnr.saving.encoding import (
    EncodedRowSet,
    EncodedShard,
    EncodingInput,
    choose_scheme,
    write_all_rows,
    write_rows,
)
from torchrec_cnr.saving.plug_in_messages import ShardData
from torchrec_cnr.saving.row_blocks import Member
from torchrec_cnr.sharding import dtype_name
from torchrec_cnr.storage.pack_writer import PackWriter

logger = logging.getLogger(__name__)

TABLE_PATTERNS = ("*embedding_bags.*.weight", "*embeddings.*.weight")  # TorchRec's names, where no tracker tells


def is_table_name(fqn: str) -> bool:
    """Whether TorchRec names tables so."""
    return any(fnmatchcase(fqn, pattern) for pattern in TABLE_PATTERNS)


@dataclass(frozen=True, eq=False)
class _Item:
    """An item to be written, with its values."""

    item: WriteItem
    data: ShardData
    source: EncodingInput

    def described(self) -> tuple[Place, ShardRecord]:
        """Where it lies, and its record without any blob."""
        size, box = _place(self.item, self.data)
        record = ShardRecord(size, self.source.dtype, self.data.is_table, self.data.table, ())
        return Place(box, self.data.table_box), record


@dataclass(frozen=True, eq=False)
class _Written:
    """What is kept of an item that was written: all of its record but the places of its blobs; no values.

    Where it was written in row blocks, ``blocks`` has these, and which of their members it is.
    """

    item: WriteItem
    place: Place
    scheme: Scheme
    record: ShardRecord
    parts: tuple[tuple[RowSet | EncodedRowSet, EncodedShard], ...]
    blocks: tuple[WrittenBlocks, int] | None = None

    @property
    def num_exact(self) -> int:
        """Rows that its scheme cannot represent."""
        return sum(encoded.num_exact for _, encoded in self.parts)


class RankWriter:
    """Writes the items of one rank's plan and keeps the records for the coordinator.

    Args:
        packs: Where to.
        row_packs: Where the rows of deltas go to, if elsewhere.
        blocks: Writes them block by block, if a log keeps the newest pack of each.
        planner: Has the data.
        rules: How to quantize.
        warned: FQNs that were warned of before, added to.
        count: Counts items that were written.
    """

    def __init__(
        self,
        packs: PackWriter,
        planner: SavePlanner,
        rules: SchemeRules,
        warned: set[str],
        count: Count,
        row_packs: PackWriter | None = None,
        blocks: BlockWriter | None = None,
    ) -> None:
        self._blocks = blocks
        self._row_packs = row_packs if row_packs is not None else packs
        self._count = count
        self._began = time.monotonic()
        self._warned = warned
        self._packs = packs
        self._planner = planner
        self._rules = rules
        self._objects: list[tuple[WriteItem, int]] = []
        self._shards: list[_Written] = []

    def write(self, items: Sequence[WriteItem]) -> None:
        """Encode items, and write packs that are full."""
        together: dict[object, list[_Item]] = {}
        for item in items:
            if item.type is WriteItemType.BYTE_IO:
                self._objects.append((item, self._write_object(item)))
                self._count.add(1)
                continue
            data = self._resolve(item)
            source = self._source(item, data)
            if data.group is None or source.values.numel() == 0:
                self._write_together([_Item(item, data, source)])  # at once: its values may be needed by nobody else
                self._count.add(1)
            else:
                together.setdefault((data.group, id(data.rows)), []).append(_Item(item, data, source))
        for members in together.values():
            self._write_together(members)
            self._count.add(len(members))

    def _write_together(self, members: Sequence[_Item]) -> None:
        """Items whose rows are stored together."""
        sources = [member.source for member in members]
        data = members[0].data
        if self._blocks is not None and data.touched is not None and data.rows is not None and data.values.numel():
            self._write_blocks(members, sources, self._blocks)
            return
        parts: list[list[tuple[RowSet | EncodedRowSet, EncodedShard]]] = [[] for _ in members]
        for heat, mask in enumerate(members[0].data.rows or (None,)):
            rows: RowSet | EncodedRowSet
            with record_function("torchrec_cnr.encode"):
                if mask is None:
                    rows, encoded = write_all_rows(self._packs, sources)
                else:
                    rows, encoded = write_rows(self._row_packs, sources, mask, heat)
            for own, shard in zip(parts, encoded, strict=True):
                own.append((rows, shard))
        for member, own in zip(members, parts, strict=True):
            place, record = member.described()
            self._shards.append(_Written(member.item, place, member.source.scheme, record, tuple(own)))

    def _write_blocks(self, members: Sequence[_Item], sources: Sequence[EncodingInput], blocks: BlockWriter) -> None:
        """Items whose rows are stored together, in row blocks."""
        described = [member.described() for member in members]
        fqns = [member.item.index.fqn for member in members]
        (rows,), touched = members[0].data.rows or (), members[0].data.touched
        assert touched is not None  # as the caller has seen
        with record_function("torchrec_cnr.encode"):
            places = [place for place, _ in described]
            tensors = list(map(Member, fqns, (source.dtype for source in sources), places))
            written, encoded = blocks.write(tensors, sources, rows, touched)
        for number, (member, (place, record), shard) in enumerate(zip(members, described, encoded, strict=True)):
            own = ((written.new, shard),)
            self._shards.append(_Written(member.item, place, member.source.scheme, record, own, (written, number)))

    def _resolve(self, item: WriteItem) -> ShardData:
        data: Any = self._planner.resolve_data(item)
        if isinstance(data, ShardData):
            return data
        return ShardData(data.detach(), rows=None, is_table=is_table_name(item.index.fqn) and data.dim() == 2)

    def _source(self, item: WriteItem, data: ShardData) -> EncodingInput:
        fqn, dtype = item.index.fqn, dtype_name(data.values)
        if dtype not in DTYPES or data.values.layout is not torch.strided:
            raise ConfigurationError(f"tensor {fqn!r}: {data.values.layout} of {dtype} cannot be stored")
        name = f"{fqn}{list(item.index.offset or ())}"
        return EncodingInput(name, data.values, dtype, self._scheme(fqn, data), data.codes)

    def _scheme(self, fqn: str, data: ShardData) -> Scheme:
        """What a shard was encoded by already, or else what is chosen for it."""
        if data.codes is not None:
            return data.codes.scheme
        values = data.values if data.values.dim() else data.values[None]
        return choose_scheme(self._rules, fqn, data.is_table, values, data.rows, data.num_restores)

    def _write_object(self, item: WriteItem) -> int:
        stream: Any = self._planner.resolve_data(item)
        content = stream.getvalue()
        try:
            torch.load(io.BytesIO(content), weights_only=True)
        except pickle.UnpicklingError as error:
            raise ConfigurationError(
                f"item {item.index.fqn!r} could not be loaded again without running code; store plain values "
                "and tensors, or register its types with torch.serialization.add_safe_globals"
            ) from error
        data = np.frombuffer(content, dtype=np.uint8)
        return self._packs.add(item.index.fqn, "uint8", data.shape, data)

    def finish(self, phases: SavePhases) -> list[WriteResult]:
        """Returns once everything is in the store; adds what that took to what the save took before."""
        packs, blobs = self._packs.finish()
        row_blobs = blobs
        if self._row_packs is not self._packs:
            row_packs, row_blobs = self._row_packs.finish()
            row_blobs = tuple(replace(blob, pack=blob.pack + len(packs)) for blob in row_blobs)
            packs += row_packs
        kept_packs = self._blocks.kept_packs if self._blocks is not None else ()
        writers = {self._packs, self._row_packs}
        wait_secs = sum(writer.wait_secs for writer in writers)
        phases = replace(
            phases,
            encode_secs=time.monotonic() - self._began - wait_secs,
            wait_secs=wait_secs,
            upload_secs=sum(writer.upload_secs for writer in writers),
            num_bytes=sum(pack.num_bytes for pack in packs),
        )
        located: dict[int, RowSet] = {}
        results = [WriteResult(MetadataIndex(RANK_RECORD), 0, RankRecord((*packs, *kept_packs), phases))]
        for item, number in self._objects:
            results.append(WriteResult(item.index, blobs[number].num_bytes, ObjectRecord(blobs[number])))
        for written in self._shards:
            if written.num_exact:
                self._tell_of_exact_rows(written.item.index.fqn, written.num_exact)
            if written.blocks is not None:
                blocks, number = written.blocks
                parts = blocks.shards(row_blobs, len(packs))[number]
            else:
                parts = _located(written, blobs, row_blobs, located)
            num_bytes = sum(blob.num_bytes for shard in parts for blob in shard.blobs)
            results.append(WriteResult(written.item.index, num_bytes, replace(written.record, parts=parts)))
        return results

    def _tell_of_exact_rows(self, fqn: str, num_exact: int) -> None:
        """Warn at the first save in which a tensor has them."""
        logger.log(
            logging.INFO if fqn in self._warned else logging.WARNING,
            "tensor %r: %d rows are stored exactly, because codes cannot hold them (NaN, infinity, values that fp16 "
            "does not hold or tell apart); the manifest counts them, and later saves tell only at level INFO",
            fqn,
            num_exact,
        )
        self._warned.add(fqn)


def _located(
    written: _Written, blobs: Sequence[Blob], row_blobs: Sequence[Blob], located: dict[int, RowSet]
) -> tuple[Shard, ...]:
    """The parts of an item with the places of their blobs; row sets that several items share are one object."""
    parts = []
    for rows, encoded in written.parts:
        places = row_blobs if isinstance(rows, EncodedRowSet) else blobs
        if id(rows) not in located:
            located[id(rows)] = rows.located(places) if isinstance(rows, EncodedRowSet) else rows
        codes = tuple(places[number] for number in encoded.blobs)
        place = written.place
        parts.append(Shard(place.box, located[id(rows)], codes, written.scheme, place.table_box))
    return tuple(parts)


def _place(item: WriteItem, data: ShardData) -> tuple[tuple[int, ...], Box]:
    """Size of the item's tensor, and its box, which must be that of the data."""
    if item.tensor_data is None:
        raise SaveError(f"item {item.index.fqn!r} has no tensor data in the plan")
    chunk = item.tensor_data.chunk
    box, shape = Box(tuple(chunk.offsets), tuple(chunk.sizes)), tuple(data.values.shape)
    first = 1 if data.has_rows_only else 0  # then the box says how many rows there are
    if box.sizes[first:] != shape[first:]:
        raise SaveError(f"item {item.index.fqn!r}: planned {box.sizes}, the data is {shape}")
    return tuple(item.tensor_data.size), box

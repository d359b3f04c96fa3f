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

from torchrec_cnr.assembly import RANK_RECORD, ObjectRecord, RankRecord, ShardRecord
from torchrec_cnr.choosing import chosen_scheme, sampled_rows
from torchrec_cnr.encoding import EncodedRowSet, EncodedShard, Source, write_all_rows, write_rows
from torchrec_cnr.errors import ConfigurationError, SaveError
from torchrec_cnr.handover import ShardData
from torchrec_cnr.manifest import DTYPES, Place, RowSet, Shard
from torchrec_cnr.modified import RowMask, Rows
from torchrec_cnr.packs import PackWriter
from torchrec_cnr.phases import SavePhases
from torchrec_cnr.progress import Count
from torchrec_cnr.rows import Box
from torchrec_cnr.schemes import NoQuantization, Scheme, SchemeRules
from torchrec_cnr.shards import dtype_name

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
    source: Source


@dataclass(frozen=True, eq=False)
class _Written:
    """What is kept of an item that was written: all of its record but the places of its blobs; no values."""

    item: WriteItem
    place: Place
    scheme: Scheme
    record: ShardRecord
    parts: tuple[tuple[RowSet | EncodedRowSet, EncodedShard], ...]


class RankWriter:
    """Writes the items of one rank's plan and keeps the records for the coordinator.

    Args:
        packs: Where to.
        planner: Has the data.
        rules: How to quantize.
        warned: FQNs that were warned of before, added to.
        count: Counts items that were written.
    """

    def __init__(
        self, packs: PackWriter, planner: SavePlanner, rules: SchemeRules, warned: set[str], count: Count
    ) -> None:
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
        parts: list[list[tuple[RowSet | EncodedRowSet, EncodedShard]]] = [[] for _ in members]
        for heat, mask in enumerate(members[0].data.rows or (None,)):
            rows: RowSet | EncodedRowSet
            with record_function("torchrec_cnr.encode"):
                if mask is None:
                    rows, encoded = write_all_rows(self._packs, sources)
                else:
                    rows, encoded = write_rows(self._packs, sources, mask, heat)
            for own, shard in zip(parts, encoded, strict=True):
                own.append((rows, shard))
        for member, own in zip(members, parts, strict=True):
            data = member.data
            size, box = _place(member.item, data)
            record = ShardRecord(size, member.source.dtype, data.is_table, data.table, ())
            place = Place(box, data.table_box)
            self._shards.append(_Written(member.item, place, member.source.scheme, record, tuple(own)))

    def _resolve(self, item: WriteItem) -> ShardData:
        data: Any = self._planner.resolve_data(item)
        if isinstance(data, ShardData):
            return data
        return ShardData(data.detach(), rows=None, is_table=is_table_name(item.index.fqn) and data.dim() == 2)

    def _source(self, item: WriteItem, data: ShardData) -> Source:
        fqn, dtype = item.index.fqn, dtype_name(data.values)
        if dtype not in DTYPES or data.values.layout is not torch.strided:
            raise ConfigurationError(f"tensor {fqn!r}: {data.values.layout} of {dtype} cannot be stored")
        name = f"{fqn}{list(item.index.offset or ())}"
        return Source(name, data.values, dtype, self._scheme(fqn, data), data.codes)

    def _scheme(self, fqn: str, data: ShardData) -> Scheme:
        """What was chosen for a shard, unless codes and exact rows take more room than values, by those of a sample."""
        if data.codes is not None:
            return data.codes.scheme
        values = data.values if data.values.dim() else data.values[None]
        rule = self._rules.rule_for(fqn, values.dtype, data.is_table)
        if isinstance(rule, NoQuantization) or values.numel() == 0:
            return NoQuantization()
        return chosen_scheme(rule, sampled_rows(values, _mask_of(data.rows)), data.num_restores)

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
        phases = replace(
            phases,
            encode_secs=time.monotonic() - self._began - self._packs.wait_secs,
            wait_secs=self._packs.wait_secs,
            upload_secs=self._packs.upload_secs,
            num_bytes=sum(pack.num_bytes for pack in packs),
        )
        located: dict[int, RowSet] = {}
        results = [WriteResult(MetadataIndex(RANK_RECORD), 0, RankRecord(packs, phases))]
        for item, number in self._objects:
            results.append(WriteResult(item.index, blobs[number].num_bytes, ObjectRecord(blobs[number])))
        for written in self._shards:
            num_exact = sum(encoded.num_exact for _, encoded in written.parts)
            if num_exact:
                self._tell_of_exact_rows(written.item.index.fqn, num_exact)
            parts = []
            for rows, encoded in written.parts:
                if id(rows) not in located:
                    located[id(rows)] = rows.located(blobs) if isinstance(rows, EncodedRowSet) else rows
                codes = tuple(blobs[number] for number in encoded.blobs)
                place = written.place
                parts.append(Shard(place.box, located[id(rows)], codes, written.scheme, place.table_box))
            num_bytes = sum(blob.num_bytes for shard in parts for blob in shard.blobs)
            results.append(WriteResult(written.item.index, num_bytes, replace(written.record, parts=tuple(parts))))
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


def _mask_of(rows: tuple[Rows, ...] | None) -> RowMask | None:
    """Which of the values are to be stored; None for all of them."""
    masks = tuple(part for part in rows or () if isinstance(part, RowMask))
    return RowMask.union(masks) if masks else None


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

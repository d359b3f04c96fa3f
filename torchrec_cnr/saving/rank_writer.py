"""One rank's part of a save: encode every item of its plan into data files, and record it for the coordinator."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from torchrec_cnr.errors import ConfigurationError, SaveError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import DTYPES, Place
from torchrec_cnr.format.safe_pickle import check_loadable
from torchrec_cnr.progress import Count, SavePhases
from torchrec_cnr.quantization import SchemeRules, Transformed
from torchrec_cnr.quantization.row_transform import RowTransform
from torchrec_cnr.saving.commit import RANK_RECORD, RankRecord, ShardRecord
from torchrec_cnr.saving.encoding import EncodingInput, choose_scheme, is_outdated
from torchrec_cnr.saving.plug_in_messages import ShardData
from torchrec_cnr.saving.row_blocks import Member
from torchrec_cnr.saving.sinks import PackSink
from torchrec_cnr.sharding import ShardKey, dtype_name, shard_key, wait_for_devices
from torchrec_cnr.tracking.modified_rows import SelectedRows

logger = logging.getLogger(__name__)

_NOT_IN_FP16 = "values that fp16 cannot represent or distinguish"  # of rows that codes cannot represent
_TOO_LARGE = "values of more than 32,767 steps of the transform"
TABLE_PATTERNS = ("*embedding_bags.*.weight", "*embeddings.*.weight")  # TorchRec's names, for saves without a tracker


def is_table_name(fqn: str) -> bool:
    """Return whether TorchRec gives such names to tables."""
    return any(fnmatchcase(fqn, pattern) for pattern in TABLE_PATTERNS)


class RankWriter:
    """Writer of the items of one rank's plan; it keeps the records for the coordinator.

    Args:
        sink: Destination of the rows.
        planner: Returns the data of each item.
        rules: The quantization rules.
        warned: FQNs that the user was warned of before; new ones are added.
        count: Counts the items that are written.
        transforms: The transforms that were learned last, by shard; new ones are added.
    """

    def __init__(
        self,
        sink: PackSink,
        planner: SavePlanner,
        rules: SchemeRules,
        warned: set[str],
        count: Count,
        transforms: dict[ShardKey, RowTransform],
    ) -> None:
        self._sink = sink
        self._count = count
        self._transforms = transforms
        self._began = time.monotonic()
        self._warned = warned
        self._planner = planner
        self._rules = rules
        self._objects: list[WriteItem] = []
        self._shards: list[tuple[WriteItem, ShardRecord]] = []  # each without its blobs

    def write(self, items: Sequence[WriteItem]) -> None:
        """Encode items, and write data files that are full."""
        items_by_group: dict[object, list[tuple[WriteItem, ShardData]]] = {}
        for item in items:
            if item.type is WriteItemType.BYTE_IO:
                self._write_object(item)
                self._count.add(1)
                continue
            data = self._resolve(item)
            if data.group is None or data.values.numel() == 0:
                self._write_together([(item, data)])  # at once, so that values made for this save are freed
                self._count.add(1)
            else:
                items_by_group.setdefault((data.group, id(data.rows)), []).append((item, data))
        for members in items_by_group.values():
            self._write_together(members)
            self._count.add(len(members))

    def _write_together(self, members: Sequence[tuple[WriteItem, ShardData]]) -> None:
        """Write items whose rows are stored together."""
        tensors = []
        for item, data in members:
            dtype, (size, box) = _dtype(item, data), _place(item, data)
            tensors.append(Member(item.index.fqn, dtype, Place(box, data.table_box)))
            self._shards.append((item, ShardRecord(size, dtype, data.is_table, data.table, ())))
        _, data = members[0]
        self._sink.write(tensors, partial(self._sources, members), data.rows, data.captured)

    def _resolve(self, item: WriteItem) -> ShardData:
        data: Any = self._planner.resolve_data(item)
        if isinstance(data, ShardData):
            return data
        wait_for_devices([data])  # training may have written to it last, in a stream of its own
        values = data.detach()
        is_matrix = values.dim() == 2 and values.layout is torch.strided
        if is_matrix and (values.stride(1) != 1 or values.stride(0) < values.shape[1]):
            values = values.contiguous()  # kernels need rows that are contiguous and do not overlap
        return ShardData(values, rows=None, is_table=is_table_name(item.index.fqn) and data.dim() == 2)

    def _sources(
        self, members: Sequence[tuple[WriteItem, ShardData]], rows: Sequence[SelectedRows] | Tensor | None
    ) -> list[EncodingInput]:
        """Return the values of items and the schemes for these rows, which are those that will be encoded."""
        return [self._source(item, data, rows) for item, data in members]

    def _source(self, item: WriteItem, data: ShardData, rows: Sequence[SelectedRows] | Tensor | None) -> EncodingInput:
        fqn = item.index.fqn
        name, key = f"{fqn}{list(item.index.offset or ())}", shard_key(item)
        if data.codes is not None:
            scheme = data.codes.scheme
            if isinstance(scheme, Transformed) and is_outdated(data.codes, scheme.known):
                self._transforms[key] = replace(scheme.known, bits_per_value=0.0)  # so that the next save learns one
        else:
            values = data.values if data.values.dim() else data.values[None]
            tell = partial(self._tell_of_unsuitable_rows, fqn)
            known = self._transforms.get(key)
            if known is not None:
                # Deltas of a baseline may use its basis, although only a delta before has had this step.
                is_stored, has_largest = (part in self._sink.older for part in (known.digest, known.largest_part))
                known = replace(known, is_stored=is_stored) if has_largest else None
            scheme = choose_scheme(self._rules, fqn, data.is_table, values, rows, data.num_restores, tell, known)
            if isinstance(scheme, Transformed):
                self._transforms[key] = scheme.known
        return EncodingInput(name, data.values, dtype_name(data.values), scheme, data.codes)

    def _write_object(self, item: WriteItem) -> None:
        stream: Any = self._planner.resolve_data(item)
        content = stream.getvalue()
        check_loadable(content, f"item {item.index.fqn!r}")
        self._sink.write_object(item.index.fqn, np.frombuffer(content, dtype=np.uint8))
        self._objects.append(item)

    def finish(self, phases: SavePhases) -> list[WriteResult]:
        """Wait until everything is in the store, and return the records.

        The record of this rank contains ``phases``, completed by what the writing took.
        """
        sink_records = self._sink.finish()
        phases = replace(
            phases,
            encode_secs=time.monotonic() - self._began - sink_records.wait_secs,
            wait_secs=sink_records.wait_secs,
            upload_secs=sink_records.upload_secs,
            num_bytes=sink_records.num_bytes,
        )
        results = [WriteResult(MetadataIndex(RANK_RECORD), 0, RankRecord(sink_records.packs, phases))]
        for item, blob in zip(self._objects, sink_records.objects, strict=True):
            results.append(WriteResult(item.index, blob.num_bytes, blob))
        for (item, record), (parts, num_exact) in zip(self._shards, sink_records.shards, strict=True):
            if num_exact:
                is_transformed = any(isinstance(shard.scheme, Transformed) for shard in parts)
                self._tell_of_exact_rows(item.index.fqn, num_exact, is_transformed)
            num_bytes = sum(blob.num_bytes for shard in parts for blob in shard.blobs)
            results.append(WriteResult(item.index, num_bytes, replace(record, parts=parts)))
        return results

    def _tell_of_unsuitable_rows(self, fqn: str, exact_share: float) -> None:
        share = f"{100 * exact_share:.0f} %"
        self._tell_once(fqn, f"a shard is stored exactly, because codes cannot represent {share} of its rows")

    def _tell_of_exact_rows(self, fqn: str, num_exact: int, is_transformed: bool) -> None:
        what = f"{num_exact} rows are stored exactly and counted in the manifest, because codes cannot represent them"
        self._tell_once(fqn, what, _TOO_LARGE if is_transformed else _NOT_IN_FP16)

    def _tell_once(self, fqn: str, what: str, which: str = _NOT_IN_FP16) -> None:
        """Warn at the first save in which a tensor has rows that codes cannot represent."""
        level = logging.INFO if fqn in self._warned else logging.WARNING
        logger.log(level, "tensor %r: %s (NaN, infinity, %s); later saves log this at level INFO", fqn, what, which)
        self._warned.add(fqn)


def _dtype(item: WriteItem, data: ShardData) -> str:
    """Return the name of the dtype of the item's values, which must be one that can be stored."""
    dtype = dtype_name(data.values)
    if dtype not in DTYPES or data.values.layout is not torch.strided:
        raise ConfigurationError(f"tensor {item.index.fqn!r}: {data.values.layout} of {dtype} cannot be stored")
    return dtype


def _place(item: WriteItem, data: ShardData) -> tuple[tuple[int, ...], Box]:
    """Return the size of the item's tensor, and the item's region, which must match the data."""
    if item.tensor_data is None:
        raise SaveError(f"item {item.index.fqn!r} has no tensor data in the plan")
    chunk = item.tensor_data.chunk
    box, shape = Box(tuple(chunk.offsets), tuple(chunk.sizes)), tuple(data.values.shape)
    first_dim = 1 if data.has_rows_only else 0  # the data then has fewer rows than the region
    if box.sizes[first_dim:] != shape[first_dim:]:
        raise SaveError(f"item {item.index.fqn!r}: planned {box.sizes}, the data is {shape}")
    return tuple(item.tensor_data.size), box

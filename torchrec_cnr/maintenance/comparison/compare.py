"""``compare``: what differs between two checkpoints, each merged from its whole chain.

Tensors are read in ranges of rows, so that memory is bounded whatever their size. Rows are compared bit for bit, and
``row_distance`` measures how far the differing rows moved.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import DTYPES, Manifest, TensorEntry
from torchrec_cnr.human_text import count_text, url_text
from torchrec_cnr.lineage.checkpoint import Checkpoint, Lineage, read_lineage
from torchrec_cnr.maintenance.comparison.row_distance import Movement, MovementMeter
from torchrec_cnr.progress import Progress
from torchrec_cnr.reading.fold import fold
from torchrec_cnr.reading.plan import plan_fold, whole_box
from torchrec_cnr.reading.regions import LineageTensor
from torchrec_cnr.reading.transforms import KnownTransforms
from torchrec_cnr.storage.pack_writer import check_thread_count
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store

_RANGE_BYTES = 32 << 20  # of the rows of one checkpoint that are in memory at the same time


@dataclass(frozen=True)
class TensorComparison:
    """The comparison of a tensor that both checkpoints have, with the same size and dtype.

    Attributes:
        fqn: The FQN of the tensor.
        dtype: The name of its torch dtype.
        size: Its global size. For row-wise optimizer state, the number of rows of its table: under column-wise
            sharding, the mean over a row's columns is compared.
        is_table: Whether it is an embedding table.
        num_differing: The number of rows that differ.
        num_stored: For a table, the number of rows in the deltas from the first checkpoint to the second. A row in
            several deltas counts several times. None if the second is not based on the first.
        movement: How far the differing rows moved.
    """

    fqn: str
    dtype: str
    size: tuple[int, ...]
    is_table: bool
    num_differing: int
    num_stored: int | None
    movement: Movement

    @property
    def num_rows(self) -> int:
        """Return the number of rows."""
        return Box.whole(self.size).num_rows


@dataclass(frozen=True)
class Reshaped:
    """A tensor whose size or dtype differs between the two checkpoints.

    Attributes:
        fqn: The FQN of the tensor.
        size_a: Its global size in the first checkpoint.
        dtype_a: The name of its torch dtype in the first checkpoint.
        size_b: Its global size in the second checkpoint.
        dtype_b: The name of its torch dtype in the second checkpoint.
    """

    fqn: str
    size_a: tuple[int, ...]
    dtype_a: str
    size_b: tuple[int, ...]
    dtype_b: str


@dataclass(frozen=True)
class Comparison:
    """The differences between two checkpoints.

    Attributes:
        a: The path or URL of the first checkpoint.
        b: The path or URL of the second checkpoint.
        common: The path or URL of the newest checkpoint that both chains contain; None if there is none.
        num_own_a: The number of checkpoints that only the first chain contains.
        num_own_b: The number of checkpoints that only the second chain contains.
        tensors: The tensors with the same size and dtype in both.
        reshaped: The tensors whose size or dtype differs.
        only_in_a: The FQNs of tensors and objects that only the first checkpoint has.
        only_in_b: The FQNs of tensors and objects that only the second checkpoint has.
        objects: The FQNs of the objects in both.
        differing_objects: The FQNs of the objects that differ, by size and digest of their bytes from ``torch.save``.

    Examples:
        >>> comparison = cnr.compare("run/step-1", "run/step-2")
        >>> comparison.common
        '/.../run/step-1'
        >>> comparison.num_own_a, comparison.num_own_b
        (0, 1)
    """

    a: str
    b: str
    common: str | None
    num_own_a: int
    num_own_b: int
    tensors: tuple[TensorComparison, ...]
    reshaped: tuple[Reshaped, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    objects: tuple[str, ...]
    differing_objects: tuple[str, ...]

    def __repr__(self) -> str:
        num_differing = sum(tensor.num_differing > 0 for tensor in self.tensors)
        tensors = f"{num_differing:,} of {count_text(len(self.tensors), 'tensor')} differ"
        num_others = len(self.reshaped) + len(self.only_in_a) + len(self.only_in_b) + len(self.differing_objects)
        others_text = f", {count_text(num_others, 'other difference')}" if num_others else ""
        return f"Comparison({url_text(self.a)}, {url_text(self.b)}: {tensors}{others_text})"

    @property
    def is_same(self) -> bool:
        """Return whether nothing differs."""
        differences = (self.reshaped, self.only_in_a, self.only_in_b, self.differing_objects)
        return not any(differences) and not any(tensor.num_differing for tensor in self.tensors)


def compare(
    a: str | os.PathLike[str] | Store,
    b: str | os.PathLike[str] | Store,
    *,
    row_log: RowLog | None = None,
    progress: Progress | None = None,
    thread_count: int = 2,
) -> Comparison:
    """Compare two checkpoints, of the same run or of different runs.

    Args:
        a: The first checkpoint, as a path or fsspec URL.
        b: The second checkpoint.
        row_log: The Kafka topic that contains the rows of deltas, if they are not in files (``KafkaRows``).
        progress: Called with the number of bytes of tensors that were compared, and the total.
        thread_count: Number of requests in flight at the same time. Each takes up to 16 MiB of memory.

    Raises:
        CheckpointNotFoundError, DamagedError, VersionError, StoreError: A checkpoint cannot be read.
        ConfigurationError: An argument is out of its range.

    Examples:
        >>> comparison = cnr.compare("run/step-1", "run/step-2")
        >>> comparison.is_same
        False
        >>> comparison.tensors[0].fqn, comparison.tensors[0].num_differing
        ('model.users.weight', 100)
    """
    check_thread_count(thread_count)
    lineages = read_lineage(Store.open(a, row_log=row_log)), read_lineage(Store.open(b, row_log=row_log))
    manifests = lineages[0].newest.manifest, lineages[1].newest.manifest
    tensors_a, tensors_b = manifests[0].tensors, manifests[1].tensors
    objects_a, objects_b = manifests[0].objects, manifests[1].objects
    reshaped = tuple(_reshaped(*manifests))
    reshaped_fqns = {tensor.fqn for tensor in reshaped}
    common_fqns = [fqn for fqn in tensors_b if fqn in tensors_a and fqn not in reshaped_fqns]
    num_shared = _shared(*lineages)
    objects = tuple(fqn for fqn in objects_b if fqn in objects_a)
    return Comparison(
        a=lineages[0].newest.store.url,
        b=lineages[1].newest.store.url,
        common=lineages[1].checkpoints[num_shared - 1].store.url if num_shared else None,
        num_own_a=len(lineages[0].checkpoints) - num_shared,
        num_own_b=len(lineages[1].checkpoints) - num_shared,
        tensors=tuple(_compare_tensors(lineages, common_fqns, num_shared, progress, thread_count)),
        reshaped=reshaped,
        only_in_a=tuple(fqn for fqn in (*tensors_a, *objects_a) if fqn not in tensors_b and fqn not in objects_b),
        only_in_b=tuple(fqn for fqn in (*tensors_b, *objects_b) if fqn not in tensors_a and fqn not in objects_a),
        objects=objects,
        differing_objects=tuple(
            fqn
            for fqn in objects
            if (objects_a[fqn].num_bytes, objects_a[fqn].crc32c) != (objects_b[fqn].num_bytes, objects_b[fqn].crc32c)
        ),
    )


def read_rows(
    lineage: Lineage, fqn: str, rows: range, thread_count: int, transforms: KnownTransforms | None = None
) -> Tensor:
    """Return rows of a tensor, merged from a lineage: [len(rows), ...] of the tensor's dtype.

    For row-wise optimizer state, rows are those of its table, and the value of each is the mean over its columns.
    """
    tensor = LineageTensor(lineage, fqn)
    is_row_state = tensor.entry.table is not None
    tensor_box = whole_box(lineage.newest.manifest, fqn)
    box = (
        Box((rows.start, *tensor_box.offsets[1:]), (len(rows), *tensor_box.sizes[1:]))
        if tensor_box.sizes
        else tensor_box
    )
    target = torch.empty(len(rows) if is_row_state else box.sizes, dtype=tensor.dtype, device="cpu")
    regions = [tensor.rows_region(box, target)] if is_row_state else tensor.regions(box, target)
    fold(plan_fold(lineage, regions), regions, thread_count, transforms=transforms)
    return target


def _compared_size(manifest: Manifest, entry: TensorEntry) -> tuple[int, ...]:
    return entry.size if entry.table is None else manifest.tensors[entry.table].size[:1]


def _reshaped(a: Manifest, b: Manifest) -> Iterator[Reshaped]:
    for fqn, entry in b.tensors.items():
        old_entry = a.tensors.get(fqn)
        if old_entry is None:
            continue
        before, after = (_compared_size(a, old_entry), old_entry.dtype), (_compared_size(b, entry), entry.dtype)
        if before != after or (old_entry.table is None) != (entry.table is None):
            yield Reshaped(fqn, *before, *after)


def _shared(a: Lineage, b: Lineage) -> int:
    """Return the number of checkpoints that two lineages have in common, from the baseline on."""
    pairs = zip(a.checkpoints, b.checkpoints, strict=False)
    differing = (number for number, (first, second) in enumerate(pairs) if first.sha256 != second.sha256)
    return next(differing, min(len(a.checkpoints), len(b.checkpoints)))


def _compare_tensors(
    lineages: tuple[Lineage, Lineage], fqns: list[str], num_shared: int, progress: Progress | None, thread_count: int
) -> Iterator[TensorComparison]:
    a, b = lineages
    manifest = b.newest.manifest
    entries = {fqn: manifest.tensors[fqn] for fqn in fqns}
    row_bytes = {fqn: _row_bytes(manifest, entry) for fqn, entry in entries.items()}
    num_rows = {fqn: Box.whole(_compared_size(manifest, entry)).num_rows for fqn, entry in entries.items()}
    num_bytes, done_bytes = sum(num_rows[fqn] * row_bytes[fqn] for fqn in fqns), 0
    deltas = b.checkpoints[num_shared:] if num_shared == len(a.checkpoints) else None
    transforms = KnownTransforms()  # of both, which often share them
    for fqn, entry in entries.items():
        meter = MovementMeter()
        for rows in _ranges(num_rows[fqn], row_bytes[fqn]):
            values_a, values_b = (read_rows(each, fqn, rows, thread_count, transforms) for each in lineages)
            meter.add(values_a, values_b)
            done_bytes += len(rows) * row_bytes[fqn]
            if progress is not None:
                progress(done_bytes, num_bytes)
        yield TensorComparison(
            fqn,
            entry.dtype,
            _compared_size(manifest, entry),
            entry.is_table,
            meter.num_differing,
            _num_stored(deltas, fqn) if deltas is not None and entry.is_table else None,
            meter.movement(),
        )


def _num_stored(deltas: Sequence[Checkpoint], fqn: str) -> int:
    entries = (checkpoint.manifest.tensors.get(fqn) for checkpoint in deltas)
    return round(sum(entry.num_stored_rows for entry in entries if entry is not None))


def _row_bytes(manifest: Manifest, entry: TensorEntry) -> int:
    return Box.whole(_compared_size(manifest, entry)).num_cols * DTYPES[entry.dtype].itemsize


def _ranges(num_rows: int, row_bytes: int) -> Iterator[range]:
    if row_bytes == 0:
        return iter(())
    step = max(1, _RANGE_BYTES // row_bytes)
    return (range(start, min(start + step, num_rows)) for start in range(0, num_rows, step))

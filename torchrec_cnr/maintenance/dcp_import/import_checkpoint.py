"""``import_checkpoint``: makes a baseline of a checkpoint in DCP's own format, with the same code as other saves.

The items of the save are rows of the source's tensors, which are read right before they are encoded.
"""

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from torchrec_cnr.arguments import check_patterns
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_checkpoint
from torchrec_cnr.maintenance.dcp_import.dcp_checkpoint import DCPCheckpoint, read_dcp_checkpoint
from torchrec_cnr.maintenance.single_process_save import chunk_item, index_of, object_items, save
from torchrec_cnr.progress import Progress
from torchrec_cnr.quantization import NoQuantization, Quantization, SchemeRules
from torchrec_cnr.saving.plug_in_messages import ShardData
from torchrec_cnr.saving.rank_writer import TABLE_PATTERNS
from torchrec_cnr.saving.writer import CNRStorageWriter

_NUM_NAMED = 5  # tensors that a message lists


def import_checkpoint(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    quantization: Quantization | Mapping[str, Quantization] | None = None,
    tables: Sequence[str] | None = None,
    thread_count: int = 1,
    progress: Progress | None = None,
) -> Checkpoint:
    """Make a baseline of a checkpoint that ``dcp.save`` wrote with its own ``FileSystemWriter``.

    Tables are recognised by TorchRec's names for them, or by the names that you pass. If a job tracks another one, its
    first delta contains all rows of it. DCP does not record to which table row-wise optimizer state belongs. So such
    state loads only into the column sharding under which it was saved.

    A table is divided into shards of at most 64 MiB, and one is read at a time. So about 300 MiB of memory are enough.
    Chunks that are not contiguous, such as those of transposed tensors, are read as a whole.

    The source's pickles are not trusted: its metadata may name only DCP's classes, and its objects must load without
    running code. It has no digests, so corrupt values cannot be detected.

    Args:
        source: The checkpoint to import, as a path or fsspec URL.
        path: The path or fsspec URL of the new checkpoint.
        quantization: As in ``CNRStorageWriter``.
        tables: The FQNs of the tables, which are tensors of two dimensions, as patterns of ``fnmatch``. By default,
            TorchRec's names: ``*embedding_bags.*.weight`` and ``*embeddings.*.weight``.
        thread_count: Number of data files that are written at the same time. Each takes up to 24 MiB of memory.
        progress: Called with the number of bytes of tensors that were read, and the total.

    Returns:
        The baseline.

    Raises:
        ConfigurationError: An argument is wrong, a tensor cannot be stored, or ``path`` is a root or in a checkpoint.
            Or a pattern of ``tables``, or ``quantization``, applies to none of the source's tensors.
        CheckpointExistsError: There is already a checkpoint at ``path``, in this library's format or in DCP's own.
        CheckpointNotFoundError, DamagedError: The source cannot be read, or its metadata names other classes.
        SaveError, StoreError: Nothing was committed.

    Examples:
        >>> metadata = dcp.save(state, checkpoint_id="plain")  # without the plug-ins
        >>> scheme, tables = cnr.Asymmetric(bits=8), ["model.users.weight"]
        >>> cnr.import_checkpoint("plain", "imported", quantization=scheme, tables=tables).kind
        'baseline'
        >>> cnr.load_table("imported", "model.users.weight").shape
        torch.Size([1000, 16])
    """
    writer = CNRStorageWriter(path, quantization=quantization, thread_count=thread_count)
    check_patterns("tables", tables)
    dcp_checkpoint = read_dcp_checkpoint(source)
    patterns = TABLE_PATTERNS if tables is None else tables
    unused_patterns = [pattern for pattern in tables or () if not _tables_in(dcp_checkpoint, [pattern])]
    if unused_patterns or not patterns:
        raise _no_match(dcp_checkpoint, "there would be fewer tables", unused_patterns or ["''"])
    table_fqns = _tables_in(dcp_checkpoint, patterns)
    _check_quantized(dcp_checkpoint, quantization, table_fqns, patterns)
    planner = _ImportPlanner(dcp_checkpoint, table_fqns, progress)
    save(writer, [planner.whole_plan()], planner, dcp_checkpoint.paths)
    return read_checkpoint(path)


def _tables_in(dcp_checkpoint: DCPCheckpoint, patterns: Sequence[str]) -> frozenset[str]:
    """Return the FQNs of the matrices that match a pattern."""
    fqns = {dcp_chunk.chunk.fqn for dcp_chunk in dcp_checkpoint.chunks if len(dcp_chunk.size) == 2}
    return frozenset(fqn for fqn in fqns if any(fnmatchcase(fqn, pattern) for pattern in patterns))


def _check_quantized(
    dcp_checkpoint: DCPCheckpoint,
    quantization: Quantization | Mapping[str, Quantization] | None,
    table_fqns: frozenset[str],
    patterns: Sequence[str],
) -> None:
    """Refuse a ``quantization`` that applies to no tensor, for example because the tables have other names."""
    rules = SchemeRules.of(quantization if quantization is not None else NoQuantization())
    quantized_patterns = [pattern for pattern, scheme in rules.patterns if not isinstance(scheme, NoQuantization)]
    if not quantized_patterns and isinstance(rules.tables, NoQuantization):
        return
    dtypes = {dcp_chunk.chunk.fqn: dcp_chunk.chunk.dtype for dcp_chunk in dcp_checkpoint.chunks}
    if all(isinstance(rules.rule_for(fqn, dtypes[fqn], fqn in table_fqns), NoQuantization) for fqn in dtypes):
        raise _no_match(dcp_checkpoint, "nothing would be quantized", quantized_patterns or patterns)


def _no_match(dcp_checkpoint: DCPCheckpoint, problem: str, patterns: Sequence[str]) -> ConfigurationError:
    """Return the error for patterns that match nothing; it names the matrices that could be tables."""
    chunks = [dcp_chunk for dcp_chunk in dcp_checkpoint.chunks if len(dcp_chunk.size) == 2]
    matrices = sorted({dcp_chunk.chunk.fqn for dcp_chunk in chunks if dcp_chunk.chunk.dtype.is_floating_point})
    names = ", ".join(map(repr, matrices[:_NUM_NAMED])) or "none"
    more = f" and {len(matrices) - _NUM_NAMED} more" if len(matrices) > _NUM_NAMED else ""
    return ConfigurationError(
        f"{dcp_checkpoint.store.url}: {problem}: no tensor is named {' or '.join(patterns)}; pass patterns that match "
        f"its tables; its matrices are {names}{more}"
    )


class _ImportPlanner(DefaultSavePlanner):
    """Plans a save of all contents of a source, and reads them item by item."""

    def __init__(self, dcp_checkpoint: DCPCheckpoint, table_fqns: frozenset[str], progress: Progress | None) -> None:
        super().__init__()
        self._table_fqns = table_fqns
        self._stock = dcp_checkpoint
        self._chunks = {index_of(dcp_chunk.chunk): dcp_chunk for dcp_chunk in dcp_checkpoint.chunks}
        self._progress = progress
        self._num_bytes = sum(dcp_chunk.chunk.num_bytes for dcp_chunk in dcp_checkpoint.chunks)
        self._done_bytes = 0

    def whole_plan(self) -> SavePlan:
        """Return a plan of all items, in the source's order."""
        tensors = [chunk_item(dcp_chunk.chunk, dcp_chunk.size, WriteItemType.SHARD) for dcp_chunk in self._stock.chunks]
        return SavePlan([*object_items(self._stock.objects), *tensors])

    # DCP's type lacks `ShardData`, with which our planners tell our writer more than the values.
    def resolve_data(self, write_item: WriteItem) -> Any:
        """Read the data of an item."""
        if write_item.type is WriteItemType.BYTE_IO:
            return self._stock.read_object(write_item.index.fqn)
        dcp_chunk = self._chunks[write_item.index]
        values = self._stock.read(dcp_chunk)
        self._done_bytes += dcp_chunk.chunk.num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._num_bytes)
        return ShardData(values.contiguous(), rows=None, is_table=write_item.index.fqn in self._table_fqns)

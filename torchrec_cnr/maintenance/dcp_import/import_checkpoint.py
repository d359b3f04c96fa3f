"""Imports: a checkpoint in DCP's own format becomes a baseline, by the code that saves any other.

The save's items are rows of the source's tensors, which are read when they are to be encoded.
"""

import io
import os
from collections.abc import Mapping

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_checkpoint
from torchrec_cnr.maintenance.dcp_import.dcp_checkpoint import DCPCheckpoint, read_dcp_checkpoint
from torchrec_cnr.maintenance.dcp_import.dcp_metadata import METADATA_FILE
from torchrec_cnr.maintenance.single_process_save import chunk_item, index_of, object_items, save
from torchrec_cnr.progress import Progress
from torchrec_cnr.quantization import NoQuantization, Quantization, SchemeRules
from torchrec_cnr.saving.rank_writer import TABLE_PATTERNS, is_table_name
from torchrec_cnr.saving.writer import CNRStorageWriter
from torchrec_cnr.storage.store import Store

_NUM_NAMED = 5  # tensors in a message


def import_checkpoint(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    quantization: Quantization | Mapping[str, Quantization] | None = None,
    thread_count: int = 1,
    progress: Progress | None = None,
) -> Checkpoint:
    """Make a baseline of a checkpoint that ``dcp.save`` wrote with its own ``FileSystemWriter``.

    Tables are recognised by TorchRec's names for them (``embedding_bags.*.weight``, ``embeddings.*.weight``), as in a
    save without a tracker. DCP does not say what row-wise optimizer state belongs to, so it loads into the column
    sharding that it was saved under. A table becomes shards of 64 MiB at most. As much is read at a time, so that some
    300 MiB of memory are enough, but for chunks whose rows do not follow one another in memory, such as those of
    transposed tensors, which are read whole.

    The source's pickles are not trusted: its metadata may name DCP's classes only, and its objects must load without
    running code. It has no digests, so that damage within values goes unnoticed.

    Args:
        source: The checkpoint, a path or fsspec URL.
        path: Where to, a path or fsspec URL.
        quantization: As in ``CNRStorageWriter``.
        thread_count: Packs written at once. Each takes up to 24 MiB of memory.
        progress: Called now and then with the bytes of tensors that were read, and that there are.

    Returns:
        The baseline.

    Raises:
        ConfigurationError: An argument cannot work, DCP's own checkpoint lies at ``path``, ``quantization`` is for none
            of the source's tensors, or it holds what cannot be stored.
        CheckpointExistsError: There is a checkpoint at ``path`` already.
        CheckpointNotFoundError, DamagedError: The source cannot be read, or its metadata names other classes.
        SaveError, StoreError: Nothing was committed.
    """
    if Store.open(path).exists(METADATA_FILE):
        raise ConfigurationError(
            f"{Store.open(path).url} holds a checkpoint in DCP's own format already, and a directory holds one "
            "checkpoint; give another 'path'"
        )
    writer = CNRStorageWriter(path, quantization=quantization, thread_count=thread_count)
    stock = read_dcp_checkpoint(source)
    _check_quantized(stock, SchemeRules.of(quantization if quantization is not None else NoQuantization()))
    planner = _ImportPlanner(stock, progress)
    save(writer, [planner.whole_plan()], planner, stock.paths)
    return read_checkpoint(path)


def _check_quantized(stock: DCPCheckpoint, rules: SchemeRules) -> None:
    """Who asks for codes gets some: names may be other than TorchRec's."""
    asked = [pattern for pattern, scheme in rules.patterns if not isinstance(scheme, NoQuantization)]
    if not asked and isinstance(rules.tables, NoQuantization):
        return
    found = {part.chunk.fqn: (part.chunk.dtype, len(part.size)) for part in stock.chunks}
    for fqn, (dtype, num_dims) in found.items():
        if not isinstance(rules.rule_for(fqn, dtype, num_dims == 2 and is_table_name(fqn)), NoQuantization):
            return
    matrices = sorted(fqn for fqn, (dtype, num_dims) in found.items() if num_dims == 2 and dtype.is_floating_point)
    named = ", ".join(map(repr, matrices[:_NUM_NAMED])) or "none"
    more = f" and {len(matrices) - _NUM_NAMED} more" if len(matrices) > _NUM_NAMED else ""
    raise ConfigurationError(
        f"{stock.store.url}: nothing would be quantized: no tensor is named {' or '.join(asked or TABLE_PATTERNS)}; "
        f"give patterns for its tables; its matrices are {named}{more}"
    )


class _ImportPlanner(DefaultSavePlanner):
    """Plans a save of all that a source holds, and reads it item by item."""

    def __init__(self, stock: DCPCheckpoint, progress: Progress | None) -> None:
        super().__init__()
        self._stock = stock
        self._chunks = {index_of(found.chunk): found for found in stock.chunks}
        self._progress = progress
        self._num_bytes = sum(found.chunk.num_bytes for found in stock.chunks)
        self._done_bytes = 0

    def whole_plan(self) -> SavePlan:
        """Everything, in the source's order."""
        tensors = [chunk_item(found.chunk, found.size, WriteItemType.SHARD) for found in self._stock.chunks]
        return SavePlan([*object_items(self._stock.objects), *tensors])

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Read an item."""
        if write_item.type is WriteItemType.BYTE_IO:
            return self._stock.read_object(write_item.index.fqn)
        found = self._chunks[write_item.index]
        values = self._stock.read(found)
        self._done_bytes += found.chunk.num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._num_bytes)
        return values

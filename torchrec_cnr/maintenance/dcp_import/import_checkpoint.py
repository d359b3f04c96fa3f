"""``import_checkpoint``: makes a baseline of a checkpoint in DCP's own format, with the same code as other saves.

The items of the save are rows of the source's tensors, which are read right before they are encoded.
"""

import io
import os
from collections.abc import Mapping

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_checkpoint
from torchrec_cnr.maintenance.catalog import contains_checkpoints
from torchrec_cnr.maintenance.dcp_import.dcp_checkpoint import DCPCheckpoint, read_dcp_checkpoint
from torchrec_cnr.maintenance.dcp_import.dcp_metadata import METADATA_FILE
from torchrec_cnr.maintenance.single_process_save import chunk_item, index_of, object_items, save
from torchrec_cnr.progress import Progress
from torchrec_cnr.quantization import NoQuantization, Quantization, SchemeRules
from torchrec_cnr.saving.rank_writer import TABLE_PATTERNS, is_table_name
from torchrec_cnr.saving.writer import CNRStorageWriter
from torchrec_cnr.storage.store import Store

_NUM_NAMED = 5  # tensors that a message lists


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
    save without a tracker. DCP does not record to which table row-wise optimizer state belongs. So such state loads
    only into the column sharding under which it was saved.

    A table is divided into shards of at most 64 MiB, and one is read at a time. So about 300 MiB of memory are enough.
    Chunks that are not contiguous, such as those of transposed tensors, are read as a whole.

    The source's pickles are not trusted: its metadata may name only DCP's classes, and its objects must load without
    running code. It has no digests, so corrupt values cannot be detected.

    Args:
        source: The checkpoint to import, as a path or fsspec URL.
        path: The path or fsspec URL of the new checkpoint.
        quantization: As in ``CNRStorageWriter``.
        thread_count: Number of data files that are written at the same time. Each takes up to 24 MiB of memory.
        progress: Called with the number of bytes of tensors that were read, and the total.

    Returns:
        The baseline.

    Raises:
        ConfigurationError: An argument is wrong, or a tensor cannot be stored. Or ``path`` is a root, lies in a
            checkpoint, or has a checkpoint in DCP's own format. Or ``quantization`` applies to none of the source's
            tensors.
        CheckpointExistsError: There is already a checkpoint at ``path``.
        CheckpointNotFoundError, DamagedError: The source cannot be read, or its metadata names other classes.
        SaveError, StoreError: Nothing was committed.

    Examples:
        >>> metadata = dcp.save(state, checkpoint_id="plain")  # without the plug-ins
        >>> imported = cnr.import_checkpoint("plain", "imported", quantization={"*users*": cnr.Asymmetric(bits=8)})
        >>> imported.kind
        'baseline'
        >>> cnr.load_table("imported", "model.users.weight").shape
        torch.Size([1000, 16])
    """
    _check_target(Store.open(path))
    writer = CNRStorageWriter(path, quantization=quantization, thread_count=thread_count)
    dcp_checkpoint = read_dcp_checkpoint(source)
    _check_quantized(dcp_checkpoint, SchemeRules.of(quantization if quantization is not None else NoQuantization()))
    planner = _ImportPlanner(dcp_checkpoint, progress)
    save(writer, [planner.whole_plan()], planner, dcp_checkpoint.paths)
    return read_checkpoint(path)


def _check_target(store: Store) -> None:
    """Refuse a directory in which a checkpoint would hide others, or be hidden."""
    if store.exists(METADATA_FILE):
        raise ConfigurationError(
            f"{store.url} already contains a checkpoint in DCP's own format, and a directory can contain only one "
            "checkpoint; pass another 'path'"
        )
    if contains_checkpoints(store):
        raise ConfigurationError(
            f"{store.url} is a root that contains checkpoints; pass a new directory in it, such as {store.url}/imported"
        )
    if store.at("..").exists(MANIFEST_FILE):
        raise ConfigurationError(
            f"{store.at('..').url} is a checkpoint, which cannot contain another one (got {store.url}); pass another "
            "'path'"
        )


def _check_quantized(dcp_checkpoint: DCPCheckpoint, rules: SchemeRules) -> None:
    """Refuse a ``quantization`` that applies to no tensor, for example because the tables have other names."""
    quantized_patterns = [pattern for pattern, scheme in rules.patterns if not isinstance(scheme, NoQuantization)]
    if not quantized_patterns and isinstance(rules.tables, NoQuantization):
        return
    dtypes_and_dims = {
        dcp_chunk.chunk.fqn: (dcp_chunk.chunk.dtype, len(dcp_chunk.size)) for dcp_chunk in dcp_checkpoint.chunks
    }
    for fqn, (dtype, num_dims) in dtypes_and_dims.items():
        if not isinstance(rules.rule_for(fqn, dtype, num_dims == 2 and is_table_name(fqn)), NoQuantization):
            return
    matrices = sorted(
        fqn for fqn, (dtype, num_dims) in dtypes_and_dims.items() if num_dims == 2 and dtype.is_floating_point
    )
    names = ", ".join(map(repr, matrices[:_NUM_NAMED])) or "none"
    more = f" and {len(matrices) - _NUM_NAMED} more" if len(matrices) > _NUM_NAMED else ""
    raise ConfigurationError(
        f"{dcp_checkpoint.store.url}: nothing would be quantized: no tensor is named "
        f"{' or '.join(quantized_patterns or TABLE_PATTERNS)}; pass patterns that match its tables; its "
        f"matrices are {names}{more}"
    )


class _ImportPlanner(DefaultSavePlanner):
    """Plans a save of all contents of a source, and reads them item by item."""

    def __init__(self, dcp_checkpoint: DCPCheckpoint, progress: Progress | None) -> None:
        super().__init__()
        self._stock = dcp_checkpoint
        self._chunks = {index_of(dcp_chunk.chunk): dcp_chunk for dcp_chunk in dcp_checkpoint.chunks}
        self._progress = progress
        self._num_bytes = sum(dcp_chunk.chunk.num_bytes for dcp_chunk in dcp_checkpoint.chunks)
        self._done_bytes = 0

    def whole_plan(self) -> SavePlan:
        """Return a plan of all items, in the source's order."""
        tensors = [chunk_item(dcp_chunk.chunk, dcp_chunk.size, WriteItemType.SHARD) for dcp_chunk in self._stock.chunks]
        return SavePlan([*object_items(self._stock.objects), *tensors])

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Read the data of an item."""
        if write_item.type is WriteItemType.BYTE_IO:
            return self._stock.read_object(write_item.index.fqn)
        dcp_chunk = self._chunks[write_item.index]
        values = self._stock.read(dcp_chunk)
        self._done_bytes += dcp_chunk.chunk.num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._num_bytes)
        return values

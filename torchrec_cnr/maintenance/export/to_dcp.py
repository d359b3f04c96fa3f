"""Exports to DCP's own format. DCP's storage writer writes the files, and asks for one item after the other.

Every batch of chunks is a plan, so that only one batch is in memory. For DCP, each plan is that of a rank: the tensors
are sharded by rows, and load into any sharding.
"""

import io
import os
from collections.abc import Sequence

from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from torchrec_cnr.errors import CNRError, StoreError
from torchrec_cnr.format.safe_pickle import serialized
from torchrec_cnr.maintenance.export.contents import Chunk, Contents
from torchrec_cnr.maintenance.export.destination import Written, new_directory
from torchrec_cnr.maintenance.single_process_save import chunk_item, index_of, object_items, save
from torchrec_cnr.storage.store import Store


def write_dcp(contents: Contents, out: str | os.PathLike[str]) -> Written:
    """Write a directory that ``dcp.load`` reads. ``.metadata``, which makes it a checkpoint, is written last."""
    planner = _ReadingPlanner(contents)
    with new_directory(out) as store:
        try:
            save(_writer(store), planner.plans(), planner, contents.paths)
        except CNRError:
            raise
        except (OSError, RuntimeError) as error:  # if the disk is full, torch.save raises a RuntimeError
            raise _failure(store, error) from error
        return store, tuple(store.names()), ()


def _failure(store: Store, error: OSError | RuntimeError) -> StoreError:
    failure = StoreError(f"cannot write {store.url}: {type(error).__name__}: {error}")
    failure.errno = getattr(error, "errno", None)
    return failure


def _writer(store: Store) -> FileSystemWriter:
    # With CUDA and copies ahead, the writer would ask for items in another order.
    if isinstance(store.fs, LocalFileSystem):
        return FileSystemWriter(store.path, per_thread_copy_ahead=0, overwrite=False)
    return FsspecWriter(store.url, per_thread_copy_ahead=0, overwrite=False, sync_files=False)


class _ReadingPlanner(DefaultSavePlanner):
    """Plans a save of all contents of a checkpoint, and reads them batch by batch."""

    def __init__(self, contents: Contents) -> None:
        super().__init__()
        self._contents = contents
        self._objects = contents.objects()
        self._batches = {index_of(chunk): batch for batch in contents.plan_batches(contents.tensors) for chunk in batch}
        self._read: dict[MetadataIndex, tuple[Chunk, Tensor]] = {}

    def plans(self) -> list[SavePlan]:
        """Return one plan for each batch. The first also has the objects."""
        batches: Sequence[tuple[Chunk, ...]] = list(dict.fromkeys(self._batches.values())) or [()]
        plans = [SavePlan([self._item(chunk) for chunk in batch]) for batch in batches]
        plans[0].items[:0] = object_items(self._objects)
        return plans

    def _item(self, chunk: Chunk) -> WriteItem:
        size = self._contents.tensors[chunk.fqn].box.sizes
        return chunk_item(chunk, size, WriteItemType.TENSOR if chunk.box.sizes == size else WriteItemType.SHARD)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return the data of an item. Read its batch, if the item is the first one of it."""
        if write_item.type is WriteItemType.BYTE_IO:
            fqn = write_item.index.fqn
            return serialized(self._objects.pop(fqn), f"object {fqn!r}")
        if write_item.index not in self._read:
            batch = self._batches[write_item.index]
            values = self._contents.read_batch(batch)
            self._read = {index_of(chunk): (chunk, tensor) for chunk, tensor in zip(batch, values, strict=True)}
        chunk, tensor = self._read.pop(write_item.index)
        self._contents.count(chunk)
        return tensor

"""Exports: a checkpoint, with all that it stands on, as plain full-precision files that load without this package.

The lineage is folded as any load folds it, a batch of rows at a time, and each format's module writes what comes.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.human_text import bytes_text, count_text
from torchrec_cnr.lineage.checkpoint import existing, read_lineage
from torchrec_cnr.maintenance.export.contents import Contents
from torchrec_cnr.maintenance.export.destination import Written
from torchrec_cnr.maintenance.export.to_dcp import write_dcp
from torchrec_cnr.maintenance.export.to_safetensors import write_safetensors
from torchrec_cnr.maintenance.export.to_torch import write_torch
from torchrec_cnr.progress import Progress
from torchrec_cnr.storage.pack_writer import check_thread_count
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store

Format = Literal["dcp", "safetensors", "torch"]

_FORMATS: Mapping[str, Callable[[Contents, str | os.PathLike[str]], Written]] = {
    "dcp": write_dcp,
    "safetensors": write_safetensors,
    "torch": write_torch,
}


@dataclass(frozen=True)
class Export:
    """What an export wrote.

    Attributes:
        files: Full paths or URLs, in order of names.
        num_bytes: Of the values of all tensors.
        left_out: FQNs that the format cannot hold, sorted: with ``safetensors``, objects that are no JSON.
    """

    files: tuple[str, ...]
    num_bytes: int
    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        left_out = f", {len(self.left_out):,} left out" if self.left_out else ""
        return f"Export({count_text(len(self.files), 'file')}, {bytes_text(self.num_bytes)}{left_out})"


def export(
    path: str | os.PathLike[str] | Store | None,
    out: str | os.PathLike[str],
    *,
    to: Format,
    row_log: RowLog | None = None,
    thread_count: int = 2,
    progress: Progress | None = None,
) -> Export:
    """Write a checkpoint as plain files, which hold what a load of it gives, quantized tables as floats.

    ======================  ===========================================================================================
    ``to``                  is written
    ======================  ===========================================================================================
    ``"dcp"``               DCP's own format: a directory for the stock ``dcp.load``, under any sharding
    ``"safetensors"``       a directory with ``model.safetensors``, or above 4 GiB with several files and
                            ``model.safetensors.index.json``; tensors are named by their FQNs. Objects that JSON can
                            hold are in ``objects.json``, tuples as lists
    ``"torch"``             one file, which ``torch.load(out, weights_only=True)`` reads as the nested state dict
    ======================  ===========================================================================================

    Values are read 64 MiB at a time (a row that is larger at once), so that some 300 MiB of memory are enough for
    tables of any size. Row-wise optimizer state has the size that ``load_table`` gives it. If an export fails, nothing
    is left of it; if it is killed, what is left does not load.

    Args:
        path: The checkpoint, a path or fsspec URL; usually ``latest(root)``.
        out: Where to, a path or fsspec URL: a directory that is empty or not there, or for ``"torch"`` a file that is
            not there.
        to: The format.
        row_log: The log that rows of deltas went to, if they did: ``KafkaRows``.
        thread_count: Requests in flight at once. Each takes up to 16 MiB of memory.
        progress: Called now and then with the bytes of tensors that were written, and that there are.

    Raises:
        ConfigurationError: An argument cannot work, or something is at ``out`` already.
        CheckpointNotFoundError, DamagedError, VersionError: The checkpoint cannot be read.
        StoreError: A file system refused.
    """
    check_thread_count(thread_count)
    if to not in _FORMATS:
        raise ConfigurationError(f"'to' must be one of {', '.join(map(repr, _FORMATS))} (got {to!r})")
    contents = Contents(read_lineage(Store.open(existing(path), row_log=row_log)), thread_count, progress)
    store, names, left_out = _FORMATS[to](contents, out)
    return Export(tuple(store.at(name).url for name in names), contents.num_bytes, left_out)

"""``export``: writes a checkpoint as plain full-precision files that load without this package.

The checkpoint chain is merged like in a load, a batch of rows at a time. The module of each format writes the batches.
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
    """The result of an export.

    Attributes:
        files: The full paths or URLs of the files, sorted by name.
        num_bytes: The bytes of the values of all tensors.
        left_out: The FQNs that the format cannot represent, sorted: with ``safetensors``, objects that are not JSON.

    Examples:
        >>> exported = cnr.export("run/step-2", "exported", to="safetensors")
        >>> len(exported.files), exported.num_bytes, exported.left_out
        (2, 64000, ())
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
    """Write a checkpoint as plain files with the values that a load would return. Quantized tables become floats.

    - ``to="dcp"`` writes DCP's own format: a directory for plain ``dcp.load``, under any sharding.
    - ``to="safetensors"`` writes a directory with ``model.safetensors``, or above 4 GiB with several files and
      ``model.safetensors.index.json``. Tensors are named by their FQNs. Objects that JSON can represent are in
      ``objects.json``, with tuples as lists.
    - ``to="torch"`` writes one file, which ``torch.load(out, weights_only=True)`` reads as the nested state dict.

    Values are read 64 MiB at a time, or a whole row if that is larger. So about 300 MiB of memory are enough for tables
    of any size. Row-wise optimizer state has the size that ``load_table`` returns. If an export fails, its files are
    removed. If it is killed, the remaining files do not load.

    Args:
        path: The checkpoint, as a path or fsspec URL; usually ``latest(root)``.
        out: The path or fsspec URL to write: an empty or new directory, or a new file for ``"torch"``.
        to: The format.
        row_log: The Kafka topic that contains the rows of deltas, if they are not in files (``KafkaRows``).
        thread_count: Number of requests in flight at the same time. Each takes up to 16 MiB of memory.
        progress: Called with the number of bytes of tensors that were written, and the total.

    Raises:
        ConfigurationError: An argument is wrong, or ``out`` already exists.
        CheckpointNotFoundError, DamagedError, VersionError: The checkpoint cannot be read.
        StoreError: A file system failed.

    Examples:
        >>> exported = cnr.export("run/step-2", "model.pt", to="torch")
        >>> torch.load("model.pt", weights_only=True)["model"]["users.weight"].shape
        torch.Size([1000, 16])
    """
    check_thread_count(thread_count)
    if to not in _FORMATS:
        raise ConfigurationError(f"'to' must be one of {', '.join(map(repr, _FORMATS))} (got {to!r})")
    contents = Contents(read_lineage(Store.open(existing(path), row_log=row_log)), thread_count, progress)
    store, names, left_out = _FORMATS[to](contents, out)
    return Export(tuple(store.at(name).url for name in names), contents.num_bytes, left_out)

"""Reads one table, or a range of its rows, from a checkpoint, without DCP, a process group or a model."""

import difflib
import os

import torch
from torch import Tensor

from torchrec_cnr.errors import ConfigurationError, LoadError, StateMismatchError
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import DTYPES, Manifest, TensorEntry
from torchrec_cnr.lineage.checkpoint import Lineage, existing, read_lineage
from torchrec_cnr.reading.fold import fold
from torchrec_cnr.reading.plan import plan_fold
from torchrec_cnr.reading.regions import LineageTensor
from torchrec_cnr.sharding import wait_for_devices
from torchrec_cnr.storage.leases import leased
from torchrec_cnr.storage.pack_writer import check_thread_count
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking.tracked_tables import forget_overwritten

_NUM_SIMILAR = 5


def load_table(
    path: str | os.PathLike[str] | None,
    fqn: str,
    *,
    rows: range | slice | None = None,
    out: Tensor | None = None,
    row_log: RowLog | None = None,
    thread_count: int = 2,
) -> Tensor:
    """Read one tensor of a checkpoint, merged from its whole checkpoint chain. Only the necessary bytes are read.

    Row-wise optimizer state of a column-sharded table has the same size as in a state dict: one value per row and
    column shard.

    Args:
        path: Path or fsspec URL of the checkpoint; usually ``latest(root)``.
        fqn: Name of the tensor in the checkpoint: a table or any other tensor.
        rows: Range of indices of the first dimension, without steps; None for all.
        out: Tensor to read into, of the size and dtype of the result, on any device; None for a new one.
        row_log: The Kafka topic (``KafkaRows``) that rows of deltas were sent to, if any.
        thread_count: Number of requests in flight at the same time. Each takes up to 16 MiB of memory.

    Returns:
        A tensor [num_rows, ...] of the saved dtype: ``out``, or a new tensor on the CPU.

    Raises:
        StateMismatchError: The checkpoint has no tensor of this name, or ``out`` has another size or dtype.
        ConfigurationError: An argument is invalid.
        CheckpointNotFoundError, DamagedError, VersionError, StoreError: The checkpoint cannot be read.
        LoadError: The tensor does not fit into memory.

    Examples:
        >>> table = cnr.load_table("run/step-2", "model.users.weight")
        >>> table.shape, table.dtype
        (torch.Size([1000, 16]), torch.float32)
        >>> cnr.load_table("run/step-2", "model.users.weight", rows=range(10, 20)).shape
        torch.Size([10, 16])
    """
    check_thread_count(thread_count)
    store = Store.open(existing(path), row_log=row_log)
    with leased(store, "load"):
        lineage = read_lineage(store)
        entry = _entry(lineage, fqn)
        box = _wanted_box(fqn, entry, rows)
        target = _target(out, fqn, box, DTYPES[entry.dtype])
        forget_overwritten([target])
        regions = LineageTensor(lineage, fqn).regions(box, target)
        wait_for_devices([target])  # other streams may still use the target, and must see the result
        fold(plan_fold(lineage, regions), regions, thread_count, checks_headers=False)
        wait_for_devices([target])
    return target if out is None else out


def _entry(lineage: Lineage, fqn: str) -> TensorEntry:
    manifest, url = lineage.newest.manifest, lineage.newest.store.url
    if fqn in manifest.objects:
        raise StateMismatchError(f"{fqn!r} in {url} is not a tensor; load it with dcp.load")
    if fqn not in manifest.tensors:
        similar = ", ".join(map(repr, _similar(fqn, manifest))) or "none"
        raise StateMismatchError(f"unknown tensor {fqn!r} in {url}; similar names: {similar}")
    return manifest.tensors[fqn]


def _similar(fqn: str, manifest: Manifest) -> list[str]:
    """Return names that contain this one, as a table's FQN contains its name, and names with a similar spelling."""
    names = sorted(manifest.tensors)
    holding = [name for name in names if fqn and fqn in name]
    spelled = difflib.get_close_matches(fqn, names, _NUM_SIMILAR)
    return list(dict.fromkeys([*holding, *spelled]))[:_NUM_SIMILAR]


def _wanted_box(fqn: str, entry: TensorEntry, rows: range | slice | None) -> Box:
    tensor_box = Box.whole(entry.size)
    if rows is None:
        return tensor_box
    if getattr(rows, "step", 0) not in (None, 1):
        raise ConfigurationError(f"'rows' must be a range or slice with step 1, or None (got {rows!r})")
    if not entry.size:
        raise ConfigurationError(f"'rows' must be None for {fqn!r}, which has no dimensions (got {rows!r})")
    num_rows = entry.size[0]
    start, stop, _ = rows.indices(num_rows) if isinstance(rows, slice) else (rows.start, rows.stop, 1)
    stop = max(start, stop)
    if start < 0 or stop > num_rows:
        raise ConfigurationError(f"'rows' must be within the {num_rows} rows of {fqn!r} (got {rows!r})")
    return Box((start, *tensor_box.offsets[1:]), (stop - start, *tensor_box.sizes[1:]))


def _target(out: Tensor | None, fqn: str, box: Box, dtype: torch.dtype) -> Tensor:
    if out is None:
        try:
            return torch.empty(box.sizes, dtype=dtype, device="cpu")
        except RuntimeError as error:
            raise LoadError(
                f"{fqn!r}: a tensor of shape {list(box.sizes)} and {dtype} does not fit into memory; load a range of "
                "its rows"
            ) from error
    if tuple(out.shape) != box.sizes or out.dtype is not dtype:
        raise StateMismatchError(
            f"'out' must have shape {list(box.sizes)} and {dtype} to hold {fqn!r} "
            f"(got {list(out.shape)} and {out.dtype})"
        )
    return out.detach()

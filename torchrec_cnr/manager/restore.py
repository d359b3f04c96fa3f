"""Restoring: the newest checkpoint that can be read, on all ranks the same one."""

import logging
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from torchrec_cnr.errors import CheckpointNotFoundError, CNRError, DamagedError
from torchrec_cnr.lineage.latest import newest_first
from torchrec_cnr.loading.fitting import LoadReport
from torchrec_cnr.loading.planner import CNRLoadPlanner
from torchrec_cnr.loading.reader import CNRStorageReader
from torchrec_cnr.progress import Progress
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.tracking.tracked_tables import TrackedRows

logger = logging.getLogger(__name__)


def shared(value: Any, group: dist.ProcessGroup | None) -> Any:
    """What rank 0 of a group has, on all its ranks; an error of ours is raised on all of them."""
    values = [value]
    if group is not None:
        dist.broadcast_object_list(values, src=dist.get_global_rank(group, 0), group=group)
    if isinstance(values[0], CNRError):
        raise values[0]
    return values[0]


def restore_newest(
    root: str | os.PathLike[str],
    state: dict[str, Any],
    tracker: TrackedRows | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    thread_count: int = 2,
    row_log: RowLog | None = None,
    progress: Progress | None = None,
) -> tuple[str, LoadReport] | None:
    """Load the newest checkpoint under a root whose bytes are what was committed.

    A checkpoint that is damaged is passed over with a warning, and the one before is tried.

    Args:
        root: A directory of checkpoints, path or fsspec URL.
        state: As for ``dcp.load``.
        tracker: The next save continues the lineage.
        group: The ranks that load together; by default all of the default group, if there is one.
        thread_count: Requests in flight at once.
        row_log: The log that rows of deltas went to, if they did: ``KafkaRows``.
        progress: Told how many of how many bytes of rows this rank has read.

    Returns:
        Path of what was loaded, and the report; None where there is no checkpoint.

    Raises:
        DamagedError: There are checkpoints, but none can be read.
        VersionError: The newest was written by a newer version.
        StoreError: The root cannot be listed.
        CheckpointException: A load failed for another reason, such as a state that does not fit.
    """
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    passed_over = []
    for path in _candidates(root, group, row_log):
        planner = CNRLoadPlanner(tracker)
        reader = CNRStorageReader(path, thread_count=thread_count, row_log=row_log, progress=progress)
        try:
            load(state, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
        except CheckpointException as error:
            failures = [failure for failure, _ in error.failures.values()]
            if not all(isinstance(failure, DamagedError | CheckpointNotFoundError) for failure in failures):
                raise
            logger.warning("cannot restore from %s, the one before is tried: %s", path, failures[0])
            passed_over.append(f"{path}: {failures[0]}")
        else:
            return path, planner.report
    if passed_over:
        raise DamagedError(f"{root}: no checkpoint can be restored: " + "; ".join(passed_over))
    return None


def _candidates(root: str | os.PathLike[str], group: dist.ProcessGroup | None, row_log: RowLog | None) -> Iterator[str]:
    """Paths of checkpoints, newest first: rank 0's view of them, on all ranks."""
    found = newest_first(root, row_log)
    is_first = group is None or dist.get_rank(group) == 0
    while (path := shared(_next_path(found) if is_first else None, group)) is not None:
        yield path


def _next_path(found: Iterator[Any]) -> str | CNRError | None:
    try:
        return next((checkpoint.store.url for checkpoint in found), None)
    except CNRError as error:
        return error

"""Restores: load the newest readable checkpoint, or a chosen one. All ranks load the same checkpoint."""

import logging
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer, SparseAdam

from torchrec_cnr.arguments import check_count, check_type
from torchrec_cnr.errors import (
    CheckpointNotFoundError,
    CNRError,
    ConfigurationError,
    DamagedError,
    FencedError,
    StoreError,
)
from torchrec_cnr.lineage.abandoned import mark_of
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_checkpoint
from torchrec_cnr.lineage.latest import newest_first, refuse_file
from torchrec_cnr.loading.load_report import LoadReport
from torchrec_cnr.loading.planner import CNRLoadPlanner
from torchrec_cnr.loading.reader import CNRStorageReader
from torchrec_cnr.progress import Progress
from torchrec_cnr.storage.fences import claim
from torchrec_cnr.storage.local_copies import LocalCopies
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking.tracked_tables import TrackedRows

logger = logging.getLogger(__name__)

NAME = re.compile(r"step-(\d{1,18})(?:-\d{1,9})?")
MAX_STEP = 10**18 - 1  # a directory name has at most 18 digits
_NUM_NAMED = 10  # steps that a message lists


def shared(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Return the value of the group's rank 0 on all its ranks. If the value is a ``CNRError``, raise it on all."""
    values = [value]
    if group is not None:
        dist.broadcast_object_list(values, src=dist.get_global_rank(group, 0), group=group)
    try:
        if isinstance(values[0], CNRError):
            raise values[0]
        return values[0]
    finally:
        del value, values  # else an error would be in a reference cycle with its own traceback


def restore_newest(
    root: str | os.PathLike[str],
    state: dict[str, Any],
    tracker: TrackedRows | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    thread_count: int = 2,
    local: str | os.PathLike[str] | LocalCopies | None = None,
    row_log: RowLog | None = None,
    progress: Progress | None = None,
    chosen: str | None = None,
) -> tuple[str, LoadReport] | None:
    """Load the newest checkpoint under a root that is not corrupt; log a warning for each one that is skipped.

    Args:
        root: A directory that contains checkpoints, as a path or fsspec URL.
        state: The state as for ``dcp.load``. An optimizer that has made no step, such as a new Adam, gets its state.
        tracker: A tracker, so that the next save can be a delta that is based on the loaded checkpoint.
        group: The ranks that load together. By default, all ranks of the default process group, if there is one.
        thread_count: Number of read requests in flight at the same time.
        local: Local copies of data files, as for ``CNRStorageReader``.
        row_log: The Kafka topic of the rows of deltas, if they are not in files (``KafkaRows``).
        progress: Called with the number of bytes of rows that this rank has read, and the total.
        chosen: The path or URL of a checkpoint to load instead.

    Returns:
        The path of the loaded checkpoint and the report of the load; None if there is no checkpoint.

    Raises:
        DamagedError: There are checkpoints, but none can be read.
        VersionError: A newer version of this library wrote the newest checkpoint.
        ConfigurationError, StoreError: The root is a file, or cannot be listed.
        CheckpointException: A load failed for another reason, such as a ``StateMismatchError`` in ``failures``.
        Exception: ``load_state_dict`` of a value raised it. The next save is then a baseline.

    Examples:
        >>> path, report = cnr.restore_newest("run", state, tracker) or ("nothing to restore", None)
        >>> path
        '/.../run/step-2'
    """
    group, passed_over = dist.group.WORLD if group is None and dist.is_initialized() else group, list[str]()
    for path in _candidates(root, group, row_log) if chosen is None else [chosen]:
        create_optimizer_state(state, Store.open(path, row_log=row_log))
        planner = CNRLoadPlanner(tracker)
        reader = CNRStorageReader(path, thread_count=thread_count, local=local, row_log=row_log, progress=progress)
        try:
            load(state, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
            return path, planner.report
        except CheckpointException as error:
            reader.reset()  # else its lease would remain on ranks that had no error of their own
            if chosen or (failure := _corruption(error)) is None:
                raise
            logger.warning("cannot restore from %s, trying the previous checkpoint: %s", path, failure)
            passed_over.append(f"{path}: {failure}")
        except BaseException:  # from a Stateful, whose load_state_dict DCP calls after the planner has finished
            if tracker is not None:
                tracker.forget()
            raise
    _check_none(root, passed_over)
    return None


def _check_none(root: str | os.PathLike[str], passed_over: Sequence[str]) -> None:
    """Raise an error if there are checkpoints that could not be restored."""
    if passed_over:
        raise DamagedError(f"{root}: no checkpoint can be restored: " + "; ".join(passed_over))


def _corruption(error: CheckpointException) -> BaseException | None:
    """Return the error of a load that failed because a checkpoint is corrupt or missing; otherwise None."""
    failures = [failure for failure, _ in error.failures.values()]
    is_corrupt = all(isinstance(failure, DamagedError | CheckpointNotFoundError) for failure in failures)
    return failures[0] if is_corrupt else None


def create_optimizer_state(state: Mapping[str, Any], checkpoint: Store) -> None:
    """Create the state of optimizers that have made no step, if a checkpoint has such state.

    Optimizers such as Adam create their state in their first step, but DCP loads into tensors that exist. This makes a
    step with zero gradients and a learning rate of zero, as DCP's ``get_optimizer_state_dict`` does. The load then
    overwrites the state.

    Args:
        state: The state as for ``dcp.load``.
        checkpoint: The directory of the checkpoint.
    """
    new_optimizers = {
        key: value for key, value in state.items() if isinstance(value, Optimizer) and not any(value.state.values())
    }
    if not new_optimizers:
        return
    fqns: list[str] | None = None
    try:
        manifest = read_checkpoint(checkpoint).manifest
        fqns = [*manifest.tensors, *manifest.objects]
    except StoreError as error:  # without its state, this rank alone would load none, and no error would say so
        logger.info("%s: cannot be read yet; creating the state of new optimizers: %s", checkpoint.url, error)
    except CNRError:  # the load raises it on all ranks
        return
    for key, optimizer in new_optimizers.items():
        if fqns is None or any(fqn.startswith(f"{key}.state.") for fqn in fqns):
            try:
                _step_without_effect(optimizer)
            except (TypeError, RuntimeError) as error:  # such as LBFGS, which needs a closure
                logger.info("cannot create the state of %r, which the load needs: %s", key, error)


def _step_without_effect(optimizer: Optimizer) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    grads, rates = [parameter.grad for parameter in parameters], [group.get("lr") for group in optimizer.param_groups]
    try:
        for parameter in (parameter for parameter in parameters if parameter.requires_grad):
            parameter.grad = _zero_grad(parameter, isinstance(optimizer, SparseAdam))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        type(optimizer).step(optimizer)  # not the method that a learning rate scheduler has put into the optimizer
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate


def _zero_grad(parameter: Tensor, is_sparse: bool) -> Tensor:
    if not is_sparse:
        return torch.zeros_like(parameter)
    numbers = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    values = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    # Not check_invariants=False, of which PyTorch 2.11 warns.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        return torch.sparse_coo_tensor(numbers, values, parameter.shape)


def check_state(state: object, step: object = 0) -> None:
    """Check what a caller passes as the state of a save or a restore, and as the step of a save.

    Raises:
        ConfigurationError: The state is neither a mapping nor a function, or the step is no step.
    """
    check_count("step", step, 0, MAX_STEP)
    if isinstance(state, torch.nn.Module) or not (isinstance(state, Mapping) or callable(state)):
        raise ConfigurationError(
            f"'state' must be a mapping, or a function that returns one (got {type(state).__name__}); pass the live "
            "state dict, for example {'model': model.state_dict()}"
        )


def check_choice(step: object, path: object) -> None:
    """Check how a caller names the checkpoint to restore.

    Raises:
        ConfigurationError: ``step`` is not a step, or ``path`` names a checkpoint, too.
    """
    if step is not None:
        check_count("step", step, 0, MAX_STEP)
        if path is not None:
            raise ConfigurationError("'step' and 'path' both name a checkpoint; pass only one of them")


def target_of(state: Any) -> dict[str, Any]:
    """Return the dict that a restore loads into: the state, or what the function returns.

    Raises:
        ConfigurationError: It is not a dict.
    """
    target = state() if callable(state) else state
    check_type("state", target, dict, "a dict to load into")
    assert isinstance(target, dict)
    return target


def _candidates(root: str | os.PathLike[str], group: dist.ProcessGroup | None, row_log: RowLog | None) -> Iterator[str]:
    """Yield the paths of checkpoints, newest first. Rank 0 lists them for all ranks."""
    checkpoints = newest_first(root, row_log)
    is_first = group is None or dist.get_rank(group) == 0
    while (path := shared(_next_path(checkpoints) if is_first else None, group)) is not None:
        yield path


def _next_path(checkpoints: Iterator[Any]) -> str | CNRError | None:
    try:
        return next((checkpoint.store.url for checkpoint in checkpoints), None)
    except CNRError as error:
        return error


def step_of(path: str) -> int:
    """Return the step after which a manager took a checkpoint, from its name.

    Raises:
        ConfigurationError: The name is not one that a manager gives.
    """
    match = NAME.fullmatch(posixpath.basename(path))
    if match is None:
        raise ConfigurationError(f"{path} is not a checkpoint of a manager; their names are 'step-<n>'")
    return int(match[1])


def path_of_step(root: Store, step: int) -> str | CNRError:
    """Return the path of the checkpoint that was taken after a step, or an error to raise on all ranks.

    If there are several, it is the newest one that is not abandoned, or the newest if all are.
    """
    try:
        checkpoints = [checkpoint for checkpoint in newest_first(root, with_abandoned=True) if _is_of(checkpoint, step)]
        names = root.names()
    except CNRError as error:
        return error
    if not checkpoints:
        steps = sorted({int(name[1]) for name in map(NAME.fullmatch, names) if name is not None})
        steps_text = ", ".join(map(str, steps[-_NUM_NAMED:])) or "none"
        return CheckpointNotFoundError(
            f"{root.url}: no checkpoint of step {step} can be read; steps there: {steps_text}"
        )
    return next((item for item in checkpoints if mark_of(item) not in names), checkpoints[0]).store.url


def _is_of(checkpoint: Checkpoint, step: int) -> bool:
    name = NAME.fullmatch(posixpath.basename(checkpoint.store.path))
    return name is not None and int(name[1]) == step


def claimed(root: str) -> CNRError | None:
    """Claim a root, so that other jobs cannot save to it. Return the error for all ranks if another job did."""
    store = Store.open(root)
    try:
        refuse_file(store)
        claim(store)
    except (ConfigurationError, FencedError) as error:
        return error
    except StoreError as error:
        logger.warning("cannot claim the root: this job cannot save there, and another job still may: %s", error)
    return None

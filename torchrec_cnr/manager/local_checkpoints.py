"""Local checkpoints: frequent ones on a disk of the host, between the durable ones of a run.

Both tiers are ordinary roots, each with its own manager and tracker, and each loads without the other. Local
checkpoints may be restored only if no other process has continued the run since. A process that continues a run creates
a fence in its durable root. So a file beside the local checkpoints names the owner of the fence under which they were
written. They count only while that fence is the highest.
"""

import json
import logging
import os
import posixpath
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_cnr.arguments import check_callable, check_count, check_secs
from torchrec_cnr.errors import CNRError, ConfigurationError, DamagedError, FencedError, StoreError
from torchrec_cnr.lineage.latest import newest_first, refuse_file
from torchrec_cnr.loading.load_report import LoadReport
from torchrec_cnr.maintenance.pruning.retention import Keep, check_keep
from torchrec_cnr.manager.background import Background
from torchrec_cnr.manager.continuation import Continuation
from torchrec_cnr.manager.ranks import RunRanks
from torchrec_cnr.manager.restore import NAME, claimed
from torchrec_cnr.policies import Compacted
from torchrec_cnr.progress import Saved
from torchrec_cnr.quantization import Quantization
from torchrec_cnr.storage import fences
from torchrec_cnr.storage.row_log import root_id
from torchrec_cnr.storage.store import Store
from torchrec_cnr.storage.urls import checked_url, protocol_of
from torchrec_cnr.tracking.tracked_tables import TrackedRows

logger = logging.getLogger(__name__)

_MAX_RATIO = 2.0  # a local disk is fast to read, and compactions then copy few rows
_MAX_RECORD_BYTES = 1 << 16
_MAX_STEPS = 1000  # from one failed attempt to begin to the next
_OLD_SECS = 3600.0  # after which a temporary file belongs to no running process


@dataclass(frozen=True)
class LocalCheckpoints:
    """Frequent checkpoints on a disk of the host, which survive a crash of the job but not the loss of the host.

    Pass it to ``CheckpointManager``, whose own arguments are those of the durable checkpoints. Each tier has a baseline
    and deltas of its own: a delta of the durable root has all rows that were modified since the durable checkpoint
    before. A restore takes the newest checkpoint of either tier. A local checkpoint that cannot be written is logged,
    and training and durable checkpoints go on.

    Attributes:
        path: A directory that all ranks see, such as ``/local/nvme/run`` or ``/dev/shm/run`` of the only host of a job,
            or a fast file system that several hosts share. The checkpoints are in a folder of it, one for each run.
        every_steps: Save at every multiple of this number of steps.
        every_secs: Save this many seconds after the last local checkpoint. With neither, every step is saved.
        quantization: How rows are stored. By default, exactly, so that training continues bit for bit.
        keep: Which local checkpoints are kept.
        on_saved: Called on every rank with each committed local checkpoint. The manager's own is not.

    Raises:
        ConfigurationError: An attribute is invalid; the manager raises it, too, if ranks do not share the directory.

    Examples:
        >>> local = cnr.LocalCheckpoints("/dev/shm/run", every_secs=1)
        >>> manager = cnr.CheckpointManager("run", tracker, every_secs=1800, local_checkpoints=local)
        >>> manager.close()
    """

    path: str | os.PathLike[str]
    every_steps: int | None = None
    every_secs: float | None = None
    quantization: Quantization | Mapping[str, Quantization] | None = None
    keep: Keep = field(default_factory=lambda: Keep(last=2))
    on_saved: Callable[[Saved], None] | None = None

    def __post_init__(self) -> None:
        name = checked_url(self.path)
        if protocol_of(name) not in ("", "file"):
            raise ConfigurationError(f"'path' must be a directory of a local file system (got {name!r})")
        if self.every_steps is not None:
            check_count("every_steps", self.every_steps, least=1)
        if self.every_secs is not None:
            check_secs("every_secs", self.every_secs)
        check_keep(self.keep)
        check_callable("on_saved", self.on_saved)

    def root_of(self, durable_root: str | os.PathLike[str]) -> Path:
        """Return the root of the local checkpoints of a run that has its durable ones under ``durable_root``."""
        folder = Path(LocalFileSystem._strip_protocol(checked_url(self.path)))
        return folder / f"cnr-local-{root_id(Store.open(durable_root).url)}"


def check_local_checkpoints(value: object) -> None:
    """Raise an error if the argument is neither None nor ``LocalCheckpoints``.

    Raises:
        ConfigurationError: It is something else.
    """
    if value is not None and not isinstance(value, LocalCheckpoints):
        raise ConfigurationError(
            f"'local_checkpoints' must be LocalCheckpoints(path, ...) or None (got {type(value).__name__})"
        )


class Manager(Protocol):
    """The part of a ``CheckpointManager`` of local checkpoints that a run uses."""

    report: LoadReport | None

    def save(self, step: int, state: Any) -> Saved | None:
        """Save a checkpoint if one is due."""
        ...

    def async_save(self, step: int, state: Any) -> Future[Any] | None:
        """Begin to save a checkpoint if one is due."""
        ...

    def wait(self) -> Saved | None:
        """Wait for the save that was begun."""
        ...

    def restore(self, state: Any) -> int | None:
        """Load the newest checkpoint."""
        ...

    def abandon_all(self) -> None:
        """Abandon all checkpoints of the root."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class NoLocalRun:
    """A run without local checkpoints.

    Args:
        root: The URL of the durable root.
        ranks: The ranks of the run.
    """

    def __init__(self, root: str, ranks: RunRanks) -> None:
        self._root = root
        self._ranks = ranks

    def save(self, step: int, state: Any) -> None:
        """Save nothing."""

    async_save = save

    def wait(self) -> None:
        """Wait for nothing."""

    raise_failure = close = wait

    def restored(self, state: dict[str, Any], is_newest: bool) -> tuple[None, None]:
        """Claim the durable root.

        Raises:
            ConfigurationError, FencedError: See ``claimed``.
        """
        self._ranks.decide(claimed(self._root) if self._ranks.rank == 0 else None)
        return None, None


class LocalRun:
    """The local checkpoints of a run. All methods are collective.

    Args:
        root: The root of the local checkpoints.
        continuation: The durable checkpoint from which the run continues.
        tracker: The tracker of the local checkpoints, which is closed with them.
        ranks: The ranks of the run; rank 0 does all I/O besides saves and loads.
        make: Makes the manager of the local checkpoints.

    Attributes:
        manager: The manager of the local checkpoints.
        failure: Why the last restore skipped all local checkpoints, if they cannot be read.

    Raises:
        ConfigurationError: Not all ranks see the directory.
    """

    def __init__(
        self,
        root: Path,
        continuation: Continuation,
        tracker: TrackedRows,
        ranks: RunRanks,
        make: Callable[..., Manager],
    ) -> None:
        self.root = root
        self.failure: DamagedError | None = None
        self._continuation = continuation
        self._durable_root = continuation.root
        self._tracker = tracker
        self._ranks = ranks
        self._record = _Record(root.with_name(f"{root.name}.json"))
        self._is_current = False  # whether what is in the root belongs to this process's run
        self._try_at, self._num_steps = 0, 1  # the next step to try to begin at, and how many to wait after a failure
        self._refuse_separate()
        self.manager = make(root, tracker)

    @classmethod
    def of(
        cls,
        given: LocalCheckpoints,
        continuation: Continuation,
        tracker: TrackedRows,
        ranks: RunRanks,
        background: Background,
        make: Callable[..., Manager],
    ) -> "LocalRun":
        """Return the local checkpoints that a user has asked for, with a fork of the tracker."""
        make_here = partial(
            make,
            policy=Compacted(max_ratio=_MAX_RATIO),
            quantization=given.quantization,
            every_steps=given.every_steps,
            every_secs=given.every_secs,
            keep=given.keep,
            background=replace(background, when_busy="skip", max_bytes_per_sec=None),
            on_saved=given.on_saved,
        )
        fork = tracker.fork()
        try:
            return cls(given.root_of(continuation.root.url), continuation, fork, ranks, make_here)
        except BaseException:
            fork.close()
            raise

    def _refuse_separate(self) -> None:
        """Raise an error if the ranks do not share the directory: each host would have a part of each checkpoint."""
        marker: str = self._ranks.decide(_marker(self.root) if self._ranks.rank == 0 else None)
        is_missing = self._ranks.any(not (self.root.parent / marker).exists())
        if self._ranks.rank == 0:
            (self.root.parent / marker).unlink(missing_ok=True)
        if is_missing:
            raise ConfigurationError(
                f"{self.root.parent}: not all ranks see this directory of rank 0; local checkpoints need one that all "
                "ranks share; copies of data files (local=...) may be in a directory of each host"
            )

    def save(self, step: int, state: Any) -> None:
        """Save a local checkpoint if one is due. A failure is logged."""
        if self._has_begun(step):
            self._trying(lambda: self.manager.save(step, state))

    def async_save(self, step: int, state: Any) -> None:
        """Begin to save a local checkpoint if one is due. A failure is logged."""
        if self._has_begun(step):
            self._trying(lambda: self.manager.async_save(step, state))

    def wait(self) -> None:
        """Wait for the local checkpoint that was begun, if there is one. A failure is logged."""
        self._trying(self.manager.wait)

    def _has_begun(self, step: int) -> bool:
        """Begin the local checkpoints of this run, if they have not begun. Return whether they have."""
        if not self._is_current and step >= self._try_at:
            self._trying(self._begin)
            self._try_at, self._num_steps = step + self._num_steps, min(2 * self._num_steps, _MAX_STEPS)
        return self._is_current

    def _trying(self, action: Callable[[], object]) -> None:
        """Do something that may fail on all ranks, without effect on training and on durable checkpoints."""
        try:
            action()
        except (CheckpointException, CNRError) as error:
            logger.warning("a local checkpoint was not saved, later ones have its rows: %s", error)

    def _begin(self) -> None:
        """Abandon what is in the root, since the run does not continue from it. The next checkpoint is a baseline."""
        self._continuation.abandon_newer()  # a local checkpoint may be older than those, and would not be restored
        own: str = self._ranks.decide(self._owned() if self._ranks.rank == 0 else None)
        self.manager.abandon_all()
        self._ranks.decide(self._recorded([own]) if self._ranks.rank == 0 else None)
        self._is_current, self._num_steps = True, 1

    def _owned(self) -> str | CNRError:
        """Claim the local root, if the durable one is that of this job. Return the entry of its fence."""
        try:
            self._durable_root.make()
            fence = fences.current(self._durable_root)
            fence.claim()
            fences.claim(Store.open(self.root))  # so that the saves of a job that was replaced fail, here too
            return _entry(fence.number, fences.own_owner())
        except CNRError as error:
            return error

    def _recorded(self, entries: list[str]) -> CNRError | None:
        try:
            self._record.write(entries)
        except OSError as error:
            return StoreError(f"{self.root}: cannot write beside it: {error}")
        return None

    def restored(self, state: dict[str, Any], is_newest: bool) -> tuple[int | None, LoadReport | None]:
        """Claim the durable root, and load the newest local checkpoint, unless a durable one is newer.

        Args:
            state: The state as for ``dcp.load``.
            is_newest: Whether the caller wants the newest checkpoint, not one that it has named.

        Returns:
            The step of the checkpoint that was loaded, and the report of the load; None if a durable one must be.

        Raises:
            ConfigurationError, FencedError: As for a claim without local checkpoints.
            CheckpointException: The load failed, but not because a checkpoint is corrupt.
        """
        self._is_current, self.failure, self._try_at, self._num_steps = False, None, 0, 1
        if not self._ranks.decide(self._claimed(is_newest) if self._ranks.rank == 0 else None):
            return None, None
        roots = (Store.open(self.root), self._durable_root)
        local_step, durable_step = self._ranks.decide([*map(_newest_step, roots)] if self._ranks.rank == 0 else None)
        step = None
        if local_step >= max(0, durable_step):
            try:
                step = self.manager.restore(state)
            except DamagedError as error:
                logger.warning("%s: no local checkpoint can be restored, trying the durable ones: %s", self.root, error)
                self.failure = error
        if step is not None and step >= durable_step:
            self._is_current = True
            return step, self.manager.report
        if self._ranks.rank == 0:
            self._disown()
        return None, None

    def _claimed(self, is_newest: bool) -> bool | CNRError:
        """Claim the durable root, and return whether the local checkpoints may be restored."""
        root, is_valid = self._durable_root, False
        try:
            refuse_file(root)
            number = fences.highest(root)
            last = _entry(number, fences.owner_of(root, number))
            is_valid = is_newest and number > 0 and last in self._record.read()
            if is_valid:  # also if this process is killed after its claim, but before it has saved anything
                is_valid = self._recorded([last, _entry(number + 1, fences.own_owner())]) is None
            return fences.claim(root).seen == number and is_valid
        except (ConfigurationError, FencedError) as error:
            return error
        except StoreError as error:
            logger.warning("cannot claim the root: this job cannot save there, and another job still may: %s", error)
            return is_valid

    def _disown(self) -> None:
        """Make the local checkpoints stale, because the run continues from a durable one."""
        if self._recorded([]) is None:
            return
        try:
            fences.claim(self._durable_root)  # the record does not name this fence
        except CNRError as error:
            logger.warning("%s: cannot be marked as stale: %s", self.root, error)

    def raise_failure(self) -> None:
        """Raise an error if there are local checkpoints that could not be restored, and there is no durable one.

        Raises:
            DamagedError: There are.
        """
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Wait for the local checkpoint that was begun, and end its manager and its tracker."""
        self.wait()
        self.manager.close()
        self._tracker.close()


def _entry(number: int, owner: str | None) -> str:
    """Return how a record names a fence. The number matters, since a process may continue a run several times."""
    return f"{number}:{owner}"


@dataclass(frozen=True)
class _Record:
    """The file that names the fences under which local checkpoints were written. It is untrusted."""

    path: Path

    def read(self) -> list[str]:
        """Return the fences; none if the file is missing or not one of ours."""
        try:
            with self.path.open("rb") as file:
                fences_there = json.loads(file.read(_MAX_RECORD_BYTES))["fences"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return []
        return [each for each in fences_there if isinstance(each, str)] if isinstance(fences_there, list) else []

    def write(self, entries: list[str]) -> None:
        """Replace the fences.

        Raises:
            OSError: The file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new_path = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex[:16]}.tmp")
        try:
            with new_path.open("w") as file:
                json.dump({"fences": entries}, file)
                file.flush()
                os.fsync(file.fileno())
            new_path.replace(self.path)
        finally:
            new_path.unlink(missing_ok=True)


def _marker(root: Path) -> str | CNRError:
    """Write a file beside a root, and return its name. Remove those that killed processes have left."""
    name = f"{root.name}.{uuid.uuid4().hex[:16]}.tmp"
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        for old in root.parent.glob(f"{root.name}.*.tmp"):
            if time.time() - old.stat().st_mtime > _OLD_SECS:
                old.unlink(missing_ok=True)
        (root.parent / name).touch()
    except OSError as error:
        return ConfigurationError(f"'local_checkpoints': cannot write to {root.parent}: {error}")
    return name


def _newest_step(root: Store) -> int:
    """Return the step of the newest readable checkpoint of a root; -1 if there is none, or it cannot be listed."""
    try:
        newest = next(newest_first(root), None)
    except CNRError as error:
        logger.info("%s: cannot look for the newest checkpoint: %s", root.url, error)
        return -1
    match = None if newest is None else NAME.fullmatch(posixpath.basename(newest.store.path))
    return -1 if match is None else int(match[1])

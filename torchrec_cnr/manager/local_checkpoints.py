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
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_cnr.arguments import check_callable, check_count, check_secs
from torchrec_cnr.errors import CNRError, ConfigurationError, DamagedError, FencedError, SaveError, StoreError
from torchrec_cnr.lineage.latest import newest_first, refuse_file
from torchrec_cnr.loading.load_report import LoadReport
from torchrec_cnr.maintenance.pruning.retention import Keep, check_keep
from torchrec_cnr.manager.background import Background
from torchrec_cnr.manager.ranks import RunRanks
from torchrec_cnr.manager.restore import NAME
from torchrec_cnr.progress import Saved
from torchrec_cnr.quantization import Quantization
from torchrec_cnr.storage import fences
from torchrec_cnr.storage.row_log import root_id
from torchrec_cnr.storage.store import Store
from torchrec_cnr.storage.urls import checked_url, protocol_of
from torchrec_cnr.tracking.tracked_tables import TrackedRows

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_RECORD_BYTES = 1 << 16


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

    def root_of(self, durable_root: str) -> Path:
        """Return the root of the local checkpoints of a run, which has its durable ones at this URL."""
        folder = Path(LocalFileSystem._strip_protocol(checked_url(self.path)))
        return folder / f"cnr-local-{root_id(durable_root)}"


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


class LocalRun:
    """The local checkpoints of a run. All methods are collective.

    Args:
        root: The root of the local checkpoints.
        durable_root: That of the durable ones.
        ranks: The ranks of the run; rank 0 does all I/O besides saves and loads.
        make: Makes the manager of the local checkpoints.

    Attributes:
        manager: The manager of the local checkpoints.

    Raises:
        ConfigurationError: Not all ranks see the directory.
    """

    def __init__(self, root: Path, durable_root: Store, ranks: RunRanks, make: Callable[[Path], Manager]) -> None:
        self.root = root
        self._durable_root = durable_root
        self._ranks = ranks
        self._record = _Record(root.with_name(f"{root.name}.json"))
        self._is_current = False  # whether what is in the root belongs to this process's run
        self._refuse_separate()
        self.manager = make(root)

    @classmethod
    def of(
        cls,
        given: LocalCheckpoints | None,
        durable_root: str,
        tracker: TrackedRows,
        ranks: RunRanks,
        background: Background,
        make: Callable[..., Manager],
    ) -> "LocalRun | None":
        """Return the local checkpoints that a user has asked for, with a fork of the tracker; None for none."""
        if given is None:
            return None

        def make_here(root: Path) -> Manager:
            return make(
                root,
                tracker.fork(),
                quantization=given.quantization,
                every_steps=given.every_steps,
                every_secs=given.every_secs,
                keep=given.keep,
                on_saved=given.on_saved,
                background=replace(background, when_busy="skip", max_bytes_per_sec=None),
            )

        return cls(given.root_of(durable_root), Store.open(durable_root), ranks, make_here)

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

    def save(self, step: int, state: Any) -> Saved | None:
        """Save a local checkpoint if one is due. A failure is logged."""
        return self._trying(step, lambda: self.manager.save(step, state))

    def async_save(self, step: int, state: Any) -> Future[Any] | None:
        """Begin to save a local checkpoint if one is due. A failure is logged."""
        return self._trying(step, lambda: self.manager.async_save(step, state))

    def wait(self) -> Saved | None:
        """Wait for the local checkpoint that was begun, if there is one. A failure is logged."""
        return self._trying(None, lambda: self.manager.wait())

    def _trying(self, step: int | None, action: Callable[[], T]) -> T | None:
        """Do something that may fail on all ranks, without effect on training and on durable checkpoints."""
        try:
            if not self._is_current and step is not None:
                self.leave_all()
            return action()
        except (CheckpointException, SaveError, StoreError) as error:
            logger.warning("a local checkpoint was not saved, later ones have its rows: %s", error)
            return None

    def restored(self, state: dict[str, Any], is_newest: bool) -> int | None:
        """Claim the durable root, and load the newest local checkpoint if it is newer than the newest durable one.

        Args:
            state: The state as for ``dcp.load``.
            is_newest: Whether the caller wants the newest checkpoint, not one that it has named.

        Returns:
            The step of the checkpoint that was loaded. None if a durable one must be loaded: the local ones are newer
            in no way that counts, and were abandoned.

        Raises:
            ConfigurationError, FencedError, StoreError: As for a claim without local checkpoints.
        """
        self._is_current = self._ranks.decide(self._claimed() if self._ranks.rank == 0 else None)
        step = self._restored_newest(state) if self._is_current and is_newest else None
        if step is None:
            self._is_current = False
            self._trying(0, lambda: None)
        return step

    def _claimed(self) -> bool | CNRError:
        root = self._durable_root
        try:
            refuse_file(root)
            own = fences.own_owner()
            last = fences.owner_of(root, fences.highest(root))
            is_current = last is not None and last in self._record.read()
            if is_current and last is not None:
                self._record.write([last, own])  # valid if this process is killed before its claim, and after it
            number = fences.claim(root)
            return is_current and fences.owner_of(root, number) == last
        except (ConfigurationError, FencedError) as error:
            return error
        except StoreError as error:
            logger.warning("cannot claim the root: this job cannot save there, and another job still may: %s", error)
            return False
        except OSError as error:
            logger.warning("%s: local checkpoints cannot be used: %s", self.root, error)
            return False

    def _restored_newest(self, state: dict[str, Any]) -> int | None:
        roots = (Store.open(self.root), self._durable_root)
        local_step, durable_step = self._ranks.decide([*map(_newest_step, roots)] if self._ranks.rank == 0 else None)
        if local_step <= durable_step:
            return None
        try:
            step = self.manager.restore(state)
        except (DamagedError, CheckpointException) as error:
            logger.warning("%s: no local checkpoint can be restored, trying the durable ones: %s", self.root, error)
            return None
        return step if step is not None and step > durable_step else None

    def leave_all(self) -> None:
        """Abandon all local checkpoints, because the run does not continue from them. The next one is a baseline."""
        self.manager.abandon_all()
        self._ranks.decide(self._own() if self._ranks.rank == 0 else None)
        self._is_current = True

    def _own(self) -> CNRError | None:
        try:
            self._record.write([fences.own_owner()])
        except OSError as error:
            return StoreError(f"{self.root}: cannot write beside it: {error}")
        return None

    def close(self) -> None:
        """Wait for the local checkpoint that was begun, and end its manager."""
        self.wait()
        self.manager.close()


@dataclass(frozen=True)
class _Record:
    """The file that names the owners of the fences under which local checkpoints were written. It is untrusted."""

    path: Path

    def read(self) -> list[str]:
        """Return the owners; none if the file is missing or not one of ours."""
        try:
            with self.path.open("rb") as file:
                owners = json.loads(file.read(_MAX_RECORD_BYTES))["owners"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return []
        return [owner for owner in owners if isinstance(owner, str)] if isinstance(owners, list) else []

    def write(self, owners: list[str]) -> None:
        """Replace the owners."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new_path = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex[:16]}.tmp")
        try:
            with new_path.open("w") as file:
                json.dump({"owners": owners}, file)
                file.flush()
                os.fsync(file.fileno())
            new_path.replace(self.path)
        finally:
            new_path.unlink(missing_ok=True)


def _marker(root: Path) -> str | CNRError:
    """Write a file beside a root, and return its name."""
    name = f"{root.name}.{uuid.uuid4().hex[:16]}.tmp"
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
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

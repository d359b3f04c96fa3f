"""The served model: a checkpoint is staged while lookups run, and swapped in while they wait, or not at all.

The model does not change before the swap. Several paths can lead to a checkpoint. If a file of the first one is missing
or corrupt, or if its links do not contain all necessary rows, the next path is tried.
"""

import logging
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from torch import nn

from torchrec_cnr.errors import DamagedError, StoreError
from torchrec_cnr.reading.transforms import KnownTransforms
from torchrec_cnr.serving.commit_sources import Commit
from torchrec_cnr.serving.forward_lock import ForwardLock, share_forwards
from torchrec_cnr.serving.model_tensors import find_model_tensors
from torchrec_cnr.serving.update import Touched, Update, prepare_update, touch
from torchrec_cnr.serving.update_path import AppliedState, UpdateBase, UpdatePath, read_update_paths
from torchrec_cnr.serving.updates_report import Applied
from torchrec_cnr.sharding import wait_for_devices
from torchrec_cnr.storage.leases import leased
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking.sharded_tables import device_caches, sharded_collections
from torchrec_cnr.tracking.tracked_tables import forget_overwritten

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _State:
    """The state of the model.

    Attributes:
        commit: The applied checkpoint, as the source of commits names it.
        standing: The digests of the applied checkpoint and of its baseline.
        touched: The rows that deltas have overwritten since the baseline.
    """

    commit: Commit
    standing: AppliedState
    touched: Touched


@dataclass(eq=False, repr=False)
class ServedModel:
    """A model whose forwards share a lock, and its state.

    Attributes:
        model: The model.
        key: The key that its state dict was saved under; None if it was saved without a key.
        allow_partial: Whether tensors that are missing in checkpoints keep their values.
        thread_count: Number of requests in flight at the same time.
        row_log: The Kafka topic that rows of deltas are sent to, if any.
    """

    model: nn.Module
    key: str | None
    allow_partial: bool
    thread_count: int
    row_log: RowLog | None

    def __post_init__(self) -> None:
        self._state: _State | None = None
        self._transforms = KnownTransforms()
        self._lookups = ForwardLock()
        self._hooks = share_forwards(self.model, self._lookups)
        collections = (module for _, module in sharded_collections(self.model))
        self._caches = [kernel for module in collections for kernel in device_caches(module)]

    @property
    def commit(self) -> Commit | None:
        """The applied checkpoint; None if there is none."""
        state = self._state
        return None if state is None else state.commit

    def looking_up(self) -> AbstractContextManager[None]:
        """Return a context manager during which nothing is swapped in."""
        return self._lookups.shared()

    def close(self) -> None:
        """Unwrap the model's forwards."""
        self._hooks.remove()

    def apply(self, commit: Commit) -> Applied | None:
        """Update the model to a checkpoint.

        Returns:
            A report; None if that checkpoint is applied already, under another name or time.

        Raises:
            CNRError: The checkpoint cannot be read, or does not fit the model, which is unchanged.
        """
        started_secs = time.perf_counter()
        old_state = self._state
        store = Store.open(commit.path, row_log=self.row_log)
        with leased(store, "load"):
            path_and_update = self._staged(store, old_state)
        if path_and_update is None:
            self._state = None if old_state is None else replace(old_state, commit=commit)
            return None
        update_path, update = path_and_update
        head = update_path.lineage.newest
        forget_overwritten([part.tensor for part in update.parts])
        with self._lookups.exclusive():
            swap_secs = time.perf_counter()
            try:
                self._swap_in(update)
                if update_path.is_delta:
                    touch(update.touched, update.rows)
            except BaseException:
                self._state = None  # the swap has failed half-way, so everything must be read again
                raise
            self._state = _State(commit, _standing(update_path, old_state), update.touched)
            done_secs = time.perf_counter()
        if old_state is not None and not update_path.is_delta and head.parent is not None:
            logger.info("%s is not based on %s: its whole chain was read", commit.path, old_state.commit.path)
        return Applied(
            path=head.store.url,
            sha256=head.sha256,
            kind="delta" if update_path.is_delta else "baseline",
            num_checkpoints=len(update_path.lineage.checkpoints),
            num_rows=update.num_rows,
            num_bytes=update.num_bytes,
            read_secs=swap_secs - started_secs,
            apply_secs=done_secs - swap_secs,
            committed_to_applied_secs=time.time() - head.created_ns / 1e9,
        )

    def _swap_in(self, update: Update) -> None:
        """Swap in between the lookups of all streams: lookups can still run on a device after forward has returned."""
        tensors = [part.tensor for part in update.parts]
        for kernel in self._caches:
            kernel.flush()
        wait_for_devices([*tensors, *(kernel.lxu_cache_weights for kernel in self._caches)])
        update.swap_in()
        for kernel in self._caches:
            kernel.reset_cache_states()  # the cached rows are outdated
        wait_for_devices(tensors)

    def _staged(self, store: Store, old_state: _State | None) -> tuple[UpdatePath, Update] | None:
        """Return the first usable path to a checkpoint, and its update; None if the checkpoint is applied already."""
        for update_path in read_update_paths(store, None if old_state is None else old_state.standing):
            newest = update_path.lineage.newest
            if old_state is not None and newest.sha256 == old_state.standing.head:
                return None
            targets = find_model_tensors(self.model, self.key, newest, allow_partial=self.allow_partial)
            try:
                update = prepare_update(
                    update_path,
                    targets,
                    {} if old_state is None else old_state.touched,
                    self.thread_count,
                    self._transforms,
                )
            except (DamagedError, StoreError) as error:
                if not update_path.is_delta:
                    raise
                logger.info("%s: cannot read this path of updates; trying another: %s", store.url, error)
                continue
            if update is not None:
                return update_path, update
        raise DamagedError(f"{store.url}: no path of updates leads to this checkpoint; use another checkpoint")


def _standing(update_path: UpdatePath, old_state: _State | None) -> AppliedState:
    oldest_sha256, newest_sha256 = update_path.lineage.checkpoints[0].sha256, update_path.lineage.newest.sha256
    if old_state is None or update_path.ground is UpdateBase.NOTHING:
        return AppliedState(newest_sha256, baseline=oldest_sha256)
    return AppliedState(newest_sha256, old_state.standing.baseline)

"""Rewriting: the second half of a compaction. Copies what is live in victims, then commits the new manifest."""

import os
import uuid

from torchrec_cnr.leases import leased
from torchrec_cnr.lineage import Checkpoint, read_checkpoint
from torchrec_cnr.maintenance.compaction import CompactionPlan, plan_compaction
from torchrec_cnr.maintenance.copying import Copying
from torchrec_cnr.maintenance.new_packs import NewPacks
from torchrec_cnr.maintenance.replacing import commit, may_have_committed, replacement_of
from torchrec_cnr.pack_reader import PackReader
from torchrec_cnr.packs import PACK_BYTES, check_pack_bytes, check_thread_count
from torchrec_cnr.policies import MAX_RATIO
from torchrec_cnr.progress import Progress
from torchrec_cnr.row_logs import RowLog
from torchrec_cnr.stores import Store


def compact(
    path: str | os.PathLike[str] | Store,
    *,
    since: str | os.PathLike[str] | None = None,
    max_ratio: float = MAX_RATIO,
    max_moved_bytes: int | None = None,
    self_contained: bool = False,
    rows: RowLog | None = None,
    thread_count: int = 2,
    pack_bytes: int = PACK_BYTES,
    progress: Progress | None = None,
) -> Checkpoint:
    """Fold a lineage, or the newest deltas of it, into one checkpoint; see :func:`plan_compaction`.

    Needs less than 512 MiB of memory. May run anywhere, also while training goes on saving.

    Args:
        pack_bytes: Size of new files, roughly.
        progress: Told how many of how many bytes were copied.

    Returns:
        The checkpoint, with its new manifest.

    Raises:
        CheckpointExistsError: Another compaction of the same checkpoint was faster; nothing was changed.
        ConfigurationError, LoadError, StoreError: As :func:`plan_compaction`.
    """
    newest = read_checkpoint(Store.open(path, log=rows))
    with leased(newest.store, "compact"):
        plan = plan_compaction(
            newest.store,
            since=since,
            max_ratio=max_ratio,
            max_moved_bytes=max_moved_bytes,
            self_contained=self_contained,
            thread_count=thread_count,
        )
        return execute(plan, thread_count=thread_count, pack_bytes=pack_bytes, progress=progress)


def execute(
    plan: CompactionPlan,
    *,
    thread_count: int = 2,
    pack_bytes: int = PACK_BYTES,
    progress: Progress | None = None,
) -> Checkpoint:
    """Do what a plan says, if it is of any use; see :func:`compact`. Whoever calls this holds a lease."""
    check_thread_count(thread_count)
    check_pack_bytes(pack_bytes)
    if not plan.is_needed:
        return plan.newest
    _rewrite(plan, uuid.uuid4().hex[:16], thread_count, pack_bytes, progress)
    return read_checkpoint(plan.newest.store)


def _rewrite(plan: CompactionPlan, save_id: str, thread_count: int, pack_bytes: int, progress: Progress | None) -> None:
    packs = NewPacks(plan, save_id, thread_count, pack_bytes, progress)
    try:
        copied = Copying(plan, packs, PackReader(plan.newest.store, plan.flat.packs, thread_count)).run()
        data = replacement_of(plan, save_id, *copied, *packs.finish())
    except BaseException:
        packs.discard()
        raise
    finally:
        packs.close()
    try:
        commit(plan.newest, data, save_id)
    except BaseException:
        if not may_have_committed(plan.newest, save_id):
            packs.discard()
        raise

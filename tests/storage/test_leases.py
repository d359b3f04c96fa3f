"""Leases: saves and loads keep what they work on from being pruned, and leave nothing behind when they have ended."""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.faults import give_to_nobody
from tests.support.jobs import SavingJob
from tests.support.killing import in_child
from tests.support.models import Whole, state, torchrec_job
from tests.support.ranks import RankPools
from tests.support.roots import NUM_COLS, NUM_ROWS, TABLE, Root, prune
from torchrec_cnr.errors import StoreError
from torchrec_cnr.format.manifest import MANIFEST_FILE, PACK_SUFFIX
from torchrec_cnr.maintenance.pruning.execute import run_prune
from torchrec_cnr.maintenance.pruning.plan import plan_prune
from torchrec_cnr.maintenance.pruning.retention import Keep
from torchrec_cnr.saving import writer as writer_module
from torchrec_cnr.storage import leases, retries
from torchrec_cnr.storage.leases import LEASE_SECS, Lease, holds, in_force, is_lease, leased
from torchrec_cnr.storage.pack_reader import PackReader
from torchrec_cnr.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def held(path: str | Path, purpose: str) -> int:
    """How many leases hold in a directory; none of them for anything else."""
    found = in_force(Store.open(path), Store.open(path).names(), time.time_ns())
    assert {lease.purpose for lease in found} <= {purpose}
    return len(found)


def files(path: str | Path) -> list[str]:
    """Leases in a directory, also those that have run out."""
    return [name for name in Store.open(path).names() if is_lease(name)]


def save_and_act(trainer: SavingJob, name: str, phase: str, act: Callable[[], object]) -> Whole:
    """Train and save, and do something before the writer does a phase; what the checkpoint must hold."""
    trainer.train()
    faults.act_before(trainer.writer, phase, act)
    try:
        return trainer.save(name)
    finally:
        delattr(trainer.writer, phase)


# Saves


def test_a_save_holds_a_lease_until_it_is_committed(tmp_path: Path) -> None:
    """From before its first pack to behind its manifest."""
    trainer, seen = SavingJob(tmp_path), []

    def look() -> None:
        seen.append(held(tmp_path / "0", "save"))

    save_and_act(trainer, "0", "write_data", look)
    save_and_act(trainer, "1", "finish", lambda: seen.append(held(tmp_path / "1", "save")))
    assert seen == [1, 1]
    assert files(tmp_path / "0") == files(tmp_path / "1") == []


def test_what_is_being_saved_is_not_pruned(tmp_path: Path) -> None:
    """A prune in mid-save touches neither its packs nor what it stands on; once it is committed, retention decides."""
    trainer, plans = SavingJob(tmp_path), []
    cuts = {name: trainer.train_and_save(name) for name in ("0", "1")}
    other = SavingJob(tmp_path)
    cuts["other"] = other.train_and_save("other")

    def prune_all_but_the_last() -> None:
        plans.append(plan_prune(tmp_path, Keep(last=1)))
        prune(str(tmp_path), Keep(last=1))

    cuts["2"] = save_and_act(trainer, "2", "finish", prune_all_but_the_last)
    assert plans[0].stays["2"][0].startswith("leased (a save, until ")
    assert plans[0].stays["1"][0].startswith("leased (a save, until ")
    assert held(tmp_path / "1", "save") == 0
    assert cnr.read_checkpoint(tmp_path / "2").parent == str(tmp_path / "1")
    for name, cut in cuts.items():
        trainer.assert_loads(name, cut)
    assert prune(str(tmp_path), Keep(last=1)).removed == ("other",)
    trainer.assert_loads("2", cuts["2"])


@pytest.mark.parametrize("refused", ["0", "1"])
@pytest.mark.parametrize("what", ["once", "always", "parent pruned"])
def test_a_delta_needs_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, what: str) -> None:
    """Its own and its parent's: a prune could otherwise remove the parent. If they are refused, it tries once more."""
    trainer, num_refused, seen = SavingJob(tmp_path), 0, list[list[int]]()
    cuts = {"0": trainer.train_and_save("0")}
    cuts["other"] = (other := SavingJob(tmp_path)).train_and_save("other")
    take, commit = Lease.take, writer_module.commit

    def refuse(store: Store, purpose: Any) -> Lease | None:
        nonlocal num_refused
        if store.url.endswith(f"/{refused}") and (what == "always" or num_refused == 0):
            num_refused += 1
            return None
        return take(store, purpose)

    def prune_parent() -> None:
        if what == "parent pruned":
            assert prune(str(tmp_path), Keep(last=1)).removed == ("0",)

    def look_and_commit(*args: Any) -> None:
        seen.append([held(tmp_path / name, "save") for name in "01"])
        commit(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Lease, "take", refuse)
        patch.setattr(writer_module, "commit", look_and_commit)
        trainer.train()
        faults.act_before(trainer.writer, "finish", prune_parent)
        if what == "once":
            cuts["1"] = trainer.save("1")
        else:
            error = trainer.failure("1")
        delattr(trainer.writer, "finish")
    assert num_refused == (2 if what == "always" else 1)
    assert seen == ([[1, 1]] if what == "once" else [])
    if what == "always":
        assert isinstance(error, cnr.StoreError)
        assert "/1: nothing was committed, because the store refuses the leases that protect its parent" in str(error)
    elif what == "parent pruned":
        assert isinstance(error, cnr.SaveError)
        assert "because a prune removes its parent" in str(error)
        cuts.pop("0")
    cuts["2"] = trainer.train_and_save("2")
    assert cnr.read_checkpoint(tmp_path / "2").kind == ("baseline" if what == "parent pruned" else "delta")
    for name, cut in cuts.items():
        (other if name == "other" else trainer).assert_loads(name, cut)


@pytest.mark.parametrize("plans_before", [False, True])
def test_the_baseline_of_a_save_is_not_pruned_although_its_head_was_compacted(
    tmp_path: Path, plans_before: bool
) -> None:
    """The compacted head does not need it any more. The job, which knows of no compaction, saves a delta of it."""
    trainer, plans = SavingJob(tmp_path, policy=cnr.OneShot()), []
    for name in ("0", "1"):
        trainer.train_and_save(name)

    def plan() -> None:
        plans.append(plan_prune(tmp_path, Keep(last=1)))

    def compact_and_prune() -> None:
        cnr.compact(tmp_path / "1", self_contained=True)
        if plans_before:  # as if the save had begun after that
            (lease,) = (tmp_path / "0").glob("*.save.lease")
            lease.rename(tmp_path / lease.name)
            plan()
            (tmp_path / lease.name).rename(lease)
        else:
            plan()
        run_prune(plans[0])

    cut = save_and_act(trainer, "2", "finish", compact_and_prune)
    assert cnr.read_checkpoint(tmp_path / "2").parent == str(tmp_path / "0")
    trainer.assert_loads("2", cut)
    assert [checkpoint.name for checkpoint in plans[0].pruned] == ["0"] * plans_before


@pytest.mark.parametrize("what", ["parent", "lease", "removed lease"])
def test_a_save_is_not_committed_on_what_may_have_been_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its parent or its lease is gone, or that ran out: it fails, loses nothing, and the next save works."""
    trainer = SavingJob(tmp_path)
    trainer.train_and_save("0")

    def prune_parent() -> None:
        if what == "parent":
            os.unlink(tmp_path / "0" / MANIFEST_FILE)
        elif what == "removed lease":
            os.unlink(tmp_path / "1" / files(tmp_path / "1")[0])

    monkeypatch.setattr(leases, "LEASE_SECS", 0 if what == "lease" else LEASE_SECS)
    with pytest.raises(CheckpointException) as raised:
        save_and_act(trainer, "1", "finish", prune_parent)
    monkeypatch.undo()
    (cause,) = faults.causes(raised.value).values()
    assert isinstance(cause, cnr.SaveError)
    expected = f"its parent {tmp_path}/0 was pruned during the save; save again" if what == "parent" else "its lease of"
    assert expected in str(cause)
    assert not (tmp_path / "1" / MANIFEST_FILE).exists()
    cut = trainer.train_and_save("2")
    assert cnr.read_checkpoint(tmp_path / "2").kind == ("baseline" if what == "parent" else "delta")
    trainer.assert_loads("2", cut)


def test_what_a_failed_save_left_is_pruned_once_its_writer_goes_on(tmp_path: Path) -> None:
    """At once if the same writer begins another save, else when the lease has run out; never while it holds."""
    trainer = SavingJob(tmp_path)
    writer = models.writer(tmp_path / "failed")
    trainer.train_and_save("0")
    with faults.failing(trainer.planner, writer, "finish", "before", 0), pytest.raises(CheckpointException):
        dcp.save(state(trainer.job), storage_writer=writer, planner=trainer.planner)
    num_files = len(list((tmp_path / "failed").iterdir()))
    assert num_files >= 2
    assert held(tmp_path / "failed", "save") == 1
    assert plan_prune(tmp_path).removals == ()
    later_ns = time.time_ns() + LEASE_SECS * 10**9
    assert [len(removal.files) for removal in plan_prune(tmp_path, now_ns=later_ns).removals] == [1, num_files]
    dcp.save(state(trainer.job), storage_writer=writer, planner=trainer.planner, checkpoint_id=tmp_path / "1")
    assert held(tmp_path / "failed", "save") == 0
    assert len(files(tmp_path / "failed")) == 1
    assert files(tmp_path / "1") == []
    prune(str(tmp_path))
    assert not (tmp_path / "failed").exists()


def test_a_commit_that_may_yet_arrive_keeps_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store that is not local, a request that failed may still arrive: no prune removes its packs before."""
    root = f"memory://leases-{os.getpid()}"
    trainer, create, late = SavingJob(root), Store._create_new, []
    trainer.train_and_save("0")

    def fail(*args: Any) -> None:
        late.append(args)
        raise TimeoutError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_create_new", fail)
        patch.setattr(retries, "RETRY_SECS", 0.5)
        with pytest.raises(CheckpointException, match="no answer"):
            trainer.train_and_save("1")
    trainer.train_and_save("2")
    prune(root, Keep(last=1))
    assert not Store.open(f"{root}/1").exists(MANIFEST_FILE)
    create(*late[0])
    for name in ("1", "2"):
        trainer.assert_loads(name, trainer.saved[name])


@pytest.mark.parametrize("has_lease", [True, False])
def test_a_commit_that_was_tried_again_keeps_a_lease(monkeypatch: pytest.MonkeyPatch, has_lease: bool) -> None:
    """The first request may arrive after a prune. A save that got no lease at its start takes one then."""
    root = f"memory://leases-again-{os.getpid()}-{has_lease}"
    trainer, create, take = SavingJob(root, policy=cnr.Full()), Store._create_new, Lease.take
    late: list[Any] = []
    refused = [] if has_lease else [None]

    def take_later(store: Store, purpose: Any) -> Lease | None:
        return refused.pop() if refused else take(store, purpose)

    def fail_once(*args: Any) -> None:
        if not late:
            late.append(args)
            raise TimeoutError("no answer")
        create(*args)

    trainer.train_and_save("0")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_create_new", fail_once)
        patch.setattr(Lease, "take", take_later)
        trainer.train_and_save("1")
    assert not refused
    trainer.train_and_save("2")
    prune(root, Keep(last=1))
    trainer.assert_loads("1", trainer.saved["1"])


# Loads


@contextmanager
def _looking(path: str | Path, seen: list[int]) -> Any:
    """Count leases for loads while packs are read."""
    read = PackReader.read

    def look_and_read(self: PackReader, *turns: Any, **options: Any) -> Any:
        seen.append(held(path, "load"))
        return read(self, *turns, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PackReader, "read", look_and_read)
        yield


def test_a_load_holds_a_lease_on_its_head(tmp_path: Path) -> None:
    """While it reads packs, of parents too; also a load of one table; and none afterwards."""
    root, seen = Root(tmp_path), list[int]()
    root.save("0", 1)
    root.save("1", 2, "0", range(3))
    target = torch.zeros(NUM_ROWS, NUM_COLS)
    with _looking(tmp_path / "1", seen):
        dcp.load({TABLE: target}, storage_reader=cnr.CNRStorageReader(tmp_path / "1"))
        cnr.load_table(tmp_path / "1", TABLE)
    assert set(seen) == {1}
    assert len(seen) >= 4
    assert torch.equal(target, root.checkpoints["1"].values)
    assert files(tmp_path / "0") == files(tmp_path / "1") == []


def test_a_load_that_fails_leaves_no_lease(tmp_path: Path) -> None:
    """While it reads, while it plans, or before; a reader that is used again ends the lease that it had."""
    root = Root(tmp_path)
    root.save("0", 1)
    reader = cnr.CNRStorageReader(tmp_path / "0")
    with pytest.raises(CheckpointException):
        dcp.load({"missing": torch.zeros(1)}, storage_reader=reader, planner=cnr.CNRLoadPlanner())
    target = torch.zeros(NUM_ROWS, NUM_COLS)
    dcp.load({TABLE: target}, storage_reader=reader, checkpoint_id=tmp_path / "0")
    assert files(tmp_path / "0") == []
    os.unlink(tmp_path / "0" / sorted(root.checkpoints["0"].packs)[0])
    with pytest.raises(CheckpointException):
        dcp.load({TABLE: target}, storage_reader=cnr.CNRStorageReader(tmp_path / "0"))
    for fqn, error in ((TABLE, cnr.DamagedError), ("missing", cnr.StateMismatchError)):
        with pytest.raises(error):
            cnr.load_table(tmp_path / "0", fqn)
    assert files(tmp_path / "0") == []
    with pytest.raises(cnr.CheckpointNotFoundError):
        cnr.load_table(tmp_path / "missing", TABLE)
    assert not (tmp_path / "missing").exists()


def _load_as_nobody(path: str) -> list[Any]:
    """Load where nothing may be written."""
    faults.become_nobody()
    with pytest.raises(PermissionError):
        Path(path, "file").touch()
    target = torch.zeros(NUM_ROWS, NUM_COLS)
    dcp.load({TABLE: target}, storage_reader=cnr.CNRStorageReader(path), no_dist=True)
    return [target.tolist(), cnr.load_table(path, TABLE).tolist()]


def test_a_load_needs_no_lease(open_folder: Path) -> None:
    """Where nothing can be written, it goes on without one."""
    root = Root(open_folder / "job")
    root.save("0", 1)
    give_to_nobody(open_folder / "job")
    (open_folder / "job" / "0").chmod(0o555)
    assert in_child(_load_as_nobody, root.at("0")) == [root.checkpoints["0"].values.tolist()] * 2
    (open_folder / "job" / "0").chmod(0o755)
    assert files(open_folder / "job" / "0") == []


def _count_leases(rank: int, root: str) -> list[int]:
    """Of a save and of a load of all ranks."""
    seen: list[int] = []
    job = torchrec_job(1)
    writer = models.writer(f"{root}/0")
    faults.act_before(writer, "write_data", lambda: seen.append(held(f"{root}/0", "save")))
    dcp.save(state(job), storage_writer=writer, planner=cnr.CNRSavePlanner())
    reader = cnr.CNRStorageReader(f"{root}/0")

    def look() -> None:
        dist.barrier()
        seen.append(held(f"{root}/0", "load"))
        dist.barrier()

    faults.act_before(reader, "read_data", look)
    dcp.load(state(job), storage_reader=reader, planner=cnr.CNRLoadPlanner())
    dist.barrier()
    return [*seen, len(files(f"{root}/0"))]


def test_of_a_save_one_rank_holds_a_lease_of_a_load_each_does(tmp_path: Path, rank_pool: RankPools) -> None:
    """The coordinator ends a save; a load ends on each rank by itself."""
    assert rank_pool(2).run(_count_leases, str(tmp_path), timeout_secs=60.0) == [[1, 2, 0]] * 2


# Long work, and processes that die


def test_leases_are_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the work goes on, and not after its end. One thread renews all, and ends after the last."""
    monkeypatch.setattr(leases, "_renewals", renewals := leases._Renewals())
    monkeypatch.setattr(leases, "_RENEWAL_SECS", 0.02)
    held_leases = [_take(tmp_path) for _ in range(3)]
    firsts_ns = [lease.until_ns for lease in held_leases]
    thread = renewals._thread
    assert thread is not None
    deadline = time.monotonic() + faults.WAIT_SECS
    while any(lease.until_ns == first_ns for lease, first_ns in zip(held_leases, firsts_ns, strict=True)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert renewals._thread is thread
    for lease in held_leases:
        assert lease.name in files(tmp_path)
        lease.release()
        lease.renew()
        assert lease.name not in files(tmp_path)
    assert files(tmp_path) == []
    thread.join(faults.WAIT_SECS)
    assert renewals._thread is None
    again = _take(tmp_path)
    assert renewals._thread is not None
    again.release()


def _take(directory: Path) -> Lease:
    lease = Lease.take(Store.open(directory), "save")
    assert lease is not None
    return lease


def test_a_lease_is_not_renewed_once_its_owner_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor in a forked child, which has no thread yet and begins its own."""
    monkeypatch.setattr(leases, "_renewals", renewals := leases._Renewals())
    lease = _take(tmp_path)
    assert list(renewals._leases.values()) == [lease]
    del lease
    gc.collect()
    assert list(renewals._leases.values()) == []
    kept = _take(tmp_path)
    renewals.forget()
    assert (list(renewals._leases.values()), renewals._thread) == ([], None)
    kept.release()


def test_a_lease_that_cannot_be_renewed_holds_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again later."""
    store = Store.open(tmp_path)
    lease = Lease.take(store, "save")
    assert lease is not None

    def refuse(*_: object, **__: object) -> None:
        raise cnr.StoreError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", refuse)
        lease.renew()
    assert files(tmp_path) == [lease.name]
    lease.renew()
    assert files(tmp_path) == [lease.name]
    lease.release()


def test_leases_of_a_process_that_has_died_are_over(tmp_path: Path) -> None:
    """On the machine that it ran on, whose other processes may have its number by now."""
    store, now_ns = Store.open(tmp_path), time.time_ns()
    name = subprocess.run(
        [sys.executable, "-c", _TAKE, str(tmp_path)], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert files(tmp_path) == [name]
    assert not holds(store, [name], now_ns)
    told = json.loads(store.read(name))
    for change, is_over in (
        ({"pid": os.getpid()}, True),
        ({"boot": "another machine"}, False),
        ({"pids": "another container"}, False),
        ({"boot": ""}, False),
        ({"pid": -1}, True),
        ({"pid": "x"}, False),
        ({}, True),
    ):
        store.put(name, [json.dumps(told | change).encode()])
        assert holds(store, [name], now_ns) != is_over, change
    assert leases.Owner.own().is_dead is False


_TAKE = """
import os, sys
from torchrec_cnr.storage.leases import Lease
from torchrec_cnr.storage.store import Store
lease = Lease.take(Store.open(sys.argv[1]), "save")
if sys.argv[2:]:
    lease.leave()
print(lease.name, flush=True)
os._exit(0)
"""


def test_a_lease_that_was_left_outlives_its_process(tmp_path: Path) -> None:
    """A request that seems to have failed may arrive after the process has ended, on its machine too."""
    subprocess.run([sys.executable, "-c", _TAKE, str(tmp_path), "leave"], check=True)
    assert held(tmp_path, "save") == 1
    assert [lease.read_bytes() for lease in tmp_path.glob("*.lease")] == [b"{}"], "an empty one has lapsed"


# Clocks


@contextmanager
def _clock_ahead(secs: int) -> Iterator[None]:
    """The clock of this machine is wrong; that of its file system is not."""
    now_ns = time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now_ns() + secs * 10**9)
        yield


def test_a_prune_whose_clock_is_ahead_removes_nothing_in_use(tmp_path: Path) -> None:
    """It goes by the clock of the file system, which may be another machine's."""
    trainer = SavingJob(tmp_path)
    trainer.train_and_save("0")

    def prune_by_a_wrong_clock() -> None:
        with _clock_ahead(24 * 3600):
            assert prune(str(tmp_path), Keep(last=1)).removed == ()

    cut = save_and_act(trainer, "1", "finish", prune_by_a_wrong_clock)
    trainer.assert_loads("1", cut)
    assert not list(tmp_path.rglob("*.clock"))


def test_a_prune_that_cannot_learn_the_time_of_its_store_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of this machine, leases of saves in progress could be over. A plan is made all the same."""
    trainer = SavingJob(tmp_path, policy=cnr.Full())
    for name in "01":
        trainer.train_and_save(name)
    put = Store.put

    def refuse_clocks(self: Store, name: str, parts: Sequence[Any], is_durable: bool = True) -> None:
        if name.endswith(".clock"):
            raise StoreError(f"cannot write {name}: refused")
        put(self, name, parts, is_durable)

    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patched:
        patched.setattr(Store, "put", refuse_clocks)
        plan = plan_prune(tmp_path, Keep(last=1))
        assert [removal.entry.name for removal in plan.removals] == ["0"]
        with pytest.raises(StoreError, match="clock"):
            run_prune(plan)
        assert sorted(tmp_path.rglob("*")) == before
    assert run_prune(plan).removed == ("0",)


@pytest.mark.parametrize("secs", [-24 * 3600, 24 * 3600])
def test_a_lease_goes_by_the_clock_of_its_store(tmp_path: Path, secs: int) -> None:
    """It holds from now on, however wrong the clock of the machine that has taken it; also once it is renewed."""
    store = Store.open(tmp_path)
    with _clock_ahead(secs):
        lease = Lease.take(store, "save")
        assert lease is not None
        assert not lease.is_lost()
    for _ in range(2):
        assert holds(store, store.names(), time.time_ns())
        assert not holds(store, store.names(), time.time_ns() + (LEASE_SECS + 60) * 10**9)
        with _clock_ahead(secs):
            lease.renew()
    lease.release()
    assert store.names() == []


def test_a_save_whose_packs_were_removed_is_not_committed(tmp_path: Path) -> None:
    """Its lease is there: a prune by a wrong clock removes packs before leases, and may have died in between."""
    trainer = SavingJob(tmp_path)

    def remove_a_pack() -> None:
        next((tmp_path / "0").glob(f"*{PACK_SUFFIX}")).unlink()

    with pytest.raises(CheckpointException, match="save again if the file was pruned"):
        save_and_act(trainer, "0", "finish", remove_a_pack)
    assert cnr.latest(tmp_path) is None


# Files


def test_names_say_until_when(tmp_path: Path) -> None:
    """A lease holds until then and not longer; what is named otherwise is none."""
    store = Store.open(tmp_path)
    lease = Lease.take(store, "compact")
    assert lease is not None
    assert store.names() == [lease.name]
    assert is_lease(lease.name)
    assert not lease.has_run_out
    assert abs(lease.until_ns - time.time_ns() - LEASE_SECS * 10**9) < 60 * 10**9
    assert in_force(store, store.names(), lease.until_ns - 1) == [lease]
    assert (holds(store, store.names(), lease.until_ns - 1), holds(store, store.names(), lease.until_ns)) == (
        True,
        False,
    )
    assert in_force(store, store.names(), lease.until_ns) == []
    lease.release()
    lease.release()
    assert store.names() == []
    for name in ("a.lease", f"{'0' * 16}.1.lease", f"{'0' * 16}.x.load.lease", f"{'0' * 16}.1.Load.lease\n", ".lease"):
        assert not is_lease(name)
        assert not holds(store, [name], 0)
    later = f"{'0' * 16}.{time.time_ns() + LEASE_SECS * 10**9}.later.lease"
    assert holds(store, [later], time.time_ns()), "versions to come may have other purposes"


def test_a_lease_that_never_ends_is_none(tmp_path: Path) -> None:
    """No process writes one, and it would keep a directory for ever."""
    for number in ("9" * 20, str(time.time_ns() + 40 * 3600 * 10**9)):
        assert not holds(Store.open(tmp_path), [f"{'0' * 16}.{number}.load.lease"], time.time_ns())


def test_a_lease_is_held_for_a_while(tmp_path: Path) -> None:
    """And released if what it is held for fails."""

    def fail_with_a_lease() -> None:
        with leased(Store.open(tmp_path), "compact"):
            assert held(tmp_path, "compact") == 1
            raise faults.InjectedError

    with pytest.raises(faults.InjectedError):
        fail_with_a_lease()
    assert files(tmp_path) == []


def test_a_lease_that_lapses_has_run_out(tmp_path: Path) -> None:
    """One is left that says that there was one."""
    lease = Lease.take(Store.open(tmp_path), "save")
    assert lease is not None
    lease.lapse()
    (name,) = files(tmp_path)
    assert name != lease.name
    assert not holds(lease.store, [name], time.time_ns())


def test_a_lease_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    """Nor does it make a directory."""
    assert Lease.take(Store.open(tmp_path / "missing"), "load") is None
    assert not (tmp_path / "missing").exists()
    Lease.until(Store.open(tmp_path / "missing"), "load", 1).lapse()
    assert not (tmp_path / "missing").exists()


def test_a_lease_of_a_clock_that_is_behind_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine a day behind an object store; one that has lapsed is over all the same, and so is an old one."""
    monkeypatch.setattr(leases, "is_object_store", lambda fs: True)
    store, now_ns = Store.open(f"memory://behind-{os.getpid()}"), time.time_ns()
    behind = Lease.until(store, "save", now_ns - 18 * 3600 * 10**9)
    store.put(behind.name, [b"{}"])
    lapsed = Lease.until(store, "save", now_ns - 18 * 3600 * 10**9)
    store.put(lapsed.name, [])
    found = in_force(store, [behind.name, lapsed.name], now_ns)
    assert [lease.name for lease in found] == [behind.name]
    assert found[0].until_ns > now_ns + (LEASE_SECS - 60) * 10**9
    assert not holds(store, [behind.name], now_ns + (LEASE_SECS + 60) * 10**9)

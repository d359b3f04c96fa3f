"""Prunes that are killed, that others work beside, and whose store refuses."""

import dataclasses
import errno
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchrec_cnr as cnr
from tests.support.faults import become_nobody, give_to_nobody, small_disk, wait_for
from tests.support.killing import every_kill, in_child
from tests.support.roots import DAY_NS, HOUR_NS, NUM_COLS, NUM_ROWS, TABLE, Root, prune, pruned_names
from torchrec_cnr.errors import StoreError
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.lineage import journal
from torchrec_cnr.maintenance.catalog import Entry, read_catalog, read_journal
from torchrec_cnr.maintenance.pruning.execute import PruneResult, run_prune
from torchrec_cnr.maintenance.pruning.plan import plan_prune
from torchrec_cnr.maintenance.pruning.retention import Best, Keep
from torchrec_cnr.maintenance.tags_and_metrics import tag, write_metrics
from torchrec_cnr.storage.leases import is_lease
from torchrec_cnr.storage.pack_reader import PackReader
from torchrec_cnr.storage.store import Store
from torchrec_cnr.testing import Fault, FaultyStore

numbers = count()


# Killed at any operation.

KEEP = Keep(last=2, best=Best("auc"))


def _busy_root(url: str) -> Root:
    """Something of all that a prune may find: lineages, packs of others, what was pruned before, what died."""
    root, at_ns = Root(url), iter(range(time.time_ns() - 9 * DAY_NS, time.time_ns(), HOUR_NS))
    for name, parent in [("a-0", None), ("a-1", "a-0"), ("a-2", "a-1"), ("b-0", None), ("b-1", "b-0"), ("b-2", "b-1")]:
        root.save(name, next(at_ns), parent, range(4, 20) if name == "a-1" else range(3))
    root.compact("a-2")
    prune(root, Keep(last=4))
    assert root.directories() == {"a-0", "a-1", "a-2", "b-0", "b-1", "b-2"}
    assert {name for name in root.directories() if root.store.at(name).exists(MANIFEST_FILE)} == {
        "a-2",
        "b-0",
        "b-1",
        "b-2",
    }
    root.compact("a-2", num_moved=1)  # nobody uses the packs in a-0 and a-1 any more
    root.compact("b-2")  # of b-0 it uses packs
    for name, parent in [("c-0", None), ("c-1", "c-0"), ("c-2", "c-1"), ("d-0", "b-2"), ("d-1", "d-0")]:
        root.save(name, next(at_ns), parent, range(8))
    root.compact("d-1", since="b-2")
    write_metrics(root.at("c-1"), {"auc": 0.75})
    write_metrics(root.at("a-2"), {"auc": 0.5})
    tag(root.at("c-0"), "release")
    for name in ("c-1", "c-2", "d-1"):
        root.put_pack(name)
        root.put(name, f"{root.new_id()}.manifest.json")
        root.lease(name, time.time_ns() - 1)
    root.put("c-2", "notes.txt")
    for name in ("died-0", "died-1"):
        root.put_pack(name)
        root.lease(name, time.time_ns() - 1, "save")
    for number in range(journal.NUM_FOLDED - 1):
        journal.write_file(
            root.store.at("journal"), journal.Journal(died=frozenset({f"died-before-{number}"})), time.time_ns()
        )
    return root


def _prune_by_keep(root: str) -> None:
    assert run_prune(plan_prune(root, KEEP)).failed == {}


def _copy(source: Path, target: Path) -> str:
    shutil.copytree(source, target, copy_function=os.link)  # files are written once
    return str(target)


@pytest.mark.long
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_prune_that_is_killed_before_any_operation(tmp_path: Path, step: int) -> None:
    """Every checkpoint that is kept then loads, and the next prune ends where an undisturbed one does."""
    root = _busy_root(str(tmp_path / "job"))
    done = root.moved(_copy(tmp_path / "job", tmp_path / "done"))
    plan = plan_prune(done.url, KEEP)
    assert {checkpoint.name for checkpoint in plan.pruned} == {"a-2", "b-0", "b-1", "c-2"}
    assert len(plan.removals) >= 8
    assert plan.folds_journal
    _prune_by_keep(done.url)
    kept = set(done.checkpoints) - {checkpoint.name for checkpoint in read_journal(done.url)}
    assert kept == {"b-2", "c-0", "c-1", "d-0", "d-1"}
    assert done.files() != root.files()
    seen: set[Any] = set()
    for kill in every_kill(lambda number: _copy(tmp_path / "job", tmp_path / str(number)), _prune_by_keep, step):
        left = root.moved(kill.root)
        state = (frozenset(left.files()), frozenset(left.directories()), frozenset(left.store.at("journal").names()))
        if state not in seen:
            seen.add(state)
            left.assert_loads(kept)
            _prune_by_keep(kill.root)
            assert left.files() == done.files()
            assert left.directories() == done.directories()
            assert pruned_names(kill.root) == pruned_names(done.url)
            assert plan_prune(kill.root, KEEP).is_empty
        shutil.rmtree(kill.root)
    assert len(seen) * step > len(root.files()) - len(done.files()), "each file that goes makes another state"


# Others at work.


def _load_slowly(path: str, folder: str) -> bool:
    """Load by DCP, and wait between the manifests and the packs until a file is there; whether it is what was saved."""
    read = PackReader.read

    def wait_and_read(self: PackReader, *turns: Any, **options: Any) -> Iterator[Any]:
        Path(folder, "reading").touch()
        wait_for(Path(folder, "go on"))
        return read(self, *turns, **options)

    target = torch.zeros(NUM_ROWS, NUM_COLS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PackReader, "read", wait_and_read)
        dcp.load({TABLE: target}, storage_reader=cnr.CNRStorageReader(path), no_dist=True)
    return torch.equal(target, torch.load(f"{folder}/expected"))


@contextmanager
def _loading(root: Root, name: str, folder: Path) -> Iterator["Future[bool | int]"]:
    """Somebody else loads a checkpoint, has read its manifests, and goes on when this is left."""
    folder.mkdir()
    torch.save(root.checkpoints[name].values, folder / "expected")
    with ThreadPoolExecutor(1) as threads:
        try:
            outcome = threads.submit(in_child, _load_slowly, root.at(name), str(folder))
            wait_for(folder / "reading")
            yield outcome
        finally:
            (folder / "go on").touch()


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_checkpoint_that_is_being_loaded_stays(tmp_path: Path) -> None:
    """With all that it needs, until the load has ended; then it goes."""
    root, at_ns = Root(tmp_path / "job"), time.time_ns() - DAY_NS
    for number, name in enumerate(["old-0", "old-1", "old-2", "new-0"]):
        root.save(name, at_ns + number, f"old-{number - 1}" if name in ("old-1", "old-2") else None)
    with _loading(root, "old-1", tmp_path / "signals") as outcome:
        plan = plan_prune(root.url, Keep(last=1))
        assert plan.stays["old-1"][0].startswith("leased (a load, until ")
        assert plan.stays["old-0"] == ("needed by old-1",)
        assert run_prune(plan).removed == ("old-2",)
    assert outcome.result() is True
    assert set(prune(root, Keep(last=1)).removed) == {"old-0", "old-1"}
    assert root.directories() == {"new-0"}


@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.parametrize("planned", ["before", "after"])
def test_a_load_by_a_manifest_that_was_replaced_ends(tmp_path: Path, planned: str) -> None:
    """Who began before a compaction finds the packs of that time, also if the prune was planned before he began."""
    root, at_ns = Root(tmp_path / "job"), time.time_ns() - DAY_NS
    root.save("step-0", at_ns)
    root.save("step-1", at_ns + 1, "step-0", range(NUM_ROWS))
    catalogs = []
    with _loading(root, "step-1", tmp_path / "signals") as outcome:
        root.compact("step-1", num_moved=2)
        catalogs.append(read_catalog(root.url))
        plan = plan_prune(catalogs[0], Keep(last=1))
        assert plan.removals == ()
        if planned == "before":  # as if the lease had been taken only now
            entries = {name: _without_leases(entry) for name, entry in catalogs[0].entries.items()}
            plan = plan_prune(dataclasses.replace(catalogs[0], entries=entries), Keep(last=1))
            assert plan.removals != ()
        result = run_prune(plan)
        assert result.removed == ()
        assert all("leased (a load" in reason for reasons in result.failed.values() for reason in reasons)
    assert outcome.result() is True
    assert prune(root, Keep(last=1)).removed == ("step-0",)
    assert root.directories() == {"step-1"}
    root.assert_loads(["step-1"])


def _without_leases(entry: Entry) -> Entry:
    return dataclasses.replace(entry, files={name: size for name, size in entry.files.items() if not is_lease(name)})


def _three_with_a_branch(url: Path | str) -> Root:
    root, at_ns = Root(url), time.time_ns() - DAY_NS
    for number, (name, parent) in enumerate([("a-0", None), ("a-1", "a-0"), ("b-0", None)]):
        root.save(name, at_ns + number, parent, range(5))
    return root


@pytest.mark.parametrize(
    "what", ["lease on the head", "tag", "compaction", "child", "child that is compacted", "save", "damage"]
)
@pytest.mark.parametrize("where", ["local", "memory"])
def test_what_is_wanted_since_the_plan_was_made_stays(tmp_path: Path, where: str, what: str) -> None:
    """A lease, a tag, a new child or a save that begins: what they need stays although it was to go."""
    url = str(tmp_path / "job") if where == "local" else f"memory://prune-{next(numbers)}"
    root = _three_with_a_branch(url)
    plan = plan_prune(root.url, Keep(last=1))
    assert [checkpoint.name for checkpoint in plan.pruned] == ["a-1", "a-0"]
    if what == "lease on the head":
        root.lease("a-1", time.time_ns() + HOUR_NS, "load")
    elif what == "tag":
        tag(root.at("a-1"), "release")
    elif what == "compaction":
        root.compact("a-1", num_moved=2)
    elif what == "save":
        root.put_pack("a-2")
        for name in ("a-2", "a-1"):  # a save holds a lease on its parent, too
            root.lease(name, time.time_ns() + HOUR_NS, "save")
    elif what == "damage":
        root.put("a-2", MANIFEST_FILE, b"no manifest")
    else:
        root.save("a-2", time.time_ns(), "a-1", range(2))
        if what == "child that is compacted":
            root.compact("a-2")
    result = run_prune(plan)
    assert result.removed == ()
    assert set(result.failed) == {"a-0", "a-1"}
    root.assert_loads(root.checkpoints)
    assert pruned_names(root.url) == [], "what is still there was not pruned"
    if where == "memory":
        root.store.fs.rm(root.store.path, recursive=True)


def test_a_child_that_is_committed_between_two_looks_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its save commits, and releases the lease on the parent right before the prune looks for leases."""
    root = _three_with_a_branch(tmp_path / "job")
    plan = plan_prune(root.url, Keep(last=1))
    root.put_pack("a-2")
    for name in ("a-2", "a-1"):
        root.lease(name, time.time_ns() + HOUR_NS, "save")

    def names_after_the_commit(store: Store) -> list[str]:
        if store.path.endswith("/a-1") and "a-2" not in root.checkpoints:
            root.save("a-2", time.time_ns(), "a-1", range(2))
            for lease in (tmp_path / "job").glob("*/*.lease"):
                lease.unlink()
        return names(store)

    names = Store.names
    monkeypatch.setattr(Store, "names", names_after_the_commit)
    assert run_prune(plan).removed == ()
    assert "a-2" in root.checkpoints
    root.assert_loads(root.checkpoints)


def test_a_checkpoint_of_the_same_name_is_not_taken_for_the_one_that_was_to_go(tmp_path: Path) -> None:
    """Who made a plan, and executes it when another has done so and the job has saved again, removes nothing new."""
    root = _three_with_a_branch(tmp_path / "job")
    root.put_pack("a-2")
    root.lease("a-2", time.time_ns() - 1, "save")
    old = plan_prune(root.url, Keep(last=1))
    prune(root, Keep(last=1))
    assert root.directories() == {"b-0"}
    root.save("a-0", time.time_ns())
    root.save("a-1", time.time_ns() + 1, "a-0", range(2))
    root.save("a-2", time.time_ns() + 2, "a-1", range(2))
    before = root.files()
    result = run_prune(old)
    assert result.removed == ()
    assert set(result.failed) == {"a-0", "a-1", "a-2"}
    assert root.files() == before
    root.assert_loads(root.checkpoints)


def test_what_a_checkpoint_of_the_same_name_stands_on_stays(tmp_path: Path) -> None:
    """Although the one that was there when the plan was made stood on another."""
    root, at_ns = Root(tmp_path / "job"), time.time_ns() - DAY_NS
    for number, (name, parent) in enumerate([("c-0", None), ("a-0", None), ("a-1", "a-0"), ("b-0", None)]):
        root.save(name, at_ns + number, parent, range(5))
    old = plan_prune(root.url, Keep(last=1))
    assert [checkpoint.name for checkpoint in old.pruned] == ["a-1", "a-0", "c-0"]
    shutil.rmtree(tmp_path / "job" / "a-1")
    root.save("a-1", time.time_ns(), "c-0", range(2))
    assert set(run_prune(old).failed) == {"a-1", "a-0", "c-0"}
    root.assert_loads(["a-1"])


def _prune_in_turn(root: str, keep: Keep, folder: str) -> PruneResult:
    plan = plan_prune(root, keep)
    Path(folder, f"planned-{os.getpid()}").touch()
    wait_for(Path(folder, "go on"))
    return run_prune(plan)


@pytest.mark.parametrize("other", [Keep(last=2), Keep(last=3, best=Best("auc"))], ids=["same", "other"])
def test_two_prunes_at_once(tmp_path: Path, other: Keep) -> None:
    """What both keep is there, and loads; what either removes is gone; no file is missed as a failure."""
    root = _busy_root(str(tmp_path / "job"))
    keeps = (Keep(last=2), other)
    kept = set.intersection(*({*plan_prune(root.url, keep).stays} & set(root.checkpoints) for keep in keeps))
    kept -= {name for keep in keeps for name in (pruned.name for pruned in plan_prune(root.url, keep).pruned)}
    with ThreadPoolExecutor(2) as threads:
        outcomes = [threads.submit(in_child, _prune_in_turn, root.url, keep, str(tmp_path)) for keep in keeps]
        while len(list(tmp_path.glob("planned-*"))) < 2:
            time.sleep(0.01)
        (tmp_path / "go on").touch()
        for outcome in outcomes:
            result = outcome.result()
            assert isinstance(result, PruneResult)
            assert result.failed == {}
    assert set(read_catalog(root.url).checkpoints) == kept
    root.assert_loads(kept)
    prune(root, keeps[0])
    prune(root, keeps[1])
    assert plan_prune(root.url, keeps[1]).is_empty


def test_another_prune_may_have_removed_what_a_plan_keeps(tmp_path: Path) -> None:
    """Its directory is not there to be forced to disk, and that is no error."""
    root = _busy_root(str(tmp_path / "job"))
    plan = plan_prune(root.url, Keep(last=4))
    assert plan.pruned
    prune(root, Keep(last=1))
    kept = set(read_catalog(root.url).checkpoints)
    assert {*plan.stays} - kept
    assert run_prune(plan).failed == {}
    assert set(read_catalog(root.url).checkpoints) == kept
    root.assert_loads(kept)


# Stores that refuse.


def _prune_as_nobody(root: str, keep: Keep) -> PruneResult:
    """Without the privileges by which a test may write everywhere."""
    become_nobody()
    return prune(root, keep)


def test_a_directory_that_cannot_be_written_is_pruned_later(open_folder: Path) -> None:
    """What is in it stays with all that it needs, and is told; the rest goes. Once it can be written it goes, too."""
    root, at_ns = Root(open_folder / "job"), time.time_ns() - DAY_NS
    parents = {"a-0": None, "a-1": "a-0", "b-0": None, "b-1": "b-0", "c-0": None}
    for number, (name, parent) in enumerate(parents.items()):
        root.save(name, at_ns + number, parent, range(5))
    give_to_nobody(open_folder / "job")
    (open_folder / "job" / "a-1").chmod(0o555)
    result = in_child(_prune_as_nobody, root.url, Keep(last=1))
    assert isinstance(result, PruneResult)
    assert set(result.removed) == {"b-0", "b-1"}
    assert "cannot remove" in result.failed["a-1"][0]
    assert result.failed["a-0"] == ("needed by a-1, which is kept",)
    root.assert_loads(["a-0", "a-1", "c-0"])
    assert pruned_names(root.url) == ["b-0", "b-1"], "what is still there was not pruned"
    (open_folder / "job" / "a-1").chmod(0o755)
    assert set(prune(root, Keep(last=1)).removed) == {"a-0", "a-1"}
    assert root.directories() == {"c-0"}


def test_packs_that_cannot_be_removed_are_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a checkpoint's packs nor those of a save that died are forgotten when their removal fails once."""
    root = _three_with_a_branch(tmp_path / "job")
    root.put_pack("died")
    root.lease("died", time.time_ns() - 1, "save")
    remove = Store.remove

    def refuse_packs(self: Store, name: str, is_durable: bool = False) -> None:
        if name.endswith(".safetensors"):
            raise StoreError(f"cannot remove {name}: the store has a bad day")
        remove(self, name, is_durable)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "remove", refuse_packs)
        result = prune(root, Keep(last=1))
    assert set(result.failed) == {"a-0", "a-1", "died"}
    assert set(result.removed) == {"a-0", "a-1"}
    assert root.directories() == {"a-0", "a-1", "b-0", "died"}
    again = prune(root, Keep(last=1))
    assert again.removed == ()
    assert again.failed == {}
    assert root.directories() == {"b-0"}


def test_a_checkpoint_is_removed_later_if_the_answer_about_its_manifest_was_lost(tmp_path: Path) -> None:
    """The manifest is gone, though its removal failed: the next prune still knows whose the packs are."""
    root = _three_with_a_branch(tmp_path / "job")
    with FaultyStore(root.url) as store:
        run_prune(plan_prune(store.url, Keep(last=1)))
        operations = [*store.operations]
    shutil.rmtree(tmp_path / "job")
    root = _three_with_a_branch(tmp_path / "job")
    manifest = 1 + [(asked.kind, asked.path) for asked in operations].index(("remove", f"a-1/{MANIFEST_FILE}"))
    with FaultyStore(root.url) as store:
        store.faults[manifest] = Fault.LOSE
        result = run_prune(plan_prune(store.url, Keep(last=1)))
    assert "a-1" in result.failed
    assert not (tmp_path / "job" / "a-1" / MANIFEST_FILE).exists()
    assert any((tmp_path / "job" / "a-1").iterdir())
    assert prune(root, Keep(last=1)).failed == {}
    assert root.directories() == {"b-0"}


def _prune_on_a_full_disk(folder: str) -> str:
    try:
        with small_disk(f"{folder}/disk", 256 << 10):
            root = _three_with_a_branch(f"{folder}/disk/job")
            with suppress(OSError), open(f"{folder}/disk/filler", "wb", buffering=0) as filler:
                while True:
                    filler.write(bytes(4096))
            before = root.files()
            with pytest.raises(StoreError) as raised:
                prune(root, Keep(last=1))
            assert raised.value.errno == errno.ENOSPC
            assert root.files() == before
            root.assert_loads(root.checkpoints)
            os.unlink(f"{folder}/disk/filler")
            assert set(prune(root, Keep(last=1)).removed) == {"a-0", "a-1"}
            assert root.directories() == {"b-0"}
    except PermissionError as error:
        return f"no disk to fill here: {error}"
    return "done"


def test_nothing_is_removed_where_the_journal_cannot_be_written(tmp_path: Path) -> None:
    """On a full disk a prune fails before it has removed anything; with room for the journal it works."""
    outcome = in_child(_prune_on_a_full_disk, str(tmp_path))
    if outcome != "done":
        pytest.skip(str(outcome))


def test_progress_is_told(tmp_path: Path) -> None:
    """From the first directory to the last, in files."""
    root = _busy_root(str(tmp_path))
    told: list[tuple[int, int]] = []
    plan = plan_prune(root.url, KEEP)
    run_prune(plan, progress=lambda done, of: told.append((done, of)))
    assert len(told) == len(plan.removals)
    assert told == sorted(told)
    assert told[-1] == (told[-1][1], sum(len(removal.files) for removal in plan.removals))


def test_what_is_kept_is_durable_before_anything_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that committed it may have been killed before the name of its manifest was."""
    root = Root(tmp_path)
    for number in range(3):
        root.save(f"step-{number}", time.time_ns() - (9 - number) * HOUR_NS)
    done: list[str] = []
    fsync, remove = os.fsync, Store.remove

    def fsync_and_note(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def remove_and_note(store: Store, name: str, is_durable: bool = False) -> None:
        if name == MANIFEST_FILE:
            done.append(f"remove {name}")
        remove(store, name, is_durable)

    monkeypatch.setattr(os, "fsync", fsync_and_note)
    monkeypatch.setattr(Store, "remove", remove_and_note)
    prune(str(tmp_path), Keep(last=1))
    assert root.directories() >= {"step-2"}
    assert str(tmp_path / "step-2") in done[: done.index(f"remove {MANIFEST_FILE}")]

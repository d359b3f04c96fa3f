"""Mutants of saves, restores and commits."""

from types import SimpleNamespace
from typing import Any

from tests.simulator.engine.scheduler import this_task
from tests.simulator.mutants.replacing import Mutant, both, nothing, replacing, wrapping
from torchrec_cnr.errors import CNRError, StoreError
from torchrec_cnr.format.manifest import MANIFEST_FILE, PACK_SUFFIX
from torchrec_cnr.lineage import latest as newest
from torchrec_cnr.loading import planner as load_planner
from torchrec_cnr.manager import restore as restoring
from torchrec_cnr.saving import agreement, commit, cut, planned_save, plug_in_messages, running_saves, staging, writer
from torchrec_cnr.saving import planner as save_planner
from torchrec_cnr.saving.plug_in_messages import STAGED
from torchrec_cnr.storage.fences import Fence
from torchrec_cnr.storage.store import Store
from torchrec_cnr.tracking.modified_rows import ModifiedRows


def _puts_packs_late(put: Any, store: Store, name: str, parts: Any, is_durable: bool = True) -> None:
    """Packs are written when whoever wrote them has gone on."""
    task = this_task()
    if task is None or not name.endswith(PACK_SUFFIX):
        put(store, name, parts, is_durable)
        return
    data = [bytes(part) for part in parts]

    def later() -> None:
        task.sim.sleep(0.2)
        put(store, name, data, is_durable)

    task.sim.spawn(task.process, f"{task.process.name}/late", later)


def _commit(
    store: Store,
    file: Any,
    lease: Any,
    fence: Any,
    *,
    parent: bool = True,
    checks_lease: bool = True,
    fences: bool = True,
) -> None:
    """The commit, without some of its checks."""
    above = file.manifest.parent
    if parent and above is not None and not store.at(above.path).exists(MANIFEST_FILE):
        raise commit.SaveError("the parent was pruned")
    if checks_lease and lease is not None and lease.is_lost():
        raise commit.SaveError("the lease is lost")
    if fences and fence is not None:
        fence.check()
    store.put_new(MANIFEST_FILE, file.data, file.manifest.save_id)


def _overwrites(store: Store, name: str, data: bytes, save_id: str) -> None:
    store.put(name, [data])


def _swallows(put_new: Any, store: Store, name: str, data: bytes, save_id: str) -> None:
    try:
        put_new(store, name, data, save_id)
    except StoreError:
        return


class _OfProcess:
    """One for all threads of a process."""

    def _values(self) -> dict[Any, Any]:
        task = this_task()
        owner = task.process.own if task is not None else {}
        found: dict[Any, Any] = owner.setdefault("shared state", {})
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values()[name]
        except KeyError as error:
            raise AttributeError(name) from error

    def __setattr__(self, name: str, value: Any) -> None:
        self._values()[name] = value


def _raises_alone(stage: Any, *args: Any, **kwargs: Any) -> Any:
    staged = stage(*args, **kwargs)
    if staged[STAGED].failure is not None:
        raise staged[STAGED].failure
    return staged


def _shares_too_late(shared: Any, value: Any, group: Any) -> Any:
    if isinstance(value, CNRError):
        raise value
    return shared(value, group)


def _drops(rows: ModifiedRows) -> None:
    rows._spare, rows._frozen = rows._frozen, None


def _commits_all(commit_rows: Any, rows: ModifiedRows, *args: Any, **kwargs: Any) -> None:
    commit_rows(rows, *args, **kwargs)
    rows.marked.zero_()


def _of_any_save(path: Any, save_id: str) -> Any:
    try:
        return cut.read_checkpoint(path)  # type: ignore[attr-defined]
    except CNRError:
        return None


def _by_name(listed: Any, store: Store, level: int) -> float | None:
    found = listed(store, level)
    digits = int.from_bytes(store.path.rpartition("/")[2].encode()[:20].ljust(20, b"\0"), "big")
    return None if found is None else float(digits)


def _with_own_head(choose: Any, policy: Any, head: Any, heads: Any, baseline: Any, store: Any) -> Any:
    return choose(policy, head, [head.ref] if head is not None else heads, baseline, store)


def _has_always_ended(save: Any) -> bool:
    return True


def _no_time_after(file_of: Any, store: Any, decision: Any, *args: Any) -> Any:
    return file_of(store, commit.replace(decision, after_ns=0), *args)


OF_SAVES: tuple[Mutant, ...] = (
    Mutant("packs are written after the manifest", lambda: wrapping(Store, "put", _puts_packs_late)),
    Mutant(
        "neither a put nor a commit looks at what was put",
        lambda: both(replacing(Store, "_check_whole", nothing), replacing(commit, "_refuse_missing_packs", nothing)),
    ),
    Mutant("a manifest overwrites another", lambda: replacing(Store, "put_new", _overwrites)),
    Mutant("an error of the commit is swallowed", lambda: wrapping(Store, "put_new", _swallows)),
    Mutant("the fence is not checked at the commit", lambda: replacing(Fence, "check", nothing)),
    Mutant("no fence is claimed", lambda: replacing(Fence, "claim", nothing)),
    Mutant(
        "the state of a save is shared by all threads", lambda: replacing(plug_in_messages, "_threads", _OfProcess())
    ),
    Mutant(
        "the state of a plan is shared by all threads of its planner",
        lambda: replacing(save_planner, "threading", SimpleNamespace(local=SimpleNamespace)),
    ),
    Mutant(
        "the path of a save is shared by all threads of its writer",
        lambda: replacing(writer, "threading", SimpleNamespace(local=SimpleNamespace)),
    ),
    Mutant(
        "a save does not wait for those before",
        lambda: replacing(running_saves.RunningSave, "wait", nothing),
    ),
    Mutant(
        "every save counts as ended",
        lambda: replacing(running_saves.RunningSave, "has_ended", property(_has_always_ended)),
    ),
    Mutant(
        "training goes on before what was not staged is written",
        lambda: replacing(plug_in_messages.StagedSave, "wait_for_live", nothing),
    ),
    Mutant("staging raises on one rank alone", lambda: wrapping(writer, "stage", _raises_alone)),
    Mutant("a restore raises on one rank alone", lambda: wrapping(restoring, "shared", _shares_too_late)),
    Mutant("rows of a save that failed are not marked again", lambda: replacing(ModifiedRows, "rollback", _drops)),
    Mutant(
        "a commit drops the rows that were marked since the cut", lambda: wrapping(ModifiedRows, "commit", _commits_all)
    ),
    Mutant(
        "rows of restored deltas do not count for the baseline",
        lambda: replacing(ModifiedRows, "restore_rows", nothing),
    ),
    Mutant(
        "any save at the same place counts as the one that failed", lambda: replacing(cut, "committed", _of_any_save)
    ),
    Mutant("checkpoints are ordered by their names", lambda: wrapping(newest, "committed_ns", _by_name)),
    Mutant("heads of other ranks are not compared", lambda: wrapping(planned_save, "choose_base", _with_own_head)),
    Mutant("ranks may load different checkpoints", lambda: replacing(load_planner, "_refuse_different", nothing)),
    Mutant("the time of a commit may be before its parent's", lambda: wrapping(writer, "file_of", _no_time_after)),
    Mutant(
        "ranks may save to two roots",
        lambda: both(replacing(agreement, "_compare", nothing), replacing(commit, "_refuse_missing_packs", nothing)),
    ),
    Mutant("rows are staged by reference", lambda: replacing(staging, "_copy", _by_reference)),
)


def _by_reference(wanted: Any, buffer: Any) -> Any:
    return wanted.source if wanted.numbers is None else wanted.source[wanted.numbers]

"""Mutants of leases, pruning and compaction."""

from collections.abc import Iterator
from typing import Any

from tests.simulator.mutants.replacing import Mutant, both, nothing, replacing, wrapping
from torchrec_cnr.errors import SaveError
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.maintenance.catalog import Catalog, Entry
from torchrec_cnr.maintenance.compaction import compact
from torchrec_cnr.maintenance.pruning import execute, kept
from torchrec_cnr.saving import plug_in_messages, writer
from torchrec_cnr.storage.leases import Lease
from torchrec_cnr.storage.store import Store


def _no_leases(*_: Any) -> list[Any]:
    return []


def _commit_unchecked(store: Store, file: Any, lease: Any, fence: Any) -> None:
    """Neither the parent nor the lease is looked at."""
    if fence is not None:
        fence.check()
    store.put_new(MANIFEST_FILE, file.data, file.manifest.save_id)


def _commit_without_parent(store: Store, file: Any, lease: Any, fence: Any) -> None:
    if lease is not None and lease.is_lost():
        raise SaveError("the lease is lost")
    _commit_unchecked(store, file, lease, fence)


def _ignores_leases() -> Any:
    return both(
        replacing(Entry, "leases", _no_leases),
        replacing(execute, "in_force", _no_leases),
    )


def _alone(needed_by: Any, catalog: Catalog, names: Any, loading: Any = ()) -> Any:
    """What is kept does not keep its parents."""
    needs = needed_by(catalog, names, loading)
    own = {name: by for name, by in needs.checkpoints.items() if name in set(names)}
    return kept.replace(needs, checkpoints=own)


def _own_packs(uses: Any, catalog: Catalog, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Packs that lie in directories of other checkpoints are not seen."""
    own = catalog.name_of(checkpoint.store)
    return (found for found in uses(catalog, checkpoint) if found[0] == own)


def _manifest_last(remove: Any, execution: Any, removal: Any) -> None:
    if execution._why_not(removal) is None:
        execution._remove_files(removal)
    remove(execution, removal)


def _releases_at_once(take: Any, store: Store, purpose: Any) -> Any:
    lease = take(store, purpose)
    if lease is not None:
        lease.release()
    return lease


def _overwrites(newest: Checkpoint, data: bytes, save_id: str) -> None:
    newest.store.put(compact._name(newest), [data])


def _lapses_at_once(prepare: Any, self: Any, plan: Any) -> Any:
    found = prepare(self, plan)
    save = writer._save_of_thread()
    if save.lease is not None:
        save.lease.lapse()
    return found


OF_UPKEEP: tuple[Mutant, ...] = (
    Mutant(
        "a prune ignores leases, and a commit does not look at its own",
        lambda: both(_ignores_leases(), replacing(writer, "commit", _commit_unchecked)),
    ),
    Mutant("a prune ignores leases", _ignores_leases),
    Mutant(
        "the lease of a save ends before it commits",
        lambda: both(
            wrapping(writer.CNRStorageWriter, "prepare_local_plan", _lapses_at_once),
            replacing(Lease, "is_lost", lambda lease, listed=(): False),
        ),
    ),
    Mutant(
        "the lease of a save is released early, and it does not look at its parent",
        lambda: both(wrapping(Lease, "take", _releases_at_once), replacing(writer, "commit", _commit_unchecked)),
    ),
    Mutant(
        "a prune does not look for what was committed meanwhile",
        lambda: replacing(execute._Execution, "_take_in_newcomers", nothing),
    ),
    Mutant(
        "a prune removes parents of what is kept",
        lambda: both(wrapping(kept, "needed_by", _alone), wrapping(execute, "needed_by", _alone)),
    ),
    Mutant("a prune removes packs that others use", lambda: wrapping(Catalog, "uses", _own_packs)),
    Mutant(
        "a save takes no lease on its parent, nor does its commit look for it",
        lambda: both(
            replacing(plug_in_messages.WriterSave, "protect_bases", lambda *_: True),
            replacing(writer, "commit", _commit_without_parent),
        ),
    ),
    Mutant("a prune removes the manifest last", lambda: wrapping(execute._Execution, "remove", _manifest_last)),
    Mutant("a compaction replaces another one", lambda: replacing(compact, "commit_replacement", _overwrites)),
    Mutant(
        "a compaction drops its packs although it may have committed",
        lambda: replacing(compact, "may_have_committed", lambda *_: False),
    ),
    Mutant("the lease of what may yet be committed is released", lambda: replacing(Lease, "leave", nothing)),
)

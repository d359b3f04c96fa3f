"""Mutants of ``CheckpointManager``, its maintenance and its restores."""

from collections.abc import Callable
from typing import Any

from tests.simulator.mutants.replacing import Mutant, both, nothing, replacing, wrapping
from torchrec_cnr.errors import CheckpointExistsError, CNRError
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.lineage.checkpoint import read_checkpoint
from torchrec_cnr.maintenance.background_upkeep import Upkeep
from torchrec_cnr.maintenance.compaction import plan
from torchrec_cnr.manager import continuation, local_checkpoints
from torchrec_cnr.manager.callbacks import Callbacks
from torchrec_cnr.manager.continuation import Continuation
from torchrec_cnr.manager.manager import CheckpointManager
from torchrec_cnr.saving import planned_save, writer
from torchrec_cnr.saving.writer import CNRStorageWriter
from torchrec_cnr.storage.store import Store


def _no_other_root(pack: Any) -> bool:
    return False


def _looks_before_it_claims(prepare: Any, self: CNRStorageWriter, local_plan: Any) -> Any:
    """The taken id is looked at before the root is claimed."""
    store = writer._save_of_thread().store
    if store.exists(MANIFEST_FILE):
        raise CheckpointExistsError(f"{store.url} holds a committed checkpoint already")
    return prepare(self, local_plan)


def _raises_in_upkeep(progress: Any, self: Callbacks, what: str, num_done: int, num_total: int) -> None:
    """What a callback raises in maintenance is not caught."""
    if what in ("compact", "prune") and self._on_progress is not None:
        self._on_progress(what, num_done, num_total)
    else:
        progress(self, what, num_done, num_total)


def _ends_by_foreign_errors(upkeep: Upkeep) -> None:
    while (path := upkeep._next()) is not None:
        try:
            upkeep.run_for(read_checkpoint(Store.open(path)))
        except CNRError:
            upkeep.num_errors += 1


def _settles_alone(finish: Any, self: CheckpointManager, step: int, *args: Any) -> Any:
    self._planner.resolve_last_save()
    return finish(self, step, *args)


def _resolves_alone(save: Any, self: CheckpointManager, *args: Any) -> Any:
    self._planner.resolve_last_save()
    return save(self, *args)


def _with_own_baseline(choose: Any, policy: Any, head: Any, heads: Any, baseline: Any, store: Any) -> Any:
    return choose(policy, head, heads, head.baseline if head is not None else baseline, store)


def _no_names(*_: Any) -> frozenset[str]:
    return frozenset()


def _forgets_what_came_meanwhile(run_for: Any, self: Upkeep, checkpoint: Any) -> None:
    run_for(self, checkpoint)
    self._waiting = None


def _does_nothing_more(close: Any, self: Upkeep) -> None:
    self._waiting = None
    close(self)


def _calls(self: Callbacks, name: str, callback: Callable[..., None] | None, *args: Any) -> None:
    if callback is not None:
        callback(*args)


def _crosses() -> Any:
    return replacing(Continuation, "leave_other_roots", nothing)


OF_MANAGER: tuple[Mutant, ...] = (
    Mutant("a manager saves a delta of a checkpoint of another root", _crosses),
    Mutant(
        "a manager saves a delta of a checkpoint of another root, and a compaction takes over packs from there",
        lambda: both(_crosses(), replacing(plan, "lies_in_other_root", _no_other_root)),
    ),
    Mutant(
        "a taken id is looked at before the root is claimed",
        lambda: both(
            replacing(local_checkpoints, "claimed", nothing),
            wrapping(CNRStorageWriter, "prepare_local_plan", _looks_before_it_claims),
        ),
    ),
    Mutant(
        "a callback that raises ends the thread of maintenance",
        lambda: both(
            wrapping(Callbacks, "progress", _raises_in_upkeep), replacing(Upkeep, "_run", _ends_by_foreign_errors)
        ),
    ),
    Mutant(
        "a manager raises on one rank after a commit", lambda: wrapping(CheckpointManager, "_finish", _settles_alone)
    ),
    Mutant(
        "a manager raises on one rank before a save",
        lambda: wrapping(CheckpointManager, "_save", _resolves_alone),
    ),
    Mutant(
        "a return to an older checkpoint abandons nothing", lambda: replacing(continuation, "abandon_newer", nothing)
    ),
    Mutant(
        "names that are taken are used again after a return", lambda: replacing(continuation, "names_behind", _no_names)
    ),
    Mutant(
        "maintenance forgets what was committed while it worked",
        lambda: wrapping(Upkeep, "run_for", _forgets_what_came_meanwhile),
    ),
    Mutant(
        "baselines of other ranks are not compared",
        lambda: wrapping(planned_save, "choose_base", _with_own_baseline),
    ),
    Mutant("a manager closes without its last maintenance", lambda: wrapping(Upkeep, "close", _does_nothing_more)),
    Mutant("what a callback raises is raised by the save", lambda: replacing(Callbacks, "_call", _calls)),
)

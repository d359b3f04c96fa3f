"""Mutants of clocks, of the end of the interpreter, and of what is left in a process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.simulator.engine.virtual import time_module
from tests.simulator.mutants.replacing import Mutant, both, replacing, wrapping
from torchrec_cnr.errors import CNRError, SaveError, StoreError
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.manager import restore
from torchrec_cnr.saving import writer
from torchrec_cnr.saving.running_saves import RunningSave, RunningSaves
from torchrec_cnr.storage import leases
from torchrec_cnr.storage.store import Store


def _own_clock(store: Store) -> int:
    return int(time_module.time_ns())


def _by_name(lease: leases.Lease, now_ns: int) -> int:
    return lease.until_ns


def _commit_by_own_clock(store: Store, file: Any, lease: Any, fence: Any) -> None:
    """A lease that somebody has removed is not missed."""
    parent = file.manifest.parent
    if parent is not None and not store.at(parent.path).exists(MANIFEST_FILE):
        raise SaveError("the parent was pruned")
    if lease is not None and lease.has_run_out:
        raise SaveError("the lease has run out")
    if fence is not None:
        fence.check()
    store.put_new(MANIFEST_FILE, file.data, file.manifest.save_id)


def _hooks(is_there: bool) -> list[Any]:
    """What is called at the end of the interpreter, without ours, or with ours when pools refuse work already."""
    found: list[Any] = threading._threading_atexits  # type: ignore[attr-defined]
    ours = [call for call in found if isinstance(getattr(call.func, "__self__", None), RunningSaves)]
    return [*(ours if is_there else ()), *(call for call in found if call not in ours)]


def _keeps(saves: RunningSaves, save: RunningSave) -> None:
    """A save that has ended is cleaned up, and stays in the registry."""
    if not save.is_cleaned_up:
        save.is_cleaned_up = True
        if save.at_end is not None:
            save.at_end()


def _guessed_time(now_ns: Callable[[Store], int], store: Store) -> int:
    try:
        return now_ns(store)
    except StoreError:
        return _own_clock(store)


@contextmanager
def _errors(store: Store, action: str, name: str) -> Iterator[None]:
    try:
        yield
    except CNRError:
        raise
    except Exception as error:
        failure = store._failure(action, name, error)
        raise failure from error


def _shared(value: Any, group: Any) -> Any:
    values = [value]
    if group is not None:
        restore.dist.broadcast_object_list(values, src=restore.dist.get_global_rank(group, 0), group=group)
    if isinstance(values[0], CNRError):
        raise values[0]
    return values[0]


OF_PROCESSES: tuple[Mutant, ...] = (
    Mutant(
        "a prune goes by its own clock, and a commit does not look whether its lease is there",
        lambda: both(
            replacing(Store, "now_ns", _own_clock),
            replacing(leases, "_until_ns", _by_name),
            replacing(writer, "commit", _commit_by_own_clock),
        ),
    ),
    Mutant(
        "a prune goes by its own clock if the store does not tell it, and a commit does not look for its lease",
        lambda: both(wrapping(Store, "now_ns", _guessed_time), replacing(writer, "commit", _commit_by_own_clock)),
    ),
    Mutant("a lease of a clock that is behind has run out", lambda: replacing(leases, "_until_ns", _by_name)),
    Mutant(
        "the interpreter does not wait for saves",
        lambda: replacing(threading, "_threading_atexits", _hooks(is_there=False)),
    ),
    Mutant(
        "the interpreter waits for saves when pools refuse work already",
        lambda: replacing(threading, "_threading_atexits", _hooks(is_there=True)),
    ),
    Mutant("a save that has ended stays in the registry", lambda: replacing(RunningSaves, "_clean_up", _keeps)),
    Mutant("errors of stores keep what their callers hold", lambda: replacing(Store, "_errors", _errors)),
    Mutant("an error of a restore keeps what its callers hold", lambda: replacing(restore, "shared", _shared)),
)

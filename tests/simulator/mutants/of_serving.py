"""Mutants of online model updates."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.simulator.mutants.replacing import Mutant, replacing, wrapping
from torchrec_cnr.serving import commit_sources, served_model, update
from torchrec_cnr.serving.commit_sources import RootCommits
from torchrec_cnr.serving.forward_lock import ForwardLock
from torchrec_cnr.serving.subscriber import RowSubscriber


@contextmanager
def _unlocked(lock: ForwardLock) -> Iterator[None]:
    yield


def _goes_back(look: Any, commits: RootCommits, name: str) -> None:
    """What may not be read just now counts as gone."""
    if commit_sources.committed_ns(commits._root.at(name), 0) is None:
        commits._commits.pop(name, None)
        commits._pending.add(name)
    else:
        look(commits, name)


def _follows_until_it_fails(served: RowSubscriber) -> None:
    while not served._is_closed.is_set():
        try:
            served._commits.wait(served._interval_secs)
            served._update()
        except Exception:  # noqa: BLE001 - whatever it is, that was all
            return


def _closes_at_once(served: RowSubscriber) -> None:
    served._is_closed.set()
    served._commits.close()
    served._served.close()


def _commit_first(apply: Any, served: served_model.ServedModel, commit: Any) -> Any:
    """What is going to be applied counts as applied."""
    before = served._state
    if before is not None:
        served._state = served_model.replace(before, commit=commit)
    return apply(served, commit)


OF_SERVING: tuple[Mutant, ...] = (
    Mutant("lookups do not wait while rows are swapped in", lambda: replacing(ForwardLock, "shared", _unlocked)),
    Mutant(
        "a checkpoint counts as applied before it is",
        lambda: wrapping(served_model.ServedModel, "apply", _commit_first),
    ),
    Mutant(
        "a checkpoint that may not be read counts as gone to a subscriber",
        lambda: wrapping(RootCommits, "_look_at", _goes_back),
    ),
    Mutant("a subscriber ends when it fails", lambda: replacing(RowSubscriber, "_follow", _follows_until_it_fails)),
    Mutant("close() does not wait for the subscriber", lambda: replacing(RowSubscriber, "_close", _closes_at_once)),
    Mutant(
        "a subscriber does not read what deltas hold", lambda: replacing(update.UpdateRows, "swap_in", lambda _: None)
    ),
)

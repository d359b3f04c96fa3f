"""Conformance: does a file system keep what checkpoints are built on?

::

    @pytest.mark.parametrize("check", conformance_checks(), ids=str)
    def test_our_store_keeps_checkpoints(check: ConformanceCheck) -> None:
        check("s3://bucket/tests")

``python -m torchrec_cnr.testing s3://bucket/tests`` runs them from the command line.
"""

import inspect
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from torchrec_cnr.errors import CNRError, StoreError
from torchrec_cnr.storage.store import Store
from torchrec_cnr.testing import checks
from torchrec_cnr.testing.checks import LARGE_BYTES
from torchrec_cnr.testing.faults import Fault
from torchrec_cnr.testing.racing import race
from torchrec_cnr.testing.trips import trip, trips_with

NUM_FAULTS = 8
Act = Callable[[Store], object]

_PROMISES: Sequence[tuple[str, Act]] = (
    ("whole files", checks.whole_files),
    ("ranged reads", checks.ranges),
    ("listing after a write", checks.listings),
    ("absent or no answer", checks.absence),
    ("removal", checks.removal),
    ("odd names", checks.odd_names),
    ("many at once", checks.at_once),
    ("times", checks.times),
    ("exclusive create", checks.exclusive),
    ("one winner", race),
    ("own commit again", checks.own_commit),
    ("half a commit", checks.half_commit),
)


@dataclass(frozen=True)
class ConformanceCheck:
    """One promise that a file system must keep; call it to see whether it does.

    Attributes:
        name: In two or three words.
        promise: In a sentence.
        act: Sees whether an empty directory keeps it.
    """

    name: str
    promise: str
    act: Act

    def __call__(self, url: str) -> None:
        """Check a file system, in a new directory that is removed afterwards.

        Args:
            url: A directory in it, path or fsspec URL.

        Raises:
            StoreError: The promise was broken: what was expected, and what came.
            ConfigurationError: The URL cannot be opened.
        """
        store = Store.open(url, sync_files=False).at(f"conformance-{uuid.uuid4().hex[:12]}")
        store.make()
        try:
            self.act(store)
        except CNRError as error:
            raise StoreError(f"{self.name}: {self.promise} Not so at {url}: {error}") from error
        finally:
            with suppress(CNRError):
                _remove(store)

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


@dataclass(frozen=True)
class Outcome:
    """What became of a check.

    Attributes:
        check: Which.
        problem: Why the promise was broken; None if it was kept.
        secs: How long it took.
    """

    check: ConformanceCheck
    problem: str | None
    secs: float


def conformance_checks(*, num_faults: int = NUM_FAULTS, large_bytes: int = LARGE_BYTES) -> Sequence[ConformanceCheck]:
    """All checks, each for itself; in order, so that the first that fails tells most.

    Args:
        num_faults: Round trips of a small job with each kind of fault.
        large_bytes: How large the largest file is.
    """
    acts: list[tuple[str, Act]] = [
        *_PROMISES,
        ("a large file", partial(checks.streams, large_bytes=large_bytes)),
        ("round trip", trip),
    ]
    found = [ConformanceCheck(name, _promise_of(act), act) for name, act in acts]
    for fault in Fault:
        if fault is not Fault.CRASH:
            what = f"The same, where an operation on the way meets a fault: {fault.value}."
            act = partial(trips_with, fault=fault, num_faults=num_faults)
            found.append(ConformanceCheck(f"round trip, {fault.value}", what, act))
    return tuple(found)


def run_conformance(url: str, found: Sequence[ConformanceCheck]) -> Iterator[Outcome]:
    """Check a file system, and say what became of each check when it is done."""
    for check in found:
        began = time.monotonic()
        try:
            check(url)
        except StoreError as error:
            yield Outcome(check, str(error.__cause__ or error), time.monotonic() - began)
        else:
            yield Outcome(check, None, time.monotonic() - began)


def _promise_of(act: Callable[..., object]) -> str:
    documented = act.func if isinstance(act, partial) else act
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def _remove(store: Store) -> None:
    """Remove a directory and all that is in it."""
    found = store.listing()
    for name in found.files:
        store.remove(name)
    for name in found.directories:
        _remove(store.at(name))
    store.remove_directory()

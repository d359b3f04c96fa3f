"""Conformance checks: whether a file system meets the storage requirements of checkpoints.

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
    """A storage requirement and its check; call the object to check a file system.

    Attributes:
        name: Name of the check, in two or three words.
        promise: The storage requirement, in a sentence.
        act: Raises an error if an empty directory does not meet the requirement.

    Examples:
        >>> from torchrec_cnr.testing import conformance_checks
        >>> check = conformance_checks()[0]
        >>> print(check.name, "-", check.promise)
        whole files - A file that was written is read back completely, also by other clients.
        >>> check("memory://tests")
    """

    name: str
    promise: str
    act: Act

    def __call__(self, url: str) -> None:
        """Check a file system, in a new directory that is removed afterwards.

        Args:
            url: A directory in the file system, as a path or fsspec URL.

        Raises:
            StoreError: The requirement is not met; the message has the expected and the actual result.
            ConfigurationError: The URL cannot be opened.
        """
        store = Store.open(url, sync_files=False).at(f"conformance-{uuid.uuid4().hex[:12]}")
        store.make()
        try:
            self.act(store)
        except CNRError as error:
            raise StoreError(f"{self.name}: {self.promise} Not met at {url}: {error}") from error
        finally:
            with suppress(CNRError):
                _remove(store)

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check.

    Attributes:
        check: The check.
        problem: The error message if the check failed; None if it passed.
        secs: Duration of the check, in seconds.

    Examples:
        >>> from torchrec_cnr.testing import conformance_checks, run_conformance
        >>> outcome = next(run_conformance("memory://tests", conformance_checks()))
        >>> outcome.check.name, outcome.problem
        ('whole files', None)
    """

    check: ConformanceCheck
    problem: str | None
    secs: float


def conformance_checks(*, num_faults: int = NUM_FAULTS, large_bytes: int = LARGE_BYTES) -> Sequence[ConformanceCheck]:
    """Return all checks, which are independent of each other.

    The simplest requirements come first, so the first check that fails shows most about the cause.

    Args:
        num_faults: Number of round trips of a small job with each kind of fault, by default 8.
        large_bytes: Size of the large file, in bytes, by default 64 MiB.

    Examples:
        >>> from torchrec_cnr.testing import conformance_checks
        >>> checks = conformance_checks(num_faults=2, large_bytes=8 << 20)
        >>> len(checks)
        20
        >>> checks[0]("memory://tests")  # raises an error if the requirement is not met
    """
    acts: list[tuple[str, Act]] = [
        *_PROMISES,
        ("a large file", partial(checks.streams, large_bytes=large_bytes)),
        ("round trip", trip),
    ]
    all_checks = [ConformanceCheck(name, _promise_of(act), act) for name, act in acts]
    for fault in Fault:
        if fault is not Fault.CRASH:
            what = f"The same round trip succeeds if one of its operations has a fault: {fault.value}."
            act = partial(trips_with, fault=fault, num_faults=num_faults)
            all_checks.append(ConformanceCheck(f"round trip, {fault.value}", what, act))
    return tuple(all_checks)


def run_conformance(url: str, found: Sequence[ConformanceCheck]) -> Iterator[Outcome]:
    """Run checks on a file system, and yield the outcome of each as soon as it ends.

    Args:
        url: A directory in the file system, as a path or fsspec URL.
        found: The checks, such as those of :func:`conformance_checks`.

    Raises:
        ConfigurationError: The URL cannot be opened.

    Examples:
        >>> from torchrec_cnr.testing import conformance_checks, run_conformance
        >>> for outcome in run_conformance("memory://tests", conformance_checks()[:3]):
        ...     print(outcome.check.name, "failed" if outcome.problem else "passed")
        whole files passed
        ranged reads passed
        listing after a write passed
    """
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
    """Remove a directory and everything in it."""
    listing = store.listing()
    for name in listing.files:
        store.remove(name)
    for name in listing.directories:
        _remove(store.at(name))
    store.remove_directory()

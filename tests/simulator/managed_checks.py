"""The invariants of managed jobs that are checked when a schedule has ended."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torchrec_cnr as cnr
from tests.simulator.engine.scheduler import FindingError
from tests.simulator.engine.storage import PROTOCOL, Objects
from tests.simulator.tasks.jobs import Book
from tests.simulator.tasks.managed_jobs import ManagedRoot


def check_refusals(book: Book) -> None:
    """A job that has taken over a root is not refused again and again because another one takes its names.

    The other one may still commit what was at its end, but no more.
    """
    num_refused = Counter(attempt.run for attempt in book.attempts.values() if attempt.is_refused)
    for run, count in num_refused.items():
        others = {other.run for other in book.attempts.values()} - {run}
        if count > len(others):
            raise FindingError("names are taken", f"{count} saves of {run.name} found their names taken")


def check_upkeep(book: Book, root: ManagedRoot) -> None:
    """Where nothing went wrong: maintenance has removed all that retention does not want, once a manager is closed."""
    if book.num_upkeep_errors:
        raise FindingError("upkeep failed for nothing", f"{book.num_upkeep_errors} times")
    if root.keep is None or root.path not in book.closed:
        return
    plan = cnr.plan_prune(root.path, cnr.Keep(last=root.keep))
    if plan.removals:
        raise FindingError("not pruned", f"{root.path} was closed, and has {'; '.join(map(str, plan.removals))}")


@contextmanager
def alone(objects: Objects, root: str) -> Iterator[None]:
    """Nothing but a root is there."""
    files = objects.files
    objects.files = {name: found for name, found in files.items() if f"{PROTOCOL}://{name}".startswith(f"{root}/")}
    try:
        yield
    finally:
        objects.files = files

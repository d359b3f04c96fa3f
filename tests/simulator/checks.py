"""The invariants that are checked when a schedule has ended."""

from collections import Counter
from collections.abc import Callable, Collection

from torch.distributed.checkpoint.api import CheckpointException

from tests.simulator.engine.disk import Disk
from tests.simulator.engine.scheduler import FindingError, Scheduler
from tests.simulator.engine.storage import Objects
from tests.simulator.managed_checks import alone, check_refusals, check_upkeep
from tests.simulator.tasks import models
from tests.simulator.tasks.jobs import Book, Run
from torchrec_cnr.errors import CNRError
from torchrec_cnr.lineage.latest import latest

_ORDINARY = ("switch", "turn")
_NO_FAILURES = {"ok", "not due", "busy"}


def check(sim: Scheduler, book: Book, store: Objects | Disk, keep: int | None) -> None:
    """Raise a finding if an invariant does not hold.

    Args:
        keep: How many of the newest checkpoints no prune may remove; None if nothing prunes.
    """
    checks: list[Callable[[], None]] = [
        lambda: _check_outcomes(sim, book, keep is not None),
        lambda: _check_jobs(book),
        lambda: _check_latest(book, store),
    ]
    if isinstance(store, Objects) and book.managed_roots:
        checks.append(lambda: _check_managed(sim, book, store))
    else:
        checks += [lambda: _check_loads(book, store), lambda: _check_kept(book, store, keep)]
    for some in checks:
        some()


def _has_fault(sim: Scheduler) -> bool:
    return any(what not in _ORDINARY for what in sim.taken.values())


def _check_managed(sim: Scheduler, book: Book, objects: Objects) -> None:
    """Each root loads without any other, and its managers have kept it in order."""
    sources = {plan.source for plan in book.managed}
    for path, root in book.managed_roots.items():
        if root.is_given_up:  # a request of a job that has died may still arrive there
            continue
        with alone(objects, path):
            _check_loads(book, objects, _came_back(sim))
            if not (_has_fault(sim) or book.has_rivals or path in sources):  # a load of another job holds leases
                check_upkeep(book, root)
    if not any(what not in _ORDINARY and "is replaced" not in what for what in sim.taken.values()):
        check_refusals(book)


def _check_outcomes(sim: Scheduler, book: Book, is_pruned: bool) -> None:
    """All ranks ended alike, and nothing failed for nothing."""
    has_fault = _has_fault(sim)
    for attempt in book.attempts.values():
        kinds = {outcome.partition(":")[0] for outcome in attempt.outcomes.values()}
        if "broken" not in kinds and len(kinds) > 1:
            raise FindingError("ranks ended differently", f"{attempt.token}: {attempt.outcomes}")
        is_fenced = any("FencedError" in outcome for outcome in attempt.outcomes.values())
        if attempt.is_split and "ok" in kinds:
            raise FindingError("two roots", f"{attempt.token} succeeded, and its ranks saved to two roots")
        is_excused = attempt.is_split or has_fault or is_pruned or (is_fenced and book.has_rivals)
        is_excused |= attempt.run.is_apart  # what its ranks stage may then be too little
        is_excused |= attempt.is_managed and book.has_rivals
        if kinds - _NO_FAILURES and not is_excused:
            raise FindingError("failed for nothing", f"{attempt.token}: {attempt.outcomes}")


def _check_jobs(book: Book) -> None:
    """Who commits has claimed the root; when a later job has, an earlier one commits at most what was at its end."""
    for root in sorted({root for _, root, _ in book.events}):
        events = [(kind, run) for kind, at, run in book.events if at == root]
        if root == book.root or events[0][1].job.second != "two others":  # what nothing tracks has no lineage to keep
            _check_claims(events)


def _check_claims(events: list[tuple[str, Run]]) -> None:
    newest: Run | None = None
    num_late: Counter[str] = Counter()
    for kind, run in events:
        if kind == "committed" and run.name not in num_late:
            raise FindingError("no claim", f"{run.name} has committed, and has not claimed the root")
        if kind == "claimed":
            newest = run
            num_late[run.name] = 0
        elif newest is not None and run is not newest:
            num_late[run.name] += 1
            if num_late[run.name] > 1:
                raise FindingError(
                    "two jobs went on", f"{run.name} goes on to commit after {newest.name} claimed the root"
                )


def _came_back(sim: Scheduler) -> set[str]:
    """Names of checkpoints whose commit arrived after a prune, because their lease could not be left in time either.

    The library warns of it ("a lease ends with this process although a request may still arrive").
    """
    late = [what.removeprefix("late put ") for what in sim.taken.values() if what.startswith("late put ")]
    left = {what.partition("/")[0] for what in late if what.endswith(".save.lease")}
    return left & {what.removeprefix("new ").partition("/")[0] for what in late if what.endswith("/manifest.json")}


def _check_loads(book: Book, store: Objects | Disk, excused: Collection[str] = ()) -> None:
    """Each checkpoint that is there loads as the snapshot of its save."""
    succeeded = {attempt.path: attempt.token for attempt in book.attempts.values() if "ok" in attempt.outcomes.values()}
    for path in _there(store):
        try:
            token, got = models.loaded(path)
        except (Exception, CheckpointException) as error:
            if path.rpartition("/")[2] in excused:
                continue
            raise FindingError("does not load", f"{path}: {type(error).__name__}: {error}") from error
        attempt = book.attempts.get(token)
        if attempt is None or not attempt.may_be_at(path):
            raise FindingError("wrong values", f"{path} holds the token {token!r}")
        if succeeded.get(path, token) != token and path not in book.removed:
            raise FindingError("wrong values", f"{path} holds {token}, and {succeeded[path]} succeeded there")
        models.check_same(path, got, attempt.snapshot(got))


def _check_kept(book: Book, store: Objects | Disk, keep: int | None) -> None:
    """What succeeded is there, unless it was pruned as one that is not among the newest."""
    there, created = _there(store), book.created_ns
    pruned = [path for path in created if path.startswith(f"{book.root}/")]
    old = sorted(pruned, key=lambda path: (created[path], path))[:-keep] if keep else []
    for attempt in book.attempts.values():
        if "ok" in attempt.outcomes.values() and attempt.path not in there and attempt.path not in old:
            raise FindingError("lost", f"{attempt.token} succeeded, and {attempt.path} is not there")


def _check_latest(book: Book, store: Objects | Disk) -> None:
    """The newest is found, whatever else is in the root."""
    root = book.managed_roots.get(book.root)
    abandoned = set() if root is None else root.abandoned
    there = [path for path in _there(store) if path.startswith(f"{book.root}/") and path not in abandoned]
    # Of one that was late, after its save had failed, and the next one, times are equal if the clock was set back.
    newest = max(there, key=lambda path: (book.created_ns[path], path), default=None)
    try:
        found = latest(book.root)
    except CNRError as error:
        raise FindingError("no latest", f"{type(error).__name__}: {error}") from error
    if found != newest:
        raise FindingError("no latest", f"{found} was found, and {newest} is the newest")


def _there(store: Objects | Disk) -> list[str]:
    end = "/manifest.json"
    return sorted(store.url(name.removesuffix(end)) for name in store.files if name.endswith(end))

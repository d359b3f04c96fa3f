"""A schedule: what a seed makes of jobs, storage and faults, its run, and the checks of what came of it."""

import gc
import itertools
import logging
import os
import random
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tests.simulator import checks, leaks
from tests.simulator.engine import disk_calls, installing, storage
from tests.simulator.engine.disk import Disk
from tests.simulator.engine.disk_plan import DiskPlan
from tests.simulator.engine.scheduler import FindingError, Killed, Process, Scheduler, this_task
from tests.simulator.managed_family import managed_jobs
from tests.simulator.tasks.clocks import Jump, draw_jumps, jump_clocks
from tests.simulator.tasks.jobs import Book, Plan, Step
from tests.simulator.tasks.managed_jobs import ManagedRoot
from tests.simulator.tasks.serving import Follow, Follower, draw_follow
from tests.simulator.tasks.supervisors import Starter
from tests.simulator.tasks.two_dimensions import replicated
from tests.simulator.tasks.upkeep import Beside, Besides, remove_root
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.format.manifest_json import created_ns
from torchrec_cnr.storage.fences import is_fence

FULL_COLLECTION_EVERY = 50  # schedules
_num_runs = itertools.count(1)


@dataclass(frozen=True)
class Scenario:
    """What happens in a schedule, but for decisions of the scheduler.

    Attributes:
        seed: Of both.
        jobs: The jobs.
        besides: What works beside them.
        shares: Of faults in the store.
        disk: What takes the store's place.
        switch_share: How often a point switches.
        break_share: How often collectives break.
        skew_secs: How much clocks of hosts differ.
        follow: How a model that is served follows them, if one does.
        jumps: Of clocks.
    """

    seed: int
    jobs: tuple[Plan, ...]
    besides: tuple[Beside, ...]
    shares: storage.FaultShares
    disk: DiskPlan | None
    switch_share: float
    break_share: float
    skew_secs: float
    follow: Follow | None = None
    jumps: tuple[Jump, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What came of a schedule.

    Attributes:
        scenario: What it was.
        finding: What does not hold; None if all does.
        trace: What happened, a line each.
        taken: Decisions out of the ordinary, by their numbers.
        digest: Of all that happened.
        num_saves: Saves that said they had succeeded.
    """

    scenario: Scenario
    finding: FindingError | None
    trace: tuple[str, ...]
    taken: dict[int, str]
    digest: int
    num_saves: int


FAMILIES = ("saves", "async saves", "upkeep", "two jobs", "managed")


def scenario_of(seed: int, family: str | None = None) -> Scenario:
    """The scenario of a seed, of a family of them; by default that which the seed says."""
    family = family or FAMILIES[seed % len(FAMILIES)]
    drawn = random.Random(seed)
    numbers = iter(range(1, 1000))
    has_faults = drawn.random() < 0.8

    def share(*choices: float) -> float:
        found = drawn.choice(choices)
        return found if has_faults else 0.0

    is_async = family == "async saves" or (family != "saves" and drawn.random() < 0.5)

    one, two = ("async save", "two async saves") if is_async else ("save", "two saves")
    kinds_of_saves = [one] * 6 + (["wait"] * 3 if is_async else [one] * 3 + ["split save"])
    if family in ("saves", "async saves") and drawn.random() < 0.4:
        kinds_of_saves += [two] * 5

    def steps() -> tuple[Step, ...]:
        found = []
        for _ in range(drawn.randint(2, 4)):
            found += ["train"] * drawn.randint(0, 2)
            found.append(drawn.choice(kinds_of_saves))
            if drawn.random() < 0.1:
                found.append("restore")
        return tuple(Step(kind, next(numbers)) for kind in found)

    def job(name: str, begins_secs: float, num_runs: int) -> Plan:
        world_size = drawn.choice([1, 2, 2])
        # Two saves of one model wait for one another on each rank, and ranks need not agree on which is first.
        seconds = ["other model", "two others"] + ["same model"] * 2 * (world_size == 1)
        plan = Plan(
            name=name,
            world_size=world_size,
            policy=drawn.choice(["full", "consecutive", "consecutive", "one shot", "intermittent", "compacted"]),
            steps=tuple(steps() for _ in range(num_runs)),
            begins_secs=begins_secs,
            is_hasty=drawn.random() < 0.3,
            new_planner=drawn.random() < 0.2,
            retries=drawn.random() < 0.3,
            staging_bytes=drawn.choice([1 << 20, 1 << 20, 1]),
            second=drawn.choice(seconds),
            restores=drawn.choice(["together"] * 3 + ["looks alone", "alone", "alone"]),
            apart_secs=random.Random(f"{seed} {name} apart").choice([0.0, 0.1, 0.3]),
            ends_at_once=is_async and random.Random(f"{seed} {name} ends").random() < 0.25,
        )
        return replicated(plan, seed)

    def beside(kind: str) -> Beside:
        begins, every = drawn.choice([0.1, 0.5, 1.0]), drawn.choice([0.05, 0.2, 0.5])
        ahead = random.Random(f"{seed} {kind} ahead").choice([0.0] * 4 + [86_400.0])
        return Beside(kind, begins * drawn.random(), every, drawn.randint(2, 6), drawn.choice([1, 1, 2]), ahead)

    jobs = [job("A", 0.0, drawn.choice([2, 3]))]
    is_mixed = drawn.random() < 0.4  # two jobs with upkeep beside them
    if family == "two jobs" or (family == "upkeep" and is_mixed):
        jobs.append(job("B", drawn.choice([0.05, 0.3, 0.6]), 1))
    kinds = ["prune", "compact", "read"] if family == "upkeep" or (family == "two jobs" and is_mixed) else []
    besides = tuple(beside(kind) for kind in kinds if drawn.random() < 0.75)
    if drawn.random() < 0.5:  # two that compact, by one timetable
        besides += tuple(beside for beside in besides if beside.kind == "compact")
    shares = storage.FaultShares(
        fail=share(0, 0, 0.01, 0.05, 0.2),
        refuse=share(0, 0, 0.005, 0.02, 0.05),
        lose=share(0, 0, 0.01, 0.05, 0.2),
        cut=share(0, 0, 0.01),
        repeat=share(0, 0, 0.02),
        late=share(0, 0, 0, 0.01, 0.05, 0.2),
        delay=share(0, 0, 0.02),
        kill=share(0, 0, 0.005, 0.02),
    )
    disk = DiskPlan.of_seed(seed) if family != "managed" else None
    if disk is not None:  # it is in one host, which has one clock
        besides = tuple(replace(beside, ahead_secs=0.0) for beside in besides)
    return Scenario(
        seed,
        managed_jobs(seed, storage.Objects.root) if family == "managed" else tuple(jobs),
        besides,
        shares,
        disk=disk,
        switch_share=drawn.choice([0.02, 0.1, 0.3]),
        break_share=share(0, 0, 0, 0.005),
        skew_secs=share(0, 0, 1, 3600),
        follow=draw_follow(random.Random(f"{seed} follow")) if disk is None and family != "managed" else None,
        jumps=draw_jumps(random.Random(f"{seed} jumps")) if disk is None and family != "managed" else (),
    )


def without(scenario: Scenario, dropped: Collection[int]) -> Scenario:
    """A scenario that lacks some steps."""
    return replace(
        scenario,
        jobs=tuple(
            replace(
                job, steps=tuple(tuple(step for step in steps if step.number not in dropped) for steps in job.steps)
            )
            for job in scenario.jobs
        ),
    )


@contextmanager
def simulation() -> Iterator[None]:
    """Schedules can be run within."""
    was_enabled = gc.isenabled()
    gc.disable()  # finalizers run at the same points in every replay
    level, hook = logging.getLogger().manager.disable, sys.unraisablehook
    sys.unraisablehook = lambda raised: None if raised.exc_type is Killed else hook(raised)  # in finalizers
    logging.disable(logging.CRITICAL)
    try:
        with installing.installed(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        sys.unraisablehook = hook
        storage.open_objects(None)
        disk_calls.open_disk(None)
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def _on_one_core() -> Iterator[None]:
    """Keep this thread, and those that it starts, on the core that it is on: one of them runs at a time.

    To wake up a thread on another core takes several times as long, and much longer where others use that core.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    of_thread = Path("/proc/thread-self/stat").read_text()
    os.sched_setaffinity(0, {int(of_thread.rpartition(")")[2].split()[36])})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _book(scenario: Scenario, root: str, *, is_pruned: bool) -> Book:
    """Empty, for the jobs of a scenario."""
    managed = [job.managed for job in scenario.jobs if job.managed is not None]
    roots = [of.root for of in managed] or [root] * len(scenario.jobs)
    has_rivals = len(set(roots)) < len(roots) or any(job.is_hasty for job in scenario.jobs)
    book = Book(root, has_rivals, is_pruned)
    book.managed, book.managed_roots = managed, {of.root: ManagedRoot(of.root, of.keep) for of in managed}
    return book


def _spawn_others(scenario: Scenario, starter: Starter, objects: storage.Objects) -> Follower | None:
    """Who removes the root that another one was begun from, and who serves a model, where there is an object store."""
    sim, book = starter.sim, starter.book
    supervisors = list(sim.tasks)
    for source in [of.source for of in book.managed if of.source is not None and of.removes_source]:
        savers = [job.name for job in scenario.jobs if job.managed is not None and job.managed.root == source]
        sim.spawn(Process("remover"), "remover", partial(remove_root, sim, book, objects, source, savers))
    follow = scenario.follow
    if follow is None:
        return None
    follower = Follower(sim, book, objects, starter.server, lambda: starter.has_ended(supervisors))
    process = Process("supervisor served")
    sim.spawn(process, process.name, lambda: follower.supervise(follow))
    return follower


def run(scenario: Scenario, undone: Collection[int] = ()) -> Outcome:
    """Run a schedule, within a :func:`simulation`."""
    storage.open_objects(None)  # else what the schedule before has left would be there still, and stay for good
    manifest_json._KNOWN.clear()
    if next(_num_runs) % FULL_COLLECTION_EVERY == 0:
        gc.unfreeze()  # some of what was there then is garbage by now
    gc.collect()  # nothing else frees it
    gc.freeze()  # what is left now is not looked at again
    sim = Scheduler(scenario.seed, undone)
    sim.switch_share = scenario.switch_share
    store = _opened(sim, scenario)
    keeps = [beside.keep for beside in scenario.besides if beside.kind == "prune"]
    book = _book(scenario, store.root, is_pruned=bool(keeps))
    skew_secs = scenario.skew_secs if scenario.disk is None else 0.0  # it is in one host
    starter = Starter(sim, book, Process("store"), scenario.break_share, skew_secs, store.host_of)

    store.on_change = lambda kind, path, data: _note(sim, book, kind, store.url(path), data)
    for job in scenario.jobs:
        sim.spawn(Process(f"supervisor {job.name}"), f"supervisor {job.name}", lambda job=job: starter.supervise(job))
    if scenario.jumps:
        sim.spawn(Process("clocks"), "clocks", lambda: jump_clocks(sim, starter.ahead_secs, scenario.jumps))
    besides = Besides(sim, book, starter.server, store.host_of)
    for number, beside in enumerate(scenario.besides):
        process = Process(f"supervisor {beside.kind}{number}")
        sim.spawn(process, process.name, lambda beside=beside, number=number: besides.supervise(beside, number))
    follower = _spawn_others(scenario, starter, store) if isinstance(store, storage.Objects) else None
    with _on_one_core():
        sim.run()
    if follower is not None:
        follower.clean_up()
    if sim.finding is None:
        try:
            leaks.check_errors()  # before garbage is made of what was checked
            if isinstance(store, Disk) and store.plan.ends_without_power:
                store.lose_power()
            checks.check(sim, book, store, min(keeps, default=None))
        except FindingError as finding:
            sim.found(finding)
    num_saves = sum("ok" in attempt.outcomes.values() for attempt in book.attempts.values())
    return Outcome(scenario, sim.finding, tuple(sim.trace), sim.taken, sim.digest, num_saves)


def _opened(sim: Scheduler, scenario: Scenario) -> storage.Objects | Disk:
    """The store of a schedule."""
    objects = storage.Objects(sim, scenario.shares)
    storage.open_objects(objects)
    disk = None if scenario.disk is None else Disk(sim, scenario.disk)
    disk_calls.open_disk(disk)
    return disk or objects


def _note(sim: Scheduler, book: Book, kind: str, path: str, data: bytes) -> None:
    """A file was put or removed."""
    directory, _, name = path.rpartition("/")
    for root in book.managed_roots.values():
        if not root.note(kind == "put", path, data):
            sim.found(FindingError("lost", f"{path} was removed, and retention has always wanted it"))
    task = this_task()
    run = task.process.own.get("run") if task is not None else None
    if name == MANIFEST_FILE:
        sim.tell(f"=== {kind} manifest of {directory}")
        if kind == "put":
            book.created_ns[directory] = created_ns(data) or 0
        elif kind == "lost":
            book.lose(directory)
        else:
            book.removed.add(directory)
    elif is_fence(name) and task is not None:
        run = task.client.own.get("run")  # also if the client was told that it failed
    else:
        return
    if kind == "put" and run is not None:
        is_commit = name == MANIFEST_FILE
        root = directory.rpartition("/")[0] if is_commit else directory
        book.events.append(("committed" if is_commit else "claimed", root, run))

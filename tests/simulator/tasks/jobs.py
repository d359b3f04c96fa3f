"""Jobs: what their ranks do, and what is remembered of their saves."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torchrec_cnr as cnr
from tests.simulator.engine.scheduler import FindingError, Process
from tests.simulator.tasks.managed_jobs import Managed, ManagedRoot
from tests.simulator.tasks.models import Snapshot, merged

POLICIES: dict[str, Callable[[], cnr.Policy]] = {
    "full": cnr.Full,
    "consecutive": cnr.Consecutive,
    "one shot": cnr.OneShot,
    "intermittent": cnr.Intermittent,
    "compacted": cnr.Compacted,
}


@dataclass(frozen=True)
class Step:
    """Something that all ranks of a job do.

    Attributes:
        kind: "train", "save", "split save" (of which rank 1 goes to another root), "async save", "wait", "restore";
            "sync" of replicas, "resolve" the last save on one rank; or "two saves" or "two async saves", which two
            threads of each rank begin at the same time. Of managed jobs only: "back", which loads an older checkpoint,
            and "reopen", which makes another manager.
        number: Tells it from all others.
    """

    kind: str
    number: int


@dataclass(frozen=True)
class Plan:
    """What a job does.

    Attributes:
        name: Of the job.
        world_size: How many ranks.
        policy: A key of ``POLICIES``.
        steps: By incarnation; after the last one it is done.
        begins_secs: When it begins.
        is_hasty: Whether its supervisor may start ranks again before the old ones are gone.
        new_planner: Whether each save has a planner and a writer of its own.
        retries: Whether a save that failed is tried again, under the same name.
        staging_bytes: Of the writer.
        second: What two saves are of: beside the model, "other model" or "same model"; or "two others", which nothing
            tracks, with one planner.
        restores: How ranks find and load the newest checkpoint: "together"; or each "looks alone", and they load
            together; or each looks and loads "alone".
        apart_secs: How much later than the first the other ranks are there, if each looks by itself.
        num_replicas: How many ranks have one and the same shards.
        ends_at_once: Whether ranks end without waiting for what they save in the background.
        managed: How its ranks use their ``CheckpointManager``; None if they have none.
    """

    name: str
    world_size: int
    policy: str
    steps: tuple[tuple[Step, ...], ...]
    begins_secs: float = 0.0
    is_hasty: bool = False
    new_planner: bool = False
    retries: bool = False
    staging_bytes: int = 1 << 20
    second: str = "other model"
    restores: str = "together"
    apart_secs: float = 0.0
    num_replicas: int = 1
    ends_at_once: bool = False
    managed: Managed | None = None


@dataclass(eq=False)
class Attempt:
    """A save that was tried, of which each rank knows its part.

    Attributes:
        path: Of the checkpoint.
        token: Is in the checkpoint.
        run: The incarnation.
        is_split: Whether ranks save to two roots.
        is_managed: Whether a manager names the checkpoint, so that it may be called ``<path>-2``.
        is_refused: Whether its name was taken.
        parts: Snapshots, by rank.
        outcomes: "ok" or why not, by rank.
    """

    path: str
    token: str
    run: "Run"
    is_split: bool = False
    is_managed: bool = False
    is_refused: bool = False
    parts: dict[int, Snapshot] = field(default_factory=dict)
    outcomes: dict[int, str] = field(default_factory=dict)

    def snapshot(self, got: Snapshot | None = None) -> Snapshot:
        """Of all ranks; of replicas that differ, that which was got."""
        return merged([self.parts[rank] for rank in sorted(self.parts)], got or {})

    def may_be_at(self, path: str) -> bool:
        """Whether this may be its checkpoint."""
        is_renamed = self.is_managed and re.fullmatch(rf"{re.escape(self.path)}-\d+", path) is not None
        return path == self.path or is_renamed


@dataclass(eq=False)
class Run:
    """An incarnation of a job.

    Attributes:
        job: Its plan.
        number: From 0.
        processes: By rank.
        has_failed: Whether any rank has ended too early.
        is_apart: Whether its ranks have gone on from different checkpoints.
        choices: What the first rank has chosen for all of them.
    """

    job: Plan
    number: int
    processes: list[Process]
    has_failed: bool = False
    is_apart: bool = False
    choices: dict[object, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For the trace."""
        return f"{self.job.name}{self.number}"

    @property
    def was_disturbed(self) -> bool:
        """Whether a rank was killed, or a group cut, so that others found its collectives broken."""
        own = self.processes[0].own
        groups = [own["world"], own["saves"], own["second"], own["third"], *own.get("groups", {}).values()]
        groups += [process.own["replicas"] for process in self.processes]
        return self.has_died or any(group.was_cut for group in groups)

    @property
    def has_died(self) -> bool:
        """Whether a rank was killed."""
        return any(process.has_been_killed for process in self.processes)

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return all(process.is_dead for process in self.processes)


@dataclass
class Book:
    """What happened, for the checks.

    Attributes:
        root: Where checkpoints are; those of second models are beside it.
        attempts: Saves, by token.
        is_pruned: Whether something prunes.
        newest_ok: Of the save that has said last that it succeeded, where it went.
        has_rivals: Whether several runs may save at a time.
        events: "claimed" and "committed", each with the root and its run, in their order.
        created_ns: By path, when a checkpoint that was committed says it was made.
        managed: How jobs use their managers.
        managed_roots: Those of managers, by path.
        closed: Roots of managers whose last manager was closed.
        num_upkeep_errors: How often the maintenance of a manager has failed.
        done: Names of the jobs that are done.
        removed: Paths of checkpoints that were removed; another one may have been saved there since.
    """

    root: str
    has_rivals: bool
    is_pruned: bool
    newest_ok: str | None = None
    attempts: dict[str, Attempt] = field(default_factory=dict)
    events: list[tuple[str, str, Run]] = field(default_factory=list)
    created_ns: dict[str, int] = field(default_factory=dict)
    managed: list[Managed] = field(default_factory=list)
    managed_roots: dict[str, ManagedRoot] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    num_upkeep_errors: int = 0
    done: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)

    def lose(self, path: str) -> None:
        """A checkpoint was lost in a power failure."""
        for attempt in self.attempts.values():
            if attempt.path == path and "ok" in attempt.outcomes.values():
                raise FindingError("lost", f"{attempt.token} succeeded, and a power failure has taken {path}")
        del self.created_ns[path]

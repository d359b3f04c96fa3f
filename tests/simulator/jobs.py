"""Jobs: ranks that restore, train and save, and a supervisor that starts them again when they have died."""

import random
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import torchrec_cnr as cnr
from tests.simulator.collectives import Group
from tests.simulator.models import Snapshot, TinyModel, merged
from tests.simulator.scheduler import FindingError, Process, Scheduler
from torchrec_cnr.errors import CNRError
from torchrec_cnr.manager.restore import restore_newest

MAX_INCARNATIONS = 3
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
        kind: "train", "save", "split save" (of which rank 1 goes to another root), "async save", "wait" or "restore".
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


@dataclass(eq=False)
class Attempt:
    """A save that was tried, of which each rank knows its part.

    Attributes:
        path: Of the checkpoint.
        token: Is in the checkpoint.
        run: The incarnation.
        is_split: Whether ranks save to two roots.
        parts: Snapshots, by rank.
        outcomes: "ok" or why not, by rank.
    """

    path: str
    token: str
    run: "Run"
    is_split: bool = False
    parts: dict[int, Snapshot] = field(default_factory=dict)
    outcomes: dict[int, str] = field(default_factory=dict)

    def snapshot(self) -> Snapshot:
        """Of all ranks."""
        return merged([self.parts[rank] for rank in sorted(self.parts)])


@dataclass(eq=False)
class Run:
    """An incarnation of a job.

    Attributes:
        job: Its plan.
        number: From 0.
        processes: By rank.
        has_failed: Whether any rank has ended too early.
    """

    job: Plan
    number: int
    processes: list[Process]
    has_failed: bool = False

    @property
    def name(self) -> str:
        """For the trace."""
        return f"{self.job.name}{self.number}"

    @property
    def was_disturbed(self) -> bool:
        """Whether a rank was killed, or a group cut, so that others found its collectives broken."""
        own = self.processes[0].own
        groups = [own["world"], own["saves"], *own.get("groups", {}).values()]
        return _has_died(self) or any(group.was_cut for group in groups)

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return all(process.is_dead for process in self.processes)


@dataclass
class Book:
    """What happened, for the checks.

    Attributes:
        root: Where checkpoints are.
        attempts: Saves, by token.
        is_pruned: Whether something prunes.
        newest_ok: Of the save that has said last that it succeeded, where it went.
        has_rivals: Whether several runs may save at a time.
        events: "claimed" and "committed", each with its run, in their order.
        created_ns: By path, when a checkpoint that was committed says it was made.
    """

    root: str
    has_rivals: bool
    is_pruned: bool
    newest_ok: str | None = None
    attempts: dict[str, Attempt] = field(default_factory=dict)
    events: list[tuple[str, "Run"]] = field(default_factory=list)
    created_ns: dict[str, int] = field(default_factory=dict)


class Rank:
    """One rank of a run.

    Args:
        sim: The scheduler.
        book: Told of all.
        run: The run.
        rank: This one.
    """

    def __init__(self, sim: Scheduler, book: Book, run: Run, rank: int) -> None:
        self._sim, self._book, self._run, self._rank = sim, book, run, rank
        self._model = TinyModel(rank, run.job.world_size, 100 * run.number + sum(run.job.name.encode()))
        self._policy = POLICIES[run.job.policy]()
        self._group: Any = run.processes[rank].own.get("saves")
        self._in_flight: list[tuple[Attempt, Future[Any]]] = []
        self._new_plug_ins()

    def _new_plug_ins(self) -> None:
        self._planner = cnr.CNRSavePlanner(self._model.tracker, policy=self._policy)
        options: Any = {"pack_bytes": 1024, "staging_bytes": self._run.job.staging_bytes}
        self._writer = cnr.CNRStorageWriter(f"{self._book.root}/none", **options)

    def live(self) -> None:
        """Do all that the plan says."""
        steps = self._run.job.steps
        self.restore()
        for step in steps[min(self._run.number, len(steps) - 1)]:
            self._sim.tell(f"--- {step.kind} #{step.number}")
            match step.kind:
                case "train":
                    self._model.train()
                case "save" | "split save":
                    self.save(step)
                case "async save":
                    self.async_save(step)
                case "wait":
                    self.wait()
                case "restore":
                    self.wait()
                    self.restore()
        self.wait()

    def restore(self) -> None:
        """Load the newest checkpoint, if there is one."""
        state, before = self._model.state(""), self._book.newest_ok
        found = restore_newest(self._book.root, state, self._model.tracker, group=self._group)
        if found is None:
            self._sim.tell("finds no checkpoint")
            return
        token = state["token"]
        self._sim.tell(f"restored {found[0]} ({token})")
        attempt = self._book.attempts.get(token)
        if attempt is None:
            raise FindingError("wrong values", f"{found[0]} was restored with the token {token!r}")
        self._check_newest(before, found[0])
        whole, mine = attempt.snapshot(), self._model.snapshot()
        self._model.num_steps = int(state.get(f"reader.{self._rank}", [0])[0])
        for fqn, value in mine.items():
            if isinstance(value, tuple):
                first, tensor = value
                if not bool((whole[fqn][first : first + len(tensor)] == tensor).all()):
                    raise FindingError("wrong values", f"{found[0]}: {fqn} was restored as {tensor}, not {whole[fqn]}")

    def _check_newest(self, before: str | None, found: str) -> None:
        """What was restored is not older than what was saved when the restore began."""
        book, order = self._book, list(self._book.created_ns)
        has_passed_over = any(what.startswith(("refuse", "late")) for what in self._sim.taken.values())
        if before is None or book.has_rivals or book.is_pruned or has_passed_over:
            return
        if order.index(found) < order.index(before):
            raise FindingError("an old one restored", f"{found}, and {before} was saved later")

    def _attempt(self, step: Step, is_retry: bool = False) -> Attempt:
        run = self._run
        token = f"{run.name}.{step.number}{'.again' if is_retry else ''}"
        path = f"{self._book.root}/step-{step.number}-{run.number}{run.job.name}"
        attempt = self._book.attempts.setdefault(token, Attempt(path, token, run))
        attempt.parts[self._rank] = self._model.snapshot()
        if run.job.new_planner and not self._in_flight:
            self._new_plug_ins()
        return attempt

    def _arguments(self, attempt: Attempt) -> dict[str, Any]:
        return {
            "state_dict": self._model.state(attempt.token),
            "checkpoint_id": attempt.path,
            "storage_writer": self._writer,
            "planner": self._planner,
            "process_group": self._group,
        }

    def save(self, step: Step) -> None:
        """Save, and remember what it said."""
        attempt = self._attempt(step)
        arguments = self._arguments(attempt)
        attempt.is_split = step.kind == "split save" and self._run.job.world_size > 1
        if attempt.is_split and self._rank == 1:
            arguments["checkpoint_id"] = attempt.path.replace(self._book.root, f"{self._book.root}-other")
        self._judge(attempt, lambda: save(**arguments))
        if self._run.job.retries and attempt.outcomes[self._rank].startswith("failed"):
            again = self._attempt(step, is_retry=True)
            self._judge(again, lambda: save(**self._arguments(again)))

    def async_save(self, step: Step) -> None:
        """Begin to save."""
        attempt = self._attempt(step)
        try:
            future = async_save(**self._arguments(attempt))
        except CNRError as error:
            attempt.outcomes[self._rank] = f"refused: {error}"
            raise
        self._in_flight.append((attempt, future))

    def wait(self) -> None:
        """Learn how saves in the background ended."""
        in_flight, self._in_flight = self._in_flight, []
        for attempt, future in in_flight:
            self._judge(attempt, future.result)

    def _judge(self, attempt: Attempt, act: Callable[[], Any]) -> None:
        outcomes = attempt.outcomes
        try:
            act()
        except CheckpointException as error:
            failures = sorted({f"{type(failure).__name__}: {failure}" for failure, _ in error.failures.values()})
            outcomes[self._rank] = f"failed: {'; '.join(failures)}"
        except RuntimeError as error:
            if "simulated" not in str(error):
                raise
            outcomes[self._rank] = "broken"
            raise
        else:
            outcomes[self._rank] = "ok"
            if attempt.path in self._book.created_ns:
                self._book.newest_ok = attempt.path
        self._sim.tell(f"{attempt.token}: {outcomes[self._rank]}"[:300])


@dataclass
class Starter:
    """Starts runs.

    Attributes:
        sim: The scheduler.
        book: What happened.
        server: The process of the store.
        break_share: How often collectives break.
        skew_secs: How much clocks of hosts differ.
    """

    sim: Scheduler
    book: Book
    server: Process
    break_share: float
    skew_secs: float
    runs: list[Run] = field(default_factory=list)

    def start(self, job: Plan, number: int) -> Run:
        """Start an incarnation."""
        sim = self.sim
        drawn = random.Random(sim.seed * 31 + number * 7 + sum(job.name.encode()))
        processes = [
            Process(
                f"{job.name}{number}.{rank}",
                clock_secs=drawn.uniform(-1, 1) * self.skew_secs,
                host=f"host{rank}{'' if job.name == 'A' else job.name}",
                number=100 * len(self.runs) + rank + 1,
            )
            for rank in range(job.world_size)
        ]
        run = Run(job, number, processes)
        self.runs.append(run)
        for process in processes:
            process.own["server"] = self.server
            process.own["run"] = run
        if job.world_size > 1:
            world = Group(f"{run.name}.world", processes, self.break_share)
            saves = Group(f"{run.name}.saves", processes, self.break_share)
            for process in processes:
                process.own |= {"world": world, "saves": saves}
        for rank, process in enumerate(processes):
            sim.spawn(process, process.name, lambda rank=rank, process=process: self._live(run, rank, process))
        return run

    def _live(self, run: Run, rank: int, process: Process) -> None:
        try:
            Rank(self.sim, self.book, run, rank).live()
        except (Exception, CheckpointException) as error:
            run.has_failed = True
            if isinstance(error, FindingError):
                raise
            self.sim.tell(f"{process.name} ends: {type(error).__name__}: {str(error)[:200]}")
            if not self.is_excused(run, error):
                stack = "".join(traceback.format_exception(error)[-6:])
                raise FindingError(
                    "unexpected error", f"{process.name}: {type(error).__name__}: {error}\n{stack}"
                ) from error
            if isinstance(error, RuntimeError) and not run.was_disturbed:
                raise FindingError("raised alone", f"{process.name} waited for a rank that had raised") from error
        finally:
            process.is_dead = True

    def is_excused(self, run: Run, error: BaseException) -> bool:
        """Whether an error that ends a rank is what faults may lead to."""
        if isinstance(error, CNRError | CheckpointException):
            return True
        return isinstance(error, RuntimeError) and "simulated" in str(error)

    def supervise(self, job: Plan) -> None:
        """Start a job again until it is done."""
        sim = self.sim
        if job.begins_secs:
            sim.sleep(job.begins_secs)
        for number in range(len(job.steps)):
            run = self.start(job, number)
            sim.wait(f"{run.name} to end", lambda run=run: run.has_ended or _has_died(run))
            if job.is_hasty and sim.chance(0.5, f"{run.name} is replaced while it runs"):
                sim.tell(f"*** {run.name} is replaced, dead or not")
                continue
            sim.wait(f"{run.name} to end", lambda run=run: run.has_ended)


def _has_died(run: Run) -> bool:
    return any(process.has_been_killed for process in run.processes)

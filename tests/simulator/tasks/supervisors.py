"""Supervisors: they start the ranks of a job, and start them again when they have died."""

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.distributed.checkpoint.api import CheckpointException

from tests.simulator.engine.collectives import Group
from tests.simulator.engine.ending import check_nothing_left
from tests.simulator.engine.scheduler import FindingError, Process, Scheduler, Task
from tests.simulator.tasks.jobs import Book, Plan, Run
from tests.simulator.tasks.managed_ranks import ManagedRank
from tests.simulator.tasks.ranks import Rank
from torchrec_cnr.errors import CNRError


@dataclass
class Starter:
    """Starts runs.

    Attributes:
        sim: The scheduler.
        book: What happened.
        server: The process of the store.
        break_share: How often collectives break.
        skew_secs: How much clocks of hosts differ.
        host_of: The host of a process, by the name of its place.
        ahead_secs: What clocks have been set ahead, by host.
    """

    sim: Scheduler
    book: Book
    server: Process
    break_share: float
    skew_secs: float
    host_of: Callable[[str], str]
    ahead_secs: dict[str, float] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    def start(self, job: Plan, number: int) -> Run:
        """Start an incarnation."""
        sim = self.sim
        drawn = random.Random(sim.seed * 31 + number * 7 + sum(job.name.encode()))
        processes = [
            Process(
                f"{job.name}{number}.{rank}",
                clock_secs=drawn.uniform(-1, 1) * self.skew_secs,
                host=self.host_of(f"host{rank}{'' if job.name == 'A' else job.name}"),
                number=100 * len(self.runs) + rank + 1,
            )
            for rank in range(job.world_size)
        ]
        for process in processes:
            process.clock_secs += self.ahead_secs.get(process.host, 0.0)
        run = Run(job, number, processes)
        self.runs.append(run)
        for process in processes:
            process.own["server"] = self.server
            process.own["run"] = run
        if job.world_size > 1:
            names = ("world", "saves", "second", "third")
            groups = {name: Group(f"{run.name}.{name}", processes, self.break_share) for name in names}
            for process in processes:
                process.own |= groups
            num_shards = job.world_size // job.num_replicas
            for place in range(num_shards):
                replicas = Group(f"{run.name}.replicas{place}", processes[place::num_shards], self.break_share)
                for process in replicas.processes:
                    process.own["replicas"] = replicas
        for rank, process in enumerate(processes):
            sim.spawn(process, process.name, lambda rank=rank, process=process: self._live(run, rank, process))
        return run

    def _live(self, run: Run, rank: int, process: Process) -> None:
        try:
            if (managed := run.job.managed) is not None:
                ManagedRank(self.sim, self.book, run, rank, managed).live()
            else:
                Rank(self.sim, self.book, run, rank).live()
            check_nothing_left(self.sim)
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
            sim.wait(f"{run.name} to end", lambda run=run: run.has_ended or run.has_died)
            if job.is_hasty and sim.chance(0.5, f"{run.name} is replaced while it runs"):
                sim.tell(f"*** {run.name} is replaced, dead or not")
                continue
            sim.wait(f"{run.name} to end", lambda run=run: run.has_ended)
        self.book.done.add(job.name)

    def has_ended(self, supervisors: Sequence[Task]) -> bool:
        """Whether these have ended, all that they have started, and all that the store was asked for."""
        if any(task.process is self.server for task in self.sim.tasks):
            return False
        return all(task.has_ended for task in supervisors) and all(run.has_ended for run in self.runs)

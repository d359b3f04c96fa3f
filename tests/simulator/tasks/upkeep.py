"""Processes beside the jobs: maintenance, which compacts and prunes their root, and readers."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.simulator.engine.scheduler import FindingError, Process, Scheduler
from tests.simulator.engine.storage import PROTOCOL, Objects
from tests.simulator.tasks import models
from tests.simulator.tasks.jobs import Book
from torchrec_cnr.errors import CNRError
from torchrec_cnr.maintenance.compaction.compact import compact
from torchrec_cnr.maintenance.pruning.execute import run_prune
from torchrec_cnr.maintenance.pruning.plan import plan_prune

PACK_BYTES = 1024


@dataclass(frozen=True)
class Beside:
    """A process beside the jobs.

    Attributes:
        kind: "prune", "compact", or "read".
        begins_secs: When it begins first.
        every_secs: How long it rests.
        num_rounds: How often it does its work; a new process does what one that was killed has left.
        keep: How many checkpoints a prune keeps.
        ahead_secs: What its clock is ahead.
    """

    kind: str
    begins_secs: float
    every_secs: float
    num_rounds: int
    keep: int = 1
    ahead_secs: float = 0.0


def remove_root(sim: Scheduler, book: Book, objects: Objects, root: str, jobs: Collection[str]) -> None:
    """Remove all of a root, one file after the other, once the jobs that save there are done."""
    sim.wait("the end of the jobs of a root", lambda: book.done.issuperset(jobs))
    sim.tell(f"*** {root} is removed")
    book.managed_roots[root].is_given_up = True
    for name in [name for name in objects.files if f"{PROTOCOL}://{name}".startswith(f"{root}/")]:
        sim.point("removes", is_told=False)
        objects.remove(name)


@dataclass
class Besides:
    """Runs such processes.

    Attributes:
        sim: The scheduler.
        book: What happened.
        server: The process of the store.
        host_of: The host of a process, by the name of its place.
    """

    sim: Scheduler
    book: Book
    server: Process
    host_of: Callable[[str], str]

    def supervise(self, beside: Beside, number: int) -> None:
        """One process after the other does a round."""
        sim = self.sim
        act: Callable[[Beside], None] = {"prune": self._prune, "compact": self._compact, "read": self._read}[
            beside.kind
        ]
        sim.sleep(beside.begins_secs)
        for done in range(beside.num_rounds):
            process = Process(
                f"{beside.kind}{number}.{done}",
                clock_secs=beside.ahead_secs,
                host=self.host_of(f"host {beside.kind}"),
                number=1000 + 100 * number + done,
            )
            process.own["server"] = self.server

            def live(process: Process = process) -> None:
                try:
                    act(beside)
                except (CNRError, CheckpointException) as error:
                    sim.tell(f"gives up: {type(error).__name__}: {str(error)[:200]}")
                finally:
                    process.is_dead = True

            task = sim.spawn(process, process.name, live)
            sim.wait(f"{process.name} to end", lambda task=task: task.has_ended)
            if task.error is not None:
                raise FindingError("unexpected error", f"{process.name}: {task.error!r}")
            sim.sleep(beside.every_secs)

    def _prune(self, beside: Beside) -> None:
        found = run_prune(plan_prune(self.book.root, cnr.Keep(last=beside.keep)))
        self.sim.tell(f"pruned: {found}"[:200])

    def _compact(self, beside: Beside) -> None:
        path = cnr.latest(self.book.root)
        if path is not None:
            self.sim.tell(f"compacts {path}")
            compact(path, max_ratio=1.0, thread_count=1, pack_bytes=PACK_BYTES)

    def _read(self, beside: Beside) -> None:
        path = cnr.latest(self.book.root)
        if path is not None:
            token, got = models.loaded(path)
            attempt = self.book.attempts.get(token)
            if attempt is None:
                raise FindingError("wrong values", f"{path} was read with the token {token!r}")
            models.check_same(path, got, attempt.snapshot(got))
            self.sim.tell(f"read {path} ({token})")

"""Ranks that save by a ``CheckpointManager``, go back to older checkpoints, and begin from those of another root."""

import random
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.simulator.engine.scheduler import FindingError, Scheduler
from tests.simulator.tasks.jobs import POLICIES, Attempt, Book, Run, Step
from tests.simulator.tasks.managed_jobs import Managed, ManagedRoot
from tests.simulator.tasks.models import TinyModel
from torchrec_cnr.errors import CheckpointExistsError, CNRError, SaveError
from torchrec_cnr.manager.restore import step_of
from torchrec_cnr.progress import Saved


class ManagedRank:
    """One rank of a run.

    Args:
        sim: The scheduler.
        book: Told of all.
        run: The run.
        rank: This one.
        managed: How it uses its manager.
    """

    def __init__(self, sim: Scheduler, book: Book, run: Run, rank: int, managed: Managed) -> None:
        self._sim, self._book, self._run, self._rank, self._managed = sim, book, run, rank, managed
        self._root: ManagedRoot = book.managed_roots[managed.root]
        seed = 100 * run.number + sum(run.job.name.encode())
        self._model = TinyModel(rank, run.job.world_size, seed)
        self._drawn = random.Random(f"{sim.seed} callbacks of {run.name}.{rank}")
        self._in_flight: Attempt | None = None
        self._begun: dict[int, Attempt] = {}  # by the number of the model's step
        self._has_gone_back = False
        self._has_loaded = False  # since the last commit
        self._left: set[str] = set()  # newer than what the job has gone back to
        self._manager = self._made()
        book.closed.discard(managed.root)

    def _made(self) -> cnr.CheckpointManager:
        managed = self._managed
        return cnr.CheckpointManager(
            managed.root,
            self._model.tracker,
            policy=POLICIES[self._run.job.policy](),
            keep=None if managed.keep is None else cnr.Keep(last=managed.keep),
            background=cnr.Background(**managed.background),
            on_saved=self._saved,
            on_progress=lambda what, done, total: self._may_raise(),
            **managed.options,
        )

    def live(self) -> None:
        """Do all that the plan says."""
        try:
            self._live()
        except (Exception, CheckpointException) as error:
            if self._managed.closes and not isinstance(error, FindingError):
                self._sim.tell(f"closes because of {type(error).__name__}: {str(error)[:200]}")
                self._act(None, self._manager.close)
            raise
        self._close()
        if not self._has_loaded:  # else a lease of the load may have kept something
            self._book.closed.add(self._managed.root)

    def _close(self) -> None:
        self._act(None, self._manager.close)
        if (upkeep := self._manager._upkeep) is not None:
            self._book.num_upkeep_errors += upkeep.num_errors

    def _live(self) -> None:
        steps = self._run.job.steps
        if self._restore() is None and self._managed.source is not None:
            self._fork(self._managed.source)
        for step in steps[min(self._run.number, len(steps) - 1)]:
            self._sim.tell(f"--- {step.kind} #{step.number}")
            self._do(step)

    def _do(self, step: Step) -> None:
        match step.kind:
            case "train":
                self._model.train()
            case "save":
                self._save(step, self._manager.save)
            case "async save":
                self._save(step, self._manager.async_save)
            case "wait":
                self._act(None, self._manager.wait)
            case "restore":
                self._restore()
            case "back":
                self._go_back(step)
            case "reopen":
                self._close()
                self._manager = self._made()
                if self._has_gone_back:  # only a restore tells a manager which names are taken
                    self._restore()

    # Saves

    def _save(self, step: Step, act: Callable[..., Any]) -> None:
        self._model.train()  # two saves of one step would have one name
        number, token = self._model.num_steps, f"{self._run.name}.{step.number}"
        path = self._manager._continuation.path(
            number
        )  # of a step that is saved again, after a return, it has another name
        attempt = self._book.attempts.setdefault(token, Attempt(path, token, self._run, is_managed=True))
        attempt.parts[self._rank] = self._model.snapshot()
        self._begun[number] = attempt
        state = self._model.state(token)
        found = self._act(attempt, lambda: act(number, state))
        if found is None:
            attempt.outcomes.setdefault(self._rank, "not due")
        elif self._rank not in attempt.outcomes:
            self._in_flight = attempt

    def _act(self, attempt: Attempt | None, act: Callable[[], Any]) -> Any:
        """Call the manager: what it raises is the outcome of the save in the background, or of this one."""
        before = self._in_flight
        try:
            found = act()
        except (CheckpointException, CNRError, RuntimeError) as error:
            is_busy = isinstance(error, SaveError) and "is still running" in str(error)
            if before is not None and self._rank not in before.outcomes and not is_busy:
                if attempt is not None:
                    attempt.outcomes[self._rank] = "not begun"
                attempt, self._in_flight = before, None
            if attempt is None:
                raise
            self._judge(attempt, error, is_busy)
            return None
        if before is not None and self._rank in before.outcomes:
            self._in_flight = None
        return found

    def _judge(self, attempt: Attempt, error: BaseException, is_busy: bool) -> None:
        rank, cause = self._rank, error.__cause__ if isinstance(error, SaveError) else error
        if attempt.outcomes.get(rank) == "ok":
            raise FindingError("raised after a commit", f"{attempt.token}: {error!r}") from error
        if isinstance(cause, RuntimeError):
            if "simulated" not in str(cause):
                raise error
            attempt.outcomes[rank] = "broken"
            raise cause  # which is judged as an error of a collective, whether a rank is said to be missing or not
        failures = [error] if isinstance(error, CNRError) else [failure for failure, _ in error.failures.values()]
        texts = sorted({f"{type(failure).__name__}: {failure}" for failure in failures})
        attempt.outcomes[rank] = f"{'busy' if is_busy else 'failed'}: {'; '.join(texts)}"
        attempt.is_refused |= any(isinstance(failure, CheckpointExistsError) for failure in failures)
        self._sim.tell(f"{attempt.token} {attempt.outcomes[rank]}"[:300])

    def _saved(self, saved: Saved) -> None:
        attempt = self._begun[saved.step]
        attempt.outcomes[self._rank], self._has_loaded = "ok", False
        attempt.path = saved.path
        if saved.path in self._root.created_ns and saved.path not in self._root.abandoned:
            self._root.newest_ok = saved.path
        going_on = (self._left & self._root.created_ns.keys()) - self._root.abandoned
        if going_on and not self._is_excused:
            self._sim.found(FindingError("not abandoned", f"{saved.path} was saved, and goes not on: {going_on}"))
        self._left = set()
        self._may_raise()

    def _may_raise(self) -> None:
        if self._drawn.random() < self._managed.raise_share:
            raise KeyError("a callback")

    # Restores

    def _restore(self, **chosen: Any) -> int | None:
        """Load the newest checkpoint, or the one that is chosen; returns its step."""
        before, is_newest, in_flight = self._root.newest_ok, not chosen, self._in_flight
        state = self._model.state("")
        try:
            found: int | None = self._act(None, lambda: self._manager.restore(state, **chosen))
        finally:
            self._has_loaded = True  # not before, as the call may have reported a commit first
        if found is None and in_flight is not None and in_flight.outcomes[self._rank] != "ok":
            return self._restore(**chosen)  # the call has reported the failure of that save, and loaded nothing
        if found is None:
            if before is not None and is_newest and not self._is_excused:
                raise FindingError("an old one restored", f"none was found, and {before} was saved")
            self._sim.tell("finds no checkpoint")
            return None
        attempt = self._book.attempts.get(state["token"])
        if attempt is None or step_of(attempt.path) != found:
            raise FindingError("wrong values", f"step {found} was restored with the token {state['token']!r}")
        self._sim.tell(f"restored {attempt.path} ({attempt.token})")
        self._model.check_holds(attempt.path, attempt.snapshot())
        self._model.num_steps = found
        created = self._root.created_ns
        is_older = before in created and attempt.path in created and created[attempt.path] < created[before]
        if is_newest and is_older and not self._is_excused:
            raise FindingError("an old one restored", f"{attempt.path}, and {before} was saved later")
        self._left = set() if is_newest else self._root.newer_than(attempt.path) - {attempt.path}
        return found

    @property
    def _is_excused(self) -> bool:
        """Whether the newest may be skipped, or not be the newest any more."""
        return self._book.has_rivals or any(what.startswith(("refuse", "late")) for what in self._sim.taken.values())

    def _go_back(self, step: Step) -> None:
        """Load an older checkpoint of this root, and if that is not there any more, the newest."""
        path = self._chosen(step.number, self._root)
        if path is None:
            return
        is_by_path = step.number % 2 == 1
        chosen: dict[str, Any] = {"path": path} if is_by_path else {"step": step_of(path)}
        self._sim.tell(f"goes back to {chosen}")
        self._has_gone_back = True
        try:
            self._restore(**chosen)
        except (CNRError, CheckpointException) as error:
            self._sim.tell(f"cannot go back: {type(error).__name__}: {str(error)[:200]}")
            self._restore()

    def _fork(self, source: str) -> None:
        """Begin from the newest checkpoint of another root."""
        path = self._chosen("fork", self._book.managed_roots[source])
        if path is not None:
            self._sim.tell(f"forks from {path}")
            self._restore(path=path)

    def _chosen(self, what: object, root: ManagedRoot) -> str | None:
        """A checkpoint, the same for all ranks, which the first of them takes."""
        if what not in self._run.choices:
            paths = sorted(root.created_ns, key=lambda path: root.created_ns[path])
            if what == "fork":
                paths = paths[-1:]
            self._run.choices[what] = random.Random(f"{self._sim.seed} {what}").choice(paths) if paths else None
        return self._run.choices[what]

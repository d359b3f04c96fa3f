"""Ranks: they restore, train and save, some in two threads at the same time, and judge what they are told."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import torchrec_cnr as cnr
from tests.simulator.engine import virtual
from tests.simulator.engine.ending import end_interpreter
from tests.simulator.engine.scheduler import FindingError, Scheduler
from tests.simulator.tasks.jobs import POLICIES, Attempt, Book, Run, Step
from tests.simulator.tasks.models import TinyModel, merged
from torchrec_cnr.errors import CNRError
from torchrec_cnr.manager.restore import restore_newest


class Saver:
    """Saves one model of one rank.

    Args:
        sim: The scheduler.
        book: Told of all.
        run: The run.
        rank: Which one.
        model: What is saved.
        root: Where to.
        name: What its saves are called, besides their numbers.

    Attributes:
        model: That model.
        group: The process group of its saves.
        planner: Made anew where ranks renew their plug-ins.
        writer: Several may have one.
        takes_path_of_writer: Whether no save is given a checkpoint id.
    """

    planner: cnr.CNRSavePlanner
    writer: cnr.CNRStorageWriter

    def __init__(
        self, sim: Scheduler, book: Book, run: Run, rank: int, model: TinyModel, root: str, name: str = ""
    ) -> None:
        self._sim, self._book, self._run, self._rank = sim, book, run, rank
        self._root, self._name, self.model = root, name, model
        self.group: Any = run.processes[rank].own.get(name or "saves")
        self.takes_path_of_writer = False
        self._in_flight: list[tuple[Attempt, Future[Any]]] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in the background."""
        return not self._in_flight

    @property
    def has_ended(self) -> bool:
        """Whether all in the background has ended."""
        return all(future.done() for _, future in self._in_flight)

    def path(self, step: Step) -> str:
        """Where a step saves to."""
        return f"{self._root}/step-{step.number}-{self._run.number}{self._run.job.name}{self._name}"

    def _attempt(self, step: Step, is_retry: bool = False) -> Attempt:
        run, path = self._run, self.path(step)
        token = f"{run.name}.{step.number}{self._name}{'.again' if is_retry else ''}"
        attempt = self._book.attempts.setdefault(token, Attempt(path, token, run))
        attempt.parts[self._rank] = self.model.snapshot()
        return attempt

    def _arguments(self, attempt: Attempt) -> dict[str, Any]:
        return {
            "state_dict": self.model.state(attempt.token),
            "checkpoint_id": None if self.takes_path_of_writer else attempt.path,
            "storage_writer": self.writer,
            "planner": self.planner,
            "process_group": self.group,
        }

    def save(self, step: Step) -> None:
        """Save, and remember what it said."""
        attempt = self._attempt(step)
        arguments = self._arguments(attempt)
        attempt.is_split = step.kind == "split save" and self._run.job.world_size > 1
        if attempt.is_split and self._rank == 1:
            arguments["checkpoint_id"] = attempt.path.replace(self._root, f"{self._root}-other")
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
            if attempt.path in self._book.created_ns and self._root == self._book.root:
                self._book.newest_ok = attempt.path
        self._sim.tell(f"{attempt.token}: {outcomes[self._rank]}"[:300])


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
        job, seed = run.job, 100 * run.number + sum(run.job.name.encode())
        self._model = self._new_model(seed)
        self._policy = POLICIES[job.policy]()
        self._main = Saver(sim, book, run, rank, self._model, book.root)
        self._savers, self._models = [self._main], [self._model]
        if any(step.kind.startswith("two") for steps in job.steps for step in steps):
            match job.second:
                case "same model":
                    self._savers.append(Saver(sim, book, run, rank, self._model, book.root, "second"))
                case "other model":
                    self._add_model("second", seed + 50)
                case "two others":
                    self._add_model("second", seed + 50)
                    self._add_model("third", seed + 51)
        self._pair = self._savers[-2:]
        self._renew_plug_ins(f"{book.root}/none")

    def _new_model(self, seed: int) -> TinyModel:
        job, own = self._run.job, self._run.processes[self._rank].own
        return TinyModel(self._rank, job.world_size, seed, own["replicas"] if job.num_replicas > 1 else None)

    def _add_model(self, name: str, seed: int) -> None:
        """Another model, which is saved beside the root."""
        run, root = self._run, f"{self._book.root}-{self._run.job.name}-{name}"
        self._models.append(self._new_model(seed))
        self._savers.append(Saver(self._sim, self._book, run, self._rank, self._models[-1], root, name))

    def _renew_plug_ins(self, path: str) -> None:
        """All that save at a time share one writer; and one planner, if that knows no more than one model."""
        options: Any = {"pack_bytes": 1024, "staging_bytes": self._run.job.staging_bytes}
        writer = cnr.CNRStorageWriter(path, **options)
        planners = {
            saver.model: cnr.CNRSavePlanner(saver.model.tracker, policy=self._policy) for saver in self._tracked
        }
        of_untracked = cnr.CNRSavePlanner()
        for saver in self._savers:
            saver.writer, saver.planner = writer, planners.get(saver.model, of_untracked)

    @property
    def _tracked(self) -> list[Saver]:
        """Those whose models have trackers."""
        return self._savers[:1] if self._run.job.second == "two others" else self._savers

    def live(self) -> None:
        """Do all that the plan says."""
        steps = self._run.job.steps
        self.restore()
        for step in steps[min(self._run.number, len(steps) - 1)]:
            self._sim.tell(f"--- {step.kind} #{step.number}")
            self._do(step)
        if self._run.job.ends_at_once:
            end_interpreter(self._sim)
            if not all(saver.has_ended for saver in self._savers):
                raise FindingError("lost at the end", "a save has not ended when the interpreter has")
        self.wait()

    def _do(self, step: Step) -> None:
        is_renewed = self._run.job.new_planner and all(saver.is_idle for saver in self._savers)
        if is_renewed and "save" in step.kind:
            self._renew_plug_ins(self._pair[-1].path(step))
        match step.kind:
            case "train":
                for model in self._models:
                    model.train()
            case "save" | "split save":
                self._main.save(step)
            case "async save":
                self._main.async_save(step)
            case "two saves":
                self._both(is_renewed, lambda saver: saver.save(step))
            case "two async saves":
                self._both(is_renewed, lambda saver: saver.async_save(step))
            case "sync":
                for model in self._models:
                    model.collection.sync()
            case "resolve":
                self._resolve(step)
            case "wait":
                self.wait()
            case "restore":
                self.wait()
                self.restore()

    def _resolve(self, step: Step) -> None:
        """On one rank, learn how the last save has ended."""
        if self._rank == step.number % self._run.job.world_size:
            try:
                self._main.planner.resolve_last_save()
            except CNRError as error:
                self._sim.tell(f"does not learn it: {error}")

    def _both(self, is_writer_of_second: bool, act: Callable[[Saver], None]) -> None:
        """In two threads, of which none leaves the other behind."""
        first, second = self._pair
        second.takes_path_of_writer = is_writer_of_second
        with virtual.executor(max_workers=1, thread_name_prefix="second") as threads:
            future = threads.submit(act, second)
            act(first)
        future.result()
        second.takes_path_of_writer = False

    def wait(self) -> None:
        """Learn how saves in the background ended."""
        for saver in self._savers:
            saver.wait()

    def restore(self) -> None:
        """Load the newest checkpoint, if there is one."""
        job, before = self._run.job, self._book.newest_ok
        ranks = range(job.world_size) if job.restores == "alone" else (self._rank,)
        state = {**self._model.state(""), **{f"reader.{rank}": [0, rank] for rank in ranks}}
        if job.restores != "together" and job.world_size > 1:
            path = self._load_what_it_finds(state)
        else:
            found = restore_newest(self._book.root, state, self._model.tracker, group=self._main.group)
            path = None if found is None else found[0]
        if path is None:
            self._sim.tell("finds no checkpoint")
            return
        token = state["token"]
        self._sim.tell(f"restored {path} ({token})")
        attempt = self._book.attempts.get(token)
        if attempt is None:
            raise FindingError("wrong values", f"{path} was restored with the token {token!r}")
        self._check_newest(before, path)
        self._model.check_holds(path, attempt.snapshot(merged([self._model.snapshot()], {})))
        self._model.num_steps = int(state.get(f"reader.{self._rank}", [0])[0])

    def _load_what_it_finds(self, state: dict[str, Any]) -> str | None:
        """Load what this rank takes for the newest, and share what is not sharded, as data-parallel training does."""
        is_alone = self._run.job.restores == "alone"
        path, failure = None, None
        self._sim.sleep(self._rank * self._run.job.apart_secs)
        try:
            path = cnr.latest(self._book.root)
            if is_alone and path is not None:
                self._load(path, state, no_dist=True)
        except (CNRError, CheckpointException) as error:
            failure = error
        found = self._share((failure is None, path, self._model.dense))
        if failure is not None:
            raise failure
        if not all(has_loaded for has_loaded, _, _ in found):
            raise CNRError("another rank has not loaded")
        paths = {path for _, path, _ in found}
        if is_alone:
            self._model.dense.copy_(found[0][2])
            self._run.is_apart |= len(paths) > 1
            return path
        if path is None or None in paths:
            return None
        self._load(path, state, process_group=self._main.group)
        if len(paths) > 1:
            raise FindingError("wrong values", f"ranks have loaded parts of {sorted(paths)}")
        return path

    def _load(self, path: str, state: dict[str, Any], **how: Any) -> None:
        load(state, storage_reader=cnr.CNRStorageReader(path), planner=cnr.CNRLoadPlanner(self._model.tracker), **how)

    def _share(self, value: Any) -> list[Any]:
        return list(self._main.group.exchange("all have looked", value, range(self._run.job.world_size)))

    def _check_newest(self, before: str | None, found: str) -> None:
        """What was restored is not older than what was saved when the restore began."""
        book, order = self._book, list(self._book.created_ns)
        has_passed_over = any(what.startswith(("refuse", "late")) for what in self._sim.taken.values())
        if before is None or book.has_rivals or book.is_pruned or has_passed_over:
            return
        if order.index(found) < order.index(before):
            raise FindingError("an old one restored", f"{found}, and {before} was saved later")

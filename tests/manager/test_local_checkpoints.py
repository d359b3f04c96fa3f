"""Local checkpoints: what a crash leaves there is restored, and what is stale, torn or of another job is not."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.support.models import Job, differing, plain_job, state, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.errors import ConfigurationError, DamagedError, StoreError
from torchrec_cnr.manager import manager
from torchrec_cnr.manager.open_roots import OpenRoots
from torchrec_cnr.storage import fences

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

EVERY = 4  # steps from one durable checkpoint to the next


class _Process:
    """A process of a run, although it shares this one with others."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, host: str | None = "host") -> None:
        self._fences, self._patch = fences.JobFences(), patch
        patch.setattr(manager, "open_roots", OpenRoots())
        self._enter()
        self.job = plain_job(7)
        self.tracker = cnr.RowTracker(self.job.model)
        self.root, self.saved = folder / "run", list[cnr.Saved]()
        on_saved = self.saved.append
        self.local = None if host is None else cnr.LocalCheckpoints(folder / host, on_saved=on_saved)
        self.manager = cnr.CheckpointManager(
            self.root,
            self.tracker,
            every_steps=EVERY,
            background=cnr.Background(compacts=False),
            local_checkpoints=self.local,
            on_saved=on_saved,
        )
        self.step = 0

    def _enter(self) -> None:
        self._patch.setattr(fences, "_job", self._fences)

    @property
    def local_root(self) -> Path:
        assert self.local is not None
        return self.local.root_of(str(self.root))

    def restore(self, step: int | None = None) -> int | None:
        self._enter()
        found = self.manager.restore(state(self.job), step=step)
        self.step = found or 0
        return found

    def train(self, to: int) -> list[tuple[str, str]]:
        """Train and save up to a step. Return where each checkpoint went, and its kind."""
        self._enter()
        self.saved.clear()
        for step in range(self.step + 1, to + 1):
            self.step = step
            train(self.job, step)
            self.manager.save(step, state(self.job))
        return [(_tier(saved.path, self.root), saved.kind) for saved in self.saved]

    def has_state_of(self, step: int) -> bool:
        """Whether the job is where training without any restart would be after a step."""
        return not differing(whole(state(self.job)), _trained(step))


def _tier(path: str, root: Path) -> str:
    return "durable" if Path(path).parent == root else "local"


def _trained(to: int) -> Job:
    job = plain_job(7)
    for step in range(1, to + 1):
        train(job, step)
    return whole(state(job))


Start = Callable[..., _Process]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts processes of one run."""

    def started(host: str | None = "host") -> _Process:
        return _Process(tmp_path, monkeypatch, host)

    return started


def test_each_tier_has_a_baseline_and_deltas_of_its_own(start: Start) -> None:
    """A durable delta has all rows since the durable one before, whatever local ones came in between."""
    run = start()
    assert run.restore() is None
    local, durable = ("local", "delta"), ("durable", "delta")
    assert run.train(9) == [
        ("local", "baseline"), local, local, local, ("durable", "baseline"), *4 * [local], durable, local
    ]  # fmt: skip
    for root, step in ((run.root, 8), (run.local_root, 9)):
        job = plain_job(9)
        assert cnr.restore_newest(root, state(job)) is not None
        assert not differing(whole(state(job)), _trained(step))


def test_a_crash_loses_no_step_that_is_in_the_local_tier(start: Start) -> None:
    """Also after the next crash; and the durable tier goes on."""
    first = start()
    first.restore()
    first.train(6)
    second = start()
    assert not second.has_state_of(6)
    assert second.restore() == 6
    assert second.has_state_of(6)
    assert second.train(7) == [("local", "delta")]
    third = start()
    assert third.restore() == 7
    assert third.train(9) == [("local", "delta"), ("durable", "baseline"), ("local", "delta")]
    elsewhere = start("other host")
    assert elsewhere.restore() == 8
    assert elsewhere.has_state_of(8)


def test_an_asynchronous_save_goes_to_either_tier(start: Start) -> None:
    """Each copies the rows that its own tier lacks."""
    run = start()
    run.restore()
    for step in range(1, 7):
        train(run.job, step)
        run.manager.async_save(step, state(run.job))
        run.manager.wait()
    again = start()
    assert again.restore() == 6
    assert again.has_state_of(6)
    elsewhere = start(None)
    assert elsewhere.restore() == 4
    assert elsewhere.has_state_of(4)


def test_local_checkpoints_are_stale_when_another_host_has_continued(start: Start) -> None:
    """Even if the other host has not saved, and whatever their steps are."""
    first = start()
    first.restore()
    first.train(7)
    other = start("other host")
    assert other.restore() == 4
    again = start()
    assert again.restore() == 4
    assert again.has_state_of(4)
    assert again.train(5) == [("local", "baseline")]
    assert start().restore() == 5


def test_local_checkpoints_of_a_removed_run_are_stale(start: Start) -> None:
    """A new run in the same place does not begin with what the old one has left."""
    first = start()
    first.restore()
    first.train(7)
    shutil.rmtree(first.root)
    again = start()
    assert again.restore() is None
    assert again.train(2) == [("local", "baseline"), ("local", "delta")]
    last = start()
    assert last.restore() == 2
    assert last.has_state_of(2)


def test_a_run_that_restores_nothing_does_not_use_what_is_there(start: Start) -> None:
    """Its first local checkpoint is a baseline under a name that is free."""
    first = start()
    first.restore()
    first.train(3)
    second = start()
    assert second.train(1) == [("local", "baseline")]
    newest = cnr.latest(second.local_root)
    assert newest is not None
    assert newest.rpartition("/")[2] == "step-1-2"


def test_a_restore_by_name_abandons_local_checkpoints(start: Start) -> None:
    """They are of steps that the run has gone back behind."""
    first = start()
    first.restore()
    first.train(10)
    second = start()
    assert second.restore(step=4) == 4
    assert second.has_state_of(4)
    assert second.train(5) == [("local", "baseline")]
    third = start()
    assert third.restore() == 5
    assert third.has_state_of(5)


def test_a_newer_durable_checkpoint_is_restored(start: Start) -> None:
    """Of two of one step, the local one is."""
    first = start()
    first.restore()
    first.train(8)
    shutil.rmtree(first.local_root / "step-8")
    second = start()
    assert second.restore() == 8
    assert second.has_state_of(8)
    assert second.train(9) == [("local", "baseline")]
    shutil.rmtree(second.root / "step-8")
    third = start()
    assert third.restore() == 9
    assert third.has_state_of(9)


@pytest.mark.parametrize("is_all", [False, True])
def test_torn_local_checkpoints_are_passed_over(start: Start, is_all: bool) -> None:
    """An older one is restored, or else a durable one."""
    first = start()
    first.restore()
    first.train(7)
    torn = sorted(first.local_root.glob("step-*/*.safetensors" if is_all else "step-7/*.safetensors"))
    assert torn
    for path in torn:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    second = start()
    expected = 4 if is_all else 6
    assert second.restore() == expected
    assert second.has_state_of(expected)
    second.train(9)
    third = start()
    assert third.restore() == 9
    assert third.has_state_of(9)


def test_a_local_disk_that_fails_stops_nothing(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on, durable checkpoints are saved, and local ones again as soon as they can be."""
    run = start()
    run.restore()
    run.train(2)
    away = run.local_root.with_name("away")
    run.local_root.rename(away)
    run.local_root.write_text("no directory")
    assert run.train(5) == [("durable", "baseline")]
    assert "a local checkpoint was not saved" in caplog.text
    run.local_root.unlink()
    away.rename(run.local_root)
    assert run.train(7) == [("local", "delta")] * 2
    again = start()
    assert again.restore() == 7
    assert again.has_state_of(7)


def test_abandoned_local_checkpoints_are_removed(start: Start) -> None:
    """Each restart without them leaves some; the directory does not grow."""
    for host in ("host", "other host", "host", "other host", "host"):
        run = start(host)
        run.restore()
        run.train(run.step + 6)
        run.manager.close()
    assert len(list(start().local_root.glob("step-*"))) <= 8


@pytest.mark.parametrize("record", [b"", b"{", b"[1]", b'{"fences": 5}', b'{"fences": [5, null]}', b"\xff" * 100])
def test_whatever_the_record_holds(start: Start, record: bytes) -> None:
    """A file that is damaged or not ours makes local checkpoints stale."""
    first = start()
    first.restore()
    first.train(6)
    first.local_root.with_name(f"{first.local_root.name}.json").write_bytes(record)
    second = start()
    assert second.restore() == 4
    assert second.has_state_of(4)


def test_a_fork_knows_the_rows_that_only_the_tracker_was_told_of(start: Start) -> None:
    """Marks, closing and forgetting apply to both; saves of one leave the other's rows alone."""
    job = plain_job(7)
    tracker = cnr.RowTracker(job.model)
    fork = tracker.fork()
    name = tracker.shards[0].rows.name
    tracker.mark(name, torch.tensor([1, 2]))
    assert (tracker.num_modified, fork.num_modified) == (2, 2)
    fork.mark(name, torch.tensor([3]))
    assert (tracker.num_modified, fork.num_modified) == (2, 3)
    tracker.mark_all()
    assert tracker.num_modified == fork.num_modified > 3
    tracker.close()
    with pytest.raises(ConfigurationError, match="closed"):
        fork.freeze()
    with pytest.raises(ConfigurationError, match="closed"):
        tracker.fork()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"path": "s3://bucket/run"}, "local file system"),
        ({"path": "run", "every_steps": 0}, "'every_steps'"),
        ({"path": "run", "every_secs": -1.0}, "'every_secs'"),
        ({"path": "run", "keep": 2}, "'keep'"),
    ],
)
def test_wrong_settings_are_refused(arguments: dict[str, object], match: str) -> None:
    """At once, by name."""
    with pytest.raises(ConfigurationError, match=match):
        cnr.LocalCheckpoints(**arguments)  # type: ignore[arg-type]


def test_a_replaced_process_saves_no_local_checkpoint(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Be it slow to begin or in the middle of its training: its checkpoints would be restored later."""
    slow = start()
    slow.restore()
    new = start()
    assert new.restore() is None
    new.train(3)
    assert slow.train(3) == []
    assert "another job saves here now" in caplog.text
    new.train(6)
    slow.step = 6
    assert slow.train(7) == []
    last = start()
    assert last.restore() == 6
    assert last.has_state_of(6)


def test_a_process_may_continue_a_run_twice(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time without the local tier, which is stale then, although the process is the same."""
    first = start()
    first.restore()
    first.train(7)
    first.manager.close()
    again = start(None)
    again._fences = first._fences
    assert again.restore(step=4) == 4
    again.train(5)
    again.manager.save(5, state(again.job), force=True)
    last = start()
    assert last.restore() == 5
    assert last.has_state_of(5)


def test_local_checkpoints_that_cannot_be_read_are_an_error_without_durable_ones(start: Start) -> None:
    """As durable ones would be: a run must not begin anew without a word."""
    first = start()
    first.restore()
    first.train(2)
    for path in first.local_root.glob("step-*/*.safetensors"):
        path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    with pytest.raises(DamagedError, match="no checkpoint can be restored"):
        start().restore()


def test_a_restart_that_fails_leaves_local_checkpoints_valid(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its model is another one, or the store cannot be written to for a while."""
    first = start()
    first.restore()
    first.train(6)
    other = start()
    with pytest.raises(CheckpointException):
        other.manager.restore({"other": torch.zeros(3)})

    def refusing(*_: object) -> None:
        raise StoreError("read-only")

    with monkeypatch.context() as patch:
        patch.setattr(fences.Fence, "create", refusing)
        assert start().restore() == 6
    last = start()
    assert last.restore() == 6
    assert last.has_state_of(6)


def test_local_checkpoints_of_a_run_that_restored_nothing_are_restored(start: Start) -> None:
    """It has claimed the durable root with its first local save."""
    assert start().train(3)[-1] == ("local", "delta")
    second = start()
    assert second.restore() == 3
    assert second.has_state_of(3)


def test_a_look_at_another_run_abandons_nothing(start: Start, tmp_path: Path) -> None:
    """Until something is saved."""
    first = start()
    first.restore()
    first.train(6)
    shutil.copytree(first.root, tmp_path / "other")
    looking = start()
    looking._enter()
    assert looking.manager.restore(state(looking.job), path=tmp_path / "other" / "step-4") == 4
    assert start().restore() == 4
    assert cnr.latest(first.root) == str(first.root / "step-4")


@pytest.mark.parametrize("is_file", [False, True])
def test_a_local_root_that_is_gone_does_not_stop_a_restart(
    start: Start, is_file: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The durable checkpoint is restored. What fails at each step is not logged at each step."""
    first = start()
    first.restore()
    first.train(6)
    shutil.rmtree(first.local_root)
    if is_file:
        first.local_root.write_text("no directory")
    second = start()
    assert second.restore() == 4
    saved = second.train(40)
    assert ("durable", "delta") in saved
    assert (("local", "delta") in saved) != is_file
    assert caplog.text.count("a local checkpoint was not saved") <= 8
    assert second.has_state_of(40)


def test_closed_managers_leave_no_tracker(start: Start) -> None:
    """Each would mark rows at every step."""
    run = start()
    hooks = sum(len(module._forward_hooks) for module in run.job.model.modules())
    run.manager.close()
    assert sum(len(module._forward_hooks) for module in run.job.model.modules()) < hooks
    assert not run.tracker._open_forks()


def test_a_root_has_one_local_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is written."""
    monkeypatch.chdir(tmp_path)
    local = cnr.LocalCheckpoints("local")
    spellings: list[str | Path] = ["run", "run/", "./run", f"file://{tmp_path}/run", tmp_path / "run"]
    assert len({local.root_of(spelling) for spelling in spellings}) == 1
    assert local.root_of("other") != local.root_of("run")


def test_a_manager_that_cannot_be_made_holds_nothing(tmp_path: Path) -> None:
    """Another one may take its root."""
    (tmp_path / "file").write_text("no directory")
    tracker = cnr.RowTracker(plain_job(1).model)
    local = cnr.LocalCheckpoints(tmp_path / "file" / "local")
    with pytest.raises(ConfigurationError, match="'local_checkpoints': cannot write") as raised:
        cnr.CheckpointManager(tmp_path / "run", tracker, local_checkpoints=local)
    assert raised.value.__traceback__ is not None  # which refers to the manager
    cnr.CheckpointManager(tmp_path / "run", tracker).close()


def test_a_path_is_not_local_checkpoints(tmp_path: Path) -> None:
    """The message says what to pass."""
    with pytest.raises(ConfigurationError, match=r"'local_checkpoints' must be LocalCheckpoints\(path"):
        cnr.CheckpointManager(
            tmp_path / "run",
            cnr.RowTracker(plain_job(1).model),
            local_checkpoints="local",  # type: ignore[arg-type]
        )


def _on_other_directories(rank: int, folder: Path) -> str:
    local = cnr.LocalCheckpoints(folder / f"host-{rank}")
    with pytest.raises(ConfigurationError) as raised:
        cnr.CheckpointManager(folder / "run", cnr.RowTracker(plain_job(1).model), local_checkpoints=local)
    return str(raised.value)


def test_ranks_of_several_hosts_are_refused(tmp_path: Path, rank_pool: RankPools) -> None:
    """Each host would have a part of each checkpoint only. All ranks are told."""
    messages = rank_pool(2).run(_on_other_directories, tmp_path)
    assert all("not all ranks see this directory" in message for message in messages)

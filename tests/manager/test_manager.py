"""The manager: saves when due, at the same steps on all ranks; restores what can be read; keeps its root in order."""

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.models import backward, differing, plain_job, state, step, torchrec_job, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.errors import StoreError
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.maintenance.background_upkeep import Upkeep
from torchrec_cnr.maintenance.catalog import read_catalog
from torchrec_cnr.manager.schedule import Facts, Schedule
from torchrec_cnr.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def _damage(checkpoint: Path) -> None:
    """Flip a byte in each of a checkpoint's own packs."""
    packs = list(checkpoint.glob("*.safetensors"))
    assert packs
    for pack in packs:
        faults.flip_middle(pack)


def _run(root: Path, first: int, last: int, **options: Any) -> tuple[list[cnr.Saved | None], models.Whole]:
    """Restore, train some steps with a manager, and what it answered and the state in the end."""
    job = plain_job(7)
    tracker = cnr.RowTracker(job.model)
    manager = cnr.CheckpointManager(root, tracker, **options)
    target = state(job)
    restored = manager.restore(target)
    assert restored == (first - 1 or None)
    answers = []
    for number in range(first, last + 1):
        train(job, number)
        answers.append(manager.save(number, lambda: state(job)))
    manager.close()
    found = whole(state(job))
    tracker.close()
    return answers, found


@pytest.mark.long
def test_a_run_is_resumed_from_its_newest_checkpoint(tmp_path: Path) -> None:
    """Trained to the end in two halves, the state is what it is in one go, bit for bit."""
    _, in_one_go = _run(tmp_path / "one", 1, 9)
    first, half_way = _run(tmp_path / "two", 1, 4)
    second, in_two = _run(tmp_path / "two", 5, 9)
    assert differing(half_way, in_one_go)
    assert not differing(in_two, in_one_go)
    assert [saved.kind for saved in first + second if saved] == ["baseline"] + ["delta"] * 8


def test_what_was_saved_is_told(tmp_path: Path) -> None:
    """Bytes, rows and seconds by phase, to the caller and to the callback."""
    told: list[cnr.Saved] = []
    answers, _ = _run(tmp_path, 1, 3, on_saved=told.append, policy=cnr.Consecutive())
    assert answers == told
    for number, saved in enumerate(told, 1):
        checkpoint = cnr.read_checkpoint(tmp_path / f"step-{number}")
        assert (saved.step, saved.path) == (number, str(tmp_path / f"step-{number}"))
        assert (saved.num_bytes, saved.num_rows) == (checkpoint.num_bytes, checkpoint.num_rows)
        phases = saved.phases
        secs = (phases.plan_secs, phases.encode_secs, phases.wait_secs, phases.commit_secs)
        assert all(secs)
        assert sum(secs) <= saved.stall_secs == saved.secs
        assert 0 < phases.upload_secs < saved.secs
        assert 0 < phases.num_bytes < checkpoint.num_bytes
        assert (phases.stage_secs, phases.staged_bytes) == (0, 0)


def test_progress_is_told(tmp_path: Path) -> None:
    """Of saves, restores, compactions and prunes, from little or nothing up to all of it."""
    told: dict[str, list[tuple[int, int]]] = {}

    def listen(what: str, done: int, total: int) -> None:
        told.setdefault(what, []).append((done, total))

    _run(tmp_path, 1, 6, keep=cnr.Keep(last=1), on_progress=listen)
    assert set(told) == {"save", "compact", "prune"}
    saves = told.pop("save")
    num_shards = saves[-1][1]
    assert saves == [(done, num_shards) for _ in range(6) for done in range(1, num_shards + 1)]
    told.clear()
    _run(tmp_path, 7, 7, on_progress=listen)
    assert told["restore"][-1] == (told["restore"][-1][1],) * 2
    assert [done for done, _ in told["restore"]] == sorted({done for done, _ in told["restore"]})


def test_saves_come_every_n_steps(tmp_path: Path) -> None:
    """And between them when forced."""
    answers, _ = _run(tmp_path, 1, 9, every_steps=4)
    assert [saved.step for saved in answers if saved] == [4, 8]


@pytest.mark.long
def test_time_is_asked_for_at_few_steps() -> None:
    """Every so many seconds: about when they are over, and with few questions to the other ranks."""
    asked = []

    def begin(numbers: Sequence[int]) -> Callable[[], Sequence[int]]:
        asked.append(numbers)
        return lambda: numbers

    due, saves = Schedule(None, 0.25, begin), []
    started = time.monotonic()
    number = 0
    while time.monotonic() - started < 1.1:
        number += 1
        time.sleep(0.001)
        if due(number, Facts()) is not None:
            saves.append(time.monotonic() - started)
            due.saved()
    assert 2 <= len(saves) <= 4, saves
    assert len(asked) < number / 4


@pytest.mark.parametrize("options", [{"every_steps": 0}, {"every_secs": 0.0}, {"every_secs": float("nan")}])
def test_impossible_intervals_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    """A typed error, before anything is done."""
    with pytest.raises(cnr.ConfigurationError, match="every_"):
        cnr.CheckpointManager(tmp_path, cnr.RowTracker(plain_job(1).model), **options)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The one before is restored, and the log says so; with none left, the error names them all."""
    options: dict[str, Any] = {"policy": cnr.Full()}
    _run(tmp_path, 1, 3, **options)
    _, wanted = _run(tmp_path / "other", 1, 2, **options)
    _damage(tmp_path / "step-3")
    job = plain_job(8)
    tracker = cnr.RowTracker(job.model)
    manager = cnr.CheckpointManager(tmp_path, tracker, **options)
    target = state(job)
    assert manager.restore(target) == 2
    assert not differing(whole(target), wanted)
    assert "step-3" in caplog.text
    assert manager.report is not None
    for number in (1, 2):
        _damage(tmp_path / f"step-{number}")
    with pytest.raises(cnr.DamagedError, match=r"step-3.*step-2.*step-1"):
        manager.restore(state(job))
    manager.close()


def test_a_step_whose_checkpoint_is_damaged_is_saved_again(tmp_path: Path) -> None:
    """Beside the damaged one, which stays: a job that is started again must not fail at the same step for ever."""
    _run(tmp_path, 1, 3)
    damaged = sorted(tmp_path.glob("step-3/*.safetensors"))
    _damage(tmp_path / "step-3")
    before = {path: path.read_bytes() for path in damaged}
    for name in ("step-3-2", "step-3-3"):
        job = plain_job(8)
        tracker = cnr.RowTracker(job.model)
        manager = cnr.CheckpointManager(tmp_path, tracker, policy=cnr.Consecutive())
        assert manager.restore(state(job)) == 2
        train(job, 3)
        saved = manager.save(3, state(job))
        assert saved is not None
        assert Path(saved.path).name == name
        wanted = whole(state(job))
        manager.close()
        again = plain_job(9)
        manager = cnr.CheckpointManager(tmp_path, cnr.RowTracker(again.model))
        target = state(again)
        assert manager.restore(target) == 3
        assert not differing(whole(target), wanted)
        manager.close()
        _damage(tmp_path / name)
    assert {path: path.read_bytes() for path in damaged} == before


class _Refusing:
    """State that does not take what was saved."""

    def state_dict(self) -> dict[str, int]:
        return {"position": 1}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        raise ArithmeticError("no such position")


def test_state_that_refuses_what_was_loaded_leaves_no_delta_behind(tmp_path: Path) -> None:
    """It raises after everything was read: the tracker stands on no checkpoint then, and the next save is whole."""
    job = plain_job(7)
    with closing(cnr.CheckpointManager(tmp_path, cnr.RowTracker(job.model))) as manager:
        for number in (1, 2):
            train(job, number)
            manager.save(number, state(job) | {"refusing": _Refusing()})
    job = plain_job(8)
    with closing(cnr.CheckpointManager(tmp_path, cnr.RowTracker(job.model))) as manager:
        with pytest.raises(ArithmeticError):
            manager.restore(state(job) | {"refusing": _Refusing()})
        train(job, 3)
        saved = manager.save(3, state(job))
        assert saved is not None
        assert saved.kind == "baseline"


def test_a_foreign_newest_checkpoint_is_not_taken_for_a_step(tmp_path: Path) -> None:
    """A manager names its checkpoints by their steps, and cannot tell where another one stands."""
    _run(tmp_path, 1, 1)
    (tmp_path / "step-1").rename(tmp_path / "mine")
    job = plain_job(8)
    manager = cnr.CheckpointManager(tmp_path, cnr.RowTracker(job.model))
    with pytest.raises(cnr.ConfigurationError, match="step-<n>"):
        manager.restore(state(job))
    manager.close()


def test_a_refused_save_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the file system refuses once or twice is no failure; what it always refuses is, and loses nothing."""
    job = plain_job(1)
    tracker = cnr.RowTracker(job.model)
    manager = cnr.CheckpointManager(tmp_path, tracker, num_retries=2, policy=cnr.Consecutive())
    train(job, 1)
    manager.save(1, state(job))
    put, left = Store.put_new, [2]

    def refusing(*args: Any) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise StoreError("no space")
        put(*args)

    monkeypatch.setattr(Store, "put_new", refusing)
    train(job, 2)
    saved = manager.save(2, state(job))
    assert saved is not None
    assert saved.num_retries == 2
    left[0] = 3
    train(job, 3)
    with pytest.raises(CheckpointException):
        manager.save(3, state(job))
    train(job, 4)
    saved = manager.save(4, state(job))
    assert saved is not None
    assert saved.kind == "delta"
    manager.close()
    fresh = plain_job(9)
    assert not differing(models.load(fresh, str(tmp_path / "step-4")), whole(state(job)))


def test_a_copy_is_saved_while_training_goes_on(tmp_path: Path, rank_pool: RankPools) -> None:
    """What an asynchronous save holds is the state at the call, and rows trained meanwhile are in the next one."""
    assert rank_pool(2).run(_train_during_saves, str(tmp_path)) == [[]] * 2


def _train_during_saves(rank: int, root: str) -> list[str]:
    job = torchrec_job(1)
    tracker = cnr.RowTracker(job.model)
    manager = cnr.CheckpointManager(root, tracker)
    cuts = []
    for number in range(1, 7):
        train(job, number)
        cuts.append(whole(state(job)))
        future = manager.async_save(number, state(job))
        assert future is not None
        for extra in range(3):
            train(job, 100 * number + extra)
    last = manager.wait()
    assert last is not None
    assert last.stall_secs <= last.secs
    manager.close()
    tracker.close()
    wrong = []
    for number, cut in enumerate(cuts, 1):
        loaded = models.load(torchrec_job(50), f"{root}/step-{number}")
        wrong += [f"{number}: {name}" for name in differing(loaded, cut)]
    dist.barrier()
    return wrong


def test_a_copy_that_could_not_be_saved_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure shows at the next call, and the rows are in the next checkpoint, also if that is not a copy."""
    job = plain_job(1)
    manager = cnr.CheckpointManager(tmp_path, cnr.RowTracker(job.model), policy=cnr.Consecutive())
    train(job, 1)
    manager.save(1, state(job))
    train(job, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "put_new", faults.raising("put_new"))
        manager.async_save(2, state(job))
        with pytest.raises(CheckpointException):
            manager.wait()
    train(job, 3)
    manager.save(3, state(job))
    manager.close()
    assert not differing(models.load(plain_job(9), str(tmp_path / "step-3")), whole(state(job)))


@pytest.mark.long
def test_lineages_are_compacted_and_pruned_in_the_background(tmp_path: Path) -> None:
    """After many checkpoints, the kept ones are few, load, and read little more than they need."""
    _, wanted = _run(tmp_path, 1, 30, keep=cnr.Keep(last=1))
    assert [path.name for path in tmp_path.iterdir() if (path / "manifest.json").exists()] == ["step-30"]
    lineage = read_lineage(tmp_path / "step-30")
    assert lineage.newest.is_compacted
    assert not differing(models.load(plain_job(9), str(tmp_path / "step-30")), wanted)
    _, later = _run(tmp_path, 31, 33, keep=cnr.Keep(last=1))
    assert cnr.read_checkpoint(tmp_path / "step-33").parent is None  # compacted
    assert not differing(models.load(plain_job(9), str(tmp_path / "step-33")), later)


@pytest.mark.long
def test_the_policy_says_how_much_a_restore_may_read(tmp_path: Path) -> None:
    """The more, the less is copied; all the same, what is kept loads."""
    read = {}
    for max_ratio in (1.0, 3.0):
        root, policy = tmp_path / str(max_ratio), cnr.Compacted(max_ratio=max_ratio)
        _, wanted = _run(root, 1, 30, policy=policy, keep=cnr.Keep(last=1))
        plan = cnr.plan_compaction(root / "step-30", max_ratio=1.0)
        read[max_ratio] = plan.bytes_before / plan.live_bytes
        assert not differing(models.load(plain_job(9), str(root / "step-30")), wanted)
    assert read[1.0] == 1
    assert read[3.0] > 1.3


def test_what_was_passed_over_is_compacted_later(tmp_path: Path) -> None:
    """When checkpoints come faster than they can be compacted: all that are kept are soon quick to restore from."""
    job = plain_job(1)
    tracker = cnr.RowTracker(job.model)
    manager = cnr.CheckpointManager(tmp_path, tracker, keep=cnr.Keep(last=3), background=cnr.Background(compacts=False))
    for number in range(1, 8):
        train(job, number)
        manager.save(number, state(job))
    manager.close()
    upkeep, names = Upkeep(str(tmp_path), cnr.Keep(last=3), compacts=True), ["step-5", "step-6", "step-7"]
    before = {name: models.load(plain_job(9), str(tmp_path / name)) for name in names}
    assert not any(cnr.read_checkpoint(tmp_path / name).is_compacted for name in names)
    upkeep.run_for(cnr.read_checkpoint(tmp_path / "step-7"))
    assert all(cnr.read_checkpoint(tmp_path / name).is_compacted for name in names)
    assert all(not differing(models.load(plain_job(9), str(tmp_path / name)), before[name]) for name in names)
    assert sorted(read_catalog(tmp_path).checkpoints) == names


_RAISES = """
import sys
from torchrec_cnr.maintenance import background_upkeep as upkeep
from tests.manager.test_manager import _run
upkeep.Upkeep.run_for = lambda self, checkpoint: sys.stderr.write("at work") and __import__("time").sleep(1000)
try:
    _run(sys.argv[1], 1, 2, on_saved=lambda saved: sys.exit("boom") if saved.step == 2 else None)
finally:
    assert any(thread.name == "cnr-upkeep" for thread in __import__("threading").enumerate())
"""


@pytest.mark.long
def test_a_process_that_raises_ends(tmp_path: Path) -> None:
    """Whatever the thread of upkeep is doing: who restarts ranks that died must see that one did."""
    ended = subprocess.run(
        [sys.executable, "-c", _RAISES, str(tmp_path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert (ended.returncode, "boom" in ended.stderr) == (1, True), ended.stderr
    assert cnr.latest(tmp_path) == str(tmp_path / "step-2")


def test_ranks_save_at_the_same_steps_and_fail_together(tmp_path: Path, rank_pool: RankPools) -> None:
    """By the coordinator's clock, whatever the others' say; and what only it can see is raised on all."""
    answers = rank_pool(2).run(_save_by_time, str(tmp_path))
    assert answers[0] == answers[1]
    assert len(answers[0]) >= 2


def _save_by_time(rank: int, root: str) -> list[int]:
    job = torchrec_job(1)
    manager = cnr.CheckpointManager(root, cnr.RowTracker(job.model), every_secs=0.3)
    saved = []
    for number in range(1, 60):
        backward(job, number)
        step(job)
        time.sleep(0.02 + 0.01 * rank)
        answer = manager.save(number, lambda: state(job))
        saved += [number] if answer else []
    manager.close()
    if rank == 0:
        newest = Path(root) / f"step-{saved[-1]}" / "manifest.json"
        text = newest.read_text().replace('"version":1', '"version":9', 1)
        newest.write_text(_with_digest(text))
    dist.barrier()
    manager = cnr.CheckpointManager(root, cnr.RowTracker(job.model))
    with pytest.raises(cnr.VersionError):
        manager.restore(state(job))
    manager.close()
    return saved


def _with_digest(text: str) -> str:

    body = text[text.index('"manifest":') + len('"manifest":') : text.rindex("}")]
    return f'{{"sha256":"{hashlib.sha256(body.encode()).hexdigest()}","manifest":{body}}}\n'


def test_a_corrupt_chain_gets_a_new_baseline(tmp_path: Path, rank_pool: RankPools) -> None:
    """Maintenance finds it on rank 0; then no rank saves a delta that could not be restored."""
    kinds, num_restored = zip(*rank_pool(2).run(_save_on_a_corrupt_chain, str(tmp_path)), strict=True)
    assert kinds == (["baseline", "delta", "delta", "baseline", "delta"],) * 2
    assert num_restored == (5, 5)


def _save_on_a_corrupt_chain(rank: int, root: str) -> tuple[list[str], int | None]:
    job = torchrec_job(1)
    tracker = cnr.RowTracker(job.model)
    manager = cnr.CheckpointManager(root, tracker, policy=cnr.Compacted(max_ratio=1.0), keep=cnr.Keep(last=2))
    saves = []
    for number in range(1, 6):
        if number == 3:
            if rank == 0:
                _damage(Path(root) / "step-2")
            dist.barrier()
        train(job, number)
        saves.append(manager.save(number, state(job)))
        upkeep = manager._upkeep
        while upkeep is not None and not upkeep.is_idle:
            time.sleep(0.01)
        dist.barrier()
    manager.close()
    tracker.close()
    other = torchrec_job(2)
    manager = cnr.CheckpointManager(root, cnr.RowTracker(other.model))
    restored = manager.restore(state(other))
    manager.close()
    assert not differing(whole(state(other)), whole(state(job)))
    return [saved.kind for saved in saves if saved], restored

"""Fences: of several jobs that save to one root, the one that came last goes on, and the others are told."""

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torchrec_cnr as cnr
from tests.support import faults, models
from tests.support.jobs import SavingJob
from tests.support.killing import in_child
from tests.support.models import Whole
from tests.support.ranks import RankPools
from torchrec_cnr.errors import CheckpointExistsError, FencedError
from torchrec_cnr.maintenance.verification.verify import verify
from torchrec_cnr.storage import fences
from torchrec_cnr.storage.store import Store
from torchrec_cnr.testing import FaultyStore


class OtherJob(SavingJob):
    """A job of its own, although it shares this process with others."""

    def __init__(self, root: Path, patch: Callable[[object], None]) -> None:
        self._fences = fences.JobFences()
        self._patch = patch
        super().__init__(root)

    def save(self, name: str | int, **options: Any) -> Whole:
        """Train a little, and save."""
        self._patch(self._fences)
        self.train()
        return super().save(name, **options)

    def restore(self, name: str | int | None = None, **options: Any) -> str:
        """Go on from the newest checkpoint."""
        self._patch(self._fences)
        return super().restore(name, **options)


@pytest.fixture
def new_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], OtherJob]:
    """Makes jobs that save to one root."""
    return lambda: OtherJob(tmp_path / "run", lambda jobs: monkeypatch.setattr(fences, "_job", jobs))


def assert_fenced(job: SavingJob, name: str) -> None:
    """A save is refused, and has committed nothing."""
    assert isinstance(job.failure(name), FencedError)
    assert not Path(job.path(name), "manifest.json").exists()
    del job.saved[name]


def test_a_zombie_is_refused_once_its_replacement_saves(new_job: Callable[[], OtherJob]) -> None:
    """It is told at its next save, by whom; all that was committed verifies and loads."""
    zombie = new_job()
    zombie.save("1")
    replacement = new_job()
    replacement.restore()
    zombie.save("2")  # nobody else has saved yet
    replacement.save("3")
    assert_fenced(zombie, "4")
    assert_fenced(zombie, "5")
    replacement.save("6")
    for job in (zombie, replacement):
        for name in job.saved:
            assert not verify(job.path(name)).problems
            job.assert_loads(name)
    assert cnr.latest(zombie.root) == zombie.path("6")


def test_a_zombie_that_never_saved_does_not_push_its_replacement_out(new_job: Callable[[], OtherJob]) -> None:
    """What counts is what a job knew when it was restored, not when it saves for the first time."""
    new_job().save("1")
    zombie, replacement = new_job(), new_job()
    zombie.restore()
    replacement.restore()
    replacement.save("2")
    assert_fenced(zombie, "3")
    replacement.save("4")


def test_who_loads_again_may_go_on(new_job: Callable[[], OtherJob]) -> None:
    """A job that was refused is no zombie any more once it has loaded what the other one saved."""
    first, second = new_job(), new_job()
    first.save("1")
    second.restore()
    second.save("2")
    assert_fenced(first, "3")
    first.restore()
    first.save("4")
    assert_fenced(second, "5")


@pytest.mark.parametrize("num_saves", [1, 3])
def test_a_zombie_is_refused_in_a_root_that_its_replacement_has_made_again(
    new_job: Callable[[], OtherJob], num_saves: int
) -> None:
    """Fences of both have the same name then."""
    zombie, replacement = new_job(), new_job()
    for number in range(num_saves):
        zombie.save(f"step-{number}")
    shutil.rmtree(zombie.root)
    replacement.save("step-0")
    assert_fenced(zombie, "zombie")
    replacement.save("step-1")
    replacement.assert_loads("step-1")


def test_a_job_goes_on_in_a_root_that_was_removed(new_job: Callable[[], OtherJob]) -> None:
    """It creates its fence again, so that a job that comes later is seen as such."""
    job = new_job()
    job.save("step-0")
    job.save("step-1")
    shutil.rmtree(job.root)
    job.save("step-2")
    job.save("step-3")
    job.assert_loads("step-3")
    later = new_job()
    later.restore("step-3")
    later.save("step-4")
    assert_fenced(job, "zombie")


def test_a_job_that_comes_in_mid_save_wins(new_job: Callable[[], OtherJob], monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that has begun already commits nothing; its rows go into the next one, after a load or not."""
    zombie, replacement = new_job(), new_job()
    zombie.save("1")
    replacement.restore()
    write = cnr.CNRStorageWriter.write_data

    def late(*args: object) -> object:
        monkeypatch.setattr(cnr.CNRStorageWriter, "write_data", write)
        saving = threading.Thread(target=replacement.save, args=("2",))
        saving.start()
        saving.join()
        return write(*args)

    monkeypatch.setattr(cnr.CNRStorageWriter, "write_data", late)
    assert_fenced(zombie, "3")


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    moves=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["save", "restore", "begin"])), max_size=20)
)
def test_at_most_one_job_goes_on(tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[int, str]]) -> None:
    """Jobs begin, load and save in any order: a model of three numbers says whose saves are refused."""
    root = Store.open(tmp_path_factory.mktemp("root"), sync_files=False)
    jobs = [fences.JobFences() for _ in range(3)]
    owner, knows = 0, [-1, -1, -1]  # how often the owner has changed; as of when each job goes on, or was owner
    for number, move in moves:
        if move == "begin":
            jobs[number], knows[number] = fences.JobFences(), -1
        elif move == "restore":
            jobs[number].fence(root, is_new=True)
            knows[number] = owner
        else:
            if knows[number] == -1:
                knows[number] = owner
            expected = knows[number] in (owner, -owner - 1)
            try:
                jobs[number].fence(root).claim()
            except FencedError:
                assert not expected
            else:
                assert expected
                if knows[number] >= 0:
                    owner += 1
                    knows[number] = -owner - 1
    assert fences.highest(root) == owner


@pytest.mark.parametrize("num_fences", [0, 1, 2, 3, 7, 8, 9, 100])
def test_the_highest_fence_is_found_without_listing(tmp_path: Path, num_fences: int) -> None:
    """Whatever their number."""
    root = Store.open(tmp_path, sync_files=False)
    for _ in range(num_fences):
        fences.JobFences().fence(root).claim()
    assert fences.highest(root) == num_fences == len(root.names())
    for known in range(num_fences + 3):
        assert fences.highest(root, known) == num_fences


@pytest.mark.parametrize("num_others", [0, 3])
def test_a_process_that_has_claimed_a_root_looks_for_few_fences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_others: int
) -> None:
    """A load after it, of which there may be many, does not search from the first fence again."""
    monkeypatch.setattr(fences, "_job", fences.JobFences())
    with FaultyStore(tmp_path) as store:
        root = Store.open(store.url)
        for _ in range(50):
            fences.JobFences().fence(root).claim()
        fences.claim(root)
        for _ in range(num_others):
            fences.JobFences().fence(root).claim()
        store.clear()
        fences.restored_from(root.at("step-1"))
        assert fences.fence_of(root.at("step-1")).seen == 51 + num_others
        assert len(store.operations) <= 2 * (1 + num_others)


def test_a_root_that_was_made_again_has_other_fences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if this process has known more of them."""
    monkeypatch.setattr(fences, "_job", fences.JobFences())
    root = Store.open(tmp_path / "run", sync_files=False)
    for _ in range(9):
        fences.claim(root)
    shutil.rmtree(tmp_path / "run")
    fences.claim(root)
    assert root.names() == ["fence-00000001.json"]


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b'{"host": "h"}', b'{"host": "h", "pid": 1e999}', b"[" * 100_000], ids=range(6)
)
def test_a_fence_of_which_nobody_can_tell_whose_it_is_holds(tmp_path: Path, content: bytes) -> None:
    """What is in it is for the message alone."""
    root = Store.open(tmp_path, sync_files=False)
    (tmp_path / "fence-00000001.json").write_bytes(content)
    with pytest.raises(FencedError, match="unknown owner"):
        fences.Fence(root, 0, b"ours").claim()


def test_a_fence_of_terabytes_is_not_read(tmp_path: Path) -> None:
    """Somebody made it too long: no more than its beginning is looked at."""
    root = Store.open(tmp_path, sync_files=False)
    with (tmp_path / "fence-00000001.json").open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(FencedError, match="unknown owner"):
        fences.Fence(root, 0, b"ours").claim()
    assert fences.JobFences().fence(root).seen == 1


def test_a_process_that_saves_for_a_job_is_no_other_job(tmp_path: Path, rank_pool: RankPools) -> None:
    """Saves of one job in its own process and in DCP's, in turn, stand behind one fence; a replacement stops both."""
    assert rank_pool(1).run(_save_here_and_there, tmp_path / "run") == [["fence-00000001.json"]]


def _save_here_and_there(_: int, root: Path) -> list[str]:
    job = SavingJob(root)

    def save(name: str, is_there: bool) -> None:
        job.train()
        if is_there:
            job.async_save(name, AsyncCheckpointerType.PROCESS).result(timeout=100)
        else:
            job.save(name)

    for name, is_there in (("1", True), ("2", False), ("3", True), ("4", True)):
        save(name, is_there)
    found = [found.name for found in root.glob("fence-*")]
    fences.JobFences().fence(Store.open(root)).claim()
    for is_there in (True, False):
        with pytest.raises(CheckpointException, match="another job saves here"):
            save("5", is_there)
    return found


@pytest.mark.long
def test_a_forked_process_is_another_job(tmp_path: Path) -> None:
    """It has the memory of its parent, but is not it."""
    own, again, forked = in_child(_owners, str(tmp_path / "run/1"))
    assert own == again != forked


def _owners(path: str) -> tuple[bytes, bytes, bytes]:
    """This process's, before and after a fork of it, and that of the fork."""
    own = fences.fence_of(Store.open(path)).owner
    receiving, sending = os.pipe()
    if os.fork() == 0:
        os.write(sending, fences.fence_of(Store.open(path)).owner)
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        forked = pipe.read()
    os.wait()
    return own, fences.fence_of(Store.open(path)).owner, forked


def _at_once(*calls: Callable[[], object]) -> list[BaseException]:
    """Call in threads of their own: what they have raised."""
    raised: list[BaseException] = []

    def call(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            raised.append(error)

    threads = [threading.Thread(target=call, args=(one,)) for one in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_two_threads_do_not_claim_one_fence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each puts one of its own, also if both look before either puts; the process goes on behind the later one."""
    monkeypatch.setattr(fences, "_job", fences.JobFences())
    root = Store.open(tmp_path, sync_files=False)
    both, put_new = threading.Barrier(2), Store.put_new

    def late(*args: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        put_new(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put_new", late)
        assert _at_once(lambda: fences.claim(root), lambda: fences.claim(root)) == []
    assert fences.highest(root) == 2
    fences.fence_of(root.at("step-1")).claim()


def test_what_a_thread_saw_late_does_not_fence_its_own_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that looked first and goes on last does not bring back what others know better by then."""
    monkeypatch.setattr(fences, "_job", fences.JobFences())
    root = Store.open(tmp_path, sync_files=False)
    looked, go_on, highest = threading.Event(), threading.Event(), fences.highest

    def slow(store: Store, known: int) -> int:
        found = highest(store, known)
        if not looked.is_set():
            looked.set()
            go_on.wait(1.0)
        return found

    def others() -> None:
        looked.wait(10)
        fences.claim(root)
        fences.claim(root)
        go_on.set()

    with monkeypatch.context() as patch:
        patch.setattr(fences, "highest", slow)
        assert _at_once(lambda: fences.claim(root), others) == []
    fences.fence_of(root.at("step-1")).claim()


def test_savers_without_a_lineage_need_no_fence(tmp_path: Path) -> None:
    """Checkpoints by DCP's own planner stand alone, and several jobs may write them."""
    job = models.plain_job(0)
    dcp.save(models.state(job), storage_writer=models.writer(tmp_path / "run/1"))
    assert [found.name for found in (tmp_path / "run").iterdir()] == ["1"]


def test_planners_without_a_tracker_need_no_fence(tmp_path: Path) -> None:
    """Jobs side by side save to one root, again and again."""
    jobs = [fences.JobFences() for _ in range(2)]
    for step in range(2):
        for number, own in enumerate(jobs):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fences, "_job", own)
                path = str(tmp_path / f"run/{number}-{step}")
                dcp.save(models.state(models.plain_job(0)), checkpoint_id=path, **_untracked(path))
    assert sorted(found.name for found in (tmp_path / "run").iterdir()) == ["0-0", "0-1", "1-0", "1-1"]


def _untracked(path: str) -> dict[str, Any]:
    return {"storage_writer": models.writer(path), "planner": cnr.CNRSavePlanner()}


def test_planners_without_a_tracker_write_to_no_other_directory(tmp_path: Path) -> None:
    """The root may be one where the job has no right to write."""
    (tmp_path / "1").mkdir()
    faults.give_to_nobody(tmp_path / "1")
    assert in_child(_save_as_nobody, str(tmp_path / "1")) == ["1"]


def _save_as_nobody(path: str) -> list[str]:
    job = models.plain_job(0)
    for above in list(Path(path).parents)[:-2]:
        above.chmod(0o555)
    faults.become_nobody()
    dcp.save(models.state(job), **_untracked(path))
    assert cnr.read_checkpoint(path).kind == "baseline"
    return os.listdir(Path(path).parent)


def test_a_job_that_is_ahead_is_refused_although_its_ids_are_taken(new_job: Callable[[], OtherJob]) -> None:
    """Its replacement meets an id that is taken, and claims the root all the same: it catches up."""
    ahead = new_job()
    ahead.save("1")
    replacement = new_job()
    replacement.restore()
    ahead.save("2")
    assert isinstance(replacement.failure("2"), CheckpointExistsError)
    assert_fenced(ahead, "3")
    replacement.save("3")

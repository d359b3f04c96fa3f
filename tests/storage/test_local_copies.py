"""Local copies: restores read from them what is right there, and nothing that is wrong in them does any harm."""

import errno
import os
import pickle
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchrec_cnr as cnr
from tests.support.jobs import SavingJob, adagrad_job, warnings
from tests.support.models import Whole, differing, plain_job, state, train, whole
from tests.support.ranks import run_ranks
from torchrec_cnr.errors import ConfigurationError, DamagedError
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.manager import unused_copies
from torchrec_cnr.storage import local_copies
from torchrec_cnr.testing import FaultyStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def _loaded(path: str, local: cnr.LocalCopies | None) -> Whole:
    target = state(adagrad_job(99))
    dcp.load(target, storage_reader=cnr.CNRStorageReader(path, local=local))
    return whole(target)


def _saved(root: Path, local: cnr.LocalCopies, num_saves: int = 3) -> tuple[str, Whole]:
    with SavingJob(root, local=local) as job:
        return job.path(num_saves - 1), job.train_and_save(*range(num_saves))


def _copies(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.name.endswith(".safetensors.copy"))


def _names(folder: Path) -> set[str]:
    return {each.name.removesuffix(".copy") for each in _copies(folder)}


def test_a_restore_reads_rows_from_copies_only(tmp_path: Path) -> None:
    """Manifests come from the store, which alone decides what a checkpoint is."""
    with FaultyStore(tmp_path / "store") as store:
        local = cnr.LocalCopies(tmp_path / "local")
        with SavingJob(store.url, local=local) as job:
            expected = job.train_and_save(0, 1, 2)
        store.clear()
        assert differing(_loaded(job.path(2), local), expected) == []
        kinds = Counter(Path(each.path).suffix for each in store.operations if each.kind == "read")
    assert kinds[".safetensors"] == 0
    assert kinds[".json"] > 0
    assert (local.num_local_bytes > 0, local.num_store_bytes) == (True, 0)


def test_what_was_read_from_the_store_is_copied(tmp_path: Path) -> None:
    """A host that has lost its copies, or never had any, reads them once."""
    path, expected = _saved(tmp_path / "run", cnr.LocalCopies(tmp_path / "lost"))
    local = cnr.LocalCopies(tmp_path / "local")
    assert differing(_loaded(path, local), expected) == []
    num_bytes = local.num_store_bytes
    assert (local.num_local_bytes, num_bytes > 0) == (0, True)
    assert differing(_loaded(path, local), expected) == []
    assert (local.num_local_bytes, local.num_store_bytes) == (num_bytes, num_bytes)


def _damage(path: Path, kind: str, place: float) -> None:
    data = path.read_bytes()
    position = int(place * (len(data) - 1))
    if kind == "torn":
        path.write_bytes(data[:position])
    elif kind == "changed":
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x40]) + data[position + 1 :])
    elif kind == "hole":
        path.write_bytes(data[:position] + bytes(len(data) - position))
    elif kind == "longer":
        path.write_bytes(data + data)
    elif kind == "foreign":
        path.write_bytes(os.urandom(len(data)))
    else:
        path.unlink()
        if kind == "link":
            path.symlink_to("/etc/passwd")
        elif kind == "directory":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)


_KINDS = ("torn", "changed", "hole", "longer", "foreign", "gone", "link", "directory", "pipe")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damages=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(_KINDS), st.floats(0, 1)), min_size=1, max_size=4))
def test_whatever_is_in_copies_a_restore_is_right(
    tmp_path_factory: pytest.TempPathFactory, damages: list[tuple[int, str, float]]
) -> None:
    """And after it, the copies are right again, unless a name is taken by something that is not a file."""
    folder = tmp_path_factory.mktemp("run")
    local = cnr.LocalCopies(folder / "local")
    path, expected = _saved(folder / "run", local)
    for index, kind, place in damages:
        files = [each for each in _copies(folder / "local") if each.is_file() and not each.is_symlink()]
        if files:
            _damage(files[index % len(files)], kind, place)
    assert differing(_loaded(path, local), expected) == []
    before = local.num_store_bytes
    assert differing(_loaded(path, local), expected) == []
    assert local.num_store_bytes == before or {kind for _, kind, _ in damages} & {"link", "directory", "pipe"}


def test_copies_of_another_run_are_not_taken(tmp_path: Path) -> None:
    """Even if its data files have the same names, as those of a copied root do."""
    local = cnr.LocalCopies(tmp_path / "local")
    _saved(tmp_path / "run", local)
    shutil.copytree(tmp_path / "run", tmp_path / "copied")
    for pack in (tmp_path / "copied").rglob("*.safetensors"):
        pack.write_bytes(bytes(pack.stat().st_size))
    with pytest.raises(dcp.api.CheckpointException) as raised:
        _loaded(str(tmp_path / "copied" / "2"), local)
    assert isinstance(raised.value.failures[0][0], DamagedError)


def test_a_full_disk_costs_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once."""

    def refuse(path: str, flags: int = 0) -> Any:
        Path(path).write_bytes(b"a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(local_copies, "_opened", refuse)
    with warnings() as messages:
        path, expected = _saved(tmp_path / "run", local := cnr.LocalCopies(tmp_path / "local"))
    assert [message for message in messages if "copies" in message] == [
        f"{tmp_path}/local: copies cannot be used; the store is used instead: [Errno 28] No space left on device"
    ]
    assert _copies(tmp_path / "local") == []
    assert differing(_loaded(path, local), expected) == []


def test_a_directory_that_cannot_be_made_costs_no_save(tmp_path: Path) -> None:
    (tmp_path / "local").write_text("a file")
    with warnings() as messages:
        path, expected = _saved(tmp_path / "run", local := cnr.LocalCopies(tmp_path / "local"))
    assert differing(_loaded(path, local), expected) == []
    assert len([message for message in messages if "copies cannot be used" in message]) == 1


def test_copies_take_no_more_than_they_may(tmp_path: Path) -> None:
    """The oldest are removed."""
    _saved(tmp_path / "run", cnr.LocalCopies(tmp_path / "all"), 8)
    sizes = [each.stat().st_blocks * 512 for each in _copies(tmp_path / "all")]
    room = sum(sizes) // 2
    path, expected = _saved(tmp_path / "run2", local := cnr.LocalCopies(tmp_path / "local", max_bytes=room), 8)
    assert 0 < sum(each.stat().st_blocks * 512 for each in _copies(tmp_path / "local")) <= room
    own = {pack.name for pack in cnr.read_checkpoint(path).manifest.packs}
    assert own <= _names(tmp_path / "local"), "the newest are there"
    assert differing(_loaded(path, local), expected) == []


def test_by_default_copies_leave_room_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a quarter of the disk, or half of what others leave of it."""
    local = cnr.LocalCopies(tmp_path / "local")
    for total, free, taken, most in ((1000, 900, 0, 250), (1000, 100, 0, 50), (1000, 100, 60, 80), (1000, 0, 0, 0)):
        usage = shutil._ntuple_diskusage(total, total - free, free)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
            assert local._most_bytes(taken) == most


def test_a_data_file_that_is_larger_than_the_room_is_not_copied(tmp_path: Path) -> None:
    path, expected = _saved(tmp_path / "run", local := cnr.LocalCopies(tmp_path / "local", max_bytes=1))
    assert _copies(tmp_path / "local") == []
    assert differing(_loaded(path, local), expected) == []
    local = cnr.LocalCopies(tmp_path / "some", max_bytes=1 << 16)
    local.put(str(tmp_path / "run" / "4" / "small"), [b"1"])
    local.put(str(tmp_path / "run" / "4" / "large"), [bytes(1 << 17)])
    assert [path.name for path in (tmp_path / "some").glob("*/*")] == ["small.copy"], "nothing makes way for it"


def test_what_cannot_be_removed_still_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another user's."""
    local = cnr.LocalCopies(tmp_path, max_bytes=10_000)
    local.put("/run/1/a", [bytes(8192)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda path: (_ for _ in ()).throw(PermissionError(path)))
        local.put("/run/1/b", [bytes(8192)])
    assert [path.name for path in tmp_path.glob("*/*")] == ["a.copy"]
    local.put("/run/1/b", [bytes(8192)])
    assert [path.name for path in tmp_path.glob("*/*")] == ["b.copy"]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """What is behind it would not be counted."""
    local = cnr.LocalCopies(tmp_path / "local")
    local.put("/run/1/a", [b"1"])
    (folder,) = (tmp_path / "local").iterdir()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with warnings() as messages:
        local.put("/run/1/b", [b"1"])
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["a.copy"]
    assert "a link, whose files would not be counted" in messages[0]


def _counted(local: cnr.LocalCopies) -> int:
    local.used(3)
    return local.num_local_bytes


def test_a_fork_does_not_wait_for_a_thread_of_its_parent(tmp_path: Path) -> None:
    """Which may hold a lock at that moment."""
    local = cnr.LocalCopies(tmp_path)
    with local._lock:
        child = os.fork()
        if child == 0:
            os._exit(_counted(local))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_other_files_in_the_directory_are_never_removed(tmp_path: Path) -> None:
    """Nor those of other runs, by a run that removes what it does not use."""
    folder = tmp_path / "local"
    for name in ("mine/x.safetensors.copy", "0123456789abcdef/x.safetensors", "0123456789abcdef/x.safetensors.copy"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(10_000))
    local = cnr.LocalCopies(folder, max_bytes=1_000_000)
    _saved(tmp_path / "run", local)
    _saved(tmp_path / "other", local)
    others, num_copies = sorted(folder.glob("[m0]*/*")), len(_copies(folder))
    for copy in _copies(folder):
        os.utime(copy, (0, 0))
    local.remove_unused(str(tmp_path / "run"), set())
    assert num_copies > len(_copies(folder)) > len(others)
    cnr.LocalCopies(folder, max_bytes=4096).put(str(tmp_path / "run" / "4" / "x.safetensors"), [bytes(4096)])
    assert sorted(folder.glob("[m0]*/*")) == others
    assert [path.name for path in folder.glob("cnr*/*")] == ["x.safetensors.copy"]


@pytest.mark.parametrize("given", ["s3://bucket/x", "memory://x", "", 3, "a\0b", "a\ud800"])
def test_copies_are_local(given: Any) -> None:
    with pytest.raises(ConfigurationError):
        cnr.LocalCopies(given)


@pytest.mark.parametrize("max_bytes", [0, -1, 1.5, "1"])
def test_room_is_a_count(max_bytes: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_bytes"):
        cnr.LocalCopies("local", max_bytes=max_bytes)


def test_copies_go_to_another_process(tmp_path: Path) -> None:
    local = cnr.LocalCopies(tmp_path / "local", max_bytes=1 << 20)
    other = pickle.loads(pickle.dumps(local))
    other.put(str(tmp_path / "run" / "1" / "x.safetensors"), [b"abc"])
    assert local.read(str(tmp_path / "run" / "1" / "x.safetensors"), 0, 3, lambda piece: None) is not None


def test_asynchronous_saves_are_copied(tmp_path: Path) -> None:
    local = cnr.LocalCopies(tmp_path / "local")
    with SavingJob(tmp_path / "run", local=local) as job:
        job.train()
        job.async_save("1").result()
    assert differing(_loaded(job.path("1"), local), job.saved["1"]) == []
    assert (local.num_local_bytes > 0, local.num_store_bytes) == (True, 0)


def test_a_manager_reads_what_it_compacted_from_copies(tmp_path: Path) -> None:
    """Its data files are copied when they are written."""
    job = plain_job(1, "adagrad")
    local = cnr.LocalCopies(tmp_path / "local")
    tracker = cnr.RowTracker(job.model)
    manager = cnr.CheckpointManager(tmp_path / "run", tracker, policy=cnr.Compacted(max_ratio=1.05), local=local)
    for number in range(1, 6):
        train(job, number)
        manager.save(number, state(job))
    manager.close()
    tracker.close()
    newest = cnr.latest(tmp_path / "run")
    assert newest is not None
    assert len(cnr.read_checkpoint(newest).manifests) > 1, "it was compacted"
    again = plain_job(9, "adagrad")
    manager = cnr.CheckpointManager(tmp_path / "run", cnr.RowTracker(again.model), local=local)
    assert manager.restore(target := state(again)) == 5
    manager.close()
    assert differing(whole(target), whole(state(job))) == []
    assert local.num_store_bytes == 0


def test_a_manager_removes_copies_that_it_does_not_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When they take more than half of their room. All that the newest checkpoint needs stays, however old."""
    monkeypatch.setattr(local_copies, "_YOUNG_SECS", 0.0)
    monkeypatch.setattr(unused_copies, "_EVERY_SECS", 0.0)
    job = plain_job(1, "adagrad")
    tracker = cnr.RowTracker(job.model)
    policy = cnr.Intermittent()
    room = 200_000
    local = cnr.LocalCopies(tmp_path / "local", max_bytes=room)
    manager = cnr.CheckpointManager(tmp_path / "run", tracker, policy=policy, local=local)
    names, num_removed = set[str](), 0
    for number in range(1, 9):
        train(job, number)
        saved = manager.save(number, state(job))
        assert saved is not None
        manager._unused.wait()
        lineage = read_lineage(saved.path).checkpoints
        used = {pack.name for checkpoint in lineage for pack in checkpoint.manifest.packs}
        names |= used
        kept = _names(tmp_path / "local")
        assert used <= kept
        num_removed = len(names - kept)
    manager.close()
    tracker.close()
    assert num_removed > 0


def _lost_rank(rank: int, root: str, folder: str) -> tuple[int, int]:
    """Save, lose the copies of rank 1, and restore in a new job: bytes from copies, and from the store."""
    own = Path(folder) / str(rank)
    for seed, number in ((1, 1), (2, None)):
        job, local = plain_job(seed, "adagrad"), cnr.LocalCopies(own)
        tracker = cnr.RowTracker(job.model)
        manager = cnr.CheckpointManager(root, tracker, local=local, timeout_secs=60)
        if number is not None:
            train(job, number)
            manager.save(number, state(job))
        else:
            assert manager.restore(state(job)) == 1
        manager.close()
        tracker.close()
        if rank == 1 and number is not None:
            shutil.rmtree(own, ignore_errors=True)
    return local.num_local_bytes, local.num_store_bytes


def test_only_a_rank_that_lost_its_copies_reads_from_the_store(tmp_path: Path) -> None:
    """The tables are replicated here, so DCP has one of the ranks write each; the other reads that from the store."""
    found = run_ranks(2, _lost_rank, str(tmp_path / "run"), str(tmp_path / "local"))
    assert found[0][0] > 0
    assert found[1][0] == 0
    assert found[1][1] == sum(found[0])


def test_a_restart_reads_nothing_from_the_store_after_a_kill(tmp_path: Path) -> None:
    """Copies need not be forced to disk for that: the operating system has them."""
    local = cnr.LocalCopies(tmp_path / "local")
    path, expected = _saved(tmp_path / "run", local)
    for folder, _, names in os.walk(tmp_path / "run"):
        for name in names:
            if name.endswith(".safetensors"):
                os.truncate(os.path.join(folder, name), 0)
    assert differing(_loaded(path, local), expected) == []
    assert torch.tensor(local.num_store_bytes) == 0

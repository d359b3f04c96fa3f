"""Two jobs with one root: the one that restored last goes on, and the other one is refused."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.support import models
from tests.support.command_line import cnr_text
from tests.support.models import differing, plain_job, state, train, whole
from torchrec_cnr.errors import FencedError, StoreError
from torchrec_cnr.manager import manager
from torchrec_cnr.manager.open_roots import OpenRoots
from torchrec_cnr.saving import commit
from torchrec_cnr.storage import fences
from torchrec_cnr.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class _ManagedJob:
    """A job of its own, although it shares this process with others."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._fences, self._patch = fences.JobFences(), patch
        patch.setattr(manager, "open_roots", OpenRoots())
        self.job = plain_job(1)
        self.manager = cnr.CheckpointManager(
            root, cnr.RowTracker(self.job.model), background=cnr.Background(compacts=False)
        )

    def restore(self) -> int | None:
        self._patch.setattr(fences, "_job", self._fences)
        return self.manager.restore(state(self.job))

    def save(self, step: int) -> str:
        self._patch.setattr(fences, "_job", self._fences)
        train(self.job, step)
        saved = self.manager.save(step, state(self.job))
        assert saved is not None
        return Path(saved.path).name


def test_a_job_that_is_ahead_is_refused_once_its_replacement_has_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each step that the replacement comes to would have been saved already."""
    ahead, replacement = _ManagedJob(tmp_path, monkeypatch), _ManagedJob(tmp_path, monkeypatch)
    assert ahead.restore() is None
    ahead.save(1)
    assert replacement.restore() == 1
    with pytest.raises(CheckpointException) as raised:
        ahead.save(2)
    assert all(isinstance(failure, FencedError) for failure, _ in raised.value.failures.values())
    assert [replacement.save(step) for step in (2, 3)] == ["step-2", "step-3"]
    assert not differing(models.load(plain_job(9), str(tmp_path / "step-3")), whole(state(replacement.job)))


def test_a_root_that_cannot_be_written_to_is_restored_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever only looks at what training has reached needs no right to write."""
    _ManagedJob(tmp_path, monkeypatch).save(1)

    def refusing(*_: object) -> None:
        raise StoreError("read-only")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put_new", refusing)
        assert _ManagedJob(tmp_path, monkeypatch).restore() == 1
    assert "cannot claim the root: this job cannot save there" in caplog.text


def test_a_second_manager_of_one_process_is_refused(tmp_path: Path) -> None:
    """However its root is spelled, until the first one is closed or gone."""
    first = cnr.CheckpointManager(tmp_path / "run", cnr.RowTracker(plain_job(1).model))
    with pytest.raises(cnr.ConfigurationError, match="already has a manager for this root"):
        cnr.CheckpointManager(f"{tmp_path}/run/", cnr.RowTracker(plain_job(2).model))
    cnr.CheckpointManager(tmp_path / "other", cnr.RowTracker(plain_job(2).model)).close()
    first.close()
    second = cnr.CheckpointManager(tmp_path / "run", cnr.RowTracker(plain_job(1).model))
    del second
    cnr.CheckpointManager(tmp_path / "run", cnr.RowTracker(plain_job(1).model)).close()


def test_a_fresh_job_is_the_newest_of_a_root_with_a_checkpoint_from_the_future(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that was ahead must not hide all that comes after it; the age of such a checkpoint is told."""
    job, now_ns = plain_job(1), time.time_ns
    ahead = cnr.CheckpointManager(tmp_path, cnr.RowTracker(job.model), background=cnr.Background(compacts=False))
    with monkeypatch.context() as patch:
        patch.setattr(commit.time, "time_ns", lambda: now_ns() + 5 * 3600 * 10**9)
        ahead.save(7, state(job))
    ahead.close()
    assert re.search(r"in \d+ (h|min)", cnr_text("ls", tmp_path))
    assert "by this machine's clock" in cnr_text("inspect", tmp_path)
    other = plain_job(2)
    fresh = cnr.CheckpointManager(tmp_path, cnr.RowTracker(other.model), background=cnr.Background(compacts=False))
    fresh.save(1, state(other))
    fresh.close()
    assert cnr.latest(tmp_path) == str(tmp_path / "step-1")


_RAISES = """
import sys
import threading
import time

threading._register_atexit(time.sleep, 0.5)  # called last: executors refuse work by then
import torchrec_cnr as cnr
from tests.support.models import plain_job, state, train
from torchrec_cnr.maintenance import background_upkeep as upkeep

def work(self, checkpoint):
    from concurrent.futures import ThreadPoolExecutor
    while True:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(int).result()

upkeep.Upkeep.run_for = work
job = plain_job(1)
manager = cnr.CheckpointManager(sys.argv[1], cnr.RowTracker(job.model), keep=cnr.Keep(last=1))
train(job, 1)
manager.save(1, state(job))
time.sleep(0.3)
raise ValueError("the real one")
"""


def test_an_exception_without_close_is_told_alone(tmp_path: Path) -> None:
    """What the upkeep cannot do any more when the interpreter ends is no failure."""
    done = subprocess.run([sys.executable, "-c", _RAISES, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.rstrip().endswith("ValueError: the real one")

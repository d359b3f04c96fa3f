"""The newest checkpoint of a root, and the outcome of a save."""

import errno
import logging
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.lineage.tensorless_roots import TensorlessRoot, as_newer_version
from tests.support.jobs import SavingJob
from tests.support.models import plain_job
from torchrec_cnr.errors import (
    StoreError,
    VersionError,
)
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.format.manifest_parser import VERSION
from torchrec_cnr.lineage import latest as newest
from torchrec_cnr.lineage.abandoned import mark_abandoned
from torchrec_cnr.lineage.checkpoint import committed, read_checkpoint
from torchrec_cnr.lineage.latest import latest, newest_first
from torchrec_cnr.storage.store import Store
from torchrec_cnr.testing import FaultyStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_latest_of_nothing_is_none(root: TensorlessRoot) -> None:
    """An empty directory, and one that is not there, have no newest checkpoint."""
    assert latest(root.url) is None
    assert latest(f"{root.url}/missing") is None


def test_latest_goes_by_time_not_by_name(root: TensorlessRoot) -> None:
    """Of a hundred checkpoints the one committed last is the newest, whatever its name."""
    for number in range(100):
        root.commit(f"step-{number}", (number * 37) % 100 + 1)
    times = {number: (number * 37) % 100 + 1 for number in range(100)}
    newest = max(times, key=lambda number: times[number])
    assert newest not in (9, 99)
    assert latest(root.url) == root.at(f"step-{newest}")


def test_latest_reads_manifests_of_a_remote_store_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reader waits for the others here: one after another would never end."""
    together = threading.Barrier(4, timeout=20)
    really_read = newest._start

    def read(store: Store, level: int) -> object:
        together.wait()
        return really_read(store, level)

    with FaultyStore(tmp_path) as remote:
        root = TensorlessRoot(remote.url)
        for number in range(4):
            root.commit(f"step-{number}", number + 1)
        monkeypatch.setattr(newest, "_start", read)
        assert latest(root.url) == root.at("step-3")


def _marked(root: TensorlessRoot, numbers: range) -> None:
    """Commit checkpoints, and mark them as abandoned."""
    for number in numbers:
        root.commit(f"step-{number}", number + 1)
    mark_abandoned(root.store, [read_checkpoint(root.at(f"step-{number}")) for number in numbers], None)


def test_abandoned_checkpoints_cost_one_request_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As others do: the first bytes of a manifest contain the digest that a mark names."""
    with FaultyStore(tmp_path) as store:
        root = TensorlessRoot(store.url)
        root.commit("step-0", 1)
        _marked(root, range(1, 10))
        store.clear()
        assert latest(root.url) == root.at("step-0")
        assert Counter(operation.kind for operation in store.operations) == {"list": 1, "read": 10 + 2}
        marked = [checkpoint.store.url for checkpoint in newest_first(root.url, with_abandoned=True)]
    assert marked == [root.at(f"step-{number}") for number in reversed(range(10))]
    assert caplog.text == ""


def test_a_mark_of_another_checkpoint_does_not_hide_one(root: TensorlessRoot, caplog: pytest.LogCaptureFixture) -> None:
    """Its name was used again. If its digest was altered, or its time is missing, it is corrupt, which is logged."""
    _marked(root, range(3))
    abandoned = root.read("step-2")
    root.store.at("step-2").remove(MANIFEST_FILE)
    root.commit("step-2", 9, save_id="another")
    assert latest(root.url) == root.at("step-2")
    root.put("step-2", root.read("step-2").replace(b'"created_ns"', b'"created_at"'))
    assert latest(root.url) is None
    assert "step-2/manifest.json" in caplog.text
    caplog.clear()
    root.put("step-2", abandoned[:75] + abandoned[75:].replace(b'"created_ns"', b'"created_at"'))
    assert latest(root.url) is None
    assert "step-2/manifest.json" in caplog.text


def test_latest_compares_times_as_numbers(root: TensorlessRoot) -> None:
    """A time with more digits is later."""
    root.commit("a", 9)
    root.commit("b", 10)
    assert latest(root.url) == root.at("b")


def test_latest_passes_over_what_is_no_checkpoint(root: TensorlessRoot) -> None:
    """Files, empty directories and saves that died are no checkpoints."""
    root.commit("good", 1)
    root.store.put("notes.txt", [b"x"])
    for name in ("empty", "died"):
        root.store.at(name).make()
    root.store.at("died").put("5a7e-0-0.safetensors", [b"data"])
    assert latest(root.url) == root.at("good")


def test_checkpoints_that_are_pruned_meanwhile_are_passed_over(root: TensorlessRoot) -> None:
    """Their manifests were listed, and are gone when they are read; the older ones follow."""
    for number in range(4):
        root.commit(f"step-{number}", number + 1)
    found = newest_first(root.url)
    names = [next(found).store.path.rpartition("/")[2]]
    for name in ("step-1", "step-2"):
        root.store.at(name).remove(MANIFEST_FILE)
    names += [checkpoint.store.path.rpartition("/")[2] for checkpoint in found]
    assert names == ["step-3", "step-0"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign", "another digest"])
def test_latest_passes_over_damage_with_a_warning(
    root: TensorlessRoot, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """The newest checkpoint that is good is found, and each damaged one that is newer is named in the log."""
    root.commit("good", 1)
    root.commit("bad", 2)
    data = root.read("bad")
    damaged = {
        "truncated": data[:-20],
        "flipped": data.replace(b'"world_size":1', b'"world_size":3'),
        "empty": b"",
        "foreign": b"{}\n" * 400,
        "another digest": data.replace(data[11:75], b"0" * 64),
    }
    root.put("bad", damaged[damage])
    with caplog.at_level(logging.WARNING):
        assert latest(root.url) == root.at("good")
    assert "bad/manifest.json" in caplog.text  # what has no time of commit may be the newest


def test_latest_refuses_to_go_behind_a_newer_version(root: TensorlessRoot) -> None:
    """If the newest was written by a newer version, resuming from an older one would lose work silently."""
    root.commit("old", 1)
    root.commit("new", 2)
    root.put("new", as_newer_version(root.read("new")))
    with pytest.raises(VersionError, match=rf"new/manifest\.json: written in format version {VERSION + 1}.*upgrade"):
        latest(root.url)
    root.commit("newest", 3)
    assert latest(root.url) == root.at("newest")


def test_latest_verifies_what_it_names(root: TensorlessRoot) -> None:
    """A time of commit that was altered to look newest is not believed."""
    root.commit("good", 5)
    root.commit("bad", 1)
    root.put("bad", root.read("bad").replace(b'"created_ns":1', b'"created_ns":9'))
    assert latest(root.url) == root.at("good")


def test_latest_reports_what_cannot_be_read(root: TensorlessRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails is no reason to resume from an older checkpoint."""
    root.commit("old", 1)
    root.commit("new", 2)
    read = Store.read

    def fail(self: Store, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        if self.path.endswith("/new"):
            failure = StoreError("cannot read: connection lost")
            failure.errno = errno.EIO
            raise failure
        return read(self, name, start, stop)

    monkeypatch.setattr(Store, "read", fail)
    with pytest.raises(StoreError, match="connection lost"):
        latest(root.url)


# The fate of a save


def test_fate_of_a_save_is_read_from_the_store(root: TensorlessRoot, caplog: pytest.LogCaptureFixture) -> None:
    """A save committed if its manifest is there: not if none is, another's is, or what is there cannot be read."""
    root.commit("mine", 1, save_id="save-1")
    found = committed(root.at("mine"), "save-1")
    assert found is not None
    assert found.manifest.save_id == "save-1"
    assert committed(root.at("mine"), "save-2") is None
    assert committed(root.at("missing"), "save-1") is None
    root.put("mine", root.read("mine")[:-5])
    assert committed(root.at("mine"), "save-1") is None
    assert "the next save includes its rows" in caplog.text


def test_fate_of_a_save_is_not_guessed(root: TensorlessRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store does not answer, nobody knows: an error is raised instead of an answer given."""
    root.commit("mine", 1, save_id="save-1")

    def fail(*_: object, **__: object) -> bytes:
        raise StoreError("cannot read: connection lost")

    monkeypatch.setattr(Store, "read", fail)
    with pytest.raises(StoreError):
        committed(root.at("mine"), "save-1")


@pytest.mark.parametrize("name", ["valid", "corrupt"])
@pytest.mark.parametrize("created_ns", [2**62 - 2, 2**62, 2**63 - 1, 10**20 - 1])
def test_no_time_keeps_a_job_from_saving(tmp_path: Path, created_ns: int, name: str) -> None:
    """A manifest that is damaged, or of a time after which the format has no other, is not what a save must follow."""
    root = TensorlessRoot(str(tmp_path))
    if name == "corrupt" or created_ns > 2**62:
        root.put(name, b'{"sha256":"0","manifest":{"format":"torchrec_cnr","version":1,"created_ns":%d,' % created_ns)
    else:
        root.commit(name, created_ns)
    job = SavingJob(tmp_path, plain_job)
    job.train_and_save(*range(3))
    job.assert_loads(2)
    job.close()


def test_a_save_follows_those_of_a_clock_that_is_ahead(tmp_path: Path) -> None:
    """It is the newest, although this machine's clock is behind that of another which has saved there before."""
    TensorlessRoot(str(tmp_path)).commit("ahead", time.time_ns() + 10**15)
    job = SavingJob(tmp_path, plain_job)
    job.train_and_save("behind")
    assert latest(tmp_path) == job.path("behind")
    job.close()

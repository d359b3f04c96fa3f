"""How much of its lineage a save reads: a long one costs no more than a short one, and a lost link is noticed."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchrec_cnr as cnr
from tests.support import faults
from tests.support.jobs import SavingJob
from torchrec_cnr.errors import StoreError
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.lineage import intact
from torchrec_cnr.storage.files import Listing
from torchrec_cnr.storage.store import Store
from torchrec_cnr.testing import FaultyStore

MAX_REQUESTS = 15  # of a delta in one data file; creating a directory is none

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts what a store is asked for, in its one element."""
    count = [0]

    def add() -> None:
        count[0] += 1

    with monkeypatch.context() as patch:
        patch.setattr(intact, "_READ_WHOLE_EVERY", 4)
        for name in ("read", "_size"):
            patch.setattr(Store, name, getattr(Store, name))
            faults.act_before(Store, name, add)
        yield count


def _costs(job: SavingJob, num_saves: int, reads: list[int]) -> list[int]:
    """What each save reads."""
    costs = []
    for step in range(num_saves):
        reads[0] = 0
        job.train_and_save(step)
        costs.append(reads[0])
    return costs


def test_a_save_reads_as_much_of_a_long_lineage_as_of_a_short_one(tmp_path: Path, reads: list[int]) -> None:
    """But for every fourth, here, which reads it whole."""
    job = SavingJob(tmp_path)
    costs = _costs(job, 20, reads)
    rare, usual = costs[4::4], [cost for number, cost in enumerate(costs) if number > 4 and number % 4]
    assert max(usual) == min(usual) <= costs[3]
    assert rare == sorted(rare)
    assert rare[-1] > usual[-1] + 20
    job.assert_loads(19)
    job.close()


@pytest.mark.parametrize("num_links", [3, 17])
def test_a_delta_asks_the_store_a_few_things(tmp_path: Path, num_links: int) -> None:
    """As many whatever the number of checkpoints: each request of an object store takes tens of milliseconds."""
    with FaultyStore(tmp_path) as store:
        job = SavingJob(store.url)
        job.train_and_save(*range(num_links))
        store.clear()
        job.train_and_save(num_links)
        operations = [operation for operation in store.operations if operation.kind != "make"]
        names = [f"{operation.kind} {operation.path}" for operation in operations]
        assert len(names) <= MAX_REQUESTS, names
        assert cnr.read_checkpoint(job.path(num_links)).kind == "delta"
        job.assert_loads(num_links)
        job.close()


@pytest.mark.parametrize("removed", [0, 2])
def test_a_link_that_was_removed_is_noticed(
    tmp_path: Path, reads: list[int], removed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The next save is a baseline, and says why: a delta would report success, and not load."""
    job = SavingJob(tmp_path)
    job.train_and_save(*range(6))
    shutil.rmtree(job.path(removed))
    job.train_and_save(*range(6, 12))
    assert caplog.text.count("is missing, corrupt or was replaced: this save is a baseline") == 1
    assert [cnr.read_checkpoint(job.path(step)).kind for step in range(6, 12)] == ["baseline", *5 * ["delta"]]
    job.assert_loads(6)
    job.assert_loads(11)
    job.close()


@pytest.mark.parametrize("removed", ["", "0", "1"])
def test_a_link_in_another_root_that_was_removed_is_noticed(
    tmp_path: Path, removed: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Or the whole root: no save lists it for another reason."""
    job = SavingJob(tmp_path / "first")
    job.train_and_save(0, 1)
    job.root = str(tmp_path / "second")
    job.train_and_save(2, 3)
    shutil.rmtree(tmp_path / "first" / removed)
    job.train_and_save(4, 5)
    assert caplog.text.count("is missing, corrupt or was replaced: this save is a baseline") == 1
    job.assert_loads(4)
    job.assert_loads(5)
    job.close()


def test_a_restored_job_goes_on_in_a_root_that_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its saves read their whole chain."""
    job = SavingJob(tmp_path)
    job.train_and_save(0, 1)
    job.restore(1)
    listing = Store.listing

    def refusing(store: Store) -> Listing:
        if store.url == str(tmp_path):
            raise StoreError("forbidden")
        return listing(store)

    monkeypatch.setattr(Store, "listing", refusing)
    job.train_and_save(2, 3, 4)
    assert cnr.read_checkpoint(job.path(4)).kind == "delta"
    job.assert_loads(4)
    job.close()


def test_a_copied_chain_is_looked_up_where_it_was_copied_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same process has saved the original, of which all checkpoints are there."""
    job = SavingJob(tmp_path / "original")
    job.train_and_save(0, 1, 2)
    shutil.copytree(job.root, tmp_path / "copy")
    job.root = str(tmp_path / "copy")
    job.restore(2)
    shutil.rmtree(job.path(1))
    job.train_and_save(3, 4)
    assert caplog.text.count("is missing, corrupt or was replaced: this save is a baseline") == 1
    job.assert_loads(3)
    job.assert_loads(4)
    job.close()


@pytest.mark.parametrize("is_resolved", [False, True], ids=["next save", "resolved before"])
def test_a_latest_checkpoint_that_was_replaced_is_noticed(
    tmp_path: Path, is_resolved: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Although the manifest of the other one has the same size; and also if a manager has seen the own one before."""
    with SavingJob(tmp_path / "other", seed=2) as other:
        other.train_and_save(0, 1)
    job = SavingJob(tmp_path / "own", seed=1)
    job.train_and_save(0)
    job.train()
    job.save(1, key_that_makes_the_manifest_longer=1)
    if is_resolved:
        job.planner.resolve_last_save()
    manifest = Path(job.path(1), MANIFEST_FILE)
    num_bytes = manifest.stat().st_size
    shutil.rmtree(manifest.parent)
    shutil.copytree(other.path(1), manifest.parent)
    manifest.write_bytes(manifest.read_bytes().ljust(num_bytes))
    assert manifest.stat().st_size == num_bytes
    job.train_and_save(2, 3)
    job.assert_loads(2)
    job.assert_loads(3)
    is_baseline = "is missing, corrupt or was replaced: this save is a baseline" in caplog.text
    assert is_baseline == is_resolved, "otherwise the rows of the lost save are saved again, on top of the older one"
    job.close()


@pytest.mark.parametrize("is_long", [False, True])
def test_data_files_of_a_removed_directory_are_missed(
    tmp_path: Path, reads: list[int], caplog: pytest.LogCaptureFixture, is_long: bool
) -> None:
    """A compacted checkpoint uses those of older ones: no manifest is missing, and yet no delta could be loaded."""
    job = SavingJob(tmp_path)
    job.train_and_save(*range(3))
    cnr.compact(job.path(2), max_ratio=100.0)
    used = {pack.directory for pack in cnr.read_checkpoint(job.path(2)).manifest.packs}
    assert "../0" in used
    if is_long:
        job.train_and_save(*range(3, 9))
    shutil.rmtree(job.path(0))
    job.train_and_save(10, 11)
    assert caplog.text.count("is missing, corrupt or was replaced: this save is a baseline") == 1
    assert [cnr.read_checkpoint(job.path(step)).kind for step in (10, 11)] == ["baseline", "delta"]
    job.assert_loads(11)
    job.close()


def test_a_baseline_that_was_to_be_expected_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A first one, one after forget(), and one that the policy asks for; a delta says nothing."""
    caplog.set_level(logging.INFO, logger="torchrec_cnr")
    job = SavingJob(tmp_path)
    counts = []
    for step in range(3):
        job.train_and_save(step)
        if step == 1:
            job.tracker.forget()
        counts.append(caplog.text.count("as in a first save, after forget() and after a load that left something out"))
    assert counts == [1, 1, 2]
    job.close()
    job = SavingJob(tmp_path / "full", policy=cnr.Full())
    job.train_and_save(0, 1)
    assert caplog.text.count("the policy Full() begins a new chain: this save is a baseline") == 1
    job.close()


def test_a_manifest_that_was_removed_is_noticed(tmp_path: Path, reads: list[int]) -> None:
    """Where its directory is still there, by the next save that reads the whole lineage."""
    job = SavingJob(tmp_path)
    job.train_and_save(*range(6))
    Path(job.path(2), MANIFEST_FILE).unlink()
    job.train_and_save(*range(6, 12))
    kinds = [cnr.read_checkpoint(job.path(step)).kind for step in range(6, 12)]
    assert kinds.count("baseline") == 1
    assert kinds.index("baseline") <= 3
    job.assert_loads(11)
    job.close()


def test_a_history_counts_data_files_after_a_compaction(tmp_path: Path) -> None:
    """Deltas count as much in the next history as in their own, whether or not the chain was compacted below them."""
    job = SavingJob(tmp_path)
    job.train_and_save(*range(4))
    counted = cnr.read_checkpoint(job.path(3)).manifest.history.delta_bytes
    merged = cnr.compact(job.path(1), max_ratio=1.0)
    job.train_and_save(4)
    history = cnr.read_checkpoint(job.path(4)).manifest.history
    assert history.baseline_bytes == merged.manifest.blob_bytes
    assert history.delta_bytes[:2] == counted[1:]
    job.close()

"""How many requests a load of small deltas makes, and that it waits for few of them one after another."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import torchrec_cnr as cnr
from tests.support.jobs import SavingJob
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.lineage import checkpoint
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.reading import plan
from torchrec_cnr.storage.store import Store
from torchrec_cnr.testing import FaultyStore

NUM_LINKS = 6
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _pack_reads(root: Path) -> Counter[str]:
    """How often a load of a table reads from each data file of a chain."""
    with FaultyStore(root) as store:
        job = SavingJob(store.url)
        job.train_and_save(*range(NUM_LINKS))
        job.close()
        path = job.path(NUM_LINKS - 1)
        table = next(fqn for fqn, entry in cnr.read_checkpoint(path).manifest.tensors.items() if entry.is_table)
        store.clear()
        cnr.load_table(path, table)
        paths = (operation.path for operation in store.operations if operation.kind == "read")
        return Counter(path for path in paths if path.endswith(".safetensors"))


@pytest.mark.parametrize("small_bytes", [plan._SMALL_BYTES, 0])
def test_few_requests_read_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_bytes: int) -> None:
    """One for the row numbers and one for the rows of each data file, none for headers of which little is wanted."""
    monkeypatch.setattr(plan, "_SMALL_BYTES", small_bytes)
    reads = _pack_reads(tmp_path)
    assert len(reads) == NUM_LINKS
    assert max(reads.values()) <= 2


def _manifest_threads(root: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Which thread reads which manifest of a chain."""
    found: list[tuple[str, str]] = []
    really_read = checkpoint.read_manifest

    def read(store: Store, name: str, **options: Any) -> object:
        kind = "committed" if name == MANIFEST_FILE else "replacement"
        found.append((kind, threading.current_thread().name.split("_")[0]))
        return really_read(store, name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "read_manifest", read)
        lineage = read_lineage(f"{root}/{NUM_LINKS - 1}")
    assert [ref.kind for ref in lineage.checkpoints] == ["baseline", *(NUM_LINKS - 1) * ["delta"]]
    return found


def test_parents_are_read_ahead_from_a_store_with_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the newest, while the caller looks for replacements. Local files are not worth a thread."""
    with FaultyStore(tmp_path) as store:
        job = SavingJob(store.url)
        job.train_and_save(*range(NUM_LINKS))
        job.close()
        main = threading.current_thread().name
        ahead = Counter(_manifest_threads(store.url, monkeypatch))
        local = Counter(_manifest_threads(str(tmp_path), monkeypatch))
    assert ahead == {
        ("committed", main): 1,
        ("committed", "cnr-manifests"): NUM_LINKS - 1,
        ("replacement", main): NUM_LINKS,
    }
    assert local == {("committed", main): NUM_LINKS, ("replacement", main): NUM_LINKS}


def test_a_parent_that_was_read_ahead_in_vain_does_no_harm(tmp_path: Path) -> None:
    """A compaction has merged it into its child: it is gone, and nothing asks for it."""
    with FaultyStore(tmp_path) as store:
        job = SavingJob(store.url)
        job.train_and_save(*range(3))
        cnr.compact(job.path(2), self_contained=True)
        cnr.execute(cnr.plan_prune(store.url, cnr.Keep(last=1)))
        assert not (tmp_path / "1" / MANIFEST_FILE).exists()
        assert len(read_lineage(job.path(2)).checkpoints) == 1
        job.assert_loads(2)
        job.close()

"""What may be removed after a compaction, and what a compacted checkpoint says of itself."""

import os
from pathlib import Path

import pytest

from tests.support import hand_made
from tests.support.hand_made import mask_of
from tests.support.lineages import PACK_BYTES, ROWS, HotLineage, family, is_same
from torchrec_cnr import latest, load_table, read_checkpoint
from torchrec_cnr.errors import (
    DamagedError,
)
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.maintenance.compaction.compact import compact
from torchrec_cnr.quantization import Asymmetric


def test_a_self_contained_checkpoint_needs_nobody(tmp_path: Path) -> None:
    """All other directories may go, and it still loads; until then it may share files."""
    run = HotLineage(tmp_path, Asymmetric(4))
    run.save(5)
    before = run.load()
    compact(run.path)
    assert any(pack.directory is not None for pack in read_checkpoint(run.path).manifest.packs)
    after = compact(run.path, self_contained=True)
    assert all(pack.directory is None for pack in after.manifest.packs)
    for path in tmp_path.glob("*/*"):
        if path.parent != Path(run.path):
            path.unlink()
    assert all(is_same(*pair) for pair in zip(before, run.load(), strict=True))
    assert compact(run.path, self_contained=True).manifest_sha256 == after.manifest_sha256


def test_files_that_a_manifest_does_not_name_may_go(tmp_path: Path) -> None:
    """The head loads without them, deltas on top of it too; what forked off below does not."""
    run = HotLineage(tmp_path, Asymmetric(4))
    run.save(2)
    fork = hand_made.write(
        tmp_path / "fork", family([mask_of([1, 2], ROWS)], 99, Asymmetric(4)), parent=run.newest, pack_bytes=PACK_BYTES
    )
    of_fork = load_table(fork.store.url, "t")
    run.save(3)
    run.newest = compact(run.path, max_ratio=1.0)
    run.save(1)
    before = run.load()
    assert is_same(load_table(fork.store.url, "t"), of_fork)
    kept = {
        os.path.normpath(Path(checkpoint.store.path, pack.directory or ".", pack.name))
        for checkpoint in read_lineage(run.path).checkpoints
        for pack in checkpoint.manifest.packs
    }
    removed = [path for path in tmp_path.glob("*/*.safetensors") if str(path) not in kept]
    assert removed
    for path in removed:
        path.unlink()
    assert all(is_same(*pair) for pair in zip(before, run.load(), strict=True))
    with pytest.raises(DamagedError, match="the data file is missing"):
        load_table(fork.store.url, "t")


# What a checkpoint says of itself


def test_what_a_compacted_checkpoint_says(tmp_path: Path) -> None:
    """It is what it was for those who refer to it, and tells its new kind and size."""
    run = HotLineage(tmp_path, Asymmetric(4))
    run.save(4)
    old = run.newest
    new = compact(run.path, since=tmp_path / "step-1", max_ratio=1.0, pack_bytes=PACK_BYTES)
    assert (old.kind, old.is_compacted, new.kind, new.is_compacted) == ("delta", False, "delta", True)
    assert (new.parent, new.ref, new.created_ns) == (str(tmp_path / "step-1"), old.ref, old.created_ns)
    assert new.manifest_bytes == sum(path.stat().st_size for path in Path(run.path).glob("manifest*.json"))
    own = [pack for pack in new.manifest.packs if pack.directory is None]
    assert new.num_bytes == new.manifest_bytes + sum(Path(run.path, pack.name).stat().st_size for pack in own)
    assert new.manifest.history.delta_bytes == (*old.manifest.history.delta_bytes[:1], new.manifest.blob_bytes)
    newest = compact(run.path, max_ratio=1.0, pack_bytes=PACK_BYTES)
    assert (newest.kind, newest.parent, newest.ref) == ("delta", None, old.ref)
    assert newest.manifest_bytes == sum(path.stat().st_size for path in Path(run.path).glob("manifest*.json"))
    assert newest.manifest.history.baseline_bytes == newest.manifest.blob_bytes
    assert newest.num_rows >= ROWS
    assert latest(tmp_path) == run.path
    assert not any(name.endswith(".lease") for name in newest.store.names())


def test_the_latest_is_the_newest_save_not_the_newest_compaction(tmp_path: Path) -> None:
    """An older checkpoint that is compacted later does not become the latest."""
    run = HotLineage(tmp_path, Asymmetric(4))
    run.save(2)
    older = run.path
    run.save(1)
    after = compact(older)
    assert after.manifest.created_ns > run.newest.created_ns
    assert latest(tmp_path) == run.path
    assert [checkpoint.store.url for checkpoint in read_lineage(run.path).checkpoints] == [older, run.path]

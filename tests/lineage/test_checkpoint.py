"""Checkpoints and the lineages that they stand on, as they are read from manifests."""

import pickle
import shutil
from pathlib import Path

import pytest

from tests.lineage.tensorless_roots import TensorlessRoot, as_newer_version, chain, numbers
from torchrec_cnr.errors import (
    CheckpointNotFoundError,
    CNRError,
    ConfigurationError,
    DamagedError,
    VersionError,
)
from torchrec_cnr.format.manifest import (
    CheckpointRef,
)
from torchrec_cnr.lineage.checkpoint import read_checkpoint, read_lineage


def test_checkpoint_is_read(root: TensorlessRoot) -> None:
    """A committed checkpoint tells where it is, what it is and what it stands on."""
    parent = root.commit("step-1", 1)
    root.commit("step-2", 2, parent)
    baseline, delta = read_checkpoint(root.at("step-1")), read_checkpoint(root.at("step-2"))
    assert (baseline.kind, baseline.parent) == ("baseline", None)
    assert (delta.kind, delta.parent) == ("delta", root.at("step-1"))
    assert delta.ref == CheckpointRef(root.at("step-2"), delta.sha256)
    assert baseline.sha256 == parent.sha256
    assert delta.num_bytes == len(root.read("step-2"))


def test_directory_without_a_manifest_is_no_checkpoint(root: TensorlessRoot) -> None:
    """Packs of a save that died, an empty directory and none at all are told from damage, with a way out."""
    died = root.store.at("died")
    died.make()
    died.put("5a7e-0-0.safetensors", [b"data"])
    for name in ("died", "missing"):
        with pytest.raises(CheckpointNotFoundError, match=rf"{name}: no manifest\.json.*latest\(root\)"):
            read_checkpoint(root.at(name))
        with pytest.raises(CheckpointNotFoundError):
            read_lineage(root.at(name))


def test_file_is_no_checkpoint(tmp_path: Path) -> None:
    """The path of a file is no checkpoint either."""
    (tmp_path / "file").write_bytes(b"data")
    with pytest.raises(CheckpointNotFoundError):
        read_checkpoint(tmp_path / "file")


def test_unknown_places_are_errors_of_the_call() -> None:
    """A protocol that is unknown is no missing checkpoint."""
    with pytest.raises(ConfigurationError):
        read_checkpoint("no-such-protocol://x")


def test_lineage_goes_back_to_the_baseline(root: TensorlessRoot) -> None:
    """From any checkpoint, the lineage holds what it stands on, oldest first, and nothing else."""
    chain(root, 5)
    root.commit("step-other", 9)
    lineage = read_lineage(root.at("step-3"))
    assert [checkpoint.store.url for checkpoint in lineage.checkpoints] == [root.at(f"step-{n}") for n in range(4)]
    assert lineage.newest.store.url == root.at("step-3")
    assert lineage.head.ref == lineage.newest.ref
    assert lineage.head.baseline == lineage.checkpoints[0].ref
    assert [checkpoint.kind for checkpoint in lineage.checkpoints] == ["baseline", *["delta"] * 3]


@pytest.mark.long
def test_long_lineages_are_read(root: TensorlessRoot) -> None:
    """A lineage of 1,500 checkpoints is read: its length is not bounded by the depth of calls."""
    chain(root, 1500)
    assert len(read_lineage(root.at("step-1499")).checkpoints) == 1500


def test_parents_may_lie_elsewhere(root: TensorlessRoot) -> None:
    """A path may lead up and down again; the whole may be moved."""
    parent = root.commit("old/deep/step-1", 1)
    root.commit("new/step-2", 2, CheckpointRef("../../old/deep/step-1", parent.sha256))
    lineage = read_lineage(root.at("new/step-2"))
    assert [checkpoint.store.url for checkpoint in lineage.checkpoints] == [
        root.at("old/deep/step-1"),
        root.at("new/step-2"),
    ]


def test_copied_lineage_is_read(tmp_path: Path) -> None:
    """A root copied as a whole stands on its own parents, not on the ones that it was copied from."""
    chain(TensorlessRoot(str(tmp_path / "a")), 3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    assert len(read_lineage(tmp_path / "b" / "step-2").checkpoints) == 3


def test_missing_parent_is_refused(root: TensorlessRoot) -> None:
    """Without its parent a delta is damaged, and the error names both."""
    chain(root, 3)
    root.store.fs.rm(root.store.at("step-1").path, recursive=True)
    with pytest.raises(DamagedError, match=r"step-2: its parent .*step-1 is missing"):
        read_lineage(root.at("step-2"))
    assert len(read_lineage(root.at("step-0")).checkpoints) == 1


def test_replaced_parent_is_refused(root: TensorlessRoot) -> None:
    """A parent that was saved again, although it is a good checkpoint, is not the one that the delta stands on."""
    chain(root, 3)
    old = read_checkpoint(root.at("step-0")).sha256
    root.commit("step-0", 0, save_id="another")
    new = read_checkpoint(root.at("step-0")).sha256
    assert new != old
    with pytest.raises(
        DamagedError, match=f"step-1: its parent .*step-0 was replaced.* {new}, the child expects {old}"
    ):
        read_lineage(root.at("step-2"))


def test_reordered_parents_are_refused(root: TensorlessRoot) -> None:
    """Checkpoints that changed places are noticed."""
    chain(root, 3)
    first, second = root.read("step-0"), root.read("step-1")
    root.put("step-0", second)
    root.put("step-1", first)
    with pytest.raises(DamagedError, match="was replaced"):
        read_lineage(root.at("step-2"))


def test_damaged_parent_is_refused(root: TensorlessRoot) -> None:
    """A parent whose manifest is damaged or of a newer version stops the load with that error."""
    chain(root, 2)
    good = root.read("step-0")
    root.put("step-0", good[:-10])
    with pytest.raises(DamagedError, match="step-0"):
        read_lineage(root.at("step-1"))
    root.put("step-0", as_newer_version(good))
    with pytest.raises(VersionError, match="step-0"):
        read_lineage(root.at("step-1"))


def test_cycles_are_refused(root: TensorlessRoot) -> None:
    """A checkpoint that is its own parent or grandparent is refused, instead of being followed for ever."""
    root.commit("self", 1, CheckpointRef("../self", "0" * 64))
    with pytest.raises(DamagedError, match=r"self: its parent .*self is its own descendant"):
        read_lineage(root.at("self"))
    root.commit("a", 2, CheckpointRef("../b", "0" * 64))
    second = root.commit("b", 1, CheckpointRef("../a", "0" * 64))
    root.commit("a", 2, second)
    with pytest.raises(DamagedError, match=r"b: its parent .*a is its own descendant"):
        read_lineage(root.at("a"))


def test_parents_are_older(root: TensorlessRoot) -> None:
    """A parent that is not older than its child is refused: the newest would not be the head."""
    for created_ns in (1, 2):
        parent = root.commit(f"parent-{created_ns}", created_ns)
        root.commit(f"child-{created_ns}", 2, parent)
    assert len(read_lineage(root.at("child-1")).checkpoints) == 2
    with pytest.raises(DamagedError, match="child-2: it is not newer than its parent"):
        read_lineage(root.at("child-2"))


def test_parents_outside_of_the_store_are_typed_errors(tmp_path: Path) -> None:
    """A path that leads above the root of a file system ends in a typed error."""
    root = TensorlessRoot(str(tmp_path))
    root.commit("a", 2, CheckpointRef("../" * 50 + "x", "0" * 64))
    with pytest.raises(CNRError):
        read_lineage(root.at("a"))
    elsewhere = TensorlessRoot(f"memory://lineage-{next(numbers)}")
    elsewhere.commit("a", 2, CheckpointRef("../" * 50 + "x", "0" * 64))
    with pytest.raises(CNRError):
        read_lineage(elsewhere.at("a"))


def test_errors_survive_pickling(root: TensorlessRoot) -> None:
    """What a lineage is refused for reaches the other ranks."""
    chain(root, 2)
    root.store.fs.rm(root.store.at("step-0").path, recursive=True)
    with pytest.raises(DamagedError) as caught:
        read_lineage(root.at("step-1"))
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied)) == (DamagedError, str(caught.value))

"""Manifests that replace others."""

from dataclasses import replace
from typing import Any

import pytest

from tests.lineage.tensorless_roots import TensorlessRoot, as_newer_version, chain
from torchrec_cnr.errors import (
    CheckpointNotFoundError,
    DamagedError,
    StoreError,
    VersionError,
)
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import (
    MANIFEST_FILE,
    CheckpointRef,
    History,
    Pack,
    Place,
    Shard,
    TensorEntry,
    replacement_name,
)
from torchrec_cnr.format.row_sets import Blob, RowSet
from torchrec_cnr.lineage.checkpoint import committed, read_checkpoint, read_lineage
from torchrec_cnr.lineage.latest import latest
from torchrec_cnr.quantization import NoQuantization
from torchrec_cnr.storage.store import Store


def test_replacement_is_read_instead(root: TensorlessRoot) -> None:
    """A checkpoint whose manifest was replaced is what the replacement says, and is still called what it was."""
    refs = chain(root, 3)
    before = read_checkpoint(root.at("step-2"))
    assert not before.is_compacted
    manifest = root.replace("step-2", policy="Compacted", history=History(77))
    after = read_checkpoint(root.at("step-2"))
    assert after.is_compacted
    assert (after.manifest, after.committed) == (manifest, before.manifest)
    assert after.sha256 == before.sha256 == refs[2].sha256
    assert after.manifest_sha256 != after.sha256
    assert (after.is_compacted, after.parent, after.created_ns) == (True, None, before.created_ns)
    assert after.head(()) == before.head(()), "a rank may read it before the replacement, and another one after it"
    assert after.manifest.history == History(77) != after.head(()).history
    sizes = [len(root.read("step-2", file)) for file in (MANIFEST_FILE, replacement_name(before.sha256))]
    assert after.num_bytes == sum(sizes)


def test_replacements_are_followed_to_the_last(root: TensorlessRoot) -> None:
    """A replacement may be replaced, by a file with its digest in the name, and so on."""
    chain(root, 2)
    digests = [read_checkpoint(root.at("step-1")).sha256]
    for number in range(5):
        last = root.replace("step-1", policy=f"policy-{number}")
        found = read_checkpoint(root.at("step-1"))
        assert found.manifest == last
        assert found.manifest_sha256 not in digests
        digests.append(found.manifest_sha256)
    assert found.sha256 == digests[0]
    assert found.num_bytes == sum(
        len(root.read("step-1", name)) for name in (MANIFEST_FILE, *map(replacement_name, digests[:-1]))
    )


def test_children_load_unchanged(root: TensorlessRoot) -> None:
    """A delta goes on standing on a parent that was replaced, and no longer on what that stood on."""
    refs = chain(root, 5)
    whole = read_lineage(root.at("step-4"))
    root.replace("step-2")
    lineage = read_lineage(root.at("step-4"))
    assert [checkpoint.ref for checkpoint in lineage.checkpoints] == [
        CheckpointRef(root.at(f"step-{number}"), refs[number].sha256) for number in (2, 3, 4)
    ]
    assert lineage.checkpoints[1:] == whole.checkpoints[3:]
    assert lineage.head.baseline.sha256 == refs[2].sha256
    for name in ("step-0", "step-1"):
        root.remove(name)
    assert read_lineage(root.at("step-4")) == lineage
    with pytest.raises(CheckpointNotFoundError):
        read_lineage(root.at("step-1"))


def test_run_of_deltas_is_replaced(root: TensorlessRoot) -> None:
    """A replacement may stand on an ancestor: the deltas in between are not needed any more, the ancestor is."""
    refs = chain(root, 6)
    root.replace("step-4", parent=refs[1])
    root.remove("step-2")
    root.remove("step-3")
    lineage = read_lineage(root.at("step-5"))
    assert [checkpoint.store.url for checkpoint in lineage.checkpoints] == [root.at(f"step-{n}") for n in (0, 1, 4, 5)]
    root.replace("step-1")
    root.remove("step-0")
    assert len(read_lineage(root.at("step-5")).checkpoints) == 3
    root.remove("step-1")
    with pytest.raises(DamagedError, match=r"step-4: its parent .*step-1 is missing"):
        read_lineage(root.at("step-5"))


def test_parent_of_a_replacement_must_be_the_one_it_names(root: TensorlessRoot) -> None:
    """A replacement's parent is compared as that of a commit is: by the digest of its manifest.json, and by time."""
    refs = chain(root, 4)
    baseline = root.replace("step-1")
    root.replace("step-3", parent=CheckpointRef("../step-1", manifest_json.dumps(baseline)[1]))
    with pytest.raises(DamagedError, match=r"step-3: its parent .*step-1 was replaced"):
        read_lineage(root.at("step-3"))
    root.commit("younger", 9)
    younger = read_checkpoint(root.at("younger")).sha256
    root.replace("step-2", parent=CheckpointRef("../younger", younger))
    with pytest.raises(DamagedError, match=r"step-2: it is not newer than its parent .*younger"):
        read_lineage(root.at("step-2"))
    assert refs[1].sha256 != manifest_json.dumps(baseline)[1]


def test_replacement_without_a_manifest_is_no_checkpoint(root: TensorlessRoot) -> None:
    """What was removed is gone, though its replacement, and packs that others use, may lie there still."""
    chain(root, 2)
    root.replace("step-1")
    root.store.at("step-1").put("5a7e-0-0.safetensors", [b"data"])
    assert latest(root.url) == root.at("step-1")
    root.remove("step-1")
    for read in (read_checkpoint, read_lineage):
        with pytest.raises(CheckpointNotFoundError, match=r"step-1: no manifest\.json"):
            read(root.at("step-1"))
    assert latest(root.url) == root.at("step-0")


def test_file_under_a_wrong_name_replaces_nothing(root: TensorlessRoot) -> None:
    """A replacement says itself what it replaces: put under another digest it is refused."""
    chain(root, 2)
    digest = read_checkpoint(root.at("step-1")).sha256
    root.replace("step-1", replaces="ab" * 32)
    with pytest.raises(DamagedError, match=f"{replacement_name(digest)}: it replaces manifest abab"):
        read_checkpoint(root.at("step-1"))


def test_manifest_that_commits_replaces_nothing(root: TensorlessRoot) -> None:
    """A replacement moved to where the commit was is not taken for one: it may need packs that no commit may."""
    chain(root, 2)
    manifest = root.replace("step-1")
    root.put("step-1", manifest_json.dumps(manifest)[0])
    with pytest.raises(DamagedError, match=r"step-1/manifest\.json: it replaces manifest .*, expected one that"):
        read_checkpoint(root.at("step-1"))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "newer"])
def test_damaged_replacement_is_refused(root: TensorlessRoot, damage: str) -> None:
    """There is no way back to what was replaced: its packs may be gone."""
    refs = chain(root, 3)
    root.replace("step-1")
    file = replacement_name(refs[1].sha256)
    data = root.read("step-1", file)
    damaged = {
        "truncated": data[:-20],
        "flipped": data.replace(b'"world_size":1', b'"world_size":3'),
        "empty": b"",
        "newer": as_newer_version(data),
    }
    root.put("step-1", damaged[damage], file)
    for step in ("step-1", "step-2"):
        with pytest.raises(VersionError if damage == "newer" else DamagedError, match=file):
            read_lineage(root.at(step))


def test_replacement_that_cannot_be_read_is_not_passed_over(
    root: TensorlessRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there is a replacement is not guessed, if the store does not answer."""
    chain(root, 1)
    read = Store.read

    def fail(self: Store, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        if name != MANIFEST_FILE:
            raise StoreError("cannot read: connection lost")
        return read(self, name, start, stop)

    monkeypatch.setattr(Store, "read", fail)
    with pytest.raises(StoreError, match="connection lost"):
        read_checkpoint(root.at("step-0"))


EXACT = NoQuantization()


def _vector(*sizes: int) -> TensorEntry:
    """A vector without elements of a state dict, in shards without rows."""
    return TensorEntry("int8", sizes, (Shard(Box((0,), sizes), RowSet(()), (), EXACT),))


@pytest.mark.parametrize(
    ("changes", "item"),
    [
        pytest.param({"tensors": {}}, "tensor 'x'", id="a tensor less"),
        pytest.param({"tensors": {"x": _vector(0), "y": _vector(0)}}, "tensor 'y'", id="a tensor more"),
        pytest.param({"tensors": {"x": replace(_vector(0), dtype="int32")}}, "tensor 'x'", id="another dtype"),
        pytest.param({"tensors": {"x": replace(_vector(0), shards=())}}, "tensor 'x'", id="another sharding"),
        pytest.param({"paths": {}}, "path of 'x'", id="a path less"),
        pytest.param({"paths": {"x": ("x", 1)}}, "path of 'x'", id="another path"),
    ],
)
def test_replacement_of_another_state_is_refused(root: TensorlessRoot, changes: dict[str, Any], item: str) -> None:
    """What takes a manifest's place must have its items: a compaction that lost one would be a state that lost it."""
    root.commit("step", 1, tensors={"x": _vector(0)}, paths={"x": ("x",)})
    root.replace("step", tensors={"x": replace(_vector(0), folded=(Place(Box((0,), (0,))),))})
    assert read_checkpoint(root.at("step")).is_compacted
    root.replace("step", **changes)
    with pytest.raises(DamagedError, match=f"it differs from the replaced manifest in: .*{item}"):
        read_checkpoint(root.at("step"))


def test_objects_of_a_replacement_are_those_of_what_it_replaces(root: TensorlessRoot) -> None:
    """So too with objects."""
    packs = (Pack("save-0-0.safetensors", 9, 8, 0),)
    root.commit("step", 1, packs=packs, objects={"reader": Blob(0, 8, 1, 0)})
    root.replace("step")
    root.replace("step", packs=(), objects={})
    with pytest.raises(DamagedError, match="replaced manifest in: object 'reader'"):
        read_checkpoint(root.at("step"))


def test_baseline_is_given_no_parent(root: TensorlessRoot) -> None:
    """A baseline needs nobody, and a replacement of it neither."""
    refs = chain(root, 2)
    root.commit("alone", 9)
    root.replace("alone", parent=refs[0])
    with pytest.raises(DamagedError, match="it has a parent, but the replaced manifest has none"):
        read_checkpoint(root.at("alone"))


def test_cycles_through_replacements_are_refused(root: TensorlessRoot) -> None:
    """A replacement whose parent stands on it is refused, instead of being followed for ever."""
    refs = chain(root, 3)
    root.replace("step-1", parent=refs[2])
    with pytest.raises(DamagedError, match=r"step-1: its parent .*step-2 is its own descendant"):
        read_lineage(root.at("step-2"))


def test_latest_goes_by_the_commit(root: TensorlessRoot) -> None:
    """A compaction makes nothing newer; the newest checkpoint is read as its replacement has it."""
    chain(root, 3)
    root.replace("step-1")
    assert read_checkpoint(root.at("step-1")).manifest.created_ns > read_checkpoint(root.at("step-2")).created_ns
    assert latest(root.url) == root.at("step-2")


def test_fate_of_a_save_is_told_by_its_commit(root: TensorlessRoot) -> None:
    """A compaction has a save id of its own; who saved what it replaced still finds its save."""
    root.commit("mine", 1, save_id="save-1")
    root.replace("mine")
    found = committed(root.at("mine"), "save-1")
    assert found is not None
    assert found.manifest.save_id != "save-1"
    assert committed(root.at("mine"), found.manifest.save_id) is None

"""Committed checkpoints: which is the newest, and the way from a head back to its baseline."""

import errno
import hashlib
import json
import logging
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from torchrec_cnr.errors import (
    CheckpointNotFoundError,
    CNRError,
    ConfigurationError,
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
    Manifest,
    Pack,
    Place,
    Shard,
    TensorEntry,
    replacement_name,
)
from torchrec_cnr.format.manifest_parser import VERSION
from torchrec_cnr.format.row_sets import Blob, RowSet
from torchrec_cnr.lineage.checkpoint import committed, read_checkpoint, read_lineage, relative_path
from torchrec_cnr.lineage.latest import latest
from torchrec_cnr.quantization import NoQuantization
from torchrec_cnr.storage.store import Store

numbers = count()


class Run:
    """A directory of checkpoints, most of them without tensors."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = Store.open(url, sync_files=False)
        self.store.make()

    def commit(
        self, name: str, created_ns: int, parent: CheckpointRef | None = None, save_id: str = "save", **more: Any
    ) -> CheckpointRef:
        """Commit a checkpoint; returns how a child in the same directory refers to it."""
        history = History(0, () if parent is None else (0,))
        id_ = name.rpartition("/")[2]
        manifest = Manifest(created_ns, id_, save_id, parent, "Consecutive", history, 0, 1, "tests", (), {})
        data, sha256 = manifest_json.dumps(replace(manifest, **more))
        self.put(name, data)
        return CheckpointRef(f"../{name}", sha256)

    def replace(self, name: str, parent: CheckpointRef | None = None, **changes: Any) -> Manifest:
        """Put a replacement of a checkpoint's manifest, newer than all checkpoints, whose save id is its own."""
        before = read_checkpoint(self.at(name))
        new: dict[str, Any] = {
            "created_ns": 10**9,
            "save_id": f"by-{before.manifest_sha256[:4]}",
            "replaces": before.manifest_sha256,
        }
        manifest = replace(before.manifest, parent=parent, **(new | changes))
        self.put(name, manifest_json.dumps(manifest)[0], replacement_name(before.manifest_sha256))
        return manifest

    def put(self, name: str, data: bytes, file: str = MANIFEST_FILE) -> None:
        """Write a manifest file, whatever is in it."""
        place = self.store.at(name)
        place.make()
        place.put(file, [data])

    def read(self, name: str, file: str = MANIFEST_FILE) -> bytes:
        """A manifest file's bytes."""
        return self.store.at(name).read(file)

    def remove(self, name: str, file: str = MANIFEST_FILE) -> None:
        """Remove one file of a checkpoint."""
        self.store.fs.rm(self.store.at(name).child(file))

    def at(self, name: str) -> str:
        """A checkpoint's path or URL."""
        return self.store.at(name).url


@pytest.fixture(params=["local", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    """An empty directory in each kind of file system."""
    found = Run(str(tmp_path / "job") if request.param == "local" else f"memory://lineage-{next(numbers)}/job")
    yield found
    if request.param == "memory":
        found.store.fs.rm(found.store.path, recursive=True)


# One checkpoint


def test_checkpoint_is_read(run: Run) -> None:
    """A committed checkpoint tells where it is, what it is and what it stands on."""
    parent = run.commit("step-1", 1)
    run.commit("step-2", 2, parent)
    baseline, delta = read_checkpoint(run.at("step-1")), read_checkpoint(run.at("step-2"))
    assert (baseline.kind, baseline.parent) == ("baseline", None)
    assert (delta.kind, delta.parent) == ("delta", run.at("step-1"))
    assert delta.ref == CheckpointRef(run.at("step-2"), delta.sha256)
    assert baseline.sha256 == parent.sha256
    assert delta.num_bytes == len(run.read("step-2"))


def test_directory_without_a_manifest_is_no_checkpoint(run: Run) -> None:
    """Packs of a save that died, an empty directory and none at all are told from damage, with a way out."""
    died = run.store.at("died")
    died.make()
    died.put("5a7e-0-0.safetensors", [b"data"])
    for name in ("died", "missing"):
        with pytest.raises(CheckpointNotFoundError, match=rf"{name}: no manifest\.json.*latest\(root\)"):
            read_checkpoint(run.at(name))
        with pytest.raises(CheckpointNotFoundError):
            read_lineage(run.at(name))


def test_file_is_no_checkpoint(tmp_path: Path) -> None:
    """The path of a file is no checkpoint either."""
    (tmp_path / "file").write_bytes(b"data")
    with pytest.raises(CheckpointNotFoundError):
        read_checkpoint(tmp_path / "file")


def test_unknown_places_are_errors_of_the_call() -> None:
    """A protocol that is unknown is no missing checkpoint."""
    with pytest.raises(ConfigurationError):
        read_checkpoint("no-such-protocol://x")


# Lineages


def _chain(run: Run, length: int) -> list[CheckpointRef]:
    found: list[CheckpointRef] = []
    for number in range(length):
        found.append(run.commit(f"step-{number}", number, found[-1] if found else None))
    return found


def test_lineage_goes_back_to_the_baseline(run: Run) -> None:
    """From any checkpoint, the lineage holds what it stands on, oldest first, and nothing else."""
    _chain(run, 5)
    run.commit("step-other", 9)
    lineage = read_lineage(run.at("step-3"))
    assert [checkpoint.store.url for checkpoint in lineage.checkpoints] == [run.at(f"step-{n}") for n in range(4)]
    assert lineage.newest.store.url == run.at("step-3")
    assert lineage.head.ref == lineage.newest.ref
    assert lineage.head.baseline == lineage.checkpoints[0].ref
    assert [checkpoint.kind for checkpoint in lineage.checkpoints] == ["baseline", *["delta"] * 3]


def test_long_lineages_are_read(run: Run) -> None:
    """A lineage of 1,500 checkpoints is read: its length is not bounded by the depth of calls."""
    _chain(run, 1500)
    assert len(read_lineage(run.at("step-1499")).checkpoints) == 1500


def test_parents_may_lie_elsewhere(run: Run) -> None:
    """A path may lead up and down again; the whole may be moved."""
    parent = run.commit("old/deep/step-1", 1)
    run.commit("new/step-2", 2, CheckpointRef("../../old/deep/step-1", parent.sha256))
    lineage = read_lineage(run.at("new/step-2"))
    assert [checkpoint.store.url for checkpoint in lineage.checkpoints] == [
        run.at("old/deep/step-1"),
        run.at("new/step-2"),
    ]


def test_copied_lineage_is_read(tmp_path: Path) -> None:
    """A run copied as a whole stands on its own parents, not on the ones that it was copied from."""
    _chain(Run(str(tmp_path / "a")), 3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    assert len(read_lineage(tmp_path / "b" / "step-2").checkpoints) == 3


def test_missing_parent_is_refused(run: Run) -> None:
    """Without its parent a delta is damaged, and the error names both."""
    _chain(run, 3)
    run.store.fs.rm(run.store.at("step-1").path, recursive=True)
    with pytest.raises(DamagedError, match=r"step-2: its parent .*step-1 is missing"):
        read_lineage(run.at("step-2"))
    assert len(read_lineage(run.at("step-0")).checkpoints) == 1


def test_replaced_parent_is_refused(run: Run) -> None:
    """A parent that was saved again, although it is a good checkpoint, is not the one that the delta stands on."""
    _chain(run, 3)
    old = read_checkpoint(run.at("step-0")).sha256
    run.commit("step-0", 0, save_id="another")
    new = read_checkpoint(run.at("step-0")).sha256
    assert new != old
    with pytest.raises(
        DamagedError, match=f"step-1: its parent .*step-0 was replaced.* {new}, the child expects {old}"
    ):
        read_lineage(run.at("step-2"))


def test_reordered_parents_are_refused(run: Run) -> None:
    """Checkpoints that changed places are noticed."""
    _chain(run, 3)
    first, second = run.read("step-0"), run.read("step-1")
    run.put("step-0", second)
    run.put("step-1", first)
    with pytest.raises(DamagedError, match="was replaced"):
        read_lineage(run.at("step-2"))


def test_damaged_parent_is_refused(run: Run) -> None:
    """A parent whose manifest is damaged or of a newer version stops the load with that error."""
    _chain(run, 2)
    good = run.read("step-0")
    run.put("step-0", good[:-10])
    with pytest.raises(DamagedError, match="step-0"):
        read_lineage(run.at("step-1"))
    run.put("step-0", _newer(good))
    with pytest.raises(VersionError, match="step-0"):
        read_lineage(run.at("step-1"))


def test_cycles_are_refused(run: Run) -> None:
    """A checkpoint that is its own parent or grandparent is refused, instead of being followed for ever."""
    run.commit("self", 1, CheckpointRef("../self", "0" * 64))
    with pytest.raises(DamagedError, match=r"self: its parent .*self is its own descendant"):
        read_lineage(run.at("self"))
    run.commit("a", 2, CheckpointRef("../b", "0" * 64))
    second = run.commit("b", 1, CheckpointRef("../a", "0" * 64))
    run.commit("a", 2, second)
    with pytest.raises(DamagedError, match=r"b: its parent .*a is its own descendant"):
        read_lineage(run.at("a"))


def test_parents_are_older(run: Run) -> None:
    """A parent that is not older than its child is refused: the newest would not be the head."""
    for created_ns in (1, 2):
        parent = run.commit(f"parent-{created_ns}", created_ns)
        run.commit(f"child-{created_ns}", 2, parent)
    assert len(read_lineage(run.at("child-1")).checkpoints) == 2
    with pytest.raises(DamagedError, match="child-2: it is not newer than its parent"):
        read_lineage(run.at("child-2"))


def test_parents_outside_of_the_store_are_typed_errors(tmp_path: Path) -> None:
    """A path that leads above the root of a file system ends in a typed error."""
    run = Run(str(tmp_path))
    run.commit("a", 2, CheckpointRef("../" * 50 + "x", "0" * 64))
    with pytest.raises(CNRError):
        read_lineage(run.at("a"))
    elsewhere = Run(f"memory://lineage-{next(numbers)}")
    elsewhere.commit("a", 2, CheckpointRef("../" * 50 + "x", "0" * 64))
    with pytest.raises(CNRError):
        read_lineage(elsewhere.at("a"))


def test_errors_survive_pickling(run: Run) -> None:
    """What a lineage is refused for reaches the other ranks."""
    _chain(run, 2)
    run.store.fs.rm(run.store.at("step-0").path, recursive=True)
    with pytest.raises(DamagedError) as caught:
        read_lineage(run.at("step-1"))
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied)) == (DamagedError, str(caught.value))


# Replacements


def test_replacement_is_read_instead(run: Run) -> None:
    """A checkpoint whose manifest was replaced is what the replacement says, and is still called what it was."""
    refs = _chain(run, 3)
    before = read_checkpoint(run.at("step-2"))
    assert not before.is_compacted
    manifest = run.replace("step-2", policy="Compacted", history=History(77))
    after = read_checkpoint(run.at("step-2"))
    assert after.is_compacted
    assert (after.manifest, after.committed) == (manifest, before.manifest)
    assert after.sha256 == before.sha256 == refs[2].sha256
    assert after.manifest_sha256 != after.sha256
    assert (after.kind, after.parent, after.created_ns) == ("baseline", None, before.created_ns)
    assert after.head(()).history == History(77)
    sizes = [len(run.read("step-2", file)) for file in (MANIFEST_FILE, replacement_name(before.sha256))]
    assert after.num_bytes == sum(sizes)


def test_replacements_are_followed_to_the_last(run: Run) -> None:
    """A replacement may be replaced, by a file with its digest in the name, and so on."""
    _chain(run, 2)
    digests = [read_checkpoint(run.at("step-1")).sha256]
    for number in range(5):
        last = run.replace("step-1", policy=f"policy-{number}")
        found = read_checkpoint(run.at("step-1"))
        assert found.manifest == last
        assert found.manifest_sha256 not in digests
        digests.append(found.manifest_sha256)
    assert found.sha256 == digests[0]
    assert found.num_bytes == sum(
        len(run.read("step-1", name)) for name in (MANIFEST_FILE, *map(replacement_name, digests[:-1]))
    )


def test_children_load_unchanged(run: Run) -> None:
    """A delta goes on standing on a parent that was replaced, and no longer on what that stood on."""
    refs = _chain(run, 5)
    whole = read_lineage(run.at("step-4"))
    run.replace("step-2")
    lineage = read_lineage(run.at("step-4"))
    assert [checkpoint.ref for checkpoint in lineage.checkpoints] == [
        CheckpointRef(run.at(f"step-{number}"), refs[number].sha256) for number in (2, 3, 4)
    ]
    assert lineage.checkpoints[1:] == whole.checkpoints[3:]
    assert lineage.head.baseline.sha256 == refs[2].sha256
    for name in ("step-0", "step-1"):
        run.remove(name)
    assert read_lineage(run.at("step-4")) == lineage
    with pytest.raises(CheckpointNotFoundError):
        read_lineage(run.at("step-1"))


def test_run_of_deltas_is_replaced(run: Run) -> None:
    """A replacement may stand on an ancestor: the deltas in between are not needed any more, the ancestor is."""
    refs = _chain(run, 6)
    run.replace("step-4", parent=refs[1])
    run.remove("step-2")
    run.remove("step-3")
    lineage = read_lineage(run.at("step-5"))
    assert [checkpoint.store.url for checkpoint in lineage.checkpoints] == [run.at(f"step-{n}") for n in (0, 1, 4, 5)]
    run.replace("step-1")
    run.remove("step-0")
    assert len(read_lineage(run.at("step-5")).checkpoints) == 3
    run.remove("step-1")
    with pytest.raises(DamagedError, match=r"step-4: its parent .*step-1 is missing"):
        read_lineage(run.at("step-5"))


def test_parent_of_a_replacement_must_be_the_one_it_names(run: Run) -> None:
    """A replacement's parent is compared as that of a commit is: by the digest of its manifest.json, and by time."""
    refs = _chain(run, 4)
    baseline = run.replace("step-1")
    run.replace("step-3", parent=CheckpointRef("../step-1", manifest_json.dumps(baseline)[1]))
    with pytest.raises(DamagedError, match=r"step-3: its parent .*step-1 was replaced"):
        read_lineage(run.at("step-3"))
    run.commit("younger", 9)
    younger = read_checkpoint(run.at("younger")).sha256
    run.replace("step-2", parent=CheckpointRef("../younger", younger))
    with pytest.raises(DamagedError, match=r"step-2: it is not newer than its parent .*younger"):
        read_lineage(run.at("step-2"))
    assert refs[1].sha256 != manifest_json.dumps(baseline)[1]


def test_replacement_without_a_manifest_is_no_checkpoint(run: Run) -> None:
    """What was removed is gone, though its replacement, and packs that others use, may lie there still."""
    _chain(run, 2)
    run.replace("step-1")
    run.store.at("step-1").put("5a7e-0-0.safetensors", [b"data"])
    assert latest(run.url) == run.at("step-1")
    run.remove("step-1")
    for read in (read_checkpoint, read_lineage):
        with pytest.raises(CheckpointNotFoundError, match=r"step-1: no manifest\.json"):
            read(run.at("step-1"))
    assert latest(run.url) == run.at("step-0")


def test_file_under_a_wrong_name_replaces_nothing(run: Run) -> None:
    """A replacement says itself what it replaces: put under another digest it is refused."""
    _chain(run, 2)
    digest = read_checkpoint(run.at("step-1")).sha256
    run.replace("step-1", replaces="ab" * 32)
    with pytest.raises(DamagedError, match=f"{replacement_name(digest)}: it replaces manifest abab"):
        read_checkpoint(run.at("step-1"))


def test_manifest_that_commits_replaces_nothing(run: Run) -> None:
    """A replacement moved to where the commit was is not taken for one: it may need packs that no commit may."""
    _chain(run, 2)
    manifest = run.replace("step-1")
    run.put("step-1", manifest_json.dumps(manifest)[0])
    with pytest.raises(DamagedError, match=r"step-1/manifest\.json: it replaces manifest .*, expected one that"):
        read_checkpoint(run.at("step-1"))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "newer"])
def test_damaged_replacement_is_refused(run: Run, damage: str) -> None:
    """There is no way back to what was replaced: its packs may be gone."""
    refs = _chain(run, 3)
    run.replace("step-1")
    file = replacement_name(refs[1].sha256)
    data = run.read("step-1", file)
    damaged = {
        "truncated": data[:-20],
        "flipped": data.replace(b'"world_size":1', b'"world_size":3'),
        "empty": b"",
        "newer": _newer(data),
    }
    run.put("step-1", damaged[damage], file)
    for step in ("step-1", "step-2"):
        with pytest.raises(VersionError if damage == "newer" else DamagedError, match=file):
            read_lineage(run.at(step))


def test_replacement_that_cannot_be_read_is_not_passed_over(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there is a replacement is not guessed, if the store does not answer."""
    _chain(run, 1)
    read = Store.read

    def fail(self: Store, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        if name != MANIFEST_FILE:
            raise StoreError("cannot read: connection lost")
        return read(self, name, start, stop)

    monkeypatch.setattr(Store, "read", fail)
    with pytest.raises(StoreError, match="connection lost"):
        read_checkpoint(run.at("step-0"))


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
def test_replacement_of_another_state_is_refused(run: Run, changes: dict[str, Any], item: str) -> None:
    """What takes a manifest's place must have its items: a compaction that lost one would be a state that lost it."""
    run.commit("step", 1, tensors={"x": _vector(0)}, paths={"x": ("x",)})
    run.replace("step", tensors={"x": replace(_vector(0), folded=(Place(Box((0,), (0,))),))})
    assert read_checkpoint(run.at("step")).is_compacted
    run.replace("step", **changes)
    with pytest.raises(DamagedError, match=f"it has otherwise than what it replaces: .*{item}"):
        read_checkpoint(run.at("step"))


def test_objects_of_a_replacement_are_those_of_what_it_replaces(run: Run) -> None:
    """So too with objects."""
    packs = (Pack("save-0-0.safetensors", 9, 8, 0),)
    run.commit("step", 1, packs=packs, objects={"reader": Blob(0, 8, 1, 0)})
    run.replace("step")
    run.replace("step", packs=(), objects={})
    with pytest.raises(DamagedError, match="what it replaces: object 'reader'"):
        read_checkpoint(run.at("step"))


def test_baseline_is_given_no_parent(run: Run) -> None:
    """A baseline needs nobody, and a replacement of it neither."""
    refs = _chain(run, 2)
    run.commit("alone", 9)
    run.replace("alone", parent=refs[0])
    with pytest.raises(DamagedError, match="it has a parent, what it replaces has none"):
        read_checkpoint(run.at("alone"))


def test_cycles_through_replacements_are_refused(run: Run) -> None:
    """A replacement whose parent stands on it is refused, instead of being followed for ever."""
    refs = _chain(run, 3)
    run.replace("step-1", parent=refs[2])
    with pytest.raises(DamagedError, match=r"step-1: its parent .*step-2 is its own descendant"):
        read_lineage(run.at("step-2"))


def test_latest_goes_by_the_commit(run: Run) -> None:
    """A compaction makes nothing newer; the newest checkpoint is read as its replacement has it."""
    _chain(run, 3)
    run.replace("step-1")
    assert read_checkpoint(run.at("step-1")).manifest.created_ns > read_checkpoint(run.at("step-2")).created_ns
    assert latest(run.url) == run.at("step-2")


def test_fate_of_a_save_is_told_by_its_commit(run: Run) -> None:
    """A compaction has a save id of its own; who saved what it replaced still finds its save."""
    run.commit("mine", 1, save_id="save-1")
    run.replace("mine")
    found = committed(run.at("mine"), "save-1")
    assert found is not None
    assert found.manifest.save_id != "save-1"
    assert committed(run.at("mine"), found.manifest.save_id) is None


# The newest


def _newer(data: bytes) -> bytes:
    """The same manifest, of the next version of the format."""
    body = {**json.loads(data)["manifest"], "version": VERSION + 1, "something": "new"}
    return _framed(json.dumps(body, separators=(",", ":")).encode())


def _framed(body: bytes) -> bytes:
    return b'{"sha256":"%s","manifest":%s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)


def test_latest_of_nothing_is_none(run: Run) -> None:
    """An empty directory, and one that is not there, have no newest checkpoint."""
    assert latest(run.url) is None
    assert latest(f"{run.url}/missing") is None


def test_latest_goes_by_time_not_by_name(run: Run) -> None:
    """Of a hundred checkpoints the one committed last is the newest, whatever its name."""
    for number in range(100):
        run.commit(f"step-{number}", (number * 37) % 100 + 1)
    times = {number: (number * 37) % 100 + 1 for number in range(100)}
    newest = max(times, key=lambda number: times[number])
    assert newest not in (9, 99)
    assert latest(run.url) == run.at(f"step-{newest}")


def test_latest_compares_times_as_numbers(run: Run) -> None:
    """A time with more digits is later."""
    run.commit("a", 9)
    run.commit("b", 10)
    assert latest(run.url) == run.at("b")


def test_latest_passes_over_what_is_no_checkpoint(run: Run) -> None:
    """Files, empty directories and saves that died are no checkpoints."""
    run.commit("good", 1)
    run.store.put("notes.txt", [b"x"])
    for name in ("empty", "died"):
        run.store.at(name).make()
    run.store.at("died").put("5a7e-0-0.safetensors", [b"data"])
    assert latest(run.url) == run.at("good")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign", "another digest"])
def test_latest_passes_over_damage_with_a_warning(run: Run, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    """The newest checkpoint that is good is found, and each damaged one that is newer is named in the log."""
    run.commit("good", 1)
    run.commit("bad", 2)
    data = run.read("bad")
    damaged = {
        "truncated": data[:-20],
        "flipped": data.replace(b'"world_size":1', b'"world_size":3'),
        "empty": b"",
        "foreign": b"{}\n" * 400,
        "another digest": data.replace(data[11:75], b"0" * 64),
    }
    run.put("bad", damaged[damage])
    with caplog.at_level(logging.WARNING):
        assert latest(run.url) == run.at("good")
    assert "bad/manifest.json" in caplog.text  # what has no time of commit may be the newest


def test_latest_refuses_to_go_behind_a_newer_version(run: Run) -> None:
    """If the newest was written by a newer version, resuming from an older one would lose work silently."""
    run.commit("old", 1)
    run.commit("new", 2)
    run.put("new", _newer(run.read("new")))
    with pytest.raises(VersionError, match=rf"new/manifest\.json: written in format version {VERSION + 1}.*upgrade"):
        latest(run.url)
    run.commit("newest", 3)
    assert latest(run.url) == run.at("newest")


def test_latest_verifies_what_it_names(run: Run) -> None:
    """A time of commit that was altered to look newest is not believed."""
    run.commit("good", 5)
    run.commit("bad", 1)
    run.put("bad", run.read("bad").replace(b'"created_ns":1', b'"created_ns":9'))
    assert latest(run.url) == run.at("good")


def test_latest_reports_what_cannot_be_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails is no reason to resume from an older checkpoint."""
    run.commit("old", 1)
    run.commit("new", 2)
    read = Store.read

    def fail(self: Store, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        if self.path.endswith("/new"):
            failure = StoreError("cannot read: connection lost")
            failure.errno = errno.EIO
            raise failure
        return read(self, name, start, stop)

    monkeypatch.setattr(Store, "read", fail)
    with pytest.raises(StoreError, match="connection lost"):
        latest(run.url)


# The fate of a save


def test_fate_of_a_save_is_read_from_the_store(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """A save committed if its manifest is there: not if none is, another's is, or what is there cannot be read."""
    run.commit("mine", 1, save_id="save-1")
    found = committed(run.at("mine"), "save-1")
    assert found is not None
    assert found.manifest.save_id == "save-1"
    assert committed(run.at("mine"), "save-2") is None
    assert committed(run.at("missing"), "save-1") is None
    run.put("mine", run.read("mine")[:-5])
    assert committed(run.at("mine"), "save-1") is None
    assert "its rows will be saved again" in caplog.text


def test_fate_of_a_save_is_not_guessed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store does not answer, nobody knows: an error is raised instead of an answer given."""
    run.commit("mine", 1, save_id="save-1")

    def fail(*_: object, **__: object) -> bytes:
        raise StoreError("cannot read: connection lost")

    monkeypatch.setattr(Store, "read", fail)
    with pytest.raises(StoreError):
        committed(run.at("mine"), "save-1")


# Relative paths


@pytest.mark.parametrize(
    ("place", "other", "expected"),
    [
        ("/job/step-2", "/job/step-1", "../step-1"),
        ("/job/b/step-2", "/job/a/step-1", "../../a/step-1"),
        ("/job/step-2", "/step-1", "../../step-1"),
        ("/step-2", "/job/step-1", "../job/step-1"),
        ("/job/step-2", "/job/step-2", None),
        ("/job/step-2", "/job/step-2/", None),
        ("/job/step-2", "/job/step-2/below", None),
        ("/job/step-2/below", "/job/step-2", None),
        ("/job/step-2", "/", None),
        ("/job/deltas/step-2", "/job", None),
    ],
)
@pytest.mark.parametrize("protocol", ["", "memory://"])
def test_relative_paths_lead_to_the_parent(protocol: str, place: str, other: str, expected: str | None) -> None:
    """A path goes up first and then down by names, and leads there; what cannot be named so has none."""
    store = Store.open(protocol + place)
    found = relative_path(store, protocol + other)
    assert found == expected
    if found is not None:
        assert store.at(found) == Store.open(protocol + other)


@pytest.mark.parametrize(
    "other", ["/job/step-1", "/job", "/", "/job/back\\slash", "/job/new\nline", "/job/é", "/job/\x7f"]
)
def test_whatever_path_is_written_is_read(other: str) -> None:
    """A manifest accepts each relative path that a delta would be given; other names are refused from the start."""
    try:
        path = relative_path(Store.open("/job/deltas/step-2"), other)
    except ConfigurationError:
        return
    if path is None:
        return
    manifest = Manifest(1, "", "save", CheckpointRef(path, "0" * 64), "", History(0), 0, 1, "", (), {})
    assert manifest_json.loads(manifest_json.dumps(manifest)[0], "here")[0] == manifest


def test_other_file_systems_have_no_relative_path() -> None:
    """Between two file systems no relative path leads."""
    assert relative_path(Store.open("/job/step-2"), "memory://job/step-1") is None
    assert relative_path(Store.open("memory://job/step-2"), "/job/step-1") is None

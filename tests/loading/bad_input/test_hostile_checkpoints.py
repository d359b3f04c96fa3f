"""Hostile checkpoints whose digests are all right: refused or loaded, with no other error, and no code is run."""

import gc
import hashlib
import io
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import torchrec_cnr as cnr
from tests.attacks.draft import Draft, tensor
from tests.golden.replacement import replace_manifest
from tests.loading.bad_input.mishaps import adopt, forge, goes_on, load_failure, manifest, write_manifest
from tests.support import faults
from tests.support.jobs import SavingJob, save
from tests.support.models import plain_job, state
from torchrec_cnr.format.manifest_parser import VERSION

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.mark.parametrize("version", [VERSION + 1, 999])
@pytest.mark.parametrize("number", [2, 0], ids=["head", "parent"])
def test_another_format_version_is_a_version_error(run: SavingJob, version: Any, number: int) -> None:
    """A manifest of another version, with whatever a later version may have in it, is named as such."""
    shutil.copytree(run.root, run.root + "-kept")

    def change(body: dict[str, Any]) -> None:
        body["version"] = version
        body["codebooks"] = []

    digest = forge(run.path(number), change)
    if number == 0:
        adopt(run.path(2), adopt(run.path(1), digest))
    message = load_failure(run.path(2))
    assert message.startswith("VersionError")
    assert run.path(number) in message
    assert "upgrade" in message
    shutil.rmtree(run.root)
    shutil.move(run.root + "-kept", run.root)
    goes_on(run)


def _leave_mark(path: str) -> str:
    Path(path).write_text("code ran")
    return path


class _Evil:
    """Unpickled, it runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], str], tuple[str]]:
        return _leave_mark, (str(self.path),)


def test_a_pickle_that_would_run_code_runs_none(run: SavingJob, tmp_path: Path) -> None:
    """A checkpoint made by hand, with code in an object: refused by every way to load, and nothing ran."""
    mark = tmp_path / "mark"
    path = str(tmp_path / "evil")
    with torch.serialization.safe_globals([_leave_mark]):  # the hand that makes it
        save(run.job, path + "-harmless", cnr.CNRSavePlanner(run.tracker, policy=cnr.Full()))
        evil = state(run.job, batch=_Evil(mark))
        save(evil, path)
    mark.unlink()
    target = state(plain_job(2, "adagrad"), batch=None)
    for planner in (cnr.CNRLoadPlanner(), DefaultLoadPlanner()):
        message = load_failure(path, planner, target)
        assert message.startswith("DamagedError")
        assert "reader.batch" in message
        assert not mark.exists()
    cause = faults.failure_of(lambda: _load_state_dict_from_keys(storage_reader=cnr.CNRStorageReader(path)))
    assert isinstance(cause, cnr.DamagedError)
    assert not mark.exists()
    goes_on(run)


def _replace_bytes(pack: Path, offset: int, content: bytes) -> int:
    """Put other bytes in a blob's place; their digest."""
    with pack.open("r+b") as file:
        file.seek(offset)
        file.write(content)
    return int(google_crc32c.value(content))


def _fuzz_object(path: str, seed: int, num_changes: int) -> None:
    """Change an object's pickle at random, digests being right: loads, or one of our errors."""
    file = Path(path, "manifest.json")
    body = json.loads(file.read_bytes())["manifest"]
    blob = body["objects"]["reader.seen"]
    name = body["packs"][blob[0]][1]
    original = Path(path, name).read_bytes()[blob[1] : blob[1] + blob[2]]
    start = original.index(b"data.pkl") + 8
    rng = random.Random(seed)
    for number in range(num_changes):
        content = bytearray(original)
        for _ in range(rng.randrange(1, 4)):
            # Most of the file is the frame of a zip archive; the pickle lies behind the first name.
            place = rng.randrange(start, start + 120) if number % 2 else rng.randrange(len(content))
            content[place] = rng.randrange(256)
        blob[3] = _replace_bytes(Path(path, name), blob[1], bytes(content))
        write_manifest(file, body)
        _loads_or_is_refused(path, {"reader": {"seen": None}}, f"change {number} of seed {seed}")


def _loads_or_is_refused(path: str, target: dict[str, Any], where: str) -> None:
    reader = cnr.CNRStorageReader(path)
    try:
        dcp.load(target, storage_reader=reader, planner=cnr.CNRLoadPlanner(allow_partial_load=True))
    except CheckpointException as error:
        for cause in faults.causes(error).values():
            assert isinstance(cause, cnr.CNRError), f"{where}: {cause!r}"


def _save_values(path: str) -> None:
    seen = [1, 2.5, "three", {"four": (5, None, True)}, b"six", torch.ones(2)]
    saved = {"reader": {"seen": tuple(seen)}}  # a tuple is one object to DCP
    save(saved, path)


@pytest.mark.long
def test_a_changed_pickle_is_refused_or_loads(tmp_path: Path) -> None:
    """Whatever the bytes of an object, its digest being right: one of our errors, or a value; no other error."""
    _save_values(f"{tmp_path}/0")
    _fuzz_object(f"{tmp_path}/0", seed=1, num_changes=200)


@pytest.mark.slow
def test_many_changed_pickles_are_refused_or_load(tmp_path: Path) -> None:
    """As above, with changes that differ from run to run."""
    _save_values(f"{tmp_path}/0")
    _fuzz_object(f"{tmp_path}/0", seed=random.randrange(10**9), num_changes=5_000)


_HOSTILE: list[Any] = [
    None, True, -1, 0, 1, 7, 2**31, 2**40, 2**62, 2**63, 2**70, 1.5, "", "..", "../..", "/etc/passwd", "none", "int8",
    "float64", "x" * 1000, "\0", [], {}, [[]], [0], [[0, 0], [2**31, 2**31]], [1, 2, 3, 4],
    {"name": "asymmetric", "bits": 4},
]  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value within a JSON value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key)
            yield from _places(inner, (*path, key))


def _fuzz_manifest(run: SavingJob, number: int, seed: int, num_changes: int) -> None:
    """Replace, drop, swap and repeat values of a manifest, digests being right: loads, or one of our errors."""
    original = manifest(run, number).read_bytes()
    kept = {child: manifest(run, child).read_bytes() for child in range(3)}
    target = plain_job(98, "adagrad")
    for body in _changed_bodies(original, seed, num_changes):
        digest = write_manifest(manifest(run, number), body)
        for child in range(number + 1, 3):
            digest = adopt(run.path(child), digest)
        changed = manifest(run, number).read_text()
        _loads_or_is_refused(run.path(2), state(target), changed[:3_000])
        for child, content in kept.items():
            manifest(run, child).write_bytes(content)


def _fuzz_replacement(run: SavingJob, number: int, base: str | None, seed: int, num_changes: int) -> None:
    """As above, with the manifest that a checkpoint's lineage was folded into."""
    replaces = replace_manifest(Path(run.path(number)), base).replaces
    file = Path(run.path(number), f"manifest-{replaces}.json")
    original = file.read_bytes()
    target = plain_job(98, "adagrad")
    for body in _changed_bodies(original, seed, num_changes):
        write_manifest(file, body)
        _loads_or_is_refused(run.path(2), state(target), file.read_text()[:3_000])
    file.write_bytes(original)


def _changed_bodies(original: bytes, seed: int, num_changes: int) -> Iterator[Any]:
    places = list(_places(json.loads(original)["manifest"]))
    rng = random.Random(seed)
    for _ in range(num_changes):
        body = json.loads(original)["manifest"]
        for _ in range(rng.choice([1, 1, 2])):
            _change_somewhere(body, places, rng)
        yield body


def _change_somewhere(body: Any, places: list[tuple[Any, ...]], rng: random.Random) -> None:
    *path, last = rng.choice(places)
    holder = body
    try:
        for key in path:
            holder = holder[key]
        match rng.randrange(5):
            case 0:
                del holder[last]
            case 1 if isinstance(holder[last], int):
                holder[last] += rng.choice([-1, 1, 8, 4096])
            case 2 if isinstance(holder, list):
                other = rng.randrange(len(holder))
                holder[last], holder[other] = holder[other], holder[last]
            case 3 if isinstance(holder, list):
                holder.append(holder[last])
            case _:
                holder[last] = rng.choice(_HOSTILE)
    except (KeyError, IndexError, TypeError):
        pass  # an earlier change took the place away


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_forged_manifest_is_refused_or_loads(run: SavingJob, number: int) -> None:
    """Whatever a manifest says, its digest being right: one of our errors, or a load; no other error."""
    _fuzz_manifest(run, number, seed=number, num_changes=150)
    goes_on(run)


@pytest.mark.long
@pytest.mark.parametrize(("number", "base"), [(1, None), (2, None), (2, "0")])
def test_a_forged_replacement_is_refused_or_loads(run: SavingJob, number: int, base: str | None) -> None:
    """So too with a replacement, of the head or of its parent; and who stands on the head goes on."""
    _fuzz_replacement(run, number, base, seed=number, num_changes=150)
    goes_on(run)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "base"), [(1, None), (2, None), (2, "0")])
def test_many_forged_replacements_are_refused_or_load(run: SavingJob, number: int, base: str | None) -> None:
    """As above, with changes that differ from run to run."""
    _fuzz_replacement(run, number, base, seed=random.randrange(10**9), num_changes=2_000)
    goes_on(run)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2])
def test_many_forged_manifests_are_refused_or_load(run: SavingJob, number: int) -> None:
    """As above, with changes that differ from run to run."""
    _fuzz_manifest(run, number, seed=random.randrange(10**9), num_changes=4_000)
    goes_on(run)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not a complete manifest"),
        (b"{}\n", "not a complete manifest"),
        (b"\x80\x04]q\x00.", "not a complete manifest"),
        (None, "not JSON"),
        (b"null", "not a manifest"),
        (b'{"format":"another"}', "not a manifest"),
        (b'{"format":"torchrec_cnr","version":1}', "keys"),
        (b"[" * 100_000 + b"]" * 100_000, "not JSON"),
        (b'{"format":"torchrec_cnr","version":' + b"9" * 10_000 + b"}", ""),
    ],
)
def test_a_file_that_is_no_manifest_is_refused(run: SavingJob, text: bytes | None, words: str) -> None:
    """Nothing, a pickle, other JSON, JSON to break parsers with: refused, with the file's name."""
    body = b"\xff\xfe" if text is None else text
    framed = b'{"sha256":"%s","manifest":%s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)
    manifest(run, 2).write_bytes(text if text is not None and words == "not a complete manifest" else framed)
    message = load_failure(run.path(2))
    assert message.startswith("DamagedError" if words else ("DamagedError", "VersionError"))
    assert str(manifest(run, 2)) in message
    assert words in message
    goes_on(run, last=1)


def test_loading_from_a_damaged_checkpoint_by_keys_is_a_typed_error(run: SavingJob) -> None:
    """DCP's way to load without a target gets the same errors."""
    faults.flip_middle(manifest(run, 2))
    cause = faults.failure_of(lambda: _load_state_dict_from_keys(storage_reader=cnr.CNRStorageReader(run.path(2))))
    assert isinstance(cause, cnr.DamagedError)
    assert str(manifest(run, 2)) in str(cause)
    cause = faults.failure_of(lambda: _load_state_dict_from_keys(storage_reader=cnr.CNRStorageReader(run.path(9))))
    assert isinstance(cause, cnr.CheckpointNotFoundError)


def test_errors_survive_the_way_between_ranks() -> None:
    """DCP pickles what a rank raised: type and message are still there on the others."""
    for name in cnr.__all__:
        kind = getattr(cnr, name)
        if isinstance(kind, type) and issubclass(kind, cnr.CNRError):
            copy = torch.load(io.BytesIO(_saved(kind("what, where"))), weights_only=False)
            assert type(copy) is kind
            assert str(copy) == "what, where"


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_a_file_system_that_refuses_to_be_read_is_a_store_error(run: SavingJob) -> None:
    """A manifest that is a directory stands for what cannot be read, though it is there."""
    content = manifest(run, 2).read_bytes()
    manifest(run, 2).unlink()
    os.mkdir(manifest(run, 2))
    assert load_failure(run.path(2)).startswith("StoreError")
    os.rmdir(manifest(run, 2))
    manifest(run, 2).write_bytes(content)
    goes_on(run)


def test_a_load_that_fails_ends_its_threads(tmp_path: Path) -> None:
    """DCP keeps what a failed load refers to until the garbage collector runs: no thread goes on until then."""
    draft = Draft()
    shard = [[[0], [8]], None, 0, [draft.blob(b"\2" * 8)], {"name": "none"}]
    draft.body["tensors"]["flags"] = tensor([shard], [8], dtype="bool")
    draft.write(tmp_path / "step-1")
    target, planner = {"flags": torch.zeros(8, dtype=torch.bool)}, cnr.CNRLoadPlanner(allow_partial_load=True)
    gc.disable()
    try:
        with pytest.raises(CheckpointException, match="expected bools"):
            dcp.load(target, storage_reader=cnr.CNRStorageReader(tmp_path / "step-1"), planner=planner)
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("cnr-read")] == []
    finally:
        gc.enable()

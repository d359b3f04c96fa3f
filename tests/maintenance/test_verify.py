"""Verification: whatever is damaged is found and named, all of it, and nothing else is."""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchrec_cnr as cnr
from tests.support import runs
from tests.support.faults import flip
from tests.support.ranks import RankPools
from torchrec_cnr.format.blob_bytes import Bytes
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.maintenance.verification import damage
from torchrec_cnr.maintenance.verification.damage import Problem
from torchrec_cnr.maintenance.verification.verify import VerifyReport, verify
from torchrec_cnr.storage import pack_writer
from torchrec_cnr.storage.pack_writer import crc32c
from torchrec_cnr.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

NAMES = ("step-1", "step-2", "step-3")
SHARDINGS = ("row", "column", "table")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPools) -> Path:
    """A lineage of three checkpoints that two ranks saved, quantized, each sharded otherwise."""
    folder = tmp_path_factory.mktemp("run")
    rank_pool(2).run(runs.save_sharded_run, str(folder), NAMES, SHARDINGS, [True] * 3, 4)
    assert [cnr.read_checkpoint(folder / name).kind for name in NAMES] == ["baseline", "delta", "delta"]
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three checkpoints of one process, to be damaged, in blocks of a few rows."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pack_writer, "BLOCK_BYTES", 5 * 4 * 4)
        runs.save_run(tmp_path / "run", NAMES, quantization=cnr.Asymmetric(8))
    return tmp_path / "run"


@contextmanager
def _flipped(path: Path, offset: int, bit: int = 0) -> Iterator[None]:
    """A file with one bit flipped, for as long as the context lasts."""
    flip(path, offset, bit)
    try:
        yield
    finally:
        flip(path, offset, bit)


def _files(root: Path) -> list[Path]:
    """All files of its checkpoints."""
    return sorted(path for path in root.rglob("*/*") if path.is_file())


def _packs(root: Path, name: str) -> list[Path]:
    return sorted((root / name).glob("*.safetensors"))


def test_a_lineage_that_is_right_is_right(root: Path) -> None:
    """Nothing is wrong with what was saved; the report tells all that was looked at."""
    told: list[tuple[int, int]] = []
    report = verify(root / "step-3", progress=lambda done, total: told.append((done, total)))
    assert report.problems == ()
    assert report.is_right
    lineage = read_lineage(root / "step-3")
    blobs = [blob for checkpoint in lineage.checkpoints for _, blob in checkpoint.manifest.blobs()]
    assert len(blobs) > 50
    assert report == VerifyReport(
        heads=(str(root / "step-3"),),
        checkpoints=tuple(str(root / name) for name in NAMES),
        num_blobs=len(blobs),
        num_bytes=sum(blob.num_bytes for blob in blobs),
        problems=(),
    )
    assert told == sorted(told)
    assert told[-1] == (report.num_bytes, report.num_bytes)
    assert len({done for done, _ in told}) > 10


@pytest.mark.long
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_a_flipped_bit_is_found_wherever_it_is(root: Path, seed: int) -> None:
    """In any byte of any file of the lineage; the file is named."""
    draw = random.Random(seed)
    path = draw.choice(_files(root))
    with _flipped(path, draw.randrange(path.stat().st_size), draw.randrange(8)):
        report = verify(root / "step-3")
    assert not report.is_right
    assert {problem.file for problem in report.problems} == {str(path)}
    assert all(str(path) in problem.message for problem in report.problems)


@pytest.mark.long
def test_the_ends_of_every_file_are_looked_at(root: Path) -> None:
    """Flips of each file's first and last byte, and of the first behind a pack's header."""
    for path in _files(root):
        offsets = [0, path.stat().st_size - 1]
        if path.suffix == ".safetensors":
            offsets.append(8 + int.from_bytes(path.read_bytes()[:8], "little"))
        for offset in offsets:
            with _flipped(path, offset):
                assert {problem.file for problem in verify(root / "step-3").problems} == {str(path)}
    assert verify(root / "step-3").is_right


def test_all_that_is_wrong_is_listed(run: Path) -> None:
    """Several blobs of one pack, packs of several checkpoints, one that is short and one that is gone."""
    manifest = cnr.read_checkpoint(run / "step-1").manifest
    named = [(key, blob) for key, blob in manifest.blobs() if blob.pack == 0]
    assert len(named) > 10
    chosen = [named[0], named[len(named) // 2], named[-1]]
    first = run / "step-1" / manifest.packs[0].name
    for _, blob in chosen:
        flip(first, blob.offset)
    (second,) = _packs(run, "step-2")
    second.write_bytes(second.read_bytes()[:-1])
    (third,) = _packs(run, "step-3")
    third.unlink()
    problems = verify(run / "step-3").problems
    in_first = [problem for problem in problems if problem.checkpoint == str(run / "step-1")]
    assert {problem.blob for problem in in_first} == {key for key, _ in chosen}
    assert {problem.file for problem in in_first} == {str(first)}
    in_second = [problem for problem in problems if problem.checkpoint == str(run / "step-2")]
    assert [problem.file for problem in in_second] == [str(second)]
    assert "truncated" in in_second[0].message
    assert [problem for problem in problems if problem.checkpoint == str(run / "step-3")] == [
        Problem(str(run / "step-3"), str(third), None, f"{third}: the data file is missing; use another checkpoint", 0)
    ]
    assert len(problems) == 5


def test_damaged_manifests_do_not_hide_other_damage(run: Path) -> None:
    """What stands on a checkpoint that cannot be read is verified all the same."""
    (pack,) = _packs(run, "step-3")
    flip(pack, pack.stat().st_size - 1)
    flip(run / "step-2" / "manifest.json", 100)
    report = verify(run / "step-3")
    assert [problem.file for problem in report.problems] == [str(run / "step-2" / "manifest.json"), str(pack)]
    assert report.checkpoints == (str(run / "step-3"),)
    shutil.rmtree(run / "step-2")
    report = verify(run / "step-3")
    assert [problem.file for problem in report.problems] == [str(run / "step-2" / "manifest.json"), str(pack)]
    assert "its parent" in report.problems[0].message
    flip(run / "step-3" / "manifest.json", 100)
    report = verify(run / "step-3")
    assert [problem.file for problem in report.problems] == [str(run / "step-3" / "manifest.json")]
    assert report.checkpoints == ()


def test_a_parent_that_was_replaced_is_a_problem(run: Path, tmp_path: Path) -> None:
    """Another checkpoint in the place of a parent is whole, and still not what the child stands on."""
    runs.save_run(tmp_path / "other", NAMES[:2], seed=2)
    shutil.rmtree(run / "step-2")
    shutil.copytree(tmp_path / "other" / "step-2", run / "step-2")
    report = verify(run / "step-3")
    assert [problem.file for problem in report.problems] == [str(run / "step-2" / "manifest.json")]
    assert "was replaced" in report.problems[0].message
    assert report.checkpoints == (str(run / "step-3"),)


def _rewrite(path: Path, blob: Blob, data: bytes) -> None:
    """Give a blob of the only pack of a checkpoint other bytes of the same number, with digests that fit."""
    assert len(data) == blob.num_bytes
    (pack,) = path.glob("*.safetensors")
    content = bytearray(pack.read_bytes())
    content[blob.offset : blob.offset + blob.num_bytes] = data
    pack.write_bytes(content)
    before, after = (
        json.dumps([blob.pack, blob.offset, blob.num_bytes, crc], separators=(",", ":")).encode()
        for crc in (blob.crc32c, crc32c(data))
    )
    runs.change_manifest(path, re.escape(before), after)


def test_rows_that_do_not_decode_are_found(run: Path) -> None:
    """Digests alone are not enough: row numbers that a faulty writer made up are told, though every digest is right."""
    blobs = dict(cnr.read_checkpoint(run / "step-3").manifest.blobs())
    key = next(key for key in blobs if key.startswith("row numbers of tensor"))
    _rewrite(run / "step-3", blobs[key], b"\0" * blobs[key].num_bytes)
    (problem,) = verify(run / "step-3").problems
    assert problem.checkpoint == str(run / "step-3")
    assert f"{key}: row numbers do not decompress" in problem.message


def test_a_delta_of_what_its_parent_lacks_is_found(run: Path, tmp_path: Path) -> None:
    """A parent with fitting digests that has a tensor otherwise contradicts its child."""
    runs.save_run(tmp_path / "other", NAMES[:1], seed=2, rows=(41, 12))
    ours, theirs = (cnr.read_checkpoint(folder / "step-1").sha256 for folder in (run, tmp_path / "other"))
    shutil.rmtree(run / "step-1")
    shutil.copytree(tmp_path / "other" / "step-1", run / "step-1")
    runs.change_manifest(run / "step-2", ours.encode(), theirs.encode())
    runs.change_manifest(run / "step-2", rb'"created_ns":\d+', b'"created_ns":%d' % (2**61))
    problems = verify(run / "step-2").problems
    assert {problem.checkpoint for problem in problems} == {str(run / "step-2")}
    assert any("'model.bag.weight'" in problem.message for problem in problems)


def test_a_root_stands_for_its_newest_checkpoint(run: Path) -> None:
    """By default damage in another lineage is not looked for; with all heads it is, and each checkpoint read once."""
    runs.save_run(run, ["step-2-again"], load="step-1", seed=3)
    runs.save_run(run, ["alone"], seed=4)
    assert verify(run).checkpoints == (str(run / "alone"),)
    report = verify(run, all_heads=True)
    assert report.is_right
    assert sorted(report.heads) == [str(run / name) for name in ("alone", "step-2-again", "step-3")]
    names = ("alone", "step-1", "step-2", "step-2-again", "step-3")
    assert sorted(report.checkpoints) == [str(run / name) for name in names]
    (pack,) = _packs(run, "step-1")
    flip(pack, pack.stat().st_size - 1)
    assert verify(run).is_right
    report = verify(run, all_heads=True)
    assert [problem.file for problem in report.problems] == [str(pack)]


def test_an_unreadable_manifest_under_a_root_is_a_problem(run: Path) -> None:
    """It might be the newest: a root is right only if all of its manifests can be read."""
    flip(run / "step-3" / "manifest.json", 200)
    report = verify(run)
    assert report.heads == (str(run / "step-2"),)
    assert [problem.file for problem in report.problems] == [str(run / "step-3" / "manifest.json")]


def test_a_compacted_checkpoint_without_its_manifest_is_a_problem(run: Path) -> None:
    """Of one that a prune has removed, only data files are left, and the journal knows it."""
    cnr.compact(run / "step-3")
    assert verify(run).is_right
    (run / "step-3" / "manifest.json").unlink()
    found = verify(run)
    assert [problem.message for problem in found.problems if "step-3/manifest.json: missing" in problem.message]
    assert found.newest_restorable == str(run / "step-2")
    assert cnr.plan_prune(run, cnr.Keep(last=1)).stays["step-3"][0].startswith("cannot be read")


def test_groups_of_tensors_change_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded one by one, tensors give the same report, of what is right and of what is not."""
    (pack,) = _packs(run, "step-2")
    flip(pack, pack.stat().st_size // 2)
    expected = [verify(run / name) for name in ("step-1", "step-3")]
    monkeypatch.setattr(damage, "_GROUP_ROWS", 1)
    assert [verify(run / name) for name in ("step-1", "step-3")] == expected
    assert [report.is_right for report in expected] == [True, False]


def test_what_is_right_is_read_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a lineage that is right, each byte of a pack is read once, but for headers."""
    num_read = 0
    read_array = Store.read_array

    def counted(store: Store, name: str, start: int, stop: int, on_piece: Callable[[Bytes], None]) -> Bytes:
        nonlocal num_read
        num_read += stop - start
        return read_array(store, name, start, stop, on_piece)

    monkeypatch.setattr(Store, "read_array", counted)
    report = verify(run / "step-3")
    packs = [pack for checkpoint in read_lineage(run / "step-3").checkpoints for pack in checkpoint.manifest.packs]
    assert report.num_bytes <= num_read <= report.num_bytes + 3 * sum(pack.header_bytes for pack in packs)


def test_a_store_in_memory_is_verified(tmp_path: Path) -> None:
    """Any fsspec file system will do, for damage too."""
    root = f"memory://{tmp_path}/run"
    runs.save_run(root, NAMES)
    assert verify(f"{root}/step-3").is_right
    assert verify(root, all_heads=True).is_right
    store = Store.open(f"{root}/step-2")
    name = next(name for name in store.names() if name.endswith(".safetensors"))
    data = bytearray(store.read(name))
    data[len(data) // 2] ^= 1
    store.put(name, [bytes(data)])
    assert {problem.file for problem in verify(root).problems} == {f"{store.url}/{name}"}


def test_what_is_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    """Nothing to verify is not all right; the error says what is there instead."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "died").mkdir()
    (tmp_path / "died" / "1-0-0.safetensors").write_bytes(b"x")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "file").write_bytes(b"x")
    said = {
        "missing": "does not exist",
        "empty": "an empty",
        "died": "data files, but",
        "notes": "neither a checkpoint",
    }
    for name, words in said.items():
        with pytest.raises(cnr.CheckpointNotFoundError, match=f"{tmp_path}/{name}: {words}"):
            verify(tmp_path / name)
    with pytest.raises(cnr.ConfigurationError, match="thread_count"):
        verify(tmp_path, thread_count=0)


@pytest.mark.long
def test_a_newer_version_is_an_error(run: Path) -> None:
    """What this version cannot read, it does not judge."""
    runs.change_manifest(run / "step-3", rb'"version":\d+', b'"version":99')
    with pytest.raises(cnr.VersionError, match="version 99"):
        verify(run / "step-3")
    assert ["version 99" in problem.message for problem in verify(run).problems] == [True]


def test_a_pack_that_is_too_long_is_told_and_loads(run: Path) -> None:
    """No load reads what was appended, and so a prune does not take the checkpoint for one that cannot be loaded."""
    pack = next((run / "step-3").glob("*.safetensors"))
    with pack.open("ab") as file:
        file.write(b"x")
    (problem,) = verify(run).problems
    assert (problem.checkpoint, problem.file) == (str(run / "step-3"), str(pack))
    assert "the manifest says" in problem.message
    assert cnr.plan_prune(run, cnr.Keep(last=1)).stays["step-3"] == ("newest",)
    cnr.load_table(run / "step-3", _first_table(run))


def _first_table(run: Path) -> str:
    return next(fqn for fqn, entry in cnr.read_checkpoint(run / "step-3").manifest.tensors.items() if entry.is_table)

"""What corrupt data prevents: the checkpoints that verify names do not load, and all others do."""

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchrec_cnr as cnr
from tests.support import runs
from tests.support.faults import flip
from torchrec_cnr.maintenance.catalog import read_catalog
from torchrec_cnr.maintenance.verification.damage import Problem
from torchrec_cnr.maintenance.verification.impact import unrestorable
from torchrec_cnr.maintenance.verification.verify import verify
from torchrec_cnr.storage import pack_writer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

NAMES = ("step-1", "step-2", "step-3", "step-4", "branch-3")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of four, whose third was compacted, and a branch; in blocks of a few rows."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pack_writer, "BLOCK_BYTES", 5 * 4 * 4)
        runs.save_run(folder, NAMES[:3], quantization=cnr.Asymmetric(8))
        cnr.compact(folder / "step-3")
        runs.save_run(folder, NAMES[3:4], load="step-3", seed=2, quantization=cnr.Asymmetric(8))
        runs.save_run(folder, NAMES[4:], load="step-2", seed=3, quantization=cnr.Asymmetric(8))
    return folder


def loads(path: Path, out: Path) -> bool:
    """Whether all tensors and objects of a checkpoint can be read."""
    try:
        cnr.export(path, out / "exported.pt", to="torch")
    except cnr.LoadError:
        return False
    (out / "exported.pt").unlink()
    return True


@contextmanager
def corrupted(path: Path, offset: int) -> Iterator[None]:
    """A file with one bit flipped, for as long as the context lasts."""
    flip(path, offset)
    try:
        yield
    finally:
        flip(path, offset)


@pytest.mark.long
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_what_does_not_load_is_named_and_nothing_else(root: Path, tmp_path: Path, seed: int) -> None:
    """Wherever a bit flips, in data files and manifests; the newest of the others is what to restore."""
    draw = random.Random(seed)
    path = draw.choice(sorted(root.rglob("*/*.*")))
    with corrupted(path, draw.randrange(path.stat().st_size)):
        report = verify(root, all_heads=True)
        right = [name for name in NAMES if loads(root / name, tmp_path)]
    assert not report.is_right
    assert set(report.unrestorable) == {str(root / name) for name in NAMES if name not in right}
    assert report.newest_restorable == (str(root / right[-1]) if right else None)


@pytest.mark.parametrize("head", ["step-2", "step-4"])
def test_the_whole_root_is_looked_at(root: Path, tmp_path: Path, head: str) -> None:
    """Also if one checkpoint is verified: those beside and above it, and corrupt files of a checkpoint to restore."""
    run = tmp_path / "run"
    shutil.copytree(root, run)
    for name in (head, "branch-3"):
        for pack in (run / name).glob("*.safetensors"):
            pack.unlink()
    right = [str(run / name) for name in NAMES if loads(run / name, tmp_path)]
    report = verify(run / head)
    assert set(report.unrestorable) == {str(run / name) for name in NAMES} - set(right)
    assert report.newest_restorable == right[-1]
    assert str(run / "branch-3") in {problem.checkpoint for problem in report.problems} or head == "step-2"


def test_damage_that_no_load_reads_prevents_nothing(root: Path, tmp_path: Path) -> None:
    """Bytes behind the end of a data file are a problem, but the newest can be restored."""
    run = tmp_path / "run"
    shutil.copytree(root, run)
    with next((run / "step-4").glob("*.safetensors")).open("ab") as file:
        file.write(b"x")
    report = verify(run / "step-4")
    assert not report.is_right
    assert (report.unrestorable, report.newest_restorable) == ((), str(run / "branch-3"))


def test_abandoned_checkpoints_are_not_proposed(root: Path, tmp_path: Path) -> None:
    """A job went back to an older one, so that the newest to restore is one that no job has left."""
    run = tmp_path / "run"
    shutil.copytree(root, run)
    digest = cnr.read_checkpoint(run / "branch-3").sha256
    (run / f"branch-3.{digest[:16]}.abandoned").touch()
    next((run / "step-4").glob("*.safetensors")).unlink()
    report = verify(run / "step-4")
    assert report.unrestorable == (str(run / "step-4"),)
    assert report.newest_restorable == str(run / "step-3")


def test_parents_in_other_roots_count(tmp_path: Path) -> None:
    """A delta whose parent is in another root can be restored, and is lost with what it is based on."""
    runs.save_run(tmp_path, ["a/step-1", "b/step-2", "b/step-3"])
    (last,) = (tmp_path / "b" / "step-3").glob("*.safetensors")
    with corrupted(last, -1):
        report = verify(tmp_path / "b")
    assert report.unrestorable == (str(tmp_path / "b" / "step-3"),)
    assert report.newest_restorable == str(tmp_path / "b" / "step-2")
    (first,) = (tmp_path / "a" / "step-1").glob("*.safetensors")
    first.unlink()
    report = verify(tmp_path / "b")
    assert report.unrestorable == (str(tmp_path / "b" / "step-2"), str(tmp_path / "b" / "step-3"))
    assert report.newest_restorable is None


def test_contradictions_prevent_all_that_is_based_on_them(root: Path) -> None:
    """A problem that is in no file, such as a delta of a tensor that its parent lacks, is one of the checkpoint."""
    problem = Problem(str(root / "step-2"), None, None, "a contradiction")
    found = unrestorable(read_catalog(root), [problem])
    assert [name for name, is_lost in found.items() if is_lost] == ["step-2", "branch-3"]


def test_parents_may_come_after_their_deltas(root: Path) -> None:
    """As they do if a clock was behind when the delta was committed: the answer is the same."""
    catalog = read_catalog(str(root))
    names = [*reversed(catalog.checkpoints)]
    unordered = SimpleNamespace(checkpoints={name: catalog.checkpoints[name] for name in names}, parent=catalog.parent)
    lost = unrestorable(unordered, [Problem(str(root / "step-2"), None, None, "a contradiction")])
    assert {name for name, is_lost in lost.items() if is_lost} == {"step-2", "branch-3"}

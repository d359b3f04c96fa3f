"""One bit, flipped in any byte of any file of a lineage: verification finds it, and a load never takes it for good."""

import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.golden.replacement import replace_manifest
from tests.support import faults, models, runs
from tests.support.models import Whole, differing, plain_job, state, whole
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.maintenance.verification.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

NAMES = ("step-1", "step-2", "step-3", "step-4")
ROWS = (12, 8)
KINDS = ("deltas", "folded", "folded in part")
NUM_FLIPS, NUM_PARTS = 1_000, 10


@dataclass(frozen=True)
class Damaged:
    """What came of one flipped bit.

    Attributes:
        where: The bit, for messages.
        is_found: Whether verification told the file, and of a pack which part of it.
        is_refused: Whether a load was refused, by an error that tells the same.
        is_equal: Whether a load gave what was saved, to the last bit.
    """

    where: str
    is_found: bool
    is_refused: bool
    is_equal: bool


def _save(root: Path, kind: str) -> Whole:
    """A baseline and three deltas: quantized tables, the state of their optimizer, objects; perhaps folded."""
    held = runs.save_run(root, NAMES[:3], quantization=cnr.Asymmetric(4), rows=ROWS)
    if kind != "deltas":
        replace_manifest(root / "step-3", "step-1" if kind == "folded in part" else None)
    held = runs.save_run(root, NAMES[3:], load="step-3", seed=2, quantization=cnr.Asymmetric(4), rows=ROWS)
    lineage = read_lineage(root / "step-4").checkpoints
    assert [len(lineage), sum(link.is_compacted for link in lineage)] == {
        "deltas": [4, 0],
        "folded": [2, 1],
        "folded in part": [3, 1],
    }[kind]
    assert lineage[-1].manifest.objects
    assert len(held) == 1
    return _loaded(root / "step-4")


def _loaded(path: Path) -> Whole:
    return models.load(plain_job(99, "rowwise_adagrad", rows=ROWS), str(path), position=0)


def _files(root: Path) -> list[Path]:
    """All files of a lineage: manifests, those that were replaced too, and packs, wherever they lie."""
    found = set()
    for checkpoint in read_lineage(root / "step-4").checkpoints:
        folder = Path(checkpoint.store.path)
        found |= set(folder.glob("*.json")) | set(folder.glob("*.safetensors"))
        stores = {checkpoint.store.at(pack.directory or "."): pack.name for pack in checkpoint.manifest.packs}
        found |= {Path(store.path, name) for store, name in stores.items()}
    return sorted(found)


def _flip(root: Path, expected: Whole, draw: random.Random, files: list[Path]) -> Damaged:
    """Flip a bit of any byte, each as likely as any other, look at what comes of it, and flip it back."""
    file = draw.choices(files, [path.stat().st_size for path in files])[0]
    place, bit = draw.randrange(file.stat().st_size), draw.randrange(8)
    faults.flip(file, place, bit)
    try:
        problems = verify(root / "step-4").problems
        is_found = {problem.file for problem in problems} == {str(file)} and all(
            problem.blob is not None or file.suffix == ".json" for problem in problems
        )
        refusal = _refusal(root / "step-4", expected)
    finally:
        faults.flip(file, place, bit)
    parts = ("tensor '", "row set", "object '", "header of ")
    is_refused = str(file) in refusal and (file.suffix == ".json" or any(part in refusal for part in parts))
    return Damaged(f"bit {bit} of byte {place} of {file}", is_found, is_refused, not refusal)


def _refusal(path: Path, expected: Whole) -> str:
    """Why a load is refused; nothing if it gives what is expected, something else if it gives anything else."""
    job = plain_job(98, "rowwise_adagrad", rows=ROWS)
    target = state(job, position=0)
    try:
        dcp.load(target, storage_reader=cnr.CNRStorageReader(path), planner=cnr.CNRLoadPlanner())
    except CheckpointException as error:
        (cause,) = faults.causes(error).values()
        return str(cause) if isinstance(cause, cnr.DamagedError) else f"no damage: {cause!r}"
    return "".join(differing(whole(target), expected))


def _assert_detected(root: Path, kind: str, num_flips: int, seed: int) -> int:
    """Flip bits; returns how many were detected."""
    expected = _save(root, kind)
    files, draw = _files(root), random.Random(seed)
    assert {file.parent.name for file in files} >= {"step-1", "step-2", "step-3", "step-4"}
    flips = [_flip(root, expected, draw, files) for _ in range(num_flips)]
    assert [flip.where for flip in flips if not flip.is_found] == []
    assert [flip.where for flip in flips if not (flip.is_refused or flip.is_equal)] == []
    assert {flip.is_refused for flip in flips} == {True, False}
    return sum(flip.is_found for flip in flips)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_detected(tmp_path: Path, kind: str) -> None:
    """By verification always; a load is refused, or gives what was saved because it does not need the byte."""
    assert _assert_detected(tmp_path, kind, 33, seed=5) == 33


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> Iterator[list[int]]:
    """What the slow tests detected, which is printed at their end."""
    detected: list[int] = []
    yield detected
    if detected:
        capture = request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
            print(f"\n{sum(detected):,} of {len(detected) * NUM_FLIPS // NUM_PARTS:,} detected")  # noqa: T201 - see above


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_a_thousand_flipped_bits_are_detected(tmp_path: Path, told: list[int], part: int) -> None:
    """As above, at 1,000 places that change from run to run."""
    num_flips = NUM_FLIPS // NUM_PARTS
    told.append(_assert_detected(tmp_path, KINDS[part % len(KINDS)], num_flips, seed=random.randrange(10**9)))
    assert told[-1] == num_flips

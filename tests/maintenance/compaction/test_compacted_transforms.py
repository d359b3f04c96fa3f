"""Compactions of transform-coded rows copy the transforms that live rows have, once, and say so in their plans."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrec_cnr as cnr
from tests.quantization.test_transformed_checkpoints import FQN, NUM_ROWS, Run, assert_near, running, scheme_of
from tests.support import models
from tests.support.faults import flip_middle
from torchrec_cnr.format.manifest import Shard
from torchrec_cnr.kernels import cpu
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.maintenance.catalog import read_catalog
from torchrec_cnr.maintenance.restore_bytes import restore_bytes, tensor_bytes
from torchrec_cnr.maintenance.verification.impact import unrestorable
from torchrec_cnr.quantization import Transformed, packed_rows
from torchrec_cnr.reading.transforms import KnownTransforms

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def _save_deltas(run: Run, num_deltas: int) -> None:
    run.save()
    for number in range(1, num_deltas + 1):
        run.change(torch.arange(300) + 100 * number, number)
        run.save()


def _shards(path: Path) -> tuple[Shard, ...]:
    return cnr.read_checkpoint(path).manifest.tensors[FQN].shards


@pytest.mark.parametrize("self_contained", [False, True])
@pytest.mark.parametrize("max_ratio", [1.0, 1.16])
def test_a_second_compaction_has_nothing_to_do(tmp_path: Path, max_ratio: float, self_contained: bool) -> None:
    """Files of transforms are rewritten only if they must be, and sizes are about as planned."""
    with running(tmp_path) as run:
        _save_deltas(run, 3)
        plan = cnr.plan_compaction(tmp_path / "3", max_ratio=max_ratio, self_contained=self_contained)
        merged = cnr.compact(tmp_path / "3", max_ratio=max_ratio, self_contained=self_contained).manifest
        assert sum(pack.num_bytes for pack in merged.packs) == pytest.approx(plan.bytes_after, rel=0.1)
        assert sum(blob.num_bytes for _, blob in merged.blobs()) == pytest.approx(plan.live_bytes, rel=0.1)
        again = cnr.plan_compaction(tmp_path / "3", max_ratio=1.01 * max_ratio, self_contained=self_contained)
        assert not again.is_needed
        assert again.bytes_before == sum(pack.num_bytes for pack in merged.packs)
        assert_near(tmp_path / "3", run.table)


def test_transforms_without_live_rows_are_not_copied(tmp_path: Path) -> None:
    """A process that resumes learns other ones. If all rows were stored since, those of the baseline are dead."""
    with running(tmp_path) as run:
        old = scheme_of(run.save())
        run.writer = models.writer(tmp_path / "0", quantization={"*": cnr.TransformCoded()})
        for number in range(2):
            run.change(torch.arange(number, NUM_ROWS, 2), number)
            run.save()
        plan = cnr.plan_compaction(tmp_path / "2", max_ratio=1.0)
        dead = [use.pack for use in plan.uses if use.moved_bytes == 0]
        assert {pack.directory for pack in dead} == {"../0"}
        merged = cnr.compact(tmp_path / "2", max_ratio=1.0, self_contained=True).manifest
        assert old not in {shard.scheme for shard in merged.tensors[FQN].shards}
        assert {file.name for file in (tmp_path / "2").glob("*.safetensors")} == {pack.name for pack in merged.packs}
        needed_bytes = merged.blob_bytes + sum(pack.header_bytes for pack in merged.packs)
        assert merged.pack_bytes == needed_bytes
        assert_near(tmp_path / "2", run.table)


def test_a_transform_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its basis, however many new shards have rows with it, and however many transforms use the basis."""
    with running(tmp_path) as run:
        _save_deltas(run, 4)
        schemes = (shard.scheme for n in range(5) for shard in _shards(tmp_path / str(n)))
        transforms = [scheme for scheme in schemes if isinstance(scheme, Transformed)]
        read: list[str] = []
        add = KnownTransforms.add

        def read_blobs(self: KnownTransforms, shards: Mapping[str, Shard], *args: Any) -> None:
            read.extend(name.split()[0] for name in self.missing(shards))
            add(self, shards, *args)

        monkeypatch.setattr(KnownTransforms, "add", read_blobs)
        cnr.compact(tmp_path / "4", max_ratio=1.0)
        assert len(transforms) > len(set(transforms)) >= read.count("transform") > 0
        assert read.count("basis") == len({scheme.basis for scheme in transforms}) == 1
        assert len(_shards(tmp_path / "4")) > read.count("transform")


def test_strips_without_live_rows_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of the baseline with rows that the delta has not; the delta's own file stays."""
    monkeypatch.setattr(packed_rows, "STRIP_ROWS", 64)
    num_changed = 2_000
    with running(tmp_path) as run:
        run.save()
        run.change(torch.arange(num_changed), 1)
        run.save()
        decoded: list[int] = []
        decode = cpu.decode_numbers

        def counting(*args: Any) -> bool:
            decoded.append(len(args[-1]))
            return decode(*args)

        monkeypatch.setattr(cpu, "decode_numbers", counting)
        cnr.compact(tmp_path / "1", max_ratio=1.0, self_contained=True)
        assert len(decoded) == -(-NUM_ROWS // 64) - num_changed // 64
        assert_near(tmp_path / "1", run.table)


def test_a_restore_reads_transforms(tmp_path: Path) -> None:
    """Each once, however many checkpoints use it."""
    with running(tmp_path) as run:
        _save_deltas(run, 2)
        checkpoints = [cnr.read_checkpoint(tmp_path / str(number)) for number in range(3)]
        for checkpoint in checkpoints:
            assert sum(tensor_bytes(checkpoint.manifest).values()) == checkpoint.manifest.blob_bytes
        manifests = [checkpoint.manifest for checkpoint in checkpoints]
        transforms = [shard.transform_parts for manifest in manifests for shard in manifest.tensors[FQN].shards]
        distinct = {digest: blob for parts in transforms for digest, blob in parts.items()}
        wanted = sum(checkpoint.manifest_bytes + checkpoint.manifest.blob_bytes for checkpoint in checkpoints)
        wanted -= sum(blob.num_bytes for parts in transforms for blob in parts.values())
        assert len(distinct) < sum(map(len, transforms))
        assert restore_bytes(read_lineage(tmp_path / "2")) == wanted + sum(blob.num_bytes for blob in distinct.values())


def test_checkpoints_without_their_transforms_cannot_be_restored(tmp_path: Path) -> None:
    """Verify finds all of them by one corrupt file."""
    with running(tmp_path) as run:
        _save_deltas(run, 2)
        run.planner = cnr.CNRSavePlanner(run.tracker, policy=cnr.Full())
        run.save()
        (basis,) = (file for file in (tmp_path / "0").glob("*.safetensors") if 4_000 < file.stat().st_size < 6_000)
        flip_middle(basis)
        problems = cnr.verify(tmp_path / "2").problems
        wanted = {"0": True, "1": True, "2": True, "3": False}
        assert unrestorable(read_catalog(tmp_path), problems) == wanted

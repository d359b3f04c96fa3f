"""Checkpoints without tensors, for the command line."""

from pathlib import Path
from typing import Any

from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.manifest import CheckpointRef, History, Manifest
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.reading.plan import plan_fold, whole_box

NAMES = ("step-1", "step-2", "step-3", "branch-3", "branch-4")
LIMIT_SECS = 60


def commit(root: Path, name: str, created_ns: int, parent: tuple[str, str] | None = None) -> tuple[str, str]:
    """Commit a checkpoint without tensors; returns how others refer to it."""
    ref = parent and CheckpointRef(f"../{parent[0]}", parent[1])
    manifest = Manifest(created_ns, name, name, ref, "Consecutive", History(0, (0,) if ref else ()), 0, 1, "t", (), {})
    data, sha256 = manifest_json.dumps(manifest)
    (root / name).mkdir(parents=True)
    (root / name / "manifest.json").write_bytes(data)
    return name, sha256


def planned_bytes(path: Path) -> int:
    """Bytes of the manifests and blobs that a load of everything plans to read; each transform once, by its digest."""
    lineage = read_lineage(path)
    manifest = lineage.newest.manifest
    regions = [verifying_region(manifest, fqn) for fqn in manifest.tensors]
    plans = plan_fold(lineage, regions)
    blobs = {
        (plan.checkpoint.store.path, key): blob.num_bytes
        for plan in plans
        for key, blob in (
            *((key, read.blob) for key, read in plan.reads.items()),
            *((key, block.blob) for key, block in plan.row_blocks.items()),
        )
        if blob is not None
    }
    transforms = {digest: blob.num_bytes for plan in plans for digest, blob in plan.transforms.items()}
    of_manifests = sum(checkpoint.manifest_bytes for checkpoint in lineage.checkpoints)
    return (
        of_manifests
        + sum(blobs.values())
        + sum(transforms.values())
        + sum(blob.num_bytes for blob in manifest.objects.values())
    )


class _Wanted:
    """A region of which nothing but its place is asked."""

    def __init__(self, fqn: str, box: Any) -> None:
        self.fqn, self.box = fqn, box

    def write(self, block: Any) -> None:
        raise AssertionError

    finish = write


def verifying_region(manifest: Manifest, fqn: str) -> Any:
    """All of a tensor."""
    return _Wanted(fqn, whole_box(manifest, fqn))

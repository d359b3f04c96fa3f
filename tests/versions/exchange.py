"""Saves checkpoints of a TorchRec job on two ranks, or loads those that another environment saved.

Run by ``torchrun -m tests.versions.exchange save FOLDER`` and ``... load FOLDER``. A baseline and two deltas, exact and
quantized; what they load to is written beside them, and must be the same, bit for bit, wherever they are loaded. A job
that has loaded them goes on from there, with a delta.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import torchrec_cnr as cnr
from tests.support.models import Job, Whole, differing, state, torchrec_job, train, whole

SCHEMES: dict[str, cnr.Quantization] = {
    "exact": cnr.NoQuantization(),
    "4-bit": cnr.AdaptiveAsymmetric(bits=4),
    "k-means": cnr.KMeans(bits=4),
}
STEPS = (1, 2, 3)


def main(action: str, folder: Path) -> None:
    """Do it for each scheme."""
    dist.init_process_group("gloo")
    for name in SCHEMES:
        save(folder / name, name) if action == "save" else load(folder / name, name)
    dist.destroy_process_group()
    # Not the end of Python: a thread of gloo that still holds a tensor sometimes ends the process by SIGABRT
    # (https://github.com/pytorch/pytorch/pull/179291).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def save(folder: Path, name: str) -> None:
    """Save a baseline and two deltas, and write what they load to."""
    job = torchrec_job(1)
    manager = _manager(folder / "run", job, name)
    for step in STEPS:
        train(job, step)
        saved = manager.save(step, state(job))
        assert saved is not None
        assert (saved.kind == "baseline") == (step == STEPS[0])
    manager.close()
    loaded = _values(*_restored(folder / "run", name))
    if name == "exact":
        assert differing(loaded, whole(state(job))) == []
    if dist.get_rank() == 0:
        torch.save(loaded, folder / "loaded.pt")


def load(folder: Path, name: str) -> None:
    """Load what another environment saved, in a copy, and go on from there."""
    copy = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(copy)
    root = Path(str(copy[0])) / "run"
    if dist.get_rank() == 0:
        shutil.copytree(folder / "run", root)
    dist.barrier()
    expected: Whole = torch.load(folder / "loaded.pt", weights_only=True)
    job, manager = _restored(root, name)
    assert differing(whole(state(job)), expected) == []
    train(job, 9)
    saved = manager.save(STEPS[-1] + 1, state(job))
    assert saved is not None
    assert saved.kind == "delta"
    manager.close()
    if name == "exact":
        assert differing(_values(*_restored(root, name)), whole(state(job))) == []
    if dist.get_rank() == 0:
        assert not cnr.verify(saved.path).problems
        shutil.rmtree(root.parent)


def _manager(root: Path, job: Job, name: str) -> cnr.CheckpointManager:
    scheme = SCHEMES[name]
    return cnr.CheckpointManager(root, cnr.RowTracker(job.model), policy=cnr.Consecutive(), quantization=scheme)


def _restored(root: Path, name: str) -> tuple[Job, cnr.CheckpointManager]:
    """Return a job that has loaded the newest checkpoint, and its manager."""
    job = torchrec_job(2)
    manager = _manager(root, job, name)
    assert manager.restore(state(job)) == max(map(int, (path.name[5:] for path in root.glob("step-*"))))
    return job, manager


def _values(job: Job, manager: cnr.CheckpointManager) -> Whole:
    manager.close()
    return whole(state(job))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

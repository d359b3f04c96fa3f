"""The paths of a run's checkpoints: ``step-N`` under its root, which is a checkpoint once it has a manifest."""

from pathlib import Path

from delimited import DataError


def step_path(root: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return root / f"step-{step}"


def steps_on_disk(root: Path) -> list[int]:
    """Return the steps with a directory under ``root``, committed or not, in order."""
    names = [path.name.removeprefix("step-") for path in root.glob("step-*")]
    return sorted(int(name) for name in names if name.isdigit())


def is_committed(path: Path) -> bool:
    """Return whether a directory is a committed checkpoint, which has a manifest."""
    return (path / "manifest.json").exists()


def check_root(root: Path, resume: bool) -> None:
    """Raise an error if there is no checkpoint to resume from, or if a new run would mix with an old one."""
    has_checkpoint = any(is_committed(step_path(root, step)) for step in steps_on_disk(root))
    if resume and not has_checkpoint:
        raise DataError(f"{root} contains no checkpoint to resume from")
    if has_checkpoint and not resume:
        raise DataError(f"{root} already contains checkpoints; continue with --resume, or give another --root")

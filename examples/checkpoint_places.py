"""Where a run's checkpoints lie: ``step-N`` under its root, a checkpoint once it has a manifest."""

from pathlib import Path

from delimited import DataError


def step_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"step-{step}"


def steps_on_disk(root: Path) -> list[int]:
    """Steps with a directory under ``root``, committed or not, in order."""
    names = [path.name.removeprefix("step-") for path in root.glob("step-*")]
    return sorted(int(name) for name in names if name.isdigit())


def is_committed(path: Path) -> bool:
    """Whether a directory is a checkpoint: one without a manifest is not."""
    return (path / "manifest.json").exists()


def check_root(root: Path, resume: bool) -> None:
    """Refuse to resume from nothing, and to mix a new run with an old one."""
    has_checkpoint = any(is_committed(step_path(root, step)) for step in steps_on_disk(root))
    if resume and not has_checkpoint:
        raise DataError(f"{root} holds no checkpoint to resume from")
    if has_checkpoint and not resume:
        raise DataError(f"{root} holds checkpoints; continue with --resume, or give another --root")

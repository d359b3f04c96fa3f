"""Runs a changed copy of somebody's trainer on two ranks: whole, killed, and again; and compares what it told."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guides/trainers.md"


def told(rank: str, step: str, loss: str, model: str, killed_after: int, indent: int) -> str:
    """Return lines that print a step, and that kill the rank after one of them, where a file says so."""
    lines = (
        f"weights = sum(float(weight.detach().double().sum()) for weight in {model}.parameters())",
        f'print(f"rank {{{rank}}} step {{{step}}} loss {{{loss}.item()!r}} weights {{weights!r}}", flush=True)',
        f'if os.path.exists("kill") and {step} == {killed_after}:',
        "    os._exit(9)",
    )
    return "".join(f"{' ' * indent}{line}\n" for line in lines)


def replaced(source: str, old: str, new: str) -> str:
    """Replace text that is in a source once."""
    assert source.count(old) == 1, f"expected once, not {source.count(old)} times: {old}"
    return source.replace(old, new)


def compare(folder: Path, program: str, arguments: Sequence[str] = (), paths: Sequence[Path] = ()) -> None:
    """Run a program of a folder whole, killed and again, and raise an error if it did not resume bit for bit.

    Args:
        folder: The folder, in which each run gets a folder of its own.
        program: Path of the program within it.
        arguments: Its arguments.
        paths: Further folders that it imports from.
    """
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", f"../{program}", *arguments]
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, (ROOT, *paths))), "OMP_NUM_THREADS": "1"}

    def run(name: str) -> set[str]:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder / name,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        steps = set(re.findall(r"rank \d step \d+ loss [-.e\d]+ weights [-.e\d]+", done.stdout))  # lines may join
        assert steps, done.stderr
        return steps

    (folder / "whole").mkdir()
    (folder / "killed").mkdir()
    whole = run("whole")
    (folder / "killed" / "kill").touch()
    killed = run("killed")
    (folder / "killed" / "kill").unlink()
    resumed = run("killed")
    assert killed < whole
    assert len(resumed) < len(whole)
    assert resumed < whole, resumed - whole
    assert killed | resumed == whole
    print(
        f"{len(whole) // 2} steps of a whole run, {len(killed) // 2} until it was killed, {len(resumed) // 2} after it "
        "resumed: the same losses and weights"
    )

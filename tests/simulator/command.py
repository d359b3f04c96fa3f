"""The command of the simulator, for tests: a process of its own, whose sets have the same order every time."""

import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[2]
NUM_SCHEDULES = 100  # of each of five families: enough for all that `reached` asks for
MAX_SECS = 900.0  # for them; they take under a minute where nothing else runs


def simulate(*arguments: str, timeout_secs: float = 280.0) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    command = [sys.executable, "-m", "tests.simulator", *arguments]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=timeout_secs, check=False)


def check_schedules(family: str) -> None:
    """Run the first seeds of a family."""
    done = simulate("--family", family, "--seeds", "0", str(NUM_SCHEDULES), timeout_secs=MAX_SECS - 20)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f" {NUM_SCHEDULES} schedules" in done.stdout

"""Scripts of the examples, run as processes."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[3]
LIMIT_SECS = 240


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it said."""

    status: int
    output: str
    errors: str

    @property
    def digest(self) -> str:
        """Of the final state of all ranks."""
        return next(line.rpartition(" ")[2] for line in self.output.splitlines() if line.startswith("state after step"))


def run(*arguments: str) -> Ended:
    """Run a Python script; what it started dies with it if it takes too long."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        output, errors = process.communicate(timeout=LIMIT_SECS)
    finally:
        if process.poll() is None:
            # Ranks lead sessions of their own, so no signal to a process group would reach them all.
            for started in psutil.Process(process.pid).children(recursive=True):
                started.kill()
            process.kill()
    return Ended(process.returncode, output, errors)


def succeed(*arguments: str) -> Ended:
    """Run a script that must end well."""
    ended = run(*arguments)
    assert ended.status == 0, ended.errors[-4000:]
    return ended

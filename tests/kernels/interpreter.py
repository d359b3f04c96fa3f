"""Triton's interpreter, in a process of its own: it must be asked for before kernels are defined."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_SECS = 240


def interpret(module: str, *arguments: str) -> None:
    """Run a module of the tests with the interpreter; fails with what it prints if its status is not 0."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore:divide by zero", "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]

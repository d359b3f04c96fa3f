"""Schedules of fixed seeds hold all invariants, replay exactly, and show what a broken protocol does."""

import subprocess
import sys
from pathlib import Path

import pytest

CHUNK, NUM_CHUNKS = 50, 10  # of each family: 2,000 schedules in all, 200 of them in every run
FAMILIES = ("saves", "async saves", "upkeep", "two jobs")
PROJECT = Path(__file__).parents[2]


def simulate(*arguments: str, timeout_secs: float = 280.0) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, whose sets have the same order every time."""
    command = [sys.executable, "-m", "tests.simulator", *arguments]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=timeout_secs, check=False)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(1, NUM_CHUNKS))])
def test_all_schedules_hold(family: str, chunk: int) -> None:
    """Whatever fails, is killed or comes in another order: what was saved loads, and ranks end alike."""
    done = simulate("--family", family, "--seeds", str(CHUNK * chunk), str(CHUNK * (chunk + 1)))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600 + 300)
def test_new_schedules_hold_for_an_hour() -> None:
    """As above, with seeds that nobody has seen; a finding prints its own."""
    done = simulate("--minutes", "60", timeout_secs=3600 + 240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_a_schedule_is_replayed_exactly() -> None:
    """Two processes print the same trace."""
    first, second = (simulate("--family", "saves", "--seed", "9", "--full") for _ in range(2))
    assert len(first.stdout.splitlines()) > 50
    assert first.stdout == second.stdout

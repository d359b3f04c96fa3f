"""Schedules of saves hold all invariants, with fixed seeds and with new ones, and are replayed exactly."""

import pytest

from tests.simulator.command import MAX_SECS, check_schedules, simulate


@pytest.mark.long
@pytest.mark.timeout(MAX_SECS)
@pytest.mark.parametrize("family", ["saves", "async saves"])
def test_schedules_of_saves_hold(family: str) -> None:
    """Whatever fails, is killed or comes in another order: what was saved loads, and ranks end alike."""
    check_schedules(family)


@pytest.mark.slow
@pytest.mark.timeout(900 + 300)
def test_new_schedules_hold() -> None:
    """As above, with seeds that nobody has seen; a finding prints its own."""
    done = simulate("--minutes", "15", timeout_secs=900 + 240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_a_schedule_is_replayed_exactly() -> None:
    """Its digest is that of another process, which ran other schedules before."""
    alone, after_others = (simulate("--seeds", first, "4", "--digests").stdout.splitlines() for first in ("3", "0"))
    digests = [line for line in after_others if " lines" in line]
    assert digests[3] == alone[0]
    assert len({line.partition(": ")[2] for line in digests}) == 4
    assert max(int(line.split()[-2]) for line in digests) > 100

"""Schedules with upkeep, or with a second job, hold all invariants. In a file of its own, for a second core."""

import pytest

from tests.simulator.command import MAX_SECS, check_schedules


@pytest.mark.long
@pytest.mark.timeout(MAX_SECS)
@pytest.mark.parametrize("family", ["upkeep", "two jobs", "managed"])
def test_schedules_beside_others_hold(family: str) -> None:
    """Whoever compacts, prunes, reads or saves at the same time: what was saved loads, and ranks end alike."""
    check_schedules(family)

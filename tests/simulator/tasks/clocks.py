"""Clocks of hosts that somebody sets while jobs run."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.simulator.engine.scheduler import Scheduler

JUMPING_SHARE = 0.15
SIZES_SECS = (2.0, 3600.0, 86_400.0)


@dataclass(frozen=True)
class Jump:
    """A clock is set.

    Attributes:
        after_secs: After the one before.
        host: Whose clock.
        by_secs: How much later it is by that clock afterwards.
    """

    after_secs: float
    host: str
    by_secs: float


def draw_jumps(drawn: random.Random) -> tuple[Jump, ...]:
    """Which clocks are set; mostly none."""
    if drawn.random() >= JUMPING_SHARE:
        return ()
    return tuple(
        Jump(drawn.random(), drawn.choice(["host0", "host0", "host1", "host0B"]), drawn.choice([-1, 1]) * size)
        for size in drawn.choices(SIZES_SECS, k=drawn.randint(1, 3))
    )


def jump_clocks(sim: Scheduler, ahead_secs: dict[str, float], jumps: Sequence[Jump]) -> None:
    """Set clocks of hosts, for all that runs there and is going to.

    Args:
        sim: The scheduler.
        ahead_secs: By host, for what is started later.
        jumps: What happens.
    """
    for jump in jumps:
        sim.sleep(jump.after_secs)
        if not sim.chance(1.0, f"clock of {jump.host} jumps by {jump.by_secs:g} s"):
            continue
        sim.tell(f"*** the clock of {jump.host} jumps by {jump.by_secs:g} s")
        ahead_secs[jump.host] = ahead_secs.get(jump.host, 0.0) + jump.by_secs
        for process in {task.process: None for task in sim.tasks if task.process.host == jump.host}:
            process.clock_secs += jump.by_secs

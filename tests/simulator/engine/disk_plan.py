"""What a simulated disk can do, and how often something happens to it."""

import random
from dataclasses import dataclass

DISK_SHARE = 0.25  # of the seeds


@dataclass(frozen=True)
class DiskPlan:
    """What a disk can do, and how often something happens to an operation of it.

    Attributes:
        has_links: Whether there are hard links.
        has_renames: Whether a file can be renamed unless its new name is taken.
        fail: Share of operations that fail with an I/O error.
        refuse: Share of operations that are not permitted.
        fill: Share of writes at which the disk is full for a while.
        kill: Share of changes before which the process is killed; of a write, a part may be done.
        power: Share of changes before which the power fails.
        ends_without_power: Whether it fails at the end, when nothing runs any more.
    """

    has_links: bool = True
    has_renames: bool = True
    fail: float = 0.0
    refuse: float = 0.0
    fill: float = 0.0
    kill: float = 0.0
    power: float = 0.0
    ends_without_power: bool = False

    @classmethod
    def of_seed(cls, seed: int) -> "DiskPlan | None":
        """The disk of a seed; None if its store is another one."""
        drawn = random.Random(f"{seed} disk")
        if drawn.random() >= DISK_SHARE:
            return None
        has_links, has_renames = drawn.choice([(True, True), (False, True), (False, False)])
        has_faults = drawn.random() < 0.8

        def share(*choices: float) -> float:
            found = drawn.choice(choices)
            return found if has_faults else 0.0

        return cls(
            has_links,
            has_renames,
            fail=share(0, 0, 0.001, 0.005),
            refuse=share(0, 0, 0.001, 0.005),
            fill=share(0, 0, 0.005, 0.02),
            kill=share(0, 0.003, 0.003, 0.01),
            power=share(0, 0.001, 0.001, 0.005),
            ends_without_power=drawn.random() < 0.5,
        )

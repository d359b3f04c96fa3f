"""The family "managed": jobs whose ranks save by ``CheckpointManager``, drawn by a generator of their own."""

import random
from collections.abc import Iterator

from tests.simulator.tasks.jobs import Plan, Step
from tests.simulator.tasks.managed_jobs import Managed


def managed_jobs(seed: int, root: str) -> tuple[Plan, ...]:
    """Draw a job; and often a second one at the same root, or one that begins from a checkpoint of the first."""
    drawn = random.Random(f"{seed} managed")
    numbers = iter(range(1, 1000))
    keep = drawn.choice([None, 1, 1, 2, 2])
    others = drawn.choice(["none", "none", "rival", "fork"])
    first = _job(drawn, numbers, "A", root, keep, drawn.choice([1, 2, 3]))
    if others == "none":
        return (first,)
    begins_secs = drawn.choice([0.1, 0.3, 0.6, 1.0])
    if others == "rival":
        return first, _job(drawn, numbers, "B", root, keep, 1, begins_secs=begins_secs)
    own_keep = drawn.choice([None, 1, 2])
    return first, _job(drawn, numbers, "B", f"{root}-fork", own_keep, 2, begins_secs=begins_secs, source=root)


def _job(
    drawn: random.Random,
    numbers: Iterator[int],
    name: str,
    root: str,
    keep: int | None,
    num_runs: int,
    begins_secs: float = 0.0,
    source: str | None = None,
) -> Plan:
    managed = Managed(
        root=root,
        keep=keep,
        source=source,
        removes_source=source is not None and drawn.random() < 0.5,
        options=drawn.choice([{}, {}, {}, {"every_steps": 2}, {"every_secs": 0.3}, {"num_retries": 0}]),
        background={
            "when_busy": drawn.choice(["wait", "wait", "skip", "fail"]),
            "staging_bytes": drawn.choice([1 << 20, 1 << 20, 1]),
            "compacts": drawn.choice([None, None, True, False]),
        },
        raise_share=drawn.choice([0.0, 0.0, 0.3]),
        closes=drawn.random() < 0.5,
    )
    kinds = drawn.choice([["save"], ["async save"], ["save", "async save"]]) * 4 + ["wait", "reopen", "restore"]
    return Plan(
        name=name,
        world_size=drawn.choice([1, 2, 2]),
        policy=drawn.choice(["full", "consecutive", "consecutive", "one shot", "intermittent", "compacted"]),
        steps=tuple(_steps(drawn, numbers, kinds) for _ in range(num_runs)),
        begins_secs=begins_secs,
        is_hasty=drawn.random() < 0.2,
        managed=managed,
    )


def _steps(drawn: random.Random, numbers: Iterator[int], kinds: list[str]) -> tuple[Step, ...]:
    found = []
    for _ in range(drawn.randint(2, 6)):
        found += ["train"] * drawn.randint(0, 1)
        found.append(drawn.choice(kinds))
    if drawn.random() < 0.4:
        found[drawn.randrange(len(found) + 1) :] = ["back", kinds[0], *drawn.choices(kinds, k=drawn.randint(0, 2))]
    return tuple(Step(kind, next(numbers)) for kind in found)

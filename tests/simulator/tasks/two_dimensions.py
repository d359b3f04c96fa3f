"""Which jobs have replicas of their shards, and when these are synchronised."""

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.simulator.tasks.jobs import Plan, Step

SHARE = 0.06  # of the jobs
NUM_REPLICAS = 2
_SYNCHRONISED = 0.8  # of the training steps
_RESOLVED = 0.15  # of the steps, after which one rank looks how its last save has ended


def replicated(plan: Plan, seed: int) -> Plan:
    """The plan, in a share of the seeds with two replicas of each rank."""
    drawn = random.Random(f"{seed} {plan.name} replicas")
    if drawn.random() >= SHARE:
        return plan
    second = "other model" if plan.second == "same model" else plan.second
    steps = tuple(tuple(_with_syncs(some, drawn)) for some in plan.steps)
    return replace(
        plan,
        world_size=NUM_REPLICAS * plan.world_size,
        num_replicas=NUM_REPLICAS,
        steps=steps,
        second=second,
        restores="together",
    )


def _with_syncs(steps: Sequence[Step], drawn: random.Random) -> list[Step]:
    """Steps between which replicas are synchronised; numbers of their own tell these apart."""
    found: list[Step] = []
    for step in steps:
        found.append(step)
        if drawn.random() < _RESOLVED:
            found.append(Step("resolve", 1000 + step.number))
        if step.kind == "train" and drawn.random() < _SYNCHRONISED:
            found.append(Step("sync", 2000 + step.number))
    return found

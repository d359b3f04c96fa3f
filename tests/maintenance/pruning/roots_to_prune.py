"""Roots that are pruned, and rules of retention."""

from datetime import UTC, datetime

from hypothesis import strategies as st

from tests.support.roots import HOUR_NS, Root
from torchrec_cnr.maintenance.pruning.plan import PrunePlan
from torchrec_cnr.maintenance.pruning.retention import Best, Keep

NOON_NS = int(datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp()) * 10**9


def hourly(root: Root, num: int) -> None:
    """Baselines ``0``, ``1``, …, one every eight hours from noon of the 20th of November."""
    for number in range(num):
        root.save(str(number), NOON_NS + 8 * number * HOUR_NS)


def kept(plan: PrunePlan) -> set[str]:
    """The checkpoints that stay."""
    return set(plan.catalog.checkpoints) - {checkpoint.name for checkpoint in plan.pruned}


keeps = st.builds(
    Keep,
    last=st.integers(1, 3),
    daily=st.sampled_from([0, 0, 1, 2, "all"]),
    best=st.none() | st.builds(Best, st.just("auc"), st.integers(1, 2), st.booleans()),
    tagged=st.booleans(),
)

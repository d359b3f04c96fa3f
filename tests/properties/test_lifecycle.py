"""Random lives of a job: whatever happens between them, a checkpoint loads as the state at its cut, bit for bit.

Hypothesis draws programs, see ``lives``. They run in this process on torch's own tables, many and fast, and on gloo
ranks with sharded TorchRec tables, where a program is a list of segments.
"""

from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.optim import SGD, Adagrad
from torchrec.optim import RowWiseAdagrad

from tests.properties.lives import (
    Life,
    Operation,
    Restart,
    Save,
    Segment,
    Train,
    live_segments,
    operations,
)
from tests.support import models
from tests.support.models import plain_job
from tests.support.ranks import RankPools

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _live_plain(root: Path, optimizer: str, program: list[Operation], verify_untracked: bool) -> None:
    life = Life(str(root), lambda seed: plain_job(seed, optimizer), verify_untracked=verify_untracked)
    life.start()
    with ExitStack() as stack:
        stack.callback(lambda: life.tracker.close())
        for operation in [Save("Full"), *program, Save("Consecutive")]:
            life.run(operation)
        for num_back in range(len(life.committed)):
            life.run(Restart(num_back))


@pytest.mark.long
@pytest.mark.parametrize("optimizer", sorted(models.OPTIMIZERS))
@settings(max_examples=8, derandomize=True, phases=[Phase.generate])  # the slow test below shrinks what fails
@given(program=operations(1, has_steps=True), verify_untracked=st.booleans())
def test_every_checkpoint_of_a_plain_model_loads_as_its_cut(
    tmp_path_factory: pytest.TempPathFactory, optimizer: str, program: list[Operation], verify_untracked: bool
) -> None:
    """Whatever the order of training, saves, failures and loads, each checkpoint is the state at its cut."""
    _live_plain(tmp_path_factory.mktemp("life"), optimizer, program, verify_untracked)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", sorted(models.OPTIMIZERS))
@settings(max_examples=200)
@given(program=operations(1, has_steps=True), verify_untracked=st.booleans())
def test_many_lives_of_a_plain_model(
    tmp_path_factory: pytest.TempPathFactory, optimizer: str, program: list[Operation], verify_untracked: bool
) -> None:
    """As above, with many programs that change from run to run."""
    _live_plain(tmp_path_factory.mktemp("life"), optimizer, program, verify_untracked)


def _live_torchrec(rank_pool: RankPools, root: Path, program: list[tuple[int, Segment]]) -> None:
    fused = program[0][1].fused
    ends = [(2, Segment(sharding, back, [], fused)) for sharding, back in (("row", 0), ("column", 1), ("mixed", 2))]
    live_segments(rank_pool, root, [*program, *ends])


@st.composite
def segments(draw: st.DrawFn, world_sizes: list[int]) -> list[tuple[int, Segment]]:
    """Lives on changing groups of ranks, the first of which saves at least once."""
    found = []
    fused = draw(st.sampled_from([RowWiseAdagrad, RowWiseAdagrad, Adagrad, SGD]))
    for number in range(draw(st.integers(2, 4))):
        world_size = draw(st.sampled_from(world_sizes))
        program = draw(operations(world_size, has_steps=False))
        first: list[Operation] = [Train(1), Save("Consecutive")] if number == 0 else []
        sharding, num_back = draw(st.sampled_from(models.SHARDINGS)), draw(st.integers(0, 3))
        verify_untracked = draw(st.booleans())
        found.append((world_size, Segment(sharding, num_back, first + program, fused, verify_untracked)))
    return found


@settings(
    max_examples=7,
    derandomize=True,
    phases=[Phase.generate],  # a failure ends the group of ranks, so shrinking would take very long
    suppress_health_check=[HealthCheck.too_slow],
)
@given(program=segments([1, 2, 2]))
def test_every_checkpoint_of_a_sharded_model_loads_as_its_cut(
    tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPools, program: list[tuple[int, Segment]]
) -> None:
    """Sharding and world size may change at any link of a lineage, and whatever fails, fails on any rank."""
    _live_torchrec(rank_pool, tmp_path_factory.mktemp("life"), program)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@settings(max_examples=25, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
@given(program=segments([1, 2, 3]))
def test_many_lives_of_a_sharded_model(
    tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPools, part: int, program: list[tuple[int, Segment]]
) -> None:
    """As above, with many programs that change from run to run, and a third world size."""
    _live_torchrec(rank_pool, tmp_path_factory.mktemp("life"), program)

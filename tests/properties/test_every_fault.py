"""Every storage operation of saves, a compaction and a prune on two ranks, spoiled in every way: nothing is lost.

Whatever a request does instead of what it should, and wherever a rank dies, the head before loads bit for bit, the next
save commits and has all rows, and a prune leaves no file behind that nothing refers to; see
``tests.properties.spoiled_work``.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.properties import spoiled_work
from tests.properties.spoiled_work import SAVES, WORK, WORLD_SIZE, Cell, Place
from tests.support.ranks import RankPools
from torchrec_cnr.testing import Fault

NUM_FAULTS = 2_000  # at least, in the slow run
NUM_SAMPLED = 100  # in every run
NUM_DEATHS = 3  # of these, ranks that die in a save: each takes ten times as long
LIMIT_SECS = 280.0
NUM_PARTS = 5  # of which each takes a minute at most
MEMORY = Path("/dev/shm")

Bench = tuple[Place, list[Cell]]


@pytest.fixture(scope="module")
def folder() -> Iterator[str]:
    """Where roots are: in memory, if that can be had."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as found:
        yield found


@pytest.fixture(scope="module")
def few(rank_pool: RankPools, folder: str) -> Bench:
    """Small tables, with which one fault takes least."""
    return _bench(rank_pool, Place(f"{folder}/few", num_rows=(64, 48), dim=16, num_ids=24))


@pytest.fixture(scope="module")
def many(rank_pool: RankPools, folder: str) -> Bench:
    """Larger ones, with more operations."""
    return _bench(rank_pool, Place(f"{folder}/many", num_rows=(224, 144), dim=32, num_ids=80))


def _bench(rank_pool: RankPools, place: Place) -> Bench:
    """A place, and all faults at all operations of both ranks that they make a difference to."""
    cells = [
        Cell(work, fault, number, rank)
        for rank, of_work in enumerate(rank_pool(WORLD_SIZE).run(spoiled_work.operations, place))
        for work, operations in of_work.items()
        for number, operation in enumerate(operations, 1)
        for fault in Fault
        if fault.spoils(operation.kind)
    ]
    assert {(cell.work, cell.fault) for cell in cells} == {(work, fault) for work in WORK for fault in Fault}
    return place, cells


@pytest.fixture(scope="module")
def tally(pytestconfig: pytest.Config) -> Iterator[Counter[str]]:
    """How many faults were tried, by work; printed in the end, since it is worth knowing."""
    tried: Counter[str] = Counter()
    yield tried
    of_work = ", ".join(f"{work} {num:,}" for work, num in tried.items())
    capture = pytestconfig.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{tried.total():,} faults tried: {of_work}")  # noqa: T201 - see above


def _try(rank_pool: RankPools, place: Place, cells: list[Cell]) -> int:
    """How many faults came to pass: two threads may change their operations' order, and so their number."""
    alive = [cell for cell in cells if cell.fault is not Fault.CRASH]
    num_tried = sum(rank_pool(WORLD_SIZE).run(spoiled_work.try_cells, place, alive, timeout_secs=LIMIT_SECS))
    for cell in cells:
        if cell.fault is Fault.CRASH:
            num_tried += spoiled_work.crash(rank_pool(WORLD_SIZE), place, cell)
    return num_tried


@pytest.mark.parametrize("work", WORK)
def test_spoiled_operations_lose_nothing(rank_pool: RankPools, few: Bench, tally: Counter[str], work: str) -> None:
    """A sample of all faults at all operations."""
    place, cells = few
    deaths = [cell for cell in cells if cell.fault is Fault.CRASH and cell.work in SAVES]
    others = [cell for cell in cells if cell not in set(deaths)]
    seeded = random.Random(0)
    sample = seeded.sample(deaths, NUM_DEATHS) + seeded.sample(others, NUM_SAMPLED - NUM_DEATHS)
    tally[work] += _try(rank_pool, place, [cell for cell in sample if cell.work == work])


@pytest.mark.slow
def test_there_are_enough(many: Bench) -> None:
    """The slow run has as many faults as it is said to have."""
    assert len(many[1]) >= NUM_FAULTS


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("work", WORK)
def test_every_spoiled_operation_loses_nothing(
    rank_pool: RankPools, many: Bench, tally: Counter[str], work: str, fault: Fault, part: int
) -> None:
    """All of them."""
    place, cells = many
    mine = [cell for cell in cells if (cell.work, cell.fault) == (work, fault)][part::NUM_PARTS]
    tally[work] += _try(rank_pool, place, mine)

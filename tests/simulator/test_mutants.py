"""Mutants fit the code: what they replace is there."""

import pytest

from tests.simulator.mutants.of_disks import OF_DISKS
from tests.simulator.mutants.of_manager import OF_MANAGER
from tests.simulator.mutants.of_processes import OF_PROCESSES
from tests.simulator.mutants.of_replicas import OF_REPLICAS
from tests.simulator.mutants.of_saves import OF_SAVES
from tests.simulator.mutants.of_serving import OF_SERVING
from tests.simulator.mutants.of_upkeep import OF_UPKEEP
from tests.simulator.mutants.replacing import Mutant

MUTANTS = (*OF_SAVES, *OF_UPKEEP, *OF_MANAGER, *OF_DISKS, *OF_REPLICAS, *OF_SERVING, *OF_PROCESSES)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_applied(mutant: Mutant) -> None:
    """Code that was renamed is noticed at once, not when somebody looks for mutants."""
    with mutant.apply():
        pass


def test_names_are_given_once() -> None:
    """Each mutant has a name of its own."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 25

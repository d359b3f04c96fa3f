"""``python -m tests.simulator.mutants``: within how many schedules each mutant is found.

Printed is the median of several searches that begin at seeds far apart.
"""

import argparse
import os
import statistics
import sys
import time

if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings would have another order in every process
    os.environ |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    os.execv(sys.executable, [sys.executable, "-m", "tests.simulator.mutants", *sys.argv[1:]])

from tests.simulator.mutants.of_disks import OF_DISKS
from tests.simulator.mutants.of_manager import OF_MANAGER
from tests.simulator.mutants.of_processes import OF_PROCESSES
from tests.simulator.mutants.of_replicas import OF_REPLICAS
from tests.simulator.mutants.of_saves import OF_SAVES
from tests.simulator.mutants.of_serving import OF_SERVING
from tests.simulator.mutants.of_upkeep import OF_UPKEEP
from tests.simulator.mutants.replacing import Mutant
from tests.simulator.world import FAMILIES, run, scenario_of, simulation

MUTANTS = (*OF_SAVES, *OF_UPKEEP, *OF_MANAGER, *OF_DISKS, *OF_REPLICAS, *OF_SERVING, *OF_PROCESSES)
MAX_SCHEDULES = 20_000
NUM_SEARCHES = 3


def found_after(mutant: Mutant, first: int, most: int, secs: float) -> tuple[int | None, str]:
    """Within how many schedules it is found, from a seed on, and as what."""
    until = time.monotonic() + secs
    with mutant.apply():
        for number in range(most):
            family = FAMILIES[number % len(FAMILIES)]
            finding = run(scenario_of(first + number, family)).finding
            if finding is not None:
                return number + 1, finding.kind
            if time.monotonic() > until:
                return None, f"not within {number + 1}"
    return None, f"not within {most}"


def main() -> int:
    """Search for each mutant; 1 if one was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="those whose names hold this")
    parser.add_argument("--most", type=int, default=MAX_SCHEDULES, help="schedules a search")
    parser.add_argument("--searches", type=int, default=NUM_SEARCHES)
    parser.add_argument("--secs", type=float, default=float("inf"), help="seconds a search")
    options = parser.parse_args()
    num_missed = 0
    with simulation():
        for mutant in MUTANTS:
            if options.only not in mutant.name:
                continue
            searches = [
                found_after(mutant, 10_000_000 * (search + 1), options.most, options.secs)
                for search in range(options.searches)
            ]
            counts = [options.most if count is None else count for count, _ in searches]
            is_missed = all(count is None for count, _ in searches)
            num_missed += is_missed
            median = "never" if is_missed else f"{statistics.median(counts):.0f}"
            kinds = ", ".join(sorted({kind for _, kind in searches}))
            sys.stdout.write(f"{median:>8}  {mutant.name}  ({kinds})\n")
            sys.stdout.flush()
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())

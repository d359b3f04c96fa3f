"""``python -m tests.simulator.mutants``: within how many schedules each mutant is found.

Printed is the median of several searches that begin at seeds far apart. A search draws schedules of the families in
which the mutated code runs, and only on disks on which it does.
"""

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed

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

_UNMANAGED = tuple(family for family in FAMILIES if family != "managed")
_FAMILIES_OF = {
    OF_SAVES: FAMILIES,
    OF_UPKEEP: ("upkeep", "two jobs", "managed"),
    OF_MANAGER: ("managed",),
    OF_DISKS: _UNMANAGED,
    OF_REPLICAS: _UNMANAGED,
    OF_SERVING: _UNMANAGED,
    OF_PROCESSES: FAMILIES,
}
MUTANTS = tuple(mutant for group in _FAMILIES_OF for mutant in group)
MAX_SCHEDULES = 20_000
NUM_SEARCHES = 3


def found_after(mutant: Mutant, first: int, most: int, secs: float) -> tuple[int | None, str]:
    """Within how many schedules it is found, from a seed on, and as what."""
    until = time.monotonic() + secs
    families = next(families for group, families in _FAMILIES_OF.items() if mutant in group)
    drawn = (scenario_of(seed, families[seed % len(families)]) for seed in itertools.count(first))
    scenarios = (item for item in drawn if mutant.disks is None or (item.disk is not None and mutant.disks(item.disk)))
    with mutant.apply():
        for number, scenario in enumerate(itertools.islice(scenarios, most)):
            finding = run(scenario).finding
            if finding is not None:
                return number + 1, finding.kind
            if time.monotonic() > until:
                return None, f"not within {number + 1}"
    return None, f"not within {most}"


def _result(number: int, options: argparse.Namespace) -> tuple[bool, str]:
    """Search for the mutant of this number; whether it was missed, and a line about it."""
    mutant = MUTANTS[number]
    firsts = [10_000_000 * (search + 1) for search in range(options.searches)]
    searches = [found_after(mutant, first, options.most, options.secs) for first in firsts]
    counts = [options.most if count is None else count for count, _ in searches]
    is_missed = all(count is None for count, _ in searches)
    median = "never" if is_missed else f"{statistics.median(counts):.0f}"
    kinds = ", ".join(sorted({kind for _, kind in searches}))
    return is_missed, f"{median:>8}  {mutant.name}  ({kinds})"


def main() -> int:
    """Search for each mutant; 1 if one was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="those whose names hold this")
    parser.add_argument("--most", type=int, default=MAX_SCHEDULES, help="schedules a search")
    parser.add_argument("--searches", type=int, default=NUM_SEARCHES)
    parser.add_argument("--secs", type=float, default=float("inf"), help="seconds a search")
    parser.add_argument("--processes", type=int, default=1, help="that share the mutants; one for each core")
    options = parser.parse_args()
    chosen = [number for number, mutant in enumerate(MUTANTS) if options.only in mutant.name]
    num_missed = 0
    context = multiprocessing.get_context("fork")  # children have all that is imported and installed
    with simulation(), ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        for future in as_completed([pool.submit(_result, number, options) for number in chosen]):
            is_missed, line = future.result()
            num_missed += is_missed
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())

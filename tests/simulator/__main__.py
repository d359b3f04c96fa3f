"""``python -m tests.simulator``: replay a schedule and print its trace, or look for findings."""

import argparse
import os
import random
import sys
import time

if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings would have another order in every process
    os.environ |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    os.execv(sys.executable, [sys.executable, "-m", "tests.simulator", *sys.argv[1:]])

from tests.simulator.shrinking import report
from tests.simulator.world import FAMILIES, run, scenario_of, simulation


def main() -> int:
    """Do what the command line says; 1 if there was a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one, and print its trace")
    parser.add_argument("--full", action="store_true", help="with --seed: print the whole trace, not shrunk")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "END"), help="run these")
    parser.add_argument("--minutes", type=float, help="run new seeds for so long")
    parser.add_argument("--family", choices=FAMILIES, help="of the scenarios; by default the seed says which")
    options = parser.parse_args()
    with simulation():
        if options.seed is not None:
            return _replay(options.seed, options.family, options.full)
        return _search(options)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _replay(seed: int, family: str | None, is_full: bool) -> int:
    outcome = run(scenario_of(seed, family))
    _say("\n".join(outcome.trace) if is_full or outcome.finding is None else report(outcome, family))
    _say(f"seed {seed}: {outcome.finding or 'all holds'}")
    return int(outcome.finding is not None)


def _search(options: argparse.Namespace) -> int:
    first, end = options.seeds or (random.SystemRandom().randrange(1 << 40), 1 << 62)
    until = time.monotonic() + 60 * (options.minutes if options.minutes is not None else 1e9)
    num_saves = num_findings = 0
    seed = first
    while seed < end and time.monotonic() < until and num_findings < 3:
        outcome = run(scenario_of(seed, options.family))
        num_saves += outcome.num_saves
        if outcome.finding is not None:
            num_findings += 1
            _say(report(outcome, options.family))
        seed += 1
    _say(f"seeds {first} to {seed - 1}: {num_saves} saves, {num_findings} findings")
    return int(num_findings > 0)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m tests.simulator``: replay a schedule and print its trace, or look for findings."""

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings would have another order in every process
    os.environ |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    os.execv(sys.executable, [sys.executable, "-m", "tests.simulator", *sys.argv[1:]])

from tests.simulator.leaks import MIN_SCHEDULES, NUM_WARM_UP, Resources
from tests.simulator.reached import reached
from tests.simulator.shrinking import report
from tests.simulator.world import FAMILIES, run, scenario_of, simulation


def main() -> int:
    """Do what the command line says; 1 if there was a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one, and print its trace")
    parser.add_argument("--full", action="store_true", help="with --seed: print the whole trace, not shrunk")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "END"), help="run these")
    parser.add_argument("--minutes", type=float, help="run new seeds for so long")
    parser.add_argument("--processes", type=int, default=1, help="that share the seeds; one for each core")
    parser.add_argument("--digests", action="store_true", help="print of each schedule a digest of its trace")
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
    num = options.processes
    began = time.monotonic()
    shares = [(options, range(first + number, end, num), until) for number in range(num)]
    if num == 1:
        found = [_share(*shares[0])]
    else:  # children have all that is imported and installed
        with ProcessPoolExecutor(num, mp_context=multiprocessing.get_context("fork")) as pool:
            found = [future.result() for future in [pool.submit(_share, *share) for share in shares]]
    num_schedules, num_saves, num_findings = (
        sum(numbers) for numbers in zip(*[share[:3] for share in found], strict=True)
    )
    per_min = 60 * num_schedules / (time.monotonic() - began)
    _say(f"from seed {first}: {num_schedules} schedules, {per_min:.0f} a minute; {num_saves} saves")
    counts: Counter[str] = Counter()
    for share in found:
        counts.update(share[3])  # a sum would drop what is 0
    num_findings += _num_never_reached(counts, num_schedules)
    _say(f"{num_findings} findings")
    return int(num_findings > 0)


def _num_never_reached(counts: Counter[str], num_schedules: int) -> int:
    """Say in how many schedules of a family each thing has happened; what never has is a finding."""
    if counts:
        _say("schedules with: " + ", ".join(f"{phrase.strip(' =*:')!r} {count}" for phrase, count in counts.items()))
    never = [phrase for phrase, count in counts.items() if not count and num_schedules >= MIN_SCHEDULES]
    for phrase in never:
        _say(f"no schedule had {phrase!r}: nothing is checked about it")
    return len(never)


def _share(options: argparse.Namespace, seeds: Sequence[int], until: float) -> tuple[int, int, int, Counter[str]]:
    """Run these seeds until the time is over or there are three findings.

    Returns:
        Numbers of schedules, saves and findings; and what was reached, if only one family runs.
    """
    num_schedules = num_saves = num_findings = 0
    counts: Counter[str] = Counter()
    before: Resources | None = None
    for seed in seeds:
        if time.monotonic() > until or num_findings == 3:
            break
        outcome = run(scenario_of(seed, options.family))
        if options.digests:
            _say(f"seed {seed}: {outcome.digest:08x} of {len(outcome.trace)} lines")
        num_schedules += 1
        if num_schedules == NUM_WARM_UP:
            before = Resources.now()
        num_saves += outcome.num_saves
        if options.family is not None:
            counts.update(reached(outcome.trace, options.family))
        if outcome.finding is not None:
            num_findings += 1
            _say(report(outcome, options.family))
    if before is not None and num_schedules >= MIN_SCHEDULES and not num_findings:
        after = Resources.now(before.num_threads)
        _say(f"after {NUM_WARM_UP} schedules: {before}; after {num_schedules}: {after}")
        if grown := after.grown(before):
            num_findings += 1
            _say(f"schedules leave something: {'; '.join(grown)}")
    return num_schedules, num_saves, num_findings, counts


if __name__ == "__main__":
    sys.exit(main())

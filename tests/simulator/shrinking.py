"""Shrinking: of a schedule with a finding, one that still has it, with fewer steps and fewer odd decisions."""

from collections.abc import Callable, Sequence

from tests.simulator.world import Outcome, Scenario, run, without

MAX_RUNS = 400
PAGE_LINES = 60


def shrunk(outcome: Outcome) -> Outcome:
    """The smallest outcome with a finding of the same kind that was found in so many runs."""
    assert outcome.finding is not None
    kind, best, num_runs = outcome.finding.kind, outcome, 0
    dropped: set[int] = set()
    undone: set[int] = set()

    def still(more_dropped: set[int], more_undone: set[int]) -> bool:
        nonlocal best, num_runs
        num_runs += 1
        found = run(without(outcome.scenario, dropped | more_dropped), undone | more_undone)
        if found.finding is None or found.finding.kind != kind:
            return False
        best = found
        dropped.update(more_dropped)
        undone.update(more_undone)
        return True

    def left() -> bool:
        return num_runs < MAX_RUNS

    _halve(_steps(outcome.scenario), lambda some: still(set(some), set()), left)
    size = -1
    while size != len(best.taken) and left():
        size = len(best.taken)
        _halve(sorted(best.taken, reverse=True), lambda some: still(set(), set(some)), left)
    return best


def _steps(scenario: Scenario) -> list[int]:
    return [step.number for job in scenario.jobs for steps in job.steps for step in steps][::-1]


def _halve(items: Sequence[int], can_go: Callable[[Sequence[int]], bool], left: Callable[[], bool]) -> None:
    """Take away what can go: all, else each half by itself."""
    if not items or not left() or can_go(items) or len(items) == 1:
        return
    middle = len(items) // 2
    _halve(items[:middle], can_go, left)
    _halve(items[middle:], can_go, left)


def report(outcome: Outcome, family: str | None = None) -> str:
    """The finding, how to replay it, and a page of its shrunk trace."""
    small = shrunk(outcome)
    seed = outcome.scenario.seed
    odd = [what for what in small.taken.values() if what not in ("switch", "turn")]
    option = "" if family is None else f" --family '{family}'"
    lines = [
        f"seed {seed}: {small.finding}",
        f"replay: python -m tests.simulator --seed {seed}{option}",
        f"jobs: {'; '.join(_told(small.scenario))}",
        f"{len(small.taken) - len(odd)} switches, faults: {', '.join(odd) or 'none'}",
        *small.trace[-PAGE_LINES:],
    ]
    return "\n".join(lines)


def _told(scenario: Scenario) -> list[str]:
    return [
        f"{job.name}, {job.world_size} ranks, {job.policy}: "
        + " | ".join(", ".join(f"{step.kind} #{step.number}" for step in steps) for steps in job.steps)
        for job in scenario.jobs
    ]

"""Preemption: the time from a scheduler's signal until a checkpoint is committed, beside a full save of plain DCP."""

from pathlib import Path

from benchmarks.support.processes import results_of_job
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table, number, quartiles
from benchmarks.support.rounds import Setup

NUM_RANKS, NUM_ROWS, DIM = 4, 1_000_000, 64  # a table per rank, 1 GB in all
NUM_ROUNDS = 9
STEP_SECS = 0.1
SHARES = (0.01, 0.26)
MAX_SECS, MIN_RATIO = 1.0, 10.0
LIMIT_SECS = 900.0

_Round = tuple[float, float, int]  # seconds from the signal to the commit, seconds of the save alone, and bytes


def run(setup: Setup) -> Report:
    """Stop a job on four ranks by SIGTERM to one of them, in turns with our manager and with plain DCP."""
    num_ranks, num_rows, num_rounds = (2, 1000, 1) if setup.quick else (NUM_RANKS, NUM_ROWS, NUM_ROUNDS)
    setup.say(f"{num_rounds} rounds on {num_ranks} ranks")
    results = _results(setup.folder / "run", num_ranks, num_rows, num_rounds)
    plain = [secs for secs, _, _ in results["plain"]]
    figures, rows = [], []
    for name, label in {**{f"{share:g}": f"{share:.0%} of the rows modified" for share in SHARES}, "plain": ""}.items():
        secs = [secs for secs, _, _ in results[name]]
        alone = [secs for _, secs, _ in results[name]]
        way = f"delta, {label}" if label else "plain DCP, full"
        low, median, high = quartiles(secs)
        num_mb = results[name][0][2] / 1e6
        times = f"{median:.2f}", f"{low:.2f} to {high:.2f}", f"{max(secs):.2f}", f"{quartiles(alone)[1]:.3f}"
        rows.append((way, *times, f"{num_mb:,.1f}"))
        if not label:
            continue
        is_small = name == f"{SHARES[0]:g}"
        ratios = [full / ours for full, ours in zip(plain, secs, strict=True)]
        figures += [
            Figure.over_rounds(f"signal to commit, {label}", secs, "s", at_most=MAX_SECS if is_small else None),
            Figure.over_rounds(
                f"the same with plain DCP, of it, {label}", ratios, "×", at_least=MIN_RATIO if is_small else None
            ),
        ]
    return Report(
        title=f"SIGTERM to one of {num_ranks} ranks, {num_ranks} tables of {num_rows:,} × {DIM}, steps of "
        f"{number(1000 * STEP_SECS)} ms",
        notes=(
            f"{num_rounds} rounds in turns. The signal comes in the middle of a step. All ranks agree on it at the end",
            "of the step, with Preemption(overlap=False), and as plain DCP is made to. Files are synced.",
        ),
        figures=tuple(figures),
        tables=(Table(("checkpoint", "median s", "quartiles", "longest s", "save alone s", "MB"), tuple(rows)),),
    )


def _results(root: Path, num_ranks: int, num_rows: int, num_rounds: int) -> dict[str, list[_Round]]:
    """Run the job, and return each round, by share or ``plain``."""
    job = [f"--root={root}", f"--rows={num_rows}", f"--dim={DIM}", f"--step-secs={STEP_SECS}", f"--rounds={num_rounds}"]
    shares = ["--shares", *map(str, SHARES)]
    results: dict[str, list[_Round]] = results_of_job("preempted_job", num_ranks, [*job, *shares], LIMIT_SECS)
    return results


BENCHMARK = Benchmark(
    run, "time from a scheduler's signal to the commit, on 4 ranks, beside plain DCP's full save", is_long=True
)

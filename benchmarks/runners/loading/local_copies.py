"""Restores on several ranks from a slow store, of which one, none or all ranks have local copies."""

from pathlib import Path

from benchmarks.support.jobs.restoring_job import LOST, NUM_DELTAS, SHARE, WAYS
from benchmarks.support.processes import results_of_job
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table, quartiles
from benchmarks.support.rounds import Setup

NUM_RANKS, NUM_ROWS, DIM = 4, 6_000_000, 64
NUM_ROUNDS = 5
LATENCY_SECS, BYTES_PER_SEC = 0.05, 100e6
MAX_SHARE, MIN_RATIO = 1.05, 3.0
LIMIT_SECS = 900.0

_Round = tuple[float, list[int], list[int]]  # seconds, and of each rank the bytes read from the store, and requests


def run(setup: Setup) -> Report:
    """Restore on four ranks, each with copies as on a host of its own, after one of them has lost its copies."""
    num_ranks, num_rows, num_rounds = (2, 1000, 1) if setup.quick else (NUM_RANKS, NUM_ROWS, NUM_ROUNDS)
    setup.say(f"{num_rounds} rounds on {num_ranks} ranks")
    results = _results(setup.folder, num_ranks, num_rows, num_rounds)
    plain, lost = results[WAYS[0]], results[WAYS[1]]
    shares = [sum(own[1]) / all_ranks[1][LOST] for own, all_ranks in zip(lost, plain, strict=True)]
    ratios = [all_ranks[0] / own[0] for own, all_ranks in zip(lost, plain, strict=True)]
    figures = (
        Figure.over_rounds(
            "one rank lost its copies: bytes that all ranks read from the store, of that rank's share",
            shares,
            "×",
            at_most=MAX_SHARE,
        ),
        Figure.over_rounds("time of a restore from the store, of that one", ratios, "×", at_least=MIN_RATIO),
    )
    rows = []
    for way in WAYS:
        low, median, high = quartiles([secs for secs, _, _ in results[way]])
        _, num_bytes, num_requests = results[way][-1]
        megabytes = " ".join(f"{count / 1e6:,.1f}" for count in num_bytes)
        rows.append((way, f"{median:.2f}", f"{low:.2f} to {high:.2f}", megabytes, " ".join(map(str, num_requests))))
    return Report(
        title=f"restores of a baseline and {NUM_DELTAS} deltas of {SHARE:.0%} on {num_ranks} ranks, a table of "
        f"{num_rows:,} × {DIM} with 8 bits on each",
        notes=(
            f"{num_rounds} rounds in turns. A request to the store takes {1000 * LATENCY_SECS:.0f} ms, and all ranks",
            f"together read {BYTES_PER_SEC / 1e6:.0f} MB/s. Each rank has a folder of copies of its own.",
        ),
        figures=figures,
        tables=(
            Table(("rows are read", "median s", "quartiles", "MB from the store, by rank", "requests"), tuple(rows)),
        ),
    )


def _results(folder: Path, num_ranks: int, num_rows: int, num_rounds: int) -> dict[str, list[_Round]]:
    job = [f"--folder={folder}", f"--rows={num_rows}", f"--dim={DIM}", f"--rounds={num_rounds}"]
    limits = [f"--latency-secs={LATENCY_SECS}", f"--bytes-per-sec={BYTES_PER_SEC}"]
    (folder / "store").mkdir()
    results: dict[str, list[_Round]] = results_of_job("restoring_job", num_ranks, [*job, *limits], LIMIT_SECS)
    return results


BENCHMARK = Benchmark(
    run, "restores on 4 ranks from a slow store, after one of them has lost its local copies", is_long=True
)

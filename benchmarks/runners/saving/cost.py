"""The cost of a delta: whether its time and bytes are proportional to the number of modified rows."""

import os
from collections.abc import Mapping
from pathlib import Path

import torchrec_cnr as cnr
from benchmarks.support.jobs.table_models import TableModel, TableSizes, num_bytes, one_rank
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table, quartiles
from benchmarks.support.rounds import Candidate, Setup, Timings, interleave, ratios, round_name

SHARES = {"0 %": 0.0, "0.1 %": 0.001, "1 %": 0.01, "10 %": 0.1, "26 %": 0.26, "100 %": 1.0}
BASELINE = "baseline"
SCHEME = cnr.AdaptiveAsymmetric(4)
FULL, QUICK = TableSizes(2, 2_000_000, 64), TableSizes(2, 2_000, 64)
NUM_ROUNDS, NUM_QUICK_ROUNDS = 5, 1


def run(setup: Setup) -> Report:
    """Save deltas of more and more rows, and a baseline, alternately."""
    sizes = QUICK if setup.quick else FULL
    num_rounds = NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS
    with one_rank(setup.folder):
        setup.say(f"making {sizes}")
        candidates = _candidates(TableModel(sizes), setup.folder / "saves")
        timings = interleave(
            candidates, num_rounds, lambda number: setup.say(f"saving: {round_name(number, num_rounds)}")
        )
    bytes_of = {name: num_bytes(setup.folder / "saves" / f"{name}-{num_rounds}") for name in candidates}
    percent_of_time = [100 * value for value in ratios(timings, "1 %", BASELINE)]
    percent_of_bytes = 100 * bytes_of["1 %"] / bytes_of[BASELINE]
    return Report(
        title=f"cost of a 4-bit delta of {sizes}, by the share of rows modified",
        notes=(
            f"{num_rounds} rounds after a warm-up, all in turns; rows were modified by training. Every save forces its",
            "files to disk, and that costs something however little there is to write.",
        ),
        figures=(
            Figure("bytes of a delta of 1 % of the rows, of a baseline's", percent_of_bytes, "%"),
            Figure.over_rounds("time of a delta of 1 % of the rows, of a baseline's", percent_of_time, "%"),
        ),
        tables=(_table(timings, bytes_of),),
    )


def _candidates(model: TableModel, folder: Path) -> Mapping[str, Candidate]:
    """Return a chain that grows by a delta of each share per round, and separate baselines, as candidates."""
    lineage = cnr.CNRSavePlanner(cnr.RowTracker(model.sharded), policy=cnr.Consecutive())
    model.save(cnr.CNRStorageWriter(folder / "first", quantization=SCHEME), lineage)

    def candidate(name: str, share: float, planner: cnr.CNRSavePlanner) -> Candidate:
        def before(number: int) -> None:
            model.modify(share)
            os.sync()

        return Candidate(
            before=before,
            run=lambda number: model.save(
                cnr.CNRStorageWriter(folder / f"{name}-{number}", quantization=SCHEME), planner
            ),
        )

    deltas = {name: candidate(name, share, lineage) for name, share in SHARES.items()}
    return deltas | {BASELINE: candidate(BASELINE, 0, cnr.CNRSavePlanner())}


def _table(timings: Timings, bytes_of: Mapping[str, int]) -> Table:
    rows = []
    for name, taken in timings.items():
        low, median, high = (1e3 * value for value in quartiles([took.secs for took in taken]))
        time_share = quartiles(ratios(timings, name, BASELINE))[1]
        byte_share = bytes_of[name] / bytes_of[BASELINE]
        times = (f"{median:,.1f}", f"{low:,.1f} to {high:,.1f}", f"{time_share:.2%}")
        rows.append((name, *times, f"{bytes_of[name]:,}", f"{byte_share:.3%}"))
    columns = ("modified", "median ms", "quartiles", "of a baseline", "bytes", "of a baseline")
    return Table(columns, tuple(rows))


BENCHMARK = Benchmark(run, "time and bytes of a delta, by the share of rows modified")

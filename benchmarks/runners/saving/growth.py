"""Asynchronous saves of larger tables: whether the stall depends on the modified rows, or on all rows."""

from benchmarks.support.jobs.async_saves import FULL, QUICK, SCHEMES, SHARE, Lineage, time_saves
from benchmarks.support.jobs.table_models import TableModel, TableSizes, one_rank
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report
from benchmarks.support.rounds import Setup, ratios, times_table

TIMES_LARGER = 8
NUM_ROUNDS, NUM_QUICK_ROUNDS = 21, 1  # many rounds, because only tens of milliseconds are compared
MAX_GROWTH = 1.2


def run(setup: Setup) -> Report:
    """Compare the stalls for tables of two sizes, with the same number of modified rows."""
    sizes = QUICK if setup.quick else FULL
    larger = TableSizes(sizes.num_tables, TIMES_LARGER * sizes.num_rows, sizes.dim)
    num_rounds = NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS
    shares = {f"{sizes.num_rows:,} rows": (sizes, SHARE), f"{larger.num_rows:,} rows": (larger, SHARE / TIMES_LARGER)}
    saves = {}
    with one_rank(setup.folder):
        for name, (size, share) in shares.items():
            setup.say(f"making {size}, and saving its baseline")
            saves[name] = Lineage(TableModel(size), setup.folder / name, SCHEMES["4 bits"], share)
        stalls = time_saves(saves, setup, num_rounds, waits=False)
    small, large = saves
    what = f"stall with {TIMES_LARGER} × the rows, as many modified, of that without"
    return Report(
        title=f"the stall of asynchronous saves as tables grow: {sizes}, {100 * SHARE:g} % of the rows modified",
        notes=(
            f"{num_rounds} rounds after a warm-up, in turns; each time, random rows were marked as modified, in the",
            f"tables with {TIMES_LARGER} times the rows as many. Rows are stored in 4 bits. A stall is the time until",
            "dcp.async_save returns.",
        ),
        figures=(Figure.over_rounds(what, ratios(stalls, large, small), "×", at_most=MAX_GROWTH),),
        tables=(times_table("stall", stalls),),
    )


BENCHMARK = Benchmark(run, "stall of an asynchronous save with 8 times as many rows, if the same number is modified")

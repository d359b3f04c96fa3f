"""An hour of training with a save every second: throughput, and what grows with the number of checkpoints."""

from pathlib import Path

from benchmarks.support.jobs.frequent_saves import KEPT, Block
from benchmarks.support.processes import results_of_job
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Setup

NUM_RANKS, NUM_ROWS, NUM_QUICK_ROWS = 2, 100_000, 1_000
NUM_BLOCKS, SECS_WITHOUT, SECS = 10, 30.0, 330.0
MIN_RATE, MAX_CAPACITY = 0.95, 1.8
LIMIT_SECS = 5400.0


def run(setup: Setup) -> Report:
    """Train the example on two ranks, in blocks without saves and with a save every second."""
    size = (NUM_QUICK_ROWS, 1, 1.0, 3.0) if setup.quick else (NUM_ROWS, NUM_BLOCKS, SECS_WITHOUT, SECS)
    setup.say(f"{size[1]} blocks of {size[2]:.0f} s without saves and {size[3]:.0f} s with them")
    blocks, full_bytes = _results(setup.folder, *size)
    first, last = blocks[0], blocks[-1]
    num_saves = sum(block.num_saves for block in blocks)
    written = sum(block.written_bytes for block in blocks)
    figures = (
        Figure.over_rounds(
            "steps a second with a save every second, of those without",
            [block.rate / block.rate_without for block in blocks],
            "×",
            at_least=MIN_RATE,
        ),
        Figure.over_rounds("saves a second", [block.num_saves / size[3] for block in blocks], "/s"),
        Figure.over_rounds("median time of a save, last block, of the first", [last.save_secs / first.save_secs], "×"),
        Figure.over_rounds("time of latest, last block, of the first", [last.latest_secs / first.latest_secs], "×"),
        Figure.over_rounds("time of cnr ls, last block, of the first", [last.list_secs / first.list_secs], "×"),
        Figure.over_rounds("memory, last block, of the first", [last.memory_mib / first.memory_mib], "×"),
        Figure.over_rounds("bytes of a save, of a full checkpoint", [written / num_saves / full_bytes], "×"),
        Figure.over_rounds(
            "bytes of the root, of a full checkpoint",
            [block.root_bytes / full_bytes for block in blocks],
            "×",
            at_most=MAX_CAPACITY,
        ),
    )
    return Report(
        title=f"examples/train_dlrm.py's model on {NUM_RANKS} ranks, {num_saves:,} saves in the background with 4 bits",
        notes=(
            f"CheckpointManager(every_secs=1, keep=Keep(last={KEPT})), which compacts and prunes.",
            "Ranks, saves, and the making of clicks share the cores of this machine.",
        ),
        figures=figures,
        tables=(
            Table(
                ("block", "steps/s without", "with", "saves", "save ms", "stall ms", "latest ms", "ls ms", "MiB", "MB"),
                tuple(_row(number, block) for number, block in enumerate(blocks, 1)),
            ),
        ),
    )


def _row(number: int, block: Block) -> tuple[str, ...]:
    milliseconds = (1e3 * secs for secs in (block.save_secs, block.stall_secs, block.latest_secs, block.list_secs))
    return (
        str(number),
        f"{block.rate_without:.1f}",
        f"{block.rate:.1f}",
        str(block.num_saves),
        *(f"{each:.0f}" for each in milliseconds),
        f"{block.memory_mib:,.0f}",
        f"{block.root_bytes / 1e6:,.1f}",
    )


def _results(folder: Path, num_rows: int, num_blocks: int, secs_without: float, secs: float) -> tuple[list[Block], int]:
    """Run the job, and return its blocks, and the bytes of a full checkpoint with 4 bits."""
    job = [f"--root={folder / 'run'}", f"--rows={num_rows}", f"--blocks={num_blocks}"]
    times = [f"--secs-without={secs_without}", f"--secs={secs}"]
    results = results_of_job("frequent_saves", NUM_RANKS, [*job, *times], LIMIT_SECS)
    return [Block(**block) for block in results["blocks"]], results["full_bytes"]


BENCHMARK = Benchmark(run, "an hour of training with a save every second, on 2 ranks of the example", is_long=True)

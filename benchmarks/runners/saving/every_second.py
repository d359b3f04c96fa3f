"""An hour of training with a local checkpoint every second: throughput, and what grows with their number."""

from pathlib import Path

from benchmarks.support.jobs.frequent_saves import DURABLE_SECS, Block, Sizes
from benchmarks.support.processes import results_of_job
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Setup

NUM_RANKS, NUM_ROWS, NUM_QUICK_ROWS = 2, 100_000, 1_000
NUM_BLOCKS, SECS_WITHOUT, SECS = 10, 30.0, 330.0
MIN_RATE, MAX_CAPACITY, MAX_RESTORED = 0.95, 1.8, 1.3
LIMIT_SECS = 5400.0
COLUMNS = (
    "block", "steps/s", "with saves", "local", "durable", "save ms", "stall ms", "latest ms", "ls ms", "MiB",
    "local MB", "durable MB",
)  # fmt: skip


def run(setup: Setup) -> Report:
    """Train the example on two ranks, in blocks without saves and with a local checkpoint every second."""
    size = (NUM_QUICK_ROWS, 1, 1.0, 3.0) if setup.quick else (NUM_ROWS, NUM_BLOCKS, SECS_WITHOUT, SECS)
    setup.say(f"{size[1]} blocks of {size[2]:.0f} s without saves and {size[3]:.0f} s with them")
    blocks, sizes = _results(setup.folder, *size)
    first, last = blocks[0], blocks[-1]
    num_saves, num_durable = (sum(each) for each in zip(*((b.num_saves, b.num_durable) for b in blocks), strict=True))
    rows, durable_rows = (sum(each) for each in zip(*((b.num_rows, b.num_durable_rows) for b in blocks), strict=True))
    figures = (
        Figure.over_rounds(
            "steps a second with saves, of those without",
            [block.rate / block.rate_without for block in blocks],
            "×",
            at_least=MIN_RATE,
        ),
        Figure.over_rounds("local saves a second", [block.num_saves / size[3] for block in blocks], "/s"),
        Figure("median time of a local save, last block, of the first", last.save_secs / first.save_secs, "×"),
        Figure("time of latest, last block, of the first", last.latest_secs / first.latest_secs, "×"),
        Figure("time of cnr ls, last block, of the first", last.list_secs / first.list_secs, "×"),
        Figure("memory, last block, of the first", last.memory_mib / first.memory_mib, "×"),
        Figure("rows of durable deltas, of those of local ones", durable_rows / rows, "×"),
        Figure.over_rounds(
            "bytes of the durable root, of a full checkpoint",
            [block.durable_bytes / sizes.full for block in blocks],
            "×",
            at_most=MAX_CAPACITY,
        ),
        Figure.over_rounds(
            "bytes of the local root, of a full exact checkpoint",
            [block.local_bytes / sizes.full_exact for block in blocks],
            "×",
        ),
        Figure(
            "bytes that a durable restore reads, of a full checkpoint",
            sizes.restored / sizes.full,
            "×",
            at_most=MAX_RESTORED,
        ),
    )
    return Report(
        title=f"examples/train_dlrm.py on {NUM_RANKS} ranks, {num_saves:,} local and {num_durable} durable saves",
        notes=(
            f"CheckpointManager(every_secs={DURABLE_SECS:.0f}, quantization=AdaptiveAsymmetric(4), local_checkpoints=",
            "LocalCheckpoints(every_secs=1)), saves in the background. Local checkpoints are exact. The last two of",
            "them are kept, and the last durable one. Both roots are compacted and pruned. Ranks, saves and the making",
            "of clicks share the cores of this machine.",
        ),
        figures=figures,
        tables=(Table(COLUMNS, tuple(_row(number, block) for number, block in enumerate(blocks, 1))),),
    )


def _row(number: int, block: Block) -> tuple[str, ...]:
    milliseconds = (1e3 * secs for secs in (block.save_secs, block.stall_secs, block.latest_secs, block.list_secs))
    return (
        str(number),
        f"{block.rate_without:.1f}",
        f"{block.rate:.1f}",
        str(block.num_saves),
        str(block.num_durable),
        *(f"{each:.0f}" for each in milliseconds),
        f"{block.memory_mib:,.0f}",
        f"{block.local_bytes / 1e6:,.1f}",
        f"{block.durable_bytes / 1e6:,.1f}",
    )


def _results(
    folder: Path, num_rows: int, num_blocks: int, secs_without: float, secs: float
) -> tuple[list[Block], Sizes]:
    """Run the job, and return its blocks, and the sizes of its state."""
    job = [f"--root={folder / 'run'}", f"--rows={num_rows}", f"--blocks={num_blocks}"]
    times = [f"--secs-without={secs_without}", f"--secs={secs}"]
    results = results_of_job("frequent_saves", NUM_RANKS, [*job, *times], LIMIT_SECS)
    return [Block(**block) for block in results["blocks"]], Sizes(**results["sizes"])


BENCHMARK = Benchmark(run, "an hour of training with a local checkpoint every second, on 2 ranks", is_long=True)

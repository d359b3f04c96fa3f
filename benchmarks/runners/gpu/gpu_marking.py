"""The time that tracking adds to a training step on a CUDA device."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import torchrec_cnr as cnr
from benchmarks.support.devices import benchmark_device, device_name, nothing_timed, wait_for
from benchmarks.support.jobs.table_models import TableModel, TableSizes, one_rank
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report
from benchmarks.support.rounds import Candidate, Setup, interleave, ratios, times_table

FULL, QUICK = TableSizes(26, 100_000, 64), TableSizes(26, 100, 64)
IDS_PER_TABLE, QUICK_IDS_PER_TABLE = 4096, 8
WIDTHS = (1024, 1024, 512, 256, 1)  # of the dense layers, as in DLRM's over-arch
NUM_BATCHES = 16
STEPS_PER_ROUND, QUICK_STEPS_PER_ROUND = 100, 2
NUM_ROUNDS, NUM_QUICK_ROUNDS = 11, 1
MAX_RATIO = 1.01
TABLES, DENSE = "tables alone", "tables and dense layers"

Loss = Callable[[Tensor], Tensor]


def run(setup: Setup) -> Report:
    """Time the same steps on a tracked and on an untracked model, with and without dense layers."""
    device = benchmark_device(setup)
    if device is None:
        return nothing_timed(setup)
    sizes = QUICK if setup.quick else FULL
    num_steps = QUICK_STEPS_PER_ROUND if setup.quick else STEPS_PER_ROUND
    num_rounds = NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS
    num_ids = QUICK_IDS_PER_TABLE if setup.quick else IDS_PER_TABLE
    figures, tables = [], []
    with one_rank(setup.folder, device):
        for what, loss in ((TABLES, torch.sum), (DENSE, _dense(sizes, device))):
            setup.say(f"training {sizes}: {what}")
            candidates = {
                name: _candidate(TableModel(sizes, device=device), name == "tracked", num_ids, num_steps, loss)
                for name in ("untracked", "tracked")
            }
            rounds = interleave(candidates, num_rounds)
            figures.append(
                Figure.over_rounds(
                    f"step of {what} with the tracker, of the untracked",
                    ratios(rounds, "tracked", "untracked"),
                    "×",
                    at_most=MAX_RATIO,
                )
            )
            tables.append(times_table(f"step of {what}", rounds, num_steps))
    return Report(
        title=f"a training step on {device_name(device)}, {num_ids} ids of each of {sizes}",
        notes=(
            f"{num_rounds} rounds of {num_steps} steps after a warm-up, until the device is done; a ratio is that of",
            "times within a round. A step is forward and backward with the optimizer of the tables in it; the dense",
            f"layers are {' × '.join(map(str, WIDTHS))} in fp32, without a step of their own.",
        ),
        figures=tuple(figures),
        tables=tuple(tables),
    )


def _dense(sizes: TableSizes, device: torch.device) -> Loss:
    layers: list[nn.Module] = []
    width = sizes.num_tables * sizes.dim
    for next_width in WIDTHS:
        layers += [nn.Linear(width, next_width, device=device), nn.ReLU()]
        width = next_width
    dense = nn.Sequential(*layers[:-1])
    return lambda pooled: dense(pooled).sum()


def _candidate(model: TableModel, is_tracked: bool, num_ids: int, num_steps: int, loss: Loss) -> Candidate:
    if is_tracked:
        tracker = cnr.RowTracker(model.sharded)
    sizes, device = model.sizes, model.device
    generator = torch.Generator().manual_seed(0)
    batches = [
        model.batch(list(torch.randint(sizes.num_rows, (sizes.num_tables, num_ids), generator=generator).to(device)))
        for _ in range(NUM_BATCHES)
    ]

    def train(_: int) -> None:
        for step in range(num_steps):
            loss(model.sharded(batches[step % NUM_BATCHES]).wait().values()).backward()
        wait_for(device)
        if is_tracked and tracker.num_modified == 0:
            raise RuntimeError("expected the tracker to have marked rows")

    return Candidate(train)


BENCHMARK = Benchmark(run, "time that tracking adds to a training step on a CUDA device")

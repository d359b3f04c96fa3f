"""Loads into the memory of a CUDA device, and updates of a model that is served from it."""

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import torchrec_cnr as cnr
from benchmarks.support.devices import benchmark_device, device_name, nothing_timed, wait_for
from benchmarks.support.jobs.async_saves import SCHEMES
from benchmarks.support.jobs.table_models import TableModel, TableSizes, one_rank
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table, quartiles
from benchmarks.support.rounds import Candidate, Setup, interleave, ratios, round_name, times_table

FULL, QUICK = TableSizes(2, 4_000_000, 64), TableSizes(2, 2_000, 64)
NUM_ROUNDS, NUM_QUICK_ROUNDS = 3, 1
NUM_UPDATES, NUM_QUICK_UPDATES = 5, 2
UPDATED = 0.05  # share of rows in each delta that the served model applies
PLAIN_DCP = "plain DCP"
SAMPLED_EVERY = 997


def run(setup: Setup) -> Report:
    """Load the same tables from checkpoints of each scheme and from DCP's own; then apply deltas to a served model."""
    device = benchmark_device(setup)
    if device is None:
        return nothing_timed(setup)
    sizes = QUICK if setup.quick else FULL
    num_rounds = NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS
    with one_rank(setup.folder, device):
        setup.say(f"making {sizes} on {device_name(device)}")
        model = TableModel(sizes, device=device)
        candidates = {name: _ours(model, setup, name, scheme) for name, scheme in SCHEMES.items()}
        candidates[PLAIN_DCP] = _plain(model, setup)
        loads = interleave(candidates, num_rounds, lambda number: setup.say(round_name(number, num_rounds)))
        updates = _updates(model, setup)
    num_rows = sizes.num_tables * sizes.num_rows
    return Report(
        title=f"loads of {sizes} into {device_name(device)}",
        notes=(
            f"{num_rounds} rounds after a warm-up, in turns, from files in the page cache, into the live tables and",
            "their optimizer state; after each load, sampled rows are compared with those that were saved. The served",
            f"model holds the same tables, and applies deltas of {UPDATED:.0%} of their rows, 4 bits adaptive.",
        ),
        figures=(
            *(
                Figure.over_rounds(f"load, {name}", [num_rows / took.secs / 1e6 for took in loads[name]], "M rows/s")
                for name in loads
            ),
            *(
                Figure.over_rounds(f"load, {name}, time of plain DCP", ratios(loads, name, PLAIN_DCP), "×")
                for name in SCHEMES
            ),
            Figure.over_rounds("served model: lookups held off by an update", [s[1] for s in updates], "ms"),
            Figure.over_rounds("served model: update of rows", [s[0] for s in updates], "M rows/s"),
        ),
        tables=(times_table("load", loads), _updates_table(updates)),
    )


def _ours(model: TableModel, setup: Setup, name: str, scheme: cnr.Scheme) -> Candidate:
    path = setup.folder / name
    setup.say(f"saving {name}")
    model.save(cnr.CNRStorageWriter(path, quantization=scheme, sync_files=False))
    saved = [cnr.load_table(path, fqn)[::SAMPLED_EVERY].to(model.device) for fqn in _fqns(model)]

    def load(_: int) -> None:
        model.load(cnr.CNRStorageReader(path))
        wait_for(model.device)

    return Candidate(load, lambda _: model.clear(), lambda _: _check(name, model, saved))


def _fqns(model: TableModel) -> list[str]:
    return [f"model.{fqn}" for fqn in model.sharded.state_dict()]


def _plain(model: TableModel, setup: Setup) -> Candidate:
    path = setup.folder / "plain-dcp"
    state = {f"t{index}": table for index, table in enumerate(model.tables())} | model.optimizer_tensors()
    dcp.save(state, storage_writer=FileSystemWriter(path, sync_files=False))  # type: ignore[attr-defined]
    saved = [table[::SAMPLED_EVERY].clone() for table in model.tables()]

    def load(_: int) -> None:
        dcp.load(state, storage_reader=FileSystemReader(path))  # type: ignore[attr-defined]
        wait_for(model.device)

    return Candidate(load, lambda _: model.clear(), lambda _: _check(PLAIN_DCP, model, saved))


def _check(name: str, model: TableModel, saved: list[Tensor]) -> None:
    for number, (table, expected) in enumerate(zip(model.tables(), saved, strict=True)):
        if not torch.equal(table[::SAMPLED_EVERY], expected):
            raise RuntimeError(f"{name}: table {number} differs from the saved one after a load")


def _updates(model: TableModel, setup: Setup) -> list[tuple[float, float]]:
    """Return for each delta the rate of its update in millions of rows per second, and how long lookups waited, ms."""
    root = setup.folder / "served"
    tracker = cnr.RowTracker(model.sharded)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    writer = cnr.CNRStorageWriter(root, quantization=SCHEMES["4 bits adaptive"], sync_files=False)
    served = TableModel(model.sizes, seed=1, device=model.device)
    num_rows = round(UPDATED * model.sizes.num_rows)
    applied: list[cnr.Applied] = []
    num_updates = NUM_QUICK_UPDATES if setup.quick else NUM_UPDATES
    subscriber = cnr.RowSubscriber(served.sharded, root, on_applied=applied.append)
    for number in range(num_updates + 2):
        setup.say(f"update {number} of {num_updates + 1} of the served model")
        for index, table in enumerate(model.tables()):
            rows = torch.randperm(model.sizes.num_rows, device=model.device)[:num_rows]
            table[rows] = torch.randn(num_rows, model.sizes.dim, device=model.device) * 0.05
            tracker.mark(f"t{index}", rows)
        dcp.save(  # type: ignore[attr-defined]
            model.state(), checkpoint_id=root / str(number), storage_writer=writer, planner=planner
        )
        subscriber.update()
    for name, table, expected in zip(_fqns(model), served.tables(), model.tables(), strict=True):
        if not torch.equal(table, cnr.load_table(root / str(num_updates + 1), name).to(model.device)):
            raise RuntimeError(f"{name}: the served table differs from the last checkpoint")
        if torch.equal(table, expected):
            raise RuntimeError(f"{name}: expected the rows of a quantized table to differ from the exact ones")
    subscriber.close()
    deltas = [update for update in applied if update.kind == "delta"][1:]
    rows_of_a_delta = model.sizes.num_tables * num_rows
    return [
        (rows_of_a_delta / (update.read_secs + update.apply_secs) / 1e6, 1e3 * update.apply_secs) for update in deltas
    ]


def _updates_table(updates: list[tuple[float, float]]) -> Table:
    low, median, high = quartiles([milliseconds for _, milliseconds in updates])
    return Table(("update", "median ms", "quartiles"), (("held off", f"{median:,.1f}", f"{low:,.1f} to {high:,.1f}"),))


BENCHMARK = Benchmark(
    run, "loads into a CUDA device by rows a second, and updates of a model served there", is_long=True
)

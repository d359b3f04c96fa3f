"""The peak memory of a save beyond the state that it saves, and whether this grows with the tables."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import torchrec_cnr as cnr
from benchmarks.support.jobs.table_models import TableModel, TableSizes, one_rank
from benchmarks.support.process_memory import peak_mib
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report
from benchmarks.support.rounds import Setup
from torchrec_cnr.quantization import Scheme
from torchrec_cnr.saving.encoding import EncodingInput, sampled_rows, write_all_rows
from torchrec_cnr.storage.pack_writer import PackWriter
from torchrec_cnr.storage.store import Store

SHARE = 0.26  # share of rows that are modified between two checkpoints
MAX_MIB = 256
LARGE_TABLE_BYTES, LARGE_TABLE_COLS = 4 << 30, 64
MAX_ENCODING_MIB = 64
SCHEMES: Mapping[str, cnr.Scheme] = {"4 bits": cnr.AdaptiveAsymmetric(4), "exact": cnr.NoQuantization()}
FULL, QUICK = TableSizes(2, 2_000_000, 64), TableSizes(2, 2_000, 64)
TIMES_LARGER = 3
NUM_DELTAS = 3


def run(setup: Setup) -> Report:
    """Measure the peak of each kind of save and load, one after another."""
    sizes = QUICK if setup.quick else FULL
    larger = TableSizes(sizes.num_tables, TIMES_LARGER * sizes.num_rows, sizes.dim)
    figures: list[Figure] = []
    with one_rank(setup.folder):
        setup.say(f"making {sizes}")
        model = TableModel(sizes)
        for name in SCHEMES:
            figures += _our_figures(model, setup, name, "")
        figures += _stock_figures(model, setup)
        del model
        setup.say(f"making {larger}")
        figures += _our_figures(TableModel(larger), setup, "4 bits", f", {TIMES_LARGER} × the rows")
    figures += _encoding_figures(setup)
    return Report(
        title=f"peak memory of saves and loads of {sizes}, {100 * SHARE:g} % of the rows modified",
        notes=(
            "The highest resident size during a synchronous save or load, less that before it. The process has done",
            "other saves before; what they freed was given back to the system first. Of deltas, it is the highest of "
            f"{NUM_DELTAS}.",
        ),
        figures=tuple(figures),
    )


def _our_figures(model: TableModel, setup: Setup, name: str, condition: str) -> Iterator[Figure]:
    setup.say(f"saving a baseline and deltas, and loading them, {name}")
    folder = setup.folder / name
    tracker = cnr.RowTracker(model.sharded)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())

    def save(path: Path) -> None:
        model.save(cnr.CNRStorageWriter(path, quantization=SCHEMES[name]), planner)

    def delta_mib(path: Path) -> float:
        model.modify(SHARE)
        return peak_mib(lambda: save(path))

    baseline_mib = peak_mib(lambda: save(folder / "baseline"))
    yield Figure(f"save of a baseline, {name}{condition}", baseline_mib, "MiB", at_most=MAX_MIB)
    deltas = [folder / f"delta-{number}" for number in range(NUM_DELTAS)]
    deltas_mib = [delta_mib(path) for path in deltas]
    yield Figure(f"save of a delta, {name}{condition}", max(deltas_mib), "MiB", at_most=MAX_MIB)
    reader = cnr.CNRStorageReader(deltas[-1])
    load_mib = peak_mib(lambda: model.load(reader, cnr.CNRLoadPlanner(tracker)))
    yield Figure(f"load of baseline and {NUM_DELTAS} deltas, {name}{condition}", load_mib, "MiB")
    tracker.close()
    shutil.rmtree(folder)


def _encoding_figures(setup: Setup) -> Iterator[Figure]:
    """Measure a save of one large table, whose encoded rows are written to data files as these fill."""
    num_rows = QUICK.num_rows if setup.quick else LARGE_TABLE_BYTES // (4 * LARGE_TABLE_COLS)
    table = torch.empty(num_rows, LARGE_TABLE_COLS).normal_(0, 0.05)
    for scheme in (cnr.AdaptiveAsymmetric(4), cnr.Asymmetric(8)):
        setup.say(f"encoding {table.nbytes / 1e9:.1f} GB with {scheme}")
        settled = scheme.choose(lambda: sampled_rows(table, None), 0)

        def encode(settled: Scheme = settled) -> None:
            store = Store.open(setup.folder / "encoded")
            store.make()
            packs = PackWriter(store, "large", 1)
            write_all_rows(packs, [EncodingInput("table", table, "float32", settled)])
            packs.finish()
            packs.close()

        encoding_mib = peak_mib(encode)
        what = f"encoding a table of {table.nbytes / 1e9:.1f} GB, {scheme.name} with {scheme.bits} bits"
        yield Figure(what, encoding_mib, "MiB", at_most=MAX_ENCODING_MIB)
        shutil.rmtree(setup.folder / "encoded")


def _stock_figures(model: TableModel, setup: Setup) -> Iterator[Figure]:
    setup.say("saving and loading the whole state with plain DCP")
    folder = setup.folder / "plain-dcp"
    yield Figure("plain DCP's save of the whole state", peak_mib(lambda: model.save(FileSystemWriter(folder))), "MiB")
    yield Figure("plain DCP's load of it", peak_mib(lambda: model.load(FileSystemReader(folder))), "MiB")
    shutil.rmtree(folder)


BENCHMARK = Benchmark(run, "memory that a save takes beyond the state that it saves")

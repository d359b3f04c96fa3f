"""The time to save a delta of transform-coded rows, relative to one of uniform codes, to files and to slower stores.

Transform-coded rows take longer to encode and fewer bytes to write. So a slow store is where they are faster.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.state_dict_saver import save

import torchrec_cnr as cnr
from benchmarks.support.data.click_model import Head
from benchmarks.support.data.clicks import trained_on
from benchmarks.support.data.tiled_rows import tiled, trained_table
from benchmarks.support.jobs.policy_runs import RunTable, modified_rows
from benchmarks.support.jobs.table_models import one_rank
from benchmarks.support.limited_store import limited_store, remove
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Candidate, Setup, interleave, ratios, round_name, times_table
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.coverage import Mask
from torchrec_cnr.quantization import Quantization
from torchrec_cnr.tracking.modified_rows import ModifiedRows
from torchrec_cnr.tracking.tracked_tables import TrackedRows, TrackedShard

NUM_ROWS, NUM_QUICK_ROWS = 8_000_000, 20_000
NUM_ROUNDS, NUM_QUICK_ROUNDS = 5, 1
HEADS: tuple[Head, ...] = ("dot products", "DCN-v2")
TABLE = "readers"
UNIFORM, TRANSFORMED = "AdaptiveAsymmetric(4)", "TransformCoded"
RULES: Mapping[str, Quantization] = {
    UNIFORM: cnr.AdaptiveAsymmetric(4),
    TRANSFORMED: cnr.TransformCoded(cnr.AdaptiveAsymmetric(4)),
}


@dataclass(frozen=True)
class _Destination:
    """A kind of store.

    Attributes:
        name: Name in the figures.
        bytes_per_sec: The speed of a store that is limited; None for local files.
        sync_files: Whether files are forced to disk.
        most: The most time that transform-coded rows should take, relative to uniform codes; None without a target.
    """

    name: str
    bytes_per_sec: float | None = None
    sync_files: bool = True
    most: float | None = None


DESTINATIONS = (
    _Destination("local files", most=2.0),
    _Destination("local files, sync_files=False", sync_files=False, most=2.0),
    _Destination("a store of 200 MB/s", 200e6, most=1.0),
    _Destination("a store of 100 MB/s", 100e6, most=1.0),
    _Destination("a store of 50 MB/s", 50e6, most=1.0),
)


class _Chain:
    """A baseline of a table with row-wise optimizer state, and deltas of it.

    Attributes:
        num_bytes: Bytes of the data files of the last delta.
    """

    def __init__(self, table: RunTable, root: str, rule: Quantization, sync_files: bool) -> None:
        self._root = root
        self._rows = ModifiedRows("table", Box.whole(tuple(table.rows.shape)), torch.device("cpu"))
        tracked = TrackedRows([TrackedShard(self._rows, table.rows, table.states)])
        self._state = {"table": table.rows, "state": table.state}
        self._planner = cnr.CNRSavePlanner(tracked, policy=cnr.Consecutive())
        self._writer = cnr.CNRStorageWriter(root, quantization={"table": rule}, sync_files=sync_files)
        self.num_bytes = 0
        self._save("baseline")

    def modify(self, mask: Mask) -> None:
        """Record that rows were modified, and write out what the machine has not written yet."""
        self._rows.mark_where(torch.from_numpy(mask))
        os.sync()

    def save(self, number: int) -> None:
        """Save a delta."""
        self._save(f"delta-{number}")

    def measure(self, number: int) -> None:
        """Count the bytes of a delta."""
        checkpoint = cnr.read_checkpoint(f"{self._root}/delta-{number}")
        assert checkpoint.kind == "delta"
        self.num_bytes = sum(pack.num_bytes for pack in checkpoint.manifest.packs if pack.directory is None)

    def _save(self, name: str) -> None:
        save(self._state, checkpoint_id=f"{self._root}/{name}", storage_writer=self._writer, planner=self._planner)


@contextmanager
def _root(setup: Setup, destination: _Destination) -> Iterator[str]:
    if destination.bytes_per_sec is None:
        folder = setup.folder / "saves"
        yield str(folder)
        shutil.rmtree(folder)
    else:
        url = limited_store(destination.bytes_per_sec)
        yield url
        remove(url)


def run(setup: Setup) -> Report:
    """Save deltas of the tables of each model to each kind of store, with both schemes alternately."""
    num_rows = NUM_QUICK_ROWS if setup.quick else NUM_ROWS
    num_rounds = NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS
    figures, tables, sizes = [], [], []
    with one_rank(setup.folder):
        for head in HEADS:
            setup.say(f"making {num_rows:,} rows, {head}")
            trained = trained_table(head, TABLE, setup.quick)
            state = trained.state.repeat(-(-num_rows // len(trained.state)))[:num_rows]
            table = RunTable(TABLE, tiled(trained.rows, num_rows), state)
            for destination in DESTINATIONS:
                what = f"{head}, {destination.name}"
                with _root(setup, destination) as root:
                    found = _time(setup, what, table, root, destination, num_rounds)
                figures.append(found.figure)
                tables.append(found.times)
            sizes.append((head, *(f"{num_bytes:,}" for num_bytes in found.num_bytes)))
    return Report(
        title=f"deltas of {num_rows:,} × {table.rows.shape[1]} fp32 with row-wise state, 26 % of the rows modified",
        notes=(
            f"Rows of tables trained on {trained_on()}, repeated with noise. TransformCoded has the error of 4 bits.",
            f"{num_rounds} rounds after a warm-up, in turns; torch has {setup.num_threads} threads. A store of limited",
            "speed is in memory. It takes one data file after another, while the rows after these are encoded.",
        ),
        figures=tuple(figures),
        tables=(Table(("bytes of a delta", *RULES), tuple(sizes)), *tables),
    )


@dataclass(frozen=True)
class _Found:
    """The result for one table and kind of store; ``num_bytes`` has those of a delta by each rule."""

    figure: Figure
    times: Table
    num_bytes: tuple[int, ...]


def _time(setup: Setup, what: str, table: RunTable, root: str, destination: _Destination, num_rounds: int) -> _Found:
    setup.say(f"{what}: baselines")
    chains = {name: _Chain(table, f"{root}/{name}", rule, destination.sync_files) for name, rule in RULES.items()}
    masks = list(modified_rows(len(table.rows), num_rounds + 1))

    def candidate(chain: _Chain) -> Candidate:
        return Candidate(chain.save, before=lambda number: chain.modify(masks[number]), after=chain.measure)

    timings = interleave(
        {name: candidate(chain) for name, chain in chains.items()},
        num_rounds,
        lambda number: setup.say(f"{what}: {round_name(number, num_rounds)}"),
    )
    figure = Figure.over_rounds(
        f"{what}: time of a delta, of that by {UNIFORM}",
        ratios(timings, TRANSFORMED, UNIFORM),
        "×",
        at_most=destination.most,
    )
    return _Found(figure, times_table(what, timings), tuple(chain.num_bytes for chain in chains.values()))


BENCHMARK = Benchmark(
    run,
    "time to save a delta of transform-coded rows, relative to uniform codes, to files and to slow stores",
    is_long=True,
)

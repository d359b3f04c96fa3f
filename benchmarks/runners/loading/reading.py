"""Bytes read for one table of many, or for a range of its rows, from a checkpoint chain, including its manifests."""

import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import torchrec_cnr as cnr
from benchmarks.support.data.clicks import trained_on
from benchmarks.support.data.tiled_rows import tiled, trained_table
from benchmarks.support.jobs.table_models import one_rank
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Setup
from torchrec_cnr.quantization import Quantization
from torchrec_cnr.storage.store import Store

SizedT = TypeVar("SizedT", bound=Sized)

DIM = 64
NUM_DELTAS = 2
SHARE = 0.2  # share of each table's rows that are modified before each delta
RANGE_SHARE = 0.01
MAX_RATIO = 1.2  # bytes read, relative to the bytes wanted
TRANSFORMED = "transformed, error of 4 bits"
SCHEMES: Mapping[str, Quantization] = {
    "4 bits": cnr.AdaptiveAsymmetric(4),
    "exact": cnr.NoQuantization(),
    TRANSFORMED: cnr.TransformCoded(cnr.AdaptiveAsymmetric(4)),
}
FULL = (1_000, 10_000, 150_000)  # rows of the smallest table, of the largest but one, and of the largest
QUICK = (10, 100, 500)
NUM_TABLES = 26


@dataclass
class Counted:
    """Counts of reads from stores.

    Attributes:
        num_bytes: Number of bytes read.
        num_requests: Number of reads.
    """

    num_bytes: int = 0
    num_requests: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def counting(self, read: Callable[..., SizedT]) -> Callable[..., SizedT]:
        """Return a wrapper of a method that counts the bytes and requests it reads."""

        def counted(*args: Any) -> SizedT:
            data = read(*args)
            with self._lock:
                self.num_requests += 1
                self.num_bytes += len(data)
            return data

        return counted


@contextmanager
def counted_reads() -> Iterator[Counted]:
    """Count everything that this process reads from local checkpoints, by wrapping all methods that read files."""
    counted = Counted()
    with (
        patch.object(Store, "read", counted.counting(Store.read)),
        patch.object(Store, "read_array", counted.counting(Store.read_array)),
    ):
        yield counted


@dataclass(frozen=True)
class Reading:
    """The bytes and requests of one read.

    Attributes:
        what: The content that was read, and the method.
        wanted_bytes: Bytes of the blobs that contain it, of their row numbers, and of their transforms and bases, in
            all checkpoints.
        num_bytes: Number of bytes read.
        num_requests: Number of reads.
    """

    what: str
    wanted_bytes: int
    num_bytes: int
    num_requests: int

    @property
    def ratio(self) -> float:
        """The bytes read, divided by the bytes wanted."""
        return self.num_bytes / self.wanted_bytes


def table_rows(smallest: int, second: int, largest: int) -> list[int]:
    """Return the rows of each table: sizes from ``smallest`` to ``second``, and one table that is larger."""
    ratio = (second / smallest) ** (1 / (NUM_TABLES - 2))
    return [*(round(smallest * ratio**index) for index in range(NUM_TABLES - 1)), largest]


def save_lineage(root: Path, scheme: Quantization, num_rows: Sequence[int], trained: Tensor | None = None) -> str:
    """Save a baseline and deltas of tables with row-wise Adagrad, and return the path of the latest checkpoint.

    Args:
        root: The folder of the checkpoints.
        scheme: The scheme of the tables, or the rule that chooses it.
        num_rows: Rows of each table.
        trained: Rows of which the tables consist, repeated, [n, DIM]; None for random ones.
    """
    torch.manual_seed(0)
    model = nn.ModuleDict({f"t{index}": nn.EmbeddingBag(rows, DIM) for index, rows in enumerate(num_rows)})
    rate = 0.1
    if trained is not None:
        rate *= float(trained.std())  # random values have a standard deviation of 1
        for weights in model.parameters():
            weights.data = tiled(trained, len(weights))
    optimizer = RowWiseAdagrad(model.parameters(), lr=rate)
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    writer = cnr.CNRStorageWriter(root, quantization=scheme, sync_files=False)
    for number in range(NUM_DELTAS + 1):
        if number:
            ids = [torch.randperm(rows)[: round(SHARE * rows)] for rows in num_rows]
            sum(table(rows[:, None]).sum() for table, rows in zip(model.values(), ids, strict=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
        states = {name: optimizer.state[table.weight] for name, table in model.items()}
        saved = {"model": model.state_dict(), "optim": {"state": states}}
        path = root / str(number)
        dcp.save(saved, checkpoint_id=path, storage_writer=writer, planner=planner)  # type: ignore[attr-defined]
    tracker.close()
    return str(root / str(NUM_DELTAS))


def wanted_bytes(head: str, fqn: str, rows: range) -> int:
    """Return the bytes of all blobs of a checkpoint chain that a read of rows of a table needs.

    They contain the rows and the numbers of these rows. Transforms and bases count once, however many blobs need them.
    """
    total, path = 0, head
    transforms: dict[str, int] = {}  # bytes by digest
    while path:
        checkpoint = cnr.read_checkpoint(path)
        for shard in checkpoint.manifest.tensors[fqn].shards:
            for blob, block in zip(shard.blobs, shard.rows.blocks, strict=True):
                if block.first < rows.stop and block.first + block.span > rows.start:
                    total += blob.num_bytes + (block.blob.num_bytes if block.blob else 0)
                    transforms |= {digest: part.num_bytes for digest, part in shard.transform_parts.items()}
        path = checkpoint.parent or ""
    return total + sum(transforms.values())


def measure(head: str, num_rows: Sequence[int], tables: Sequence[int]) -> list[Reading]:
    """Read some tables, each in both ways, and a range of rows of the last one, and return the counts."""
    found = []
    for index in tables:
        fqn, whole = f"model.t{index}.weight", range(num_rows[index])
        size = f"a table of {num_rows[index]:,} rows"
        found.append(_read(f"{size}, load_table", head, fqn, whole, partial(cnr.load_table, head, fqn)))
        target = {"model": {f"t{index}.weight": torch.zeros(num_rows[index], DIM)}}
        found.append(_read(f"{size}, dcp.load", head, fqn, whole, partial(_load, head, target)))
    index = tables[-1]
    count = max(1, round(RANGE_SHARE * num_rows[index]))
    rows = range(num_rows[index] // 2, num_rows[index] // 2 + count)
    fqn = f"model.t{index}.weight"
    found.append(
        _read(
            f"{len(rows):,} of these {num_rows[index]:,} rows",
            head,
            fqn,
            rows,
            partial(cnr.load_table, head, fqn, rows=rows),
        )
    )
    return found


def _read(what: str, head: str, fqn: str, rows: range, read: Callable[[], object]) -> Reading:
    with counted_reads() as counted:
        read()
    return Reading(what, wanted_bytes(head, fqn, rows), counted.num_bytes, counted.num_requests)


def _load(head: str, target: dict[str, dict[str, Tensor]]) -> None:
    planner = cnr.CNRLoadPlanner(allow_partial_load=True)
    # The planner warns about tensors that are not loaded.
    with patch.object(logging.getLogger("torchrec_cnr.loading.planner"), "disabled", new=True):
        dcp.load(target, storage_reader=cnr.CNRStorageReader(head), planner=planner)  # type: ignore[attr-defined]


def run(setup: Setup) -> Report:
    """Read a table of medium size, and the largest one, from each checkpoint chain."""
    num_rows = table_rows(*(QUICK if setup.quick else FULL))
    figures, rows = [], []
    with one_rank(setup.folder):
        for name, scheme in SCHEMES.items():
            setup.say(f"saving {NUM_TABLES} tables, {name}, and reading two of them")
            trained = trained_table("dot products", "readers", setup.quick).rows if name == TRANSFORMED else None
            head = save_lineage(setup.folder / name, scheme, num_rows, trained)
            for reading in measure(head, num_rows, (NUM_TABLES - 2, NUM_TABLES - 1)):
                figures.append(Figure(f"{reading.what}, {name}", reading.ratio, "×", at_most=MAX_RATIO))
                counts = (f"{reading.wanted_bytes:,}", f"{reading.num_bytes:,}", str(reading.num_requests))
                rows.append((f"{reading.what}, {name}", *counts))
            shutil.rmtree(setup.folder / name)
    return Report(
        title=f"bytes read of {NUM_TABLES} tables of {min(num_rows):,} to {max(num_rows):,} × {DIM} fp32",
        notes=(
            f"Of a baseline and {NUM_DELTAS} deltas of {100 * SHARE:g} % of the rows each, saved by one rank.",
            "Every byte read from the store counts, those of manifests and headers too. What is wanted are the blobs",
            "that hold the table, or the range of its rows, the numbers of these rows, and their transforms. Rows are",
            f"random; those that are transformed are of a table trained on {trained_on()}.",
        ),
        figures=tuple(figures),
        tables=(Table(("read", "bytes wanted", "bytes read", "requests"), tuple(rows)),),
    )


BENCHMARK = Benchmark(
    run, "bytes read for one table of many, or a range of its rows, relative to the bytes that store it"
)

"""Bytes read: one table of many costs what its blobs and row numbers take in its lineage, and hardly more."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchrec_cnr as cnr
from benchmarks.runners.loading.reading import (
    DIM,
    MAX_RATIO,
    NUM_TABLES,
    SCHEMES,
    Reading,
    counted_reads,
    measure,
    save_lineage,
    table_rows,
    wanted_bytes,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

NUM_ROWS = table_rows(600, 12_000, 70_000)
IO = Path("/proc/self/io")


@pytest.fixture(scope="module", params=SCHEMES)
def head(request: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The newest of three checkpoints of 26 tables, some 40 MiB of values together."""
    assert 30 << 20 < sum(NUM_ROWS) * DIM * 4 < 60 << 20
    return save_lineage(tmp_path_factory.mktemp("lineage"), SCHEMES[request.param], NUM_ROWS)


@pytest.mark.long
def test_one_table_costs_its_own_bytes(head: str) -> None:
    """A table, by either way of reading, and a hundredth of a large one's rows: at most 1.2 times what holds them."""
    readings = measure(head, NUM_ROWS, (NUM_TABLES - 2, NUM_TABLES - 1))
    assert len(readings) == 5
    assert {reading.what: reading.ratio for reading in readings if not 1 <= reading.ratio <= MAX_RATIO} == {}
    part, whole = readings[-1], readings[-2]
    assert part.num_bytes < whole.num_bytes * 0.7
    total = sum(path.stat().st_size for path in Path(head).parent.rglob("*") if path.is_file())
    assert whole.num_bytes < total * 0.6


def test_every_range_of_blobs_costs_its_own_bytes(head: str) -> None:
    """Ranges at the ends and across blobs: the blobs that hold them, and no others."""
    index, num_rows = NUM_TABLES - 1, NUM_ROWS[-1]
    fqn = f"model.t{index}.weight"
    manifest = cnr.read_checkpoint(head).manifest
    block_rows = manifest.tensors[fqn].shards[0].rows.blocks[0].num_rows
    assert num_rows > 2 * block_rows
    table = cnr.load_table(head, fqn)
    for rows in (range(1), range(block_rows - 1, block_rows + 1), range(num_rows - 1, num_rows), range(5, 5)):
        with counted_reads() as counted:
            assert torch.equal(cnr.load_table(head, fqn, rows=rows), table[rows.start : rows.stop])
        reading = Reading("", wanted_bytes(head, fqn, rows), counted.num_bytes, counted.num_requests)
        assert reading.num_bytes - reading.wanted_bytes < 120_000, "manifests and headers"


def test_scattered_tables_are_not_read_with_all_between_them(head: str) -> None:
    """Every other table: what lies between two small ones is not read for the sake of fewer requests."""
    target = {"model": {f"t{i}.weight": torch.zeros(NUM_ROWS[i], DIM) for i in range(0, NUM_TABLES, 2)}}
    wanted = sum(wanted_bytes(head, f"model.{name}", range(len(table))) for name, table in target["model"].items())
    planner = cnr.CNRLoadPlanner(allow_partial_load=True)
    with counted_reads() as counted:
        dcp.load(target, storage_reader=cnr.CNRStorageReader(head), planner=planner)
    assert counted.num_bytes <= MAX_RATIO * wanted
    assert all(bool(table.any()) for table in target["model"].values())


@pytest.mark.skipif(not IO.exists(), reason="the kernel does not count what a process reads")
def test_reads_are_counted_as_the_kernel_counts_them(head: str) -> None:
    """No byte is read past the counter."""
    fqn = f"model.t{NUM_TABLES - 1}.weight"
    cnr.load_table(head, fqn)
    before = _read_by_this_process()
    with counted_reads() as counted:
        cnr.load_table(head, fqn)
    by_kernel = _read_by_this_process() - before
    assert counted.num_bytes <= by_kernel < counted.num_bytes + 200_000


def _read_by_this_process() -> int:
    (line,) = (line for line in IO.read_text().splitlines() if line.startswith("rchar:"))
    return int(line.split()[1])

"""Write bandwidth and capacity by policy and width, relative to plain DCP in fp32 and to the paper's own bytes.

Every checkpoint of every run is saved for real, and all bytes of its files count: codes, row numbers, exact optimizer
state, manifests, compaction. Check-N-Run's bytes are computed for the same rows: n bits per value, scale and bias in
fp32, row-wise optimizer state in fp32, and eight bytes per row number (NSDI '22, sections 4 and 5).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import torchrec_cnr as cnr
from benchmarks.plots.bandwidth import PLOT
from benchmarks.support.jobs.policy_runs import (
    DIM,
    EXACT,
    FULL_ROW_BYTES,
    RunTable,
    Step,
    modified_rows,
    saved,
    simulated,
)
from benchmarks.support.jobs.table_models import num_bytes, one_rank
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Setup
from torchrec_cnr.quantization import Quantization

NUM_ROWS, NUM_QUICK_ROWS = 400_000, 4_000
NUM_CHECKPOINTS, NUM_QUICK_CHECKPOINTS = 100, 4
NUM_PACKS = 32  # data files of a full checkpoint, as for a model of 512 MiB
SCHEMES: Mapping[str, cnr.Scheme] = {
    "2 bits": cnr.AdaptiveAsymmetric(2),
    "3 bits": cnr.AdaptiveAsymmetric(3),
    "4 bits": cnr.AdaptiveAsymmetric(4),
    "8 bits": cnr.Asymmetric(8),
    "exact": cnr.NoQuantization(),
}
TRANSFORMED: Mapping[str, cnr.TransformCoded] = {
    "3 bits": cnr.TransformCoded(cnr.AdaptiveAsymmetric(3)),
    "4 bits": cnr.TransformCoded(cnr.AdaptiveAsymmetric(4)),
    "8 bits": cnr.TransformCoded(cnr.Asymmetric(8)),
}
POLICIES: Mapping[str, cnr.Policy] = {
    "Full": cnr.Full(),
    "OneShot": cnr.OneShot(),
    "Intermittent": cnr.Intermittent(),
    "Consecutive": cnr.Consecutive(),
    "Compacted": cnr.Compacted(),
    "Compacted(max_ratio=1.7)": cnr.Compacted(max_ratio=1.7),
}
HALF = cnr.HalfPrecision(torch.bfloat16)
WIDTHS_WITH_HALF = ("2 bits", "4 bits", "8 bits")  # run also with optimizer state in bf16
CHAIN_POLICIES = ("Consecutive", "Compacted", "Compacted(max_ratio=1.7)")
PAPER = "Check-N-Run's bytes"
MIN_WRITTEN = {
    ("Consecutive", "2 bits"): 40.0,
    ("Consecutive", "4 bits"): 25.0,
    ("Consecutive", "8 bits"): 14.0,
    ("Compacted", "2 bits"): 30.0,
    ("Compacted", "4 bits"): 18.0,
    ("Compacted(max_ratio=1.7)", "2 bits"): 30.0,
    ("Compacted(max_ratio=1.7)", "4 bits"): 18.0,
}
MIN_CAPACITY = {
    ("Compacted", "2 bits"): 6.0,
    ("Compacted", "4 bits"): 6.0,
    ("Compacted(max_ratio=1.7)", "2 bits"): 6.0,
}


@dataclass(frozen=True)
class Cell:
    """The results of a policy and width over a run, as ratios of full fp32 checkpoints to its bytes.

    Attributes:
        written: Ratio for all bytes written.
        delta: Ratio for its last delta alone, or for a checkpoint if there are no deltas.
        capacity: Ratio for the most bytes kept after replaced files were removed.
        peak: Ratio for the most bytes in the store at any time.
    """

    written: float
    delta: float
    capacity: float
    peak: float


def run(setup: Setup) -> Report:
    """Save runs with all policies and widths."""
    num_rows = NUM_QUICK_ROWS if setup.quick else NUM_ROWS
    num_checkpoints = NUM_QUICK_CHECKPOINTS if setup.quick else NUM_CHECKPOINTS
    cells: dict[tuple[str, str], Cell] = {}
    half: dict[tuple[str, str], Cell] = {}
    transformed: dict[tuple[str, str], Cell] = {}
    tables = [RunTable.random(num_rows)]
    with one_rank(setup.folder):
        plain_bytes = _plain_bytes(num_rows, setup.folder / "plain-dcp")

        def run_one(name: str, width: str, state_scheme: cnr.Scheme, rule: Quantization | None = None) -> Cell:
            setup.say(f"{name}, {rule or width}, state by {state_scheme}: {num_checkpoints} checkpoints")
            scheme, masks = SCHEMES[width], ((mask,) for mask in modified_rows(num_rows, num_checkpoints))
            pack_bytes = num_rows * scheme.row_bytes(DIM, torch.float32) // NUM_PACKS
            steps = list(saved(tables, POLICIES[name], rule or scheme, masks, pack_bytes, state_scheme))
            return _cell(steps, plain_bytes)

        for width in SCHEMES:
            cells.update(((name, width), run_one(name, width, EXACT)) for name in POLICIES)
            bits = None if width == "exact" else int(width.split()[0])
            cells[PAPER, width] = _paper_cell(bits, num_rows, num_checkpoints)
        for width in WIDTHS_WITH_HALF:
            half.update(((name, width), run_one(name, width, HALF)) for name in CHAIN_POLICIES)
        for width, rule in TRANSFORMED.items():
            transformed.update(((name, width), run_one(name, width, EXACT, rule)) for name in CHAIN_POLICIES)
    return _report(cells, half, transformed, plain_bytes, num_rows, num_checkpoints)


def _report(
    cells: Mapping[tuple[str, str], Cell],
    half: Mapping[tuple[str, str], Cell],
    transformed: Mapping[tuple[str, str], Cell],
    plain_bytes: int,
    num_rows: int,
    num_checkpoints: int,
) -> Report:
    names, with_half = [*POLICIES, PAPER], [key for key in MIN_WRITTEN if key in half]
    return Report(
        title=f"{num_checkpoints} checkpoints of {num_rows:,} × {DIM} with row-wise state, 26 % modified before each",
        notes=(
            f"All as so many times less than full fp32 checkpoints by plain DCP, of {plain_bytes:,} bytes each.",
            "Everything in files counts, the first baseline and compaction's copies too. 11 intervals modify 52 %.",
            "Row-wise optimizer state is stored exactly, but where bf16 is said: there in two bytes.",
            "Transformed: TransformCoded at the error of so many bits. Rows are drawn at random, without structure,",
            "so it saves little here; `transforms` has trained rows.",
            "Compacted leaves a restore 1.16 times what it needs to read, unless max_ratio is said.",
            "Capacity is what one kept checkpoint needs, at its most, and in brackets while it takes another's place.",
            f"{PAPER}: its intermittent policy, fp32 scale and bias, int64 row numbers, worked out for the same rows;",
            "it reports 6 to 17 × less written and 2.5 to 8 × less kept, from 8 to 2 bits.",
        ),
        figures=(
            *(_figure(cells, "written", key, least) for key, least in MIN_WRITTEN.items()),
            *(_figure(half, "written", key, MIN_WRITTEN[key], ", bf16 state") for key in with_half),
            *(_transformed_figure(cells, transformed, key) for key in transformed),
            *(_figure(cells, "capacity", key, least) for key, least in MIN_CAPACITY.items()),
        ),
        tables=(
            _table("written, less by", names, SCHEMES, cells, lambda cell: f"{cell.written:.1f} ×"),
            _table("last delta, less by", names, SCHEMES, cells, lambda cell: f"{cell.delta:.1f} ×"),
            _table("capacity, less by", names, SCHEMES, cells, _capacity_text),
            _table("bf16 state: written", CHAIN_POLICIES, WIDTHS_WITH_HALF, half, lambda c: f"{c.written:.1f} ×"),
            _table("bf16 state: capacity", CHAIN_POLICIES, WIDTHS_WITH_HALF, half, _capacity_text),
            _table("transformed: written", CHAIN_POLICIES, TRANSFORMED, transformed, lambda c: f"{c.written:.1f} ×"),
            _table("transformed: capacity", CHAIN_POLICIES, TRANSFORMED, transformed, _capacity_text),
        ),
        plot={
            "paper": PAPER,
            "policies": {
                name: {
                    what: {width: getattr(cells[name, width], what) for width in SCHEMES}
                    for what in ("written", "capacity")
                }
                for name in names
            },
        },
    )


def _cell(steps: Sequence[Step], full_bytes: float) -> Cell:
    return Cell(
        written=full_bytes * len(steps) / sum(step.written for step in steps),
        delta=full_bytes / steps[-1].written,
        capacity=full_bytes / max(step.kept for step in steps),
        peak=full_bytes / max(step.capacity for step in steps),
    )


def _paper_cell(bits: int | None, num_rows: int, num_checkpoints: int) -> Cell:
    """Compute the results of Check-N-Run's intermittent policy, with ``bits`` bits per value."""
    code_bytes = 4 * DIM if bits is None else bits * DIM // 8 + 8
    masks = modified_rows(num_rows, num_checkpoints)
    steps = simulated(cnr.Intermittent(), num_rows * (code_bytes + 4), masks, lambda rows: 8 * len(rows))
    return _cell(list(steps), num_rows * FULL_ROW_BYTES)


def _plain_bytes(num_rows: int, folder: Path) -> int:
    state = {"table": torch.randn(num_rows, DIM), "state": torch.rand(num_rows)}
    save(state, storage_writer=FileSystemWriter(folder))
    return num_bytes(folder)


def _figure(
    cells: Mapping[tuple[str, str], Cell], what: str, key: tuple[str, str], least: float, state: str = ""
) -> Figure:
    policy, width = key
    label = f"{what}, {policy}, {width}{state}, less than fp32 by"
    return Figure(label, getattr(cells[key], what), "×", at_least=least)


def _transformed_figure(
    cells: Mapping[tuple[str, str], Cell], transformed: Mapping[tuple[str, str], Cell], key: tuple[str, str]
) -> Figure:
    policy, width = key
    label = f"written, {policy}, transformed to the error of {width}, of the bytes of {width}"
    return Figure(label, cells[key].written / transformed[key].written, "×", at_most=1.0)


def _capacity_text(cell: Cell) -> str:
    return f"{cell.capacity:.1f} × ({cell.peak:.1f})"


def _table(
    heading: str,
    names: Iterable[str],
    widths: Iterable[str],
    cells: Mapping[tuple[str, str], Cell],
    text: Callable[[Cell], str],
) -> Table:
    widths = tuple(widths)
    rows = tuple((name, *(text(cells[name, width]) for width in widths)) for name in names)
    return Table((heading, *widths), rows)


BENCHMARK = Benchmark(
    run,
    "bytes written and kept over a run, by policy and bits, relative to fp32 and the paper's bytes",
    is_long=True,
    plot=PLOT,
)

"""``cnr estimate``: bytes, bandwidth, disk and memory of a model's checkpoints, before there are any."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

import torch
import typer
from rich.text import Text

from torchrec_cnr.cli.options import EXACT, AsJson, scheme_of_bits
from torchrec_cnr.cli.output import print_columns, print_json, stdout
from torchrec_cnr.cli.quantities import parse_count, parse_secs, parse_share, parse_table
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.format.manifest import TensorEntry
from torchrec_cnr.human_text import bytes_text, count_text, duration_text, number_text, ratio_text, share_text
from torchrec_cnr.lineage.checkpoint import read_checkpoint
from torchrec_cnr.maintenance.catalog import checkpoint_at
from torchrec_cnr.policies import Compacted, Consecutive, Full, Intermittent, OneShot, Policy
from torchrec_cnr.quantization import HalfPrecision, NoQuantization, Scheme, Transformed
from torchrec_cnr.sizing.checkpoint_bytes import CheckpointBytes
from torchrec_cnr.sizing.estimate import Estimate, estimate
from torchrec_cnr.sizing.inputs import MAX_COLS, MAX_ROWS, Sizing, Table

logger = logging.getLogger(__name__)

_POLICIES: Mapping[str, Policy] = {
    "compacted": Compacted(),
    "intermittent": Intermittent(),
    "one-shot": OneShot(),
    "consecutive": Consecutive(),
    "full": Full(),
}
_POLICIES_OF_ONE_INTERVAL = ("Compacted", "Consecutive")  # their deltas are based on the checkpoint right before
_STATES: Mapping[str, Scheme | None] = {
    "fp32": NoQuantization(),
    "bf16": HalfPrecision(torch.bfloat16),
    "none": None,
}
_MODIFIED = 0.26  # what Check-N-Run measured in 30 minutes
_BITS, _STORED = "4", "stored"  # by default; for transform-coded rows of a checkpoint
_WITHIN_SECS = 300.0  # by default, unless the interval is shorter

_Checkpoint = Annotated[
    str | None, typer.Argument(metavar="CHECKPOINT", help="Take the tables and ranks of this checkpoint or root.")
]
_Rows = Annotated[str | None, typer.Option("--rows", metavar="N", help="Rows of all tables: 1e9, 400M.")]
_Dim = Annotated[str | None, typer.Option("--dim", metavar="N", help="Values per row.")]
_Tables = Annotated[
    list[str] | None,
    typer.Option("--table", metavar="ROWSxDIM", help="A table, instead of --rows and --dim. May be repeated."),
]
_Modified = Annotated[
    str | None,
    typer.Option(
        "--modified",
        metavar="SHARE",
        help="Share of the rows that an interval modifies (that of CHECKPOINT, or 26%, as assumed).",
    ),
]
_Bits = Annotated[
    str | None,
    typer.Option(
        "--bits",
        metavar="N",
        help="Bits per value of tables: 2, 3, 4, 8, or exact (4, or as stored if CHECKPOINT is transform-coded).",
    ),
]
_State = Annotated[
    Literal["fp32", "bf16", "none"] | None,
    typer.Option(
        "--optimizer-state",
        help="How row-wise state, one value per row, is stored (fp32, or none if CHECKPOINT has no such state).",
    ),
]
_Interval = Annotated[str, typer.Option("--interval", metavar="TIME", help="Time between two saves: 90s, 30m, 2h.")]
_PolicyName = Annotated[
    Literal["compacted", "intermittent", "one-shot", "consecutive", "full"],
    typer.Option("--policy", help="The policy."),
]
_Keep = Annotated[
    int,
    typer.Option(
        "--keep",
        min=1,
        metavar="N",
        help="Checkpoints that are kept: the newest N. A manager keeps all, unless you set its keep.",
    ),
]
_Ranks = Annotated[
    int | None,
    typer.Option("--ranks", min=1, metavar="N", help="Ranks, which share the rows evenly (1, or those of CHECKPOINT)."),
]
_Within = Annotated[
    str | None, typer.Option("--within", metavar="TIME", help="Time that a save may take (5m, or the interval).")
]
_Length = Annotated[str, typer.Option("--run", metavar="TIME", help="Length of the run, such as 30d.")]
_Gpu = Annotated[bool, typer.Option("--gpu", help="The tables are on GPUs.")]


def estimate_(
    checkpoint: _Checkpoint = None,
    rows: _Rows = None,
    dim: _Dim = None,
    tables: _Tables = None,
    modified: _Modified = None,
    bits: _Bits = None,
    state: _State = None,
    interval: _Interval = "30m",
    policy: _PolicyName = "compacted",
    keep: _Keep = 3,
    ranks: _Ranks = None,
    within: _Within = None,
    run: _Length = "30d",
    gpu: _Gpu = False,
    as_json: AsJson = False,
) -> None:
    """Estimate bytes, bandwidth, disk and memory of a model's checkpoints.

    Tables are counted as fp32, with row-wise optimizer state. Give --rows and --dim, or --table for each table, or a
    checkpoint. The default of --modified is the share that CHECKPOINT stores, if it is a delta of the checkpoint before
    it. Bits, policy and interval are those of the options, not those of CHECKPOINT. Only if its tables are
    transform-coded and --bits is not given, rows take the bytes that they take there.

    The second column shows plain DCP, which writes a full fp32 checkpoint each time. The third one divides it by the
    first: less than 1 means that torchrec_cnr needs more.

    Examples:

    - `cnr estimate --rows 1e9 --dim 64 --ranks 16`
    - `cnr estimate --table 400Mx128 --table 2.5e9x64 --modified 10% --interval 10m --within 2m`
    - `cnr estimate --rows 1e9 --dim 64 --bits exact --policy intermittent --json`
    - `cnr estimate runs/a --modified 5%`
    """
    model = _model(checkpoint, rows, dim, tables)
    interval_secs = parse_secs("--interval", interval)
    save_secs = min(_WITHIN_SECS, interval_secs) if within is None else parse_secs("--within", within)
    run_secs = parse_secs("--run", run)
    if save_secs > interval_secs:
        raise ConfigurationError(f"--within must be at most --interval, which is {interval} (got {within})")
    if interval_secs > run_secs:
        raise ConfigurationError(f"--interval must be at most --run, which is {run} (got {interval})")
    state = state or ("fp32" if model.has_state else "none")
    sizing = Sizing(
        tables=model.tables if bits is None else model.tables_of_scheme,
        modified=model.modified if modified is None else parse_share("--modified", modified),
        scheme=scheme_of_bits(bits or _BITS),
        state=_STATES[state],
        interval_secs=interval_secs,
        policy=_POLICIES[policy],
        num_ranks=model.num_ranks if ranks is None else ranks,
        keep_last=keep,
        save_secs=save_secs,
        run_secs=run_secs,
        is_on_gpu=gpu,
    )
    if as_json:
        print_json({"inputs": _inputs(sizing, bits or model.bits, state, policy), **asdict(estimate(sizing))})
    else:
        _print(sizing, bits or model.bits, state, is_assumed=modified is None and not model.is_measured)


@dataclass(frozen=True)
class _Model:
    """The tables of a model and their use, from options or from a checkpoint.

    Attributes:
        tables: The tables.
        num_ranks: The number of ranks that saved the checkpoint.
        modified: The share of the rows that an interval modifies.
        is_measured: Whether that is the share of a delta in a checkpoint; otherwise it is assumed.
        has_state: Whether there is row-wise optimizer state.
    """

    tables: tuple[Table, ...]
    num_ranks: int = 1
    modified: float = _MODIFIED
    is_measured: bool = False
    has_state: bool = True

    @property
    def bits(self) -> str:
        """The bits without ``--bits``: as stored if the bytes of a row were measured, since it is transform-coded."""
        return _BITS if all(table.row_bytes is None for table in self.tables) else _STORED

    @property
    def tables_of_scheme(self) -> tuple[Table, ...]:
        """The tables, whose bytes the scheme determines."""
        return tuple(replace(table, row_bytes=None) for table in self.tables)


def _model(checkpoint: str | None, rows: str | None, dim: str | None, tables: Sequence[str] | None) -> _Model:
    if (rows is None) != (dim is None):
        given, missing = ("--rows", "--dim") if dim is None else ("--dim", "--rows")
        raise ConfigurationError(f"{given} needs {missing}")
    if [checkpoint is not None, rows is not None, bool(tables)].count(True) != 1:
        raise ConfigurationError("give either --rows and --dim, or --table, or CHECKPOINT")
    if rows is not None and dim is not None:
        return _Model((Table(parse_count("--rows", rows, MAX_ROWS), parse_count("--dim", dim, MAX_COLS)),))
    if checkpoint is None:
        return _Model(tuple(Table(*parse_table("--table", text, MAX_ROWS, MAX_COLS)) for text in tables or ()))
    return _model_of(checkpoint)


def _model_of(path: str) -> _Model:
    manifest = read_checkpoint(checkpoint_at(path)).committed
    entries = [entry for entry in manifest.tensors.values() if entry.is_table and 0 not in entry.size]
    sizes = [entry.size for entry in entries]
    if not sizes:
        raise ConfigurationError(f"{path}: the checkpoint contains no table; give --rows and --dim")
    num_others = sum(entry.size in sizes and not entry.is_table for entry in manifest.tensors.values())
    if num_others:
        logger.warning(
            "left out %s as large as a table, such as optimizer state with one value for each value of a table",
            count_text(num_others, "tensor"),
        )
    is_one_interval = manifest.kind == "delta" and manifest.policy in _POLICIES_OF_ONE_INTERVAL and manifest.num_rows
    modified = manifest.num_rows / sum(size[0] for size in sizes) if is_one_interval else _MODIFIED
    has_state = any(entry.table is not None for entry in manifest.tensors.values())
    is_transformed = any(isinstance(shard.scheme, Transformed) for entry in entries for shard in entry.shards)
    row_bytes = [_row_bytes(entry) if is_transformed else None for entry in entries]
    tables = tuple(Table(size[0], size[1], known) for size, known in zip(sizes, row_bytes, strict=True))
    return _Model(tables, manifest.world_size, min(1.0, modified), bool(is_one_interval), has_state)


def _row_bytes(entry: TensorEntry) -> float | None:
    """Return the bytes of a stored row on average, without row numbers; None if no row is stored."""
    num_bytes = sum(blob.num_bytes for shard in entry.shards for blob in shard.blobs)
    return num_bytes / entry.num_stored_rows if num_bytes else None


def _inputs(sizing: Sizing, bits: str, state: str, policy: str) -> dict[str, object]:
    return {
        "tables": [[table.num_rows, table.num_cols] for table in sizing.tables],
        "modified": sizing.modified,
        "bits": bits,
        "optimizer_state": state,
        "interval_secs": sizing.interval_secs,
        "policy": policy,
        "keep": sizing.keep_last,
        "num_ranks": sizing.num_ranks,
        "within_secs": sizing.save_secs,
        "run_secs": sizing.run_secs,
        "is_on_gpu": sizing.is_on_gpu,
    }


def _bandwidth_text(bytes_per_sec: int) -> str:
    return f"{bytes_text(bytes_per_sec)}/s"


def _number_text(num: int) -> str:
    return f"{num:,}"


@dataclass(frozen=True)
class _Line:
    """A line of the output; a heading if it has no values.

    Attributes:
        label: The text in the first column.
        ours: The value of this library.
        plain: The value of plain DCP.
        text: Formats a value.
        has_ratio: Whether the two can be compared.
    """

    label: str
    ours: int | None = None
    plain: int | None = None
    text: Callable[[int], str] = bytes_text
    has_ratio: bool = True


def _lines(sizing: Sizing, found: Estimate) -> Iterator[_Line]:
    yield _Line("checkpoint")
    yield _Line("  baseline", found.baseline.num_bytes, found.full_fp32_bytes)
    yield from _part_lines(found.baseline, sizing)
    if found.delta is not None:
        yield _Line("  delta of one interval", found.delta.num_bytes, found.full_fp32_bytes)
        yield from _part_lines(found.delta, sizing)
        if found.largest_delta_bytes > found.delta.num_bytes:
            yield _Line("  largest delta", found.largest_delta_bytes, found.full_fp32_bytes)
    ours, plain = found.costs, found.plain_dcp
    yield _Line("written")
    yield _Line("  per save, on average", ours.bytes_per_save, plain.bytes_per_save)
    yield _Line("  per hour", ours.bytes_per_hour, plain.bytes_per_hour)
    yield _Line("  per day", ours.bytes_per_day, plain.bytes_per_day)
    if ours.compaction_bytes_per_day:
        yield _Line("    by saves", ours.bytes_per_day - ours.compaction_bytes_per_day)
        yield _Line("    by compaction", ours.compaction_bytes_per_day)
    yield _Line("bandwidth")
    within = duration_text(round(1e9 * sizing.save_secs))
    in_time = plain.baseline_bytes_per_sec, plain.baseline_bytes_per_sec_of_rank
    for label, values in {
        "average": (
            (ours.bytes_per_sec, ours.bytes_per_sec_of_rank),
            (plain.bytes_per_sec, plain.bytes_per_sec_of_rank),
        ),
        f"baseline in {within}": ((ours.baseline_bytes_per_sec, ours.baseline_bytes_per_sec_of_rank), in_time),
        f"delta in {within}": ((ours.delta_bytes_per_sec, ours.delta_bytes_per_sec_of_rank), in_time),
    }.items():
        if values[0][0]:
            yield _Line(f"  {label}", values[0][0], values[1][0], _bandwidth_text)
            if sizing.num_ranks > 1:
                yield _Line("    per rank", values[0][1], values[1][1], _bandwidth_text)
        if label == "average" and ours.compaction_bytes_per_sec:
            yield _Line("    compaction, by one process", ours.compaction_bytes_per_sec, None, _bandwidth_text)
    yield from _store_lines(found)
    yield from _memory_lines(found)


def _part_lines(parts: CheckpointBytes, sizing: Sizing) -> Iterator[_Line]:
    is_exact = isinstance(sizing.scheme, NoQuantization)
    for label, num_bytes in {
        "values" if is_exact else "codes": parts.codes,
        "scale and bias": parts.scale_and_bias,
        "optimizer state": parts.optimizer_state,
        "row numbers": parts.row_numbers,
    }.items():
        if num_bytes:
            yield _Line(f"    {label}", num_bytes)


def _store_lines(found: Estimate) -> Iterator[_Line]:
    ours, plain = found.costs, found.plain_dcp
    yield _Line("disk, at most")
    yield _Line("  kept", ours.kept_bytes, plain.kept_bytes)
    yield _Line("  before the oldest is removed", ours.peak_bytes, plain.peak_bytes)
    yield _Line("restore, at most")
    yield _Line("  read", ours.restore_bytes, plain.restore_bytes)
    if ours.uncompacted_restore_bytes > ours.restore_bytes:
        yield _Line("  read before a compaction", ours.uncompacted_restore_bytes, plain.restore_bytes)
    yield _Line("data files (requests)")
    yield _Line("  baseline", found.baseline_files, None, _number_text)
    if found.delta_files:
        yield _Line("  delta", found.delta_files, None, _number_text)
    yield _Line("  restore", ours.restore_requests, None, _number_text)


def _memory_lines(found: Estimate) -> Iterator[_Line]:
    memory = found.memory
    yield _Line("memory of a rank")
    yield _Line(f"  tracker, {number_text(memory.tracker_row_bytes)} bytes per row", memory.tracker)
    staged = {"baseline": memory.staging_baseline} | ({"delta": memory.staging_delta} if found.delta else {})
    for kind, num_bytes in staged.items():
        is_limited = num_bytes > memory.staging_limit  # training then waits for the rest: a ratio would mislead
        yield _Line(f"  staging of a {kind}", num_bytes, found.plain_dcp_staging, has_ratio=not is_limited)
    yield _Line("  peak of a save", memory.peak_save)
    yield _Line("  peak of an asynchronous save", memory.peak_async_save)


def _print(sizing: Sizing, bits: str, state: str, *, is_assumed: bool) -> None:
    console, found = stdout(), estimate(sizing)
    dims = f" x {sizing.tables[0].num_cols:,}" if len(sizing.tables) == 1 else f" in {len(sizing.tables):,} tables"
    interval, run = (duration_text(round(1e9 * secs)) for secs in (sizing.interval_secs, sizing.run_secs))
    modified = f"{share_text(sizing.modified)} of them modified in {interval}{' (assumed)' * is_assumed}"
    console.print(f"{sizing.num_rows:,} rows{dims}, {modified}")
    width = {EXACT: EXACT, _STORED: "rows as stored"}.get(bits, f"{bits} bits")
    policy = f"{type(sizing.policy).__name__}, newest {sizing.keep_last:,} kept"
    console.print(f"{width}, optimizer state {state}, {policy}, {count_text(sizing.num_ranks, 'rank')}, run of {run}\n")
    lines = list(_lines(sizing, found))
    columns: dict[str, Sequence[str | Text]] = {
        "": [Text(line.label, "bold" if line.ours is None else "") for line in lines],
        ">torchrec_cnr": ["" if line.ours is None else line.text(line.ours) for line in lines],
        ">plain DCP": ["" if line.plain is None else line.text(line.plain) for line in lines],
        ">plain/ours": [
            f"{ratio_text(line.plain / line.ours)}x" if line.plain and line.ours and line.has_ratio else ""
            for line in lines
        ],
    }
    print_columns(console, columns, [">plain/ours", ">plain DCP"])
    for note in _notes(sizing, found):
        console.print(note)


def _notes(sizing: Sizing, found: Estimate) -> Iterator[str]:
    if isinstance(sizing.policy, Intermittent | OneShot):
        yield "\nSeveral intervals modify rows as Check-N-Run measured, 0.26 + 0.105 ln i, scaled to this share."
    if isinstance(sizing.policy, Consecutive):
        yield "\nConsecutive keeps the whole chain: disk and restore are those at the end of the run."
    staged = max(found.memory.staging_baseline, found.memory.staging_delta)
    if staged > found.memory.staging_limit:
        limit = bytes_text(found.memory.staging_limit)
        yield f"\nAn asynchronous save copies at most staging_bytes, {limit}; training waits until the rest is written."

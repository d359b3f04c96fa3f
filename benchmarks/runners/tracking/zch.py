"""The bytes of a delta of a table with zero-collision hashing, relative to the same delta without its id map."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, LFU_EvictionPolicy

import torchrec_cnr as cnr
from benchmarks.support.jobs.table_models import num_bytes, one_rank
from benchmarks.support.jobs.zch_models import HashedModel, ZchModel
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Setup

SHARE, NEW_SHARES = 0.26, (0.0, 0.05, 0.2)  # of the rows that are modified, and of these that are of new ids
AT_MOST = {0.05: 1.15}
DIM, STEPS = 64, 64
MODELS: Mapping[str, Callable[[int], ZchModel | HashedModel]] = {
    "LFU": lambda num_rows: ZchModel(num_rows, DIM, LFU_EvictionPolicy, STEPS),
    "DistanceLFU": lambda num_rows: ZchModel(num_rows, DIM, DistanceLFU_EvictionPolicy, STEPS),
    "MPZCH, one hour": lambda num_rows: HashedModel(num_rows, DIM, 1),
    "MPZCH, two hours": lambda num_rows: HashedModel(num_rows, DIM, 2),
}
FULL_ROWS, QUICK_ROWS = 1_000_000, 4_000


@dataclass(frozen=True)
class _Bytes:
    """Bytes of a delta with the id map and without it, and of the map in a baseline."""

    with_ids: int
    without_ids: int
    whole_map: int
    num_modified: int

    @property
    def ratio(self) -> float:
        """The bytes of the delta of those without the map."""
        return self.with_ids / self.without_ids

    @property
    def whole_ratio(self) -> float:
        """The same if the delta stored the map whole."""
        return (self.without_ids + self.whole_map) / self.without_ids


def run(setup: Setup) -> Report:
    """Save a baseline and a delta of the same rows, with and without the id map, for each policy of evictions."""
    num_rows = QUICK_ROWS if setup.quick else FULL_ROWS
    found: dict[tuple[str, float], _Bytes] = {}
    with one_rank(setup.folder):
        for policy in MODELS:
            for new_share in NEW_SHARES:
                setup.say(f"saving a baseline and a delta, {policy}, {100 * new_share:g} % of new ids")
                found[policy, new_share] = _save(setup.folder / f"{policy}-{new_share}", num_rows, policy, new_share)
    rows = [
        (
            policy,
            f"{100 * new_share:g} %",
            f"{each.num_modified:,}",
            f"{each.without_ids:,}",
            f"{each.with_ids:,}",
            f"{(each.with_ids - each.without_ids) / each.num_modified:.2f}",
            f"{each.whole_ratio:.3f} ×",
        )
        for (policy, new_share), each in found.items()
    ]
    figures = [
        Figure(
            f"delta with an id map ({policy}), {100 * new_share:g} % of new ids, of the same without",
            each.ratio,
            "×",
            at_most=AT_MOST.get(new_share),
        )
        for (policy, new_share), each in found.items()
    ]
    columns = ("eviction", "of new ids", "rows", "without", "with", "bytes a row for its id", "if stored whole")
    return Report(
        title=f"bytes of deltas of {num_rows:,} × {DIM} fp32 rows with zero-collision hashing, at 4 bits, "
        f"{100 * SHARE:g} % of the rows modified",
        notes=(
            "For each row, an id map has its raw id, its number and a count; with DistanceLFU, also the time of its "
            "last use. Each takes 8 bytes.",
            "That of MPZCH has a raw id, and the hour of its last use in 4 bytes. Hours of the rows are one, or two.",
        ),
        figures=tuple(figures),
        tables=(Table(columns, tuple(rows)),),
    )


def _save(folder: Path, num_rows: int, policy: str, new_share: float) -> _Bytes:
    torch.manual_seed(0)
    model = MODELS[policy](num_rows)
    planners = {
        with_ids: cnr.CNRSavePlanner(cnr.RowTracker(model.sharded), policy=cnr.OneShot()) for with_ids in (True, False)
    }
    taken: Mapping[tuple[bool, str], Path] = {
        (with_ids, name): folder / f"{with_ids}" / name for with_ids in planners for name in ("baseline", "delta")
    }
    for name in ("baseline", "delta"):
        if name == "delta":
            model.modify(SHARE, new_share)
        for with_ids, planner in planners.items():
            writer = cnr.CNRStorageWriter(taken[with_ids, name], quantization=cnr.AdaptiveAsymmetric(4))
            model.save(writer, planner, with_ids=with_ids)
    sizes = {key: num_bytes(path) for key, path in taken.items()}
    num_modified = cnr.read_checkpoint(taken[False, "delta"]).num_rows
    whole_map = sizes[True, "baseline"] - sizes[False, "baseline"]
    return _Bytes(sizes[True, "delta"], sizes[False, "delta"], whole_map, num_modified)


BENCHMARK = Benchmark(run, "bytes of a delta with zero-collision hashing, relative to one without")

"""The time that tracking adds to a training step, with our tracker and with TorchRec's own."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec

import torchrec_cnr as cnr
from benchmarks.support.jobs.table_models import TableModel, TableSizes, one_rank
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report
from benchmarks.support.rounds import Candidate, Setup, interleave, processor_ratios, times_table
from torchrec_cnr.policies import Since

UNTRACKED = "untracked"
MAX_TIMES = {"RowTracker": 1.1}  # time of a tracked step, divided by that of an untracked one
FULL, QUICK = TableSizes(8, 100_000, 64), TableSizes(8, 1_000, 64)
IDS_PER_TABLE, IDS_PER_SAMPLE = 4096, 4
NUM_BATCHES = 16
STEPS_PER_ROUND, QUICK_STEPS_PER_ROUND = 50, 2
NUM_ROUNDS, NUM_QUICK_ROUNDS = 15, 1


@dataclass(frozen=True)
class _Tracking:
    """The work of a kind of tracking outside of forward and backward.

    Attributes:
        after_step: Called after each step.
        after_round: Called after each round, as for a save.
    """

    after_step: Callable[[], object]
    after_round: Callable[[], object]


def run(setup: Setup) -> Report:
    """Time the same steps on models with different kinds of tracking."""
    sizes = QUICK if setup.quick else FULL
    num_steps = QUICK_STEPS_PER_ROUND if setup.quick else STEPS_PER_ROUND
    num_rounds = NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS
    kinds: dict[str, Callable[[TableModel], _Tracking]] = {
        UNTRACKED: lambda _: _Tracking(_nothing, _nothing),
        "RowTracker": lambda model: _row_tracking(model, is_read=False),
        "RowTracker, rows read": lambda model: _row_tracking(model, is_read=True),
        "ModelDeltaTrackerTrec": lambda model: _delta_tracking(model, auto_compact=False, is_read=False),
        "ModelDeltaTrackerTrec, ids read": lambda model: _delta_tracking(model, auto_compact=False, is_read=True),
        "the same, auto_compact": lambda model: _delta_tracking(model, auto_compact=True, is_read=True),
    }
    with one_rank(setup.folder):
        setup.say(f"making {len(kinds)} models, each of {sizes}")
        generator = torch.Generator().manual_seed(0)
        shape = (sizes.num_tables, IDS_PER_TABLE)
        ids = [torch.randint(sizes.num_rows, shape, generator=generator) for _ in range(NUM_BATCHES)]

        def candidate(kind: Callable[[TableModel], _Tracking]) -> Candidate:
            model = TableModel(sizes)
            batches = [model.batch(list(batch_ids), IDS_PER_SAMPLE) for batch_ids in ids]
            tracking = kind(model)

            def train(number: int) -> None:
                for step in range(num_steps):
                    model.step(batches[step % NUM_BATCHES])
                    tracking.after_step()
                tracking.after_round()

            return Candidate(train)

        candidates = {name: candidate(kind) for name, kind in kinds.items()}
        setup.say(f"training each for {num_rounds + 1} rounds of {num_steps} steps")
        rounds = interleave(candidates, num_rounds)
    ratios = {name: processor_ratios(rounds, name, UNTRACKED) for name in kinds if name != UNTRACKED}
    return Report(
        title=f"a training step, {IDS_PER_TABLE} ids of each of {sizes}, with and without tracking",
        notes=(
            f"{num_rounds} rounds of {num_steps} steps after a warm-up. In each round all had their turn, each with a",
            "model of its own; a ratio is that of processor times within a round. A step is forward and backward with",
            f"the optimizer in it; ids are uniform, {IDS_PER_SAMPLE} to a sample. Where rows or ids are read, that is "
            "once a round, as for a save.",
        ),
        figures=tuple(
            Figure.over_rounds(f"step with {name}, of the untracked", values, "×", at_most=MAX_TIMES.get(name))
            for name, values in ratios.items()
        ),
        tables=(times_table("step", rounds, num_steps),),
    )


def _row_tracking(model: TableModel, is_read: bool) -> _Tracking:
    tracker = cnr.RowTracker(model.sharded)

    def read() -> None:
        tracker.freeze()
        for shard in tracker.shards:
            list(shard.rows.select(Since.HEAD).blocks(1 << 20))
            shard.rows.commit(is_baseline=False)

    return _Tracking(_nothing, read if is_read else _nothing)


def _delta_tracking(model: TableModel, auto_compact: bool, is_read: bool) -> _Tracking:
    tracker = ModelDeltaTrackerTrec(model.sharded, auto_compact=auto_compact)
    return _Tracking(tracker.step, tracker.get_unique_ids if is_read else _nothing)


def _nothing() -> None:
    pass


BENCHMARK = Benchmark(run, "time that tracking adds to a training step, by our tracker and by TorchRec's own")

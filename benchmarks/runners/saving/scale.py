"""The cost of a thousand tables on 128 ranks, for the coordinator and for a process that loads them.

All work of the coordinator is run, on the plans and results of all ranks. The parallel work of the ranks is not run.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch

import torchrec_cnr as cnr
from benchmarks.support.jobs.simulated_ranks import SCHEME, ManyRanks, gathered, make_packs
from benchmarks.support.process_memory import peak_mib, resident_mib
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Setup
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.format.manifest_json import forget
from torchrec_cnr.gc_pause import paused_gc
from torchrec_cnr.lineage.checkpoint import Head, read_lineage
from torchrec_cnr.loading.reader import CNRStorageReader
from torchrec_cnr.reading.plan import plan_fold
from torchrec_cnr.reading.regions import Region, RowStateRegion, TensorRegion
from torchrec_cnr.saving.agreement import RankPlan

T = TypeVar("T")
FULL, QUICK = (1000, 128), (5, 4)  # tables, ranks
NUM_ROWS, DIM = 1_000_000, 64
DELTA_SHARE = 0.1
MAX_SECS, MAX_MIB, MAX_MB = 10, 1024, 16


@dataclass
class _Costs:
    """The costs of the steps of an operation.

    Attributes:
        secs: Processor seconds of each step, which runs in one thread.
        mib: Peak memory of each step, in MiB.
    """

    secs: dict[str, float] = field(default_factory=dict)
    mib: dict[str, float] = field(default_factory=dict)

    def of(self, step: str, act: Callable[[], T]) -> T:
        """Run a step, and record its costs."""
        found: list[T] = []

        def measured() -> None:
            began = time.process_time()
            found.append(act())
            self.secs[step] = time.process_time() - began

        self.mib[step] = peak_mib(measured)
        return found[0]


def run(setup: Setup) -> Report:
    """Save and load a baseline and a delta of tables; with ``--all-cases``, also of tables with row-wise Adagrad."""
    num_tables, num_ranks = QUICK if setup.quick else FULL
    figures: list[Figure] = []
    rows: list[tuple[str, ...]] = []
    for has_state in (False, True) if setup.all_cases else (False,):
        job = ManyRanks.of(num_tables, NUM_ROWS, DIM, num_ranks, has_state)
        head: Head | None = None
        for kind in ("baseline", "delta"):
            what = f"{kind} of {job.num_boxes:,} boxes"
            setup.say(what)
            path = setup.folder / f"{kind}-{has_state}"
            costs = _Costs()
            plans_mib, results_mib = _save(job, path, head, costs)
            file_mb = (path / MANIFEST_FILE).stat().st_size / 1e6
            forget()
            head = costs.of("reading manifests", lambda path=path: read_lineage(path)).head  # type: ignore[misc]
            forget()
            costs.of("planning a rank's load", lambda path=path, job=job: _plan_load(job, path))  # type: ignore[misc]
            save_secs = costs.secs["planning"] + costs.secs["commit"]
            save_mib = max(costs.mib["planning"], costs.mib["commit"])
            most_secs, most_mib, most_mb = (None, None, None) if has_state else (MAX_SECS, MAX_MIB, MAX_MB)
            figures += [
                Figure(f"planning and commit, {what}", save_secs, "s", at_most=most_secs),
                Figure(f"memory of it, {what}", save_mib, "MiB", at_most=most_mib),
                Figure(f"manifest, {what}", file_mb, "MB", at_most=most_mb),
            ]
            held = (f"{plans_mib:.0f}", f"{results_mib:.0f}")
            cells = (f"{costs.secs[step]:.2f} s, {costs.mib[step]:.0f} MiB" for step in costs.secs)
            rows.append((what, *cells, *held))
    headings = ("of", "planning", "commit", "reading manifests", "planning a rank's load", "plans MiB", "results MiB")
    return Report(
        title=f"a coordinator's work for {num_tables:,} tables, each sharded by rows over {num_ranks} ranks",
        notes=(
            "Tables alone; with --all-cases, of tables with row-wise Adagrad's state too: twice as many boxes.",
            f"The delta holds {100 * DELTA_SHARE:g} % of the rows. Times are the processor's, of one thread: from the "
            "plans of all ranks to",
            "the plan that they get, and from their results to the manifest in the store. Memory is the peak beyond "
            "what was held before,",
            "plans and results not counted, which DCP gathers and which the last columns tell.",
        ),
        figures=tuple(figures),
        tables=(Table(headings, tuple(rows)),),
    )


def _save(job: ManyRanks, path: Path, head: Head | None, costs: _Costs) -> tuple[float, float]:
    """Plan and commit, and return the MiB of the plans and of the results that the coordinator gathers."""
    writer = cnr.CNRStorageWriter(path, quantization=SCHEME)
    meta = writer.storage_meta()
    writer.set_up_storage_writer(True, rank=0)
    planner = job.planner(0, meta, head)
    before_mib = resident_mib()
    plans = [gathered(writer.prepare_local_plan(planner.create_local_plan()))]
    shared: RankPlan = plans[0].storage_data
    for rank in range(1, job.num_ranks):
        plan = job.planner(rank, meta, head).create_local_plan()
        plans.append(gathered(replace(plan, storage_data=replace(shared, data=plan.storage_data))))
    plans_mib = resident_mib() - before_mib
    plans, metadata = costs.of("planning", lambda: planner.create_global_plan(plans))
    plans = writer.prepare_global_plan(plans)
    before_mib = resident_mib()
    share = 1.0 if head is None else DELTA_SHARE
    results = [gathered(job.results(plan, rank, share)) for rank, plan in enumerate(plans)]
    results_mib = resident_mib() - before_mib
    make_packs(path, results)
    costs.of("commit", lambda: writer.finish(metadata, results))
    return max(0.0, plans_mib), max(0.0, results_mib)


def _plan_load(job: ManyRanks, path: Path) -> None:
    """Do what one rank does to load its shards, except reading: the metadata of all tensors, and the blobs to read."""
    reader = CNRStorageReader(path)
    reader.read_metadata()
    assert reader._chain is not None
    lineage = reader._chain.read()
    regions: list[Region] = []
    for table in job.tables:
        box, _ = table.boxes(0, job.num_ranks)
        regions.append(TensorRegion(table.fqn, box, torch.empty(0)))
        if job.has_state:
            bounds = (0, table.dim)
            regions.append(RowStateRegion(table.momentum_fqn, box, torch.empty(0), bounds))
    with paused_gc():
        plan_fold(lineage, regions)


BENCHMARK = Benchmark(
    run, "cost of a thousand tables on 128 ranks for the coordinator: time, memory, size of the manifest"
)

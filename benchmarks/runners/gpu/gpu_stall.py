"""The stall of training in an asynchronous save of tables on a CUDA device."""

import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import torchrec_cnr as cnr
from benchmarks.support.devices import benchmark_device, device_name, nothing_timed, wait_for
from benchmarks.support.jobs.async_saves import SCHEMES, SHARE, Lineage
from benchmarks.support.jobs.table_models import TableModel, TableSizes, one_rank
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Candidate, Setup, interleave, ratios, round_name, times_table

FULL, QUICK = TableSizes(2, 16_000_000, 64), TableSizes(2, 2_000, 64)
NUM_ROUNDS, NUM_QUICK_ROUNDS = 5, 1
PLAIN_DCP = "plain DCP, staged in the background"
MAX_STALL_MS, MIN_RATIO = 20.0, 20.0
CNR_SCHEMES: dict[str, cnr.Scheme] = dict(SCHEMES)


class PlainSaves:
    """Saves of the whole state by DCP's own writer, whose stager copies to pinned memory in a stream of its own."""

    def __init__(self, model: TableModel, folder: Path) -> None:
        self._model = model
        self._folder = folder
        is_gpu = model.device.type == "cuda"
        self._stager = DefaultStager(StagingOptions(use_pinned_memory=is_gpu, use_non_blocking_copy=is_gpu))
        # That of torch 2.11 closes its copy after one save, although it would be kept for the next one: pinning takes
        # longer than copying.
        self._close = self._stager._state_dict_stager.close
        self._stager._state_dict_stager.close = lambda: None  # type: ignore[method-assign]  # see above

    def modify(self) -> None:
        """Remove the save before. No rows are marked, because DCP saves everything."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def save(self) -> "Future[Any]":
        """Begin a save, and wait until its copy is complete: until then, training must not change the tables."""
        tables = {f"t{index}": table for index, table in enumerate(self._model.tables())}
        response: Any = dcp.async_save(  # type: ignore[attr-defined]  # torch does not mark it as exported
            {**tables, **self._model.optimizer_tensors()},
            storage_writer=FileSystemWriter(self._folder, sync_files=False, thread_count=4),
            async_stager=self._stager,
        )
        response.staging_completion.result()
        upload: Future[Any] = response.upload_completion
        return upload

    def close(self) -> None:
        """Remove the saved checkpoint."""
        self._stager.close()
        self._close()  # type: ignore[no-untyped-call]  # torch's own
        shutil.rmtree(self._folder, ignore_errors=True)


def run(setup: Setup) -> Report:
    """Time how long training waits, with each scheme and with plain DCP's stager; all in turns."""
    device = benchmark_device(setup)
    if device is None:
        return nothing_timed(setup)
    sizes = QUICK if setup.quick else FULL
    num_rounds = NUM_QUICK_ROUNDS if setup.quick else NUM_ROUNDS
    with one_rank(setup.folder, device):
        setup.say(f"making {sizes} on {device_name(device)}")
        model = TableModel(sizes, device=device)
        saves: dict[str, PlainSaves | Lineage] = {}
        for name, scheme in CNR_SCHEMES.items():
            setup.say(f"saving a baseline: {name}")
            saves[name] = Lineage(TableModel(sizes, device=device), setup.folder / name, scheme, SHARE)
        saves[PLAIN_DCP] = PlainSaves(model, setup.folder / "plain-dcp")
        saved: dict[str, list[Any]] = {name: [] for name in saves}

        def candidate(name: str, lineage: PlainSaves | Lineage) -> Candidate:
            saving: list[Future[Any]] = []
            stall_secs: list[float] = []

            def before(_: int) -> None:
                lineage.modify()
                wait_for(device)

            def stall(_: int) -> None:
                began = time.monotonic()
                saving.append(lineage.save())
                stall_secs.append(time.monotonic() - began)

            def after(number: int) -> None:
                setup.say(f"{name}: {1e3 * stall_secs.pop():.1f} ms")
                began = time.monotonic()
                result = saving.pop().result()
                if number:
                    saved[name].append((result, time.monotonic() - began))

            return Candidate(stall, before, after)

        candidates = {name: candidate(name, lineage) for name, lineage in saves.items()}
        stalls = interleave(candidates, num_rounds, lambda number: setup.say(round_name(number, num_rounds)))
        for lineage in saves.values():
            lineage.close()
    return Report(
        title=f"stall of asynchronous saves on {device_name(device)}: {sizes}, {SHARE:.0%} of the rows modified",
        notes=(
            f"{num_rounds} rounds after a warm-up, all in turns; each time, random rows were marked as modified. A",
            "stall is the time until training may change the tables again: for this library, until dcp.async_save",
            "returns; for DCP's DefaultStager, which copies in a stream of its own to pinned memory that it keeps,",
            "until that copy is complete. The device was idle before.",
        ),
        figures=(
            *(
                Figure.over_rounds(
                    f"stall, {name}", [1e3 * took.secs for took in stalls[name]], "ms", at_most=MAX_STALL_MS
                )
                for name in CNR_SCHEMES
            ),
            *(
                Figure.over_rounds(
                    f"stall, {name}, shorter than plain DCP", ratios(stalls, PLAIN_DCP, name), "×", at_least=MIN_RATIO
                )
                for name in CNR_SCHEMES
            ),
        ),
        tables=(times_table("stall", stalls), _background(saved)),
    )


def _background(saved: dict[str, list[Any]]) -> Table:
    """Return what followed each stall: the time until the save was committed, and the bytes that were staged."""
    rows = []
    for name, results in saved.items():
        phases = [result.phases[0] for result, _ in results if hasattr(result, "phases")]
        staged = f"{max(phase.staged_bytes for phase in phases) / 2**20:,.0f}" if phases else "all"
        rows.append((name, staged, f"{median([secs for _, secs in results]):.2f}"))
    return Table(("after the stall", "staged MiB", "median s until committed"), tuple(rows))


BENCHMARK = Benchmark(
    run, "stall of asynchronous saves on a CUDA device, relative to DCP's stager in the background", is_long=True
)

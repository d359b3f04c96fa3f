"""Asynchronous saves to be timed, by this library and by DCP itself."""

import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import torchrec_cnr as cnr
from benchmarks.support.jobs.table_models import TableModel, TableSizes
from benchmarks.support.rounds import Candidate, Setup, Timings, interleave, round_name

SHARE = 0.26  # share of rows that are modified between two checkpoints
SCHEMES: Mapping[str, cnr.Scheme] = {
    "4 bits": cnr.Asymmetric(4),
    "4 bits adaptive": cnr.AdaptiveAsymmetric(4),
    "exact": cnr.NoQuantization(),
}
DCP = "plain DCP"
FULL, QUICK = TableSizes(2, 2_000_000, 64), TableSizes(2, 2_000, 64)


class Lineage:
    """Deltas of a model, saved asynchronously."""

    def __init__(self, model: TableModel, folder: Path, scheme: cnr.Scheme, share: float) -> None:
        self._model = model
        self._folder = folder
        self._share = share
        self._tracker = cnr.RowTracker(model.sharded)
        self._planner = cnr.CNRSavePlanner(self._tracker, policy=cnr.Consecutive())
        self._writer = cnr.CNRStorageWriter(folder, quantization=scheme, sync_files=False)
        self._num_saves = 0
        self._begin(dcp.save)  # type: ignore[attr-defined]  # torch does not mark it as exported

    def modify(self) -> None:
        """Mark rows as modified."""
        sizes = self._model.sizes
        for index in range(sizes.num_tables):
            num_rows = round(self._share * sizes.num_rows)
            rows = torch.randperm(sizes.num_rows, device=self._model.device)[:num_rows]
            self._tracker.mark(f"t{index}", rows)

    def save(self) -> "Future[Any]":
        """Begin a save."""
        future: Future[Any] = self._begin(dcp.async_save)  # type: ignore[attr-defined]
        return future

    def _begin(self, how: Callable[..., Any]) -> Any:
        self._num_saves += 1
        place = self._folder / str(self._num_saves)
        return how(self._model.state(), checkpoint_id=place, storage_writer=self._writer, planner=self._planner)

    def close(self) -> None:
        """Remove the saved checkpoints."""
        self._writer.close()
        self._tracker.close()
        shutil.rmtree(self._folder)


class DCPSaves:
    """Saves of the whole state by DCP's own writer."""

    def __init__(self, model: TableModel, folder: Path) -> None:
        self._model = model
        self._folder = folder

    def modify(self) -> None:
        """Remove the save before. No rows are marked, because DCP saves everything."""
        if self._folder.exists():
            shutil.rmtree(self._folder)

    def save(self) -> "Future[Any]":
        """Begin a save."""
        state = {f"t{index}": table for index, table in enumerate(self._model.tables())}
        state |= self._model.optimizer_tensors()
        writer = FileSystemWriter(self._folder, sync_files=False)
        future: Future[Any] = dcp.async_save(state, storage_writer=writer)  # type: ignore[assignment, attr-defined]
        return future

    def close(self) -> None:
        """Remove the saved checkpoints."""
        shutil.rmtree(self._folder)


def time_saves(saves: "Mapping[str, DCPSaves | Lineage]", setup: Setup, num_rounds: int, *, waits: bool) -> Timings:
    """Time each kind of save until it returns, or until it is committed if ``waits`` is true."""
    saving: dict[str, Future[Any]] = {}

    def candidate(name: str, lineage: DCPSaves | Lineage) -> Candidate:
        def before(number: int) -> None:
            lineage.modify()
            os.sync()

        def begin(number: int) -> None:
            saving[name] = lineage.save()
            if waits:
                saving[name].result()

        return Candidate(run=begin, before=before, after=lambda number: saving[name].result())

    candidates = {name: candidate(name, lineage) for name, lineage in saves.items()}
    what = "until committed" if waits else "stalls"
    return interleave(candidates, num_rounds, lambda number: setup.say(f"{what}: {round_name(number, num_rounds)}"))

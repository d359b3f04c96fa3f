"""Methods to save and restore a model of tables: this library, and the usual alternatives."""

import itertools
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec

import torchrec_cnr as cnr
from benchmarks.support.jobs.table_models import TableModel
from torchrec_cnr.quantization import Quantization

OURS = "torchrec_cnr"
TORCH_SAVE, DCP, DCP_ASYNC = "torch.save", "dcp.save", "dcp.async_save"
OWN_DELTAS = "ModelDeltaTracker, by hand"


class SaveMethod(Protocol):
    """A method. Each save replaces the one before, but not the checkpoint on which that one is based.

    Attributes:
        held_bytes: The part of a save's memory that remains allocated from one save to the next, in bytes.
    """

    held_bytes: int

    def begin(self) -> None:
        """Begin a save, and return when training may continue."""
        ...

    def finish(self) -> None:
        """Wait until the checkpoint is complete."""
        ...

    def restore(self) -> None:
        """Load the last checkpoint into the model."""
        ...

    def close(self) -> None:
        """Release the model."""
        ...


def save_methods(model: TableModel, folder: Path) -> Mapping[str, SaveMethod]:
    """Return all methods, after saving the checkpoints on which their deltas are based."""
    folder.mkdir(parents=True)
    return {
        OURS: Ours(model, folder / "ours"),
        TORCH_SAVE: Whole(model, folder / "whole.pt"),
        DCP: DCPSave(model, folder / "dcp"),
        DCP_ASYNC: DCPAsyncSave(model, folder / "dcp-async"),
        OWN_DELTAS: OwnDeltas(model, folder / "own"),
    }


def tensors(model: TableModel) -> dict[str, Tensor]:
    """Return the live tables and their optimizer state, as plain tensors."""
    found = {f"t{index}": table for index, table in enumerate(model.tables())}
    for name, values in model.sharded.fused_optimizer.state_dict()["state"].items():
        found |= {f"{name}.{key}": value.local_shards()[0].tensor for key, value in values.items()}
    return found


class Ours:
    """Deltas on a baseline, saved asynchronously; by default of 4 bits."""

    def __init__(self, model: TableModel, folder: Path, scheme: Quantization | None = None) -> None:
        self._model = model
        self._folder = folder
        self._tracker = cnr.RowTracker(model.sharded)
        self._planner = cnr.CNRSavePlanner(self._tracker, policy=cnr.Consecutive())
        self._writer = cnr.CNRStorageWriter(folder, quantization=scheme or cnr.Asymmetric(4), sync_files=False)
        self._numbers = itertools.count()
        self._saving: Future[Any] | None = None
        self.held_bytes = 0
        self.begin()
        self.finish()

    def begin(self) -> None:
        place = self._folder / str(next(self._numbers))
        self._saving = dcp.async_save(  # type: ignore[assignment, attr-defined]  # torch does not mark it as exported
            self._model.state(), checkpoint_id=place, storage_writer=self._writer, planner=self._planner
        )

    def finish(self) -> None:
        if self._saving is not None:
            self.held_bytes = self._saving.result().phases[0].staged_bytes

    def restore(self) -> None:
        reader = cnr.CNRStorageReader(cnr.latest(self._folder))
        self._model.load(reader, cnr.CNRLoadPlanner())

    def close(self) -> None:
        self._writer.close()
        self._tracker.close()


class Whole:
    """``torch.save`` of the whole state."""

    held_bytes = 0

    def __init__(self, model: TableModel, path: Path) -> None:
        self._tensors = tensors(model)
        self._path = path

    def begin(self) -> None:
        torch.save(self._tensors, self._path)

    def finish(self) -> None:
        """Do nothing: the checkpoint is already complete."""

    def restore(self) -> None:
        _copy(torch.load(self._path, mmap=True, weights_only=True), self._tensors)

    def close(self) -> None:
        self._tensors = {}


class DCPSave:
    """``dcp.save`` of the whole state by DCP's own writer."""

    held_bytes = 0

    def __init__(self, model: TableModel, folder: Path) -> None:
        self._model = model
        self._folder = folder

    def begin(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._model.save(FileSystemWriter(self._folder, sync_files=False))

    def finish(self) -> None:
        """Do nothing: the checkpoint is already complete."""

    def restore(self) -> None:
        self._model.load(FileSystemReader(self._folder))

    def close(self) -> None:
        """Do nothing: the method does not hold the model."""


class DCPAsyncSave:
    """``dcp.async_save`` of the whole state, as plain tensors, because DCP's stager cannot copy TorchRec's tensors."""

    held_bytes = 0

    def __init__(self, model: TableModel, folder: Path) -> None:
        self._tensors = tensors(model)
        self._folder = folder
        self._saving: Future[Any] | None = None

    def begin(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        writer = FileSystemWriter(self._folder, sync_files=False)
        self._saving = dcp.async_save(self._tensors, storage_writer=writer)  # type: ignore[assignment, attr-defined]

    def finish(self) -> None:
        if self._saving is not None:
            self._saving.result()

    def restore(self) -> None:
        dcp.load(self._tensors, storage_reader=FileSystemReader(self._folder))  # type: ignore[attr-defined]

    def close(self) -> None:
        self._tensors = {}


class OwnDeltas:
    """Deltas written by hand with TorchRec's tracker: modified rows and their optimizer state, on a full checkpoint.

    Only the newest delta is kept, so a restore is correct only for the first delta.
    """

    held_bytes = 0

    def __init__(self, model: TableModel, folder: Path) -> None:
        folder.mkdir()
        self._tensors = tensors(model)
        self._folder = folder
        self._tracker = ModelDeltaTrackerTrec(model.sharded)
        torch.save(self._tensors, folder / "whole.pt")
        self._tracker.clear()

    def begin(self) -> None:
        (ids,) = self._tracker.get_unique_ids().values()
        self._tracker.step()  # later lookups belong to the next delta
        rows = {name: value[ids] for name, value in self._tensors.items()}
        torch.save((ids, rows), self._folder / "delta.pt")

    def finish(self) -> None:
        """Do nothing: the checkpoint is already complete."""

    def restore(self) -> None:
        _copy(torch.load(self._folder / "whole.pt", mmap=True, weights_only=True), self._tensors)
        ids, rows = torch.load(self._folder / "delta.pt", mmap=True, weights_only=True)
        for name, values in rows.items():
            self._tensors[name][ids] = values

    def close(self) -> None:
        self._tracker.clear()
        self._tensors = {}


def _copy(values: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(values[name])

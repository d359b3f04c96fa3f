"""Puts our classes in place of DCP's storage and default planners, in the process that imports this module.

The tests were written for GPUs. Where there is none they run on CPUs: what moves a tensor to a GPU does nothing.
"""

import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint._fsspec_filesystem as fsspec_filesystem
from torch.distributed.checkpoint import _storage_utils, filesystem, state_dict_loader, state_dict_saver
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed._tensor import common_dtensor

import torchrec_cnr as cnr


class Writer(cnr.CNRStorageWriter):
    """Our writer, with the arguments of DCP's, which overwrites by default. Ours does not: the old checkpoint goes."""

    def __init__(self, path: Any, *_: Any, overwrite: bool = True, thread_count: int = 1, **__: Any) -> None:
        if overwrite and (not dist.is_initialized() or dist.get_rank() == 0):
            shutil.rmtree(path, ignore_errors=True)
        if dist.is_initialized():
            dist.barrier()
        super().__init__(path, thread_count=thread_count, sync_files=False)


class Reader(cnr.CNRStorageReader):
    """Our reader, with the arguments of DCP's."""

    def __init__(self, path: Any, *_: Any, **__: Any) -> None:
        super().__init__(path)


class SavePlanner(cnr.CNRSavePlanner):
    """Our planner, with the arguments of DCP's."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class LoadPlanner(cnr.CNRLoadPlanner):
    """Our planner, with the arguments of DCP's."""

    def __init__(self, *_: Any, allow_partial_load: bool = False, **__: Any) -> None:
        super().__init__(allow_partial_load=allow_partial_load)


def _same(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _without_gpus(*_: Any) -> Callable[[Any], Any]:
    return _same


for module in (dcp, filesystem, _storage_utils):
    module.FileSystemWriter, module.FileSystemReader = Writer, Reader  # type: ignore[misc,assignment] # on purpose
fsspec_filesystem.FsspecWriter, fsspec_filesystem.FsspecReader = Writer, Reader  # type: ignore[misc,assignment]
for module in (dcp, state_dict_saver):
    module.DefaultSavePlanner = SavePlanner  # type: ignore[misc,attr-defined]
for module in (dcp, state_dict_loader):
    module.DefaultLoadPlanner = LoadPlanner  # type: ignore[misc,attr-defined]
if not torch.cuda.is_available():
    for module in (common_distributed, common_dtensor):
        module.skip_if_lt_x_gpu = _without_gpus
    common_distributed.requires_nccl = _without_gpus
    torch.nn.Module.cuda = torch.Tensor.cuda = _same  # type: ignore[method-assign,assignment]
    torch.cuda.set_device = _same  # type: ignore[assignment]

"""Installing the simulation: names in modules of the library, of DCP and of tenacity stand for what ``virtual`` has.

Outside of tasks, all of them are what they were.
"""

import concurrent.futures
import functools
import importlib
import os
import pickle
import pkgutil
import random
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

from torch.distributed.checkpoint import logger

import torchrec_cnr
from tests.simulator.engine import collectives, disk_calls, virtual
from tests.simulator.engine.scheduler import this_task
from tests.simulator.engine.virtual import Lock, threads_module
from torchrec_cnr import sharding
from torchrec_cnr.format import safe_pickle


def _closures(name: str) -> Iterator[Any]:
    """Where the dataclasses of a module keep what makes their locks and events."""
    for found in vars(sys.modules[name]).values():
        if isinstance(found, type) and is_dataclass(found) and found.__module__ == name:
            for cell in getattr(found.__init__, "__closure__", None) or ():
                if cell.cell_contents in (threading.Lock, threading.RLock, threading.Event, threading.Condition):
                    yield cell


class _OwnOfProcess:
    """Stands for an object that a process has one of."""

    def __init__(self, name: str, real: Any) -> None:
        self._name, self._real = name, real

    def __getattr__(self, name: str) -> Any:
        task = this_task()
        if task is None:
            return getattr(self._real, name)
        own = task.process.own
        if self._name not in own:
            own[self._name] = type(self._real)()
        return getattr(own[self._name], name)


def of_process(real: object) -> "_OwnOfProcess | None":
    """What stands for an object that a process has one of; None if it is shared."""
    for module, attribute in _ONE_A_PROCESS:
        found = getattr(sys.modules[module], attribute)
        if isinstance(found, _OwnOfProcess) and found._real is real:
            return found
    return None


class _Numbers:
    """Stands for an iterator of numbers that a process has one of."""

    def __next__(self) -> int:
        task = this_task()
        assert task is not None
        own = task.process.own
        own["numbers"] = number = own.get("numbers", -1) + 1
        return int(number)


_NOT_THERE = object()
_really_replicated = sharding.is_replicated
_LEFT_OUT = (
    "torchrec_cnr.kernels",
    "torchrec_cnr.kafka",
    "torchrec_cnr.testing",
    "torchrec_cnr.cli",
    "torchrec_cnr.storage.obstore_s3",
)
_ONE_A_PROCESS = (
    ("torchrec_cnr.storage.fences", "_job"),
    ("torchrec_cnr.storage.fences", "_turns"),
    ("torchrec_cnr.storage.leases", "_renewals"),
    ("torchrec_cnr.storage.leases", "_clocks"),
    ("torchrec_cnr.saving.running_saves", "running_saves"),
    ("torchrec_cnr.tracking.tracked_tables", "trackers"),
    ("torchrec_cnr.lineage.recent", "recent_checkpoints"),
    ("torchrec_cnr.saving.encoding", "kernel_warm_ups"),
    ("torchrec_cnr.manager.open_roots", "open_roots"),
)
_PREFIXES = ("torchrec_cnr.", "torch.distributed.checkpoint.", "torch.distributed._shard.sharded_tensor.", "tenacity")


def _loaded_once(load_state: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Loads objects of the same bytes once: most are the same few, and archives take long."""
    pickled = functools.lru_cache(500)(lambda data: pickle.dumps(load_state(data)))
    return lambda data: pickle.loads(pickled(data))


def _is_replicated(value: Any) -> bool:
    """Shards of two-dimensional parallel models are DTensors, which tell it; simulated ones are not."""
    return getattr(value, "has_replicas", False) or _really_replicated(value)


def _import_all() -> None:
    """Have all modules there, which the library imports when it needs them."""
    for found in pkgutil.walk_packages(torchrec_cnr.__path__, "torchrec_cnr."):
        if not found.name.startswith(_LEFT_OUT):
            importlib.import_module(found.name)


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """What is replaced, by module and name."""
    _import_all()
    yield sys.modules["torchrec_cnr.saving.running_saves"], "id", virtual.frame_id
    yield sys.modules["torchrec_cnr.manager.ranks"], "_instances", _Numbers()
    yield logger, "_get_msg_dict", lambda *_, **__: {}
    yield from disk_calls.replacements()
    yield safe_pickle, "load_state", _loaded_once(safe_pickle.load_state)
    leases = sys.modules["torchrec_cnr.storage.leases"]
    real = vars(leases)["_machine"], vars(leases)["_started"]
    yield leases, "_machine", lambda: real[0]() if this_task() is None else (this_task().process.host, "pids")
    yield leases, "_started", lambda pid: real[1](pid) if this_task() is None else virtual.started(pid)
    by_identity: dict[int, Any] = {
        id(threading): threads_module,
        id(time): virtual.time_module,
        id(uuid): virtual.uuid_module,
        id(sys): virtual.sys_module,
        id(os): disk_calls.os_module,
        id(random): virtual.random_module,
        id(weakref): virtual.weakref_module,
        id(concurrent.futures.ThreadPoolExecutor): virtual.executor,
        id(logger._dcp_method_logger): virtual.method_logger,
        id(sharding.is_replicated): _is_replicated,
        **collectives.replacements(),
    }
    for module, attribute in _ONE_A_PROCESS:
        found = getattr(sys.modules[module], attribute)
        by_identity[id(found)] = _OwnOfProcess(attribute, found)
    lock_types = (type(threading.Lock()), type(threading.RLock()))
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(_PREFIXES) or name.startswith(_LEFT_OUT):
            continue
        for attribute, value in sorted(vars(module).items()):
            if id(value) in by_identity:
                yield module, attribute, by_identity[id(value)]
            elif isinstance(value, lock_types):
                yield module, attribute, Lock()
            elif value is threading.Lock:
                yield module, attribute, lambda: threads_module.Lock()


@contextmanager
def installed() -> Iterator[None]:
    """The library is simulated where it runs in tasks."""
    old: list[tuple[Any, str, Any]] = []
    cells: list[Any] = []
    factories: list[Any] = []
    new: Sequence[tuple[Any, str, Any]] = list(_replacements())
    try:
        for module, name, value in new:
            old.append((module, name, vars(module).get(name, _NOT_THERE)))
            setattr(module, name, value)
        cells = [cell for name in sorted(sys.modules) if name.startswith("torchrec_cnr.") for cell in _closures(name)]
        factories = [cell.cell_contents for cell in cells]
        for cell, factory in zip(cells, factories, strict=True):
            name = "Lock" if factory is threading.Lock else factory.__name__
            cell.cell_contents = lambda name=name: getattr(threads_module, name)()
        yield
    finally:
        for cell, factory in zip(cells, factories, strict=True):
            cell.cell_contents = factory
        for module, name, value in reversed(old):
            if value is _NOT_THERE:
                delattr(module, name)
            else:
                setattr(module, name, value)

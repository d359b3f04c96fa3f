"""Process groups of simulated ranks: the collectives that DCP and the library call, with their pickling.

Whoever sends does not wait, as in gloo, where what is sent is small; whoever receives waits until all that it needs is
there. If a rank is dead whose part is missing, or the group is broken, a ``RuntimeError`` says so.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.simulator.engine.scheduler import FindingError, Process, Task, this_task


@dataclass(eq=False, repr=False)
class Group:
    """A process group.

    Attributes:
        name: For the trace.
        processes: By rank.
        break_share: How often a collective fails on a rank.
    """

    name: str
    processes: Sequence[Process]
    break_share: float = 0.0
    is_broken: bool = False
    was_cut: bool = False  # by a fault, not by the end of a rank
    _device_types: tuple[torch.device, ...] = (torch.device("cpu"),)
    _parts: dict[int, dict[int, tuple[str, bytes]]] = field(default_factory=dict)
    _num_done: dict[int, int] = field(default_factory=dict)

    def exchange(self, what: str, value: Any, needs: Sequence[int]) -> list[Any]:
        """One collective of this rank: give its part, and take those of others; None for those not needed."""
        task = this_task()
        assert task is not None
        sim, rank = task.sim, self.rank_of(task)
        number = self._num_done.get(rank, 0)
        self._num_done[rank] = number + 1
        sim.point(f"{self.name}#{number} {what}")
        if self.break_share and sim.chance(self.break_share, f"{self.name}#{number} breaks on rank {rank}"):
            sim.tell(f"*** {self.name} breaks here")
            self.is_broken = self.was_cut = True
        if self.is_broken:
            raise RuntimeError(f"simulated: {self.name}: connection reset by peer")
        parts = self._parts.setdefault(number, {})
        for other, (others, _) in parts.items():
            if others != what:
                raise FindingError("ranks differ", f"{self.name}#{number}: {rank} calls {what}, {other} {others}")
        parts[rank] = (what, pickle.dumps(value))
        needed = [other for other in needs if other != rank]

        def is_decided() -> bool:
            return (
                all(other in parts for other in needed)
                or self.is_broken
                or any(self.processes[other].is_dead and other not in parts for other in needed)
            )

        sim.wait(f"{self.name}#{number} {what}", is_decided)
        if not all(other in parts for other in needed):
            self.is_broken = True
            raise RuntimeError(f"simulated: {self.name}: connection closed by peer")
        return [pickle.loads(parts[other][1]) if other in parts else None for other in range(len(self.processes))]

    def rank_of(self, task: Task) -> int:
        """A task's rank."""
        return self.processes.index(task.process)

    def size(self) -> int:
        """How many ranks there are."""
        return len(self.processes)


def _group(group: Any) -> Any:
    """The group that is meant; None if torch's own is."""
    task = this_task()
    if task is None or isinstance(group, Group):
        return group
    return task.process.own.get("world")


def _rank(group: Any = None) -> int:
    found, task = _group(group), this_task()
    if task is None:
        return dist.get_rank(group)
    return 0 if found is None else int(found.rank_of(task))


def _world_size(group: Any = None) -> int:
    found = _group(group)
    if this_task() is None:
        return dist.get_world_size(group)
    return 1 if found is None else int(found.size())


def _is_initialized() -> bool:
    return dist.is_initialized() if this_task() is None else _group(None) is not None


def _broadcast(object_list: list[Any], src: int = 0, group: Any = None, **_: Any) -> None:
    found = _group(group)
    object_list[:] = found.exchange(f"broadcast from {src}", object_list, [src])[src]


def _gather(obj: Any, object_gather_list: list[Any] | None = None, dst: int = 0, group: Any = None, **_: Any) -> None:
    ranks = _group(group)
    parts = ranks.exchange(f"gather to {dst}", obj, range(ranks.size()) if _rank(group) == dst else ())
    if object_gather_list is not None:
        object_gather_list[:] = parts


def _all_gather(object_list: list[Any], obj: Any, group: Any = None) -> None:
    ranks = _group(group)
    object_list[:] = ranks.exchange("all_gather", obj, range(ranks.size()))


def _scatter(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int = 0,
    group: Any = None,
    **_: Any,
) -> None:
    parts = _group(group).exchange(f"scatter from {src}", scatter_object_input_list, [src])
    scatter_object_output_list[0] = parts[src][_rank(group)]


def _barrier(group: Any = None, **_: Any) -> None:
    ranks = _group(group)
    ranks.exchange("barrier", None, range(ranks.size()))


class _Done:
    """The work of a collective that is over when it returns."""

    def wait(self) -> None:
        """Return at once."""


def all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> _Done | None:
    """As a real one, of sums and maxima; one in the background ends before it returns."""
    ranks = _group(group)
    parts = ranks.exchange(f"all_reduce of {tuple(tensor.shape)}", tensor, range(ranks.size()))
    stacked = torch.stack(parts)
    tensor.copy_(stacked.amax(dim=0) if op == dist.ReduceOp.MAX else stacked.sum(dim=0))
    return _Done() if async_op else None


def _new_group(*_: Any, **__: Any) -> Any:
    task = this_task()
    if task is None:
        return dist.new_group(*_, **__)
    own, world = task.process.own, _group(None)
    own["num_groups"] = number = own.get("num_groups", 0) + 1
    groups = world.processes[0].own.setdefault("groups", {})
    if number not in groups:
        groups[number] = Group(f"{world.name}.{number}", world.processes, world.break_share)
    task.sim.point("new group")
    return groups[number]


def _end_group(group: Any = None) -> None:
    task = this_task()
    if task is None:
        dist.destroy_process_group(group)
    else:
        task.sim.point(f"ends {group.name}")


class _Groups:
    @property
    def WORLD(self) -> Any:
        """The default group."""
        return _group(None)


class _Dist:
    """``torch.distributed``, within a task that of its rank."""

    _own: ClassVar[dict[str, Any]] = {
        "get_rank": _rank,
        "get_world_size": _world_size,
        "is_initialized": _is_initialized,
        "broadcast_object_list": _broadcast,
        "gather_object": _gather,
        "all_gather_object": _all_gather,
        "scatter_object_list": _scatter,
        "barrier": _barrier,
        "all_reduce": all_reduce,
        "new_group": _new_group,
        "destroy_process_group": _end_group,
        "get_global_rank": lambda group, rank: rank,
        "get_process_group_ranks": lambda group: list(range(_world_size(group))),
        "_rank_not_in_group": lambda group: False,
        "group": _Groups(),
        "_get_default_group": lambda: _group(None),
    }

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        own = self._own.get(name)
        return getattr(self._module, name) if own is None or this_task() is None else own


class Counters:
    """What ranks count up in the group's store."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, name: str, number: int) -> int:
        """Count up; returns the new number."""
        self._counts[name] = self._counts.get(name, 0) + number
        return self._counts[name]


def _default_group() -> Any:
    return distributed_c10d._get_default_group() if this_task() is None else _group(None)


def _default_store() -> Any:
    if this_task() is None:
        return distributed_c10d._get_default_store()
    return _group(None).processes[0].own.setdefault("counters", Counters())


def replacements() -> dict[int, Any]:
    """What stands in the place of what, by its identity."""
    return {
        id(dist): _Dist(dist),
        id(distributed_c10d): _Dist(distributed_c10d),
        id(distributed_c10d._get_default_group): _default_group,
        id(distributed_c10d._get_default_store): _default_store,
    }

"""Tables that a ``torch.optim`` optimizer modifies, rather than a fused kernel.

Their rows are marked when an optimizer steps, from the gradient that it used. That gradient may not come from the last
lookup, but from another rank, a regularizer, or an earlier batch. An optimizer that also modifies rows without a
gradient (by momentum or weight decay) marks all rows. The first step shows which optimizer it is, and so where its
state is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_cnr.sharding import memory_key
from torchrec_cnr.tracking.modified_rows import ModifiedRows
from torchrec_cnr.tracking.tracked_tables import TrackedShard


@dataclass(eq=False)
class OptimizerTableState:
    """The state of a table's rows, in the optimizer that last stepped it."""

    num_rows: int
    optimizer: ReferenceType[Optimizer] | None = None
    parameter: Tensor | None = None

    def __call__(self) -> Sequence[Tensor]:
        optimizer = self.optimizer() if self.optimizer else None
        if optimizer is None or self.parameter is None:
            return ()
        states = optimizer.state.get(self.parameter, {}).values()
        return [state for state in states if has_rows(state, self.num_rows)]


@dataclass(frozen=True, eq=False)
class OptimizerTable:
    """A table, and the state of its rows."""

    shard: TrackedShard
    state: OptimizerTableState


class OptimizerTables:
    """All tables of a model that ``torch.optim`` optimizers modify."""

    def __init__(self) -> None:
        self._tables: list[OptimizerTable] = []
        self._steps: WeakKeyDictionary[Optimizer, _Step] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._tables)

    def add(self, modified: ModifiedRows, weight: Tensor) -> TrackedShard:
        """Track a table."""
        state = OptimizerTableState(modified.box.num_rows)
        shard = TrackedShard(modified, weight, state, is_state_replaceable=True)
        self._tables.append(OptimizerTable(shard, state))
        return shard

    def watch(self) -> None:
        """Watch every optimizer's steps, until these tables are removed or nothing else refers to them."""
        _step_hooks.add(self)

    def remove(self) -> None:
        """Watch no further steps."""
        _step_hooks.discard(self)

    def stepping(self, optimizer: Optimizer) -> None:
        """Prepare for a step of an optimizer. Called before its own hooks."""
        self.stepped(optimizer)  # ends the previous step, if that raised
        if not isinstance(optimizer, KeyedOptimizer):  # it only calls other optimizers
            tables = self._tables_of(optimizer)
            if tables:
                self._steps[optimizer] = _Step(optimizer, tables)

    def stepped(self, optimizer: Optimizer) -> None:
        """End a step of an optimizer. Called after its own hooks."""
        step = self._steps.pop(optimizer, None)
        if step is not None:
            step.leave()

    def _tables_of(self, optimizer: Optimizer) -> list["_Stepped"]:
        """Return the tables of an optimizer, with group and parameter, which may be a storage of several tables.

        Parameters are matched by their memory, because modules replace their tensors.
        """
        by_memory = {memory_key(table.shard.weight): table for table in self._tables}
        by_storage: dict[int, list[OptimizerTable]] = {}
        for table in self._tables:
            by_storage.setdefault(table.shard.weight.untyped_storage().data_ptr(), []).append(table)
        stepped_tables: list[_Stepped] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                key = memory_key(parameter) if isinstance(parameter, Tensor) else None
                if key is not None:
                    in_storage = by_storage.get(parameter.untyped_storage().data_ptr(), [])
                    own_table = by_memory.get(key)
                    stepped_tables += (
                        (group, parameter, table) for table in (in_storage if own_table is None else [own_table])
                    )
        return stepped_tables


class _StepHooks:
    """The hooks of every optimizer's steps: one pair, for all tables that are watched.

    PyTorch iterates over its global hooks in each step, and Python's garbage collector may free a tracker meanwhile. So
    only :meth:`discard` removes the hooks, not the end of an object.
    """

    def __init__(self) -> None:
        self._watched: WeakSet[OptimizerTables] = WeakSet()
        self._handles: tuple[RemovableHandle, ...] = ()

    def add(self, tables: OptimizerTables) -> None:
        """Watch for tables."""
        self._watched.add(tables)
        if not self._handles:
            self._handles = (
                register_optimizer_step_pre_hook(self._stepping),
                register_optimizer_step_post_hook(self._stepped),
            )

    def discard(self, tables: OptimizerTables) -> None:
        """Watch for these tables no longer."""
        self._watched.discard(tables)
        if not self._watched:
            for handle in self._handles:
                handle.remove()
            self._handles = ()

    def _stepping(self, optimizer: Optimizer, *_: Any) -> None:
        for tables in list(self._watched):
            tables.stepping(optimizer)

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        for tables in list(self._watched):
            tables.stepped(optimizer)


_step_hooks = _StepHooks()

_Stepped = tuple[Mapping[str, Any], Tensor, OptimizerTable]


class _Step:
    """One step of an optimizer.

    Its writes are those between the last pre-hook and the first post-hook, without those of the closure. Hooks and
    closures may clamp rows, or zero the gradients from which rows are marked.
    """

    def __init__(self, optimizer: Optimizer, tables: Sequence[_Stepped]) -> None:
        self._tables = tables
        self._handles = (optimizer.register_step_pre_hook(self._begin), optimizer.register_step_post_hook(self._end))
        post_hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict
        post_hooks.move_to_end(self._handles[1].id, last=False)

    def leave(self) -> None:
        """Remove the hooks of this step."""
        for handle in self._handles:
            handle.remove()

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for _group, _parameter, table in self._tables:
            table.shard.check_writes()
        args = (*args[:1], *(self._watched(optimizer, value) for value in args[1:]))  # args[0] is the optimizer
        return args, {name: self._watched(optimizer, value) for name, value in kwargs.items()}

    def _watched(self, optimizer: Optimizer, argument: Any) -> Any:
        """Return the argument; a closure is wrapped so that its writes do not count as the optimizer's."""
        if not callable(argument):
            return argument

        @wraps(argument)
        def closure(*args: Any, **kwargs: Any) -> Any:
            result = argument(*args, **kwargs)
            for group, _parameter, table in self._tables:
                if _moves_rows_with_gradient_only(optimizer, group):  # others mark all rows in any case
                    table.shard.check_writes()
            return result

        return closure

    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        for group, parameter, table in self._tables:
            is_whole = memory_key(table.shard.weight) == memory_key(parameter)
            if is_whole:
                table.state.optimizer, table.state.parameter = ref(optimizer), parameter
            rows = table.shard.rows
            if not is_whole or not _moves_rows_with_gradient_only(optimizer, group):
                rows.mark_all()
            elif parameter.grad is not None and parameter.grad.is_sparse:
                rows.mark(parameter.grad._indices()[0])
            elif parameter.grad is not None:
                rows.mark_where((parameter.grad != 0).any(dim=1))
            table.shard.accept_writes()


def _moves_rows_with_gradient_only(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether an optimizer modifies only rows that have a gradient. Subclasses may behave differently."""
    if type(optimizer) is SparseAdam:
        return True
    # In rows without a gradient, Adagrad with eps=0 writes NaN, and maximize turns -0.0 into 0.0.
    is_plain = not any(group.get(name) for name in ("weight_decay", "momentum", "maximize")) and group.get("eps", 1)
    return is_plain and type(optimizer) in (SGD, Adagrad, RowWiseAdagrad)


def has_rows(state: Any, num_rows: int) -> bool:
    """Return whether optimizer state has the shape of a table's rows."""
    return isinstance(state, Tensor) and state.dim() > 0 and len(state) == num_rows

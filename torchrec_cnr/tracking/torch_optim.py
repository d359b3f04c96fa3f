"""Tables that a ``torch.optim`` optimizer modifies, rather than a fused kernel.

They are marked when an optimizer steps, from the gradient that it used: that may have come from elsewhere than a lookup
just made (another rank, a regularizer, an earlier batch). An optimizer that also moves rows without a gradient (by
momentum or weight decay) marks all rows. Which optimizer it is, and so where its state lies, shows at the first step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakMethod, finalize, ref

import torch
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
    """The state of a table's rows, in the optimizer that was last seen to step it."""

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
    """One table, and the state of its rows."""

    shard: TrackedShard
    state: OptimizerTableState


class OptimizerTables:
    """All such tables of a model."""

    def __init__(self) -> None:
        self._tables: list[OptimizerTable] = []

    def __len__(self) -> int:
        return len(self._tables)

    def add(self, modified: ModifiedRows, weight: Tensor) -> TrackedShard:
        """Track a table."""
        state = OptimizerTableState(modified.box.num_rows)
        shard = TrackedShard(modified, weight, state, is_state_replaceable=True)
        self._tables.append(OptimizerTable(shard, state))
        return shard

    def watch(self) -> tuple[RemovableHandle, RemovableHandle]:
        """Be told of every optimizer's steps, without this being what keeps the tables alive."""
        handles: tuple[RemovableHandle, RemovableHandle] = (
            register_optimizer_step_pre_hook(_weakly(self.stepping)),
            register_optimizer_step_post_hook(_weakly(self.stepped)),
        )
        for handle in handles:
            finalize(self, handle.remove)
        return handles

    def stepping(self, optimizer: Optimizer) -> None:
        """An optimizer is about to make a step: writes up to now are not its own."""
        for _, _, table in self._tables_of(optimizer):
            table.shard.check_writes()

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has made a step."""
        if isinstance(optimizer, KeyedOptimizer):  # has others make its steps
            return
        for group, parameter, table in self._tables_of(optimizer):
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

    def _tables_of(self, optimizer: Optimizer) -> list[tuple[Mapping[str, Any], Tensor, OptimizerTable]]:
        """The tables of an optimizer, with group and parameter, which may be a storage of several tables.

        Parameters are known by their memory: modules replace their tensors.
        """
        by_memory = {memory_key(table.shard.weight): table for table in self._tables}
        by_storage: dict[int, list[OptimizerTable]] = {}
        for table in self._tables:
            by_storage.setdefault(table.shard.weight.untyped_storage().data_ptr(), []).append(table)
        found: list[tuple[Mapping[str, Any], Tensor, OptimizerTable]] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                in_storage = by_storage.get(parameter.untyped_storage().data_ptr()) if _is_dense(parameter) else None
                if in_storage:
                    own = by_memory.get(memory_key(parameter))
                    found += ((group, parameter, table) for table in (in_storage if own is None else [own]))
        return found


def _moves_rows_with_gradient_only(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Subclasses are not trusted to."""
    if type(optimizer) is SparseAdam:
        return True
    # Adagrad without eps makes NaN of rows without a gradient, and maximize turns -0.0 of theirs into 0.0.
    is_plain = not any(group.get(name) for name in ("weight_decay", "momentum", "maximize")) and group.get("eps", 1)
    return is_plain and type(optimizer) in (SGD, Adagrad, RowWiseAdagrad)


def _is_dense(parameter: Any) -> bool:
    return isinstance(parameter, Tensor) and parameter.layout is torch.strided


def _weakly(method: Callable[[Optimizer], None]) -> Callable[..., None]:
    """A hook that does not keep the method's object alive."""
    weak = WeakMethod(method)

    def hook(optimizer: Optimizer, *_: Any) -> None:
        alive = weak()
        if alive is not None:
            alive(optimizer)

    return hook


def has_rows(state: Any, num_rows: int) -> bool:
    """Whether optimizer state has the shape of a table's rows."""
    return isinstance(state, Tensor) and state.dim() > 0 and len(state) == num_rows

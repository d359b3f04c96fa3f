"""Tables that a ``torch.optim`` optimizer modifies, rather than a fused kernel.

They are marked when an optimizer steps, from the gradient that it used: that may have come from elsewhere than a lookup
just made (another rank, a regularizer, an earlier batch). An optimizer that also moves rows without a gradient (by
momentum or weight decay) marks all rows. Which optimizer it is, and so where its state lies, shows at the first step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakMethod, finalize, ref

from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from torchrec_cnr.modified import ModifiedRows, TrackedShard
from torchrec_cnr.shards import memory_key


@dataclass(eq=False)
class SteppedTable:
    """One table, and the optimizer that was last seen to step it. Called, it gives the state of its rows."""

    rows: ModifiedRows
    weight: Tensor
    optimizer: ReferenceType[Optimizer] | None = None
    parameter: Tensor | None = None

    def __call__(self) -> Sequence[Tensor]:
        optimizer = self.optimizer() if self.optimizer else None
        if optimizer is None or self.parameter is None:
            return ()
        states = optimizer.state.get(self.parameter, {}).values()
        return [state for state in states if has_rows(state, self.rows.box.num_rows)]

    def mark_gradient(self, gradient: Tensor) -> None:
        """Mark the rows in which a gradient is not zero."""
        if gradient.is_sparse:
            self.rows.mark(gradient._indices()[0])
        else:
            self.rows.mark((gradient != 0).any(dim=1).nonzero().squeeze(1))


class SteppedTables:
    """All such tables of a model.

    Args:
        rows_with_gradient_only: Optimizers, besides PyTorch's, that leave rows without a gradient alone as long as they
            have neither momentum nor weight decay. Subclasses are not trusted to.
    """

    def __init__(self, rows_with_gradient_only: tuple[type[Optimizer], ...] = ()) -> None:
        self._tables: list[SteppedTable] = []
        self._rows_with_gradient_only = (SGD, Adagrad, *rows_with_gradient_only)

    def __len__(self) -> int:
        return len(self._tables)

    def add(self, rows: ModifiedRows, weight: Tensor) -> TrackedShard:
        """Track a table."""
        table = SteppedTable(rows, weight)
        self._tables.append(table)
        return TrackedShard(rows, weight, table, is_state_replaceable=True)

    def watch(self) -> RemovableHandle:
        """Be told of every optimizer's steps, without this being what keeps the tables alive."""
        method = WeakMethod(self.stepped)

        def hook(optimizer: Optimizer, *_: Any) -> None:
            stepped = method()
            if stepped is not None:
                stepped(optimizer)

        handle: RemovableHandle = register_optimizer_step_post_hook(hook)
        finalize(self, handle.remove)
        return handle

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has made a step. Parameters are known by their memory: modules replace their tensors."""
        by_memory = {memory_key(table.weight): table for table in self._tables}
        storages = {table.weight.untyped_storage().data_ptr() for table in self._tables}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not isinstance(parameter, Tensor) or parameter.untyped_storage().data_ptr() not in storages:
                    continue
                table = by_memory.get(memory_key(parameter))
                if table is None:
                    self._mark_all_in(parameter.untyped_storage().data_ptr())
                    continue
                table.optimizer, table.parameter = ref(optimizer), parameter
                if not self._moves_rows_with_gradient_only(optimizer, group):
                    table.rows.mark_all()
                elif parameter.grad is not None:
                    table.mark_gradient(parameter.grad)

    def _mark_all_in(self, storage: int) -> None:
        """Mark every row of all tables in one storage, because the optimizer has it as a single parameter."""
        for table in self._tables:
            if table.weight.untyped_storage().data_ptr() == storage:
                table.rows.mark_all()

    def _moves_rows_with_gradient_only(self, optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
        if type(optimizer) is SparseAdam:
            return True
        is_plain = not group.get("weight_decay") and not group.get("momentum")
        return is_plain and type(optimizer) in self._rows_with_gradient_only


def has_rows(state: Any, num_rows: int) -> bool:
    """Whether optimizer state has the shape of a table's rows."""
    return isinstance(state, Tensor) and state.dim() > 0 and len(state) == num_rows

"""TorchRec's 2-D parallel models on CPUs.

``DMPCollection`` asserts that its device is a GPU, but needs nothing that gloo lacks, other than an average: here the
assertion is left out of its code, ranks' devices have no numbers, and the average is a sum that is divided.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.remote_device import _remote_device
from torchrec.distributed import model_parallel
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.types import ModuleSharder, ShardingPlan


class CollectionOnCPUs(DMPCollection):
    """A 2-D parallel model whose ranks have no devices of their own."""

    def _remap_sharding_plan(self, plan: ShardingPlan, *args: Any, **kwargs: Any) -> None:
        super()._remap_sharding_plan(plan, *args, **kwargs)
        for table in (table for module in plan.plan.values() for table in module.values()):
            for shard in table.sharding_spec.shards if table.sharding_spec else ():
                shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")


def shard_in_two_dimensions(
    model: nn.Module, plan: ShardingPlan, sharders: Iterable[ModuleSharder[Any]], num_ranks: int
) -> DMPCollection:
    """Shard a model over groups of so many ranks each, by a plan for one group."""

    def average(tensors: Sequence[Tensor]) -> None:
        group = sharded._default_ctx.replica_pg
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
            tensor.div_(dist.get_world_size(group))

    with _without_assertion():
        sharded = CollectionOnCPUs(
            model,
            torch.device("cpu"),
            plan,
            dist.get_world_size(),
            num_ranks,
            dist.GroupMember.WORLD,
            sharders=list(sharders),
            custom_all_reduce=average,
        )
    return sharded


@contextmanager
def _without_assertion() -> Iterator[None]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(DMPCollection)))
    constructor = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    constructor.body = [node for node in constructor.body if not isinstance(node, ast.Assert)]
    names = dict(vars(model_parallel))
    exec(compile(tree, model_parallel.__file__, "exec"), names)
    original = DMPCollection.__init__.__code__
    DMPCollection.__init__.__code__ = names["DMPCollection"].__init__.__code__
    try:
        yield
    finally:
        DMPCollection.__init__.__code__ = original

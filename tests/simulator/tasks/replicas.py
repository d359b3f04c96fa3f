"""Two-dimensional parallel jobs: replicas of each shard, which are synchronised now and then.

The library's ``Replicas`` and what ``RowTracker`` does with it run as they are. Simulated is the model in which they
hook in: it has what they need of a ``DMPCollection``, whose sharding, kernels and devices are no part of the protocol.
"""

from collections.abc import Sequence
from types import SimpleNamespace

from torch import Tensor, nn
from torchrec.distributed.types import ShardingStrategy

from tests.simulator.engine import collectives
from tests.simulator.engine.scheduler import this_task
from torchrec_cnr.errors import UntrackedRowsError
from torchrec_cnr.tracking.hooks import Hooks
from torchrec_cnr.tracking.managed_collisions import IdMaps
from torchrec_cnr.tracking.plain_tables import Aliases
from torchrec_cnr.tracking.replicas import Replicas
from torchrec_cnr.tracking.row_tracker import RowTracker, _Tables
from torchrec_cnr.tracking.tracked_tables import TrackedRows, TrackedShard
from torchrec_cnr.tracking.untracked_rows import ReferenceDigests

_FAILED_CUTS = 0.1  # of the cuts on one rank


class Collection:
    """What the tracker needs of a ``DMPCollection``.

    Args:
        group: Of the replicas of this rank.
        tensors: What is averaged.
    """

    def __init__(self, group: collectives.Group, tensors: Sequence[Tensor]) -> None:
        self._default_ctx = SimpleNamespace(
            sharding_strategy=ShardingStrategy.DEFAULT, replica_pg=group, hash_zch_modules=[]
        )
        self._ctxs, self._submodule_ctxs = [self._default_ctx], []
        self._group, self._tensors = group, tensors

    def sync(self) -> None:
        """Average the values of all replicas."""
        for tensor in self._tensors:
            collectives.all_reduce(tensor, group=self._group)
            tensor.div_(self._group.size())


class _Digests(ReferenceDigests):
    """Finds sometimes, on one rank, that rows have changed which are not marked."""

    def check(self) -> None:
        task = this_task()
        if task is not None and task.sim.chance(_FAILED_CUTS, f"a cut fails in {task.process.name}"):
            raise UntrackedRowsError("simulated: rows have changed that are not marked")


class ReplicatedRows(RowTracker):
    """A tracker, without a model in which it would find its tables."""

    def __init__(self, shards: Sequence[TrackedShard], collection: Collection) -> None:
        TrackedRows.__init__(self, shards)
        self._is_closed, hooks = False, Hooks()
        self._tables = _Tables(
            self.shards,
            num_rows={},
            kernels=[],
            device_caches=[],
            hooks=hooks,
            id_maps=IdMaps(nn.Module()),
            id_map_modules=(),
            replicas=Replicas(collection, hooks, self.shards),  # type: ignore[arg-type]
            aliases=Aliases(nn.Module(), []),
            references=_Digests(()),
            verifies_untracked=False,
            has_tables_elsewhere=False,
        )

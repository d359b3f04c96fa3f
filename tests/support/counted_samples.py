"""A model that counts how often each sample shaped it: the perfect witness of what a resumed run trained.

The samples are the rows of one sharded table. Each lookup raises its row (SGD with a rate of one, on the negative sum),
by one over the number of ranks, so that after a pass over the data all rows are that, exactly.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.train_pipeline.experimental_pipelines import (
    TrainEvalHybridPipelineBase,
    TrainPipelineSparseDistT,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.streamable import Pipelineable

BATCH = 4


@dataclass
class Samples(Pipelineable):
    """A batch: the numbers of its samples."""

    features: KeyedJaggedTensor

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Self:
        """The batch of these samples."""
        return cls(KeyedJaggedTensor(["f"], torch.tensor(numbers), lengths=torch.ones(len(numbers), dtype=torch.int64)))

    def to(self, device: torch.device, non_blocking: bool = False) -> "Samples":
        """As TorchRec's pipelines want it."""
        return Samples(self.features.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        """As TorchRec's pipelines want it."""
        self.features.record_stream(stream)


class _Counting(nn.Module):
    def __init__(self, num_samples: int) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=num_samples, feature_names=["f"])
        self.ebc = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Samples) -> tuple[Tensor, Tensor]:
        looked_up = self.ebc(batch.features).values()
        # All ranks' gradients are averaged for what is not sharded, and summed for what is.
        return -looked_up.sum() + 0 * self.bias.sum(), looked_up.detach()


class CountedSamples:
    """The model, sharded by rows over all ranks; nothing was trained yet."""

    def __init__(self, num_samples: int) -> None:
        model = _Counting(num_samples)
        apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 1.0})
        world_size = dist.get_world_size()
        plan = construct_module_sharding_plan(
            model.ebc,
            {"t": row_wise()},
            local_size=world_size,
            world_size=world_size,
            device_type="cpu",
            sharder=EmbeddingBagCollectionSharder(),
        )
        self.model = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(dist.GroupMember.WORLD),
            device=torch.device("cpu"),
            plan=ShardingPlan({"ebc": plan}),
            sharders=[EmbeddingBagCollectionSharder()],
        )
        self.optimizer = torch.optim.SGD([self.model.module.bias], lr=1.0)
        for shard in self._shards():
            shard.zero_()

    def _shards(self) -> list[Tensor]:
        return [shard.tensor for shard in self.model.state_dict()["ebc.embedding_bags.t.weight"].local_shards()]

    def counts(self) -> list[int]:
        """How often each of this rank's samples was trained; gradients of ranks are averaged."""
        return [round(count) for shard in self._shards() for count in (shard[:, 0] * dist.get_world_size()).tolist()]

    def pipeline(self, name: str) -> Any:
        """One of `PIPELINES`."""
        return PIPELINES[name](self.model, self.optimizer, torch.device("cpu"))


def _without_a_device(pipeline: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    """Pipelines that ask CUDA for streams even when they run on the host."""

    def make(*args: Any) -> Any:
        torch.get_device_module = lambda *_: torch.cpu  # type: ignore[assignment]  # in a process of its own
        torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
        return pipeline(*args, **more)

    return make


PIPELINES: Mapping[str, Callable[..., Any]] = {
    "Base": train_pipelines.TrainPipelineBase,
    "SparseDist": train_pipelines.TrainPipelineSparseDist,
    "SparseDistLite": train_pipelines.TrainPipelineSparseDistLite,
    "FusedSparseDist": _without_a_device(train_pipelines.TrainPipelineFusedSparseDist),
    "SemiSync": _without_a_device(train_pipelines.TrainPipelineSemiSync, start_batch=3),
    "SparseDistT": TrainPipelineSparseDistT,
    "TrainEvalHybrid": TrainEvalHybridPipelineBase,
    "PT2": train_pipelines.TrainPipelinePT2,
}


def batches_of(rank: int, world_size: int, num_samples: int, first: int = 0) -> Iterator[Samples]:
    """A rank's batches of one pass, from one on."""
    numbers = list(range(rank, num_samples, world_size))
    for start in range(first * BATCH, len(numbers), BATCH):
        yield Samples.of(numbers[start : start + BATCH])


class NumberedSamples(Dataset[int]):
    """A rank's samples, for loaders."""

    def __init__(self, rank: int, world_size: int, num_samples: int) -> None:
        self._numbers = list(range(rank, num_samples, world_size))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> int:
        return self._numbers[index]

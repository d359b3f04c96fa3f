"""Models that follow a job, and checkpoints for them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_cnr as cnr
from tests.support import hand_made
from tests.support.hand_made import Content, Part
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.quantization import NoQuantization, Scheme


@contextmanager
def following(model: nn.Module, root: Any, **options: Any) -> Iterator[cnr.RowSubscriber]:
    """A subscriber without a thread."""
    subscriber = cnr.RowSubscriber(model, root, **options)
    yield subscriber
    subscriber.close()


TABLES = {f"model.ebc.embedding_bags.t{i}.weight": (rows, 8) for i, rows in enumerate((37, 24, 5))} | {
    "model.ec.embeddings.t0.weight": (29, 8)
}
DENSE = {"model.over.weight": (1, 32), "model.over.bias": (1,)}
SCHEMES: tuple[Scheme, ...] = (cnr.Asymmetric(4), cnr.Symmetric(3), NoQuantization(), cnr.KMeans(2))


def save_tables(path: Path, seed: int, scheme: Scheme, parent: Checkpoint | None, density: float) -> Checkpoint:
    """The tables of ``float_model`` with random rows, in two shards of rows each, and its dense layer."""
    generator = torch.Generator().manual_seed(seed)
    contents = {fqn: hand_made.whole(torch.randn(size, generator=generator)) for fqn, size in DENSE.items()}
    for fqn, (num_rows, num_cols) in TABLES.items():
        cut = int(torch.randint(1, num_rows, (), generator=generator))
        parts = []
        for first, stop in ((0, cut), (cut, num_rows)):
            values = torch.randn(stop - first, num_cols, generator=generator)
            chosen = (torch.rand(len(values), generator=generator) < density).nonzero().squeeze(1).tolist()
            rows = None if parent is None else hand_made.mask_of(chosen, len(values))
            parts.append(Part(Box((first, 0), (len(values), num_cols)), values, rows, scheme))
        contents[fqn] = Content((num_rows, num_cols), tuple(parts), is_table=True)
    return hand_made.write(path, contents, parent=parent)


NUM_ROWS, DIM = 3000, 8


class Served(nn.Module):
    """Two tables whose rows all say which step they are of."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=NUM_ROWS, feature_names=[name])
            for name in ("a", "b")
        ]
        self.ebc = EmbeddingBagCollection(tables=tables)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """[rows, 2 * DIM]."""
        return torch.as_tensor(self.ebc(features).values())


def all_rows() -> KeyedJaggedTensor:
    ids = torch.arange(NUM_ROWS).repeat(2)
    return KeyedJaggedTensor.from_lengths_sync(["a", "b"], ids, torch.ones(2 * NUM_ROWS, dtype=torch.int64))


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)

"""Rows to quantize, from four distributions and from tables that were trained on clicks."""

import csv
import gzip
from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.support.data.clicks import CLICKS

NUM_CLICKS = 200_000
BATCH_CLICKS = 4096
NUM_EPOCHS = 2
STD = 0.05


def drawn_rows(kind: str, num_rows: int, num_cols: int, seed: int = 0) -> Tensor:
    """Draw rows from one of ``DISTRIBUTIONS``, float32 [num_rows, num_cols]."""
    return torch.from_numpy(DISTRIBUTIONS[kind](np.random.default_rng(seed), (num_rows, num_cols)).astype(np.float32))


DISTRIBUTIONS: Mapping[str, Callable[[np.random.Generator, tuple[int, int]], NDArray[np.float64]]] = {
    "gaussian": lambda random, size: random.normal(0, STD, size),
    "uniform": lambda random, size: random.uniform(-STD, STD, size),
    "laplace": lambda random, size: random.laplace(0, STD, size),
    "t4": lambda random, size: random.standard_t(4, size) * STD,
}


def trained_rows(num_rows: int, num_cols: int) -> Tensor:
    """Return rows of two trained tables, float32 [num_rows, num_cols], half of them readers and half articles.

    The rows are drawn from those that training modified. If these are too few, some rows occur twice.
    """
    tables = _trained_tables(num_cols)
    generator = torch.Generator().manual_seed(0)
    halves = [table[torch.randint(len(table), (num_rows // 2 + 1,), generator=generator)] for table in tables]
    return torch.cat(halves)[torch.randperm(2 * (num_rows // 2 + 1), generator=generator)[:num_rows]]


@cache
def _trained_tables(num_cols: int) -> tuple[Tensor, Tensor]:
    """Train tables that factorise the clicks, by Adagrad, and return the modified rows of readers and articles."""
    torch.manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns unless this is set explicitly
    pairs = _clicks()
    num_readers, num_articles = (int(ids.max()) + 1 for ids in pairs.T)
    readers, articles = (nn.Embedding(num, num_cols, sparse=True) for num in (num_readers, num_articles))
    for table in (readers, articles):
        nn.init.uniform_(table.weight, -(table.num_embeddings**-0.5), table.num_embeddings**-0.5)
    optimizer = torch.optim.Adagrad([readers.weight, articles.weight], lr=0.05)
    for _ in range(NUM_EPOCHS):
        for batch in pairs.split(BATCH_CLICKS):
            others = batch[torch.randperm(len(batch)), 1]  # clicks of other readers are the negative samples
            clicked = (readers(batch[:, 0]) * articles(batch[:, 1])).sum(1)
            passed = (readers(batch[:, 0]) * articles(others)).sum(1)
            loss = nn.functional.softplus(-clicked).mean() + nn.functional.softplus(passed).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return readers.weight.detach()[pairs[:, 0].unique()], articles.weight.detach()[pairs[:, 1].unique()]


@cache
def _clicks() -> Tensor:
    """Return reader and article of each click, int64 [NUM_CLICKS, 2]."""
    if CLICKS.exists():
        with gzip.open(CLICKS, "rt", newline="") as file:
            rows = csv.reader(file)
            next(rows)
            found = [(int(row[0]), int(row[2])) for row, _ in zip(rows, range(NUM_CLICKS), strict=False)]
        return torch.tensor(found)
    random = np.random.default_rng(0)
    ranks = [1 / np.arange(1, num + 1) ** skew for num, skew in ((100_000, 0.7), (40_000, 1.05))]
    columns = [random.choice(len(weights), NUM_CLICKS, p=weights / weights.sum()) for weights in ranks]
    return torch.from_numpy(np.column_stack(columns))

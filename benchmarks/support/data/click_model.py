"""Small models that the benchmarks of accuracy, movement and transforms train on clicks in time order.

They have the parts of DLRM: tables of readers, articles and context, a dense part for the time of the week, and a head
for the vectors of these. The heads are those of DLRM (products of the vectors), DCN-v2 (arXiv 2008.13535: two cross
layers), a multilayer perceptron, and matrix factorisation, which has nothing but the product of reader and article. It
is plain torch, because a run of it must take only seconds. Its tables have the
optimizer that TorchRec fuses into their backward, row-wise Adagrad. Each row has one sum of squared gradients,
``sum += mean(g**2)``, and moves by ``-rate * g / (sqrt(sum) + 1e-8)``.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from benchmarks.support.data.clicks import NUM_DENSE, Batch

TABLE_LEARNING_RATE = 0.05  # that of examples/dlrm_model.py
# The example's rate is 0.01. With it, runs that differ in the last bits of their rows end with a difference of a
# thousandth of log loss, which hides the effect of restores. With this rate the difference is ten times smaller, and
# the model is nearly as good.
DENSE_LEARNING_RATE = 0.003
ADAGRAD_EPSILON = 1e-8


Head = Literal["dot products", "DCN-v2", "MLP", "matrix factorisation"]
NUM_CROSS_LAYERS = 2


class ClickModel:
    """The model and its optimizers.

    Attributes:
        tables: The tables, float32 [num_rows, dim], for each of ``TABLES``; changed in place.
        state: The state of row-wise Adagrad, float32 [num_rows], for each table.
    """

    def __init__(self, num_rows: Sequence[int], dim: int, seed: int, head: Head = "dot products") -> None:
        torch.manual_seed(seed)
        self._head = head
        self.tables = [torch.empty(num, dim).uniform_(-(num**-0.5), num**-0.5) for num in num_rows]
        self.state = [torch.zeros(num) for num in num_rows]
        num_vectors = len(self.tables) + 1
        self._left, self._right = torch.triu_indices(num_vectors, num_vectors, 1)  # the pairs that are multiplied
        self._bottom = nn.Sequential(nn.Linear(NUM_DENSE, 32), nn.ReLU(), nn.Linear(32, dim), nn.ReLU())
        num_features = dim + len(self._left) if head == "dot products" else num_vectors * dim
        self._crosses = [
            nn.Linear(num_features, num_features) for _ in range(NUM_CROSS_LAYERS if head == "DCN-v2" else 0)
        ]
        self._top = nn.Sequential(
            nn.Linear(num_features, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )
        parts = [self._bottom, *self._crosses, self._top]
        self.dense = [parameter for part in parts for parameter in part.parameters()]
        self._optimizer = torch.optim.Adagrad(self.dense, lr=DENSE_LEARNING_RATE)

    def train(self, batch: Batch) -> float:
        """Train one step, and return the mean loss before it."""
        vectors = [
            table.index_select(0, lookup.rows).requires_grad_()
            for table, lookup in zip(self.tables, batch.lookups, strict=True)
        ]
        logits = self._logits(vectors, batch)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels(len(logits)))
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        for table, state, lookup, vector in zip(self.tables, self.state, batch.lookups, vectors, strict=True):
            if vector.grad is not None:  # matrix factorisation has no use for the context
                update_rows(table, state, lookup.rows, vector.grad)
        return float(loss.detach())

    @torch.no_grad()
    def predict(self, batch: Batch) -> Tensor:
        """Return the logits of n clicks and then of their partners, float32 [2 n]."""
        vectors = [table.index_select(0, lookup.rows) for table, lookup in zip(self.tables, batch.lookups, strict=True)]
        return self._logits(vectors, batch)

    def _logits(self, vectors: Sequence[Tensor], batch: Batch) -> Tensor:
        pooled = [
            nn.functional.embedding_bag(lookup.places, vector, mode="sum")
            for lookup, vector in zip(batch.lookups, vectors, strict=True)
        ]
        readers, articles, context = pooled
        num_clicks = len(readers)
        if self._head == "matrix factorisation":
            return (readers.repeat(2, 1) * articles).sum(1)
        dense = self._bottom(batch.dense)
        clicks = torch.stack([dense, readers, context], dim=1).repeat(2, 1, 1)
        together = torch.cat([clicks, articles[:, None]], dim=1)
        if self._head != "dot products":
            logits_of_all: Tensor = self._top(self._crossed(together.flatten(1))).squeeze(1)
            return logits_of_all
        products = (together.index_select(1, self._left) * together.index_select(1, self._right)).sum(2)
        logits: Tensor = self._top(torch.cat([clicks[:, 0], products], dim=1)).squeeze(1)
        assert len(logits) == 2 * num_clicks
        return logits

    def _crossed(self, values: Tensor) -> Tensor:
        """Return the features after the cross layers, if there are any."""
        first = values
        for cross in self._crosses:
            values = first * cross(values) + values
        return values


def update_rows(table: Tensor, state: Tensor, rows: Tensor, gradient: Tensor) -> None:
    """Update rows by a step of row-wise Adagrad.

    Args:
        table: The table, float32 [num_rows, dim]; changed in place.
        state: The sums of squared gradients, float32 [num_rows]; changed in place.
        rows: The numbers of the rows, int64 [n], all different.
        gradient: The gradients of these rows, float32 [n, dim].
    """
    sums = state[rows] + gradient.square().mean(dim=1)
    state[rows] = sums
    rates = TABLE_LEARNING_RATE / (sums.sqrt() + ADAGRAD_EPSILON)
    table[rows] = table[rows] - rates[:, None] * gradient


def labels(num_samples: int) -> Tensor:
    """Return the labels, float32 [num_samples]: 1 for the clicks in the first half, 0 for their partners."""
    return (torch.arange(num_samples) < num_samples // 2).float()

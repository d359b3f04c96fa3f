"""A training run that is restored some times on the way: what the restores did to its tables, and how well it predicts.

A restore puts into the tables, and into nothing else, what a load gives: rows as they are decoded. Only rows that were
modified since the restore before are encoded; the others were decoded before, and encoding what was decoded changes
nothing (docs/concepts/quantization.md). At the first restore these are all rows, as a baseline stores them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from benchmarks.support.data.click_model import ClickModel, labels
from benchmarks.support.data.clicks import Batch
from torchrec_cnr.quantization import Quantization
from torchrec_cnr.saving.encoding import sampled_rows

Decode = Callable[[Tensor, Tensor], Tensor]  # a table and int64 [n], numbers of its rows: their values, [n, dim]


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        log_loss: Mean on the clicks that follow those trained on, nats a sample.
        auc: Area under the ROC curve, on the same.
        loss_while_training: Mean of all batches, each before the step that it was for, nats a sample.
        error_sum: Over the restores, squared error of the tables over the squared values of the tables.
        stored_error_sum: The same over the squared values of the rows that were encoded, which is what a sample tells.
    """

    log_loss: float
    auc: float
    loss_while_training: float
    error_sum: float
    stored_error_sum: float


@dataclass
class Restores:
    """Restores of a model's tables, and what error they added up.

    Attributes:
        model: Its tables are written.
        decode: What a load gives for rows of a table; see :func:`decoded_rows`.
    """

    model: ClickModel
    decode: Decode
    error_sum: float = 0.0
    stored_error_sum: float = 0.0
    _modified: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._modified = [torch.ones(len(table), dtype=torch.bool) for table in self.model.tables]

    def mark(self, batch: Batch) -> None:
        """Note the rows that a step on this batch modifies."""
        for modified, lookup in zip(self._modified, batch.lookups, strict=True):
            modified[lookup.rows] = True

    def restore(self) -> None:
        """Put decoded rows into the place of those that were modified."""
        error, stored = 0.0, 0.0
        whole = sum(float(table.norm().double().square()) for table in self.model.tables)
        for table, modified in zip(self.model.tables, self._modified, strict=True):
            rows = modified.nonzero().squeeze(1)
            values = table[rows]
            decoded = self.decode(table, rows)
            error += float((decoded - values).double().square().sum())
            stored += float(values.double().square().sum())
            table[rows] = decoded
            modified.zero_()
        self.error_sum += error / whole
        self.stored_error_sum += error / stored


def decoded_rows(table: Tensor, rows: Tensor, rule: Quantization) -> Tensor:
    """What a load gives for rows of a table that were saved by a rule.

    Args:
        table: float32 [num_rows, dim].
        rows: int64 [n], different ones.
        rule: A scheme, or what chooses one.

    Returns:
        float32 [n, dim].
    """
    scheme = rule.choose(lambda: sampled_rows(table, rows), 0)
    encoded = scheme.encode(table, rows)
    decoded = scheme.decode(encoded.codes, table.shape[1], table.dtype)
    decoded[encoded.exact] = table[rows[encoded.exact]]
    return decoded


def with_other_last_bits(table: Tensor, rows: Tensor) -> Tensor:
    """Rows with about every other value off by one in its last bit: what a change too small to matter does to a run.

    Args:
        table: float32 [num_rows, dim].
        rows: int64 [n].

    Returns:
        float32 [n, dim].
    """
    values = table[rows]
    is_off = torch.rand(values.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    return torch.where(is_off, values.nextafter(torch.tensor(torch.inf)), values)


def restore_steps(num_steps: int, num_restores: int) -> set[int]:
    """After which steps, counted from 1, a run of so many steps is restored, at even distances.

    Raises:
        ValueError: There are fewer steps than restores.
    """
    found = {round(number * num_steps / (num_restores + 1)) for number in range(1, num_restores + 1)}
    if len(found) < num_restores or 0 in found:
        raise ValueError(f"{num_restores} restores do not fit into {num_steps} steps")
    return found


def train(model: ClickModel, batches: Sequence[Batch], restores: Restores, num_restores: int) -> list[float]:
    """Train through all batches: the mean loss of each before its step, nats a sample."""
    steps = restore_steps(len(batches), num_restores)
    losses = []
    for step, batch in enumerate(batches, 1):
        losses.append(model.train(batch))
        restores.mark(batch)
        if step in steps:
            restores.restore()
    return losses


def judge(model: ClickModel, losses: Sequence[float], later: Sequence[Batch], restores: Restores) -> Outcome:
    """The outcome of a run.

    Args:
        model: As it is at the end.
        losses: Of its steps.
        later: Clicks that follow those trained on.
        restores: That it has been through.
    """
    logits = torch.cat([model.predict(batch) for batch in later]).double()
    clicked = torch.cat([labels(2 * len(batch.dense)) for batch in later]).double()
    return Outcome(
        log_loss=float(nn.functional.binary_cross_entropy_with_logits(logits, clicked)),
        auc=auc_of(logits, clicked),
        loss_while_training=float(np.mean(losses)),
        error_sum=restores.error_sum,
        stored_error_sum=restores.stored_error_sum,
    )


def auc_of(logits: Tensor, clicked: Tensor) -> float:
    """The area under the ROC curve, of logits [n] and of 1 or 0 [n] for each."""
    return float(roc_auc_score(clicked.numpy(), logits.numpy()))

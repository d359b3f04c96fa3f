"""A training run that is restored several times: the errors of its tables, and the quality of its predictions.

A restore replaces the rows of the tables, and nothing else, by decoded rows, as a load does. Only rows modified since
the restore before are encoded. The others were decoded already, and encoding decoded rows changes nothing
(docs/concepts/quantization.md). The first restore encodes all rows, as a baseline does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from benchmarks.support.data.click_model import ClickModel, labels
from benchmarks.support.data.clicks import Batch
from torchrec_cnr.quantization import Quantization, SchemeRules
from torchrec_cnr.saving.encoding import choose_scheme

Decode = Callable[[Tensor, Tensor], Tensor]  # from a table and row numbers, int64 [n], to their values, [n, dim]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        log_loss: Mean log loss on the clicks after those trained on, in nats per sample.
        auc: Area under the ROC curve, on the same clicks.
        loss_while_training: Mean loss of all batches, each before its step, in nats per sample.
        error_sum: Sum over the restores: squared error of the tables divided by the squared values of the tables.
        stored_error_sum: The same, divided by the squared values of the encoded rows, which a sample estimates.
    """

    log_loss: float
    auc: float
    loss_while_training: float
    error_sum: float
    stored_error_sum: float


@dataclass
class Restores:
    """Restores of a model's tables, which add up their errors.

    Attributes:
        model: The model, whose tables are written.
        decode: Returns the values that a load gives for rows of a table; see :func:`decoded_rows`.
    """

    model: ClickModel
    decode: Decode
    error_sum: float = 0.0
    stored_error_sum: float = 0.0
    _modified: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._modified = [torch.ones(len(table), dtype=torch.bool) for table in self.model.tables]

    def mark(self, batch: Batch) -> None:
        """Mark the rows that a step on this batch modifies."""
        for modified, lookup in zip(self._modified, batch.lookups, strict=True):
            modified[lookup.rows] = True

    def restore(self) -> None:
        """Replace the modified rows by decoded ones."""
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
    """Return the values that a load gives for rows of a table that were saved with a scheme or rule.

    Args:
        table: The table, float32 [num_rows, dim].
        rows: The numbers of the rows, int64 [n], all different.
        rule: A scheme, or a rule that chooses one.

    Returns:
        The decoded rows, float32 [n, dim].
    """
    scheme = choose_scheme(SchemeRules.of(rule), "table", True, table, rows, 0)
    encoded = scheme.encode(table, rows)
    decoded = scheme.decode(encoded.codes, table.shape[1], table.dtype)
    decoded[encoded.exact] = table[rows[encoded.exact]]
    return decoded


def with_other_last_bits(table: Tensor, rows: Tensor) -> Tensor:
    """Return rows with about every second value changed by one in its last bit, as a control for irrelevant changes.

    Args:
        table: The table, float32 [num_rows, dim].
        rows: The numbers of the rows, int64 [n].

    Returns:
        The changed rows, float32 [n, dim].
    """
    values = table[rows]
    is_off = torch.rand(values.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    return torch.where(is_off, values.nextafter(torch.tensor(torch.inf)), values)


def restore_steps(num_steps: int, num_restores: int) -> set[int]:
    """Return the steps, counted from 1, after which a run is restored, at even distances.

    Raises:
        ValueError: There are fewer steps than restores.
    """
    found = {round(number * num_steps / (num_restores + 1)) for number in range(1, num_restores + 1)}
    if len(found) < num_restores or 0 in found:
        raise ValueError(f"{num_restores} restores do not fit into {num_steps} steps")
    return found


def train(model: ClickModel, batches: Sequence[Batch], restores: Restores, num_restores: int) -> list[float]:
    """Train on all batches, and return the mean loss of each before its step, in nats per sample."""
    steps = restore_steps(len(batches), num_restores)
    losses = []
    for step, batch in enumerate(batches, 1):
        losses.append(model.train(batch))
        restores.mark(batch)
        if step in steps:
            restores.restore()
    return losses


def judge(model: ClickModel, losses: Sequence[float], later: Sequence[Batch], restores: Restores) -> Outcome:
    """Return the outcome of a run.

    Args:
        model: The model at the end.
        losses: The losses of its steps.
        later: Batches of the clicks after those trained on.
        restores: The restores of the run.
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
    """Return the area under the ROC curve, from logits [n] and labels 1 or 0 [n]."""
    return float(roc_auc_score(clicked.numpy(), logits.numpy()))

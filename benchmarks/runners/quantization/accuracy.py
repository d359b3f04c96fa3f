"""The loss of accuracy of a model by restores from quantized checkpoints, by bits and number of restores."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from itertools import product
from statistics import fmean, median
from typing import NamedTuple

import torch

import torchrec_cnr as cnr
from benchmarks.plots.accuracy import PLOT
from benchmarks.support.confidence_intervals import CONFIDENCE, Interval, num_seeds_for, relative_change
from benchmarks.support.data.click_model import ClickModel
from benchmarks.support.data.clicks import BATCH_CLICKS, Batch, Clicks, batches, read_clicks, trained_on
from benchmarks.support.jobs.restored_runs import (
    Decode,
    Outcome,
    Restores,
    decoded_rows,
    judge,
    train,
    with_other_last_bits,
)
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table, number
from benchmarks.support.rounds import Setup
from torchrec_cnr.quantization.uniform import BITS

DIM = 16
RESTORES = (1, 3, 10, 30, 100)
BAR = 0.01  # percent of the log loss, the change that the paper accepts
BUDGET = cnr.ByErrorBudget(0).budget
MIN_AUC = 0.6
CONTROL, CONTROL_RESTORES = "last bits", 30


class Cell(NamedTuple):
    """A kind of run: ``scheme`` is a number of bits, or ``CONTROL``."""

    scheme: str
    num_restores: int


@dataclass(frozen=True)
class _Sizes:
    """The sizes of the benchmark.

    Attributes:
        num_clicks: Number of clicks on which each run is trained.
        num_later: Number of the following clicks, on which it is evaluated.
        num_seeds: Number of seeds, each for the initial weights and the partners of clicks.
        restores: Numbers of restores of the runs that are restored.
    """

    num_clicks: int
    num_later: int
    num_seeds: int
    restores: tuple[int, ...] = RESTORES


FULL = _Sizes(300 * BATCH_CLICKS, 20 * BATCH_CLICKS, 5)
QUICK = _Sizes(12 * BATCH_CLICKS, 2 * BATCH_CLICKS, 2, restores=(1, 10))
ALL_CASES = _Sizes(1000 * BATCH_CLICKS, 20 * BATCH_CLICKS, 10)


@dataclass(frozen=True)
class Compared:
    """A comparison of a kind of run with bit-exact runs of the same seeds.

    Attributes:
        log_loss: Change on later clicks, in percent; above zero is worse.
        auc: Change on later clicks, in percent; below zero is worse.
        training: Change of the mean loss while training, in percent; above zero is worse.
        error_sum: Mean over seeds of ``Outcome.error_sum``.
        stored_error_sum: Mean over seeds of ``Outcome.stored_error_sum``.
    """

    log_loss: Interval
    auc: Interval
    training: Interval
    error_sum: float
    stored_error_sum: float


def run(setup: Setup) -> Report:
    """Train all runs, seed by seed, and compare them with runs that are not restored."""
    sizes = QUICK if setup.quick else ALL_CASES if setup.all_cases else FULL
    setup.say("reading clicks")
    clicks = read_clicks(sizes.num_clicks + sizes.num_later)
    cells = [Cell(CONTROL, min(CONTROL_RESTORES, sizes.restores[-1]))]
    cells += [Cell(str(bits), num) for bits, num in product(BITS, sizes.restores)]
    bases: list[Outcome] = []
    outcomes: dict[Cell, list[Outcome]] = {cell: [] for cell in cells}
    for seed in range(sizes.num_seeds):
        base, others = _outcomes(setup, clicks, sizes, seed, cells)
        bases.append(base)
        for cell, outcome in others.items():
            outcomes[cell].append(outcome)
    compared = {cell: compare(found, bases) for cell, found in outcomes.items()}
    return _report(sizes, bases, compared)


def _outcomes(
    setup: Setup, clicks: Clicks, sizes: _Sizes, seed: int, cells: Sequence[Cell]
) -> tuple[Outcome, dict[Cell, Outcome]]:
    """Return the outcomes of the bit-exact run and of all other runs of a seed."""
    trained = batches(clicks, 0, sizes.num_clicks, seed)
    later = batches(clicks, sizes.num_clicks, len(clicks), seed)
    place = f"seed {seed + 1} of {sizes.num_seeds}"
    setup.say(f"{place}: bit-exact")
    base, model = _run(clicks, trained, later, seed, _decode("exact"), 0)
    if seed == 0:
        setup.say(f"{place}: bit-exact, with {sizes.restores[-1]} restores")
        _, other = _run(clicks, trained, later, seed, _decode("exact"), sizes.restores[-1])
        check_same(model, other)
    others = {}
    for cell in cells:
        setup.say(f"{place}: {cell.scheme}{' bits' * cell.scheme.isdigit()}, restores: {cell.num_restores}")
        others[cell], _ = _run(clicks, trained, later, seed, _decode(cell.scheme), cell.num_restores)
    return base, others


def _run(
    clicks: Clicks, trained: Sequence[Batch], later: Sequence[Batch], seed: int, decode: Decode, num_restores: int
) -> tuple[Outcome, ClickModel]:
    model = ClickModel(clicks.num_rows(), DIM, seed)
    restores = Restores(model, decode)
    losses = train(model, trained, restores, num_restores)
    return judge(model, losses, later, restores), model


def _decode(scheme: str) -> Decode:
    """Return the function that a restore applies to rows, by the name of a cell's scheme, or ``exact``."""
    if scheme == CONTROL:
        return with_other_last_bits
    if scheme == "exact":
        return partial(decoded_rows, rule=cnr.NoQuantization())
    return partial(decoded_rows, rule=cnr.Asymmetric(8) if scheme == "8" else cnr.AdaptiveAsymmetric(int(scheme)))


def check_same(model: ClickModel, other: ClickModel) -> None:
    """Check that exact restores change nothing; otherwise, differences between runs would have no meaning.

    Raises:
        RuntimeError: The tables, their optimizer state or the dense parts of the models differ.
    """
    ours, theirs = ([*found.tables, *found.state, *found.dense] for found in (model, other))
    if not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
        raise RuntimeError("bit-exact restores changed the state of the model")


def compare(outcomes: Sequence[Outcome], bases: Sequence[Outcome]) -> Compared:
    """Compare runs with the bit-exact runs of the same seeds."""
    ours, theirs = (list(zip(*map(astuple, found), strict=True)) for found in (outcomes, bases))
    log_loss, auc, training = (relative_change(a, b) for a, b in zip(ours[:3], theirs[:3], strict=True))
    return Compared(log_loss, auc, training, fmean(ours[3]), fmean(ours[4]))


def _report(sizes: _Sizes, bases: Sequence[Outcome], compared: Mapping[Cell, Compared]) -> Report:
    auc, log_loss = fmean(base.auc for base in bases), fmean(base.log_loss for base in bases)
    training = fmean(base.loss_while_training for base in bases)
    quantized = {cell: found for cell, found in compared.items() if cell.scheme != CONTROL}
    measures = {
        "log loss": [found.log_loss for found in quantized.values()],
        "loss while training": [found.training for found in quantized.values()],
    }
    return Report(
        title=f"accuracy after restores, {sizes.num_clicks:,} {trained_on()}, tables of {DIM} columns",
        notes=(
            "A sample is a click, or the same reader and context with an article that was clicked shortly before.",
            f"Judged by the {sizes.num_later:,} clicks that follow, each with its partner, by the model at the end;",
            "and by the loss of all batches before they were trained on. Changes are per cent of the bit-exact run of",
            f"the same seed: mean of {sizes.num_seeds} seeds ± half of the {CONFIDENCE:.0%} interval (Student's t).",
            "A restore replaces the tables by what a load gives, at even distances in the run. Restored bit-exactly",
            f"{sizes.restores[-1]} times, tables, optimizer state and dense part ended bit-identical.",
            f"'{CONTROL}' has restores that change last bits only: what it shows is chance.",
            *_resolution(measures),
        ),
        figures=(
            Figure("AUC of the bit-exact runs", auc, "", at_least=MIN_AUC),
            Figure("their log loss; chance gives 0.693", log_loss, "nats"),
            Figure("their loss while training", training, "nats"),
            *(
                Figure(f"half of the interval of the {name}, median of the cells", _half(found) / BAR, "× the bar")
                for name, found in measures.items()
            ),
        ),
        tables=(_cells_table(compared), _rule_table(quantized)),
        plot={
            "cells": [
                {"bits": cell.scheme, "restores": cell.num_restores} | asdict(found)
                for cell, found in quantized.items()
            ]
        },
    )


def _half(intervals: Sequence[Interval]) -> float:
    return median(interval.half_width for interval in intervals)


def _resolution(measures: Mapping[str, Sequence[Interval]]) -> list[str]:
    """Return a note about the changes that the confidence intervals can distinguish from the accepted change."""
    lines = []
    for name, intervals in measures.items():
        within = sum(interval.high < BAR for interval in intervals)
        above = sum(interval.low > BAR for interval in intervals)
        needed = num_seeds_for(BAR, median(interval.spread for interval in intervals))
        lines += [
            f"Bar of {BAR} % of {name}: {above} of {len(intervals)} cells are above it, {within} below,",
            f"{len(intervals) - above - within} cannot be told: half of an interval is {number(_half(intervals))} %"
            f" (median). For {BAR} % it takes about {needed:,} seeds.",
        ]
    return lines


def _cells_table(compared: Mapping[Cell, Compared]) -> Table:
    columns = ("bits", "restores", "log loss, %", "AUC, %", "loss while training, %", "error sum", "of stored rows")
    return Table(columns, tuple(_cells_row(cell, found) for cell, found in compared.items()))


def _cells_row(cell: Cell, found: Compared) -> tuple[str, ...]:
    changes = (found.log_loss, found.auc, found.training)
    cells = (f"{change.mean:+.3f} ± {change.half_width:.3f}" for change in changes)
    return cell.scheme, str(cell.num_restores), *cells, f"{found.error_sum:.2g}", f"{found.stored_error_sum:.2g}"


def _rule_table(compared: Mapping[Cell, Compared]) -> Table:
    """Return a table that shows whether the error budget separates the kinds of runs with and without a loss."""
    rows = []
    for measure, kind in product(("log_loss", "training"), ("error_sum", "stored_error_sum")):
        losing = [getattr(found, kind) for found in compared.values() if getattr(found, measure).low > 0]
        others = [getattr(found, kind) for found in compared.values() if getattr(found, measure).low <= 0]
        rows.append(
            (
                "log loss" if measure == "log_loss" else "loss while training",
                "tables" if kind == "error_sum" else "stored rows",
                *(str(sum(value <= BUDGET for value in values)) for values in (losing, others)),
                *(str(sum(value > BUDGET for value in values)) for values in (losing, others)),
                f"{min(losing):.2g}" if losing else "–",
                f"{max(others):.2g}" if others else "–",
            )
        )
    columns = (
        "cells with a loss (interval above 0) in",
        "error sum of",
        f"<= {BUDGET}: with",
        "without",
        f"> {BUDGET}: with",
        "without",
        "least sum with",
        "greatest without",
    )
    return Table(columns, tuple(rows))


BENCHMARK = Benchmark(
    run, "change of log loss and AUC by restores from quantized checkpoints, for a small model", is_long=True, plot=PLOT
)

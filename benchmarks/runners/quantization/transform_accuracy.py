"""Accuracy after restores of transform-coded rows, beside that of uniform codes of the same mean error.

Each model is trained on clicks in time order, with several seeds. During the run its tables are replaced by what a load
returns, as in ``accuracy``. Runs are compared with the bit-exact run of the same seed, and with one another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torchrec_cnr as cnr
from benchmarks.support.confidence_intervals import CONFIDENCE, Interval, relative_change
from benchmarks.support.data.click_model import ClickModel, Head
from benchmarks.support.data.clicks import BATCH_CLICKS, Batch, batches, read_clicks, trained_on
from benchmarks.support.jobs.restored_runs import Outcome, Restores, decoded_rows, judge, train
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Setup
from torchrec_cnr.quantization import Quantization

DIM = 64
HEADS: tuple[Head, ...] = ("dot products", "DCN-v2", "MLP")
MEASURES = {"log_loss": "log loss", "loss_while_training": "loss while training", "auc": "AUC"}
UNIFORM, TRANSFORMED, EXACT = "4 bits", "transformed, error of 4 bits", "bit-exact"
RULES: Mapping[str, Quantization] = {
    UNIFORM: cnr.AdaptiveAsymmetric(4),
    TRANSFORMED: cnr.TransformCoded(cnr.AdaptiveAsymmetric(4)),
}


@dataclass(frozen=True)
class _Sizes:
    """The numbers of clicks to train on and to judge by, of seeds, and of restores."""

    num_clicks: int
    num_later: int
    num_seeds: int
    restores: tuple[int, ...]


FULL = _Sizes(300 * BATCH_CLICKS, 20 * BATCH_CLICKS, 5, (1, 3, 10, 30, 100))
QUICK = _Sizes(12 * BATCH_CLICKS, 2 * BATCH_CLICKS, 2, (1, 3))
ALL_CASES = _Sizes(1000 * BATCH_CLICKS, 20 * BATCH_CLICKS, 10, (1, 3, 10, 30, 100))

Runs = dict[tuple[Head, str, int], list[Outcome]]  # by head, rule and number of restores; one for each seed


def run(setup: Setup) -> Report:
    """Train all runs."""
    sizes = QUICK if setup.quick else ALL_CASES if setup.all_cases else FULL
    clicks = read_clicks(sizes.num_clicks + sizes.num_later)
    runs: Runs = {}
    for seed in range(sizes.num_seeds):
        trained = batches(clicks, 0, sizes.num_clicks, seed)
        later = batches(clicks, sizes.num_clicks, len(clicks), seed)
        for head in HEADS:
            setup.say(f"seed {seed + 1} of {sizes.num_seeds}: {head}")
            for name, num_restores in [(EXACT, 0), *((name, num) for name in RULES for num in sizes.restores)]:
                rule = RULES.get(name, cnr.NoQuantization())
                model = ClickModel(clicks.num_rows(), DIM, seed, head)
                outcome = _outcome(trained, later, model, rule, num_restores)
                runs.setdefault((head, name, num_restores), []).append(outcome)
    return _report(runs, sizes)


def _outcome(
    trained: Sequence[Batch], later: Sequence[Batch], model: ClickModel, rule: Quantization, num_restores: int
) -> Outcome:
    restores = Restores(model, partial(decoded_rows, rule=rule))
    losses = train(model, trained, restores, num_restores)
    return judge(model, losses, later, restores)


def _report(runs: Runs, sizes: _Sizes) -> Report:
    figures, lines, differences = [], [], []
    for head in HEADS:
        exact = runs[head, EXACT, 0]
        for num in sizes.restores:
            uniform, transformed = runs[head, UNIFORM, num], runs[head, TRANSFORMED, num]
            for name, found in ((UNIFORM, uniform), (TRANSFORMED, transformed)):
                changes = (_change(found, exact, what) for what in MEASURES)
                error = fmean(outcome.error_sum for outcome in found)
                lines.append((head, name, f"{num}", *map(_text, changes), f"{error:.4f}"))
            between = {what: _change(transformed, uniform, what) for what in MEASURES}
            differences.append((head, f"{num}", *map(_text, between.values())))
            for what in ("log_loss", "auc"):
                label = f"{head}, {num} restores: {MEASURES[what]}, transformed to 4 bits"
                interval = between[what]
                mean, low, high = (1 + percents / 100 for percents in (interval.mean, interval.low, interval.high))
                figures.append(Figure(label, mean, "×", low, high))
    return Report(
        title=f"accuracy after restores, {sizes.num_clicks:,} {trained_on()}, tables of {DIM} columns",
        notes=(
            f"Changes in per cent of the bit-exact run of the same seed: mean of {sizes.num_seeds} seeds ± half of the",
            f"{CONFIDENCE:.0%} interval (Student's t). The second table and the figures compare the rules by seed:",
            "a smaller loss and a larger AUC are better. Squared errors: of all restores, of the squares of tables.",
        ),
        figures=tuple(figures),
        tables=(
            Table(("model", "rule", "restores", *MEASURES.values(), "squared errors"), tuple(lines)),
            Table(("transformed, of 4 bits", "restores", *MEASURES.values()), tuple(differences)),
        ),
    )


def _change(outcomes: Sequence[Outcome], bases: Sequence[Outcome], what: str) -> Interval:
    return relative_change([getattr(each, what) for each in outcomes], [getattr(each, what) for each in bases])


def _text(interval: Interval) -> str:
    return f"{interval.mean:+.3f} ± {interval.half_width:.3f} %"


BENCHMARK = Benchmark(run, "accuracy after restores of transform-coded rows, of three models", is_long=True)

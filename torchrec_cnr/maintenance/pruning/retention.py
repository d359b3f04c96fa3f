"""Retention rules: they decide which checkpoints are wanted, and why.

A checkpoint is kept if any rule selects it. What such a checkpoint needs is kept, too; ``kept`` finds that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchrec_cnr.arguments import check_count, check_type
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.human_text import given_text, instant, name_text
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.maintenance.catalog import Entry


@dataclass(frozen=True)
class Best:
    """A retention rule: keep the checkpoints with the best values of a metric. Those without a value are not kept.

    Attributes:
        metric: The name of the metric; see :func:`write_metrics`.
        n: How many checkpoints to keep. If two have the same value, the newer one is better.
        largest: Whether the largest value is the best. If False, the smallest is.

    Raises:
        ConfigurationError: ``n`` is less than 1, or the name is empty.

    Examples:
        >>> cnr.write_metrics("run/step-1", {"loss": 0.31})
        >>> plan = cnr.plan_prune("run", cnr.Keep(last=1, best=cnr.Best("loss", largest=False)))
        >>> plan.stays["step-1"]
        ('best by loss (0.31)',)
    """

    metric: str
    n: int = 1
    largest: bool = True

    def __post_init__(self) -> None:
        check_type("metric", self.metric, str, "the name of a metric")
        if not self.metric:
            raise ConfigurationError(f"'metric' must be the name of a metric (got {self.metric!r})")
        check_count("n", self.n, least=1)
        check_type("largest", self.largest, bool, "True or False")

    def __repr__(self) -> str:
        return given_text(self)

    def __str__(self) -> str:
        rank_text = "the best" if self.n == 1 else f"the best {self.n}"
        return f"{rank_text} by {name_text(self.metric)} ({'largest' if self.largest else 'smallest'})"

    def choose(self, candidates: Sequence[tuple[Entry, Checkpoint]]) -> dict[str, str]:
        """Return why each of the best checkpoints is wanted, by name. ``candidates`` are in order, newest first."""
        metrics_and_names = [
            (entry.metrics[self.metric], entry.name) for entry, _ in candidates if self.metric in entry.metrics
        ]
        best = sorted(metrics_and_names, key=lambda item: -item[0] if self.largest else item[0])[: self.n]
        rank_text = "best" if self.n == 1 else f"one of the best {self.n}"
        return {name: f"{rank_text} by {name_text(self.metric)} ({value:.6g})" for value, name in best}


@dataclass(frozen=True)
class Keep:
    """Retention rules. A checkpoint is kept if any of them selects it.

    A checkpoint that a job has abandoned, by restoring an older one, is only kept for its metric or its tag.

    Attributes:
        last: Keep this many of the newest checkpoints, by time of commit.
        daily: Keep the newest checkpoint of each of this many UTC days, or of ``"all"`` days. Days without a checkpoint
            do not count, and the newest days come first.
        best: Keep the best checkpoints by a metric.
        tagged: Whether to keep the checkpoints that have a tag.

    Raises:
        ConfigurationError: A number is negative, or the rules would keep nothing.

    Examples:
        >>> keep = cnr.Keep(last=2, daily=7, best=cnr.Best("auc"))
        >>> print(keep)
        the newest 2, the newest of each of the last 7 days that have one, the best by auc (largest), those with a tag
        >>> cnr.plan_prune("run", keep).is_empty
        True
    """

    last: int = 3
    daily: int | Literal["all"] = 0
    best: Best | None = None
    tagged: bool = True

    def __post_init__(self) -> None:
        check_count("last", self.last)
        if self.daily != "all":
            check_count("daily", self.daily)
        if self.best is not None:
            check_type("best", self.best, Best, "a Best, such as Best('auc')")
        check_type("tagged", self.tagged, bool, "True or False")
        if not (self.last or self.daily or self.best or self.tagged):
            raise ConfigurationError("nothing would be kept; pass 'last', 'daily', 'best' or 'tagged'")

    def __repr__(self) -> str:
        return given_text(self, "last")

    def __str__(self) -> str:
        days = "each day" if self.daily == "all" else f"each of the last {self.daily} days that have one"
        rules = {
            "the newest" if self.last == 1 else f"the newest {self.last}": self.last,
            f"the newest of {days}": self.daily,
            str(self.best): self.best,
            "those with a tag": self.tagged,
        }
        return ", ".join(text for text, is_given in rules.items() if is_given)

    def choose(self, candidates: Sequence[tuple[Entry, Checkpoint]]) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the wanted checkpoints, each with the reasons why it is wanted.

        Rules about the newest checkpoints skip abandoned ones. If all are abandoned, they skip none: a job has gone
        back to a checkpoint that was pruned meanwhile, and has not saved since.

        Args:
            candidates: The checkpoints that can be loaded, in any order.

        Raises:
            ConfigurationError: There are candidates and none is wanted, because none has the metric or a tag.
        """
        newest_first = sorted(candidates, key=lambda item: (item[1].created_ns, item[0].name), reverse=True)
        reasons: dict[str, list[str]] = {}
        not_abandoned = [item for item in newest_first if not item[0].is_abandoned] or newest_first
        for entry, _ in not_abandoned[: self.last]:
            reasons.setdefault(entry.name, []).append(f"one of the newest {self.last}" if self.last > 1 else "newest")
        for name, reason in self._newest_of_days(not_abandoned).items():
            reasons.setdefault(name, []).append(reason)
        for name, reason in (self.best.choose(newest_first) if self.best else {}).items():
            reasons.setdefault(name, []).append(reason)
        for entry, _ in newest_first if self.tagged else ():
            if entry.tags:
                reasons.setdefault(entry.name, []).append("tagged " + ", ".join(map(repr, entry.tags)))
        if candidates and not reasons:
            metrics = ", ".join(sorted({repr(name) for entry, _ in candidates for name in entry.metrics})) or "none"
            raise ConfigurationError(
                f"none of {len(candidates)} checkpoints would be kept by: {self}; known metrics: {metrics}; "
                "also pass 'last' to keep the newest"
            )
        return {name: tuple(texts) for name, texts in reasons.items()}

    def _newest_of_days(self, newest_first: Sequence[tuple[Entry, Checkpoint]]) -> dict[str, str]:
        by_day: dict[str, str] = {}
        for entry, checkpoint in newest_first:
            by_day.setdefault(f"{instant(checkpoint.created_ns):%Y-%m-%d}", entry.name)
        days = list(by_day) if self.daily == "all" else list(by_day)[: self.daily]
        return {by_day[day]: f"newest of {day}" for day in days}


def check_keep(keep: object) -> None:
    """Raise a ``ConfigurationError`` if ``keep`` is neither a ``Keep`` nor None."""
    if keep is not None:
        check_type("keep", keep, Keep, "a Keep, such as Keep(last=3), or None")

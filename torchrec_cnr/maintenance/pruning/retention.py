"""Retention: which checkpoints are wanted, as a value that describes itself.

A checkpoint stays if any of the rules names it. What it needs stays as well, which is not for retention to know.
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
    """The checkpoints of which a metric is best. Those that do not have it are not among them.

    Attributes:
        metric: Its name, see ``annotations.write_metrics``.
        n: How many checkpoints; of two with one value, the newer.
        largest: Whether the largest value is the best, not the smallest.

    Raises:
        ConfigurationError: ``n`` is less than 1, or there is no name.
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
        which = "the best" if self.n == 1 else f"the best {self.n}"
        return f"{which} by {name_text(self.metric)} ({'largest' if self.largest else 'smallest'})"

    def choose(self, candidates: Sequence[tuple[Entry, Checkpoint]]) -> dict[str, str]:
        """Why each of the best is wanted, by name. Candidates come newest first."""
        valued = [(entry.metrics[self.metric], entry.name) for entry, _ in candidates if self.metric in entry.metrics]
        best = sorted(valued, key=lambda item: -item[0] if self.largest else item[0])[: self.n]
        which = "best" if self.n == 1 else f"one of the best {self.n}"
        return {name: f"{which} by {name_text(self.metric)} ({value:.6g})" for value, name in best}


@dataclass(frozen=True)
class Keep:
    """Which checkpoints are wanted: those that any of these rules names.

    One that a job has abandoned, when it went back to an older one, is wanted only for its metric or its tag.

    Attributes:
        last: As many of those committed last.
        daily: The last one of each UTC day, for as many days that have one, counted from the newest; or of ``"all"``.
        best: The best by a metric.
        tagged: Those that have a tag.

    Raises:
        ConfigurationError: A number is negative, or nothing would be kept.
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
            raise ConfigurationError("nothing would be kept: give 'last', 'daily', 'best' or 'tagged'")

    def __repr__(self) -> str:
        return given_text(self, "last")

    def __str__(self) -> str:
        days = "each day" if self.daily == "all" else f"each of the last {self.daily} days that have one"
        rules = {
            "the last" if self.last == 1 else f"the last {self.last}": self.last,
            f"the newest of {days}": self.daily,
            str(self.best): self.best,
            "those that are tagged": self.tagged,
        }
        return ", ".join(text for text, is_given in rules.items() if is_given)

    def choose(self, candidates: Sequence[tuple[Entry, Checkpoint]]) -> Mapping[str, tuple[str, ...]]:
        """Why each checkpoint that is wanted is wanted, by name.

        Args:
            candidates: Those that can be loaded, in any order.

        Raises:
            ConfigurationError: There are some, and none is wanted: no metric or tag is there that the rules ask for.
        """
        newest_first = sorted(candidates, key=lambda item: (item[1].created_ns, item[0].name), reverse=True)
        reasons: dict[str, list[str]] = {}
        going_on = [(entry, checkpoint) for entry, checkpoint in newest_first if not entry.is_abandoned]
        for entry, _ in going_on[: self.last]:
            reasons.setdefault(entry.name, []).append("one of the last" + (f" {self.last}" if self.last > 1 else ""))
        for name, reason in self._newest_of_days(going_on).items():
            reasons.setdefault(name, []).append(reason)
        for name, reason in (self.best.choose(newest_first) if self.best else {}).items():
            reasons.setdefault(name, []).append(reason)
        for entry, _ in newest_first if self.tagged else ():
            if entry.tags:
                reasons.setdefault(entry.name, []).append("tagged " + ", ".join(map(repr, entry.tags)))
        if candidates and not reasons:
            metrics = ", ".join(sorted({repr(name) for entry, _ in candidates for name in entry.metrics})) or "none"
            raise ConfigurationError(
                f"none of {len(candidates)} checkpoints would be kept by: {self}; metrics that are there: {metrics}; "
                "keep the last ones, too"
            )
        return {name: tuple(found) for name, found in reasons.items()}

    def _newest_of_days(self, newest_first: Sequence[tuple[Entry, Checkpoint]]) -> dict[str, str]:
        by_day: dict[str, str] = {}
        for entry, checkpoint in newest_first:
            by_day.setdefault(f"{instant(checkpoint.created_ns):%Y-%m-%d}", entry.name)
        days = list(by_day) if self.daily == "all" else list(by_day)[: self.daily]
        return {by_day[day]: f"newest of {day}" for day in days}


def check_keep(keep: object) -> None:
    """Refuse what is no rules.

    Raises:
        ConfigurationError: It is neither a ``Keep`` nor None.
    """
    if keep is not None:
        check_type("keep", keep, Keep, "a Keep, such as Keep(last=3), or None")

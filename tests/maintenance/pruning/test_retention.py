"""Which checkpoints the rules of retention keep."""

import math
from itertools import count
from typing import Any

import pytest

from tests.maintenance.pruning.roots_to_prune import NOON_NS, hourly, kept
from tests.support.roots import DAY_NS, Root
from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.human_text import bytes_text, count_text, instant_text, name_text
from torchrec_cnr.lineage.abandoned import mark_abandoned
from torchrec_cnr.lineage.checkpoint import read_checkpoint
from torchrec_cnr.maintenance.pruning.plan import plan_prune
from torchrec_cnr.maintenance.pruning.retention import Best, Keep
from torchrec_cnr.maintenance.tags_and_metrics import tag, untag, write_metrics
from torchrec_cnr.storage.store import Store

numbers = count()


# Rules


def test_last_is_by_time_of_commit(root: Root) -> None:
    """Not by name, and no more than there are."""
    for name, at_ns in [("b", 1), ("c", 3), ("a", 2)]:
        root.save(name, at_ns)
    assert kept(plan_prune(root.url, Keep(last=1))) == {"c"}
    assert kept(plan_prune(root.url, Keep(last=2))) == {"a", "c"}
    assert kept(plan_prune(root.url, Keep(last=9))) == {"a", "b", "c"}
    assert plan_prune(root.url, Keep(last=2)).stays["a"] == ("one of the newest 2",)


def test_daily_is_the_newest_of_each_day(root: Root) -> None:
    """Of days of UTC that have a checkpoint, however long ago."""
    hourly(root, 5)  # 12:00 and 20:00, then 4:00, 12:00, 20:00 of the next day
    root.save("later", NOON_NS + 40 * DAY_NS)
    assert kept(plan_prune(root.url, Keep(last=0, daily=1))) == {"later"}
    assert kept(plan_prune(root.url, Keep(last=0, daily=2))) == {"later", "4"}
    plan = plan_prune(root.url, Keep(last=0, daily="all"))
    assert kept(plan) == {"later", "4", "1"}
    assert plan.stays["1"] == ("newest of 2026-11-20",)


def test_best_is_by_a_metric(root: Root) -> None:
    """The largest or the smallest; NaN and what has no value are never the best; of two alike the newer is."""
    hourly(root, 6)
    for name, value in enumerate([0.5, 0.75, math.nan, 0.75, math.inf]):
        write_metrics(root.at(str(name)), {"auc": value})
    assert kept(plan_prune(root.url, Keep(last=0, best=Best("auc")))) == {"3"}
    assert kept(plan_prune(root.url, Keep(last=0, best=Best("auc", 2)))) == {"1", "3"}
    assert kept(plan_prune(root.url, Keep(last=0, best=Best("auc", 9)))) == {"0", "1", "3"}
    plan = plan_prune(root.url, Keep(last=1, best=Best("auc", largest=False)))
    assert kept(plan) == {"0", "5"}
    assert plan.stays["0"] == ("best by auc (0.5)",)


def test_tagged_ones_stay(root: Root) -> None:
    """Until the tag is taken away, and only if tags count."""
    hourly(root, 3)
    tag(root.at("0"), "release")
    tag(root.at("0"), "v1.0")
    tag(root.at("0"), "v1.0")
    plan = plan_prune(root.url, Keep(last=1))
    assert kept(plan) == {"0", "2"}
    assert plan.stays["0"] == ("tagged 'release', 'v1.0'",)
    assert kept(plan_prune(root.url, Keep(last=1, tagged=False))) == {"2"}
    untag(root.at("0"), "release")
    untag(root.at("0"), "never-there")
    assert kept(plan_prune(root.url, Keep(last=1))) == {"0", "2"}
    untag(root.at("0"), "v1.0")
    assert kept(plan_prune(root.url, Keep(last=1))) == {"2"}


def test_abandoned_ones_do_not_count_unless_all_are(root: Root) -> None:
    """All are if the one that a job went back to was pruned, and the job has saved nothing since."""
    hourly(root, 3)
    checkpoints = [read_checkpoint(root.at(str(number))) for number in range(3)]
    mark_abandoned(Store.open(root.url), checkpoints[1:], None)
    assert kept(plan_prune(root.url, Keep(last=2))) == {"0"}
    mark_abandoned(Store.open(root.url), checkpoints[:1], None)
    assert kept(plan_prune(root.url, Keep(last=2))) == {"1", "2"}
    assert kept(plan_prune(root.url, Keep(last=0, daily=1))) == {"2"}


@pytest.mark.parametrize(
    ("keep", "text"),
    [
        (Keep(), "the newest 3, those with a tag"),
        (Keep(last=1, tagged=False), "the newest"),
        (Keep(last=0, daily=7), "the newest of each of the last 7 days that have one, those with a tag"),
        (
            Keep(daily="all", best=Best("auc", 2), tagged=False),
            "the newest 3, the newest of each day, the best 2 by auc (largest)",
        ),
        (Keep(last=0, best=Best("loss", largest=False)), "the best by loss (smallest), those with a tag"),
    ],
)
def test_rules_describe_themselves(keep: Keep, text: str) -> None:
    """In words."""
    assert str(keep) == text


@pytest.mark.parametrize(
    "arguments",
    [
        {"last": 0, "tagged": False},
        {"last": -1},
        {"last": True},
        {"last": 1.5},
        {"daily": -1},
        {"daily": "every"},
    ],
)
def test_rules_that_cannot_work_are_refused(arguments: dict[str, Any]) -> None:
    """Nothing kept at all, or numbers that are none."""
    with pytest.raises(ConfigurationError):
        Keep(**arguments)


@pytest.mark.parametrize("arguments", [{"metric": ""}, {"metric": "auc", "n": 0}, {"metric": "auc", "n": 1.0}])
def test_best_ones_that_cannot_be_are_refused(arguments: dict[str, Any]) -> None:
    """No name, or none of them."""
    with pytest.raises(ConfigurationError):
        Best(**arguments)


@pytest.mark.parametrize("keep", [Keep(last=0), Keep(last=0, best=Best("acu"))], ids=["tags", "metric"])
def test_rules_that_want_nothing_are_refused(root: Root, keep: Keep) -> None:
    """A metric's name that is spelled wrong does not remove everything; the error tells which there are."""
    assert plan_prune(root.url, keep).is_empty, "nothing to keep, nothing to remove"
    hourly(root, 2)
    write_metrics(root.at("0"), {"auc": 0.5})
    with pytest.raises(ConfigurationError, match=r"none of 2 checkpoints would be kept.*known metrics: 'auc'"):
        plan_prune(root.url, keep)


# Quantities


def test_sizes_are_told_in_three_digits() -> None:
    """In decimal units."""
    sizes = {0: "0 B", 999: "999 B", 1000: "1.00 KB", 12_345: "12.3 KB", 999_499: "999 KB", 999_500: "1.00 MB"}
    assert {size: bytes_text(size) for size in sizes} == sizes
    assert bytes_text(123 * 10**18) == "123 EB"
    assert [count_text(num, "file") for num in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]
    assert instant_text(NOON_NS) == "2026-11-20 12:00:00 UTC"
    assert name_text("a\u202eb\udc80") == "a\\u202eb\\udc80"

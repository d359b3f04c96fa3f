"""Retention: which checkpoints are wanted; why others stay; and what metrics, tags and the journal tell."""

import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchrec_cnr as cnr
from tests.support.faults import become_nobody, give_to_nobody
from tests.support.killing import in_child
from tests.support.roots import DAY_NS, HOUR_NS, NUM_COLS, NUM_ROWS, Root, prune, pruned_names
from torchrec_cnr.errors import CheckpointNotFoundError, ConfigurationError, StoreError
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.format.manifest_parser import VERSION
from torchrec_cnr.human_text import bytes_text, count_text, instant_text, name_text
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.maintenance import journal
from torchrec_cnr.maintenance.catalog import read_catalog, read_journal
from torchrec_cnr.maintenance.execute import execute
from torchrec_cnr.maintenance.journal import Prune, PrunedCheckpoint
from torchrec_cnr.maintenance.pruning.execute import PruneResult
from torchrec_cnr.maintenance.pruning.plan import PrunePlan, plan_prune
from torchrec_cnr.maintenance.pruning.retention import Best, Keep
from torchrec_cnr.maintenance.restore_bytes import restore_bytes
from torchrec_cnr.maintenance.tags_and_metrics import read_metrics, tag, untag, write_metrics
from torchrec_cnr.storage.leases import LEASE_SECS
from torchrec_cnr.storage.store import Store

numbers = count()
NOON_NS = int(datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp()) * 10**9


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Root]:
    """An empty root in each kind of file system."""
    found = Root(tmp_path / "job" if request.param == "local" else f"memory://retention-{next(numbers)}/job")
    yield found
    if request.param == "memory":
        found.store.fs.rm(found.store.path, recursive=True)


def _hourly(root: Root, num: int) -> None:
    """Baselines ``0``, ``1``, …, one every eight hours from noon of the 20th of November."""
    for number in range(num):
        root.save(str(number), NOON_NS + 8 * number * HOUR_NS)


def kept(plan: PrunePlan) -> set[str]:
    """The checkpoints that stay."""
    return set(plan.catalog.checkpoints) - {checkpoint.name for checkpoint in plan.pruned}


# Rules


def test_last_is_by_time_of_commit(root: Root) -> None:
    """Not by name, and no more than there are."""
    for name, at_ns in [("b", 1), ("c", 3), ("a", 2)]:
        root.save(name, at_ns)
    assert kept(plan_prune(root.url, Keep(last=1))) == {"c"}
    assert kept(plan_prune(root.url, Keep(last=2))) == {"a", "c"}
    assert kept(plan_prune(root.url, Keep(last=9))) == {"a", "b", "c"}
    assert plan_prune(root.url, Keep(last=2)).stays["a"] == ("one of the last 2",)


def test_daily_is_the_newest_of_each_day(root: Root) -> None:
    """Of days of UTC that have a checkpoint, however long ago."""
    _hourly(root, 5)  # 12:00 and 20:00, then 4:00, 12:00, 20:00 of the next day
    root.save("later", NOON_NS + 40 * DAY_NS)
    assert kept(plan_prune(root.url, Keep(last=0, daily=1))) == {"later"}
    assert kept(plan_prune(root.url, Keep(last=0, daily=2))) == {"later", "4"}
    plan = plan_prune(root.url, Keep(last=0, daily="all"))
    assert kept(plan) == {"later", "4", "1"}
    assert plan.stays["1"] == ("newest of 2026-11-20",)


def test_best_is_by_a_metric(root: Root) -> None:
    """The largest or the smallest; NaN and what has no value are never the best; of two alike the newer is."""
    _hourly(root, 6)
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
    _hourly(root, 3)
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


@pytest.mark.parametrize(
    ("keep", "text"),
    [
        (Keep(), "the last 3, those that are tagged"),
        (Keep(last=1, tagged=False), "the last"),
        (Keep(last=0, daily=7), "the newest of each of the last 7 days that have one, those that are tagged"),
        (
            Keep(daily="all", best=Best("auc", 2), tagged=False),
            "the last 3, the newest of each day, the best 2 by auc (largest)",
        ),
        (Keep(last=0, best=Best("loss", largest=False)), "the best by loss (smallest), those that are tagged"),
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
    _hourly(root, 2)
    write_metrics(root.at("0"), {"auc": 0.5})
    with pytest.raises(ConfigurationError, match=r"none of 2 checkpoints would be kept.*metrics that are there: 'auc'"):
        plan_prune(root.url, keep)


# Why others stay


def test_reasons_are_told(root: Root) -> None:
    """For everything that stays, in words; and sizes add up."""
    now_ns = NOON_NS + 3 * DAY_NS
    for number, parent in enumerate([None, "0", "1", None, "3", None, None]):
        root.save(str(number), NOON_NS + number, parent, range(3))
    root.compact("4")
    root.lease("5", now_ns + 2 * HOUR_NS, "load")
    root.lease("6", now_ns + 20 * HOUR_NS, "compact")
    root.put_pack("saving")
    root.lease("saving", now_ns + HOUR_NS, "save")
    root.save("2b", NOON_NS + 9, "2", range(2))
    root.put("logs", "events.log")
    root.put("3", "notes.txt")
    tag(root.at("1"), "release")
    plan = plan_prune(root.url, Keep(last=1), now_ns=now_ns)
    lineage = "newest of its lineage, which saving may stand on"
    assert dict(plan.stays) == {
        "0": ("needed by 2b",),
        "1": ("tagged 'release'",),
        "2": ("needed by 2b",),
        "2b": ("one of the last", lineage),
        "3": ("its packs are used by 4", "not recognised: notes.txt"),
        "4": (lineage,),
        "5": ("leased (a load, until 14:00 UTC)", lineage),
        "6": ("leased (a compaction, until 2026-11-24 08:00 UTC)", lineage),
        "logs": ("not recognised",),
        "saving": ("leased (a save, until 13:00 UTC)",),
    }
    assert [checkpoint.name for checkpoint in plan.pruned] == ["3"]
    assert plan.freed_bytes == sum(plan.removals[0].entry.files[name] for name in plan.removals[0].files) > 0
    text = str(plan)
    assert f"3: baseline of 2026-11-20 12:00:00 UTC, {bytes_text(plan.freed_bytes)}" in text
    assert "stays  5: leased (a load, until 14:00 UTC); newest of its lineage, which saving may stand on" in text
    assert text.endswith(
        f"1 checkpoint to remove, {bytes_text(plan.freed_bytes)} to free, {bytes_text(plan.left_bytes)} left"
    )


def test_names_do_not_forge_the_text(tmp_path: Path) -> None:
    """Line breaks and escapes in names of files and directories are shown as escapes."""
    root = Root(tmp_path)
    _hourly(root, 2)
    hostile = "x\n  goes   everything\x1b[2J"
    os.makedirs(tmp_path / hostile)
    (tmp_path / hostile / "file\n").touch()
    os.makedirs(os.fsencode(tmp_path) + b"/not\xffutf8")
    text = str(plan_prune(root.url, Keep(last=1)))
    assert "\x1b" not in text
    assert "  stays  x\\n  goes   everything\\x1b[2J: not recognised" in text
    text.encode()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "newer version": lambda data: _newer(data),
    "truncated": lambda data: data[:-9],
    "foreign": lambda _: b"{}",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_read_stays_and_what_is_older(root: Root, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """It may stand on any of these; what was committed since it was written goes, and all once it is gone."""
    for number, name in enumerate(["old-0", "old-1", "bad"]):
        root.save(name, time.time_ns() + number)
    root.put("bad", MANIFEST_FILE, DAMAGES[damage](root.store.at("bad").read(MANIFEST_FILE)))
    written_ns = root.store.at("bad").modified_ns(MANIFEST_FILE)
    for number in range(3):
        root.save(f"new-{number}", written_ns + 2 * DAY_NS + number)
    dead = [root.put_pack("old-0"), root.put_pack("new-2")]
    plan = plan_prune(root.url, Keep(last=1))
    assert kept(plan) == {"old-0", "old-1", "new-2"}
    assert plan.stays["bad"][0].startswith("cannot be read: ")
    assert plan.stays["old-0"] == ("bad, which cannot be read, may need it",)
    assert execute(plan).failed == {}
    assert [file[1] in dead for file in root.files()].count(True) == 1, "what it may need is not touched"
    root.assert_loads(["old-0", "old-1", "new-2"])
    root.save("newest", written_ns + 3 * DAY_NS)
    with monkeypatch.context() as patched:
        patched.setattr(Store, "modified_ns", _refuse)
        assert kept(plan_prune(root.url, Keep(last=1))) == {"old-0", "old-1", "new-2", "newest"}, "it may be the newest"
    root.store.fs.rm(root.store.at("bad").path, recursive=True)
    assert kept(plan_prune(root.url, Keep(last=1))) == {"newest"}


def _newer(data: bytes) -> bytes:
    """The same manifest, of a newer version of the format."""
    body = json.dumps({**json.loads(data)["manifest"], "version": VERSION + 1}, separators=(",", ":")).encode()
    return b'{"sha256":"%s","manifest":%s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)


def _refuse(*_: object) -> int:
    raise StoreError("cannot look up: not implemented")


def test_packs_that_what_cannot_be_read_may_use_stay(tmp_path: Path) -> None:
    """Those of checkpoints that stay, and of those that were pruned when it could still be read."""
    root = Root(tmp_path)
    root.save("0", time.time_ns())
    root.save("1", time.time_ns(), "0", range(3))
    root.compact("1")
    assert prune(root, Keep(last=1)).removed == ("0",)
    assert root.directories() == {"0", "1"}
    good = root.store.at("1").read(MANIFEST_FILE)
    (tmp_path / "1" / MANIFEST_FILE).write_bytes(b"damaged")
    root.save("2", time.time_ns() + 9 * DAY_NS)
    root.save("3", time.time_ns() + 10 * DAY_NS)
    plan = plan_prune(root.url, Keep(last=1))
    assert plan.stays["0"] == ("a checkpoint that cannot be read may need its packs",)
    assert execute(plan).removed == ("2",)
    (tmp_path / "1" / MANIFEST_FILE).write_bytes(good)
    root.assert_loads(["1", "3"])


def test_what_cannot_be_loaded_stays_and_is_not_counted(root: Root) -> None:
    """A missing parent or pack makes a checkpoint none of the last ones: those that load are not removed for it."""
    for number, parent in enumerate([None, "0", None, "2", "3"]):
        root.save(str(number), NOON_NS + number, parent, range(3))
    root.store.fs.rm(root.store.at("2").path, recursive=True)
    (pack,) = root.checkpoints["1"].packs
    root.save("5", NOON_NS + 9, "1", range(5))
    root.put("1", pack, b"short")
    num_bytes = root.checkpoints["1"].stored[0][0].pack.num_bytes
    plan = plan_prune(root.url, Keep(last=1))
    assert {name: reasons[0] for name, reasons in plan.stays.items()} == {
        "0": "one of the last",
        "1": f"cannot be loaded: its pack 1/{pack} has 5 bytes, expected {num_bytes}",
        "3": "cannot be loaded: its parent 2 is missing",
        "4": "cannot be loaded: its parent 3 cannot be loaded",
        "5": "cannot be loaded: its parent 1 cannot be loaded",
    }
    root.store.at("1").remove(pack)
    assert plan_prune(root.url, Keep(last=1)).stays["1"][0] == f"cannot be loaded: its pack 1/{pack} is missing"
    root.save("2", NOON_NS + 2)
    assert plan_prune(root.url, Keep(last=1)).stays["3"][0] == "cannot be loaded: its parent 2 was replaced"


def test_parents_elsewhere_may_be_there(root: Root) -> None:
    """A delta on a checkpoint of another root counts as one that can be loaded."""
    root.save("../other/0", NOON_NS)
    root.save("1", NOON_NS + 1, "../other/0", range(3))
    plan = plan_prune(root.url, Keep(last=1))
    assert plan.stays["1"] == ("one of the last",)
    root.assert_loads(["1"])
    root.save("2", NOON_NS + 2)
    prune(root, Keep(last=1))
    (pruned,) = read_journal(root.url)
    assert (pruned.name, pruned.kind, pruned.parent) == ("1", "delta", "../../other/0")


def test_links_and_what_they_lead_to_stay(tmp_path: Path) -> None:
    """A link into the root keeps its checkpoint, with all that it needs; one to elsewhere keeps what it stands on."""
    root = Root(tmp_path / "job")
    for number, parent in enumerate([None, "0", None, "2", "3", None]):
        root.save(str(number), NOON_NS + number, parent, range(3))
    os.symlink("1", tmp_path / "job" / "best")
    shutil.move(tmp_path / "job" / "3", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", tmp_path / "job" / "3")
    plan = plan_prune(root.url, Keep(last=1))
    assert {name: reasons[0] for name, reasons in plan.stays.items()} == {
        "0": "needed by best",
        "1": "linked as best",
        "2": "needed by 3",
        "3": "a link",
        "5": "one of the last",
        "best": "a link",
    }
    assert execute(plan).removed == ("4",)
    root.assert_loads(["1", "3", "5"])
    os.unlink(tmp_path / "job" / "best")
    os.unlink(tmp_path / "job" / "3")
    assert set(prune(root, Keep(last=1)).removed) == {"0", "1", "2"}
    assert (tmp_path / "elsewhere" / MANIFEST_FILE).exists()


def _prune_as_nobody(root: str) -> tuple[dict[str, tuple[str, ...]], PruneResult]:
    become_nobody()
    plan = plan_prune(root, Keep(last=1))
    return dict(plan.stays), execute(plan)


@pytest.mark.parametrize("closed", ["directory", "manifest"])
def test_what_one_may_not_read_keeps_what_it_stands_on(open_folder: Path, closed: str) -> None:
    """A directory that cannot be listed, or a manifest that cannot be opened, is not taken for nothing."""
    root = Root(open_folder / "job")
    for number, parent in enumerate([None, "0", None, None]):
        root.save(str(number), time.time_ns() + number * (9 * DAY_NS if number > 1 else 1), parent, range(3))
    give_to_nobody(open_folder / "job")
    (open_folder / "job" / "1" / ("" if closed == "directory" else MANIFEST_FILE)).chmod(0)
    outcome = in_child(_prune_as_nobody, root.url)
    assert not isinstance(outcome, int)
    stays, result = outcome
    assert "Permission" in stays["1"][0]
    assert stays["0"] == ("1, which cannot be read, may need it",)
    assert result.removed == ("2",)
    assert result.failed == {}
    (open_folder / "job" / "1" / ("" if closed == "directory" else MANIFEST_FILE)).chmod(0o755)
    root.assert_loads(["0", "1", "3"])


def test_a_save_under_a_name_that_was_pruned_is_not_taken_for_what_was_left(root: Root) -> None:
    """Its packs stay, although its directory is in the journal, even without a lease; it is none of the pruned then."""
    _hourly(root, 2)
    assert prune(root, Keep(last=1)).removed == ("0",)
    pack = root.put_pack("0")
    assert plan_prune(root.url, Keep(last=1)).is_empty
    assert plan_prune(root.url, Keep(last=1)).stays["0"] == ("not recognised",)
    root.save("0", NOON_NS + 9 * DAY_NS)
    assert [(found.name, found.created_ns) for found in read_journal(root.url)] == [("0", NOON_NS)]
    assert kept(plan_prune(root.url, Keep(last=1))) == {"0"}
    prune(root, Keep(last=1))
    assert pack not in root.store.at("0").names(), "what died in it goes once it holds a checkpoint"
    root.assert_loads(["0"])


def test_directories_in_a_checkpoint_stay(tmp_path: Path) -> None:
    """With all that is in them; the next prune has nothing to do there."""
    root = Root(tmp_path)
    _hourly(root, 2)
    (tmp_path / "0" / "plots" / "deep").mkdir(parents=True)
    (tmp_path / "0" / "plots" / "deep" / "loss.png").touch()
    assert prune(root, Keep(last=1)).removed == ("0",)
    assert list((tmp_path / "0").rglob("*.png")) != []
    plan = plan_prune(root.url, Keep(last=1))
    assert plan.is_empty
    assert plan.stays["0"] == ("not recognised",)


# Metrics and tags


def test_metrics_are_merged(root: Root) -> None:
    """Of each metric the value that was written last counts; one that is not finite takes it away."""
    _hourly(root, 1)
    write_metrics(root.at("0"), {"auc": 0.5, "loss": 2})
    write_metrics(root.at("0"), {"auc": 0.75, "ne": math.nan})
    assert read_catalog(root.url).entries["0"].metrics == {"auc": 0.75, "loss": 2.0}
    write_metrics(root.at("0"), {"loss": math.inf})
    assert read_catalog(root.url).entries["0"].metrics == {"auc": 0.75}
    root.assert_loads(["0"])


@pytest.mark.parametrize("metrics", [{"": 1.0}, {"a\n": 1.0}, {"x" * 201: 1.0}, {"auc": "high"}, {"auc": 10**400}])
def test_metrics_that_are_none_are_refused(root: Root, metrics: Any) -> None:
    """Before anything is written."""
    _hourly(root, 1)
    before = root.files()
    with pytest.raises(ConfigurationError):
        write_metrics(root.at("0"), metrics)
    assert root.files() == before


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../x", "a b", "x" * 101, "é"])
def test_tags_that_are_none_are_refused(root: Root, name: str) -> None:
    """They are names of files."""
    _hourly(root, 1)
    for act in (tag, untag):
        with pytest.raises(ConfigurationError):
            act(root.at("0"), name)


def test_only_checkpoints_are_annotated(root: Root) -> None:
    """Where nothing was committed there is nothing to annotate."""
    root.put_pack("died")
    for name in ("died", "missing"):
        with pytest.raises(CheckpointNotFoundError):
            tag(root.at(name), "release")
        with pytest.raises(CheckpointNotFoundError):
            write_metrics(root.at(name), {"auc": 1.0})
    assert [name for name in root.files() if name[1].endswith((".tag", ".json"))] == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"auc": "0.9", "a": [1], "b": null, "c": true, "d": NaN, "e": 1e999, "\\ud800": 1, "": 2}',
        b'{"auc": 1' + b"0" * 400 + b"}",
        b"[" * 100_000,
        b"1" * 5000,
        b'{"a": 1}' + b" " * (1 << 20),
    ],
    ids=range(8),
)
def test_hostile_metrics_are_passed_over(root: Root, content: bytes) -> None:
    """What is no finite number by a printable name is no metric; what is good beside it counts."""
    _hourly(root, 1)
    write_metrics(root.at("0"), {"good": 1.0})
    root.put("0", f"metrics-{'9' * 20}-{'0' * 16}.json", content)
    assert read_catalog(root.url).entries["0"].metrics == {"good": 1.0}


@given(st.dictionaries(st.text(min_size=1, max_size=20), st.floats() | st.integers()))
def test_metrics_come_back(tmp_path_factory: pytest.TempPathFactory, metrics: dict[str, float]) -> None:
    """Every finite number by its name, bit for bit."""
    root = Root(f"memory://metrics-{next(numbers)}")
    root.save("0", NOON_NS)
    try:
        write_metrics(root.at("0"), metrics)
    except ConfigurationError:
        assert any(not name.isprintable() for name in metrics) or any(abs(v) > 1e300 for v in metrics.values())
        return
    finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    assert read_metrics(root.store.at("0"), root.store.at("0").listing().files) == finite
    root.store.fs.rm(root.store.path, recursive=True)


# The journal


def test_journal_tells_what_was_pruned(root: Root) -> None:
    """As it was saved, with what a load of it read; latest and the catalog do not see the journal."""
    root.save("0", NOON_NS)
    root.save("1", NOON_NS + 1, "0", range(5))
    root.save("2", NOON_NS + 2)
    before = {name: read_lineage(root.at(name)) for name in root.checkpoints}
    result = execute(plan_prune(root.url, Keep(last=1), now_ns=NOON_NS + DAY_NS))
    assert result.removed == ("1", "0")
    first, second = read_journal(root.url)
    assert first == PrunedCheckpoint(
        name="0",
        created_ns=NOON_NS,
        kind="baseline",
        num_bytes=before["0"].newest.num_bytes,
        num_rows=NUM_ROWS,
        num_table_rows=NUM_ROWS,
        parent=None,
        restore_bytes=restore_bytes(before["0"]),
        removed_ns=NOON_NS + DAY_NS,
        save_ids=(before["0"].newest.manifest.save_id,),
    )
    assert (second.name, second.kind, second.parent, second.num_rows) == ("1", "delta", "0", 5)
    assert second.restore_bytes == restore_bytes(before["1"]) > NUM_ROWS * 4 * NUM_COLS
    assert read_catalog(root.url).journal.prunes == (Prune(NOON_NS + DAY_NS, "1", result.freed_bytes),)
    assert cnr.latest(root.url) == root.at("2")
    assert list(read_catalog(root.url).entries) in (["2"], ["0", "1", "2"])  # memory:// keeps directories
    assert read_journal(read_catalog(root.url)) == [first, second]


def test_journal_is_folded(root: Root) -> None:
    """Many files become one, which tells the same; none becomes none."""
    for number in range(journal.NUM_FOLDED + 3):
        root.save(str(number), NOON_NS + number)
        prune(root, Keep(last=1))
        assert len(root.store.at("journal").names()) < journal.NUM_FOLDED
    assert pruned_names(root.url) == [str(number) for number in range(journal.NUM_FOLDED + 2)]
    names = root.store.at("journal").names()
    assert prune(root, Keep(last=1)).removed == ()
    assert root.store.at("journal").names() == names


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 100_000,
        json.dumps({"format": "torchrec_cnr journal", "version": 2, "pruned": [], "died": [], "prunes": []}).encode(),
        json.dumps({"format": "torchrec_cnr journal", "version": 1, "pruned": [{}], "died": [], "prunes": []}).encode(),
        json.dumps({"format": "torchrec_cnr journal", "version": 1, "pruned": [], "died": [1], "prunes": []}).encode(),
    ],
    ids=range(8),
)
def test_hostile_journals_are_passed_over(root: Root, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    """With a warning, and they stay; what other files tell counts."""
    _hourly(root, 2)
    prune(root, Keep(last=1))
    name = root.put("journal", f"{'0' * 20}-{'0' * 16}.json", content)
    for _ in range(journal.NUM_FOLDED):
        journal.write_file(root.store.at("journal"), journal.Journal(), NOON_NS)
    with caplog.at_level(logging.WARNING):
        assert pruned_names(root.url) == ["0"]
    assert name in caplog.text
    prune(root, Keep(last=1))
    assert len(root.store.at("journal").names()) == 2
    assert root.store.at("journal").read(name) == content
    assert pruned_names(root.url) == ["0"]


def test_hostile_records_are_refused(root: Root) -> None:
    """A record of which a value is of another type or out of bounds makes the file none."""
    _hourly(root, 2)
    prune(root, Keep(last=1))
    (name,) = root.store.at("journal").names()
    good = json.loads(root.store.at("journal").read(name))
    names = [field.name for field in fields(PrunedCheckpoint)]
    stored = [*good["pruned"][0], 1]  # with bytes in a log, which is not written where there are none
    changes: dict[str, list[Any]] = {
        "name": [1, None],
        "created_ns": [-1, 1 << 63, 1.0, True, "1"],
        "kind": ["other", [], None],
        "parent": [1],
        "save_ids": ["x", [1], None],
        "restore_bytes": [-1, 1.0],
        "compactions": ["x", [[1]], [[1, -1]], [[1, 1, 1]], None],
        "log_bytes": [-1, None, "1"],
    }
    root.put("journal", name, json.dumps({**good, "pruned": [stored]}).encode())
    assert pruned_names(root.url) == ["0"]
    for key, values in changes.items():
        for value in values:
            record = [value if field == key else old for field, old in zip(names, stored, strict=True)]
            bad = {**good, "pruned": [record]}
            root.put("journal", name, json.dumps(bad).encode())
            assert pruned_names(root.url) == [], (key, value)
    at_ns, newest, freed_bytes = good["prunes"][0]
    for prune_ in ({}, 1, [at_ns, newest], [at_ns, newest, -1], [None, newest, freed_bytes], [at_ns, 1, freed_bytes]):
        root.put("journal", name, json.dumps({**good, "prunes": [prune_]}).encode())
        assert pruned_names(root.url) == [], prune_
    root.put("journal", name, json.dumps(good).encode())
    assert pruned_names(root.url) == ["0"]


def test_a_journal_holds_names_that_are_not_utf8(root: Root) -> None:
    """A directory's name is bytes; Python reads those that are not UTF-8 as lone surrogates."""
    directory = root.store.at("journal")
    name = journal.write_file(directory, journal.Journal(died=frozenset({"run-\udc80"})), NOON_NS)
    assert journal.read_files(directory, [name], NOON_NS).died == {"run-\udc80"}


def test_what_a_prune_left_half_written_goes_later(root: Root) -> None:
    """A file of the journal that never got its name stays while somebody may be writing it."""
    _hourly(root, 2)
    prune(root, Keep(last=1))
    begun_ns = time.time_ns() - LEASE_SECS * 10**9
    old = root.put("journal", f"{'0' * 16}.{begun_ns - 10**12:020d}-{'0' * 16}.json")
    new = root.put("journal", f"{'0' * 16}.{begun_ns + 10**12:020d}-{'0' * 16}.json")
    prune(root, Keep(last=1))
    assert new in root.store.at("journal").names()
    assert old not in root.store.at("journal").names()


def test_a_checkpoint_may_be_called_journal(root: Root) -> None:
    """It is one as any other; what is not the journal's in its directory is the checkpoint's."""
    root.save("journal", NOON_NS)
    root.save("1", NOON_NS + 1)
    root.save("2", NOON_NS + 2)
    assert kept(plan_prune(root.url, Keep(last=1))) == {"2"}
    assert set(prune(root, Keep(last=1)).removed) == {"1", "journal"}
    assert pruned_names(root.url) == ["journal", "1"]
    assert all(journal.is_journal_file(name) for name in root.store.at("journal").names())
    assert plan_prune(root.url, Keep(last=1)).is_empty


# Quantities


def test_sizes_are_told_in_three_digits() -> None:
    """In decimal units."""
    sizes = {0: "0 B", 999: "999 B", 1000: "1.00 KB", 12_345: "12.3 KB", 999_499: "999 KB", 999_500: "1.00 MB"}
    assert {size: bytes_text(size) for size in sizes} == sizes
    assert bytes_text(123 * 10**18) == "123 EB"
    assert [count_text(num, "file") for num in (0, 1, 2000)] == ["0 files", "1 file", "2,000 files"]
    assert instant_text(NOON_NS) == "2026-11-20 12:00:00 UTC"
    assert name_text("a\u202eb\udc80") == "a\\u202eb\\udc80"

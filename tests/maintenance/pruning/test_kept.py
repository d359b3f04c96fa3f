"""What stays although no rule keeps it, and why."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.maintenance.pruning.roots_to_prune import NOON_NS, hourly, kept
from tests.support.faults import become_nobody, give_to_nobody
from tests.support.killing import in_child
from tests.support.roots import DAY_NS, HOUR_NS, Root, prune
from torchrec_cnr.errors import StoreError
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.format.manifest_parser import VERSION
from torchrec_cnr.human_text import bytes_text
from torchrec_cnr.maintenance.catalog import read_journal
from torchrec_cnr.maintenance.execute import execute
from torchrec_cnr.maintenance.pruning.execute import PruneResult
from torchrec_cnr.maintenance.pruning.plan import plan_prune
from torchrec_cnr.maintenance.pruning.retention import Keep
from torchrec_cnr.maintenance.tags_and_metrics import tag
from torchrec_cnr.storage.store import Store


def test_reasons_are_told(root: Root) -> None:
    """For everything that stays, in words; and sizes add up."""
    now_ns = NOON_NS + 3 * DAY_NS
    parents = {"0": None, "1": "0", "2": "1", "3": None, "3b": "3", "4": "3b", "5": None, "6": None}
    for number, (name, parent) in enumerate(parents.items()):
        root.save(name, NOON_NS + number, parent, range(3))
    root.compact("4")
    root.lease("5", now_ns + 2 * HOUR_NS, "load")
    root.lease("6", now_ns + 20 * HOUR_NS, "compact")
    root.lease("3", now_ns + HOUR_NS, "save")
    root.put_pack("saving")
    root.lease("saving", now_ns + HOUR_NS, "save")
    root.save("2b", NOON_NS + 9, "2", range(2))
    root.put("logs", "events.log")
    root.put("3b", "notes.txt")
    tag(root.at("1"), "release")
    plan = plan_prune(root.url, Keep(last=1), now_ns=now_ns)
    assert dict(plan.stays) == {
        "0": ("needed by 2b",),
        "1": ("tagged 'release'",),
        "2": ("needed by 2b",),
        "2b": ("newest",),
        "3": ("leased (a save, until 13:00 UTC)",),
        "3b": ("not recognised: notes.txt",),
        "5": ("leased (a load, until 14:00 UTC)",),
        "6": ("leased (a compaction, until 2026-11-24 08:00 UTC)",),
        "logs": ("not a checkpoint",),
        "saving": ("leased (a save, until 13:00 UTC)",),
    }
    assert [removal.entry.name for removal in plan.removals] == ["4", "3b"]
    assert plan.freed_bytes == sum(removal.num_bytes for removal in plan.removals) > 0
    text = str(plan)
    assert f"3b: delta of 2026-11-20 12:00:00 UTC, {bytes_text(plan.removals[1].num_bytes)}" in text
    assert "keep    5: leased (a load, until 14:00 UTC)" in text
    assert text.endswith(
        f"removes 2 checkpoints, frees {bytes_text(plan.freed_bytes)}, keeps {bytes_text(plan.left_bytes)}"
    )


def test_names_do_not_forge_the_text(tmp_path: Path) -> None:
    """Line breaks and escapes in names of files and directories are shown as escapes."""
    root = Root(tmp_path)
    hourly(root, 2)
    hostile = "x\n  remove  everything\x1b[2J"
    os.makedirs(tmp_path / hostile)
    (tmp_path / hostile / "file\n").touch()
    os.makedirs(os.fsencode(tmp_path) + b"/not\xffutf8")
    text = str(plan_prune(root.url, Keep(last=1)))
    assert "\x1b" not in text
    assert "  keep    x\\n  remove  everything\\x1b[2J: not a checkpoint" in text
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
    assert plan.stays["0"] == ("a checkpoint that cannot be read may need its data files",)
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
        "0": "newest",
        "1": f"cannot be loaded: its data file 1/{pack} has 5 bytes, expected {num_bytes}",
        "3": "cannot be loaded: its parent 2 is missing",
        "4": "cannot be loaded: its parent 3 cannot be loaded",
        "5": "cannot be loaded: its parent 1 cannot be loaded",
    }
    root.store.at("1").remove(pack)
    assert plan_prune(root.url, Keep(last=1)).stays["1"][0] == f"cannot be loaded: its data file 1/{pack} is missing"
    root.save("2", NOON_NS + 2)
    assert plan_prune(root.url, Keep(last=1)).stays["3"][0] == "cannot be loaded: its parent 2 was replaced"


def test_parents_elsewhere_may_be_there(root: Root) -> None:
    """A delta on a checkpoint of another root counts as one that can be loaded."""
    root.save("../other/0", NOON_NS)
    root.save("1", NOON_NS + 1, "../other/0", range(3))
    plan = plan_prune(root.url, Keep(last=1))
    assert plan.stays["1"] == ("newest",)
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
        "5": "newest",
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
    hourly(root, 2)
    assert prune(root, Keep(last=1)).removed == ("0",)
    pack = root.put_pack("0")
    assert plan_prune(root.url, Keep(last=1)).is_empty
    assert "its manifest removed by hand?" in plan_prune(root.url, Keep(last=1)).stays["0"][0]
    root.save("0", NOON_NS + 9 * DAY_NS)
    assert [(found.name, found.created_ns) for found in read_journal(root.url)] == [("0", NOON_NS)]
    assert kept(plan_prune(root.url, Keep(last=1))) == {"0"}
    prune(root, Keep(last=1))
    assert pack not in root.store.at("0").names(), "what died in it goes once it holds a checkpoint"
    root.assert_loads(["0"])


def test_directories_in_a_checkpoint_stay(tmp_path: Path) -> None:
    """With all that is in them; the next prune has nothing to do there."""
    root = Root(tmp_path)
    hourly(root, 2)
    (tmp_path / "0" / "plots" / "deep").mkdir(parents=True)
    (tmp_path / "0" / "plots" / "deep" / "loss.png").touch()
    assert prune(root, Keep(last=1)).removed == ("0",)
    assert list((tmp_path / "0").rglob("*.png")) != []
    plan = plan_prune(root.url, Keep(last=1))
    assert plan.is_empty
    assert plan.stays["0"] == ("not a checkpoint",)

"""The journal of what was pruned."""

import json
import logging
import time
from dataclasses import fields
from typing import Any

import pytest

import torchrec_cnr as cnr
from tests.maintenance.pruning.roots_to_prune import NOON_NS, hourly, kept
from tests.support.roots import DAY_NS, NUM_COLS, NUM_ROWS, Root, prune, pruned_names
from torchrec_cnr.lineage import journal
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.lineage.journal import Prune, PrunedCheckpoint
from torchrec_cnr.maintenance.catalog import read_catalog, read_journal
from torchrec_cnr.maintenance.execute import execute
from torchrec_cnr.maintenance.pruning.plan import plan_prune
from torchrec_cnr.maintenance.pruning.retention import Keep
from torchrec_cnr.maintenance.restore_bytes import restore_bytes
from torchrec_cnr.storage.leases import LEASE_SECS


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
    hourly(root, 2)
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
    hourly(root, 2)
    prune(root, Keep(last=1))
    (name,) = root.store.at("journal").names()
    good = json.loads(root.store.at("journal").read(name))
    names = [field.name for field in fields(PrunedCheckpoint)]
    stored = good["pruned"][0]
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
    hourly(root, 2)
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

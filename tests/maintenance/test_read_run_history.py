"""The history of a root: what manifests and journal tell comes to what lies there, whatever was done to it."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import torchrec_cnr as cnr
from tests.support import hand_made
from tests.support.roots import HOUR_NS, NUM_COLS, NUM_ROWS, Root
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.maintenance.catalog import read_catalog
from torchrec_cnr.maintenance.pruning import execute
from torchrec_cnr.maintenance.pruning.execute import PruneResult, run_prune
from torchrec_cnr.maintenance.pruning.plan import plan_prune
from torchrec_cnr.maintenance.pruning.retention import Keep
from torchrec_cnr.maintenance.read_run_history import read_run_history
from torchrec_cnr.maintenance.restore_bytes import restore_bytes
from torchrec_cnr.maintenance.run_history import Event, RunHistory
from torchrec_cnr.maintenance.tags_and_metrics import tag, write_metrics


def _history(root: Root) -> RunHistory:
    return read_run_history(read_catalog(root.url))


def _events(history: RunHistory) -> list[tuple[str, str]]:
    return [(event.kind, event.name) for event in history.events]


def _event(history: RunHistory, kind: str, name: str) -> Event:
    (found,) = (event for event in history.events if (event.kind, event.name) == (kind, name))
    return found


def _prune(root: Root, last: int) -> PruneResult:
    result = run_prune(plan_prune(root.url, Keep(last=last)))
    assert not result.failed
    return result


# All that may happen


@dataclass(frozen=True)
class Step:
    """Something that is done to a root; ``which`` and ``how`` choose among what there is."""

    what: str
    which: int
    how: int


@pytest.mark.long
@settings(max_examples=30)
@example([Step("save", 0, 0), Step("save", 1, 0), Step("compact", 1, 40), Step("prune", 0, 0)])  # little is copied
@given(
    st.lists(
        st.builds(
            Step,
            st.sampled_from(["save", "save", "save", "compact", "prune", "tag", "metrics"]),
            st.integers(0, 99),
            st.integers(0, 99),
        ),
        max_size=14,
    )
)
def test_a_history_adds_up(steps: list[Step]) -> None:
    """Every save and prune is in it, and events come to what lies there: nothing came unseen, nothing is missing."""
    with tempfile.TemporaryDirectory() as folder:
        root, there, freed_bytes = Root(Path(folder)), list[str](), list[int]()
        for number, step in enumerate(steps):
            if step.what == "save" or not there:
                parent = [None, *there][step.which % (1 + len(there))]
                name = f"step-{number}"
                root.save(name, HOUR_NS * (1 + number), parent, range(step.how % 8, 8 + step.how % 17))
                there.append(name)
                continue
            name = there[step.which % len(there)]
            if step.what == "compact":
                lineage = list(root.lineage(name))
                since = [None, *lineage[:-1]][step.how % len(lineage)]
                root.compact(name, since, step.how % (1 + len(lineage)) if since is None else 0)
            elif step.what == "prune":
                result = _prune(root, 1 + step.how % 3)
                there = [name for name in there if name not in result.removed]
                freed_bytes += [result.freed_bytes] if result.freed_bytes else []
            elif step.what == "tag":
                tag(root.at(name), "best")
            else:
                write_metrics(root.at(name), {"auc": step.how})
        history = _history(root)
        assert sorted(kept.name for kept in history.kept) == sorted(there)
        assert [event.freed_bytes for event in history.of_kind("prune")] == freed_bytes
        saved = {name: written.created_ns for name, written in root.checkpoints.items()}
        assert {event.name: event.at_ns for event in history.saves} == saved
        assert len(history.saves) == len(saved)
        assert history.kept_bytes == sum(root.files().values())
        assert (history.opening_bytes, history.vanished_bytes) == (0, 0)
        assert history.unreadable == ()


# One at a time


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A baseline, two deltas on it, and a baseline."""
    root = Root(tmp_path / "run")
    root.save("a", HOUR_NS)
    root.save("b", 2 * HOUR_NS, "a", range(8))
    root.save("c", 3 * HOUR_NS, "b", range(6, 12))
    root.save("d", 4 * HOUR_NS)
    return root


def test_saves_are_told_in_order_with_what_they_took(root: Root) -> None:
    """Bytes of their files, the share of rows that are stored, what a load reads, and a full baseline of the time."""
    history = _history(root)
    assert (history.root, history.left_bytes) == (root.url, 0)
    assert _events(history) == [("baseline", "a"), ("delta", "b"), ("delta", "c"), ("baseline", "d")]
    assert [event.modified_share for event in history.events] == [None, 8 / NUM_ROWS, 6 / NUM_ROWS, None]
    for event in history.events:
        files = [num_bytes for (directory, _), num_bytes in root.files().items() if directory == event.name]
        assert event.written_bytes == sum(files)
        assert event.restore_bytes == restore_bytes(read_lineage(root.at(event.name)))
        assert event.model_bytes == cnr.read_checkpoint(root.at("a")).manifest.blob_bytes
    kept = {checkpoint.name: checkpoint for checkpoint in history.kept}
    assert {name: (one.kind, one.parent) for name, one in kept.items()} == {
        "a": ("baseline", None),
        "b": ("delta", "a"),
        "c": ("delta", "b"),
        "d": ("baseline", None),
    }


def test_a_compaction_is_an_event_of_its_own(root: Root) -> None:
    """It wrote what the save did not, and the save is told as it was, whatever becomes of its packs."""
    before = _event(_history(root), "delta", "c")
    packs = {name for name in root.store.at("c").names() if name.endswith(".safetensors")}
    root.compact("c", num_moved=3)
    history = _history(root)
    assert _events(history)[2:4] == [("delta", "c"), ("compaction", "c")]
    compaction = _event(history, "compaction", "c")
    assert (compaction.modified_share, compaction.freed_bytes) == (None, 0)
    assert compaction.restore_bytes == restore_bytes(read_lineage(root.at("c")))
    assert compaction.written_bytes == history.written_bytes - sum(event.written_bytes for event in history.saves) > 0
    after = _event(history, "delta", "c")
    assert (after.written_bytes, after.modified_share) == (before.written_bytes, before.modified_share)
    assert after.restore_bytes is None  # nobody reads the checkpoint as it was saved any more
    assert {one.name: (one.kind, one.is_compacted, one.parent) for one in history.kept}["c"] == ("delta", True, None)
    assert history.exact_bytes == NUM_ROWS * NUM_COLS * 4

    gone = {name: root.files()["c", name] for name in packs if ("c", name) not in root.checkpoints["c"].uses(-1)}
    for name in gone:
        root.store.at("c").remove(name)
    history = _history(root)
    assert _event(history, "delta", "c").written_bytes == before.written_bytes
    assert (history.opening_bytes, history.vanished_bytes) == (0, sum(gone.values()))
    assert gone


def test_what_was_pruned_is_told(root: Root) -> None:
    """As a save, by what the journal knows of it, and all together as a prune of as many bytes."""
    num_bytes = {name: cnr.read_checkpoint(root.at(name)).num_bytes for name in "abc"}
    assert _prune(root, 1).removed == ("c", "b", "a")
    history = _history(root)
    assert _events(history) == [
        ("baseline", "a"),
        ("delta", "b"),
        ("delta", "c"),
        ("baseline", "d"),
        ("prune", "c"),
    ]
    saved, pruned = _event(history, "delta", "b"), _event(history, "prune", "c")
    assert (saved.at_ns, saved.written_bytes, saved.modified_share) == (2 * HOUR_NS, num_bytes["b"], 8 / NUM_ROWS)
    assert (pruned.freed_bytes, pruned.written_bytes, pruned.restore_bytes) == (sum(num_bytes.values()), 0, None)
    assert saved.restore_bytes is not None
    assert [kept.name for kept in history.kept] == ["d"]


def test_packs_that_others_use_are_not_told_as_removed(root: Root) -> None:
    """A compacted checkpoint may use packs where they lie: they count for what lies there, of nobody's directory."""
    root.compact("c")
    assert set(_prune(root, 2).removed) == {"a", "b"}
    left = {file: num_bytes for file, num_bytes in root.files().items() if file[0] in ("a", "b")}
    history = _history(root)
    assert history.left_bytes == sum(left.values()) > 0
    freed = {event.name: event.written_bytes for event in history.saves if event.name in ("a", "b")}
    assert sum(event.freed_bytes for event in history.of_kind("prune")) == sum(freed.values()) - history.left_bytes
    assert history.kept_bytes == sum(root.files().values())


def test_compactions_of_the_pruned_are_told(root: Root) -> None:
    """What they wrote was written, though others use it now, or nobody."""
    root.compact("b", num_moved=2)
    before = _history(root)
    root.compact("c")
    assert set(_prune(root, 2).removed) == {"a", "b"}
    history = _history(root)
    for kind in ("delta", "compaction"):
        assert _event(history, kind, "b").written_bytes == _event(before, kind, "b").written_bytes > 0
    assert _event(history, "compaction", "b").restore_bytes == _event(before, "compaction", "b").restore_bytes
    assert _event(history, "delta", "b").restore_bytes is None
    assert (history.opening_bytes, history.vanished_bytes) == (0, 0)


def test_a_new_checkpoint_of_an_old_name_is_another(root: Root) -> None:
    """The journal's is told beside it; packs of the old one that are left count once."""
    root.compact("c")
    _prune(root, 2)
    assert ("a", "manifest.json") not in root.files()
    left = sum(num_bytes for (directory, _), num_bytes in root.files().items() if directory == "a")
    root.save("a", 9 * HOUR_NS)
    history = _history(root)
    saves = [(event.at_ns, event.name) for event in history.saves]
    assert saves == [(HOUR_NS, "a"), (2 * HOUR_NS, "b"), (3 * HOUR_NS, "c"), (4 * HOUR_NS, "d"), (9 * HOUR_NS, "a")]
    assert sorted(kept.name for kept in history.kept) == ["a", "c", "d"]
    assert history.kept_bytes == sum(root.files().values())
    assert left > 0
    assert (history.opening_bytes, history.vanished_bytes) == (0, 0)


def test_without_its_parent_nobody_knows_what_a_restore_reads(root: Root) -> None:
    """It is not said to be nothing."""
    root.store.fs.rm(root.at("b"), recursive=True)
    history = _history(root)
    (kept,) = (one for one in history.kept if one.name == "c")
    assert (kept.parent, kept.restore_bytes) == ("../b", None)
    assert _event(history, "delta", "c").restore_bytes is None
    assert history.restore_models_of(kept) is None


def test_links_are_no_saves(root: Root) -> None:
    """A link to a checkpoint is not one more."""
    before = _history(root)
    Path(root.at("newest")).symlink_to(root.at("d"))
    assert len(read_catalog(root.url).checkpoints) == 5
    assert _history(root) == before


def test_what_cannot_be_read_is_named(root: Root) -> None:
    """Of a damaged manifest nothing is known, and that is told."""
    file = Path(root.at("b"), "manifest.json")
    file.write_bytes(file.read_bytes()[:-2])
    root.put("foreign", "notes")
    history = _history(root)
    assert history.unreadable == ("b",)
    assert [event.name for event in history.events] == ["a", "c", "d"]


def test_with_all_removed_a_model_is_what_the_last_baselines_were(root: Root) -> None:
    """Else a restore would have read thousands of models of one byte."""
    _prune(root, 1)
    root.store.fs.rm(root.at("d"), recursive=True)
    history = _history(root)
    assert history.kept == ()
    assert history.model_bytes == max(event.written_bytes for event in history.of_kind("baseline")) > 1


def test_an_empty_root_has_no_history(tmp_path: Path) -> None:
    """Nor one that has never been."""
    for path in (tmp_path, tmp_path / "nothing"):
        assert read_run_history(read_catalog(path)) == RunHistory(str(path), (), ())


@pytest.mark.parametrize("num_stored", [0, 5, 100])
def test_a_model_is_a_baseline_quantized_alike(num_stored: int, tmp_path: Path) -> None:
    """Worked out from a delta of any number of rows, it is what a baseline of it takes, to a few percent."""
    values, scheme = torch.rand(100, 16, generator=torch.Generator().manual_seed(1)), cnr.Asymmetric(4)
    first = hand_made.write(tmp_path / "0", {"t": hand_made.whole(values, is_table=True, scheme=scheme)})
    rows = list(range(num_stored))
    delta = hand_made.write(tmp_path / "1", {"t": hand_made.some_rows(values, rows, scheme=scheme)}, parent=first)
    history = read_run_history(read_catalog(tmp_path))
    assert delta.kind == "delta"
    assert history.events[1].modified_share == num_stored / 100
    assert history.events[1].model_bytes == pytest.approx(first.manifest.blob_bytes, rel=0.05)
    assert history.events[0].model_bytes == first.manifest.blob_bytes


def test_a_prune_counts_what_it_has_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what it had planned, which is refused again and again while somebody loads it."""
    root = Root(tmp_path / "job")
    for number in range(3):
        root.save(str(number), HOUR_NS * (number + 1))
    before = read_catalog(root.url)
    with monkeypatch.context() as patch:
        patch.setattr(execute._Execution, "_why_leased", lambda *_: "leased (a load)")
        for _ in range(5):
            assert run_prune(plan_prune(root.url, Keep(last=1))).freed_bytes == 0
    assert [event.kind for event in _history(root).events] == ["baseline"] * 3
    assert not read_catalog(root.url).journal.files
    _prune(root, 1)
    history = _history(root)
    (freed,) = (event.freed_bytes for event in history.events if event.kind == "prune")
    assert freed == sum(before.entries[name].num_bytes for name in ("0", "1"))
    assert (history.opening_bytes, history.vanished_bytes) == (0, 0)

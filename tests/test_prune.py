"""Pruning: what is kept loads, bit for bit, whatever is removed, whoever works there, and whenever a prune dies."""

import copy
import math
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.killing import every_kill, in_child
from tests.roots import HOUR_NS, NUM_ROWS, File, Root, newest
from torchrec_cnr.errors import ConfigurationError, StoreError
from torchrec_cnr.leases import LEASE_SECS, Lease, holds
from torchrec_cnr.maintenance import annotations, journal
from torchrec_cnr.maintenance.annotations import tag, write_metrics
from torchrec_cnr.maintenance.catalog import read_catalog, read_journal
from torchrec_cnr.maintenance.prune_execution import PruneResult, execute
from torchrec_cnr.maintenance.prune_plan import PrunePlan
from torchrec_cnr.maintenance.pruning import plan_prune
from torchrec_cnr.maintenance.retention import Best, Keep
from torchrec_cnr.manifest import FILE_NAME
from torchrec_cnr.stores import Store

numbers = count()
DAY_NS = 24 * HOUR_NS


def prune(root: Root | str, keep: Keep | None = None, now_ns: int | None = None) -> PruneResult:
    """Plan and execute."""
    return execute(plan_prune(root if isinstance(root, str) else root.url, keep, now_ns=now_ns))


# Any root, pruned by any rules, against a model.


class Model:
    """What must be left of a root, from what was written there."""

    def __init__(self, root: Root, now_ns: int) -> None:
        self.root = root
        self.now_ns = now_ns
        self.there: set[str] = set()  # checkpoints
        self.tags: dict[str, str] = {}
        self.metrics: dict[str, float] = {}
        self.leased: set[str] = set()
        self.saving = False
        self.foreign: set[File] = set()
        self.ours: set[File] = set()  # that no checkpoint needs: to go, unless somebody works in the directory
        self.beside: dict[str, set[str]] = {}  # annotations, by checkpoint

    def wanted(self, keep: Keep) -> set[str]:
        """Checkpoints that retention wants."""
        order = newest(self.root, self.there)
        wanted = set(order[: keep.last])
        by_day: dict[int, str] = {}
        for name in order:
            by_day.setdefault(self.root.checkpoints[name].created_ns // DAY_NS, name)
        days = sorted(by_day, reverse=True)
        wanted |= {by_day[day] for day in (days if keep.daily == "all" else days[: keep.daily])}
        if keep.best is not None:
            sign = 1 if keep.best.largest else -1
            valued = [name for name in order if not math.isnan(self.metrics.get(name, math.nan))]
            wanted |= set(sorted(valued, key=lambda name: -sign * self.metrics[name])[: keep.best.n])
        return wanted | ({name for name in self.there if name in self.tags} if keep.tagged else set())

    def kept(self, keep: Keep) -> tuple[set[str], set[File]]:
        """Checkpoints that stay, and packs."""
        roots = self.wanted(keep) | (self.leased & self.there)
        if self.saving:
            of_lineage: dict[str, str] = {}
            for name in reversed(newest(self.root, self.there)):
                links = [link for link in self.root.saved_on(name)]
                first_gone = next((n for n, link in enumerate(links) if link not in self.there), len(links))
                of_lineage[links[first_gone - 1]] = name
            roots |= set(of_lineage.values())
        names: set[str] = set()
        packs: set[File] = set()
        for name in roots:
            needed, used = self.root.needs(name, self.there, by_any=name in self.leased)
            names, packs = names | needed, packs | used
        return names, packs

    def files(self, kept: Collection[str], packs: set[File], before: Collection[File]) -> set[File]:
        """All files that stay."""
        stay = set(packs) | self.foreign
        stay |= {file for file in before if file[0] in self.leased}
        for name in kept:
            written = self.root.checkpoints[name]
            manifests = {FILE_NAME, *(f"manifest-{sha256}.json" for sha256 in written.sha256s[:-1])}
            stay |= {(name, file) for file in manifests | self.beside.get(name, set())}
        return stay & set(before)


def _draw_checkpoints(draw: Callable[[st.SearchStrategy[Any]], Any], model: Model, num: int, first_ns: int) -> None:
    """Baselines and deltas, of which some are compacted, once or twice."""
    root, at_ns = model.root, first_ns
    for _ in range(num):
        at_ns += draw(st.sampled_from([1, 7, 26])) * HOUR_NS
        name = f"step-{len(root.checkpoints)}"
        parent = draw(st.sampled_from([None, *sorted(model.there)])) if model.there else None
        first = draw(st.integers(0, NUM_ROWS - 1))
        root.save(name, at_ns, parent, range(first, draw(st.integers(first + 1, NUM_ROWS))))
        model.there.add(name)
    for name in draw(st.lists(st.sampled_from(sorted(model.there)), max_size=3)):
        above = list(root.lineage(name))[:-1]
        since = draw(st.sampled_from([None, *above]))
        root.compact(name, since, 0 if since else draw(st.integers(0, len(above) + 1)))


def _draw_annotations(draw: Callable[[st.SearchStrategy[Any]], Any], model: Model) -> None:
    some = st.sets(st.sampled_from(sorted(model.there)), max_size=2)
    for name in draw(some):
        model.tags[name] = draw(st.sampled_from(["release", "v1.0"]))
        tag(model.root.at(name), model.tags[name])
    for name in draw(some):
        model.metrics[name] = draw(st.sampled_from([0.5, 0.75, -1.0, math.nan]))
        write_metrics(model.root.at(name), {"auc": model.metrics[name], "loss": 1.0})
    for name in model.there:
        found = model.root.store.at(name).names()
        model.beside[name] = {file for file in found if file.startswith("metrics-") or file.endswith(".tag")}


def _draw_others(draw: Callable[[st.SearchStrategy[Any]], Any], model: Model) -> None:
    """Leases, and what belongs to no checkpoint: of ours, and of somebody else."""
    root, now_ns = model.root, model.now_ns
    some = st.sets(st.sampled_from(sorted(model.there)), max_size=2)
    for name in draw(some):
        root.lease(name, now_ns + HOUR_NS, draw(st.sampled_from(["save", "load", "compact"])))
        model.leased.add(name)
    for name in draw(some):
        model.ours.add((name, root.lease(name, now_ns - HOUR_NS)))
        model.ours.add((name, root.put_pack(name)))
        model.ours.add((name, root.put(name, f"{root.new_id()}.manifest.json")))
    for name in draw(some):
        model.foreign.add((name, root.put(name, f"notes-{next(numbers)}.txt")))
    if draw(st.booleans()):
        name = f"died-{next(numbers)}"
        model.ours.add((name, root.put_pack(name)))
        model.ours.add((name, root.lease(name, now_ns - 1, "save")))
    if draw(st.integers(0, 3)) == 0:
        name = f"saving-{next(numbers)}"
        root.put_pack(name)
        root.lease(name, now_ns + HOUR_NS, "save")
        model.leased.add(name)
        model.saving = True
    if draw(st.booleans()):
        name = f"logs-{next(numbers)}"
        model.foreign.add((name, root.put_pack(name)))
        model.foreign.add((name, root.put(name, "events.log")))


keeps = st.builds(
    Keep,
    last=st.integers(1, 3),
    daily=st.sampled_from([0, 0, 1, 2, "all"]),
    best=st.none() | st.builds(Best, st.just("auc"), st.integers(1, 2), st.booleans()),
    tagged=st.booleans(),
)


def _prune_and_compare(model: Model, keep: Keep) -> None:
    root = model.root
    before = root.files()
    kept, packs = model.kept(keep)
    expected = model.files(kept, packs, before)
    plan = plan_prune(root.url, keep, now_ns=model.now_ns)
    assert str(plan).count("\n") >= len(plan.removals)
    assert {checkpoint.name for checkpoint in plan.pruned} == model.there - kept
    assert model.there.intersection(plan.stays) >= kept
    assert root.files() == before, "a plan changes nothing"
    result = execute(plan)
    after = root.files()
    assert set(after) == expected, (
        sorted(set(after) - expected),
        sorted(expected - set(after)),
        str(plan),
        str(result),
    )
    assert result.failed == {}
    assert set(result.removed) == model.there - kept
    assert result.freed_bytes == plan.freed_bytes == sum(before.values()) - sum(after.values())
    assert plan.left_bytes == sum(after.values())
    assert root.directories() >= {directory for directory, _ in after if directory}
    if root.store.has_directories:
        assert root.directories() == {directory for directory, _ in after if directory}
    root.assert_loads(kept)
    again = plan_prune(root.url, keep, now_ns=model.now_ns)
    assert again.is_empty, str(again)
    assert read_journal(read_catalog(root.url)) == list(again.catalog.pruned)
    assert model.there - kept <= {checkpoint.name for checkpoint in again.catalog.pruned}
    model.there = kept


@settings(max_examples=60)
@given(data=st.data(), keep=keeps, later=keeps)
@pytest.mark.parametrize("where", ["local", "memory"])
def test_a_prune_leaves_what_is_kept_and_nothing_else_of_ours(
    tmp_path_factory: pytest.TempPathFactory, where: str, data: st.DataObject, keep: Keep, later: Keep
) -> None:
    """Twice, with checkpoints in between: what stays, loads; what goes, is gone; what is not ours, is untouched."""
    url = str(tmp_path_factory.mktemp("root")) if where == "local" else f"memory://prune-{next(numbers)}"
    now_ns = time.time_ns()
    model = Model(Root(url), now_ns)
    try:
        for round_, rules in enumerate((keep, later)):
            _draw_checkpoints(data.draw, model, data.draw(st.integers(1, 5)), now_ns - (20 - 10 * round_) * DAY_NS)
            _draw_annotations(data.draw, model)
            _draw_others(data.draw, model)
            _prune_and_compare(model, rules)
    finally:
        model.root.store.fs.rm(model.root.store.path, recursive=True)


# Killed at any operation.

KEEP = Keep(last=2, best=Best("auc"))


def _busy_root(url: str) -> Root:
    """Something of all that a prune may find: lineages, compacted and not, packs of others, what was pruned and died."""
    root, at_ns = Root(url), iter(range(time.time_ns() - 9 * DAY_NS, time.time_ns(), HOUR_NS))
    for name, parent in [("a-0", None), ("a-1", "a-0"), ("a-2", "a-1"), ("b-0", None), ("b-1", "b-0"), ("b-2", "b-1")]:
        root.save(name, next(at_ns), parent, range(4, 20) if name == "a-1" else range(3))
    root.compact("a-2")
    prune(root, Keep(last=4))
    assert root.directories() == {"a-0", "a-1", "a-2", "b-0", "b-1", "b-2"}
    assert {name for name in root.directories() if root.store.at(name).exists(FILE_NAME)} == {
        "a-2",
        "b-0",
        "b-1",
        "b-2",
    }
    root.compact("a-2", num_moved=1)  # nobody uses the packs in a-0 and a-1 any more
    root.compact("b-2")  # of b-0 it uses packs
    for name, parent in [("c-0", None), ("c-1", "c-0"), ("c-2", "c-1"), ("d-0", "b-2"), ("d-1", "d-0")]:
        root.save(name, next(at_ns), parent, range(8))
    root.compact("d-1", since="b-2")
    write_metrics(root.at("c-1"), {"auc": 0.75})
    write_metrics(root.at("a-2"), {"auc": 0.5})
    tag(root.at("c-0"), "release")
    for name in ("c-1", "c-2", "d-1"):
        root.put_pack(name)
        root.put(name, f"{root.new_id()}.manifest.json")
        root.lease(name, time.time_ns() - 1)
    root.put("c-2", "notes.txt")
    for name in ("died-0", "died-1"):
        root.put_pack(name)
        root.lease(name, time.time_ns() - 1, "save")
    for number in range(journal.NUM_FOLDED - 1):
        journal.write_file(root.store.at("journal"), (), [f"died-before-{number}"], time.time_ns())
    return root


def _prune_by_keep(root: str) -> None:
    assert execute(plan_prune(root, KEEP)).failed == {}


def _copy(source: Path, target: Path) -> str:
    shutil.copytree(source, target, copy_function=os.link)  # files are written once
    return str(target)


def test_a_prune_that_is_killed_before_any_operation(tmp_path: Path) -> None:
    """Every checkpoint that is kept then loads, and the next prune ends where an undisturbed one does."""
    root = _busy_root(str(tmp_path / "job"))
    done = root.moved(_copy(tmp_path / "job", tmp_path / "done"))
    plan = plan_prune(done.url, KEEP)
    assert {checkpoint.name for checkpoint in plan.pruned} == {"a-2", "b-0", "b-1", "c-2"}
    assert len(plan.removals) >= 8
    assert plan.folds_journal
    _prune_by_keep(done.url)
    kept = set(done.checkpoints) - {checkpoint.name for checkpoint in read_journal(done.url)}
    assert kept == {"b-2", "c-0", "c-1", "d-0", "d-1"}
    assert done.files() != root.files()
    seen: set[Any] = set()
    for kill in every_kill(lambda number: _copy(tmp_path / "job", tmp_path / str(number)), _prune_by_keep):
        left = root.moved(kill.root)
        state = (frozenset(left.files()), frozenset(left.directories()), frozenset(left.store.at("journal").names()))
        if state not in seen:
            seen.add(state)
            left.assert_loads(kept)
            _prune_by_keep(kill.root)
            assert left.files() == done.files()
            assert left.directories() == done.directories()
            left.assert_loads(kept)
            assert read_names(kill.root) == read_names(done.url)
            assert plan_prune(kill.root, KEEP).is_empty
        shutil.rmtree(kill.root)
    assert len(seen) > len(root.files()) - len(done.files()), "each file that goes makes another state"


def read_names(root: str) -> list[str]:
    """What a journal tells was pruned."""
    return [checkpoint.name for checkpoint in read_journal(root)]

"""Any root, pruned by any rules, against a model."""

import math
import time
from collections.abc import Callable, Collection
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.maintenance.pruning.roots_to_prune import keeps
from tests.support.roots import DAY_NS, HOUR_NS, NUM_ROWS, File, Root, newest
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.maintenance.catalog import read_catalog, read_journal
from torchrec_cnr.maintenance.pruning.execute import run_prune
from torchrec_cnr.maintenance.pruning.plan import plan_prune
from torchrec_cnr.maintenance.pruning.retention import Keep
from torchrec_cnr.maintenance.tags_and_metrics import tag, write_metrics

numbers = count()


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
            manifests = {MANIFEST_FILE, *(f"manifest-{sha256}.json" for sha256 in written.sha256s[:-1])}
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
    if draw(st.booleans()):
        name = f"logs-{next(numbers)}"
        model.foreign.add((name, root.put_pack(name)))
        model.foreign.add((name, root.put(name, "events.log")))


def _prune_and_compare(model: Model, keep: Keep) -> None:
    root = model.root
    before = root.files()
    kept, packs = model.kept(keep)
    expected = model.files(kept, packs, before)
    plan = plan_prune(root.url, keep, now_ns=model.now_ns)
    assert str(plan).count("\n") >= len(plan.removals)
    assert {checkpoint.name for checkpoint in plan.pruned} == model.there - kept
    assert model.there.intersection(plan.stays) >= kept
    assert {removal.files[0] for removal in plan.removals if removal.pruned} <= {MANIFEST_FILE}
    assert root.files() == before, "a plan changes nothing"
    result = run_prune(plan)
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
    if root.store.is_local:
        assert root.directories() == {directory for directory, _ in after if directory}
    root.assert_loads(kept)
    again = plan_prune(root.url, keep, now_ns=model.now_ns)
    assert again.is_empty, str(again)
    assert read_journal(read_catalog(root.url)) == list(again.catalog.pruned)
    assert model.there - kept <= {checkpoint.name for checkpoint in again.catalog.pruned}
    model.there = kept


@pytest.mark.long
@settings(max_examples=40)
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

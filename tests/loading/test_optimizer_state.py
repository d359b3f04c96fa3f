"""Optimizer state under another name: which saved state belongs to which, and what it loads as in one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import torchrec_cnr as cnr
from tests.support import models
from tests.support.jobs import load_into, refusal
from tests.support.models import differing, whole
from torchrec_cnr.loading.optimizer_state import Pairing, StateName, pair

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore::FutureWarning")

TABLE = "ebc.embedding_bags.t0.weight"

# Names.


@pytest.mark.parametrize(
    ("fqn", "expected"),
    [
        (f"fused.state.{TABLE}.t0.momentum1", (f"fused.state.{TABLE}.t0.", TABLE, "momentum1", True)),
        (f"dense.state.{TABLE}.sum", (f"dense.state.{TABLE}.", TABLE, "sum", False)),
        (f"state.{TABLE}.step", (f"state.{TABLE}.", TABLE, "step", False)),
        (f"a.b.state.opt.{TABLE}.t0.iter", (f"a.b.state.opt.{TABLE}.t0.", f"opt.{TABLE}", "iter", True)),
        ("o.state.my.state.t.weight.sum", ("o.state.my.state.t.weight.", "my.state.t.weight", "sum", False)),
        (f"dense.state.{TABLE}.t1.momentum1", None),  # of another table
        (f"dense.states.{TABLE}.sum", None),
        (f"dense.{TABLE}.sum", None),
        ("dense.state.over.bias.sum", None),
        ("dense.state.weight.sum", None),
        (TABLE, None),
    ],
)
def test_names_are_taken_apart(fqn: str, expected: tuple[str, str, str, bool] | None) -> None:
    """The key is what stands behind ``state.`` up to ``weight``; a fused optimizer repeats the table's name."""
    found = StateName.parse(fqn)
    assert (found and (found.group, found.key, found.name, found.is_fused)) == expected


@dataclass(frozen=True)
class _Family:
    """What one kind of optimizer calls its state.

    Attributes:
        pairs: Fused names by those of ``torch.optim``.
        fused_only: What only the fused one has.
        plain_only: What only the other has.
    """

    pairs: Mapping[str, str]
    fused_only: tuple[str, ...] = ()
    plain_only: tuple[str, ...] = ()

    def names(self, is_fused: bool) -> list[str]:
        return [*self.pairs.values(), *self.fused_only] if is_fused else [*self.pairs, *self.plain_only]


FAMILIES = {
    "adagrad": _Family({"sum": "momentum1"}, plain_only=("step",)),
    "counter": _Family({"sum": "momentum1", "step": "iter"}, fused_only=("prev_iter", "row_counter")),
    "ensemble": _Family({"sum": "momentum1"}, fused_only=("sparse_ema",), plain_only=("step",)),
    "adam": _Family({"exp_avg": "momentum1", "exp_avg_sq": "exp_avg_sq"}, plain_only=("step",)),
    "amsgrad": _Family({"exp_avg": "momentum1", "exp_avg_sq": "exp_avg_sq"}, plain_only=("step", "max_exp_avg_sq")),
    "adam by rows": _Family(
        {"exp_avg": "momentum1", "exp_avg_sq": "exp_avg_sq"}, fused_only=("row_counter",), plain_only=("step",)
    ),
}
# What stands before ``state.``, and before the parameter in its key, with a fused optimizer and without.
STYLES = {
    "combined": (("optim", ""), ("optim", "")),
    "two entries": (("fused", ""), ("dense", "")),
    "combined with prefixes": (("optim", "fused."), ("optim", "dense.")),
    "at the root": (("", ""), ("", "")),
}


def _fqns(style: str, table: str, family: str, is_fused: bool) -> dict[str, str]:
    """The FQN of each of a table's states, by its name in that kind of optimizer."""
    entry, own = STYLES[style][0 if is_fused else 1]
    start = f"{entry}.state.{own}{table}." if entry else f"state.{own}{table}."
    middle = f"{table.split('.')[-2]}." if is_fused else ""
    return {name: f"{start}{middle}{name}" for name in FAMILIES[family].names(is_fused)}


def _pair(wanted: Sequence[str], saved: Sequence[str], weights: Sequence[str] = ()) -> Pairing:
    return pair(dict.fromkeys(wanted, (1,)), dict.fromkeys(saved, (1,)), weights)


tables = st.lists(
    st.sampled_from(["ebc.embedding_bags.t0", "ebc.embedding_bags.t1", "item.ebc.embedding_bags.t0", "t0", "e.weight"]),
    unique=True,
    min_size=1,
)


@given(st.data(), tables, st.sampled_from(sorted(STYLES)), st.booleans())
def test_state_is_paired_where_a_table_changed_its_kind_of_optimizer(
    data: st.DataObject, tables: list[str], style: str, with_model: bool
) -> None:
    """Whatever changes and whatever stays: each state of a table that changed is paired with the one of its role."""
    wanted, saved, renamed, tolerated = set[str](), set[str](), dict[str, str](), set[str]()
    for table in tables:
        family = data.draw(st.sampled_from(sorted(FAMILIES)))
        was_fused, is_fused = data.draw(st.booleans()), data.draw(st.booleans())
        old = _fqns(style, f"{table}.weight", family, was_fused)
        new = _fqns(style, f"{table}.weight", family, is_fused)
        wanted |= set(new.values())
        saved |= set(old.values())
        if was_fused == is_fused or (style == "combined with prefixes" and not with_model):
            continue
        for plain, fused in FAMILIES[family].pairs.items():
            renamed[new[fused if is_fused else plain]] = old[plain if is_fused else fused]
        tolerated |= {new[name] for name in new if new[name] not in renamed}
        tolerated |= {old[name] for name in old if old[name] not in renamed.values()}
    found = _pair(sorted(wanted), sorted(saved), [f"{table}.weight" for table in tables] if with_model else [])
    assert found == Pairing(renamed, frozenset(tolerated), {})


fqns = st.builds(
    lambda *parts: ".".join(filter(None, parts)),
    st.sampled_from(["", "a", "b"]),
    st.sampled_from(["state", "states"]),
    st.sampled_from(["", "o", "x"]),
    st.sampled_from(["x.t.weight", "y.t.weight", "t.weight", "t.bias"]),
    st.sampled_from(["", "t", "u"]),
    st.sampled_from(["momentum1", "sum", "exp_avg", "exp_avg_sq", "iter", "step", "row_counter"]),
)


@example(
    wanted={"state.y.t.weight.exp_avg_sq"}, saved={"state.y.t.weight.t.exp_avg_sq"}, weights={"x.t.weight"}
)  # of no weight that is known, but of one key
@given(
    wanted=st.sets(fqns, max_size=12),
    saved=st.sets(fqns, max_size=12),
    weights=st.sets(st.sampled_from(["x.t.weight", "t.weight"])),
)
def test_nothing_else_is_ever_paired(wanted: set[str], saved: set[str], weights: set[str]) -> None:
    """Of any names: pairs are one to one, between what one side alone has, of one table, one fused and one not."""
    found = _pair(sorted(wanted), sorted(saved), sorted(weights))
    assert len(set(found.renamed.values())) == len(found.renamed)
    assert set(found.renamed) <= wanted - saved
    assert set(found.renamed.values()) <= saved - wanted
    assert found.tolerated <= wanted ^ saved
    assert not found.tolerated & {*found.renamed, *found.renamed.values()}
    for fqn, old in found.renamed.items():
        new_name, old_name = StateName.parse(fqn), StateName.parse(old)
        assert new_name is not None
        assert old_name is not None
        assert new_name.is_fused != old_name.is_fused
        keys = (new_name.key, old_name.key)
        assert keys[0] == keys[1] or any(all(key.endswith(weight) for key in keys) for weight in weights)


@pytest.mark.parametrize(
    ("wanted", "saved"),
    [
        (["fused.state.a.t0.weight.t0.momentum1"], ["dense.state.b.t0.weight.sum"]),  # another table
        (["fused.state.t0.weight.t0.momentum1"], ["dense.state.t0.weight.exp_avg"]),  # Adagrad, and Adam
        (["fused.state.t0.weight.t0.momentum1", "fused.state.t0.weight.t0.exp_avg_sq"], ["dense.state.t0.weight.sum"]),
        (["fused.state.t0.weight.t0.momentum1"], ["d.state.t0.weight.momentum_buffer"]),  # Adagrad, and SGD
        (["new.state.t0.weight.sum"], ["old.state.t0.weight.sum"]),  # the same kind under another name
        (["new.state.t0.weight.t0.momentum1"], ["old.state.t0.weight.t0.momentum1"]),
        (["dense.state.over.weight.sum"], ["optim.state.over.weight.sum"]),
        (["fused.state.t0.weight.t0.row_counter"], ["dense.state.t0.weight.step"]),
    ],
)
def test_what_is_not_the_same_is_not_paired(wanted: list[str], saved: list[str]) -> None:
    """Another table, another role, another optimizer, or merely another entry of the state dict: no pair."""
    assert _pair(wanted, saved, ["t0.weight"] if "a.t0" not in wanted[0] else []) == Pairing({}, frozenset(), {})


def test_what_an_optimizer_needs_is_never_tolerated() -> None:
    """Where one of Adam's two moments has no counterpart, its going missing is not passed over."""
    wanted = [f"f.state.{TABLE}.t0.momentum1", f"f.state.{TABLE}.t0.exp_avg_sq"]
    found = _pair(wanted, [f"d.state.{TABLE}.exp_avg", f"d.state.{TABLE}.step"])
    assert found == Pairing({wanted[0]: f"d.state.{TABLE}.exp_avg"}, frozenset({f"d.state.{TABLE}.step"}), {})


def test_two_candidates_are_ambiguous() -> None:
    """Two saved states for one wanted, or two wanted for one saved: neither is chosen."""
    fused, sums = f"f.state.{TABLE}.t0.momentum1", [f"a.state.{TABLE}.sum", f"b.state.{TABLE}.sum"]
    assert _pair([fused], sums) == Pairing({}, frozenset(), {fused: tuple(sums)})
    assert _pair(sums, [fused]) == Pairing({}, frozenset(), {fused: tuple(sums)})


# Loads in one process.


def _state_dict(style: str, states: Mapping[str, Tensor], is_fused: bool, fill: float | None = None) -> dict[str, Any]:
    """A state dict with one table and the state of its optimizer, which may be filled with one value."""
    entry, own = STYLES[style][0 if is_fused else 1]
    middle = "t0." if is_fused else ""
    values = {f"{middle}{name}": state.clone() if fill is None else state * 0 + fill for name, state in states.items()}
    table = torch.arange(24.0).view(6, 4) if fill is None else torch.full((6, 4), fill)
    optim = {"state": {f"{own}{TABLE}": values}}
    return {"model": {TABLE: table}} | ({entry: optim} if entry else optim)


ROWS, CELLS = torch.arange(1.0, 7.0), torch.arange(1.0, 25.0).view(6, 4)
STEP, ITER = torch.tensor(5.0), torch.tensor([4, 5])
STATES: Mapping[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {  # fused, and of torch.optim
    "row-wise": ({"momentum1": ROWS}, {"sum": ROWS[:, None], "step": STEP}),
    "element-wise": ({"momentum1": CELLS}, {"sum": CELLS, "step": STEP}),
    "counter": (
        {"momentum1": ROWS, "prev_iter": ROWS, "row_counter": ROWS, "iter": ITER},
        {"sum": ROWS[:, None], "step": STEP},
    ),
    "adam": ({"momentum1": CELLS, "exp_avg_sq": -CELLS}, {"exp_avg": CELLS, "exp_avg_sq": -CELLS, "step": STEP}),
}


@pytest.mark.parametrize("to_fused", [True, False], ids=["to fused", "from fused"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("family", STATES)
def test_state_loads_under_its_other_name(tmp_path: Path, family: str, style: str, to_fused: bool) -> None:
    """Every value arrives, in both directions; what has no counterpart stays, and is reported."""
    fused, plain = STATES[family]
    old, new = (plain, fused) if to_fused else (fused, plain)
    dcp.save(
        _state_dict(style, old, not to_fused), storage_writer=models.writer(tmp_path), planner=cnr.CNRSavePlanner()
    )
    target = _state_dict(style, new, to_fused, fill=-9.0)
    report = load_into(target, tmp_path)
    loaded = whole(target)
    expected = whole(_state_dict(style, new, to_fused))
    has_iter = family == "counter"
    assert set(differing(loaded, expected)) == {*report.missing, *(fqn for fqn in loaded if fqn.endswith(".iter"))}
    assert all(bool((loaded[fqn] == -9.0).all()) for fqn in report.missing)
    for fqn in (fqn for fqn in loaded if fqn.endswith(".iter")):
        assert loaded[fqn].tolist() == [5, 5]
    one_sided = {"prev_iter", "row_counter"} if has_iter else {"step"} & set(plain)
    left = report.missing if (has_iter == to_fused) else report.unexpected
    assert {fqn.split(".")[-1] for fqn in left} == one_sided
    assert len(report.missing) + len(report.unexpected) == len(one_sided)
    assert len(report.renamed) == min(len(fused), len(plain))
    assert set(report.renamed) == {fqn for fqn in report.loaded if ".state." in f".{fqn}"}


def test_counts_of_steps_take_the_largest(tmp_path: Path) -> None:
    """One value a shard becomes one value, and fewer or more shards each get the largest."""
    fused = STATES["counter"][0]
    dcp.save(_state_dict("two entries", fused, True), storage_writer=models.writer(tmp_path))
    for num_shards in (1, 3):
        target = _state_dict("two entries", {**fused, "iter": torch.zeros(num_shards, dtype=torch.int64)}, True)
        report = load_into(target, tmp_path)
        fqn = f"fused.state.{TABLE}.t0.iter"
        assert whole(target)[fqn].tolist() == [5] * num_shards
        assert report.reshaped == {fqn: ((2,), (num_shards,))}
        assert report.renamed == {}


def test_sizes_and_dtypes_are_compared_under_other_names_too(tmp_path: Path) -> None:
    """Element-wise state is no row-wise state, and a dtype is not converted."""
    saved = _state_dict("two entries", STATES["element-wise"][1], False)
    dcp.save(saved, storage_writer=models.writer(tmp_path))
    rows = _state_dict("two entries", {"momentum1": ROWS}, True)
    message = refusal(rows, tmp_path, allow_partial_load=True)
    assert f"1 of another size: 'fused.state.{TABLE}.t0.momentum1' (saved [6, 4], wanted [6])" in message
    halves = _state_dict("two entries", {"momentum1": CELLS.half()}, True)
    assert "1 of another dtype: 'fused.state" in refusal(halves, tmp_path)


@pytest.mark.parametrize("to_fused", [True, False], ids=["to fused", "from fused"])
def test_a_momentum_is_no_sum_of_squares(tmp_path: Path, to_fused: bool) -> None:
    """State of another optimizer is a mismatch, whichever side is fused: its root would be NaN."""
    fused, plain = {"momentum1": CELLS}, {"momentum_buffer": -CELLS}
    old, new = (plain, fused) if to_fused else (fused, plain)
    dcp.save(_state_dict("two entries", old, not to_fused), storage_writer=models.writer(tmp_path))
    target = _state_dict("two entries", new, to_fused, fill=-9.0)
    message = refusal(target, tmp_path)
    assert "1 not in the checkpoint" in message
    assert "1 not in the state dict" in message
    assert load_into(target, tmp_path, allow_partial_load=True).loaded == (f"model.{TABLE}",)


@pytest.mark.parametrize("to_adam", [True, False])
def test_fused_state_of_another_optimizer_is_refused_under_its_name(tmp_path: Path, to_adam: bool) -> None:
    """Adam and Adagrad both call their first state momentum1: a partial load does not take one for the other."""
    adagrad, adam = {"momentum1": CELLS}, {"momentum1": -CELLS, "exp_avg_sq": CELLS}
    old, new = (adagrad, adam) if to_adam else (adam, adagrad)
    dcp.save(_state_dict("two entries", old, True), storage_writer=models.writer(tmp_path))
    message = refusal(_state_dict("two entries", new, True, fill=-9.0), tmp_path, allow_partial_load=True)
    assert f"1 state of another kind of optimizer under the same name: 'fused.state.{TABLE}.t0.momentum1'" in message


def test_two_candidates_are_refused_by_name(tmp_path: Path) -> None:
    """Where two saved states could be meant, the error names both, in either mode."""
    saved = _state_dict("two entries", STATES["row-wise"][1], False)
    saved["other"] = saved["dense"]
    dcp.save(saved, storage_writer=models.writer(tmp_path))
    for partial in (False, True):
        target = _state_dict("two entries", STATES["row-wise"][0], True)
        message = refusal(target, tmp_path, allow_partial_load=partial)
        assert f"(may be 'dense.state.{TABLE}.sum' or 'other.state.{TABLE}.sum')" in message


def test_a_missing_state_of_another_table_is_not_tolerated(tmp_path: Path) -> None:
    """That one table changed its optimizer excuses nothing of another, nor of an optimizer that is there twice."""
    saved = _state_dict("two entries", STATES["row-wise"][1], False)
    saved["dense"]["state"]["over.weight"] = {"step": STEP, "sum": ROWS}
    dcp.save(saved, storage_writer=models.writer(tmp_path))
    message = refusal(_state_dict("two entries", STATES["row-wise"][0], True), tmp_path)
    assert "2 not in the state dict: 'dense.state.over.weight.step', 'dense.state.over.weight.sum'\n" in message

"""cnr ls: lineages drawn as trees, in text and JSON; on real checkpoints, local and in memory."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import torchrec_cnr as cnr
from tests.attacks.draft import Draft
from tests.cli.empty_commits import NAMES, planned_bytes
from tests.support import runs
from tests.support.command_line import cnr_json, cnr_text
from torchrec_cnr.cli.app import app
from torchrec_cnr.cli.commands.ls import Gap, Line, draw, visible
from torchrec_cnr.format.manifest import CheckpointRef, History, Manifest
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.maintenance.catalog import Catalog, Entry
from torchrec_cnr.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def test_ls_draws_lineages(run: Path) -> None:
    """Each checkpoint once, below what it stands on, branches apart, with its size, rows and what a restore reads."""
    lines = cnr_text("ls", run).splitlines()
    assert [line.split("  ")[0] for line in lines[1:6]] == ["step-1", "step-2", "├─ step-3", "branch-3", "branch-4"]
    assert re.search(r"baseline +52 +100\.0% +[\d.]+ KB +[\d.]+ KB +\d+ s", lines[1])
    assert re.search(r"delta +\d+ +\d+\.\d%", lines[2])
    assert lines[-1].startswith("5 checkpoints: 1 baseline and 4 deltas, ")
    assert lines[-1].endswith("newest is branch-4")


def test_a_parent_that_is_newer_than_its_child_is_listed(tmp_path: Path) -> None:
    """Such a child does not load, by the format: its row tells no bytes of a restore, and other commands run too."""
    parent = ("step-2", Draft(2).write(tmp_path / "step-2"))
    Draft(1, parent).write(tmp_path / "step-1")
    rows = {row["name"]: row for row in cnr_json("ls", tmp_path)["checkpoints"]}
    assert rows["step-1"]["restore_bytes"] is None
    assert rows["step-2"]["restore_bytes"] > 0
    assert "step-1" in cnr_text("ls", tmp_path)
    assert CliRunner().invoke(app, ["prune", str(tmp_path), "--last", "1"]).exit_code == 0
    assert CliRunner().invoke(app, ["verify", "--all", str(tmp_path)]).exit_code == 1


def test_ls_tells_programs_the_same(run: Path) -> None:
    """The document's keys are fixed; its values are those of the catalog."""
    document = cnr_json("ls", run)
    assert list(document) == ["root", "checkpoints", "others"]
    assert (document["root"], document["others"]) == (str(run), [])
    assert [entry["name"] for entry in document["checkpoints"]] == list(NAMES)
    for entry in document["checkpoints"]:
        checkpoint = cnr.read_checkpoint(run / entry["name"])
        assert entry == {
            "name": entry["name"],
            "path": str(run / entry["name"]),
            "kind": checkpoint.kind,
            "is_compacted": False,
            "is_abandoned": False,
            "is_head": entry["name"] in ("step-3", "branch-4"),
            "parent": checkpoint.parent,
            "needed_of_other_roots": [],
            "is_parent_here": True,
            "created_ns": checkpoint.created_ns,
            "num_rows": checkpoint.num_rows,
            "num_table_rows": 52,
            "num_bytes": sum(path.stat().st_size for path in (run / entry["name"]).iterdir()),
            "log_bytes": 0,
            "restore_bytes": planned_bytes(run / entry["name"]),
        }


def test_ls_tells_apart_what_is_no_checkpoint(run: Path, tmp_path: Path) -> None:
    """Damaged, newer, unfinished, empty and foreign directories, none of which hides the checkpoints."""
    root = tmp_path / "run"
    shutil.copytree(run, root)
    manifest = (root / "step-1" / "manifest.json").read_bytes()
    shutil.copytree(root / "step-3", root / "newer")
    runs.change_manifest(root / "newer", rb'"version":\d+', b'"version":99')
    for name in ("damaged", "unfinished", "empty", "foreign"):
        (root / name).mkdir()
    (root / "damaged" / "manifest.json").write_bytes(manifest[:-2])
    (root / "unfinished" / "5a7e-0-0.safetensors").write_bytes(b"12345")
    (root / "foreign" / "notes").write_bytes(b"123")
    (root / "file").write_bytes(b"")
    document = cnr_json("ls", root)
    assert [entry["name"] for entry in document["checkpoints"]] == list(NAMES)
    assert {entry["name"]: entry["state"] for entry in document["others"]} == {
        name: name for name in ("damaged", "newer", "unfinished", "empty", "foreign")
    }
    assert {entry["name"]: entry["num_bytes"] for entry in document["others"] if entry["name"] != "newer"} == {
        "damaged": len(manifest) - 2,
        "unfinished": 5,
        "empty": 0,
        "foreign": 3,
    }
    messages = {entry["name"]: entry["message"] for entry in document["others"]}
    assert "version 99" in messages["newer"]
    assert "not a complete manifest" in messages["damaged"]
    text = cnr_text("ls", root)
    for words in (
        r"damaged +corrupt +.*not a complete",
        "newer +newer version",
        "unfinished +unfinished +1 file, 5 B",
    ):
        assert re.search(words, text)


def test_ls_tells_of_parents_that_are_not_here(run: Path, tmp_path: Path) -> None:
    """A delta whose parent is gone begins a tree, and says so; nobody can tell what a restore reads."""
    shutil.copytree(run / "step-2", tmp_path / "step-2")
    shutil.copytree(run / "step-3", tmp_path / "step-3")
    lines = cnr_text("ls", tmp_path).splitlines()
    assert re.search(r"^step-2 +delta, parent missing .* \? ", lines[1])
    assert re.search(r"^step-3 +delta  .* \? ", lines[2])
    first, second = cnr_json("ls", tmp_path)["checkpoints"]
    assert (first["is_parent_here"], first["restore_bytes"]) == (False, None)
    assert (second["is_parent_here"], second["restore_bytes"]) == (True, None)


def test_ls_tells_of_compacted_checkpoints(run: Path, tmp_path: Path) -> None:
    """What the save wrote, whatever the new manifest holds, and that there is one."""
    root = tmp_path / "run"
    shutil.copytree(run, root)
    before = {entry["name"]: entry for entry in cnr_json("ls", root)["checkpoints"]}
    cnr.compact(root / "step-3")
    entries = {entry["name"]: entry for entry in cnr_json("ls", root)["checkpoints"]}
    assert [name for name, entry in entries.items() if entry["is_compacted"]] == ["step-3"]
    for name, entry in entries.items():
        assert (entry["kind"], entry["num_rows"]) == (before[name]["kind"], before[name]["num_rows"])
    text = cnr_text("ls", root)
    assert "delta, compacted" in text
    assert "5 checkpoints: 1 baseline and 4 deltas, 1 of them compacted, " in text
    assert cnr_text("inspect", root / "step-3").splitlines()[0].endswith("delta, compacted")


def test_ls_tells_what_is_left_of_the_pruned(tmp_path: Path) -> None:
    """Packs that a compacted checkpoint uses are no save that died."""
    root = tmp_path / "run"
    planner, state = cnr.CNRSavePlanner(policy=cnr.Full()), {"t": torch.rand(50, 4)}
    for step in range(2):
        writer = cnr.CNRStorageWriter(root / f"step-{step}")
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    cnr.execute(cnr.plan_prune(root, cnr.Keep(last=1)))
    (root / "step-0").mkdir()
    (root / "step-0" / "5a7e-0-0.safetensors").write_bytes(b"12345")
    (other,) = cnr_json("ls", root)["others"]
    assert (other["name"], other["state"]) == ("step-0", "pruned")
    assert cnr_text("ls", root).rstrip().endswith("compacted checkpoints use them, or the next prune removes them")


def test_ls_of_nothing(tmp_path: Path) -> None:
    """An empty root is no error."""
    assert cnr_text("ls", tmp_path) == f"no checkpoints under {tmp_path}\n"
    assert cnr_json("ls", tmp_path) == {"root": str(tmp_path), "checkpoints": [], "others": []}


@pytest.mark.long
def test_a_long_run_fits_on_a_screen(long_run: Path) -> None:
    """Of 2,000 checkpoints the newest are shown, with where they come from; all of them on demand."""
    lines = cnr_text("ls", long_run).splitlines()
    assert len(lines) == 1 + 1 + 1 + 40 + 2
    assert lines[1].startswith("step-0 ")
    assert re.search(r"^⋮  1,959 checkpoints .* KB", lines[2])
    assert [line.split()[0] for line in lines[3:43]] == [f"step-{number}" for number in range(1960, 2000)]
    assert max(map(len, lines)) < 80
    assert len(cnr_text("ls", long_run, "--all").splitlines()) == 1 + 2000 + 2
    assert len(cnr_text("ls", long_run, "--last", "3").splitlines()) == 1 + 1 + 1 + 3 + 2
    assert len(cnr_json("ls", long_run)["checkpoints"]) == 2000
    names = [entry["name"] for entry in json.loads(cnr_text("ls", long_run, "--last", "2", "--json"))["checkpoints"]]
    assert names == ["step-1998", "step-1999"]


def _forest(parents: Sequence[int | None]) -> Catalog:
    """A catalog of checkpoints ``c0``, ``c1`` and so on, oldest first, each with the number of its parent."""
    store, made = Store.open("memory://forest"), []
    for number, parent in enumerate(parents):
        ref = None if parent is None else CheckpointRef(f"../c{parent}", f"{parent:064x}")
        manifest = Manifest(number, f"c{number}", "s", ref, "p", History(0), 0, 1, "w", (), {})
        made.append(Checkpoint(store.at(f"c{number}"), manifest, f"{number:064x}", manifest, 0, f"{number:064x}"))
    entries = {f"c{number}": Entry(one.store, f"c{number}", {}, one) for number, one in enumerate(made)}
    return Catalog(store, entries, {})


def _read_parents(lines: Sequence[Line]) -> dict[str, str | None]:
    """What a drawing says of parents, by the rule that people read it by."""
    found: dict[str, str | None] = {}
    above: dict[int, str] = {}  # the last name at each depth
    root = None
    for line in lines:
        if line.root != root:
            root, above = line.root, {}
        depth = len(line.guide) // 3
        found[line.name] = above.get(depth - 1 if line.guide.endswith("─ ") else depth)
        above = {other: name for other, name in above.items() if other < depth} | {depth: line.name}
    return found


forests = st.lists(st.integers(0, 10**6), max_size=30).map(
    lambda draws: [None if number == 0 or draw % 5 == 0 else (draw // 5) % number for number, draw in enumerate(draws)]
)


@given(forests)
def test_a_drawing_says_what_stands_on_what(parents: list[int | None]) -> None:
    """Whatever the lineages, each checkpoint is drawn once, and its parent can be read off."""
    expected = {f"c{number}": None if parent is None else f"c{parent}" for number, parent in enumerate(parents)}
    assert _read_parents(draw(_forest(parents))) == expected


@given(forests, st.sets(st.integers(0, 29)))
def test_what_is_left_out_is_counted(parents: list[int | None], numbers: set[int]) -> None:
    """Whatever is shown, nothing is shown twice or lost, and every tree shows where it begins."""
    lines = draw(_forest(parents))
    shown = {f"c{number}" for number in numbers}
    parts = list(visible(lines, shown))
    named = [part.name for part in parts if isinstance(part, Line)]
    hidden = [name for part in parts if isinstance(part, Gap) for name in part.names]
    assert sorted([*named, *hidden]) == sorted(line.name for line in lines)
    assert shown & set(hidden) == set()
    assert {line.root for line in lines if line.name in shown} <= set(named)


def test_chains_and_branches_look_different() -> None:
    """Deltas on one another go straight down; deltas that all stand on one baseline are its branches."""
    assert [line.guide for line in draw(_forest([None, 0, 1, 2]))] == ["", "", "", ""]
    assert [line.guide for line in draw(_forest([None, 0, 0, 0]))] == ["", "├─ ", "├─ ", "└─ "]
    assert [line.name + line.guide for line in draw(_forest([None, 0, 0, 1]))] == ["c0", "c2├─ ", "c1", "c3"]

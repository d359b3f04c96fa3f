"""The command line: what it prints, in text and JSON, and how it fails; on real checkpoints, local and in memory."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import torchrec_cnr as cnr
from tests.support import runs
from tests.support.command_line import cnr_json, cnr_result, cnr_text
from tests.support.faults import flip
from torchrec_cnr.cli import app as application
from torchrec_cnr.cli.app import COMMANDS, Command
from torchrec_cnr.cli.commands import ls
from torchrec_cnr.cli.commands.ls import Gap, Line, draw, visible
from torchrec_cnr.cli.output import Dotted, common_prefix
from torchrec_cnr.format import manifest_json
from torchrec_cnr.format.manifest import CheckpointRef, History, Manifest, replacement_name
from torchrec_cnr.human_text import age_text, percent_text, ratio_text
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_lineage
from torchrec_cnr.maintenance.catalog import Catalog, Entry
from torchrec_cnr.maintenance.comparison.compare import compare
from torchrec_cnr.maintenance.verification.damage import whole_box
from torchrec_cnr.reading.plan import plan_fold
from torchrec_cnr.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

ROOT = Path(__file__).parents[2]
NAMES = ("step-1", "step-2", "step-3", "branch-3", "branch-4")
LIMIT_SECS = 60


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of three checkpoints, and a branch of two from its second, which is left alone by tests."""
    root = tmp_path_factory.mktemp("run")
    runs.save_run(root, NAMES[:3], quantization=cnr.Asymmetric(4))
    runs.save_run(root, NAMES[3:], load="step-2", seed=2, quantization=cnr.HalfPrecision())
    return root


def _commit(root: Path, name: str, created_ns: int, parent: tuple[str, str] | None = None) -> tuple[str, str]:
    """Commit a checkpoint without tensors; returns how others refer to it."""
    ref = parent and CheckpointRef(f"../{parent[0]}", parent[1])
    manifest = Manifest(created_ns, name, name, ref, "Consecutive", History(0, (0,) if ref else ()), 0, 1, "t", (), {})
    data, sha256 = manifest_json.dumps(manifest)
    (root / name).mkdir(parents=True)
    (root / name / "manifest.json").write_bytes(data)
    return name, sha256


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of 2,000 checkpoints."""
    root, ref = tmp_path_factory.mktemp("long"), None
    for number in range(2000):
        ref = _commit(root, f"step-{number}", number + 1, ref)
    return root


# Help


def test_every_command_explains_itself() -> None:
    """The table's summaries are the first lines of docstrings; each command's help has an example of it."""
    for name, command in COMMANDS.items():
        lines = (resolve_name(command.function).__doc__ or "").splitlines()
        assert lines[0] == command.summary
        assert f"cnr {name} " in cnr_text(name, "--help")


def test_without_a_command_there_is_help() -> None:
    """All commands are listed."""
    for text in (cnr_text(), cnr_text("--help")):
        assert {name for name in COMMANDS if re.search(rf"\b{name}\b +{COMMANDS[name].summary[:10]}", text)} == set(
            COMMANDS
        )
    assert cnr_text("--version") == f"cnr {cnr.__version__}\n"


def test_help_needs_no_torch() -> None:
    """What torch takes to import is paid by commands alone."""
    program = (
        "import sys\nfrom torchrec_cnr.cli import main\nsys.argv = ['cnr', *sys.argv[1:]]\n"
        "try:\n    main()\nfinally:\n    assert ('torch' in sys.modules) == (len(sys.argv) > 2)"
    )
    for args in (["--help"], ["ls", "--help"]):
        done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_script_is_the_command_line() -> None:
    """What pip installs as ``cnr`` is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert callable(resolve_name(project["scripts"]["cnr"]))


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    """One line, and no traceback."""
    program = f"import sys; sys.modules[{missing!r}] = None; from torchrec_cnr.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"cnr: error: {missing} not installed: pip install 'torchrec-cnr[cli]'\n"


def test_a_command_may_need_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that only one command needs is named when that command is called."""
    monkeypatch.setattr(application, "COMMANDS", {**COMMANDS, "ls": Command("no_such_package.x:ls", "")})
    result = cnr_result("ls", "x")
    assert result.exit_code == 1
    assert result.stderr == "cnr: error: no_such_package is not installed: pip install 'torchrec-cnr[cli]'\n"


# ls


def test_ls_draws_lineages(run: Path) -> None:
    """Each checkpoint once, below what it stands on, branches apart, with its size, rows and what a restore reads."""
    lines = cnr_text("ls", run).splitlines()
    assert [line.split("  ")[0] for line in lines[1:6]] == ["step-1", "step-2", "├─ step-3", "branch-3", "branch-4"]
    assert re.search(r"baseline +52 +100\.0% +[\d.]+ KB +[\d.]+ KB +\d+ s", lines[1])
    assert re.search(r"delta +\d+ +\d+\.\d%", lines[2])
    assert lines[-1].startswith("5 checkpoints on 1 baseline, ")
    assert lines[-1].endswith("newest is branch-4")


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
            "is_head": entry["name"] in ("step-3", "branch-4"),
            "parent": checkpoint.parent,
            "is_parent_here": True,
            "created_ns": checkpoint.created_ns,
            "num_rows": checkpoint.num_rows,
            "num_table_rows": 52,
            "num_bytes": sum(path.stat().st_size for path in (run / entry["name"]).iterdir()),
            "log_bytes": 0,
            "restore_bytes": _planned_bytes(run / entry["name"]),
        }


def _planned_bytes(path: Path) -> int:
    """Bytes of the manifests and blobs that a load of everything plans to read."""
    lineage = read_lineage(path)
    manifest = lineage.newest.manifest
    regions = [verifying_region(manifest, fqn) for fqn in manifest.tensors]
    blobs = {
        (plan.checkpoint.store.path, key): blob.num_bytes
        for plan in plan_fold(lineage, regions)
        for key, blob in (
            *((key, read.blob) for key, read in plan.reads.items()),
            *((key, block.blob) for key, block in plan.row_blocks.items()),
        )
        if blob is not None
    }
    of_manifests = sum(checkpoint.manifest_bytes for checkpoint in lineage.checkpoints)
    return of_manifests + sum(blobs.values()) + sum(blob.num_bytes for blob in manifest.objects.values())


class _Wanted:
    """A region of which nothing but its place is asked."""

    def __init__(self, fqn: str, box: Any) -> None:
        self.fqn, self.box = fqn, box

    def write(self, block: Any) -> None:
        raise AssertionError

    finish = write


def verifying_region(manifest: Manifest, fqn: str) -> Any:
    """All of a tensor."""
    return _Wanted(fqn, whole_box(manifest, fqn))


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
    assert "no complete manifest" in messages["damaged"]
    text = cnr_text("ls", root)
    for words in (
        r"damaged +damaged +.*no complete",
        "newer +of a newer version",
        "unfinished +unfinished +1 file, 5 B",
    ):
        assert re.search(words, text)


def test_ls_tells_of_parents_that_are_not_here(run: Path, tmp_path: Path) -> None:
    """A delta whose parent is gone begins a tree, and says so; nobody can tell what a restore reads."""
    shutil.copytree(run / "step-2", tmp_path / "step-2")
    shutil.copytree(run / "step-3", tmp_path / "step-3")
    lines = cnr_text("ls", tmp_path).splitlines()
    assert re.search(r"^step-2 +delta of none here .* \? ", lines[1])
    assert re.search(r"^step-3 +delta  .* \? ", lines[2])
    first, second = cnr_json("ls", tmp_path)["checkpoints"]
    assert (first["is_parent_here"], first["restore_bytes"]) == (False, None)
    assert (second["is_parent_here"], second["restore_bytes"]) == (True, None)


def test_ls_tells_of_compacted_checkpoints(run: Path, tmp_path: Path) -> None:
    """Those whose manifest was replaced."""
    shutil.copytree(run / "step-1", tmp_path / "step-1")
    checkpoint = cnr.read_checkpoint(tmp_path / "step-1")
    data, _ = manifest_json.dumps(replace(checkpoint.manifest, replaces=checkpoint.sha256))
    (tmp_path / "step-1" / replacement_name(checkpoint.sha256)).write_bytes(data)
    assert "compacted baseline" in cnr_text("ls", tmp_path)
    assert [entry["is_compacted"] for entry in cnr_json("ls", tmp_path)["checkpoints"]] == [True]
    assert "compacted baseline" in cnr_text("inspect", tmp_path / "step-1").splitlines()[0]


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


# inspect


def test_inspect_tells_what_a_checkpoint_holds(run: Path) -> None:
    """Facts of the manifest, its tables, other tensors, objects and packs."""
    text = cnr_text("inspect", run / "step-3")
    checkpoint = cnr.read_checkpoint(run / "step-3")
    assert text.splitlines()[0] == f"{run}/step-3  delta"
    for words in (
        "stands on +step-1 ← step-2",
        "restore +reads .* of 3 checkpoints",
        f"rows +{checkpoint.num_rows} of tables",
        "saved by +torchrec_cnr .* on 1 rank, policy Consecutive, after 0 restores",
        f"sha256 +{checkpoint.sha256}",
        "tables  of float32",
        r"bag\.weight +40 × 4 +4-bit asymmetric +\d+ +\d+\.\d% +\d+ B +\d+\.\d%",
        r"model\.over\.bias",
        r"objects  [\d.]+ KB, \d+\.\d%",
        "8 more objects; --all shows them",
        re.escape(checkpoint.manifest.packs[0].name),
    ):
        assert re.search(words, text), words
    assert "stands on  nothing: a baseline" in cnr_text("inspect", run / "step-1")


def test_inspect_tells_programs_the_same(run: Path) -> None:
    """The document's keys are fixed; bytes of tensors and objects are all that is stored."""
    document = cnr_json("inspect", run / "step-3")
    checkpoint = cnr.read_checkpoint(run / "step-3")
    manifest = checkpoint.manifest
    assert {key: document[key] for key in list(document)[:20]} == {
        "path": str(run / "step-3"),
        "kind": "delta",
        "is_compacted": False,
        "created_ns": checkpoint.created_ns,
        "sha256": checkpoint.sha256,
        "checkpoint_id": "step-3",
        "save_id": manifest.save_id,
        "policy": "Consecutive",
        "num_restores": 0,
        "world_size": 1,
        "writer": manifest.writer,
        "num_bytes": checkpoint.num_bytes,
        "manifest_bytes": checkpoint.manifest_bytes,
        "log_bytes": 0,
        "blob_bytes": manifest.blob_bytes,
        "num_rows": checkpoint.num_rows,
        "num_exact_rows": checkpoint.num_exact_rows,
        "lineage": [
            {"path": one.store.url, "kind": one.kind, "created_ns": one.created_ns, "num_bytes": one.num_bytes}
            for one in read_lineage(run / "step-3").checkpoints
        ],
        "lineage_problem": None,
        "restore_bytes": _planned_bytes(run / "step-3"),
    }
    assert list(document)[20:] == ["tensors", "objects", "packs"]
    tensors = {tensor["fqn"]: tensor for tensor in document["tensors"]}
    entry = manifest.tensors["model.bag.weight"]
    assert tensors["model.bag.weight"] == {
        "fqn": "model.bag.weight",
        "dtype": "float32",
        "size": [40, 4],
        "is_table": True,
        "table": None,
        "schemes": [{"name": "asymmetric", "bits": 4}],
        "num_shards": 1,
        "num_stored_rows": entry.num_stored_rows,
        "num_bytes": tensors["model.bag.weight"]["num_bytes"],
    }
    stored = [*document["tensors"], *document["objects"]]
    assert (
        sum(item["num_bytes"] for item in stored)
        == manifest.blob_bytes
        == sum(p["blob_bytes"] for p in document["packs"])
    )
    assert sum(pack["num_bytes"] for pack in document["packs"]) == manifest.pack_bytes
    assert {item["fqn"] for item in document["objects"]} == set(manifest.objects)


def test_inspect_of_a_root_shows_its_newest(run: Path) -> None:
    """As all commands for one checkpoint do."""
    assert cnr_json("inspect", run)["path"] == f"{run}/branch-4"


def test_inspect_works_without_the_parent(run: Path, tmp_path: Path) -> None:
    """What is known of a checkpoint is shown, with what is wrong below it."""
    shutil.copytree(run / "step-3", tmp_path / "step-3")
    assert re.search(r"stands on +.*its parent .*/step-2 is missing", cnr_text("inspect", tmp_path / "step-3"))
    document = cnr_json("inspect", tmp_path / "step-3")
    assert (document["lineage"], document["restore_bytes"]) == (None, None)
    assert "is missing" in document["lineage_problem"]


def test_long_lists_are_cut_and_say_so(tmp_path: Path) -> None:
    """Of many tensors the largest are shown; with --all, all."""
    runs.save_state(tmp_path / "many", {f"t{number}": torch.zeros(1, number + 1) for number in range(30)})
    text = cnr_text("inspect", tmp_path / "many")
    assert "… 20 more tensors; --all shows them" in text
    assert "t29 " in text
    assert "t0 " not in text
    assert all(f"t{number} " in cnr_text("inspect", tmp_path / "many", "--all") for number in range(30))


# verify and diff


def test_verify_says_whether_all_is_right(run: Path, tmp_path: Path) -> None:
    """In words, in JSON, and by its exit status."""
    assert re.fullmatch(r"✓ all right: 3 checkpoints, \d+ blobs, [\d.]+ KB\n", cnr_text("verify", run / "step-3"))
    assert "5 checkpoints" in cnr_text("verify", run, "--all", "--threads", "3")
    root = tmp_path / "run"
    shutil.copytree(run, root)
    (pack,) = (root / "step-2").glob("*.safetensors")
    flip(pack, -1)
    result = cnr_result("verify", root / "step-3")
    assert (result.exit_code, result.stderr) == (1, "")
    lines = result.stdout.splitlines()
    assert lines[0] == str(pack)
    assert re.match(r"✗  .*: crc32c is 0x[0-9a-f]{8}, the manifest says 0x[0-9a-f]{8}", lines[1])
    assert lines[-1].startswith("1 problem in 3 checkpoints, ")
    result = cnr_result("verify", root / "step-3", "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    document = json.loads(result.stdout)
    assert list(document) == ["is_right", "heads", "checkpoints", "num_blobs", "num_bytes", "problems"]
    (problem,) = document["problems"]
    assert list(problem) == ["checkpoint", "file", "blob", "message"]
    assert (document["is_right"], problem["file"]) == (False, str(pack))


def test_diff_says_what_differs(run: Path) -> None:
    """By table, and of the rest what differs."""
    text = cnr_text("diff", run / "step-1", run / "step-3")
    lines = text.splitlines()
    assert lines[:3] == [f"a  {run}/step-1", f"b  {run}/step-3", "b stands on a, with 2 deltas"]
    found = {tensor.fqn: tensor for tensor in compare(run / "step-1", run / "step-3").tensors}
    bag = found["model.bag.weight"]
    assert re.search(rf"bag\.weight +40 +{bag.num_differing} +\d+\.\d% +{bag.num_stored} +[\d.]+ +[\d.]+ +[\d.]+", text)
    assert "objects that differ\nreader.position" in text
    assert cnr_text("diff", run / "step-3", run / "step-3").splitlines()[-1] == "no difference"
    assert "both stand on" in cnr_text("diff", run / "step-3", run / "branch-3")
    assert "a stands on b, with 2 deltas" in cnr_text("diff", run / "step-3", run / "step-1")


def test_diff_tells_programs_the_same(run: Path) -> None:
    """The document's keys are fixed."""
    document = cnr_json("diff", run / "step-1", run)
    assert list(document) == [
        "is_same", "a", "b", "common", "num_own_a", "num_own_b", "tensors", "reshaped", "only_in_a", "only_in_b",
        "objects", "differing_objects",
    ]  # fmt: skip
    assert (document["a"], document["b"], document["is_same"]) == (f"{run}/step-1", f"{run}/branch-4", False)
    keys = ["fqn", "dtype", "size", "is_table", "num_differing", "num_stored", "movement", "num_rows"]
    measures = ["num_measured", "mean", "median", "max", "num_from_zero", "num_not_finite"]
    for tensor in document["tensors"]:
        assert (list(tensor), list(tensor["movement"])) == (keys, measures)


def test_all_works_on_any_store(tmp_path: Path) -> None:
    """Every command reads a store in memory."""
    root = f"memory://{tmp_path}/run"
    runs.save_run(root, NAMES[:2])
    assert [entry["path"] for entry in cnr_json("ls", root)["checkpoints"]] == [f"{root}/{name}" for name in NAMES[:2]]
    assert cnr_json("inspect", f"{root}/step-2")["path"] == f"{root}/step-2"
    assert cnr_json("verify", root)["is_right"]
    assert not cnr_json("diff", f"{root}/step-1", root)["is_same"]
    result = cnr_result("ls", f"{root}/nothing")
    assert (result.exit_code, result.stderr) == (1, f"cnr: error: {root}/nothing: nothing is there\n")


# Failures


@pytest.fixture
def broken(run: Path, tmp_path: Path) -> Path:
    """Places that are no checkpoints, each broken in its own way, by name."""
    for name in ("empty", "foreign", "half-written"):
        (tmp_path / name).mkdir()
    (tmp_path / "foreign" / "notes").write_bytes(b"notes")
    (tmp_path / "half-written" / "5a7e-0-0.safetensors").write_bytes(b"data")
    for name in ("manifest", "newer", "pack"):
        shutil.copytree(run / "step-1", tmp_path / name)
    manifest = tmp_path / "manifest" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    runs.change_manifest(tmp_path / "newer", rb'"version":\d+', b'"version":99')
    (pack,) = (tmp_path / "pack").glob("*.safetensors")
    data = pack.read_bytes()
    pack.write_bytes(data[: 8 + int.from_bytes(data[:8], "little") + 10])
    shutil.copytree(run / "step-1", tmp_path / "right")
    return tmp_path


FAILURES = {
    "missing": ("nothing is there", {"ls": 1, "inspect": 1, "verify": 1, "diff": 1}),
    "empty": ("an empty directory", {"ls": 0, "inspect": 1, "verify": 1, "diff": 1}),
    "foreign": ("no checkpoint is here", {"ls": 1, "inspect": 1, "verify": 1, "diff": 1}),
    "half-written": ("packs, but no manifest.json", {"ls": 1, "inspect": 1, "verify": 1, "diff": 1}),
    "manifest": ("no complete manifest", {"ls": 2, "inspect": 1, "verify": 1, "diff": 1}),
    "newer": ("format version 99", {"ls": 2, "inspect": 1, "verify": 1, "diff": 1}),
    "pack": ("truncated", {"ls": 2, "inspect": 0, "verify": 1, "diff": 1}),
}


@pytest.mark.parametrize("place", FAILURES)
@pytest.mark.parametrize("command", sorted(COMMANDS.keys() & {"ls", "inspect", "verify", "diff"}))
def test_failures_are_one_line(broken: Path, place: str, command: str) -> None:
    """Whatever is at a place, an error says it in one line on stderr; nothing is on stdout, and no traceback."""
    words, statuses = FAILURES[place]
    args = [broken / "right", broken / place] if command == "diff" else [broken / place]
    for options in ([], ["--json"]):
        result = cnr_result(command, *args, *options)
        assert result.exit_code == statuses[command], result.output
        if result.exit_code == 0 or (command, place) in (("verify", "manifest"), ("verify", "pack")):
            assert result.stderr == ""  # a finding is no failure
        else:
            assert result.stdout == ""
            assert re.fullmatch(rf"cnr: error: {re.escape(str(broken / place))}.*\n", result.stderr)
            assert words in result.stderr or command == "ls"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nothing"], "No such command 'nothing'; see 'cnr --help'"),
        (["lsx"], "No such command 'lsx'. Did you mean 'ls'?; see 'cnr --help'"),
        (["ls"], "Missing argument 'ROOT'; see 'cnr ls --help'"),
        (["ls", "x", "--bogus"], "No such option: --bogus; see 'cnr ls --help'"),
        (["ls", "x", "--last", "0"], "'--last'"),
        (["verify", "x", "--threads", "none"], "'--threads'"),
        (["inspect", "no-such-protocol://x"], "not a path or URL that fsspec can open"),
        (["diff", "x"], "Missing argument 'B'; see 'cnr diff --help'"),
    ],
)
def test_wrong_usage_has_its_own_status(args: list[str], words: str) -> None:
    """What is wrong with the command line is said in one line, too."""
    result = cnr_result(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("cnr: error: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_messages_are_one_line_whatever_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Line breaks and escape sequences of an error do not reach the terminal."""

    def fail(*args: Any, **options: Any) -> None:
        raise cnr.DamagedError("first\n  second \x1b[31mred [bold]not bold")

    monkeypatch.setattr(ls, "read_catalog", fail)
    result = cnr_result("ls", "x")
    assert result.stderr == "cnr: error: first second \\x1b[31mred [bold]not bold\n"


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """Names that look like markup, and those with escape sequences, are names."""
    _commit(tmp_path, "[red]x[", 1)
    (tmp_path / "y\x1b[31m").mkdir()
    text = cnr_text("ls", tmp_path)
    assert "[red]x[ " in text
    assert "y\\x1b[31m  empty" in text
    assert "\x1b" not in text


def test_warnings_are_lines_on_stderr(run: Path, tmp_path: Path) -> None:
    """What the library passes over is told."""
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run" / "branch-4" / "manifest.json"
    file.write_bytes(file.read_bytes()[:-1])
    result = cnr_result("inspect", tmp_path / "run")
    assert result.exit_code == 0
    assert result.stderr.startswith("cnr: warning: passed over while looking for the latest checkpoint")
    assert f"{tmp_path}/run/branch-3" in result.stdout


def test_bugs_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is none of the package's own keeps its traceback."""

    def fail(*args: Any, **options: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ls, "read_catalog", fail)
    assert isinstance(cnr_result("ls", "x").exception, ZeroDivisionError)


# As root everything may be read. Nobody may not even be able to import, so that a first round, as root, does it.
AS_NOBODY = """
import json, os, sys
from torchrec_cnr.cli import app
from typer.testing import CliRunner
commands = json.loads(sys.argv[1])
results = [CliRunner().invoke(app.app, args) for args in commands]
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    results = [CliRunner().invoke(app.app, args) for args in commands]
print(json.dumps([(result.exit_code, result.stdout, result.stderr) for result in results]))
"""


@pytest.fixture
def unreadable() -> Iterator[Path]:
    """A root with a manifest, and a directory, that nobody may read."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        _commit(root, "step-1", 1)
        _commit(root, "step-2", 2)
        (root / "closed").mkdir()
        Path(folder).chmod(0o755)
        (root / "step-2" / "manifest.json").chmod(0)
        (root / "closed").chmod(0)
        yield root
        (root / "closed").chmod(0o755)


def test_what_may_not_be_read_is_told(unreadable: Path) -> None:
    """Directories and manifests without permission are listed as such; a root without is an error."""

    commands = [
        ["ls", "--json", ""],
        *([name, "closed"] for name in ("ls", "inspect", "verify")),
        ["inspect", "step-2"],
    ]
    args = [[*command, str(unreadable / place)] for *command, place in commands]
    line = [sys.executable, "-c", AS_NOBODY, json.dumps(args)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_SECS, check=True)
    (status, out, err), *others = json.loads(done.stdout)
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert [entry["name"] for entry in document["checkpoints"]] == ["step-1"]
    states = {entry["name"]: entry["state"] for entry in document["others"]}
    assert states == {"closed": "unreadable", "step-2": "unreadable"}
    assert len(others) == 4
    for status, out, err in others:
        assert (status, out) == (1, "")
        assert re.fullmatch(r"cnr: error: cannot (list|read|look up) .*PermissionError.*\n", err)


def test_an_interrupt_ends_it_quietly(tmp_path: Path) -> None:
    """Ctrl-C gives the status that shells expect, and no traceback."""
    program = (
        "import signal, sys, time\nfrom torchrec_cnr.cli import main\nfrom torchrec_cnr.cli.commands import ls\n"
        # A shell that runs the tests in the background has its children ignore interrupts.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def read_catalog(*args):\n    print('reading', flush=True)\n    time.sleep(60)\n"
        "ls.read_catalog = read_catalog\nsys.argv = ['cnr', 'ls', 'x']\nmain()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_SECS)
    assert (process.returncode, out, err) == (130, "", "")


def test_nobody_needs_to_read_everything(long_run: Path) -> None:
    """A pipe that is closed early ends the command, without a word."""
    command = f"{sys.executable} -m torchrec_cnr.cli ls {long_run} --all"
    for pipe, expected in (("| head -c 10", "checkpoint"), ("--json | head -c 10", '{\n  "root"')):
        line = ["bash", "-c", f"{command} {pipe}"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_SECS, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


# Layout


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_off(run: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """On a terminal of usual width, every number and name is there in full."""
    wide = [("ls", run), ("inspect", run / "step-3"), ("verify", run), ("diff", run / "step-1", run / "step-3")]
    expected = [cnr_text(*args) for args in wide]

    def console() -> Console:
        return Console(highlight=False, markup=False, emoji=False, width=width)

    for module in ("ls", "inspect", "verify", "diff"):
        monkeypatch.setattr(f"torchrec_cnr.cli.commands.{module}.stdout", console)
    for args, text in zip(wide, expected, strict=True):
        narrow = cnr_text(*args)
        assert max(map(len, narrow.splitlines())) <= width
        assert sorted(_letters(narrow)) == sorted(_letters(text))


def _letters(text: str) -> str:
    """What is left if wrapping makes no difference; ages may."""
    return re.sub(r"\s|\d+ ?s", "", text)


def test_names_are_broken_at_dots() -> None:
    """A long name goes on in the next line, behind a dot where it has one."""
    console = Console(width=20, file=open(os.devnull, "w"))  # noqa: SIM115 - nothing is written
    with console.capture() as captured:
        console.print(Dotted("model.sparse.bags.t0.weight"))
    assert captured.get().split("\n")[:2] == ["model.sparse.bags.", "  t0.weight"]


def test_common_beginnings_end_with_a_dot() -> None:
    """Of several names; a single one keeps all of it."""
    assert common_prefix(["a.b.c1.w", "a.b.c2.w", "a.b.c.x"]) == "a.b."
    assert common_prefix(["ab.c", "ac.c"]) == ""
    assert common_prefix(["a.b", "a.b"]) == "a."
    assert common_prefix(["a.b.c"]) == common_prefix([]) == ""


def test_a_terminal_gets_colours_and_a_bar(run: Path) -> None:
    """On a terminal there is a progress bar, which is gone in the end; elsewhere neither it nor colours."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "torchrec_cnr.cli", "verify", str(run)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(command, stdout=child, stderr=child, stdin=child, env=environment)
    os.close(child)
    chunks = []
    deadline = time.monotonic() + LIMIT_SECS
    while time.monotonic() < deadline:
        try:
            chunk = os.read(parent, 65536)
        except OSError:  # how a terminal of Linux says that nobody is left
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(parent)
    assert process.wait(LIMIT_SECS) == 0
    text = b"".join(chunks).decode()
    assert "verifying" in text
    assert "\x1b[2K" in text, "the bar's line is erased"
    assert "\x1b[1;32m✓ all right" in text
    assert "\x1b" not in cnr_text("verify", run)


def test_quantities_are_short() -> None:
    """Ages in one unit, shares with one digit, ratios with three, however small."""
    second = 10**9
    ages = {0: "0 s", -5: "0 s", 119: "119 s", 120: "2 min", 7_199: "119 min", 7_200: "2 h", 172_800: "2 d"}
    assert {age: age_text(age * second) for age in ages} == ages
    shares = {0.0: "0.0%", 0.0004: "<0.1%", 0.0005: "0.1%", 0.123: "12.3%", 1.0: "100.0%"}
    assert {share: percent_text(share) for share in shares} == shares
    ratios = {0.0: "0.00", 0.00312: "0.00312", 1.2: "1.20", 999.4: "999", 1234.5: "1,234", 1.5e-7: "1.50e-07"}
    assert {ratio: ratio_text(ratio) for ratio in ratios} == ratios

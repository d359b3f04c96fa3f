"""Commands that change something, called on places that are no checkpoint, corrupt, or of other file systems."""

import shutil
from pathlib import Path

import fsspec
import pytest
import torch

import torchrec_cnr as cnr
from tests.cli.maintenance_commands.checks import FORMATS, NAMES, differing, read_export, refused, tensors_of
from tests.support import runs
from tests.support.command_line import cnr_json, cnr_result, cnr_text
from tests.support.faults import flip_middle

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture
def broken(saved_run: Path, tmp_path: Path) -> Path:
    """Places, each wrong in its own way, by name."""
    for name in ("empty", "foreign", "half-written"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_bytes(b"data")
    (tmp_path / "foreign" / "notes").write_bytes(b"notes")
    (tmp_path / "half-written" / "5a7e-0-0.safetensors").write_bytes(b"data")
    for name in ("manifest", "pack"):
        shutil.copytree(saved_run / "step-1", tmp_path / name)
    file = tmp_path / "manifest" / "manifest.json"
    flip_middle(file)
    (pack,) = (tmp_path / "pack").glob("*.safetensors")
    pack.write_bytes(pack.read_bytes()[:-1000])
    return tmp_path


NO_ROOT = (2, "a checkpoint, not a root; pass the directory that contains it")
NO_CHECKPOINT = {
    "missing": (1, "does not exist"),
    "file": (1, "a file, not a directory"),
    "foreign": (1, "neither a checkpoint nor a directory that contains one"),
    "half-written": (1, "data files, but no manifest.json"),
}
OF_ROOTS = {**NO_CHECKPOINT, "manifest": NO_ROOT, "pack": NO_ROOT}
OF_CHECKPOINTS = {**NO_CHECKPOINT, "empty": (1, "an empty directory"), "manifest": (1, "/manifest.json: sha256 is")}
WRONG_PLACES = [
    *((["prune", "{place}", "--execute"], place, *found) for place, found in OF_ROOTS.items()),
    *((["report", "{place}", "--out", "{out}"], place, *found) for place, found in OF_ROOTS.items()),
    *((["compact", "{place}"], place, *found) for place, found in OF_CHECKPOINTS.items()),
    *((["export", "{place}", "{out}", "--to", "dcp"], place, *found) for place, found in OF_CHECKPOINTS.items()),
    *((["export", "{place}", "{out}", "--to", to], "pack", 1, "truncated: ") for to in FORMATS),
    *((["import", "{place}", "{out}"], place, 1, "that dcp.save wrote") for place in (*OF_CHECKPOINTS, "pack")),
    *(([command, "{place}", *options], "no-such-protocol://x", 2, "not a path or URL that fsspec can open")
      for command, options in (
          ("prune", []), ("report", []), ("compact", []), ("export", ["{out}", "--to", "dcp"]), ("import", ["{out}"]),
      )),
]  # fmt: skip


@pytest.mark.parametrize(("args", "place", "status", "words"), WRONG_PLACES)
def test_wrong_places_are_told(broken: Path, args: list[str], place: str, status: int, words: str) -> None:
    """One line says what is wrong with which place, and nothing is written."""
    where = place if "://" in place else str(broken / place)
    line = refused(broken, *(arg.format(place=where, out=broken / "out") for arg in args), status=status)
    assert words in line
    assert line.startswith(("cnr: error: " + where, f"cnr: error: '{where}'"))


@pytest.mark.parametrize("damage", ["manifest", "pack", "parent"])
def test_damage_further_down_is_told(run: Path, tmp_path: Path, damage: str) -> None:
    """What a checkpoint stands on is named where it is wrong, and nothing is left of what was begun."""
    if damage == "pack":
        (pack,) = (run / "step-2").glob("*.safetensors")
        pack.write_bytes(pack.read_bytes()[:-1000])
        words = f"{pack}: truncated"
    elif damage == "manifest":
        file = run / "step-2" / "manifest.json"
        flip_middle(file)
        words = f"{file}: sha256 is"
    else:
        (run / "step-2" / "manifest.json").unlink()
        words = f"its parent {run}/step-2 is missing"
    commands: list[list[str | Path]] = [
        ["compact", run],
        ["compact", run, "--dry-run"],
        ["compact", run, "--self-contained"],
    ]
    commands += [["export", run, tmp_path / "out", "--to", to] for to in FORMATS]
    for command in commands:
        assert words in refused(tmp_path, *command)


# Other file systems


def test_all_works_on_any_store(tmp_path: Path) -> None:
    """Every command reads from, and writes to, a store in memory."""
    home = f"memory://{tmp_path}"
    root, fs = f"{home}/run", fsspec.filesystem("memory")
    runs.save_run(root, NAMES[:3], quantization=cnr.Asymmetric(4), rows=(400, 12))
    expected = tensors_of(f"{root}/step-3")
    assert cnr_json("compact", root, "--dry-run")["folded"] == [f"{root}/{name}" for name in NAMES[:3]]
    assert cnr_json("prune", root, "--last", 1)["remove"] == []
    assert cnr_json("compact", root)["executed"]
    assert cnr_json("prune", root, "--last", 1)["remove"] != []
    assert fs.exists(f"{root}/step-1/manifest.json")
    document = cnr_json("prune", root, "--last", 1, "--execute")
    assert [removal["name"] for removal in document["remove"]] == ["step-2", "step-1"]
    assert not fs.exists(f"{root}/step-1/manifest.json")
    assert differing(tensors_of(f"{root}/step-3"), expected) == []

    cnr_text("export", root, tmp_path / "plain", "--to", "dcp")
    assert differing(read_export(tmp_path / "plain", "dcp", expected), expected) == []
    for to in FORMATS:
        assert cnr_json("export", root, f"{home}/plain-{to}", "--to", to)["files"][0].startswith(home)
    assert cnr_json("import", f"{home}/plain-dcp", f"{home}/other/step-0")["checkpoint"] == f"{home}/other/step-0"
    assert differing(tensors_of(f"{home}/other/step-0"), expected) == []

    page = f"{home}/pages/page.html"
    assert cnr_text("report", root, "-o", page) == f"{page}: 5 events, 1 checkpoint kept\n"
    assert f"<bdi>{root}</bdi>" in fs.cat(page).decode()
    assert [event["kind"] for event in cnr_json("report", root)["events"]][-2:] == ["compaction", "prune"]


def test_wrong_places_of_any_store_are_told(tmp_path: Path) -> None:
    """As on a disk."""
    home, fs = f"memory://{tmp_path}", fsspec.filesystem("memory")
    fs.pipe(f"{home}/foreign/notes", b"mine")
    commands: list[list[str | Path]] = [
        ["prune", "{}"],
        ["report", "{}"],
        ["compact", "{}"],
        ["export", "{}", tmp_path / "out", "--to", "dcp"],
    ]
    for place, words in (("nothing", "does not exist"), ("foreign", "neither a checkpoint nor")):
        for command in commands:
            line = refused(tmp_path, *(str(arg).format(f"{home}/{place}") for arg in command))
            assert line.startswith(f"cnr: error: {home}/{place}: {words}")
    for to in FORMATS:
        runs.save_state(tmp_path / to, {"weight": torch.ones(3)})
        out = f"{home}/foreign/notes" if to == "torch" else f"{home}/foreign"
        assert "already exists" in refused(tmp_path, "export", tmp_path / to, out, "--to", to, status=2)
    assert "not a report page" in cnr_result("report", tmp_path, "-o", f"{home}/foreign/notes").stderr
    assert fs.cat(f"{home}/foreign/notes") == b"mine"

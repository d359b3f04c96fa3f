"""cnr ls: what each save wrote, in text and JSON; on real checkpoints, local and in memory."""

import json
import re
import shutil
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from typer.testing import CliRunner

import torchrec_cnr as cnr
from tests.attacks.draft import Draft
from tests.cli.empty_commits import NAMES, planned_bytes
from tests.support import runs
from tests.support.command_line import cnr_json, cnr_result, cnr_text
from torchrec_cnr.cli.app import app
from torchrec_cnr.format.manifest import TensorEntry
from torchrec_cnr.human_text import bytes_text, relation_text
from torchrec_cnr.maintenance.file_names import written_bytes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def exact_bytes(checkpoint: cnr.Checkpoint) -> int:
    """What a load of a checkpoint has: all values, and the objects as they are stored."""
    values = sum(torch.Size(entry.size).numel() * _ITEM_BYTES[entry.dtype] for entry in _tensors(checkpoint))
    return values + sum(blob.num_bytes for blob in checkpoint.manifest.objects.values())


_ITEM_BYTES = {"float32": 4, "int64": 8}


def _tensors(checkpoint: cnr.Checkpoint) -> Iterable[TensorEntry]:
    return checkpoint.manifest.tensors.values()


def narrowed(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Have the next list printed on a terminal of that many columns, with ages that are as wide whenever it runs."""
    monkeypatch.setattr("torchrec_cnr.cli.commands.ls.age_text", lambda num_ns: "12 s")
    narrow = Console(highlight=False, markup=False, emoji=False, width=width)
    monkeypatch.setattr("torchrec_cnr.cli.commands.ls.stdout", lambda: narrow)


def test_ls_shows_what_each_save_wrote(run: Path) -> None:
    """One line for each checkpoint, oldest first, with what it is based on, rows, bytes, saving and restore."""
    lines = cnr_text("ls", run).splitlines()
    assert lines[0].split() == [
        "checkpoint",
        "kind",
        "based",
        "on",
        "rows",
        "of",
        "all",
        "written",
        "vs",
        "fp32",
        "restore",
        "age",
    ]
    for line, name, parent in zip(lines[1:6], NAMES, ["–", "step-1", "step-2", "step-2", "branch-3"], strict=True):
        checkpoint = cnr.read_checkpoint(run / name)
        num_rows, written = checkpoint.num_rows, bytes_text(checkpoint.num_bytes)
        relation = relation_text(checkpoint.num_bytes, exact_bytes(checkpoint))
        expected = [name, checkpoint.kind, parent, f"{num_rows}", f"{num_rows / 52:.1%}", written, relation]
        assert re.split(r"  +", line)[:8] == [*expected, bytes_text(planned_bytes(run / name))]
    assert lines[-2] == "5 checkpoints: 1 baseline and 4 deltas; policy Consecutive; newest: branch-4"
    total, full = sum(file.stat().st_size for file in run.glob("*/*")), 5 * exact_bytes(checkpoint)
    sizes = f"{bytes_text(total)} kept, {bytes_text(total)} written by 5 saves"
    assert lines[-1] == f"{sizes}: {relation_text(total, full)} than full fp32 checkpoints"


def test_old_checkpoints_have_dates(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two days, when a checkpoint was committed, in UTC."""
    times = {name: cnr.read_checkpoint(run / name).created_ns for name in NAMES}
    two_days_ns = 48 * 3_600 * 1_000_000_000
    monkeypatch.setattr("torchrec_cnr.cli.commands.ls.time.time_ns", lambda: times["step-2"] + two_days_ns)
    dates = {name: re.findall(r" \d{4}-\d\d-\d\d \d\d:\d\d$", line) for name, line in _lines(cnr_text("ls", run))}
    at = datetime.fromtimestamp(times["step-1"] / 1e9, UTC)
    assert dates["step-1"] == [f" {at:%Y-%m-%d %H:%M}"]
    assert [bool(dates[name]) for name in NAMES] == [times[name] <= times["step-2"] for name in NAMES]


def _lines(text: str) -> list[tuple[str, str]]:
    """The lines of the checkpoints, by their names."""
    return [(line.split()[0], line) for line in text.splitlines() if line and line.split()[0] in NAMES]


def test_no_share_is_above_the_whole(run: Path) -> None:
    """A checkpoint that is larger than a full one without quantization, as that of a tiny model, is called larger."""
    text = cnr_text("ls", run)
    assert re.search(r"step-1 .* \d\.\d+x larger", text)
    assert max(float(share) for share in re.findall(r"([\d.]+)%", text)) == 100


def test_notes_say_what_a_checkpoint_needs_and_who_keeps_it(tmp_path: Path) -> None:
    """Tags, and dependencies on other roots in either direction; a list of policies only if they differ."""
    runs.save_run(tmp_path, ["a/step-1", "b/step-2"])
    writer, planner = cnr.CNRStorageWriter(tmp_path / "b" / "step-3"), cnr.CNRSavePlanner(policy=cnr.Full())
    dcp.save({"t": torch.rand(50, 4)}, storage_writer=writer, planner=planner, no_dist=True)
    cnr.tag(tmp_path / "b" / "step-3", "release")
    assert re.search("step-1 .* tagged needed-by-b-[0-9a-f]{8}", cnr_text("ls", tmp_path / "a"))
    lines = cnr_text("ls", tmp_path / "b").splitlines()
    assert lines[0].rstrip().endswith("age  policy       notes")
    assert re.search(r"step-2 +delta +\.\./a/step-1 .* \?  .* Consecutive +needs \.\./a/step-1", lines[1])
    assert re.search(r"step-3 +baseline +– .* Full +tagged release", lines[2])
    assert "policy" not in lines[-2]
    other, own = cnr_json("ls", tmp_path / "b")["checkpoints"]
    assert (other["based_on"], other["needed_of_other_roots"]) == ("../a/step-1", ["../../a/step-1"])
    assert (own["based_on"], own["tags"], own["policy"]) == (None, ["release"], "Full")


@pytest.mark.parametrize(
    ("width", "left"),
    [
        (100, "kind based on rows of all written vs fp32 restore age notes"),
        (80, "kind based on of all written vs fp32 age notes"),
        (60, "kind written vs fp32 age notes"),
    ],
)
def test_narrow_terminals_lose_numbers_before_names(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, left: str
) -> None:
    """The columns that remain are whole, and what is left out is what matters least."""
    shutil.copytree(run, tmp_path / "run")
    cnr.compact(tmp_path / "run" / "step-3")
    narrowed(monkeypatch, width)
    lines = cnr_text("ls", tmp_path / "run").splitlines()
    assert lines[0].split() == ["checkpoint", *left.split()]
    assert [line.split()[0] for line in lines[1:6]] == list(NAMES)
    assert max(map(len, lines)) <= width
    all_columns = ["kind", "based", "on", "rows", "of", "all", "written", "vs", "fp32", "restore", "age", "notes"]
    hidden = [line.partition(": ")[2] for line in lines if line.startswith("a wider terminal also shows: ")]
    assert sorted(" ".join([*hidden, left]).replace(",", "").split()) == sorted(all_columns)


def test_a_directory_of_roots_lists_them(run: Path, tmp_path: Path) -> None:
    """The parent of several runs has no checkpoints, but they are found; other commands name them, too."""
    for name in ("a", "b"):
        shutil.copytree(run / "step-1", tmp_path / name / "step-1")
    (tmp_path / "empty").mkdir()
    text = cnr_text("ls", tmp_path)
    commands = "".join(f"  cnr ls {tmp_path}/{name}\n" for name in "ab")
    assert text == f"{tmp_path}: no checkpoints, but 2 roots; list one of them:\n{commands}"
    document = cnr_json("ls", tmp_path)
    assert (document["checkpoints"], document["roots"]) == ([], [f"{tmp_path}/a", f"{tmp_path}/b"])
    for command in ("inspect", "verify", "latest", "prune", "report", "compact"):
        result = cnr_result(command, tmp_path)
        assert (result.exit_code, result.stdout) == (1, "")
        words = "no checkpoint, but roots that contain some: a, b; pass one of them"
        assert result.stderr == f"cnr: error: {tmp_path}: {words}\n"


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
    assert list(document) == ["root", "checkpoints", "totals", "roots", "others"]
    assert (document["root"], document["roots"], document["others"]) == (str(run), [], [])
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
            "based_on": None if checkpoint.parent is None else Path(checkpoint.parent).name,
            "parent": checkpoint.parent,
            "needed_of_other_roots": [],
            "is_parent_here": True,
            "uses_directories": [],
            "missing_files": [],
            "created_ns": checkpoint.created_ns,
            "policy": "Consecutive",
            "tags": [],
            "num_rows": checkpoint.num_rows,
            "num_table_rows": 52,
            "written_bytes": checkpoint.num_bytes,
            "exact_bytes": exact_bytes(checkpoint),
            "num_bytes": sum(path.stat().st_size for path in (run / entry["name"]).iterdir()),
            "log_bytes": 0,
            "restore_bytes": planned_bytes(run / entry["name"]),
        }
    kept = sum(entry["num_bytes"] for entry in document["checkpoints"])
    assert document["totals"] == {
        "num_saves": 5,
        "num_compactions": 0,
        "written_bytes": kept,
        "log_bytes": 0,
        "kept_bytes": kept,
        "exact_bytes": document["checkpoints"][-1]["exact_bytes"],
    }


def test_ls_tells_apart_what_is_no_checkpoint(run: Path, tmp_path: Path) -> None:
    """Corrupt, newer, unfinished, empty and foreign directories, none of which hides the checkpoints."""
    root = tmp_path / "run"
    shutil.copytree(run, root)
    manifest = (root / "step-1" / "manifest.json").read_bytes()
    shutil.copytree(root / "step-3", root / "newer")
    runs.change_manifest(root / "newer", rb'"version":\d+', b'"version":99')
    for name in ("corrupt", "unfinished", "empty", "foreign"):
        (root / name).mkdir()
    (root / "corrupt" / "manifest.json").write_bytes(manifest[:-2])
    (root / "unfinished" / "5a7e-0-0.safetensors").write_bytes(b"12345")
    (root / "foreign" / "notes").write_bytes(b"123")
    (root / "file").write_bytes(b"")
    document = cnr_json("ls", root)
    assert [entry["name"] for entry in document["checkpoints"]] == list(NAMES)
    assert {entry["name"]: entry["state"] for entry in document["others"]} == {
        name: name for name in ("corrupt", "newer", "unfinished", "empty", "foreign")
    }
    assert {entry["name"]: entry["num_bytes"] for entry in document["others"] if entry["name"] != "newer"} == {
        "corrupt": len(manifest) - 2,
        "unfinished": 5,
        "empty": 0,
        "foreign": 3,
    }
    messages = {entry["name"]: entry["message"] for entry in document["others"]}
    assert "version 99" in messages["newer"]
    assert "not a complete manifest" in messages["corrupt"]
    text = cnr_text("ls", root)
    for words in (
        r"corrupt +corrupt +.*not a complete",
        "newer +newer version",
        "unfinished +unfinished +1 file, 5 B",
    ):
        assert re.search(words, text)


def test_ls_tells_of_parents_that_are_not_here(run: Path, tmp_path: Path) -> None:
    """A delta whose parent is gone says so; nobody can tell what a restore reads."""
    shutil.copytree(run / "step-2", tmp_path / "step-2")
    shutil.copytree(run / "step-3", tmp_path / "step-3")
    lines = cnr_text("ls", tmp_path).splitlines()
    assert re.search(r"^step-2 +delta +step-1 .* \? .* parent missing", lines[1])
    assert re.search(r"^step-3 +delta +step-2 .* \? .* parent of step-2 missing", lines[2])
    assert lines[-2].endswith("newest: step-3, which cannot be restored")
    first, second = cnr_json("ls", tmp_path)["checkpoints"]
    assert (first["is_parent_here"], first["restore_bytes"]) == (False, None)
    assert (second["is_parent_here"], second["restore_bytes"]) == (True, None)


def test_ls_tells_of_compacted_checkpoints(run: Path, tmp_path: Path) -> None:
    """What the save wrote, whatever the new manifest holds, and that there is one."""
    root = tmp_path / "run"
    shutil.copytree(run, root)
    before = {entry["name"]: entry for entry in cnr_json("ls", root)["checkpoints"]}
    line_before = next(line for line in cnr_text("ls", root).splitlines() if line.startswith("step-3"))
    compacted = cnr.compact(root / "step-3")
    document = cnr_json("ls", root)
    entries = {entry["name"]: entry for entry in document["checkpoints"]}
    assert [name for name, entry in entries.items() if entry["is_compacted"]] == ["step-3"]
    for name, entry in entries.items():
        for key in ("kind", "based_on", "num_rows", "written_bytes"):
            assert (name, entry[key]) == (name, before[name][key])
    text = cnr_text("ls", root)
    line = next(line for line in text.splitlines() if line.startswith("step-3"))
    assert line.rstrip().endswith("compacted")
    assert re.split("  +", line)[:7] == re.split("  +", line_before)[:7]
    assert "5 checkpoints: 1 baseline and 4 deltas, 1 of them compacted; policy" in text
    files = {file.name: file.stat().st_size for file in (root / "step-3").iterdir()}
    written = sum(entry["written_bytes"] for entry in entries.values()) + written_bytes(compacted.manifest, files)
    assert (document["totals"]["written_bytes"], document["totals"]["num_compactions"]) == (written, 1)
    assert f"{bytes_text(written)} written by 5 saves and 1 compaction: " in text
    assert cnr_text("inspect", root / "step-3").splitlines()[0].endswith("delta, compacted")


def test_ls_tells_of_files_in_other_directories_that_are_missing(run: Path, tmp_path: Path) -> None:
    """A compacted checkpoint uses files of older ones, which another tool may remove."""
    root = tmp_path / "run"
    shutil.copytree(run, root)
    cnr.compact(root / "step-3", max_ratio=100.0)
    before = {entry["name"]: entry for entry in cnr_json("ls", root)["checkpoints"]}["step-3"]
    directories = before["uses_directories"]
    assert directories == sorted({*directories} - {"step-3"}) != []
    assert before["missing_files"] == []
    assert f"it was compacted; uses data files in {', '.join(directories[:3])}" in cnr_text("inspect", root / "step-3")
    text = cnr_text("ls", root)
    assert "checkpoints use data files in other directories: remove checkpoints with cnr prune only" in text
    assert "data files missing" not in text
    for manifest in (root / directories[0]).glob("manifest*"):
        manifest.rename(manifest.with_name("moved"))
    (other,) = cnr_json("ls", root)["others"]
    assert (other["name"], other["state"], other["used_by"]) == (directories[0], "unfinished", ["step-3"])
    assert "; do not remove it: its data files are used by step-3" in cnr_text("ls", root)
    shutil.rmtree(root / directories[0])
    after = {entry["name"]: entry for entry in cnr_json("ls", root)["checkpoints"]}["step-3"]
    assert (
        [file.split("/")[0] for file in after["missing_files"]] == [directories[0]] * len(after["missing_files"]) != []
    )
    line = next(line for line in cnr_text("ls", root).splitlines() if line.startswith("step-3"))
    assert line.rstrip().endswith("data files missing, compacted")


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
    assert cnr_text("ls", root).rstrip().endswith("1 file, 5 B; the next prune removes them")


def test_many_pruned_directories_are_counted(tmp_path: Path) -> None:
    """Each of them only on demand: a run of months has thousands, whose rows a compacted checkpoint still uses."""
    root, names = tmp_path / "run", [f"step-{number}" for number in range(7)]
    runs.save_run(root, names)
    cnr.compact(root / names[-1], max_ratio=100.0)
    cnr.execute(cnr.plan_prune(root, cnr.Keep(last=1)))
    (line,) = [line for line in cnr_text("ls", root).splitlines() if "pruned" in line]
    assert re.fullmatch(r"6 directories +pruned +6 files, [0-9.]+ KB; do not remove them: .*", line.strip())
    lines = [line for line in cnr_text("ls", root, "--all").splitlines() if "pruned" in line]
    assert [line.split()[0] for line in lines] == names[:-1]


def test_ls_of_nothing(tmp_path: Path) -> None:
    """An empty root is no error."""
    assert cnr_text("ls", tmp_path) == f"no checkpoints under {tmp_path}\n"
    document = cnr_json("ls", tmp_path)
    assert (document["root"], document["checkpoints"], document["others"]) == (str(tmp_path), [], [])


@pytest.mark.long
def test_a_long_run_fits_on_a_screen(long_run: Path) -> None:
    """Of 2,000 checkpoints the newest are shown; all of them on demand."""
    lines = cnr_text("ls", long_run).splitlines()
    assert lines[0] == "… 1,960 more checkpoints; --all shows them"
    assert [line.split()[0] for line in lines[2:42]] == [f"step-{number}" for number in range(1960, 2000)]
    assert len(lines) == 1 + 1 + 40 + 3
    assert max(map(len, lines)) <= 100
    assert len(cnr_text("ls", long_run, "--all").splitlines()) == 1 + 2000 + 3
    assert len(cnr_text("ls", long_run, "--last", "3").splitlines()) == 1 + 1 + 3 + 3
    assert len(cnr_json("ls", long_run)["checkpoints"]) == 2000
    names = [entry["name"] for entry in json.loads(cnr_text("ls", long_run, "--last", "2", "--json"))["checkpoints"]]
    assert names == ["step-1998", "step-1999"]

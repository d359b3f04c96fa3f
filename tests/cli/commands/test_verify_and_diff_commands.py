"""cnr verify and cnr diff: what is corrupt, and what differs."""

import json
import re
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchrec_cnr as cnr
from tests.cli.empty_commits import NAMES
from tests.support import runs
from tests.support.command_line import cnr_json, cnr_result, cnr_text
from tests.support.faults import flip
from torchrec_cnr.maintenance.comparison.compare import compare

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def test_verify_says_whether_all_is_right(run: Path, tmp_path: Path) -> None:
    """In words, in JSON, and by its exit status."""
    verified = r"✓ no problems in {}: {} checkpoints, \d+ blocks, [\d.]+ KB{}\n"
    one = verified.format("step-3 and its chain", 3, "")
    newest = verified.format("branch-4 and its chain", r"\d", "; --all verifies the other checkpoints, too")
    assert re.fullmatch(one, cnr_text("verify", run / "step-3"))
    assert re.fullmatch(newest, cnr_text("verify", run))
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
    assert lines[-3].startswith("1 problem in 3 checkpoints, ")
    assert re.fullmatch(r"cannot be restored: +step-2, step-3, branch-3, branch-4 *", lines[-2])
    assert re.fullmatch(rf"newest that can be restored: +{root}/step-1 *", lines[-1])
    result = cnr_result("verify", root / "step-3", "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    document = json.loads(result.stdout)
    assert list(document) == [
        "is_right", "heads", "checkpoints", "num_blobs", "num_bytes", "problems", "unrestorable", "newest_restorable",
    ]  # fmt: skip
    assert document["unrestorable"] == [f"{root}/{name}" for name in NAMES[1:]]
    assert document["newest_restorable"] == f"{root}/step-1"
    (problem,) = document["problems"]
    assert list(problem) == ["checkpoint", "file", "blob", "message", "offset"]
    assert (document["is_right"], problem["file"]) == (False, str(pack))


def test_verify_names_a_file_once_that_several_checkpoints_use(run: Path, tmp_path: Path) -> None:
    """A compacted checkpoint uses files of older ones."""
    root = tmp_path / "run"
    shutil.copytree(run, root)
    cnr.compact(root / "step-3", max_ratio=100.0)
    (pack,) = (root / "step-1").glob("*.safetensors")
    flip(pack, -1)
    assert len(json.loads(cnr_result("verify", root, "--all", "--json").stdout)["problems"]) == 2
    lines = cnr_result("verify", root, "--all").stdout.splitlines()
    assert [line for line in lines if line.startswith("✗")] == [lines[1]]
    assert lines[0] == str(pack)
    assert any(line.startswith("1 problem in 5 checkpoints, ") for line in lines)


def test_verify_names_a_directory_once_that_lacks_many_files(tmp_path: Path) -> None:
    """A removed checkpoint has lost all of them."""
    model = torch.nn.EmbeddingBag(5000, 4, sparse=True)
    with closing(cnr.RowTracker(model)) as tracker:
        for name in NAMES[:2]:
            writer = cnr.CNRStorageWriter(tmp_path / name, pack_bytes=1024)
            dcp.save({"model": model.state_dict()}, storage_writer=writer, planner=cnr.CNRSavePlanner(tracker))
            tracker.mark_all()
    packs = sorted((tmp_path / "step-1").glob("*.safetensors"))
    assert len(packs) > 2
    for pack in packs:
        pack.unlink()
    lines = cnr_result("verify", tmp_path).stdout.splitlines()
    assert lines[0] == str(tmp_path / "step-1")
    assert " ".join(lines).count("data files are missing") == 1
    assert lines[1].startswith(f"✗  {len(packs)} data files are missing: {packs[0].name}, ")
    assert any(line.startswith(f"{len(packs)} problems in 2 checkpoints, ") for line in lines)
    assert len(json.loads(cnr_result("verify", tmp_path, "--json").stdout)["problems"]) == len(packs)


def test_diff_says_what_differs(run: Path) -> None:
    """By table, and of the rest what differs."""
    text = cnr_text("diff", run / "step-1", run / "step-3")
    lines = text.splitlines()
    assert lines[:3] == [f"a  {run}/step-1", f"b  {run}/step-3", "b is based on a, 2 deltas later"]
    found = {tensor.fqn: tensor for tensor in compare(run / "step-1", run / "step-3").tensors}
    bag = found["model.bag.weight"]
    assert re.search(rf"bag\.weight +40 +{bag.num_differing} +\d+\.\d% +{bag.num_stored} +[\d.]+ +[\d.]+ +[\d.]+", text)
    assert "objects that differ\nreader.position" in text
    assert cnr_text("diff", run / "step-3", run / "step-3").splitlines()[-1] == "no difference"
    assert "a and b are both based on" in cnr_text("diff", run / "step-3", run / "branch-3")
    assert "a is based on b, 2 deltas later" in cnr_text("diff", run / "step-3", run / "step-1")


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
    assert (result.exit_code, result.stderr) == (1, f"cnr: error: {root}/nothing: does not exist\n")

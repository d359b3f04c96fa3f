"""cnr inspect: what a checkpoint holds, in text and JSON."""

import re
import shutil
from pathlib import Path

import pytest
import torch

import torchrec_cnr as cnr
from tests.cli.empty_commits import planned_bytes
from tests.support import runs
from tests.support.command_line import cnr_json, cnr_text
from torchrec_cnr.human_text import bytes_text
from torchrec_cnr.lineage.abandoned import mark_of
from torchrec_cnr.lineage.checkpoint import read_lineage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def test_inspect_tells_what_a_checkpoint_holds(run: Path) -> None:
    """Facts of the manifest, its tables, other tensors, objects and packs."""
    text = cnr_text("inspect", run / "step-3")
    checkpoint = cnr.read_checkpoint(run / "step-3")
    assert text.splitlines()[0] == f"{run}/step-3  delta"
    for words in (
        r"based on +step-2, step-1 \(baseline\)",
        "restore +reads .* from 3 checkpoints",
        rf"rows +{checkpoint.num_rows} of 52 \([\d.]+ %\)",
        rf"written +{bytes_text(checkpoint.num_bytes)} by the save, \d\.\d\dx larger than a full fp32 checkpoint",
        "saved by +torchrec_cnr .* on 1 rank, policy Consecutive, after 0 restores",
        f"sha256 +{checkpoint.sha256}",
        "tables  float32\nall names begin with 'model.'",
        r"bag\.weight +40 x 4 +4-bit asymmetric +\d+ +\d+\.\d% +\d+ B +\d+\.\d%",
        r"model\.over\.bias",
        r"objects  [\d.]+ KB, \d+\.\d% of bytes",
        "8 more objects; --all shows them",
        re.escape(checkpoint.manifest.packs[0].name),
    ):
        assert re.search(words, text), words
    assert "based on   no other checkpoint  " in cnr_text("inspect", run / "step-1")


def test_inspect_tells_programs_the_same(run: Path) -> None:
    """The document's keys are fixed; bytes of tensors and objects are all that is stored."""
    document = cnr_json("inspect", run / "step-3")
    checkpoint = cnr.read_checkpoint(run / "step-3")
    manifest = checkpoint.manifest
    assert {key: document[key] for key in list(document)[:24]} == {
        "path": str(run / "step-3"),
        "kind": "delta",
        "is_compacted": False,
        "is_abandoned": False,
        "created_ns": checkpoint.created_ns,
        "sha256": checkpoint.sha256,
        "checkpoint_id": "step-3",
        "save_id": manifest.save_id,
        "policy": "Consecutive",
        "num_restores": 0,
        "world_size": 1,
        "writer": manifest.writer,
        "num_bytes": checkpoint.num_bytes,
        "written_bytes": checkpoint.num_bytes,
        "exact_bytes": document["exact_bytes"],
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
        "missing_files": [],
        "restore_bytes": planned_bytes(run / "step-3"),
    }
    assert list(document)[24:] == ["tensors", "objects", "packs"]
    tensors = {tensor["fqn"]: tensor for tensor in document["tensors"]}
    entry = manifest.tensors["model.bag.weight"]
    assert tensors["model.bag.weight"] == {
        "fqn": "model.bag.weight",
        "dtype": "float32",
        "size": [40, 4],
        "is_table": True,
        "table": None,
        "schemes": [{"name": "asymmetric", "bits": 4}],
        "bits_per_value": tensors["model.bag.weight"]["bits_per_value"],
        "num_shards": 1,
        "num_stored_rows": entry.num_stored_rows,
        "num_bytes": tensors["model.bag.weight"]["num_bytes"],
    }
    num_values = entry.num_stored_rows * entry.size[1]
    num_bits = 8 * sum(blob.num_bytes for shard in entry.shards for blob in shard.blobs)
    assert tensors["model.bag.weight"]["bits_per_value"] == pytest.approx(num_bits / num_values)
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
    text = cnr_text("inspect", tmp_path / "step-3")
    assert re.search(r"based on +step-2 *\nproblem +.*its parent .*/step-2 is missing", text)
    document = cnr_json("inspect", tmp_path / "step-3")
    assert (document["lineage"], document["restore_bytes"]) == (None, None)
    assert "is missing" in document["lineage_problem"]


def test_inspect_tells_of_lost_files_and_of_abandoned_checkpoints(run: Path, tmp_path: Path) -> None:
    """As ``ls`` does: of the files of all checkpoints that a load reads."""
    shutil.copytree(run, tmp_path / "run")
    newest = cnr.read_checkpoint(tmp_path / "run" / "step-3")
    assert "abandoned" not in cnr_text("inspect", newest.store.url)
    (lost,) = (tmp_path / "run" / "step-1").glob("*.safetensors")
    lost.unlink()
    (tmp_path / "run" / mark_of(newest)).touch()
    text, document = cnr_text("inspect", newest.store.url), cnr_json("inspect", newest.store.url)
    assert text.splitlines()[0].endswith("step-3  delta, abandoned")
    assert re.search(rf"missing +1 data file that a load needs: {lost}", text)
    assert (document["is_abandoned"], document["missing_files"]) == (True, [str(lost)])


@pytest.mark.long
def test_long_lists_are_cut_and_say_so(tmp_path: Path) -> None:
    """Of many tensors the largest are shown; with --all, all."""
    runs.save_state(tmp_path / "many", {f"t{number}": torch.zeros(1, number + 1) for number in range(30)})
    text = cnr_text("inspect", tmp_path / "many")
    assert "… 20 more tensors; --all shows them" in text
    assert "t29 " in text
    assert "t0 " not in text
    assert all(f"t{number} " in cnr_text("inspect", tmp_path / "many", "--all") for number in range(30))


def test_inspect_after_a_compaction(run: Path, tmp_path: Path) -> None:
    """The kind is that of the save, as ``ls`` has it; older versions of rows do not make more than all of them."""
    shutil.copytree(run, tmp_path / "run")
    newest = cnr.compact(tmp_path / "run" / "step-3", max_ratio=1000.0)
    entries = newest.manifest.tensors.values()
    assert any(entry.is_table and entry.num_stored_rows > entry.size[0] for entry in entries)
    text, document = cnr_text("inspect", newest.store.url), cnr_json("inspect", newest.store.url)
    assert text.splitlines()[0].endswith("step-3  delta, compacted")
    assert "based on   no other checkpoint: it was compacted" in text
    assert "; saved on top of step-2" in " ".join(text.split())
    assert re.search(r"rows +\d+ stored of tables with 52, including older versions of rows", text)
    (before,) = [entry for entry in cnr_json("ls", run)["checkpoints"] if entry["name"] == "step-3"]
    assert document["written_bytes"] == before["written_bytes"] < document["num_bytes"]
    assert f"written    {bytes_text(before['written_bytes'])} by the save" in text
    assert (document["kind"], document["is_compacted"], document["lineage"][-1]["kind"]) == ("delta", True, "delta")
    assert max(float(found) for found in re.findall(r"([\d.]+) ?%", text)) <= 100

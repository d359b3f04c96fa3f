"""ls, inspect and estimate of runs whose rows are transform-coded."""

import re
import shutil
from pathlib import Path

import pytest
import torch

import torchrec_cnr as cnr
from tests.cli.empty_commits import planned_bytes
from tests.quantization.test_transform_coded import DIM
from tests.quantization.test_transformed_checkpoints import FQN, NUM_ROWS, RULE, running, scheme_of
from tests.support import models
from tests.support.command_line import cnr_json, cnr_result, cnr_text

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline and two deltas; the last one has a transform of its own, which another process has learned."""
    root = tmp_path_factory.mktemp("transformed")
    with running(root) as run:
        for number in range(3):
            if number == 2:
                run.writer = models.writer(root / "0", quantization=RULE)
            run.change(torch.arange(number, NUM_ROWS, 4), number)
            run.save()
    return root


def test_ls_counts_what_a_load_reads(root: Path) -> None:
    """With the transforms. That deltas use other directories is told, also if nothing is compacted."""
    found = {entry["name"]: entry for entry in cnr_json("ls", root)["checkpoints"]}
    assert [entry["restore_bytes"] for entry in found.values()] == [planned_bytes(root / name) for name in found]
    assert found["1"]["uses_directories"] == ["0"]
    text = cnr_text("ls", root)
    assert "\ncheckpoints use data files in other directories: remove checkpoints with cnr prune only" in text
    assert "compacted" not in text


def test_inspect_names_bits_and_transform(root: Path, tmp_path: Path) -> None:
    """Bits per value as stored; after a compaction that finds several transforms, how many more there are."""
    checkpoint = cnr.read_checkpoint(root / "0")
    document = cnr_json("inspect", root / "0")
    (tensor,) = [tensor for tensor in document["tensors"] if tensor["fqn"] == FQN]
    stored = sum(blob.num_bytes for shard in checkpoint.manifest.tensors[FQN].shards for blob in shard.blobs)
    assert tensor["bits_per_value"] == pytest.approx(8 * stored / checkpoint.num_rows / DIM)
    assert sum(item["num_bytes"] for item in [*document["tensors"], *document["objects"]]) == document["blob_bytes"]
    words = f"{tensor['bits_per_value']:.2f}-bit transformed {scheme_of(checkpoint).digest[:12]}  "
    assert words in cnr_text("inspect", root / "0")
    shutil.copytree(root, tmp_path / "run")
    target = cnr.compact(tmp_path / "run" / "2", max_ratio=100.0)
    num_others = len({str(shard.scheme) for shard in target.manifest.tensors[FQN].shards}) - 1
    assert num_others > 0
    words = rf"\d\.\d\d-bit transformed [0-9a-f]{{12}} and {num_others} more  "
    assert re.search(words, cnr_text("inspect", target.path))


def test_an_estimate_takes_rows_as_they_are_stored(root: Path) -> None:
    """Unless --bits says otherwise; then it is that of the same tables."""
    delta = cnr.read_checkpoint(root / "1").committed
    found = cnr_json("estimate", root / "1", "--policy", "consecutive")
    assert found["inputs"]["bits"] == "stored"
    stored = sum(blob.num_bytes for shard in delta.tensors[FQN].shards for blob in shard.blobs)
    assert found["delta"]["codes"] == pytest.approx(stored, abs=1)
    assert found["baseline"]["codes"] == pytest.approx(stored / delta.num_rows * NUM_ROWS, abs=1)
    assert cnr_text("estimate", root / "1").splitlines()[1].startswith("rows as stored, optimizer state none, ")
    share = str(delta.num_rows / NUM_ROWS)
    table = ["--table", f"{NUM_ROWS}x{DIM}", "--modified", share, "--optimizer-state", "none"]
    assert cnr_json("estimate", root / "1", "--bits", "4") == cnr_json("estimate", *table)
    assert cnr_result("estimate", root / "1", "--bits", "stored").exit_code == 2

"""cnr export: what it does, says and refuses."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cli.maintenance_commands.checks import FORMATS, differing, read_export, refused, tensors_of
from tests.support import runs
from tests.support.command_line import cnr_json, cnr_result, cnr_text
from torchrec_cnr.human_text import bytes_text

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.mark.parametrize("to", FORMATS)
def test_exports_load_by_stock_means(saved_run: Path, tmp_path: Path, to: str) -> None:
    """Bit for bit as the checkpoint loads; what was written is told."""
    out = tmp_path / "new" / "plain"
    expected = tensors_of(saved_run / "step-3")
    assert differing(expected, tensors_of(saved_run / "step-4")) != []
    document = cnr_json("export", saved_run / "step-3", out, "--to", to)
    files = [out] if to == "torch" else sorted(out.iterdir())
    assert document == {
        "checkpoint": f"{saved_run}/step-3",
        "files": [str(file) for file in files],
        "bytes": sum(value.nbytes for value in expected.values()),
        "left_out": [],
    }
    found = {fqn: value for fqn, value in read_export(out, to, expected).items() if isinstance(value, Tensor)}
    assert differing(found, expected) == []


def test_export_says_what_it_did(saved_run: Path, tmp_path: Path) -> None:
    """Of a root its newest checkpoint, which is named."""
    size = bytes_text(sum(value.nbytes for value in tensors_of(saved_run / "step-4").values()))
    text = cnr_text("export", saved_run, tmp_path / "model.pt", "--to", "torch")
    assert text == f"{tmp_path}/model.pt: {size} of values in 1 file, from {saved_run}/step-4\n"
    (tmp_path / "empty").mkdir()
    assert cnr_text("export", saved_run, tmp_path / "empty", "--to", "dcp").endswith(
        f" in 2 files, from {saved_run}/step-4\n"
    )


def test_export_tells_what_a_format_cannot_hold(tmp_path: Path) -> None:
    """Objects that JSON would change are left out of safetensors files, and named."""
    runs.save_state(tmp_path / "odd", {"weight": torch.ones(3), "seen": {1, 2}, "epoch": 4})
    lines = cnr_text("export", tmp_path / "odd", tmp_path / "plain", "--to", "safetensors").splitlines()
    assert lines[1:] == ["left out, because safetensors cannot hold them: seen"]
    assert cnr_json("export", tmp_path / "odd", tmp_path / "more", "--to", "safetensors")["left_out"] == ["seen"]
    assert cnr_json("export", tmp_path / "odd", tmp_path / "all", "--to", "torch")["left_out"] == []


@pytest.mark.parametrize("to", FORMATS)
def test_export_writes_over_nothing(saved_run: Path, tmp_path: Path, to: str) -> None:
    """Neither over a file, nor into a directory with something in it, nor where it cannot."""
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_bytes(b"mine")
    for out in ("file", "full"):
        assert "already exists" in refused(tmp_path, "export", saved_run, tmp_path / out, "--to", to, status=2)
    assert "cannot create" in refused(tmp_path, "export", saved_run, tmp_path / "file" / "out", "--to", to)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["{run}", "{out}"], "Missing option '--to'"),
        (["{run}", "{out}", "--to", "onnx"], "'onnx' is not one of 'dcp', 'safetensors', 'torch'"),
        (["{run}", "--to", "dcp"], "Missing argument 'OUT'"),
        (["{run}", "no-such-protocol://x", "--to", "dcp"], "not a path or URL that fsspec can open"),
        (["{run}", "{out}", "--to", "dcp", "--threads", "-1"], "'--threads'"),
    ],
)
def test_export_refuses_what_cannot_work(run: Path, tmp_path: Path, args: list[str], words: str) -> None:
    """Before anything is written."""
    filled = [arg.format(run=run, out=tmp_path / "out") for arg in args]
    assert words in refused(tmp_path, "export", *filled, status=2)


def test_export_of_a_root_tells_what_it_passed_over(run: Path, tmp_path: Path) -> None:
    """Where the newest cannot be read, the one before is exported, and both are named."""
    file = run / "step-4" / "manifest.json"
    file.write_bytes(file.read_bytes()[:-1])
    result = cnr_result("export", run, tmp_path / "model.pt", "--to", "torch")
    assert result.exit_code == 0
    assert re.fullmatch(rf"cnr: warning: skipped .*{re.escape(str(file))}.*\n", result.stderr)
    assert result.stdout.endswith(f", from {run}/step-3\n")

"""Exports that fail or are killed leave nothing, and take little memory."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.attacks.draft import Draft
from tests.support import models, without_us
from tests.support.faults import flip_middle, small_files
from tests.support.jobs import save
from torchrec_cnr.maintenance.export import contents
from torchrec_cnr.maintenance.export.export import Format, export

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

ROOT = Path(__file__).parents[2]
FORMATS: list[Format] = ["dcp", "safetensors", "torch"]
every_format = pytest.mark.parametrize("to", FORMATS)
LIMIT_SECS = 240


@every_format
def test_a_target_that_is_there_is_refused(to: Format, tmp_path: Path) -> None:
    """Nothing in it changes; an empty directory is a target, but not for a file."""
    save({"t": torch.ones(2)}, tmp_path / "0")
    full, file, empty = tmp_path / "full", tmp_path / "file", tmp_path / "empty"
    full.mkdir()
    (full / "x").write_text("mine")
    file.write_text("mine")
    empty.mkdir()
    for out in (full, file):
        with pytest.raises(cnr.ConfigurationError, match=f"{out.name} already exists"):
            export(tmp_path / "0", out, to=to)
    assert [(full / "x").read_text(), file.read_text(), len(list(full.iterdir()))] == ["mine", "mine", 1]
    if to == "torch":
        with pytest.raises(cnr.ConfigurationError, match="empty already exists"):
            export(tmp_path / "0", empty, to=to)
    else:
        export(tmp_path / "0", empty, to=to)
        assert without_us.LOADERS[to](empty, {"t": torch.ones(2)})["t"].tolist() == [1, 1]


def test_arguments_that_cannot_work_are_refused(tmp_path: Path) -> None:
    """The error names what was expected and what was given."""
    save({"__metadata__": torch.ones(2)}, tmp_path / "0")
    wrong: Any = "zip"
    with pytest.raises(cnr.ConfigurationError, match=r"'dcp', 'safetensors', 'torch' \(got 'zip'\)"):
        export(tmp_path / "0", tmp_path / "out", to=wrong)
    with pytest.raises(cnr.ConfigurationError, match="thread_count"):
        export(tmp_path / "0", tmp_path / "out", to="dcp", thread_count=0)
    with pytest.raises(cnr.CheckpointNotFoundError):
        export(cnr.latest(tmp_path / "nowhere"), tmp_path / "out", to="dcp")
    with pytest.raises(cnr.ConfigurationError, match="__metadata__"):
        export(tmp_path / "0", tmp_path / "out", to="safetensors")
    assert not (tmp_path / "out").exists()


def _lineage_of_two(root: Path) -> None:
    """A baseline and a delta of a table of 64 KB."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"t": nn.EmbeddingBag(1000, 16)})
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    for number in range(2):
        saved = {"m": model.state_dict(), "step": number}
        dcp.save(saved, storage_writer=models.writer(root / str(number)), planner=planner)
        with torch.no_grad():
            model["t"].weight[::3] += 1
        tracker.mark("t", torch.arange(0, 1000, 3))
    tracker.close()


@pytest.mark.long
@every_format
@pytest.mark.parametrize("is_there", [False, True], ids=["new", "there"])
def test_nothing_is_left_of_an_export_that_fails(
    to: Format, is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage in a pack, a full disk and an error of the caller's own: typed or as it was, and the next export works."""
    monkeypatch.setattr(contents, "HELD_BYTES", 4096)
    _lineage_of_two(tmp_path)
    out = tmp_path / "out"
    if is_there and to != "torch":
        out.mkdir()
    before = sorted(tmp_path.rglob("*"))

    def stop(done: int, total: int) -> None:
        if 2 * done > total:
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        export(tmp_path / "1", out, to=to, progress=stop)
    assert sorted(tmp_path.rglob("*")) == before
    with small_files(20_000 if to != "dcp" else 3_000), pytest.raises(cnr.StoreError, match="cannot write"):
        export(tmp_path / "1", out, to=to)
    assert sorted(tmp_path.rglob("*")) == before
    pack = max((tmp_path / "0").glob("*.safetensors"), key=lambda file: file.stat().st_size)
    flip_middle(pack)
    with pytest.raises(cnr.DamagedError, match=pack.name):
        export(tmp_path / "1", out, to=to)
    assert sorted(tmp_path.rglob("*")) == before
    flip_middle(pack)
    export(tmp_path / "1", out, to=to)
    assert out.exists()


_KILLED = """
import os, signal, sys
from torchrec_cnr.maintenance.export import contents, to_safetensors
from torchrec_cnr.maintenance.export.export import export

contents.HELD_BYTES = 4096
to_safetensors.FILE_BYTES = int(sys.argv[4])

def kill(done, total):
    if 10 * done > 9 * total:
        os.kill(os.getpid(), signal.SIGKILL)

export(sys.argv[1], sys.argv[2], to=sys.argv[3], progress=kill)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("to", "file_bytes"), [("dcp", 1), ("safetensors", 1 << 30), ("safetensors", 20_000), ("torch", 1)]
)
def test_what_a_killed_export_leaves_does_not_load(to: Format, file_bytes: int, tmp_path: Path) -> None:
    """Of nine tenths, no reader takes anything for the whole."""
    saved = {"a": torch.rand(1000, 16), "b": torch.rand(900, 4)}
    save(saved, tmp_path / "0")
    out = tmp_path / "out"
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "0"), str(out), to, str(file_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECS, check=False, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = [file for file in tmp_path.rglob("*out*/*" if to != "torch" else "out*") if file.stat().st_size > 5_000]
    assert left
    complete = [out / ".metadata", out / "model.safetensors", out / "model.safetensors.index.json"]
    assert not any(file.exists() for file in (complete if to != "torch" else [out]))
    with pytest.raises((CheckpointException, FileNotFoundError, SafetensorError)):
        without_us.LOADERS[to](out, saved)


_MEASURED = """
import json, re, sys
import torchrec_cnr as cnr
from torchrec_cnr.maintenance.export.export import export
from torchrec_cnr.maintenance.dcp_import.import_checkpoint import import_checkpoint

def peak():  # not that of getrusage, which begins with what the parent had
    with open("/proc/self/status") as status:
        most = int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1]) << 10
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # begin anew
    return most

root = sys.argv[1]
for to in ("dcp", "safetensors", "torch"):
    export(f"{root}/small", f"{root}/small-{to}", to=to)
import_checkpoint(f"{root}/small-dcp", f"{root}/small-imported", quantization={"t": cnr.Asymmetric(4)})
peak()
before = peak()  # what is there now
found = {}
for to in ("dcp", "safetensors", "torch"):
    found[to] = [export(f"{root}/1", f"{root}/{to}", to=to).num_bytes, peak() - before]
imported = import_checkpoint(f"{root}/dcp", f"{root}/imported", quantization={"m.*": cnr.Asymmetric(4)})
found["import"] = [sum(shard.box.num_rows for shard in imported.manifest.tensors["m.t.weight"].shards), peak() - before]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_a_table(tmp_path: Path) -> None:
    """A table of 512 MiB, with a delta, is exported and imported with less than 300 MiB more than a small one."""
    num_rows, most_bytes = 1 << 21, 300 << 20
    model = nn.ModuleDict({"t": nn.EmbeddingBag(num_rows, 64)})
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    for number in range(2):
        writer = models.writer(tmp_path / str(number), quantization=cnr.Asymmetric(4))
        dcp.save({"m": model.state_dict()}, storage_writer=writer, planner=planner)
        tracker.mark("t", torch.arange(0, num_rows, 10))
    tracker.close()
    save({"t": torch.rand(100, 4), "o": 1}, tmp_path / "small")
    command = [sys.executable, "-c", _MEASURED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECS, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [found[to][0] for to in FORMATS] == [num_rows * 64 * 4] * 3
    assert found["import"][0] == num_rows
    assert {what: num_bytes for what, (_, num_bytes) in found.items() if num_bytes > most_bytes} == {}


@pytest.mark.parametrize(
    "paths",
    [
        {"table": ["table", 1 << 20], "seen": ["seen", 1 << 20]},
        {"table": ["table"], "seen": ["table", "seen"]},
        {"table": ["a", 0], "seen": ["a", "seen"]},
        {"table": ["a"] * 5_000, "seen": ["seen"]},
    ],
    ids=["long lists", "within a tensor", "list and dictionary", "deep"],
)
def test_paths_that_make_no_state_dict_are_refused(tmp_path: Path, paths: dict[str, list[str | int]]) -> None:
    """Lists of millions for two items, and paths that contradict one another: a typed error, and no file."""
    draft = Draft()
    draft.body["paths"] = paths
    draft.write(tmp_path / "step-1")
    with pytest.raises(cnr.DamagedError, match="the paths of the checkpoint"):
        export(tmp_path / "step-1", tmp_path / "out.pt", to="torch")
    assert os.listdir(tmp_path) == ["step-1"]

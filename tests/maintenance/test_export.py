"""Exports load without the package, and hold what the checkpoint does."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

import torchrec_cnr as cnr
from tests.support import models, without_us
from tests.support.jobs import save
from tests.support.models import Whole, differing, state, torchrec_job, train, whole
from tests.support.ranks import RankPools
from tests.tracking.id_map_jobs import IdMapJob, IdMapModel, assert_equal, buffers
from torchrec_cnr.format.boxes import fills
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.maintenance.export import contents, to_safetensors
from torchrec_cnr.maintenance.export.contents import Contents
from torchrec_cnr.maintenance.export.export import Format, export
from torchrec_cnr.reading.regions import LineageTensor, RowStateRegion
from torchrec_cnr.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

ROOT = Path(__file__).parents[2]
FORMATS: list[Format] = ["dcp", "safetensors", "torch"]
every_format = pytest.mark.parametrize("to", FORMATS)
LIMIT_SECS = 240


def _extra(number: int) -> dict[str, Any]:
    """What a state has beside a model and its optimizers."""
    return {
        "scalar": torch.tensor(3 + number),
        "flags": torch.tensor([True, False, number == 2]),
        "short": torch.arange(5).bfloat16() + number,
        "ids": torch.arange(2, 9) * number,
        "nothing": torch.empty(0, 4),
        "list": [{"x": torch.full((2, 3, 2), float(number))}, None, number],
        "betas": (0.9, number),
        "seen": {number, 7},
    }


def _save_lineage(rank: int, root: str, shardings: list[str]) -> tuple[Whole, dict[str, Any]]:
    """Checkpoints whose sharding changes, some tables quantized; what the last loads as, and the paths of all of it."""
    quantization = {"model.ebc.*": cnr.AdaptiveAsymmetric(4)}
    for number, sharding in enumerate(shardings):
        job = torchrec_job(1 + number, sharding)
        tracker = cnr.RowTracker(job.model)
        if number:
            reader = cnr.CNRStorageReader(f"{root}/{number - 1}")
            dcp.load({**state(job), "extra": _extra(0)}, storage_reader=reader, planner=cnr.CNRLoadPlanner(tracker))
        train(job, number)
        planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
        writer = models.writer(f"{root}/{number}", quantization=quantization)
        dcp.save({**state(job), "extra": _extra(number)}, storage_writer=writer, planner=planner)
        tracker.close()
    path = f"{root}/{len(shardings) - 1}"
    assert cnr.read_checkpoint(path).kind == "delta"
    loaded = {**state(torchrec_job(9, shardings[-1])), "extra": _extra(9)}
    dcp.load(loaded, storage_reader=cnr.CNRStorageReader(path), planner=cnr.CNRLoadPlanner())
    return whole(loaded), flatten_state_dict(loaded)[1]


@pytest.fixture(scope="module", params=["column-row-mixed", "table-mixed-column"])
def lineage(
    tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPools, request: pytest.FixtureRequest
) -> tuple[Path, dict[str, Any]]:
    """A head, and the nested state dict that it loads as."""
    root = tmp_path_factory.mktemp("lineage")
    flat, paths = rank_pool(2).run(_save_lineage, str(root), request.param.split("-"))[0]
    assert any(fqn.endswith("momentum1") and bool(value.any()) for fqn, value in flat.items())
    return root / "2", unflatten_state_dict(flat, paths)


def _loaded_without_us(folder: Path, expected: dict[str, Any], exports: list[str]) -> dict[str, list[str]]:
    """Names of what is not as expected, by export, in a process that does not know the package."""
    torch.save(expected, folder / "expected.pt")
    script = Path(without_us.__file__)
    command = [sys.executable, str(script), str(folder / "expected.pt"), *exports]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_SECS, check=False, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.long
def test_exports_load_without_the_package_as_the_checkpoint_does(
    lineage: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: quantized and exact tables, row-wise state of any sharding, objects; in one batch or in many."""
    path, expected = lineage
    exports = []
    for held_bytes in (None, 150):
        if held_bytes is not None:
            monkeypatch.setattr(contents, "HELD_BYTES", held_bytes)
        for to in FORMATS:
            out = tmp_path / f"{to}-{held_bytes}"
            found = export(path, out, to=to, thread_count=1 + (to == "dcp"))
            assert [Path(file).exists() for file in found.files] == [True] * len(found.files)
            assert found.left_out == (("extra.seen",) if to == "safetensors" else ())
            exports.append(f"{to}={out}")
    assert len(list((tmp_path / "dcp-150").iterdir())) > 20 > len(list((tmp_path / "dcp-None").iterdir()))
    differences = _loaded_without_us(tmp_path, expected, exports)
    # A set is no JSON, and a tuple is a list there.
    lost = {"extra.seen", *(fqn for fqn, value in flatten_state_dict(expected)[0].items() if type(value) is tuple)}
    assert len(lost) > 1
    assert differences == {name: sorted(lost) if name.startswith("safetensors") else [] for name in exports}


def test_golden_checkpoints_are_exported(tmp_path: Path) -> None:
    """Files of the golden checkpoints hold what a read of each tensor gives."""
    path = ROOT / "tests" / "golden" / "v1" / "run" / "step-2"
    export(path, tmp_path / "out", to="safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert (
        differing(found, {fqn: cnr.load_table(path, fqn) for fqn in cnr.read_checkpoint(path).manifest.tensors}) == []
    )


def test_large_safetensors_are_several_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is larger than allowed, but for one tensor that is so by itself; all are found by the index."""
    monkeypatch.setattr(to_safetensors, "FILE_BYTES", 100)
    saved = {f"t{number}": torch.rand(number, 3) for number in range(12)} | {"flags": torch.ones(30).bool()}
    save({"model": saved}, tmp_path / "0")
    export(tmp_path / "0", tmp_path / "out", to="safetensors")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in saved.values())
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"model-{number:05d}-of-{len(names):05d}.safetensors" for number in range(1, len(names) + 1)]
    found: dict[str, Tensor] = {}
    for name in names:
        tensors = load_file(tmp_path / "out" / name)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 100
        assert {index["weight_map"][fqn] for fqn in tensors} == {name}
        found |= tensors
    assert differing(found, flatten_state_dict({"model": saved})[0]) == []


def test_json_holds_the_objects_that_it_can(tmp_path: Path) -> None:
    """What JSON would change is left out and named; tuples become lists."""
    kept = {"int": 2**70, "list": [1, [None, True]], "text": "ä", "float": 0.1}
    left = {"nan": float("nan"), "set": {1}, "keys": ({1: 2},), "bytes": b"x", "tensor": (torch.ones(2),)}
    save({"a": kept | left | {"tuple": ({"b": (1, 2)},)}, "t": torch.ones(2)}, tmp_path / "0")
    found = export(tmp_path / "0", tmp_path / "out", to="safetensors")
    assert found.left_out == tuple(sorted(f"a.{name}" for name in left))
    assert json.loads((tmp_path / "out" / "objects.json").read_text()) == {
        **{f"a.{name}": value for name, value in kept.items()},
        "a.tuple": [{"b": [1, 2]}],
    }


def test_a_torch_file_is_a_sound_archive(tmp_path: Path) -> None:
    """Digests are right, as ``torch.save`` has them, and tensors begin at a multiple of 64 bytes."""
    saved = {"a": torch.rand(100, 7), "b": [torch.tensor([True]), torch.rand(3).double()], "c": torch.rand(5).half()}
    save(saved, tmp_path / "0")
    export(tmp_path / "0", tmp_path / "out.pt", to="torch")
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert archive.testzip() is None
        assert {record.compress_type for record in archive.infolist()} == {zipfile.ZIP_STORED}
    mapped = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)
    assert {tensor.data_ptr() % 64 for tensor in (mapped["a"], *mapped["b"], mapped["c"])} == {0}
    assert differing(flatten_state_dict(mapped)[0], flatten_state_dict(saved)[0]) == []


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_tensors_within_objects_are_exported(to: Format, tmp_path: Path) -> None:
    """Views, parameters and dtypes that no table has, in tuples, where DCP takes them for objects."""
    values = (torch.arange(6.0).view(2, 3)[:, 1], nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.complex64))
    save({"o": {"x": values, "y": "z"}, "t": torch.ones(3)}, tmp_path / "0")
    export(tmp_path / "0", tmp_path / "out", to=to)
    found: dict[str, Any] = {"o": {"x": None, "y": None}, "t": torch.zeros(3)}
    if to == "torch":
        found = torch.load(tmp_path / "out", weights_only=True)
    else:
        dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "out"))
    assert found["o"]["y"] == "z"
    assert type(found["o"]["x"][1]) is nn.Parameter
    for value, expected in zip((*found["o"]["x"], found["t"]), (*values, torch.ones(3)), strict=True):
        assert value.dtype is expected.dtype
        assert torch.equal(value, expected)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_id_maps_are_exported_as_torchrec_has_them(to: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted by raw id, also if a stock load copies them in place; checkpoints have them in the order of rows."""
    monkeypatch.setattr(contents, "HELD_BYTES", 40)
    job = IdMapJob(tmp_path, cnr.Consecutive())
    for ids in ([9, 5, 7], [8, 1]):
        job.model.look_up(ids)
        job.save()
    export(job.saved[-1][0], tmp_path / "out", to=to)
    other = IdMapModel()
    if to == "torch":
        found = torch.load(tmp_path / "out", weights_only=True)["model"]
        for name, value in other.state_dict().items():
            value.copy_(found[name])
    else:
        dcp.load({"model": other.state_dict()}, storage_reader=dcp.FileSystemReader(tmp_path / "out"))
    assert_equal(buffers(other), job.saved[-1][1])
    job.tracker.close()


sizes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@pytest.mark.long
@given(st.dictionaries(st.sampled_from("abcdef"), sizes, min_size=1), st.integers(1, 300))
def test_batches_are_small_and_hold_all(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[int, ...]], held_bytes: int
) -> None:
    """The chunks of a tensor fill it, and a batch is not above the budget but for a single row."""
    path = tmp_path_factory.mktemp("batches") / "0"
    saved = {fqn: torch.rand(size) for fqn, size in tensors.items()}
    save(saved, path)
    found = Contents(read_lineage(path), 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(contents, "HELD_BYTES", held_bytes)
        batches = found.plan_batches(found.tensors)
        values = {(chunk.fqn, chunk.box): part for chunk, part in found.read(found.tensors)}
    for batch in batches:
        assert sum(chunk.num_bytes for chunk in batch) <= held_bytes or [chunk.box.num_rows for chunk in batch] == [1]
    chunks = [chunk for batch in batches for chunk in batch]
    assert [(chunk.fqn, chunk.box) for chunk in chunks] == list(values)
    for fqn, tensor in saved.items():
        assert fills(tuple(tensor.shape), [chunk.box for chunk in chunks if chunk.fqn == fqn])
    for (fqn, box), part in values.items():
        assert torch.equal(
            part, saved[fqn][tuple(slice(f, f + n) for f, n in zip(box.offsets, box.sizes, strict=True))]
        )


def test_chunks_end_where_blocks_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a blob of a baseline is read for one chunk only."""
    monkeypatch.setattr(contents, "HELD_BYTES", 100 * 8)
    monkeypatch.setattr(contents, "BLOCK_BYTES", 30 * 8)
    save({"t": torch.rand(250, 2)}, tmp_path / "0")
    found = Contents(read_lineage(tmp_path / "0"), 1)
    boxes = [chunk.box for batch in found.plan_batches(["t"]) for chunk in batch]
    assert [(box.offsets[0], box.num_rows) for box in boxes] == [(0, 90), (90, 90), (180, 70)]


@pytest.mark.parametrize("lineage", ["column-row-mixed"], indirect=True)
def test_row_wise_state_is_counted_with_all_that_it_is_put_together_from(
    lineage: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the sharding changed, a value is the mean over ranges of columns, each of which is held too."""
    monkeypatch.setattr(contents, "HELD_BYTES", 480)
    opened = read_lineage(lineage[0])
    found = Contents(opened, 1)
    num_resharded = 0
    for fqn, tensor in found.tensors.items():
        if not fqn.endswith("momentum1"):
            continue
        (batches, nowhere) = found.plan_batches([fqn]), torch.empty(tensor.box.sizes, device="meta")
        regions = LineageTensor(opened, fqn).regions(tensor.box, nowhere)
        num_ranges = max(region.ranges.shape[1] for region in regions if isinstance(region, RowStateRegion))
        num_resharded += num_ranges > 1
        most_rows = 120 if num_ranges == 1 else 480 // (4 + num_ranges * 12 + 16)
        assert max(chunk.box.num_rows for batch in batches for chunk in batch) == min(most_rows, tensor.box.num_rows)
    assert num_resharded > 0


@every_format
def test_progress_is_told(to: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows to the number of bytes of all tensors."""
    monkeypatch.setattr(contents, "HELD_BYTES", 64)
    save({"a": torch.rand(40, 4), "b": torch.ones(3), "o": 1}, tmp_path / "0")
    told: list[tuple[int, int]] = []
    found = export(tmp_path / "0", tmp_path / "out", to=to, progress=lambda done, total: told.append((done, total)))
    assert len(told) > 10
    assert told == sorted(told)
    assert {total for _, total in told} == {40 * 4 * 4 + 12} == {found.num_bytes}
    assert told[-1][0] == found.num_bytes


@every_format
def test_other_file_systems_are_written_to(to: Format, tmp_path: Path) -> None:
    """From and to memory, of which each format's own reader gets the same."""
    saved = {"m": {"a": torch.rand(40, 4), "b": torch.ones(3).bool()}, "o": 1}
    save(saved, f"memory://{tmp_path}/0")
    out = f"memory://{tmp_path}/{to}"
    found = export(f"memory://{tmp_path}/0", out, to=to)
    assert all(file.startswith("memory://") for file in found.files)
    local = tmp_path / to
    store = Store.open(out)
    store.fs.get(store.path, str(local), recursive=True)
    flat = flatten_state_dict(saved)[0]
    assert without_us.differing(without_us.LOADERS[to](local, saved), flat) == []


@every_format
def test_an_empty_checkpoint_is_exported(to: Format, tmp_path: Path) -> None:
    """A state dict without tensors, or with nothing at all."""
    for number, saved in enumerate(({"o": 1}, {})):
        save(saved, tmp_path / str(number))
        out = tmp_path / f"{to}-{number}"
        export(tmp_path / str(number), out, to=to)
        assert without_us.differing(without_us.LOADERS[to](out, saved), saved) == []

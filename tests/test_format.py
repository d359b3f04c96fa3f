"""The format: docs/format.md is enough to read a checkpoint, and what any version wrote is read for ever."""

import ast
import contextlib
import copy
import functools
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys, load
from torch.distributed.checkpoint.state_dict_saver import save

import torchrec_cnr as cnr
from tests.golden import mixed, reader, write_v2
from tests.test_manifest import VALUES, changed, file_of, nodes
from torchrec_cnr.modified import ModifiedRows
from torchrec_cnr.rows import Box
from torchrec_cnr.schemes import scheme_from_json
from torchrec_cnr.tracked import TrackedRows, TrackedShard

ROOT = Path(__file__).parents[1]
GOLDENS = {f"v{version}": ROOT / "tests" / "golden" / f"v{version}" for version in (1, 2)}
GOLDEN = GOLDENS["v2"]  # of the version that is written
PAGE = (ROOT / "docs" / "format.md").read_text()
EXPECTED_OF = {version: json.loads((folder / "expected.json").read_text()) for version, folder in GOLDENS.items()}
EXPECTED = EXPECTED_OF["v2"]
LoadPlanner = Callable[[], Any]
SCHEMES_1: list[cnr.Scheme] = [cnr.NoQuantization(), cnr.Asymmetric(8), cnr.Asymmetric(4), cnr.Asymmetric(2)]
SCHEMES = [*SCHEMES_1, *mixed.SCHEMES]  # of the version that is written
SCHEMES_OF = {"v1": SCHEMES_1, "v2": SCHEMES}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

every_version = pytest.mark.parametrize("version", GOLDENS)
every_step = pytest.mark.parametrize("step", write_v2.STEPS)
every_planner = pytest.mark.parametrize("planner", [cnr.CNRLoadPlanner, DefaultLoadPlanner])


def _expected(step: str, planner: LoadPlanner = cnr.CNRLoadPlanner, version: str = "v2") -> dict[str, Any]:
    """What a step loads as in one process, whose table is not sharded: ``CNRLoadPlanner`` fits row-wise state to it."""
    expected: dict[str, Any] = copy.deepcopy(EXPECTED_OF[version][step])
    if step == "step-1" and planner is cnr.CNRLoadPlanner:
        stored = np.frombuffer(bytes.fromhex(expected["tensors"][write_v2.MOMENTUM]["hex"]), np.float32)
        mean = ((4 * stored[:10].astype(np.float64) + 2 * stored[10:].astype(np.float64)) / 6).astype(np.float32)
        expected["tensors"][write_v2.MOMENTUM] = {"dtype": "float32", "size": [10], "hex": mean.tobytes().hex()}
    return expected


def _target(step: str, planner: LoadPlanner = cnr.CNRLoadPlanner, version: str = "v2") -> dict[str, Any]:
    """A state to load into, full of what is in no checkpoint."""
    expected = _expected(step, planner, version)
    state: dict[str, Any] = dict.fromkeys(expected["objects"], "not loaded")
    for fqn, entry in expected["tensors"].items():
        state[fqn] = torch.full(entry["size"], 77, dtype=getattr(torch, entry["dtype"]))
    return state


def _load(folder: Path, state: dict[str, Any], planner: LoadPlanner = cnr.CNRLoadPlanner) -> dict[str, Any]:
    """Load, and raise the first rank's own error."""
    try:
        load(state, storage_reader=cnr.CNRStorageReader(folder), planner=planner(), no_dist=True)
    except CheckpointException as failure:
        raise failure.failures[0][0] from None
    return state


def _as_json(tensor: Tensor) -> dict[str, Any]:
    name = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": name, "size": list(tensor.shape), "hex": write_v2.as_bytes(tensor).hex()}


def _loaded(state: dict[str, Any]) -> dict[str, Any]:
    """A loaded state in the form of ``expected.json``."""
    tensors = {fqn: _as_json(value) for fqn, value in state.items() if isinstance(value, Tensor)}
    return {"tensors": tensors, "objects": {fqn: value for fqn, value in state.items() if fqn not in tensors}}


def _by_reader(folder: Path) -> dict[str, Any]:
    """What the reader makes of a checkpoint, in the form of ``expected.json``."""
    state = reader.read(folder)
    return {fqn: {"dtype": d, "size": size, "hex": data.hex()} for fqn, (d, size, data) in state.tensors.items()}


def test_reader_knows_nothing_of_the_library() -> None:
    """The reader imports neither the library nor torch: it stands for one in another language."""
    tree = ast.parse(Path(reader.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) == {"numpy", "zstandard"}


@every_version
@every_step
def test_page_is_enough_to_read_a_checkpoint(version: str, step: str) -> None:
    """A reader written from the page alone finds every tensor of the golden checkpoints, bit for bit."""
    golden, expected = GOLDENS[version] / step, EXPECTED_OF[version][step]
    assert _by_reader(golden) == expected["tensors"]
    state = reader.read(golden)
    assert set(state.objects) == set(expected["objects"])
    assert state.paths["dense.layers.0"] == ["dense", "layers", 0]


@every_version
@every_step
@every_planner
def test_golden_checkpoints_load_bit_equal(version: str, step: str, planner: LoadPlanner) -> None:
    """What each version wrote loads as it always did."""
    before = _loaded(_target(step, planner, version))
    after = _loaded(_load(GOLDENS[version] / step, _target(step, planner, version), planner))
    assert after == _expected(step, planner, version)
    untouched = {fqn for fqn, entry in before["tensors"].items() if entry == after["tensors"][fqn]}
    assert untouched == {"dense.none"}  # it has no elements


@every_version
def test_golden_checkpoints_differ(version: str) -> None:
    """Each golden delta changes rows of every table and leaves others: a fold is needed to read it."""
    tables = write_v2.TABLES if version == "v2" else set(write_v2.TABLES) - set(mixed.TABLES)
    for fqn in (*tables, write_v2.EXP_AVG):
        for before, after in pairwise(EXPECTED_OF[version][step]["tensors"][fqn] for step in write_v2.STEPS):
            num_rows, num_bytes = before["size"][0], len(before["hex"])
            rows = range(0, num_bytes, num_bytes // num_rows)
            same = {before["hex"][a : a + rows.step] == after["hex"][a : a + rows.step] for a in rows}
            assert same == {True, False}, fqn


@every_version
def test_golden_checkpoints_hold_every_kind(version: str) -> None:
    """Between them they have each scheme, coding, dtype and way of storing a shard, so that each is held."""
    manifests = [cnr.read_checkpoint(GOLDENS[version] / step).manifest for step in write_v2.STEPS]
    entries = [entry for manifest in manifests for entry in manifest.tensors.values()]
    shards = [shard for entry in entries for shard in entry.shards]
    sets = [row_set for manifest in manifests for row_set in manifest.row_sets]
    assert {shard.scheme for shard in shards} == set(SCHEMES_OF[version])
    assert {block.coding for row_set in sets for block in row_set.blocks} == {"bitmap", "gaps"}
    assert {entry.dtype for entry in entries} == set(reader.DTYPES)
    assert {len(row_set.blocks) for row_set in sets} == {0, 1, 2}
    assert {len(shard.box.offsets) for shard in shards} == {0, 1, 2, 3}
    assert {shard.row_set is None for shard in shards if shard.table_box} == {True, False}
    assert any(len(shard.blobs) > 1 for shard in shards)
    assert any(len(manifest.packs) > manifest.world_size for manifest in manifests)
    restores = [0, 0, 0] if version == "v1" else [0, 0, 1]
    assert [manifest.num_restores for manifest in manifests] == restores
    assert [
        reader.read_lineage(GOLDENS[version] / step)[0].manifest.num_restores for step in write_v2.STEPS
    ] == restores
    num_schemes = {len({shard.scheme for shard in entry.shards}) for entry in entries if entry.is_table}
    assert num_schemes == ({1} if version == "v1" else {1, 2, len(mixed.SCHEMES)})


@every_version
@every_step
def test_exact_rows_are_counted(version: str, step: str) -> None:
    """A checkpoint says how many rows codes could not represent, worked out from the sizes of blobs."""
    manifest = reader.read_lineage(GOLDENS[version] / step)[0].manifest
    num_exact = 0
    for entry in manifest.tensors.values():
        for shard in entry.shards:
            num_rows = shard.box.rows if shard.row_set is None else manifest.row_sets[shard.row_set][0]
            for number, blob in enumerate(shard.blobs):
                rows = min(shard.block_rows, num_rows - number * shard.block_rows)
                num_exact += reader.num_exact(shard.scheme, shard.box.cols, rows, blob.num_bytes)
    assert (num_exact > 0) == (step != "step-3")
    assert cnr.read_checkpoint(GOLDENS[version] / step).num_exact_rows == num_exact


@every_version
@every_step
def test_golden_checkpoints_say_their_version(version: str, step: str) -> None:
    """The files of a version are what it wrote: nobody has written them anew with another."""
    start = (GOLDENS[version] / step / "manifest.json").read_bytes()[:200]
    assert b'"manifest":{"format":"torchrec_cnr","version":%s,' % version[1:].encode() in start


def test_script_writes_the_same_bytes_again(tmp_path: Path) -> None:
    """Row codes, quantized rows, safetensors headers and manifests are byte for byte what version 2 wrote."""
    write_v2.write(tmp_path)
    written = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    golden = {path.relative_to(GOLDEN): path.read_bytes() for path in GOLDEN.rglob("*") if path.is_file()}
    assert sorted(written) == sorted(golden)
    assert [str(path) for path in sorted(golden) if written[path] != golden[path]] == []


def test_paths_rebuild_the_nested_state() -> None:
    """Loaded without a state dict, items stand where their paths say."""
    state = _load_state_dict_from_keys(storage_reader=cnr.CNRStorageReader(GOLDEN / "step-3"))
    assert _as_json(state["dense"]["layers"][0]) == EXPECTED["step-3"]["tensors"]["dense.layers.0"]
    assert _as_json(state["model"][write_v2.T4.removeprefix("model.")]) == EXPECTED["step-3"]["tensors"][write_v2.T4]
    assert state["epoch"] == 3


def test_moved_run_loads(tmp_path: Path) -> None:
    """A run copied elsewhere as a whole loads there; a delta copied without its parents does not."""
    shutil.copytree(GOLDEN, tmp_path / "elsewhere" / "run")
    assert _loaded(_load(tmp_path / "elsewhere" / "run" / "step-3", _target("step-3"))) == EXPECTED["step-3"]
    assert cnr.latest(tmp_path / "elsewhere" / "run") == str(tmp_path / "elsewhere" / "run" / "step-3")
    shutil.copytree(GOLDEN / "step-3", tmp_path / "alone" / "step-3")
    with pytest.raises(cnr.DamagedError, match=r"its parent .*step-2 is missing"):
        _load(tmp_path / "alone" / "step-3", _target("step-3"))


# Lineages of several versions


@dataclass(eq=False)
class _Resumed:
    """A job that stands on a copy of the golden checkpoints of version 1."""

    folder: Path
    state: dict[str, Any]
    tracker: TrackedRows

    def train(self, seed: int) -> None:
        """Modify some rows of every table and its optimizer state, and what is no table."""
        for shard in self.tracker.shards:
            rows = torch.tensor([1, seed % 3 + 3])
            shard.rows.mark(rows)
            for tensor in (shard.weight, *shard.state()):
                tensor[rows] = write_v2.values_of(tuple(tensor[rows].shape), seed, tensor.dtype)
        self.state["step"] += 1

    def save(self, step: str) -> dict[str, Any]:
        """Save, and return what it must load as."""
        writer = cnr.CNRStorageWriter(self.folder / step, sync_files=False)
        planner = cnr.CNRSavePlanner(self.tracker, policy=cnr.Consecutive())
        save(self.state, storage_writer=writer, planner=planner, no_dist=True)
        return copy.deepcopy(_loaded(self.state))

    def target(self) -> dict[str, Any]:
        """A state like the job's to load into, full of what it does not hold."""
        return _target("step-3", version="v1") | {
            "reader.state": dict.fromkeys(self.state["reader.state"], "not loaded")
        }


@pytest.fixture
def resumed(tmp_path: Path) -> _Resumed:
    """Loads the newest checkpoint of version 1, and tracks it."""
    folder, state = shutil.copytree(GOLDENS["v1"], tmp_path / "run"), _target("step-3", version="v1")
    states = {write_v2.T0: (state[write_v2.EXP_AVG],), write_v2.T8: (state[write_v2.MOMENTUM],)}
    shards = []
    for fqn in (write_v2.T0, write_v2.T2, write_v2.T4, write_v2.T8):
        rows = ModifiedRows(fqn, Box.whole(tuple(state[fqn].shape)), torch.device("cpu"))
        shards.append(TrackedShard(rows, state[fqn], functools.partial(states.get, fqn, ())))
    tracker = TrackedRows(shards)
    _load(folder / "step-3", state, lambda: cnr.CNRLoadPlanner(tracker))
    return _Resumed(folder, state, tracker)


def test_deltas_stand_on_a_lineage_of_version_1(resumed: _Resumed) -> None:
    """A job that resumes from version 1 goes on with deltas in version 2, which load over it; the restore counts."""
    assert _loaded(resumed.state) == _expected("step-3", version="v1")
    cuts = {}
    for number in (4, 5):
        resumed.train(number)
        cuts[f"step-{number}"] = resumed.save(f"step-{number}")
    assert cuts["step-4"] != cuts["step-5"]
    links = reader.read_lineage(resumed.folder / "step-5")
    assert [link.manifest.version for link in links] == [2, 2, 1, 1, 1]
    for step, cut in cuts.items():
        checkpoint = cnr.read_checkpoint(resumed.folder / step)
        assert (checkpoint.kind, checkpoint.num_restores) == ("delta", 1)
        assert checkpoint.num_rows == 4 * 2
        assert _loaded(_load(resumed.folder / step, resumed.target())) == cut
        assert _by_reader(resumed.folder / step) == cut["tensors"]
    before = _expected("step-3", version="v1")["tensors"][write_v2.T2]["hex"]
    after = cuts["step-5"]["tensors"][write_v2.T2]["hex"]
    assert [before[a : a + 12] == after[a : a + 12] for a in range(0, len(before), 12)].count(False) == 3


def test_replaced_parent_of_version_1_is_refused(resumed: _Resumed) -> None:
    """A parent is known by the bytes that it was committed as: rewritten in version 2, it is another one."""
    resumed.train(4)
    cut = resumed.save("step-4")
    path = resumed.folder / "step-1" / "manifest.json"
    manifest, digest = cnr.manifest_json.loads(path.read_bytes(), "step-1")
    data, other = cnr.manifest_json.dumps(manifest)
    assert digest != other
    assert _loaded(_load(resumed.folder / "step-4", resumed.target())) == cut
    path.write_bytes(data)
    with pytest.raises(cnr.DamagedError, match=r"its parent .*step-1 was replaced"):
        _load(resumed.folder / "step-4", resumed.target())
    with pytest.raises(reader.Refused, match="another parent"):
        reader.read(resumed.folder / "step-4")


# The examples of the page


def _hex(text: str) -> bytes:
    return bytes.fromhex(text.replace(" ", ""))


def test_row_codes_of_the_page_are_right() -> None:
    """Codes and frames given as examples code the rows that the page says, and are what the library writes."""
    found = re.findall(r"^\| `(bitmap|gaps)` \| `([0-9a-f ]+)` \| `([0-9a-f ]+)` \|$", PAGE, re.MULTILINE)
    assert [coding for coding, _, _ in found] == ["bitmap", "gaps", "gaps"]
    for (coding, code, frame), rows in zip(found, [[3, 4, 7, 12], [3, 4, 7, 12], [0, 300, 301]], strict=True):
        assert zstandard.ZstdDecompressor().decompress(_hex(frame)) == _hex(code)
        blob = reader.Blob(0, 0, 1, 0)
        block = reader.RowBlock(coding, rows[0], rows[-1] - rows[0] + 1, len(rows), blob)
        assert reader.decode_rows(block, _hex(frame)).tolist() == rows
        coded = cnr.rows.CodedRows(coding, rows[0], block.span, _hex(frame))
        assert cnr.rows.decode_rows(coded, len(rows), "page").tolist() == rows
    for _, _, frame in (found[0], found[2]):
        rows = [3, 4, 7, 12] if frame == found[0][2] else [0, 300, 301]
        assert cnr.rows.encode_rows(np.array(rows)).data == _hex(frame)


def test_rows_of_the_page_are_right() -> None:
    """The rows given as examples decode to the values that the page says, and are what the library writes."""
    found = re.findall(r"^\| `(\{.*\})` \| ([0-9−., ]+) \| `([0-9a-f ]+)` \|$", PAGE, re.MULTILINE)
    assert [json.loads(scheme)["name"] for scheme, _, _ in found] == ["half"] * 2 + ["asymmetric"] * 2 + ["kmeans"]
    for text, values, row in found:
        expected = [float(value.replace("−", "-")) for value in values.split(",")]
        known = reader.scheme_of(json.loads(text), "float32")
        assert reader.decode_values(known, 5, 1, _hex(row)).tolist() == [expected]
        scheme = scheme_from_json(json.loads(text), "page")
        assert bytes(scheme.encode(torch.tensor([expected])).codes[0].tolist()) == _hex(row)


def test_schemes_and_decimals_of_the_page_are_right() -> None:
    """The page lists the schemes and searches that reader and library know, and its decimals are written so."""
    names = re.findall(r'^\| `\{"name":"([a-z_]+)"', PAGE, re.MULTILINE)
    assert set(names) == set(reader.SCHEME_KEYS) | {"greedy", "least_squares"}
    assert {scheme.name for scheme in SCHEMES} == set(reader.SCHEME_KEYS)
    decimals = re.findall(r"`(-?[0-9]\.[0-9]+|[0-9.]+e-[0-9]+)`", PAGE)
    assert decimals == ["1.0", "0.05", "1e-05", "2.5e-07", "0.0", "-0.0"]
    assert [reader.decimal(decimal) for decimal in decimals] == [1, 0.05, 0.00001, 0.00000025, 0, 0]


def test_check_value_of_the_page_is_right() -> None:
    """Reader and library compute the CRC that the page names."""
    assert reader.crc32c(b"123456789") == cnr.packs.crc32c(b"123456789") == 0xE3069283
    assert "`123456789` is `0xe3069283`" in PAGE


# Other checkpoints than the golden ones

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64]
numbers = itertools.count()


@st.composite
def _tensors(draw: st.DrawFn) -> Tensor:
    size = draw(st.lists(st.integers(0, 9), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    tensor: Tensor = (torch.randn(size, dtype=torch.float64) * 10 ** draw(st.integers(-3, 6))).to(dtype)
    if dtype.is_floating_point and tensor.numel():
        tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = draw(
            st.sampled_from([1.0, float("nan"), float("inf")])
        )
    return tensor


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    st.dictionaries(st.text(max_size=5).filter(lambda key: "." not in key), _tensors(), min_size=1, max_size=4),
    st.sampled_from(SCHEMES),
)
def test_reader_reads_whatever_the_library_saves(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Tensor], scheme: cnr.Scheme
) -> None:
    """For any tensors and scheme, reader and library load the same bytes."""
    folder = tmp_path_factory.getbasetemp() / f"saved-{next(numbers)}"
    writer = cnr.CNRStorageWriter(folder, quantization={"*": scheme}, sync_files=False)
    save(state, storage_writer=writer, planner=DefaultSavePlanner(), no_dist=True)
    loaded = _load(folder, {key: torch.zeros_like(tensor) for key, tensor in state.items()})
    assert _by_reader(folder) == _loaded(loaded)["tensors"]
    if scheme == cnr.NoQuantization():
        assert _loaded(loaded) == _loaded(dict(state))


# Damage

FILES = sorted(path.relative_to(GOLDEN) for path in (GOLDEN / "step-1").iterdir())


def _refuses(folder: Path, step: str) -> None:
    with pytest.raises(reader.Refused):
        reader.read(folder / step)
    with pytest.raises(cnr.LoadError):
        _load(folder / step, _target(step))


@hypothesis.settings(max_examples=100)
@hypothesis.given(file=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, file: Path, place: float, bit: int
) -> None:
    """A baseline with one bit flipped anywhere, in the manifest or a pack, is refused."""
    folder = tmp_path_factory.getbasetemp() / f"flipped-{next(numbers)}"
    shutil.copytree(GOLDEN / "step-1", folder / "step-1")
    data = bytearray((folder / file).read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    (folder / file).write_bytes(data)
    _refuses(folder, "step-1")
    shutil.rmtree(folder)


@pytest.mark.parametrize("file", FILES, ids=str)
@pytest.mark.parametrize("num_left", [0, 1, 100, -1])
def test_any_truncated_file_is_noticed(tmp_path: Path, file: Path, num_left: int) -> None:
    """A file that ends early, or is gone, is refused."""
    shutil.copytree(GOLDEN / "step-1", tmp_path / "step-1")
    (tmp_path / file).write_bytes((GOLDEN / file).read_bytes()[:num_left])
    _refuses(tmp_path, "step-1")
    (tmp_path / file).unlink()
    _refuses(tmp_path, "step-1")


# Contradictions behind right digests


def _edit(folder: Path, step: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the body of a manifest, and renew its digest and those by which its children name it."""
    path = folder / step / "manifest.json"
    old, body = json.loads(path.read_text()).values()
    change(body)
    data = file_of(body)
    path.write_bytes(data)
    for child in folder.glob("step-*"):
        if old in (child / "manifest.json").read_text() and child.name != step:
            _edit(folder, child.name, lambda body: body["parent"].update(sha256=json.loads(data)["sha256"]))


def _patch(folder: Path, step: str, blob: list[int], at: int, new: bytes) -> None:
    """Overwrite bytes of a blob, and renew its digest."""
    _, body = json.loads((folder / step / "manifest.json").read_text()).values()
    file = folder / step / body["packs"][blob[0]][0]
    data = bytearray(file.read_bytes())
    assert data[blob[1] + at : blob[1] + at + len(new)] != new
    data[blob[1] + at : blob[1] + at + len(new)] = new
    file.write_bytes(data)
    crc = reader.crc32c(bytes(data[blob[1] : blob[1] + blob[2]]))
    text = json.dumps(body).replace(json.dumps(blob), json.dumps([*blob[:3], crc]))
    _edit(folder, step, lambda body: body.update(json.loads(text)))


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the golden checkpoints."""
    return shutil.copytree(GOLDEN, tmp_path / "v2")


def _blob(step: str, fqn: str, shard: int, number: int) -> list[int]:
    body = json.loads((GOLDEN / step / "manifest.json").read_text())["manifest"]
    blob: list[int] = body["tensors"][fqn]["shards"][shard][3][number]
    return blob


def test_edited_checkpoints_load(copied: Path) -> None:
    """The tools that the tests below damage checkpoints with leave a good one good."""
    _edit(copied, "step-1", lambda body: body.update(writer="somebody else"))
    blob = _blob("step-1", "tiny.u8", 0, 0)
    _patch(copied, "step-1", blob, 0, b"\7")
    assert reader.read(copied / "step-1").tensors["tiny.u8"][2] == b"\7\1"
    assert _loaded(_load(copied / "step-3", _target("step-3"))) == EXPECTED["step-3"]


@pytest.mark.parametrize("positions", [[1, 2], [0xFFFFFFFF, 0], [0, 0xFFFFFFFF], [3, 0], [1, 1], [0, 3]])
def test_exact_rows_out_of_place_are_refused(tmp_path: Path, positions: list[int]) -> None:
    """Positions of exactly stored rows are rows of the block, in increasing order, or the load is refused."""
    values = torch.full((3, 80), 0.5)
    values[0, 0] = values[2, 1] = float("nan")
    writer = cnr.CNRStorageWriter(tmp_path / "step-1", quantization={"*": cnr.Asymmetric(8)}, sync_files=False)
    save({"t": values}, storage_writer=writer, no_dist=True)
    body = json.loads((tmp_path / "step-1" / "manifest.json").read_text())["manifest"]
    ((blob,),) = (shard[3] for shard in body["tensors"]["t"]["shards"])
    _patch(tmp_path, "step-1", blob, 3 * 84, np.array(positions, "<u4").tobytes())
    target = {"t": torch.zeros(3, 80)}
    if positions == [1, 2]:
        loaded = _load(tmp_path / "step-1", target)["t"]
        assert loaded.isnan()[:, :2].tolist() == [[False, False], [True, False], [False, True]]
        return
    with pytest.raises(reader.Refused, match="positions"):
        reader.read(tmp_path / "step-1")
    with pytest.raises(cnr.DamagedError, match="exact"):
        _load(tmp_path / "step-1", target)


@pytest.mark.parametrize("scheme", mixed.SCHEMES, ids=str)
@pytest.mark.parametrize("num_more", [-1, 1])
def test_blobs_that_are_longer_or_shorter_are_refused(tmp_path: Path, scheme: cnr.Scheme, num_more: int) -> None:
    """A blob has the bytes that its rows need: one more or less, in the pack too, is refused before it is read."""
    table = torch.arange(33.0).reshape(3, 11)
    writer = cnr.CNRStorageWriter(tmp_path / "step-1", quantization={"*": scheme}, sync_files=False)
    save({"t": table}, storage_writer=writer, no_dist=True)
    assert reader.read(tmp_path / "step-1").tensors["t"][:2] == ("float32", [3, 11])

    def resize(body: dict[str, Any]) -> None:
        (pack,), (shard,) = body["packs"], body["tensors"]["t"]["shards"]
        file = tmp_path / "step-1" / pack[0]
        file.write_bytes((file.read_bytes() + b"\0")[: pack[1] + num_more])
        data = file.read_bytes()[pack[2] :]
        pack[1] += num_more
        shard[3][0][2:] = [len(data), reader.crc32c(data)]

    _edit(tmp_path, "step-1", resize)
    with pytest.raises(reader.Refused, match="another size"):
        reader.read(tmp_path / "step-1")
    with pytest.raises(cnr.DamagedError, match=r"'t'.*bytes, its 3 rows need"):
        _load(tmp_path / "step-1", {"t": torch.zeros(3, 11)})


def test_bytes_that_are_no_bools_are_refused(copied: Path) -> None:
    """A bool is 0 or 1: any other byte would be a third truth value in memory."""
    _patch(copied, "step-1", _blob("step-1", "dense.mask", 0, 0), 1, b"\2")
    _refuses(copied, "step-1")


@pytest.mark.parametrize(
    ("fqn", "change"),
    [
        pytest.param(write_v2.T0, {"dtype": "int32"}, id="another dtype"),
        pytest.param(write_v2.T2, {"is_table": False}, id="no table any more"),
        pytest.param(write_v2.EXP_AVG, {"is_table": True}, id="a table suddenly"),
    ],
)
def test_tensor_that_changes_along_a_lineage_is_refused(copied: Path, fqn: str, change: dict[str, Any]) -> None:
    """A delta's rows are rows of the parent's tensor: if that is another one, nothing fits."""
    _edit(copied, "step-2", lambda body: body["tensors"][fqn].update(change))
    with pytest.raises(reader.Refused, match="in a parent"):
        reader.read(copied / "step-2")
    target = _target("step-2")
    target[fqn] = target[fqn].to(getattr(torch, change.get("dtype", EXPECTED["step-2"]["tensors"][fqn]["dtype"])))
    with pytest.raises(cnr.DamagedError, match=re.escape(fqn)):
        _load(copied / "step-2", target)


def test_tensor_that_the_parent_lacks_is_refused(copied: Path) -> None:
    """A delta of a tensor that its parent does not have cannot be laid over anything."""
    _edit(copied, "step-2", lambda body: body["tensors"].update(new=body["tensors"].pop(write_v2.T2)))
    _edit(copied, "step-2", lambda body: body.update(tensors=dict(sorted(body["tensors"].items()))))
    target = _target("step-2")
    target["new"] = target.pop(write_v2.T2)
    with pytest.raises(reader.Refused, match="no new in a parent"):
        reader.read(copied / "step-2")
    with pytest.raises(cnr.DamagedError, match="'new'"):
        _load(copied / "step-2", target)


@every_version
@hypothesis.settings(max_examples=150)
@hypothesis.given(data=st.data())
def test_reader_and_library_agree_on_any_manifest(
    tmp_path_factory: pytest.TempPathFactory, version: str, data: st.DataObject
) -> None:
    """A delta whose manifest was changed at random, digest included, loads the same in both, or is refused by both."""
    folder = tmp_path_factory.getbasetemp() / f"mutated-{next(numbers)}"
    shutil.copytree(GOLDENS[version], folder)
    body = json.loads((folder / "step-2" / "manifest.json").read_text())["manifest"]
    paths = [path for path in nodes(body) if path[0] in ("packs", "row_sets", "tensors", "version")]
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(paths))
        with contextlib.suppress(KeyError, IndexError, TypeError, AttributeError):  # an earlier change removed it
            body = changed(body, path, data.draw(st.sampled_from(VALUES)))
    (folder / "step-2" / "manifest.json").write_bytes(file_of(body))
    try:
        expected = _by_reader(folder / "step-2")
    except reader.Refused:
        with pytest.raises(cnr.LoadError):
            _load(folder / "step-2", _target("step-2", DefaultLoadPlanner, version), DefaultLoadPlanner)
    else:
        target = {fqn: torch.zeros(e["size"], dtype=getattr(torch, e["dtype"])) for fqn, e in expected.items()}
        assert _loaded(_load(folder / "step-2", target, DefaultLoadPlanner))["tensors"] == expected
    shutil.rmtree(folder)

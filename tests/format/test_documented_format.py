"""The format: docs/reference/format.md is enough to read a checkpoint, and what was once written is read for ever."""

import ast
import collections
import contextlib
import copy
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
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
from tests.format.test_manifest import DELETE, REPEAT, VALUES, changed, file_of, nodes
from tests.golden import copy_of, log, mixed, reader, refusals, split, transformed, write
from tests.golden.edits import body_of, edit, patch
from tests.golden.replacement import replace_manifest, used_packs
from tests.golden.state import EXP_AVG, MOMENTUM, T0, T2, T4, T8, TABLES
from tests.support.faults import flip
from torchrec_cnr.format import manifest_json, row_sets
from torchrec_cnr.format.blob_bytes import split as split_rows
from torchrec_cnr.format.manifest import DTYPES as DTYPE_OF
from torchrec_cnr.format.manifest import Shard, TensorEntry
from torchrec_cnr.maintenance.catalog import read_catalog
from torchrec_cnr.maintenance.read_run_history import read_run_history
from torchrec_cnr.quantization import scheme_from_json
from torchrec_cnr.storage.pack_writer import crc32c

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "golden" / "v1"
GOLDEN, LOGGED = GOLDENS / write.RUN, GOLDENS / write.LOGGED
PAGE = (ROOT / "docs" / "reference" / "format.md").read_text()
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
LoadPlanner = Callable[[], Any]
SCHEMES: list[cnr.Scheme] = [
    cnr.NoQuantization(),
    cnr.Asymmetric(8),
    cnr.Asymmetric(4),
    cnr.Asymmetric(2),
    cnr.Symmetric(3, entropy_coded=True),
    cnr.Asymmetric(4, entropy_coded=True),
    *mixed.SCHEMES,
]

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")]

every_step = pytest.mark.parametrize("step", EXPECTED)
every_planner = pytest.mark.parametrize("planner", [cnr.CNRLoadPlanner, DefaultLoadPlanner])


def _expected(step: str, planner: LoadPlanner = cnr.CNRLoadPlanner) -> dict[str, Any]:
    """What a step loads as in one process, whose table is not sharded: ``CNRLoadPlanner`` fits row-wise state to it."""
    expected: dict[str, Any] = copy.deepcopy(EXPECTED[step])
    widths = write.COLUMNS.get(int(step.removeprefix("step-")))
    if widths is not None and planner is cnr.CNRLoadPlanner:
        stored = np.frombuffer(bytes.fromhex(expected["tensors"][MOMENTUM]["hex"]), np.float32)
        mean = (stored.reshape(2, 10).astype(np.float64).T @ widths / 6).astype(np.float32)
        expected["tensors"][MOMENTUM] = {"dtype": "float32", "size": [10], "hex": mean.tobytes().hex()}
    return expected


def _target(step: str, planner: LoadPlanner = cnr.CNRLoadPlanner) -> dict[str, Any]:
    """A state to load into, full of what is in no checkpoint."""
    expected = _expected(step, planner)
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
    return {"dtype": name, "size": list(tensor.shape), "hex": write.as_bytes(tensor).hex()}


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
    parts = (reader, transformed, refusals)
    found = [node for part in parts for node in ast.walk(ast.parse(Path(part.__file__).read_text()))]
    names = {alias.name for node in found if isinstance(node, ast.Import) for alias in node.names}
    froms = {f"{n.module}.{alias.name}" for n in found if isinstance(n, ast.ImportFrom) for alias in n.names}
    own = tuple(f"{part.__name__}." for part in parts)
    names |= {name for name in froms if not f"{name}.".startswith(own)}
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) == {"numpy", "zstandard"}


@every_step
def test_page_is_enough_to_read_a_checkpoint(step: str) -> None:
    """A reader written from the page alone finds every tensor of the golden checkpoints, bit for bit."""
    golden, expected = GOLDEN / step, EXPECTED[step]
    assert _by_reader(golden) == expected["tensors"]
    state = reader.read(golden)
    assert set(state.objects) == set(expected["objects"])
    assert state.paths["dense.layers.0"] == ["dense", "layers", 0]


@every_step
@every_planner
def test_golden_checkpoints_load_bit_equal(step: str, planner: LoadPlanner) -> None:
    """What was once written loads as it always did."""
    before = _loaded(_target(step, planner))
    after = _loaded(_load(GOLDEN / step, _target(step, planner), planner))
    assert after == _expected(step, planner)
    untouched = {fqn for fqn, entry in before["tensors"].items() if entry == after["tensors"][fqn]}
    assert untouched == {"dense.none"}  # it has no elements


def test_golden_checkpoints_differ() -> None:
    """Each golden delta changes rows of every table and leaves others: a fold is needed to read it."""
    for fqn in (*TABLES, EXP_AVG):
        for before, after in pairwise(expected["tensors"][fqn] for expected in EXPECTED.values()):
            num_rows, num_bytes = before["size"][0], len(before["hex"])
            rows = range(0, num_bytes, num_bytes // num_rows)
            same = {before["hex"][a : a + rows.step] == after["hex"][a : a + rows.step] for a in rows}
            assert same == {True, False}, fqn


def test_golden_checkpoints_hold_every_kind() -> None:
    """Between them they have each scheme, coding, dtype and way of storing a shard, so that each is held."""
    manifests = [cnr.read_checkpoint(GOLDEN / step).committed for step in write.STEPS[:3]]
    entries = [entry for manifest in manifests for entry in manifest.tensors.values()]
    shards = [shard for entry in entries for shard in entry.shards]
    sets = [rows for manifest in manifests for rows in manifest.row_sets]
    coded = [rows for rows in sets if any(block.blob is not None for block in rows.blocks)]
    assert {shard.scheme for shard in shards} == {*SCHEMES, *split.SCHEMES.values()}
    assert {block.coding for rows in sets for block in rows.blocks} == {"all", "bitmap", "gaps"}
    assert {entry.dtype for entry in entries} == set(reader.DTYPES)
    assert {len(rows.blocks) for rows in coded} == {1, 2}
    assert any(not shard.rows.blocks and shard.box.num_rows for shard in shards)
    assert {len(shard.box.offsets) for shard in shards} == {0, 1, 2, 3}
    assert {shard.is_whole for shard in shards if shard.table_box} == {True, False}
    assert any(len(shard.blobs) > 1 for shard in shards)
    assert any(len(manifest.packs) > manifest.world_size for manifest in manifests)
    restores = [0, 0, 1]
    assert [manifest.num_restores for manifest in manifests] == restores
    assert [reader.read_lineage(GOLDEN / step)[0].manifest.num_restores for step in write.STEPS[:3]] == restores
    num_schemes = {len({shard.scheme for shard in entry.shards}) for entry in entries if entry.is_table}
    assert num_schemes == {1, 2, len(mixed.SCHEMES)}


def test_golden_replacements_hold_every_kind() -> None:
    """Between them they have all that only replacements may have."""
    first, second = (cnr.read_checkpoint(GOLDEN / step) for step in write.REPLACED)
    assert (first.parent, second.kind, second.parent) == (None, "delta", str(GOLDEN / "step-4"))
    assert (first.kind, first.is_compacted) == ("delta", True)
    assert second.committed.parent is not None
    assert second.committed.parent.path == f"../{write.REMOVED}"
    assert first.created_ns < second.created_ns < first.manifest.created_ns  # which nobody compares
    assert len(list((GOLDEN / "step-4").glob("manifest-*"))) == 2
    directories = {pack.directory for pack in first.manifest.packs}
    assert directories == {None, "../step-1", "../step-3"}  # all that step-2 had was moved
    assert {pack.name.partition("-")[0] for pack in first.manifest.packs if pack.directory is None} == {
        first.manifest.save_id,
        first.committed.save_id,
    }
    folded = {fqn: entry for fqn, entry in first.manifest.tensors.items() if entry.folded is not None}
    assert set(folded) == {*TABLES, EXP_AVG, MOMENTUM}
    assert {shard.table_box.sizes[1] for shard in folded[MOMENTUM].shards if shard.table_box} == {2, 4, 6}  # columns
    assert {shard.is_whole for shard in folded[T0].shards} == {False}
    codings = [{block.coding for block in shard.rows.blocks} for shard in folded[T0].shards]
    assert codings[0] == {"all"} != codings[-1]
    by_code = collections.Counter(
        block.blob for rows in first.manifest.row_sets for block in rows.blocks if block.blob is not None
    )
    assert set(by_code.values()) == {1, 2}
    used = first.manifest.blob_bytes + sum(pack.header_bytes for pack in first.manifest.packs)
    assert used < sum(pack.num_bytes for pack in first.manifest.packs)
    assert not (GOLDEN / write.REMOVED / "manifest.json").exists()
    assert {pack.directory for pack in second.manifest.packs} == {None, f"../{write.REMOVED}"}
    assert not cnr.read_checkpoint(GOLDEN / "step-7").is_compacted


@every_step
def test_exact_rows_are_counted(step: str) -> None:
    """A checkpoint says how many rows codes could not represent, worked out from the sizes of blobs."""
    manifest = reader.read_lineage(GOLDEN / step)[0].manifest
    num_exact = sum(
        reader.num_exact(shard.scheme, shard.box.cols, block.members, blob.num_bytes)
        for entry in manifest.tensors.values()
        for shard in entry.shards
        for block, blob in zip(shard.row_set, shard.blobs, strict=False)
        if not reader.is_split(shard.scheme, shard.box.cols, block.members, blob.num_bytes)
    )
    assert (num_exact > 0) == (step in ("step-1", "step-2", "step-4"))
    assert cnr.read_checkpoint(GOLDEN / step).num_exact_rows == num_exact


@pytest.mark.parametrize("path", sorted(GOLDENS.glob("*/*/manifest*.json")), ids=lambda path: str(path)[-70:])
def test_golden_checkpoints_say_their_version(path: Path) -> None:
    """It is the same for all of them, whatever they hold."""
    assert b'"manifest":{"format":"torchrec_cnr","version":1,' in path.read_bytes()[:200]


def test_script_writes_the_same_bytes_again(tmp_path: Path) -> None:
    """Row codes, quantized rows, safetensors headers, manifests and records are byte for byte what they were."""
    write.write(tmp_path)
    written = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    kept = [path for path in GOLDENS.rglob("*") if path.is_file() and path.suffix != ".lease"]  # of other tests
    golden = {path.relative_to(GOLDENS): path.read_bytes() for path in kept}
    assert sorted(written) == sorted(golden)
    assert [str(path) for path in sorted(golden) if written[path] != golden[path]] == []


def test_golden_checkpoints_hold_plain_and_packed_manifests() -> None:
    """Most are plain; the larger ones of a compaction, and the last one, are packed: readers meet both in a lineage."""
    packed = [path for path in sorted(GOLDENS.glob("*/*/manifest*.json")) if b',"zstd":"' in path.read_bytes()[:200]]
    replacements = sorted((GOLDEN / "step-4").glob("manifest-*"))
    assert len(replacements) == 2
    assert packed == [LOGGED / "step-3" / "manifest.json", *replacements, GOLDEN / "step-7" / "manifest.json"]


def _bytes_behind_codes(shard: Shard, dtype: torch.dtype) -> list[int]:
    """The bytes of each blob after the codes of its rows; negative for a split blob."""
    row_bytes = shard.scheme.row_bytes(shard.box.num_cols, dtype)
    blobs = zip(shard.blobs, shard.rows.blocks, strict=True)
    return [blob.num_bytes - block.num_rows * row_bytes for blob, block in blobs]


@pytest.mark.parametrize("step", ["step-1", "step-4"])
def test_golden_checkpoints_hold_split_blobs(step: str) -> None:
    """Each scheme that splits blobs has done so, and in one table a block with an exact row was not split."""
    manifest = cnr.read_checkpoint(GOLDEN / step).manifest
    behind = {
        fqn: [num for shard in entry.shards for num in _bytes_behind_codes(shard, DTYPE_OF[entry.dtype])]
        for fqn, entry in manifest.tensors.items()
        if fqn.startswith(split.PREFIX)
    }
    assert {fqn: {shard.scheme for shard in manifest.tensors[fqn].shards} for fqn in behind} == {
        fqn: {scheme} for fqn, scheme in split.SCHEMES.items()
    }
    assert {fqn for fqn, found in behind.items() if min(found) == 0} == {split.NEVER}
    assert {fqn for fqn, found in behind.items() if max(found) > 0} == {split.SPOILED}


# Packs in a log


def _records() -> dict[tuple[str, int], dict[int, reader.Record]]:
    """The golden log, as the reader takes one."""
    kept = log.KeptLog(LOGGED / "log.json").records()
    found = (
        reader.Record(r["key"].encode(), r["part"].encode(), bytes.fromhex(r["value"]), r.get("pack", "").encode())
        for r in kept
    )
    return {(log.TOPIC, 0): dict(enumerate(found))}


@pytest.mark.parametrize("step", log.STEPS)
def test_page_is_enough_to_read_rows_in_a_log(step: str) -> None:
    """With the log's records, the reader finds what the run has in files, bit for bit; without, it refuses."""
    state = reader.read(LOGGED / step, _records())
    assert {fqn: {"dtype": d, "size": size, "hex": data.hex()} for fqn, (d, size, data) in state.tensors.items()} == (
        EXPECTED[step]["tensors"]
    )
    assert state.objects == reader.read(GOLDEN / step).objects
    if step != "step-1":
        with pytest.raises(reader.Refused, match="parts are missing"):
            reader.read(LOGGED / step)


@pytest.mark.parametrize("step", log.STEPS)
def test_golden_checkpoints_with_rows_in_a_log_load_bit_equal(step: str, tmp_path: Path) -> None:
    """The library reads them, too, by whatever log it is given."""
    path, rows = copy_of(LOGGED, tmp_path / "run") / step, log.KeptLog(LOGGED / "log.json")
    state = _target(step)
    load(state, storage_reader=cnr.CNRStorageReader(path, row_log=rows), planner=cnr.CNRLoadPlanner(), no_dist=True)
    assert _loaded(state) == _expected(step)
    assert _as_json(cnr.load_table(path, T0, row_log=rows)) == EXPECTED[step]["tensors"][T0]


def test_golden_checkpoints_with_rows_in_a_log_hold_every_kind() -> None:
    """Files and log, keys that are a pack's name and others, and records of others between."""
    packs = [cnr.read_checkpoint(LOGGED / step).manifest.packs for step in log.STEPS]
    assert [{pack.log is not None for pack in found} for found in packs] == [{False}, {True, False}, {True}]
    assert {pack.log.key for pack in packs[2] if pack.log is not None} == {None, *log.KEYS.values()}
    for pack in (pack for found in packs for pack in found if pack.log is not None):
        num_parts = pack.log.num_parts(pack.num_bytes)
        assert num_parts > 1
        assert pack.log.last - pack.log.first == num_parts  # one of somebody else


def test_packs_in_a_log_are_no_files_of_a_run(tmp_path: Path) -> None:
    """Whatever a pack in a log is called, its bytes count as the log's, and not as those of the directory."""
    history = read_run_history(read_catalog(copy_of(LOGGED, tmp_path / "run")))
    num_bytes = sum(path.stat().st_size for path in LOGGED.glob("step-*/*"))
    assert history.written_bytes == history.kept_bytes == num_bytes
    packs = [pack for step in log.STEPS for pack in cnr.read_checkpoint(LOGGED / step).manifest.packs]
    assert history.log_bytes == sum(pack.num_bytes for pack in packs if pack.log is not None) > 0


@pytest.mark.parametrize("change", ["missing", "twice", "swapped", "shorter", "longer", "renamed", "of other parts"])
def test_damaged_logs_are_refused(change: str) -> None:
    """Whatever is not as the page says of a pack's records is refused."""
    kept = _records()
    records = kept[log.TOPIC, 0]
    first, other, second = (records[offset] for offset in (0, 1, 2))
    assert other.key != first.key == second.key
    changes = {
        "missing": {2: other},
        "twice": {1: first},
        "swapped": {0: second, 2: first},
        "shorter": {2: replace(second, value=second.value[:-1])},
        "longer": {2: replace(second, value=second.value + b"x")},
        "renamed": {2: replace(second, key=b"x" + second.key)},
        "of other parts": {2: replace(second, part=b"1/9")},
    }
    records |= changes[change]
    with pytest.raises(reader.Refused, match="part"):
        reader.read(LOGGED / "step-2", kept)


def test_paths_rebuild_the_nested_state() -> None:
    """Loaded without a state dict, items stand where their paths say."""
    state = _load_state_dict_from_keys(storage_reader=cnr.CNRStorageReader(GOLDEN / "step-3"))
    assert _as_json(state["dense"]["layers"][0]) == EXPECTED["step-3"]["tensors"]["dense.layers.0"]
    assert _as_json(state["model"][T4.removeprefix("model.")]) == EXPECTED["step-3"]["tensors"][T4]
    assert state["epoch"] == 3


def test_moved_run_loads(tmp_path: Path) -> None:
    """A run copied elsewhere as a whole loads there; a delta copied without its parents does not."""
    copy_of(GOLDEN, tmp_path / "elsewhere" / "run")
    for step in ("step-3", "step-7"):
        assert _loaded(_load(tmp_path / "elsewhere" / "run" / step, _target(step))) == EXPECTED[step]
    assert cnr.latest(tmp_path / "elsewhere" / "run") == str(tmp_path / "elsewhere" / "run" / "step-7")
    copy_of(GOLDEN / "step-4", tmp_path / "alone" / "step-4")
    with pytest.raises(cnr.DamagedError, match=r"alone/step-\d/.*the data file is missing"):
        _load(tmp_path / "alone" / "step-4", _target("step-4"))
    copy_of(GOLDEN / "step-3", tmp_path / "alone" / "step-3")
    with pytest.raises(cnr.DamagedError, match=r"its parent .*step-2 is missing"):
        _load(tmp_path / "alone" / "step-3", _target("step-3"))


# Replacements


@pytest.mark.parametrize("base", [None, "step-1"])
@pytest.mark.parametrize("is_moved", [False, True])
def test_folded_lineage_loads_as_before(tmp_path: Path, base: str | None, is_moved: bool) -> None:
    """A lineage folded into its head, or into a delta of its baseline, loads bit for bit."""
    folder = copy_of(GOLDEN, tmp_path / "run")
    moved = {path.name for path in folder.glob("*/*.safetensors")} if is_moved else set()
    manifest = replace_manifest(folder / "step-3", base, moved)
    assert {pack.directory for pack in manifest.packs} == (
        {None} if is_moved else {None, "../step-2"} if base else {None, "../step-1", "../step-2"}
    )
    for step in ["step-2"] if base else ["step-1", "step-2"]:
        write.remove(folder / step, used_packs(manifest).get(f"../{step}", ()))
    assert len(reader.read_lineage(folder / "step-3")) == (2 if base else 1)
    for planner in (cnr.CNRLoadPlanner, DefaultLoadPlanner):
        loaded = _loaded(_load(folder / "step-3", _target("step-3", planner), planner))
        assert loaded == _expected("step-3", planner)
    assert _by_reader(folder / "step-3") == EXPECTED["step-3"]["tensors"]


@pytest.mark.parametrize("fqn", [T0, T8, MOMENTUM, EXP_AVG])
@pytest.mark.parametrize("step", ["step-4", "step-7"])
def test_ranges_of_rows_of_a_replaced_lineage_load(step: str, fqn: str) -> None:
    """A range of rows is that part of the whole, though only some shards of those that overlap have any of it."""
    whole = cnr.load_table(GOLDEN / step, fqn)
    assert _as_json(whole) == EXPECTED[step]["tensors"][fqn]
    for start in range(0, len(whole), 1 + len(whole) // 9):
        for stop in range(start, len(whole) + 1, 1 + len(whole) // 7):
            assert cnr.load_table(GOLDEN / step, fqn, rows=range(start, stop)).equal(whole[start:stop])


@pytest.fixture
def replaced(tmp_path: Path) -> Path:
    """A copy of the golden checkpoints, replacements and all."""
    return copy_of(GOLDEN, tmp_path / "run")


def _rewrite(folder: Path, step: str, change: Callable[[TensorEntry], TensorEntry], fqn: str) -> None:
    """Change a tensor in the last replacement of a checkpoint."""
    checkpoint = cnr.read_checkpoint(folder / step)
    manifest = checkpoint.manifest
    entry = change(manifest.tensors[fqn])
    assert entry != manifest.tensors[fqn]
    data, _ = manifest_json.dumps(replace(manifest, tensors={**manifest.tensors, fqn: entry}))
    (folder / step / f"manifest-{manifest.replaces}.json").write_bytes(data)


def _without(*numbers: int) -> Callable[[TensorEntry], TensorEntry]:
    return lambda entry: replace(
        entry, shards=tuple(shard for number, shard in enumerate(entry.shards) if number not in numbers)
    )


@pytest.mark.parametrize(
    ("fqn", "number"),
    [
        pytest.param(T0, 0, id="rows of a table"),
        pytest.param(T8, 1, id="columns of a table"),
        pytest.param(MOMENTUM, 0, id="row-wise state of some columns"),
        pytest.param(EXP_AVG, 0, id="state"),
    ],
)
@pytest.mark.parametrize("step", ["step-4", "step-7"])
def test_rows_that_are_stored_nowhere_are_refused(replaced: Path, step: str, fqn: str, number: int) -> None:
    """No manifest shows that shards which overlap hold every row; a load that would make one up is refused."""
    _rewrite(replaced, "step-4", _without(number), fqn)
    with pytest.raises(reader.Refused, match="stored nowhere"):
        reader.read(replaced / step)
    with pytest.raises(cnr.DamagedError, match=rf"step-4: tensor '{fqn}': row \d+ is nowhere stored"):
        _load(replaced / step, _target(step))


def test_a_delta_may_keep_its_rows_apart_by_heat() -> None:
    """Its shards have one box then, and are folded as those of a replacement."""
    manifest = cnr.read_checkpoint(GOLDEN / "step-7").manifest
    assert ({pack.heat for pack in manifest.packs}, manifest.replaces) == ({0, 2}, None)
    hot = manifest.tensors[T0].shards[-1]
    assert (manifest.tensors[T0].folded, [shard.box for shard in manifest.tensors[T0].shards]) == (
        (hot.place,),
        [hot.box, hot.box],
    )
    assert {manifest.packs[blob.pack].heat for blob in hot.blobs} == {2}


def test_rows_that_are_stored_load_beside_those_that_are_not(replaced: Path) -> None:
    """What is stored nowhere is the loss of who wants it, also of one column; all else loads."""
    whole = cnr.load_table(replaced / "step-4", T8)
    _rewrite(replaced, "step-4", _without(0), T8)
    with pytest.raises(cnr.DamagedError, match="row 5 is nowhere stored"):
        cnr.load_table(replaced / "step-4", T8)
    for row in range(10):
        if row not in (5, 6, 8):  # the others were modified later, row 3 in two column shards
            assert cnr.load_table(replaced / "step-4", T8, rows=range(row, row + 1)).equal(whole[row : row + 1])
        else:
            with pytest.raises(cnr.DamagedError, match=f"row {row} is nowhere stored"):
                cnr.load_table(replaced / "step-4", T8, rows=range(row, row + 1))


def test_rows_that_a_delta_stores_need_not_be_in_the_baseline(replaced: Path) -> None:
    """A hole in a folded baseline is none where the deltas on it have the row."""
    _rewrite(replaced, "step-4", lambda entry: replace(entry, shards=entry.shards[-1:]), EXP_AVG)
    for step, rows in [("step-4", [0, 5]), ("step-7", [0, 1, 2, 3, 5, 7, 310])]:
        whole = torch.frombuffer(bytearray.fromhex(EXPECTED[step]["tensors"][EXP_AVG]["hex"]), dtype=torch.float32)
        for row in range(12):
            if row in rows:
                found = cnr.load_table(replaced / step, EXP_AVG, rows=range(row, row + 1))
                assert found.equal(whole.view(320, 2)[row : row + 1])
            else:
                with pytest.raises(cnr.DamagedError, match=f"row {row} is nowhere stored"):
                    cnr.load_table(replaced / step, EXP_AVG, rows=range(row, row + 1))


@pytest.mark.parametrize("fqn", [T0, T8, MOMENTUM])
def test_order_of_overlapping_shards_matters(replaced: Path, fqn: str) -> None:
    """The last shard that has a row wins: in another order the same shards are another state, in both readers."""
    _rewrite(replaced, "step-4", lambda entry: replace(entry, shards=entry.shards[::-1]), fqn)
    loaded = cnr.load_table(replaced / "step-4", fqn)
    assert _as_json(loaded) != EXPECTED["step-4"]["tensors"][fqn]
    assert _as_json(loaded) == _by_reader(replaced / "step-4")[fqn]


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
        coded = row_sets.CodedRows(coding, rows[0], block.span, _hex(frame))
        assert row_sets.decode_row_numbers(coded, len(rows), "page").tolist() == rows
    for _, _, frame in (found[0], found[2]):
        rows = [3, 4, 7, 12] if frame == found[0][2] else [0, 300, 301]
        assert row_sets.encode_row_numbers(np.array(rows)).data == _hex(frame)


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


def test_split_blob_of_the_page_is_right() -> None:
    """The one given as an example is what the library writes, and joined is what the page says."""
    (found,) = re.findall(r"^```text\n((?:[0-9a-f]{2} ?)+)\n```$", PAGE, re.MULTILINE)
    (row,) = re.findall(r"is `([0-9a-f ]+)` 32 times", PAGE)
    rows = np.frombuffer(32 * _hex(row), np.uint8)
    assert rows.view("<f4").tolist() == 32 * [1.0]
    blob = split_rows(rows.reshape(32, 4), 4)
    assert blob is not None
    assert blob.tobytes() == _hex(found)
    assert reader.joined(4, 4, 32, _hex(found)) == rows.tobytes()


def test_schemes_and_decimals_of_the_page_are_right() -> None:
    """The page lists the schemes and searches that reader and library know, and its decimals are written so."""
    names = re.findall(r'^\| `\{"name":"([a-z_]+)"', PAGE, re.MULTILINE)
    assert set(names) == set(reader.SCHEME_KEYS) | {"greedy", "least_squares"}
    assert {scheme.name for scheme in SCHEMES} == set(reader.SCHEME_KEYS) - {"transformed"}  # which has its own tests
    decimals = re.findall(r"`(-?[0-9]\.[0-9]+|[0-9.]+e-[0-9]+)`", PAGE)
    assert decimals == ["1.0", "0.05", "1e-05", "2.5e-07", "0.0", "-0.0"]
    assert [reader.decimal(decimal) for decimal in decimals] == [1, 0.05, 0.00001, 0.00000025, 0, 0]


def test_check_value_of_the_page_is_right() -> None:
    """Reader and library compute the CRC that the page names."""
    assert reader.crc32c(b"123456789") == crc32c(b"123456789") == 0xE3069283
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


@pytest.mark.long
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


@pytest.mark.long
@hypothesis.settings(max_examples=100)
@hypothesis.given(file=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, file: Path, place: float, bit: int
) -> None:
    """A baseline with one bit flipped anywhere, in the manifest or a pack, is refused."""
    folder = tmp_path_factory.getbasetemp() / f"flipped-{next(numbers)}"
    copy_of(GOLDEN / "step-1", folder / "step-1")
    flip(folder / file, int(place * (folder / file).stat().st_size), bit)
    _refuses(folder, "step-1")
    shutil.rmtree(folder)


@pytest.mark.parametrize("file", FILES, ids=str)
@pytest.mark.parametrize("num_left", [0, 1, 100, -1])
def test_any_truncated_file_is_noticed(tmp_path: Path, file: Path, num_left: int) -> None:
    """A file that ends early, or is gone, is refused."""
    copy_of(GOLDEN / "step-1", tmp_path / "step-1")
    (tmp_path / file).write_bytes((GOLDEN / file).read_bytes()[:num_left])
    _refuses(tmp_path, "step-1")
    (tmp_path / file).unlink()
    _refuses(tmp_path, "step-1")


REPLACED_FILES = sorted(path.relative_to(GOLDEN) for path in GOLDEN.glob("step-*/*"))


@pytest.mark.long
@hypothesis.settings(max_examples=50)
@hypothesis.given(file=st.sampled_from(REPLACED_FILES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_below_a_replacement_is_noticed_or_not_needed(
    tmp_path_factory: pytest.TempPathFactory, file: Path, place: float, bit: int
) -> None:
    """A bit flipped anywhere in a run with replacements is refused, or the load does not depend on it."""
    folder = tmp_path_factory.getbasetemp() / f"flipped-{next(numbers)}"
    copy_of(GOLDEN, folder)
    flip(folder / file, int(place * (folder / file).stat().st_size), bit)
    if file.suffix == ".json" and file.parent.name in ("step-4", "step-6", "step-7"):
        _refuses(folder, "step-7")
    else:
        with contextlib.suppress(reader.Refused):
            assert _by_reader(folder / "step-7") == EXPECTED["step-7"]["tensors"]
        with contextlib.suppress(cnr.LoadError):
            assert _loaded(_load(folder / "step-7", _target("step-7"))) == EXPECTED["step-7"]
    shutil.rmtree(folder)


@pytest.mark.parametrize("file", [file for file in REPLACED_FILES if file.parent.name in ("step-4", "step-6")], ids=str)
def test_replacements_are_not_passed_over(replaced: Path, file: Path) -> None:
    """A replacement that is cut short is refused: what it replaced is no way out, since its packs may be gone."""
    (replaced / file).write_bytes((GOLDEN / file).read_bytes()[:-1])
    _refuses(replaced, file.parent.name)


# Contradictions behind right digests


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the golden checkpoints before the first that was replaced."""
    for step in write.STEPS[:3]:
        copy_of(GOLDEN / step, tmp_path / step)
    return tmp_path


def _blob(step: str, fqn: str, shard: int, number: int) -> list[int]:
    blob: list[int] = body_of(GOLDEN, step)["tensors"][fqn]["shards"][shard][3][number]
    return blob


def test_edited_checkpoints_load(copied: Path) -> None:
    """The tools that the tests below damage checkpoints with leave a good one good."""
    edit(copied, "step-1", lambda body: body.update(writer="somebody else"))
    blob = _blob("step-1", "tiny.u8", 0, 0)
    patch(copied, "step-1", blob, 0, b"\7")
    assert reader.read(copied / "step-1").tensors["tiny.u8"][2] == b"\7\1"
    assert _loaded(_load(copied / "step-3", _target("step-3"))) == EXPECTED["step-3"]


@pytest.mark.parametrize("positions", [[1, 2], [0xFFFFFFFF, 0], [0, 0xFFFFFFFF], [3, 0], [1, 1], [0, 3]])
def test_exact_rows_out_of_place_are_refused(tmp_path: Path, positions: list[int]) -> None:
    """Positions of exactly stored rows are rows of the block, in increasing order, or the load is refused."""
    values = torch.full((3, 80), 0.5)
    values[0, 0] = values[2, 1] = float("nan")
    writer = cnr.CNRStorageWriter(tmp_path / "step-1", quantization={"*": cnr.Asymmetric(8)}, sync_files=False)
    save({"t": values}, storage_writer=writer, no_dist=True)
    body = body_of(tmp_path, "step-1")
    ((blob,),) = (shard[3] for shard in body["tensors"]["t"]["shards"])
    patch(tmp_path, "step-1", blob, 3 * 84, np.array(positions, "<u4").tobytes())
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
    """A blob has the bytes that its rows need. One more, in the pack too, is refused before it is read.

    So is one less, unless that might be a split blob: then its tails are no frame.
    """
    table = torch.arange(33.0).reshape(3, 11)
    writer = cnr.CNRStorageWriter(tmp_path / "step-1", quantization={"*": scheme}, sync_files=False)
    save({"t": table}, storage_writer=writer, no_dist=True)
    assert reader.read(tmp_path / "step-1").tensors["t"][:2] == ("float32", [3, 11])

    def resize(body: dict[str, Any]) -> None:
        (pack,), (shard,) = body["packs"], body["tensors"]["t"]["shards"]
        file = tmp_path / "step-1" / pack[1]
        file.write_bytes((file.read_bytes() + b"\0")[: pack[2] + num_more])
        data = file.read_bytes()[pack[3] :]
        pack[2] += num_more
        shard[3][0][2:] = [len(data), reader.crc32c(data)]

    edit(tmp_path, "step-1", resize)
    might_be_split = num_more < 0 and scheme.tail_bytes(11, torch.float32) > 0
    with pytest.raises(reader.Refused, match="frame" if might_be_split else "another size|too small"):
        reader.read(tmp_path / "step-1")
    with pytest.raises(cnr.DamagedError, match="'t'.*tails" if might_be_split else "'t'.*bytes, its 3 rows need"):
        _load(tmp_path / "step-1", {"t": torch.zeros(3, 11)})


def test_bytes_that_are_no_bools_are_refused(copied: Path) -> None:
    """A bool is 0 or 1: any other byte would be a third truth value in memory."""
    patch(copied, "step-1", _blob("step-1", "dense.mask", 0, 0), 1, b"\2")
    _refuses(copied, "step-1")


@pytest.mark.parametrize(
    ("fqn", "change"),
    [
        pytest.param(T0, {"dtype": "int32"}, id="another dtype"),
        pytest.param(T2, {"is_table": False}, id="no table any more"),
        pytest.param(EXP_AVG, {"is_table": True}, id="a table suddenly"),
    ],
)
def test_tensor_that_changes_along_a_lineage_is_refused(copied: Path, fqn: str, change: dict[str, Any]) -> None:
    """A delta's rows are rows of the parent's tensor: if that is another one, nothing fits."""
    edit(copied, "step-2", lambda body: body["tensors"][fqn].update(change))
    with pytest.raises(reader.Refused, match="in a parent"):
        reader.read(copied / "step-2")
    target = _target("step-2")
    target[fqn] = target[fqn].to(getattr(torch, change.get("dtype", EXPECTED["step-2"]["tensors"][fqn]["dtype"])))
    with pytest.raises(cnr.DamagedError, match=re.escape(fqn)):
        _load(copied / "step-2", target)


def test_tensor_that_the_parent_lacks_is_refused(copied: Path) -> None:
    """A delta of a tensor that its parent does not have cannot be laid over anything."""
    names = {T2: "new"}
    edit(
        copied,
        "step-2",
        lambda body: body.update(tensors={names.get(fqn, fqn): entry for fqn, entry in body["tensors"].items()}),
    )
    target = _target("step-2")
    target["new"] = target.pop(T2)
    with pytest.raises(reader.Refused, match="no such new in a parent"):
        reader.read(copied / "step-2")
    with pytest.raises(cnr.DamagedError, match="'new'"):
        _load(copied / "step-2", target)


def test_state_of_no_rows_may_lie_anywhere(copied: Path) -> None:
    """A rank without rows has no place in the table, and nothing is read for it."""
    edit(copied, "step-2", lambda body: body["tensors"][MOMENTUM]["shards"][2].__setitem__(0, [[9], [0]]))
    expected = _by_reader(copied / "step-2")
    target = {fqn: torch.zeros(e["size"], dtype=getattr(torch, e["dtype"])) for fqn, e in expected.items()}
    assert _loaded(_load(copied / "step-2", target, DefaultLoadPlanner))["tensors"] == expected


def test_nothing_may_be_of_any_size(copied: Path) -> None:
    """A tensor without elements may have as many columns as a size can say."""

    def change(body: dict[str, Any]) -> None:
        body["tensors"]["dense.none"]["size"] = [0, 1 << 62]
        body["tensors"]["dense.none"]["shards"][0][0] = [[0, 0], [0, 1 << 62]]

    edit(copied, "step-2", change)
    expected = _by_reader(copied / "step-2")
    target = {fqn: torch.zeros(e["size"], dtype=getattr(torch, e["dtype"])) for fqn, e in expected.items()}
    assert _loaded(_load(copied / "step-2", target, DefaultLoadPlanner))["tensors"] == expected


LAST_REPLACEMENT = {
    step: f"{step}/manifest-{cnr.read_checkpoint(GOLDEN / step).manifest.replaces}.json" for step in write.REPLACED
}


@pytest.mark.long
@pytest.mark.parametrize(
    "file",
    ["step-2/manifest.json", *LAST_REPLACEMENT.values()],
    ids=["commit", *(f"replacement of {step}" for step in LAST_REPLACEMENT)],
)
@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_reader_and_library_agree_on_any_manifest(
    tmp_path_factory: pytest.TempPathFactory, file: str, data: st.DataObject
) -> None:
    """A manifest that was changed at random, digest included, loads the same in both, or is refused by both."""
    folder, step = tmp_path_factory.getbasetemp() / f"mutated-{next(numbers)}", file.partition("/")[0]
    copy_of(GOLDEN, folder)
    body = json.loads((folder / file).read_text())["manifest"]
    paths = [path for path in nodes(body) if path[0] in ("packs", "row_sets", "tensors", "version")]
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(paths))
        with contextlib.suppress(KeyError, IndexError, TypeError, AttributeError):  # an earlier change removed it
            body = changed(body, path, data.draw(st.sampled_from([*VALUES, DELETE, REPEAT])))
    (folder / file).write_bytes(file_of(body))
    try:
        expected = _by_reader(folder / step)
    except reader.Refused:
        with pytest.raises(cnr.LoadError):
            _load(folder / step, _target(step, DefaultLoadPlanner), DefaultLoadPlanner)
    else:
        target = {fqn: torch.zeros(e["size"], dtype=getattr(torch, e["dtype"])) for fqn, e in expected.items()}
        assert _loaded(_load(folder / step, target, DefaultLoadPlanner))["tensors"] == expected
    shutil.rmtree(folder)

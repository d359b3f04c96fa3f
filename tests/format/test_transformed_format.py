"""Transformed rows: docs/reference/format.md is enough to read them, and what was once written is read for ever."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from torch import Tensor

import torchrec_cnr as cnr
from tests.format.test_manifest import DELETE, file_of, loads
from tests.golden import copy_of, reader, transformed, write_transformed
from tests.golden.edits import body_of, bytes_of, edit, swap
from tests.support.faults import failure_of
from torchrec_cnr.quantization import Transformed
from torchrec_cnr.quantization.packed_rows import pack_rows
from torchrec_cnr.quantization.row_transform import RowTransform
from torchrec_cnr.quantization.symbol_tables import symbol_tables

GOLDEN = Path(__file__).parents[1] / "golden" / "v1_transformed"
PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "format.md").read_text()
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:torch.distributed is")]


@pytest.mark.parametrize("step", write_transformed.STEPS)
def test_a_reader_by_the_page_reads_them(step: str) -> None:
    """Bit for bit."""
    state = reader.read(GOLDEN / step)
    digests = {fqn: write_transformed.digest_of(data) for fqn, (_, _, data) in state.tensors.items()}
    assert digests == EXPECTED[step]


@pytest.mark.parametrize("step", write_transformed.STEPS)
def test_the_library_reads_them(tmp_path: Path, step: str) -> None:
    """Bit for bit, and finds no problem."""
    root = copy_of(GOLDEN, tmp_path / "golden")
    assert write_transformed.expected_of(root / step) == EXPECTED[step]
    assert cnr.verify(root / step).problems == ()


def test_the_checkpoints_have_what_the_page_describes() -> None:
    """With and without a basis, transforms of other checkpoints, other steps, exact rows, strips, a replacement."""
    manifests = [cnr.read_checkpoint(GOLDEN / step).manifest for step in write_transformed.STEPS]
    shards = [[shard for entry in manifest.tensors.values() for shard in entry.shards] for manifest in manifests]
    schemes = [[shard.scheme for shard in own_shards] for own_shards in shards]
    assert all(isinstance(scheme, Transformed) for own_schemes in schemes for scheme in own_schemes)
    assert max(block.num_rows for shard in shards[0] for block in shard.rows.blocks) > transformed.STRIP_ROWS
    bases = [[scheme.basis for scheme in own_schemes if isinstance(scheme, Transformed)] for own_schemes in schemes]
    assert bases[0] == bases[1] == bases[2]
    assert [basis is None for basis in bases[0]] == [False, False, True]
    assert schemes[0] == schemes[1] != schemes[2]
    assert all(shard.transform is not None and shard.transform.num_exact == (2,) for shard in shards[0])
    assert [{pack.directory for pack in manifest.packs} for manifest in manifests[:2]] == [{None}, {None, "../step-1"}]
    assert manifests[3].replaces is not None


def test_the_tables_of_the_page_are_those_of_the_library() -> None:
    """Each frequency, and the digest that the page gives."""
    frequencies, raw_bits = transformed.tables()
    assert (frequencies == symbol_tables().frequencies).all()
    assert raw_bits == symbol_tables().low_bits.tolist()
    assert f"`{hashlib.sha256(frequencies.astype('<u2').tobytes()).hexdigest()}`" in PAGE


def _shard(root: Path, table: str) -> list[Any]:
    shard: list[Any] = body_of(root, "step-1")["tensors"][f"model.{table}.weight"]["shards"][0]
    return shard


def _are_refused(root: Path, table: str) -> bool:
    """Whether library and reader refuse the rows of a table; otherwise they read the same."""
    fqn = f"model.{table}.weight"
    try:
        with np.errstate(over="ignore"):
            _, _, data = reader.read(root / "step-1").tensors[fqn]
    except reader.Refused:
        with pytest.raises(cnr.DamagedError, match=r"^(?!.*crc32c)"):
            cnr.load_table(root / "step-1", fqn)
        return True
    assert data == cnr.load_table(root / "step-1", fqn).view(torch.uint8).numpy().tobytes()
    return False


def _flipped(data: bytes, place: int, bit: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def _word_bytes(data: bytes) -> int:
    """Bytes of a golden blob before its exact rows: both strips' numbers of words and states, and the words."""
    num_words = np.frombuffer(data, "<u4", 10)[::5]
    return 40 + 2 * int(num_words.sum())


PARTS = [("few", "words"), ("few", "transform"), ("few", "basis"), ("own", "words"), ("own", "transform")]


@pytest.mark.parametrize(("table", "part"), PARTS)
def test_both_refuse_other_bytes(tmp_path: Path, table: str, part: str) -> None:
    """A bit of the words, of a transform or of a basis, with a crc32c that fits: what is behind it shows the change."""
    random = np.random.default_rng(0)
    for number in range(8):
        root = copy_of(GOLDEN / "step-1", tmp_path / str(number) / "step-1").parent
        shard = _shard(root, table)
        blob = {"words": shard[3][0], "transform": shard[5][0], "basis": shard[5][1]}[part]
        data = bytes_of(root, "step-1", blob)
        num_bytes = _word_bytes(data) if part == "words" else len(data)
        swap(root, "step-1", blob, _flipped(data, int(random.integers(num_bytes)), int(random.integers(8))))
        assert _are_refused(root, table)


@pytest.mark.parametrize(("first", "num_bytes"), [(0, 4), (4, 8), (12, 1), (13, 32), (45, 32), (77, 96)])
def test_both_agree_on_other_transforms(tmp_path: Path, first: int, num_bytes: int) -> None:
    """A bit of each field of a transform, with digests that fit: both refuse it, or read the same rows."""
    random = np.random.default_rng(first)
    for number in range(4):
        root = copy_of(GOLDEN / "step-1", tmp_path / str(number) / "step-1").parent
        blob = _shard(root, "own")[5][0]
        data = zstandard.decompress(bytes_of(root, "step-1", blob))
        place = first + int(random.integers(num_bytes))
        content = _flipped(data, place, int(random.integers(8)))
        swap(root, "step-1", blob, zstandard.compress(content))
        _renew_digest(root, content)
        is_refused = _are_refused(root, "own")
        # A step is any number, and the first class is informative; choices and frequencies mostly show in the words.
        assert is_refused or first in (4, 12, 77), place


def _renew_digest(root: Path, content: bytes) -> None:
    digest = hashlib.sha256(content).hexdigest()
    edit(root, "step-1", lambda body: body["tensors"]["model.own.weight"]["shards"][0][4].update(digest=digest))


@pytest.mark.parametrize("num_exact", [0, 1, 3])
def test_both_refuse_another_number_of_exact_rows(tmp_path: Path, num_exact: int) -> None:
    """The blob might have as many by its size, but its words end elsewhere."""
    root = copy_of(GOLDEN / "step-1", tmp_path / "step-1").parent
    edit(root, "step-1", lambda body: _set_at(body, "model.few.weight", (5, 2), [num_exact]))
    assert _are_refused(root, "few")


@pytest.mark.parametrize("num_more", [-2, 2, 4 + 4 * 8])
def test_both_refuse_other_numbers_of_bytes(tmp_path: Path, num_more: int) -> None:
    """Of exact rows, with a size that packed rows might have."""
    root = copy_of(GOLDEN / "step-1", tmp_path / "step-1").parent
    blob = _shard(root, "few")[3][0]
    data = bytes_of(root, "step-1", blob)
    swap(root, "step-1", blob, (data + bytes(max(0, num_more)))[: len(data) + num_more])
    assert _are_refused(root, "few")
    with pytest.raises(cnr.DamagedError, match="of exact rows expected"):
        cnr.compact(_delta_of(root), max_ratio=1.0)


def _delta_of(root: Path) -> Path:
    copy_of(GOLDEN / "step-2", root / "step-2")
    _, digest = (root / "step-1" / "manifest.json").read_text().split('"')[1:4:2]
    edit(root, "step-2", lambda body: body["parent"].update(sha256=digest))
    return root / "step-2"


def _set_at(body: Any, fqn: str, place: tuple[Any, ...], value: Any) -> None:
    found = body["tensors"][fqn]["shards"][0]
    *way, last = place
    for key in way:
        found = found[key]
    if value is DELETE:
        del found[last]
    else:
        found[last] = value


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((5,), DELETE, "rows without their transform"),
        ((5,), None, "list of 3"),
        ((5, 2), DELETE, "list of 3"),
        ((4,), {"name": "asymmetric", "bits": 4}, "list of 5"),
        ((5, 0), None, "list of 4"),
        ((5, 0, 2), 77 + 16 * 8 + 65, "a transform of 270 bytes, for 8 columns"),
        ((5, 1), None, "a digest without a basis"),
        ((4, "basis"), None, "a basis without a digest"),
        ((5, 1, 2), 255, "a basis of 255 bytes, for 8 columns"),
        ((5, 2), [], "0 numbers of exact rows for 1 blobs"),
        ((5, 2), [2, 2], "2 numbers of exact rows for 1 blobs"),
        ((5, 2), [115], "cannot be 114 transformed rows of 8 columns, 115 of them exact"),
        ((5, 2), [8], "cannot be 114 transformed rows of 8 columns, 8 of them exact"),
        ((5, 2), [-1], "integer"),
        ((3, 0, 2), 299, "has 299 bytes"),
        ((3, 0, 2), 19, "has 19 bytes"),
        ((3,), [], "0 blobs for 1 blocks"),
    ],
)
def test_each_contradiction_of_a_shard_is_refused(place: tuple[Any, ...], value: Any, message: str) -> None:
    """Before any data file is opened, by library and reader."""
    body = body_of(GOLDEN, "step-2")
    _set_at(body, "model.few.weight", place, value)
    with pytest.raises(cnr.DamagedError, match=message):
        loads(body)
    with pytest.raises(reader.Refused):
        reader.Manifest(file_of(body))


def test_only_transforms_are_in_packs_of_others() -> None:
    """A delta may use the transform of another checkpoint, and none of its rows."""
    body, parent = body_of(GOLDEN, "step-2"), body_of(GOLDEN, "step-1")
    loads(body)
    entry, (shard,) = parent["tensors"]["model.few.weight"], body["tensors"]["model.few.weight"]["shards"]
    (rows,) = entry["shards"]
    rows[2], rows[3][0][0], rows[5] = len(body["row_sets"]), len(body["packs"]), shard[5]
    body["tensors"]["more"] = entry
    body["row_sets"].append(parent["row_sets"][0])
    body["packs"].append(["../step-1", *parent["packs"][0][1:]])
    with pytest.raises(cnr.DamagedError, match="it uses rows in other checkpoints' packs"):
        loads(body)
    with pytest.raises(reader.Refused, match="rows in a pack of another directory"):
        reader.Manifest(file_of(body))


def _save(path: Path, **tables: Tensor) -> dict[str, Transformed]:
    """Save tables; returns the scheme of each, without its transform."""
    rule = cnr.TransformCoded(cnr.AdaptiveAsymmetric(2))
    writer = cnr.CNRStorageWriter(path, quantization={"*": rule})
    dcp.save(dict(tables), storage_writer=writer, planner=cnr.CNRSavePlanner(), no_dist=True)
    schemes = {}
    for name, entry in cnr.read_checkpoint(path).manifest.tensors.items():
        (shard,) = entry.shards
        assert isinstance(shard.scheme, Transformed)
        schemes[name] = shard.scheme
    return schemes


_NUM_ROWS = 4_000  # enough that a transform is worth its bytes


def _rows(num_cols: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_cols)
    norms = 10 ** torch.linspace(-0.3, 0.3, _NUM_ROWS)[:, None]
    return torch.randn(_NUM_ROWS, num_cols, generator=generator) * norms


def test_a_reader_by_the_page_reads_any_rows(tmp_path: Path) -> None:
    """Rows that the golden files do not have."""
    _save(tmp_path / "0", t=_rows(5))
    ((_, _, data),) = reader.read(tmp_path / "0").tensors.values()
    assert data == cnr.load_table(tmp_path / "0", "t").numpy().tobytes()


def test_a_digest_of_other_columns_is_refused(tmp_path: Path) -> None:
    """A transform that was read for one table is not that of another, whatever the manifest says of its digest."""
    schemes = _save(tmp_path / "step-1", a=_rows(7), b=_rows(5))
    assert {scheme.basis for scheme in schemes.values()} == {None}
    (found,) = body_of(tmp_path, "step-1")["tensors"]["a"]["shards"]
    content = zstandard.decompress(bytes_of(tmp_path, "step-1", found[5][0]))
    numbers = np.ones((_NUM_ROWS, 7), np.int16)
    blob = body_of(tmp_path, "step-1")["tensors"]["b"]["shards"][0][3][0]
    swap(tmp_path, "step-1", blob, pack_rows(numbers, RowTransform.parsed(content, None, "a")).tobytes())
    edit(tmp_path, "step-1", lambda body: _set_at(body, "b", (4,), found[4]))
    edit(tmp_path, "step-1", lambda body: _set_at(body, "b", (5, 2), [0]))
    with pytest.raises(reader.Refused):
        reader.read(tmp_path / "step-1")
    target = {"a": torch.zeros(_NUM_ROWS, 7), "b": torch.zeros(_NUM_ROWS, 5)}
    storage_reader = cnr.CNRStorageReader(tmp_path / "step-1")
    error = failure_of(lambda: dcp.load(target, storage_reader=storage_reader, no_dist=True))
    assert isinstance(error, cnr.DamagedError)
    assert "'b'" in str(error)

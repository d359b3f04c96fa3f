"""Transformed rows on purpose: whatever is in words, states, transforms and bases, they are rows or a typed error."""

import hashlib
import itertools
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from hypothesis import strategies as st

import torchrec_cnr as cnr
from tests.attacks.limits import cost_of
from tests.golden.edits import body_of, bytes_of, edit, swap
from torchrec_cnr.quantization.packed_rows import STRIP_ROWS, pack_rows, unpack_rows
from torchrec_cnr.quantization.row_transform import RowTransform
from torchrec_cnr.quantization.symbol_tables import NUM_TABLES

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:torch.distributed is")]

Bytes = npt.NDArray[np.uint8]
numbers = itertools.count()


# Packed rows


@st.composite
def _transforms(draw: st.DrawFn) -> RowTransform:
    """Any transform that is read, without a basis, from the bytes of which it is made."""
    num_cols = draw(st.integers(1, 9))
    cuts = sorted(draw(st.lists(st.integers(0, 4096 - 16), min_size=15, max_size=15)))
    frequencies = 1 + np.diff([0, *cuts, 4096 - 16])
    tables = st.integers(0, NUM_TABLES - 1)
    choices = draw(st.lists(tables, min_size=16, max_size=16))
    step = draw(st.floats(0, exclude_min=True, allow_infinity=False) | st.just(0.1))
    header = struct.pack("<BBHdb32s", 1, 0, num_cols, step, draw(st.integers(0, 127)), bytes(32))
    data = header + frequencies.astype("<u2").tobytes() + bytes(choices) * num_cols
    return RowTransform.parsed(data, None, "here")


@st.composite
def _blobs(draw: st.DrawFn, transform: RowTransform) -> tuple[Bytes, int]:
    """Packed rows of which something was changed, or anything with the head of a strip; and the number of rows."""
    num_rows = draw(st.one_of(st.integers(1, 40), st.sampled_from([STRIP_ROWS, STRIP_ROWS + 3])))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["packed", "flipped", "cut", "heads", "random"]))
    if kind == "random":
        return random.integers(0, 256, draw(st.integers(0, 400)), np.uint8), num_rows
    spread = draw(st.sampled_from([0, 1, 40, 32_767]))
    rows = random.integers(-spread - (spread == 32_767), spread + 1, (num_rows, transform.num_cols)).astype(np.int16)
    blob = pack_rows(rows, transform)
    if kind == "flipped":
        for _ in range(draw(st.integers(1, 4))):
            blob[draw(st.integers(0, len(blob) - 1))] ^= draw(st.integers(1, 255))
    elif kind == "cut":
        blob = blob[: draw(st.integers(0, len(blob)))]
    elif kind == "heads":
        head = blob[:20].view("<u4")
        head[draw(st.integers(0, 4))] = draw(st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**15, 2**31]))
    return np.concatenate([blob, np.zeros(draw(st.sampled_from([0, 1, 2, 24])), np.uint8)]), num_rows


def _fuzz_packed_rows(data: st.DataObject) -> None:
    transform = data.draw(_transforms())
    blob, num_rows = data.draw(_blobs(transform))
    exact_bytes = data.draw(st.sampled_from([0, 1, 2, 24]))

    def read(_: bytes) -> None:
        found, rest = unpack_rows(blob, num_rows, exact_bytes, transform, "here")
        assert found.dtype == np.int16
        assert found.shape == (num_rows, transform.num_cols)
        assert (blob[len(blob) - len(rest) :] == rest).all()

    assert cost_of(read, blob.tobytes()).complaint is None


@hypothesis.settings(max_examples=200)
@hypothesis.given(data=st.data())
def test_whatever_packed_rows_are(data: st.DataObject) -> None:
    """Numbers of 16 bits, or a typed error, within the time and the memory that an input may take."""
    _fuzz_packed_rows(data)


@pytest.mark.slow
@hypothesis.settings(max_examples=5_000, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(data=st.data())
def test_whatever_packed_rows_are_for_longer(data: st.DataObject) -> None:
    """As above, many times."""
    _fuzz_packed_rows(data)


# Checkpoints

ROWS = {"few": (3_000, 8), "own": (3_001, 5)}  # enough that a transform is worth its bytes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one checkpoint of transformed tables, with exact rows."""
    root, state = tmp_path_factory.mktemp("saved"), {}
    for name, (num_rows, num_cols) in ROWS.items():
        generator = torch.Generator().manual_seed(num_rows)
        state[name] = torch.randn(num_rows, num_cols, generator=generator)
        if name == "few":
            state[name] = state[name] * 1e-2 + state[name][:, :1] * torch.linspace(1, 2, num_cols)
        state[name][3] = float("nan")
    rule = {"*": cnr.TransformCoded(cnr.AdaptiveAsymmetric(4))}
    writer = cnr.CNRStorageWriter(root / "step-1", quantization=rule, sync_files=False)
    dcp.save(state, storage_writer=writer, planner=cnr.CNRSavePlanner(), no_dist=True)
    shards = [body_of(root, "step-1")["tensors"][name]["shards"][0] for name in ROWS]
    assert [(shard[4]["name"], shard[4]["basis"] is not None) for shard in shards] == [
        ("transformed", True),
        ("transformed", False),
    ]
    return root


@st.composite
def _changed_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(changed) - 1))
        changed[place : place + 1] = draw(st.sampled_from([b"", b"\0", b"\xff", b"\x7f"]) | st.binary(max_size=3))
        if not changed:
            return b"\0"
    return bytes(changed)


def _shard(root: Path, name: str) -> list[Any]:
    shard: list[Any] = body_of(root, "step-1")["tensors"][name]["shards"][0]
    return shard


def _renew(root: Path, name: str, content: bytes, basis: bytes | None) -> None:
    """Put a transform and its basis in the place of others, with the digests of both."""
    if basis is not None:
        content = content[:13] + hashlib.sha256(basis).digest() + content[45:]
        if basis != bytes_of(root, "step-1", _shard(root, name)[5][1]):
            swap(root, "step-1", _shard(root, name)[5][1], basis)
    frame = zstandard.compress(content)
    if frame != bytes_of(root, "step-1", _shard(root, name)[5][0]):
        swap(root, "step-1", _shard(root, name)[5][0], frame)
    digests = {
        "digest": hashlib.sha256(content).hexdigest(),
        "basis": None if basis is None else hashlib.sha256(basis).hexdigest(),
    }
    edit(root, "step-1", lambda body: body["tensors"][name]["shards"][0][4].update(digests))


def _load(path: Path) -> None:
    """Load all rows, or raise a typed error. Values may be infinite, as a step may be of any size."""
    target = {name: torch.full(size, 7.0) for name, size in ROWS.items()}
    try:
        dcp.load(target, storage_reader=cnr.CNRStorageReader(path), planner=cnr.CNRLoadPlanner(), no_dist=True)
    except dcp.api.CheckpointException as failure:
        raise failure.failures[0][0] from None
    for name, (num_rows, num_cols) in ROWS.items():
        assert cnr.load_table(path, name).shape == (num_rows, num_cols)


@hypothesis.settings(max_examples=150)
@hypothesis.given(
    data=st.data(),
    name=st.sampled_from(list(ROWS)),
    part=st.sampled_from(["rows", "end", "frame", "transform", "basis", "num_exact"]),
)
def test_whatever_a_transformed_checkpoint_has(
    saved: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str, part: str
) -> None:
    """Rows, a transform or a basis are changed, and all digests renewed: readers give rows, or raise a typed error."""
    root = tmp_path_factory.getbasetemp() / f"transformed-{next(numbers)}"
    shutil.copytree(saved, root)
    shard = _shard(root, name)
    content = zstandard.decompress(bytes_of(root, "step-1", shard[5][0]))
    basis = None if shard[5][1] is None else bytes_of(root, "step-1", shard[5][1])
    if part in ("rows", "end", "frame"):
        blob = shard[5][0] if part == "frame" else shard[3][0]
        old = bytes_of(root, "step-1", blob)
        cut = len(old) - data.draw(st.integers(0, 30))
        new = old[:cut] + data.draw(st.binary(max_size=30)) if part == "end" else data.draw(_changed_bytes(old))
        hypothesis.assume(new != old)
        swap(root, "step-1", blob, new)
    elif part == "num_exact":
        num_exact = data.draw(st.integers(0, 3))
        edit(root, "step-1", lambda body: body["tensors"][name]["shards"][0][5].__setitem__(2, [num_exact]))
    elif part == "basis" and basis is not None:
        _renew(root, name, content, data.draw(_changed_bytes(basis)))
    else:
        _renew(root, name, data.draw(_changed_bytes(content)), basis)
    ways: list[Callable[[Path], object]] = [
        _load,
        cnr.verify,
        lambda path: cnr.export(path, root / "exported", to="safetensors"),
        lambda path: cnr.compare(saved / "step-1", path),
    ]
    for read in ways:
        complaint = cost_of(lambda _, read=read: read(root / "step-1"), b"").complaint
        assert complaint is None
    shutil.rmtree(root)

"""Split blobs: rows come back, bit for bit; what is split is smaller; and whatever else they hold is refused."""

from dataclasses import dataclass
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_saver import save

import torchrec_cnr as cnr
from torchrec_cnr.errors import DamagedError
from torchrec_cnr.format import blob_bytes
from torchrec_cnr.format.blob_bytes import Bytes
from torchrec_cnr.format.manifest import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

LARGE = 20_000  # rows, as many as a block has: more than what one frame's overhead matters for


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows as they lie in a blob: uint8 [n, row_bytes], of which the last ``tail_bytes`` are tails."""

    values: Bytes
    tail_bytes: int

    def joined(self, blob: Bytes) -> Bytes:
        """What a reader makes of a blob of as many rows."""
        return blob_bytes.join(blob, *self.values.shape, self.tail_bytes, "here")


@st.composite
def _rows(draw: st.DrawFn) -> Rows:
    """Heads at random, and tails of few or of many different bytes."""
    num_rows, head_bytes, tail_bytes = draw(st.integers(0, 300)), draw(st.integers(0, 9)), draw(st.integers(0, 40))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = random.integers(0, 256, (num_rows, head_bytes + tail_bytes), dtype=np.uint8)
    for column in range(head_bytes, head_bytes + tail_bytes):
        values[:, column] %= draw(st.sampled_from([1, 2, 5, 40, 255]))
    return Rows(values, tail_bytes)


@hypothesis.given(_rows())
def test_rows_come_back(rows: Rows) -> None:
    """Split or not, a reader finds the rows; and a blob that is split is told by its size."""
    plain = rows.values.reshape(-1)
    assert rows.joined(plain).tobytes() == plain.tobytes()
    blob = blob_bytes.split(rows.values, rows.tail_bytes)
    if blob is not None:
        assert len(plain) / 64 <= len(blob) < len(plain)
        assert blob_bytes.may_be_split(len(blob), *rows.values.shape, rows.tail_bytes)
        assert rows.joined(blob).tobytes() == plain.tobytes()


@hypothesis.given(_rows(), st.data())
def test_whatever_a_split_blob_holds(rows: Rows, data: st.DataObject) -> None:
    """Bytes that are changed, cut or added in a split blob give rows, or are refused: nothing else."""
    blob = blob_bytes.split(rows.values, rows.tail_bytes)
    hypothesis.assume(blob is not None)
    assert blob is not None
    changed = bytearray(blob.tobytes())
    for _ in range(data.draw(st.integers(0, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    changed = changed[: data.draw(st.integers(0, len(changed)))] + data.draw(st.binary(max_size=3))
    hypothesis.assume(
        blob_bytes.may_be_split(len(changed), *rows.values.shape, rows.tail_bytes)
    )  # manifests are checked
    try:
        found = rows.joined(np.frombuffer(bytes(changed), np.uint8))
    except DamagedError:
        return
    assert len(found) == rows.values.size


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (zstandard.compress(bytes(511)), "decompress to 511 bytes, expected 512"),
        (zstandard.compress(bytes(512)) + b"x", "unused data"),
        (zstandard.compress(bytes(512)) * 2, "unused data"),
        (
            zstandard.compress(np.random.default_rng(0).integers(0, 9, 512).astype(np.uint8).tobytes())[:-1],
            "did not decompress full frame",
        ),
        (b"no frame", "do not decompress"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(512)), "expected 512"),
    ],
)
def test_frames_of_something_else_are_refused(frame: bytes, reason: str) -> None:
    """What a blob has behind the heads is one frame of all tails, or it is damaged."""
    with pytest.raises(DamagedError, match=f"here: tails .*{reason}"):
        blob_bytes.join(np.frombuffer(bytes(128) + frame, np.uint8), 128, 5, 4, "here")


@pytest.mark.parametrize(
    ("num_rows", "window_log", "is_good"), [(1 << 22, 24, True), (5 << 20, 23, True), (5 << 20, 24, False)]
)
def test_large_tails_need_no_large_window(num_rows: int, window_log: int, is_good: bool) -> None:
    """A frame of more than 16 MiB may need a window of 8 MiB, as every decoder has it, and no larger one."""
    parameters = zstandard.ZstdCompressionParameters(
        window_log=window_log, compression_level=1, write_content_size=True
    )
    planes = np.zeros(4 * num_rows, np.uint8)
    planes[: num_rows // 8] = np.random.default_rng(0).integers(0, 256, num_rows // 8)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compress(planes.tobytes())
    if is_good:
        assert blob_bytes.join(np.frombuffer(frame, np.uint8), num_rows, 4, 4, "here").sum() == planes.sum()
    else:
        with pytest.raises(DamagedError, match=r"here: tails .*a window of more than 8388608 bytes"):
            blob_bytes.join(np.frombuffer(frame, np.uint8), num_rows, 4, 4, "here")


def test_rows_that_are_all_alike_are_not_split() -> None:
    """A file does not warrant more than 64 times as much memory, and writers keep to that."""
    zeros = np.zeros((LARGE, 4), np.uint8)
    assert blob_bytes.split(zeros, 4) is None
    assert blob_bytes.split(np.random.default_rng(0).integers(0, 3, zeros.shape, np.uint8), 4) is not None
    assert not blob_bytes.may_be_split(4 * LARGE // 64 - 1, LARGE, 4, 4)
    assert blob_bytes.may_be_split(4 * LARGE // 64, LARGE, 4, 4)


def test_a_blob_that_lacks_a_few_bytes_is_not_taken_for_split() -> None:
    """Manifests tell it from one that is split, which is smaller by a 128th of its tails, and holds a whole frame."""
    assert not any(blob_bytes.may_be_split(8_000 - lacking, 1_000, 8, 4) for lacking in range(32))
    assert blob_bytes.may_be_split(8_000 - 32, 1_000, 8, 4)
    assert blob_bytes.may_be_split(4_010, 1_000, 8, 4)
    assert not blob_bytes.may_be_split(4_009, 1_000, 8, 4)
    assert not any(blob_bytes.may_be_split(num_bytes, 2, 9, 5) for num_bytes in range(20))


def test_blobs_of_too_many_rows_are_not_split() -> None:
    """What is joined at a time is bounded, whatever the file."""
    assert blob_bytes.may_be_split((1 << 24) * 2, 1 << 24, 4, 4)
    assert not blob_bytes.may_be_split((1 << 24) * 2, (1 << 24) + 1, 4, 4)


@pytest.mark.parametrize(
    ("scheme", "num_cols", "dtype", "expected"),
    [
        (cnr.NoQuantization(), 1, torch.float32, 4),
        (cnr.NoQuantization(), 2, torch.float64, 16),
        (cnr.NoQuantization(), 5, torch.float32, 0),
        (cnr.HalfPrecision(torch.bfloat16), 1, torch.float32, 2),
        (cnr.HalfPrecision(torch.bfloat16), 9, torch.float32, 0),
        (cnr.Symmetric(2), 64, torch.float32, 4),
        (cnr.Asymmetric(3), 3, torch.float16, 4),
        (cnr.AdaptiveAsymmetric(8), 64, torch.bfloat16, 4),
        (cnr.Symmetric(2, entropy_coded=True), 64, torch.float32, 20),
        (cnr.Asymmetric(3, entropy_coded=True), 3, torch.float16, 6),
        (cnr.AdaptiveAsymmetric(8, entropy_coded=True), 64, torch.bfloat16, 68),
        (cnr.KMeans(2), 64, torch.float32, 8),
        (cnr.KMeans(3), 64, torch.float32, 16),
        (cnr.KMeans(4), 64, torch.float32, 0),
    ],
)
def test_tails_of_schemes(scheme: cnr.Scheme, num_cols: int, dtype: torch.dtype, expected: int) -> None:
    """A row ends in scale and bias or a small codebook, or is all tail: where it is short, or its codes are coded."""
    assert scheme.tail_bytes(num_cols, dtype) == expected
    assert expected <= scheme.row_bytes(num_cols, dtype)


def test_a_delta_takes_less_by_what_tails_have_in_common(tmp_path: Path) -> None:
    """Of 4 bytes of scale and bias a row keeps less than 3, of 4 bytes of state less than 3.6; nothing else differs."""
    generator = torch.Generator().manual_seed(0)
    state = {"table": torch.randn(LARGE, 64, generator=generator), "state": torch.rand(LARGE, generator=generator)}
    quantization = {"table": cnr.Asymmetric(4)}
    save(dict(state), storage_writer=cnr.CNRStorageWriter(tmp_path / "split", quantization=quantization), no_dist=True)
    manifest = cnr.read_checkpoint(tmp_path / "split").manifest
    num_bytes = {
        fqn: sum(blob.num_bytes for shard in entry.shards for blob in shard.blobs) / LARGE
        for fqn, entry in manifest.tensors.items()
    }
    assert 32 + 2 < num_bytes["table"] < 32 + 3
    assert 3 < num_bytes["state"] < 3.6
    assert cnr.load_table(tmp_path / "split", "state").equal(state["state"])
    scheme = cnr.Asymmetric(4)
    decoded = scheme.decode(scheme.encode(state["table"]).codes, 64, DTYPES["float32"])
    assert cnr.load_table(tmp_path / "split", "table").equal(decoded)


@pytest.mark.parametrize(("bits", "at_most"), [(2, 0.98), (3, 0.98), (4, 0.97), (8, 0.98)])
def test_entropy_coded_rows_take_less_and_load_alike(tmp_path: Path, bits: int, at_most: float) -> None:
    """The option changes the size of a table and nothing that a load gives."""
    rows = torch.randn(LARGE, 64, generator=torch.Generator().manual_seed(bits))
    num_bytes = {}
    for name, scheme in {
        "plain": cnr.AdaptiveAsymmetric(bits),
        "coded": cnr.AdaptiveAsymmetric(bits, entropy_coded=True),
    }.items():
        writer = cnr.CNRStorageWriter(tmp_path / name, quantization={"table": scheme})
        save({"table": rows}, storage_writer=writer, no_dist=True)
        shards = cnr.read_checkpoint(tmp_path / name).manifest.tensors["table"].shards
        num_bytes[name] = sum(blob.num_bytes for shard in shards for blob in shard.blobs)
    assert num_bytes["coded"] < at_most * num_bytes["plain"]
    loaded = cnr.load_table(tmp_path / "coded", "table")
    assert loaded.equal(cnr.load_table(tmp_path / "plain", "table"))
    assert not loaded[0].equal(rows[0])

"""Transformed rows: docs/reference/format.md is enough to read them, and what was once written is read for ever."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import torchrec_cnr as cnr
from tests.golden import copy_of, reader, transformed, write_transformed
from torchrec_cnr.quantization import Transformed
from torchrec_cnr.quantization.symbol_tables import symbol_tables

GOLDEN = Path(__file__).parents[1] / "golden" / "v1_transformed"
PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "format.md").read_text()
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())

pytestmark = pytest.mark.long


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
    shards = [[entry.shards[0] for entry in manifest.tensors.values()] for manifest in manifests]
    schemes = [[shard.scheme for shard in own_shards] for own_shards in shards]
    assert all(isinstance(scheme, Transformed) for own_schemes in schemes[:3] for scheme in own_schemes)
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


@pytest.mark.parametrize("table", ["few", "own"])
def test_both_refuse_other_bytes(tmp_path: Path, table: str) -> None:
    """Of rows, of a transform and of a basis: the digests of blobs would show it, so these are made to fit."""
    random = np.random.default_rng(0)
    for number in range(12):
        root = tmp_path / f"{table}-{number}"
        shutil.copytree(GOLDEN / "step-1", root / "step-1")
        shard = cnr.read_checkpoint(root / "step-1").manifest.tensors[f"model.{table}.weight"].shards[0]
        assert shard.transform is not None
        blob = (*shard.blobs, *shard.transform.blobs)[number % (len(shard.blobs) + len(shard.transform.blobs))]
        pack = root / "step-1" / cnr.read_checkpoint(root / "step-1").manifest.packs[blob.pack].name
        data = bytearray(pack.read_bytes())
        data[blob.offset + int(random.integers(0, blob.num_bytes))] ^= 1 << int(random.integers(0, 8))
        pack.write_bytes(data)
        with pytest.raises(cnr.DamagedError):
            cnr.load_table(root / "step-1", f"model.{table}.weight")
        with pytest.raises(reader.Refused):
            reader.read(root / "step-1")


def test_a_reader_by_the_page_reads_any_rows(tmp_path: Path) -> None:
    """Rows that the golden files do not have."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(40, 5, generator=generator) * 10 ** torch.linspace(-3, 3, 40)[:, None]
    rule = cnr.TransformCoded(cnr.AdaptiveAsymmetric(2))
    state = {"model": {"embedding_bags.t.weight": rows}}
    writer = cnr.CNRStorageWriter(tmp_path / "0", quantization=rule)
    torch.distributed.checkpoint.save(state, storage_writer=writer, planner=cnr.CNRSavePlanner(), no_dist=True)
    ((_, _, data),) = reader.read(tmp_path / "0").tensors.values()
    loaded = cnr.load_table(tmp_path / "0", "model.embedding_bags.t.weight")
    assert data == loaded.numpy().tobytes()
    scheme = cnr.read_checkpoint(tmp_path / "0").manifest.tensors["model.embedding_bags.t.weight"].shards[0].scheme
    assert isinstance(scheme, Transformed)

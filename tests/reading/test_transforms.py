"""A transform and its basis are read once, however many checkpoints, shards, windows and tensors use them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import torchrec_cnr as cnr
from tests.quantization.test_transform_coded import DIM, few_dimensions
from tests.quantization.test_transformed_checkpoints import FQN, NUM_ROWS, Run, running, scheme_of
from tests.serving.served_models import following
from torchrec_cnr.format.blob_bytes import compressed
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import Shard, StoredTransform
from torchrec_cnr.format.row_sets import Blob, RowBlock, RowSet
from torchrec_cnr.maintenance.comparison import compare as compare_module
from torchrec_cnr.maintenance.export import contents
from torchrec_cnr.quantization import Transformed
from torchrec_cnr.quantization.row_transform import RowTransform
from torchrec_cnr.reading import fold as fold_module
from torchrec_cnr.reading import transforms as transforms_module
from torchrec_cnr.reading.transforms import KnownTransforms
from torchrec_cnr.storage import pack_reader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

NUM_CHECKPOINTS = 4


def _save(run: Run, number: int) -> None:
    """A baseline, or a delta. The rows of the last one are smaller, so that it has another step."""
    if number:
        rows = torch.arange(2_000) + 300 * (number - 1)
        run.change(rows, number)
        if number == NUM_CHECKPOINTS - 1:
            run.table[rows] *= 0.3
    run.save()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of four checkpoints with one basis and two transforms."""
    root = tmp_path_factory.mktemp("root")
    with running(root) as run:
        for number in range(NUM_CHECKPOINTS):
            _save(run, number)
    schemes = [scheme_of(cnr.read_checkpoint(root / str(number))) for number in range(NUM_CHECKPOINTS)]
    assert [len({scheme.basis for scheme in schemes}), len({scheme.digest for scheme in schemes})] == [1, 2]
    return root


@contextmanager
def counted(root: Path) -> Iterator[dict[str, int]]:
    """Count the reads of each transform and basis of a chain, by digest. The counts are there at the end."""
    found: Counter[tuple[str, int]] = Counter()
    counts: dict[str, int] = {}
    read_span = pack_reader._read_span

    def counting(store: Any, pack: Any, span: Any, prepare: Any) -> Any:
        found.update((pack.name, blob.offset) for _, blob in span.blobs)
        return read_span(store, pack, span, prepare)

    with mock.patch.object(pack_reader, "_read_span", counting):
        yield counts
    for number in range(NUM_CHECKPOINTS):
        manifest = cnr.read_checkpoint(root / str(number)).manifest
        for shard in manifest.tensors[FQN].shards:
            places = {
                digest: (manifest.packs[blob.pack].name, blob.offset) for digest, blob in shard.transform_parts.items()
            }
            counts.update({digest: found[place] for digest, place in places.items()})


def test_a_load_reads_each_once(root: Path, tmp_path: Path) -> None:
    """By ``load_table``, also of some rows and by windows of one checkpoint; by ``dcp.load``, and by an export."""
    head = root / str(NUM_CHECKPOINTS - 1)
    for rows, early_bytes in ((None, 256 << 20), (range(500, 3_000), 256 << 20), (None, 0)):
        with counted(root) as counts, mock.patch.object(fold_module, "_EARLY_BYTES", early_bytes):
            cnr.load_table(head, FQN, rows=rows)
        assert set(counts.values()) == {1}
    with counted(root) as counts:
        target = {"model": {"users.weight": torch.zeros(NUM_ROWS, DIM)}}
        dcp.load(
            target,
            storage_reader=cnr.CNRStorageReader(head, thread_count=4),
            planner=cnr.CNRLoadPlanner(),
            no_dist=True,
        )
    assert set(counts.values()) == {1}
    with counted(root) as counts, mock.patch.object(contents, "HELD_BYTES", NUM_ROWS * DIM):
        cnr.export(head, tmp_path / "file.pt", to="torch")
    assert set(counts.values()) == {1}


def test_a_comparison_reads_each_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few rows it compares at a time, and although both checkpoints have them."""
    monkeypatch.setattr(compare_module, "_RANGE_BYTES", NUM_ROWS * DIM)
    with counted(root) as counts:
        cnr.compare(root / "2", root / "3")
    assert set(counts.values()) == {1}


def test_a_served_model_reads_each_once(tmp_path: Path) -> None:
    """Over all its updates."""
    model = nn.ModuleDict({"users": nn.EmbeddingBag(NUM_ROWS, DIM)})
    with counted(tmp_path) as counts, running(tmp_path) as run, following(model, tmp_path) as subscriber:
        for number in range(NUM_CHECKPOINTS):
            _save(run, number)
            assert subscriber.update() is not None
    assert set(counts.values()) == {1}
    assert torch.equal(model.get_parameter("users.weight"), cnr.load_table(tmp_path / "3", FQN))


# What is known


def _shard(scheme: Transformed) -> Shard:
    basis = None if scheme.basis is None else Blob(0, 0, 4 * DIM * DIM, 0)
    transform = StoredTransform(Blob(0, 9_000, 300, 0), basis, (0,))
    rows = RowSet((RowBlock("all", 0, 10, 10, None),))
    return Shard(Box((0, 0), (10, DIM)), rows, (Blob(0, 10_000, 80, 0),), scheme, None, transform)


def _learned(seed: int) -> Transformed:
    scheme = cnr.TransformCoded().choose(lambda: few_dimensions(seed=seed), 0)
    assert isinstance(scheme, Transformed)
    return scheme


def _stored(transform: RowTransform) -> dict[str, Any]:
    """What is read for the shard ``x``."""
    assert transform.basis is not None
    data = {"transform of x": compressed(transform.data), "basis of x": transform.basis.data}
    return {key: np.frombuffer(value, np.uint8) for key, value in data.items()}


def test_what_has_another_digest_is_not_known() -> None:
    """Bytes that a manifest's digests do not name are refused, and the right ones can be added after that."""
    first, second = _learned(0), _learned(1)
    shards = {"x": _shard(Transformed(first.digest, first.basis))}
    known = KnownTransforms()
    for wrong in (_stored(second.known), _stored(first.known) | {"basis of x": _stored(second.known)["basis of x"]}):
        with pytest.raises(cnr.DamagedError, match="root: transform of x: corrupt"):
            known.add(shards, wrong, "root")
        assert set(known.missing(shards)) == {"transform of x", "basis of x"}
    known.add(shards, _stored(first.known), "root")
    assert known.missing(shards) == {}
    scheme = known.scheme(shards["x"])
    assert isinstance(scheme, Transformed)
    assert scheme.known.data == first.known.data
    other = {"y": _shard(Transformed(second.digest, first.basis))}
    assert set(known.missing(other)) == {"transform of y"}
    narrow = Shard(Box((0, 0), (10, DIM // 2)), *list(vars(shards["x"]).values())[1:])
    assert set(known.missing({"z": narrow})) == {"transform of z", "basis of z"}, "those of other columns"


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit, only what is used next stays."""
    known, shards = KnownTransforms(), []
    for seed in range(3):
        scheme = _learned(seed)
        shards.append(_shard(Transformed(scheme.digest, scheme.basis)))
        known.add({"x": shards[-1]}, _stored(scheme.known), "root")
    num_bytes = known.num_bytes
    known.limit(shards[1:2])
    assert known.num_bytes == num_bytes, "far below the limit"
    monkeypatch.setattr(transforms_module, "_KEPT_BYTES", num_bytes - 1)
    known.limit(shards[1:2])
    assert known.num_bytes == num_bytes / 3
    assert [bool(known.missing({"x": shard})) for shard in shards] == [True, False, True]

"""Quantized lineages, of plain and sharded models, and how others read them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import torchrec_cnr as cnr
from tests.quantization.bounds import BITS, Table, assert_close
from tests.support import models
from tests.support.jobs import adagrad_job
from tests.support.models import Job, Whole, differing, state, torchrec_job, train, whole
from tests.support.ranks import RankPools

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def _tables(values: Whole) -> list[str]:
    return [fqn for fqn in values if fqn.startswith("model.") and ".over." not in fqn]


def _lineage(rank: int, root: str, build: Callable[[int], Job], bits: int, policy: cnr.Policy) -> None:
    """A baseline and two deltas; what is loaded of each is within the bound, or as an older one decodes it."""
    job = build(1)
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=policy)
    cuts, loaded = [], []
    for number in range(3):
        if number:
            train(job, number)
        cuts.append(whole(state(job, number=number)))
        writer = models.writer(f"{root}/{number}", quantization=cnr.Asymmetric(bits))
        dcp.save(state(job, number=number), storage_writer=writer, planner=planner)
        loaded.append(models.load(build(2 + number), f"{root}/{number}", number=-1))
    tracker.close()
    tables = _tables(cuts[0])
    assert len(tables) > 1
    num_modified = 0
    for number, (cut, got) in enumerate(zip(cuts, loaded, strict=True)):
        assert cnr.read_checkpoint(f"{root}/{number}").kind == ("delta" if number else "baseline")
        assert sorted(set(differing(got, cut)) - set(tables)) == [], "optimizer, dense part and values are exact"
        for fqn in tables:
            assert_close(got[fqn], cut[fqn], bits)
            is_modified = (cut[fqn] != cuts[0][fqn]).any(dim=1)
            assert torch.equal(got[fqn][~is_modified], loaded[0][fqn][~is_modified])
            num_modified += int(is_modified.sum())
    assert 0 < num_modified < 2 * sum(len(cuts[0][fqn]) for fqn in tables)


@pytest.mark.parametrize("policy", [cnr.Consecutive(), cnr.OneShot()], ids=["Consecutive", "OneShot"])
@pytest.mark.parametrize("bits", BITS)
def test_a_quantized_lineage_of_a_plain_model(tmp_path: Path, bits: int, policy: cnr.Policy) -> None:
    """Modified rows are within the bound of the cut; all others are exactly as the baseline decodes them."""
    _lineage(0, str(tmp_path), adagrad_job, bits, policy)


@pytest.mark.parametrize("bits", BITS)
def test_a_quantized_lineage_of_a_sharded_model(tmp_path: Path, rank_pool: RankPools, bits: int) -> None:
    """As above, with sharded tables on two ranks."""
    rank_pool(2).run(_lineage, str(tmp_path), torchrec_job, bits, cnr.Consecutive())


def test_the_scheme_may_change_from_link_to_link(tmp_path: Path) -> None:
    """Each checkpoint is decoded by its own scheme: rows keep the precision with which they were saved last."""
    torch.manual_seed(1)
    model = Table(torch.randn(40, 8))
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    schemes: list[cnr.Scheme] = [cnr.Asymmetric(2), cnr.NoQuantization(), cnr.Asymmetric(8)]
    for number, scheme in enumerate(schemes):
        with torch.no_grad():
            model.table.weight[10 * number : 10 * number + 10] = torch.randn(10, 8)
        tracker.mark("table", torch.arange(10 * number, 10 * number + 10))
        writer = models.writer(tmp_path / str(number), quantization=scheme)
        dcp.save(model.state_dict(), storage_writer=writer, planner=planner)
    tracker.close()
    assert cnr.read_checkpoint(tmp_path / "2").kind == "delta"
    other = Table(torch.zeros(40, 8))
    dcp.load(other.state_dict(), storage_reader=cnr.CNRStorageReader(tmp_path / "2"), planner=cnr.CNRLoadPlanner())
    got, saved = other.table.weight.detach(), model.table.weight.detach()
    assert torch.equal(got[10:20], saved[10:20])
    assert_close(got[20:30], saved[20:30], 8)
    for rows in (slice(0, 10), slice(30, 40)):
        assert_close(got[rows], saved[rows], 2)
        assert not torch.equal(got[rows], saved[rows])


def test_fewer_bits_take_fewer_bytes(tmp_path: Path) -> None:
    """A row of 64 elements takes 8, 4 and 2 bits an element and four bytes at most, and nothing else grows with it."""
    sizes = {}
    for bits in (None, *BITS):
        model = Table(torch.randn(1000, 64))
        scheme = cnr.NoQuantization() if bits is None else cnr.Asymmetric(bits)
        path = tmp_path / str(bits)
        dcp.save(model.state_dict(), storage_writer=models.writer(path, quantization={"*": scheme}))
        sizes[bits] = sum(file.stat().st_size for file in path.iterdir())
        assert cnr.read_checkpoint(path).num_bytes == sizes[bits]
    for bits, size in sizes.items():
        row_bytes = 256 if bits is None else 64 * bits // 8 + 4
        least_bytes = row_bytes if bits is None else row_bytes - 2  # scale and bias are packed
        assert 1000 * least_bytes < size < 1000 * row_bytes + 3_000


# What others read.


def _codes_in_packs(path: Path, fqn: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint's packs that are named after an FQN."""
    found: dict[str, Tensor] = {}
    for pack in path.glob("*.safetensors"):
        found |= {name: tensor for name, tensor in safetensors.torch.load_file(pack).items() if name.startswith(fqn)}
    return found


@pytest.mark.parametrize("width", [5, 64])
@pytest.mark.parametrize("bits", BITS)
def test_fbgemm_decodes_the_bytes_in_a_pack(tmp_path: Path, bits: int, width: int) -> None:
    """The codes are FBGEMM's fused rows: its operator makes of them, bit for bit, what a load gives."""
    torch.manual_seed(1)
    model = Table(torch.randn(40, width))
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    modified = torch.tensor([2, 3, 39])
    for number in range(2):
        writer = models.writer(tmp_path / str(number), quantization=cnr.Asymmetric(bits))
        dcp.save(model.state_dict(), storage_writer=writer, planner=planner)
        with torch.no_grad():
            model.table.weight[modified] = torch.randn(3, width)
        tracker.mark("table", modified)
    tracker.close()
    for number, rows in enumerate((torch.arange(40), modified)):
        other = Table(torch.zeros(40, width))
        reader = cnr.CNRStorageReader(tmp_path / str(number))
        dcp.load(other.state_dict(), storage_reader=reader, planner=cnr.CNRLoadPlanner())
        found = _codes_in_packs(tmp_path / str(number), "table.weight").values()
        (codes,) = [codes for codes in found if codes.dim() == 2]
        assert codes.dtype is torch.uint8
        assert len(codes) == len(rows)
        decoded = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(codes, bits)[:, :width]
        assert torch.equal(decoded, other.table.weight.detach()[rows])
        assert not torch.equal(decoded, model.table.weight.detach()[rows])


@pytest.mark.parametrize("planner", [None, DefaultSavePlanner, cnr.CNRSavePlanner], ids=["none", "DCP's", "ours"])
def test_the_writer_alone_saves_a_baseline(tmp_path: Path, planner: type[DefaultSavePlanner] | None) -> None:
    """Dropped into an existing ``dcp.save``: each save is a baseline, and all of it comes back."""
    job = adagrad_job(1)
    for number in range(2):
        train(job, number)
        cut = whole(state(job))
        path = str(tmp_path / str(number))
        dcp.save(state(job), storage_writer=models.writer(path), planner=None if planner is None else planner())
        assert cnr.read_checkpoint(path).kind == "baseline"
        for load_planner in (DefaultLoadPlanner(), cnr.CNRLoadPlanner()):
            target = state(adagrad_job(2))
            assert differing(whole(target), cut)
            dcp.load(target, storage_reader=cnr.CNRStorageReader(path), planner=load_planner)
            assert differing(whole(target), cut) == []


def _drop_in(rank: int, root: str, sharding: str) -> None:
    """A writer and reader dropped into a script with DCP's planners; later, a tracker."""
    job = torchrec_job(1, sharding)
    train(job, 1)
    cut = whole(state(job))
    dcp.save(state(job), storage_writer=models.writer(f"{root}/0", quantization=cnr.Asymmetric(4)))
    got = _load_by_default(f"{root}/0", sharding)
    tables = _tables(cut)
    assert set(differing(got, cut)) == set(tables), "tables are known by their names"
    for fqn in tables:
        assert_close(got[fqn], cut[fqn], 4)

    tracked = torchrec_job(3, sharding)
    tracker = cnr.RowTracker(tracked.model)
    restored = models.load(tracked, f"{root}/0", tracker)
    assert differing(restored, got) == []
    train(tracked, 2)
    end = whole(state(tracked))
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    dcp.save(state(tracked), storage_writer=models.writer(f"{root}/1"), planner=planner)
    tracker.close()
    assert cnr.read_checkpoint(f"{root}/1").kind == "delta"
    assert differing(models.load(torchrec_job(4, sharding), f"{root}/1"), end) == []
    assert differing(_load_by_default(f"{root}/1", sharding), end) == []


def _load_by_default(path: str, sharding: str) -> Whole:
    """Load with DCP's planner, where it can: it fails in lists of optimizers when ranks have different keys."""
    job = torchrec_job(5, sharding)
    if sharding in ("table", "mixed"):
        return models.load(job, path)
    dcp.load(state(job), storage_reader=cnr.CNRStorageReader(path))
    return whole(state(job))


@pytest.mark.parametrize("sharding", models.SHARDINGS)
def test_writer_and_reader_dropped_into_a_torchrec_script(tmp_path: Path, rank_pool: RankPools, sharding: str) -> None:
    """With DCP's own planners a save is a quantized baseline; a tracker that comes later makes deltas of it."""
    rank_pool(2).run(_drop_in, str(tmp_path), sharding)


def _nested(job: Job) -> dict[str, Any]:
    return state(job, epoch=3, names=["a", "b"])


def test_loading_by_keys_without_a_target(tmp_path: Path) -> None:
    """DCP makes tensors and values from the checkpoint alone: of a whole lineage, or of the keys asked for."""
    job = adagrad_job(1)
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    for number in range(2):
        train(job, number)
        writer = models.writer(tmp_path / str(number))
        dcp.save(_nested(job), storage_writer=writer, planner=planner)
    tracker.close()
    assert cnr.read_checkpoint(tmp_path / "1").kind == "delta"
    everything = _load_state_dict_from_keys(storage_reader=cnr.CNRStorageReader(tmp_path / "1"))
    assert differing(whole(everything), whole(_nested(job))) == []
    some = _load_state_dict_from_keys(
        {"model.bag.weight", "reader.epoch"}, storage_reader=cnr.CNRStorageReader(tmp_path / "1")
    )
    assert set(some) == {"model", "reader"}
    assert torch.equal(some["model"]["bag.weight"], job.model.state_dict()["bag.weight"])
    assert some["reader"] == {"epoch": 3}


def _by_keys_on_ranks(rank: int, root: str) -> Whole:
    job = torchrec_job(1)
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    for number in range(2):
        train(job, number)
        dcp.save(_nested(job), storage_writer=models.writer(f"{root}/{number}"), planner=planner)
    tracker.close()
    return whole(_nested(job))


def test_loading_a_sharded_lineage_by_keys_in_one_process(tmp_path: Path, rank_pool: RankPools) -> None:
    """What ranks saved in shards, row-wise optimizer state too, is whole tensors to a process that has no group."""
    expected = rank_pool(2).run(_by_keys_on_ranks, str(tmp_path))[0]
    got = _load_state_dict_from_keys(storage_reader=cnr.CNRStorageReader(tmp_path / "1"))
    assert differing(whole(got), expected) == []

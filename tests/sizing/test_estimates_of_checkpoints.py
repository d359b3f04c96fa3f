"""Estimates agree with what is saved for real: bytes by kind, files, staged bytes and the tracker's memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchrec_cnr as cnr
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import TensorEntry
from torchrec_cnr.format.row_sets import encode_row_numbers
from torchrec_cnr.saving.plug_in_messages import STAGED
from torchrec_cnr.saving.staged_values import SLACK
from torchrec_cnr.sizing.checkpoint_bytes import CheckpointBytes, row_number_bits
from torchrec_cnr.sizing.estimate import estimate
from torchrec_cnr.sizing.inputs import Sizing, Table
from torchrec_cnr.tracking.modified_rows import ModifiedRows
from torchrec_cnr.tracking.tracked_tables import TrackedRows, TrackedShard

NUM_ROWS, DIM = 200_000, 64
HALF = cnr.HalfPrecision(torch.bfloat16)
EXACT = cnr.NoQuantization()

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Job:
    """A tracked table with row-wise optimizer state, whose values are as spread as those of a trained one."""

    def __init__(self, num_rows: int, dim: int, sizing: Sizing) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._sizing = sizing
        self.rows = ModifiedRows("table", Box((0, 0), (num_rows, dim)), torch.device("cpu"))
        self.values = {"table": torch.randn(num_rows, dim, generator=self._generator) * 0.05}
        state = torch.rand(num_rows, generator=self._generator)
        if sizing.state is not None:
            self.values["state"] = state
        tracked = TrackedRows([TrackedShard(self.rows, self.values["table"], lambda: [state])])
        self._planner = cnr.CNRSavePlanner(tracked, policy=sizing.policy)

    def writer(self, path: Path) -> cnr.CNRStorageWriter:
        state = {} if self._sizing.state is None else {"state": self._sizing.state}
        return cnr.CNRStorageWriter(path, quantization={"table": self._sizing.scheme, **state}, sync_files=False)

    def modify(self) -> None:
        """Mark the share of the rows that an interval modifies, at random."""
        self.rows.mark_where(torch.rand(self.rows.box.num_rows, generator=self._generator) < self._sizing.modified)

    def save(self, path: Path) -> cnr.Checkpoint:
        dcp.save(self.values, storage_writer=self.writer(path), planner=self._planner, no_dist=True)
        return cnr.read_checkpoint(path)


class TransformedJob(Job):
    """The same with transform-coded rows, whatever the estimate assumes."""

    def writer(self, path: Path) -> cnr.CNRStorageWriter:
        quantization = {"table": cnr.TransformCoded(), "state": EXACT}
        return cnr.CNRStorageWriter(path, quantization=quantization, sync_files=False)


def _found(checkpoint: cnr.Checkpoint) -> CheckpointBytes:
    """The bytes of a checkpoint, of all its files; codes and scales together."""
    tensors = checkpoint.manifest.tensors
    state = _blob_bytes(tensors["state"]) if "state" in tensors else 0
    numbers = [block.blob for shard in tensors["table"].shards for block in shard.rows.blocks]
    num_bytes = sum(blob.num_bytes for blob in numbers if blob is not None)
    return CheckpointBytes(checkpoint.num_bytes, _blob_bytes(tensors["table"]), 0, state, num_bytes)


def _blob_bytes(entry: TensorEntry) -> int:
    return sum(blob.num_bytes for shard in entry.shards for blob in shard.blobs)


def _sizing(
    scheme: cnr.Scheme,
    state: cnr.Scheme | None = EXACT,
    modified: float = 0.26,
    dim: int = DIM,
    num_rows: int = NUM_ROWS,
) -> Sizing:
    table = Table(num_rows, dim)
    return Sizing((table,), scheme=scheme, state=state, modified=modified, policy=cnr.Consecutive())


CASES = {
    "2 bits": _sizing(cnr.AdaptiveAsymmetric(2)),
    "4 bits": _sizing(cnr.AdaptiveAsymmetric(4)),
    "4 bits, bf16 state": _sizing(cnr.AdaptiveAsymmetric(4), HALF),
    "4 bits, no state": _sizing(cnr.AdaptiveAsymmetric(4), None),
    "4 bits, few rows": _sizing(cnr.AdaptiveAsymmetric(4), modified=0.01),
    "4 bits, most rows": _sizing(cnr.AdaptiveAsymmetric(4), modified=0.8),
    "4 bits, 16 columns": _sizing(cnr.Asymmetric(4), dim=16),
    "4 bits, 256 columns": _sizing(cnr.Asymmetric(4), dim=256, num_rows=40_000),
    "4 bits, 1 column": _sizing(cnr.Asymmetric(4), dim=1),  # stored exactly, because codes would be larger
    "8 bits": _sizing(cnr.Asymmetric(8)),
    "exact": _sizing(EXACT),
    "exact, 4 columns": _sizing(EXACT, dim=4),
}


@pytest.mark.long
@pytest.mark.parametrize("sizing", CASES.values(), ids=CASES)
def test_bytes_are_those_of_real_checkpoints(sizing: Sizing, tmp_path: Path) -> None:
    """A baseline and two deltas are within 5 % of their estimates; files are as many, or one less."""
    (table,) = sizing.tables
    job = Job(table.num_rows, table.num_cols, sizing)
    found = estimate(sizing)
    assert found.delta is not None
    assert found.full_fp32_bytes == sum(tensor.nbytes for tensor in job.values.values())
    for number in range(3):
        checkpoint = job.save(tmp_path / str(number))
        assert checkpoint.kind == ("delta" if number else "baseline")
        expected = found.delta if number else found.baseline
        expected = replace(expected, codes=expected.codes + expected.scale_and_bias, scale_and_bias=0)
        _check_close(_found(checkpoint), expected)
        num_files = found.delta_files if number else found.baseline_files
        assert len(checkpoint.manifest.packs) in (num_files, num_files - 1)
        job.modify()


@pytest.mark.long
def test_measured_rows_give_the_bytes_of_real_checkpoints(tmp_path: Path) -> None:
    """A baseline tells the size of transform-coded rows in the next deltas. They are staged as values."""
    sizing = _sizing(EXACT)
    job = TransformedJob(NUM_ROWS, DIM, sizing)
    job.values["table"].copy_(torch.randn(NUM_ROWS, 8) @ torch.randn(8, DIM) * 0.05)
    baseline = job.save(tmp_path / "0")
    measured = Table(NUM_ROWS, DIM, _blob_bytes(baseline.manifest.tensors["table"]) / NUM_ROWS)
    found = estimate(replace(sizing, tables=(measured,)))
    assert found.delta is not None
    assert found.baseline.num_bytes < 0.2 * estimate(sizing).baseline.num_bytes
    assert found.baseline.scale_and_bias == found.delta.scale_and_bias == 0
    _check_close(_found(baseline), found.baseline)
    job.modify()
    _check_close(_found(job.save(tmp_path / "1")), found.delta)
    on_gpu = replace(sizing, is_on_gpu=True, scheme=cnr.AdaptiveAsymmetric(4))
    memory, coded = (estimate(replace(on_gpu, tables=(table,))).memory for table in (measured, Table(NUM_ROWS, DIM)))
    assert memory.staging_baseline == estimate(sizing).memory.staging_baseline > coded.staging_baseline
    with pytest.raises(cnr.ConfigurationError, match="row_bytes"):
        Table(1, 1, 0.0)


def _check_close(found: CheckpointBytes, expected: CheckpointBytes) -> None:
    assert found.num_bytes == pytest.approx(expected.num_bytes, rel=0.05)
    assert found.codes == pytest.approx(expected.codes, rel=0.05)
    assert found.optimizer_state == pytest.approx(expected.optimizer_state, rel=0.1)
    assert found.row_numbers == pytest.approx(expected.row_numbers, rel=0.2)


@pytest.mark.long
def test_staged_bytes_are_those_of_a_save(tmp_path: Path) -> None:
    """What an asynchronous save copies, of a baseline and of a delta."""
    sizing = CASES["4 bits"]
    job, memory = Job(NUM_ROWS, DIM, sizing), estimate(sizing).memory
    assert SLACK * _staged(job, tmp_path) == pytest.approx(memory.staging_baseline, rel=0.01)
    job.save(tmp_path / "0")
    job.modify()
    num_modified = int(job.rows.marked.sum())
    assert SLACK * _staged(job, tmp_path) + 8 * num_modified == pytest.approx(memory.staging_delta, rel=0.01)


def _staged(job: Job, path: Path) -> int:
    staged = job.writer(path / "staged").stage(job.values)[STAGED]
    assert staged.failure is None
    return int(staged.phases.staged_bytes)


@pytest.mark.parametrize("policy", [cnr.Compacted(), cnr.Intermittent()], ids=repr)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_of_the_tracker_is_that_of_its_sets(policy: cnr.Policy, device: str) -> None:
    """Between two saves it has marks, a frozen set that it keeps, the rows since the baseline, and heat."""
    num_rows = 6_400
    sizing = replace(CASES["4 bits"], tables=(Table(num_rows, DIM),), policy=policy, is_on_gpu=device == "meta")
    rows = ModifiedRows("table", Box((0, 0), (num_rows, DIM)), torch.device(device))
    rows.freeze()
    rows.commit(is_baseline=False, has_heat=isinstance(policy, cnr.Compacted))
    assert rows._spare is not None
    held = [rows.marked, rows._spare.held, rows._since_baseline.held, *([] if rows.heat is None else [rows.heat])]
    assert estimate(sizing).memory.tracker == sum(tensor.nbytes for tensor in held)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.26, 0.5, 0.9])
def test_bits_of_row_numbers_are_nearly_those_of_their_coding(share: float) -> None:
    """Random rows, of one block."""
    generator = torch.Generator().manual_seed(0)
    rows = (torch.rand(round(30_000 / share), generator=generator) < share).nonzero().squeeze(1).numpy()
    coded = 8 * len(encode_row_numbers(rows).data) / len(rows)
    assert row_number_bits(share) <= coded <= 1.25 * row_number_bits(share)


def test_files_are_shared_among_ranks() -> None:
    """Each rank writes files of its own; under Compacted, rows of each heat have theirs."""
    sizing = Sizing((Table(100_000_000, 64),), num_ranks=8)
    found, without_heat = estimate(sizing), estimate(replace(sizing, policy=cnr.Consecutive()))
    assert (found.baseline_files, found.delta_files) == (8 * 30, 8 * (8 + 3))
    assert (without_heat.baseline_files, without_heat.delta_files) == (8 * 30, 8 * 8)

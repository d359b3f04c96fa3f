"""Checkpoints of transform-coded rows: deltas, shared bases, compaction, pruning, corruption, and those who read them.

What is expected is what the scheme of each save gives back: rows that a delta does not have are decoded as the
checkpoint decoded them that has them.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from torch import Tensor, nn

import torchrec_cnr as cnr
from tests.quantization.test_transform_coded import DIM, few_dimensions
from tests.support import models
from tests.support.faults import failure_of, flip_middle
from tests.support.jobs import load_into
from tests.support.models import Job, differing, state, torchrec_job, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.quantization import TransformCoded, Transformed
from torchrec_cnr.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

# Of a row's norm, that 4 bits may be off by where a shard is not transformed: half of each of 15 steps, and clipping.
LARGEST_SHARE = 0.15
FQN, NUM_ROWS = "model.users.weight", 3_000
RULE = TransformCoded(cnr.AdaptiveAsymmetric(4))


@dataclass
class Run:
    """A model of one table that is saved now and then.

    Attributes:
        root: Where.
        model: The model.
        tracker, planner, writer: What saves it.
        num_saves: How many checkpoints there are.
    """

    root: Path
    model: nn.Module
    tracker: cnr.RowTracker
    planner: cnr.CNRSavePlanner
    writer: cnr.CNRStorageWriter
    num_saves: int = 0

    @property
    def table(self) -> Tensor:
        """The table."""
        weight: Tensor = self.model.get_parameter("users.weight")
        return weight.detach()

    def change(self, rows: Tensor, seed: int) -> None:
        """Overwrite rows, with others like them."""
        rows = rows.to(self.table.device)
        self.table[rows] = few_dimensions(len(rows), seed).to(self.table)
        self.tracker.mark("users", rows)

    def save(self) -> cnr.Checkpoint:
        """Save a checkpoint."""
        path = self.root / str(self.num_saves)
        self.num_saves += 1
        state_dict = {"model": self.model.state_dict()}
        dcp.save(state_dict, checkpoint_id=str(path), storage_writer=self.writer, planner=self.planner, no_dist=True)
        return cnr.read_checkpoint(path)


@contextmanager
def running(root: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any) -> Iterator[Run]:
    """A run with a table whose rows are close to a subspace of few dimensions."""
    model = nn.ModuleDict({"users": nn.EmbeddingBag(NUM_ROWS, DIM, sparse=True, dtype=dtype, device=device)})
    with torch.no_grad():
        model.get_parameter("users.weight").copy_(few_dimensions(NUM_ROWS))
    tracker = cnr.RowTracker(model)
    policy = options.pop("policy", cnr.Consecutive())
    writer = models.writer(root / "0", **{"quantization": RULE} | options)
    yield Run(root, model, tracker, cnr.CNRSavePlanner(tracker, policy=policy), writer)
    tracker.close()


def scheme_of(checkpoint: cnr.Checkpoint) -> Transformed:
    """The scheme of the table's first shard."""
    scheme = checkpoint.manifest.tensors[FQN].shards[0].scheme
    assert isinstance(scheme, Transformed)
    return scheme


def basis_directory(checkpoint: cnr.Checkpoint) -> str | None:
    """Return where the basis of the first shard is."""
    transform = checkpoint.manifest.tensors[FQN].shards[0].transform
    assert transform is not None
    assert transform.basis is not None
    return checkpoint.manifest.packs[transform.basis.pack].directory


def assert_near(path: Path, table: Tensor) -> None:
    """Rows are about as near as those of 4 bits, and not the very rows."""
    table = table.cpu()
    loaded = cnr.load_table(path, FQN)
    other = cnr.AdaptiveAsymmetric(4).choose(lambda: table[::2], 0)
    wanted = (other.decode(other.encode(table).codes, DIM, table.dtype) - table).double().norm(dim=1).mean()
    error = (loaded - table).double().norm(dim=1).mean()
    assert 0.5 * wanted < error < 1.1 * wanted


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deltas_load_and_take_fewer_bytes(tmp_path: Path, dtype: torch.dtype, device: str) -> None:
    """Each checkpoint loads with the rows that it and its chain have; the bytes are far below those of 4 bits."""
    sizes: dict[str, list[int]] = {}
    for name, rule in (("transformed", RULE), ("4 bits", RULE.error_of)):
        with running(tmp_path / name, dtype, device, quantization=rule) as run:
            for number in range(3):
                if number:
                    run.change(torch.arange(number, NUM_ROWS, 5), number)
                checkpoint = run.save()
                sizes.setdefault(name, []).append(checkpoint.num_bytes)
                assert_near(tmp_path / name / str(number), run.table)
    assert all(size < 0.55 * other for size, other in zip(sizes["transformed"], sizes["4 bits"], strict=True))


def test_a_basis_is_stored_once(tmp_path: Path) -> None:
    """Deltas name the file of the checkpoint that has it; a new process learns one of its own, once."""
    with running(tmp_path) as run:
        checkpoints = [run.save()]
        for number in range(1, 4):
            run.change(torch.arange(number, NUM_ROWS, 3), number)
            checkpoints.append(run.save())
        run.writer = models.writer(tmp_path / "0", quantization=RULE)
        for number in range(4, 6):
            run.change(torch.arange(number, NUM_ROWS, 3), number)
            checkpoints.append(run.save())
        bases = [scheme_of(checkpoint).basis for checkpoint in checkpoints]
        directories = [basis_directory(checkpoint) for checkpoint in checkpoints]
        assert bases[0] == bases[1] == bases[2] == bases[3] != bases[4] == bases[5]
        assert directories == [None, *["../0"] * 3, None, "../4"]
        assert_near(tmp_path / "5", run.table)


@pytest.mark.parametrize("policy", [cnr.OneShot(), cnr.Consecutive()], ids=repr)
def test_another_step_needs_no_other_basis(tmp_path: Path, policy: cnr.Policy) -> None:
    """Also where deltas are of the baseline, which has the basis but not the steps of the deltas before."""
    with running(tmp_path, policy=policy) as run:
        checkpoints = [run.save()]
        for number in range(1, 4):
            rows = torch.arange(number, NUM_ROWS, 2)
            run.table[rows] = few_dimensions(len(rows), number) * 0.7**number
            run.tracker.mark("users", rows)
            checkpoints.append(run.save())
            assert not cnr.verify(tmp_path / str(number)).problems
    assert [checkpoint.kind for checkpoint in checkpoints] == ["baseline", "delta", "delta", "delta"]
    assert len({scheme_of(checkpoint).digest for checkpoint in checkpoints}) == 4
    assert len({scheme_of(checkpoint).basis for checkpoint in checkpoints}) == 1
    assert [basis_directory(checkpoint) for checkpoint in checkpoints] == [None, *["../0"] * 3]


def test_a_baseline_stores_its_basis(tmp_path: Path) -> None:
    """Also in a process that has learned one: a baseline refers to no other checkpoint."""
    with running(tmp_path, policy=cnr.Full()) as run:
        for number in range(2):
            run.change(torch.arange(number, NUM_ROWS, 3), number)
            checkpoint = run.save()
            assert {pack.directory for pack in checkpoint.manifest.packs} == {None}
            assert scheme_of(checkpoint).basis is not None


def test_exact_rows_are_counted_and_come_back(tmp_path: Path) -> None:
    """NaN, infinity, and numbers beyond 16 bits, in a baseline, in a delta and after a compaction."""
    with running(tmp_path) as run:
        run.change(torch.arange(0, NUM_ROWS, 7), 1)
        run.table[3, 4], run.table[4] = float("nan"), 1e9
        assert run.save().num_exact_rows == 2
        run.change(torch.tensor([3]), 2)
        run.table[9, 9] = float("-inf")
        run.tracker.mark("users", torch.tensor([9]))
        assert run.save().num_exact_rows == 1
        cnr.compact(tmp_path / "1", max_ratio=1.0)
        assert cnr.read_checkpoint(tmp_path / "1").num_exact_rows == 2
        loaded = cnr.load_table(tmp_path / "1", FQN)
        for row in (4, 9):
            assert torch.equal(loaded[row], run.table[row])
        assert bool(loaded[3].isfinite().all())


@pytest.mark.parametrize("max_ratio", [1.0, 1.3, 100.0])
def test_compaction_changes_no_row(tmp_path: Path, max_ratio: float) -> None:
    """Numbers are copied without decoding, whether files are rewritten or kept, and a delta goes on upon it."""
    with running(tmp_path, pack_bytes=1 << 14) as run:
        for number in range(5):
            if number:
                run.change(torch.arange(number, NUM_ROWS, 3 + number), number)
            run.save()
        before = cnr.load_table(tmp_path / "4", FQN)
        assert cnr.compact(tmp_path / "4", max_ratio=max_ratio).is_compacted
        assert torch.equal(cnr.load_table(tmp_path / "4", FQN), before)
        run.change(torch.arange(0, NUM_ROWS, 11), 7)
        delta = run.save()
        assert delta.kind == "delta"
        cnr.compact(tmp_path / "5", max_ratio=1.0, self_contained=True)
        cnr.execute(cnr.plan_prune(tmp_path, cnr.Keep(last=1)))
        assert sorted(path.parent.name for path in tmp_path.glob("*/manifest.json")) == ["5"]
        assert {path.parent.name for path in tmp_path.glob("*/*.safetensors")} == {"5"}
        assert not cnr.verify(tmp_path / "5").problems
        assert_near(tmp_path / "5", run.table)


def test_a_prune_keeps_a_basis_that_is_used(tmp_path: Path) -> None:
    """Of the baseline's files only its basis stays, until no checkpoint that is kept refers to it."""
    with running(tmp_path) as run:
        for number in range(3):
            run.change(torch.arange(number, NUM_ROWS, 2), number)
            run.save()
        cnr.compact(tmp_path / "2", max_ratio=1.0)
        cnr.execute(cnr.plan_prune(tmp_path, cnr.Keep(last=1)))
        assert len(list((tmp_path / "0").glob("*.safetensors"))) <= 2
        before = cnr.load_table(tmp_path / "2", FQN)
        run.change(torch.arange(5, NUM_ROWS, 2), 9)
        run.save()
        assert not cnr.verify(tmp_path / "3").problems
        assert_near(tmp_path / "3", run.table)
        assert torch.equal(cnr.load_table(tmp_path / "2", FQN), before)


@pytest.mark.parametrize("what", ["flipped", "missing"])
def test_a_basis_that_is_lost_is_noticed(tmp_path: Path, what: str) -> None:
    """By verify and by a load, as a typed error that names the file."""
    with running(tmp_path) as run:
        run.save()
        run.change(torch.arange(0, NUM_ROWS, 2), 1)
        delta = run.save()
    (pack,) = [pack for pack in delta.manifest.packs if pack.directory is not None]
    file = tmp_path / "0" / pack.name
    assert file.stat().st_size == pack.num_bytes < 4 * DIM * DIM + 1_500
    if what == "flipped":
        flip_middle(file)
    else:
        file.unlink()
    with pytest.raises(cnr.DamagedError, match=pack.name):
        cnr.load_table(tmp_path / "1", FQN)
    report = cnr.verify(tmp_path / "1")
    assert any(pack.name in str(problem) for problem in report.problems)


def test_a_save_that_failed_leaves_no_reference(tmp_path: Path) -> None:
    """A basis of a save that was not committed is in no manifest, so the next save stores one."""
    with running(tmp_path) as run:
        run.save()
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "manifest.json").write_text("{}")
        run.change(torch.arange(0, NUM_ROWS, 2), 1)
        assert isinstance(failure_of(run.save), cnr.CheckpointExistsError)
        checkpoint = run.save()
        assert {pack.directory for pack in checkpoint.manifest.packs} == {None, "../0"}
        assert_near(tmp_path / "2", run.table)


def test_more_restores_than_expected_keep_the_error_of_8_bits(tmp_path: Path) -> None:
    """From the next save on, although the checkpoint before has a transform; the rows that were stored stay."""
    errors = []
    with running(tmp_path, quantization=TransformCoded(cnr.ByExpectedRestores(1))) as run:
        for number in range(4):
            rows = torch.arange(number, NUM_ROWS, 3)
            run.change(rows, number)
            checkpoint = run.save()
            assert checkpoint.num_restores == number
            loaded = cnr.load_table(tmp_path / str(number), FQN)
            other = cnr.Asymmetric(8) if number > 1 else cnr.AdaptiveAsymmetric.best(2)
            wanted = other.decode(other.encode(run.table).codes, DIM, torch.float32) - run.table
            errors.append(((loaded - run.table)[rows].norm(dim=1).mean() / wanted[rows].norm(dim=1).mean()).item())
            load_into({"model": run.model.state_dict()}, tmp_path / str(number), tracker=run.tracker)
    assert all(0.9 < error < 1.1 for error in errors), errors


def test_rows_are_exact_if_no_error_is_within_the_budget(tmp_path: Path) -> None:
    """After the restore that used up the budget; the checkpoint has no transform then."""
    with running(tmp_path, quantization=TransformCoded(cnr.ByErrorBudget(0, budget=3.5e-5))) as run:
        schemes = []
        for number in range(2):
            run.change(torch.arange(number, NUM_ROWS, 3), number)
            (shard,) = run.save().manifest.tensors[FQN].shards
            schemes.append(type(shard.scheme))
            load_into({"model": run.model.state_dict()}, tmp_path / str(number), tracker=run.tracker)
        assert schemes == [Transformed, cnr.NoQuantization]


_BAG_ROWS = (6_000, 4_000, 3_000)  # enough that a transform is worth its bytes


def largest_errors(path: Path | str, row_log: cnr.KafkaRows | None = None) -> dict[str, float]:
    """Of each table: 0.85 of the largest step in the lineage, times the root of its columns; 0 without one."""
    found: dict[str, float] = {}
    for checkpoint in read_lineage(Store.open(path, row_log=row_log)).checkpoints:
        for fqn, entry in checkpoint.manifest.tensors.items():
            if entry.is_table:
                steps = [
                    _step(checkpoint, shard.transform.blob) for shard in entry.shards if shard.transform is not None
                ]
                found[fqn] = max([found.get(fqn, 0.0), *(0.85 * step * entry.size[1] ** 0.5 for step in steps)])
    return found


def _step(checkpoint: cnr.Checkpoint, blob: Blob) -> float:
    pack = checkpoint.manifest.packs[blob.pack]
    data = Path(checkpoint.store.path, pack.directory or ".", pack.name).read_bytes()
    transform = zstandard.decompress(data[blob.offset : blob.offset + blob.num_bytes])
    (step,) = struct.unpack_from("<d", transform, 4)
    return float(step)


def train_and_compare(rank: int, root: str, is_async: bool, rows: cnr.KafkaRows | None = None) -> list[str]:
    """Save three checkpoints, and return which rows are not about what they should be."""
    job: Job = torchrec_job(1, bag_rows=_BAG_ROWS)
    tracker = cnr.RowTracker(job.model)
    for shard in tracker.shards:
        if shard.weight.numel():
            with torch.no_grad():
                shard.weight.copy_(few_dimensions(len(shard.weight), 100 + rank)[:, : shard.weight.shape[1]])
    tracker.mark_all()
    policy = cnr.Consecutive() if rows is None else cnr.OneShot()
    manager = cnr.CheckpointManager(root, tracker, policy=policy, quantization=RULE, row_log=rows)
    wrong = []
    for number in range(3):
        train(job, number)
        tracker.mark_all()  # so that deltas have enough rows, too
        cut = whole(state(job))
        if is_async:
            manager.async_save(number, state(job))
            train(job, 100 + number)
            manager.wait()
        else:
            manager.save(number, state(job))
        path = f"{root}/step-{number}"
        loaded = models.load(torchrec_job(50, bag_rows=_BAG_ROWS), path, row_log=rows)
        largest = largest_errors(path, rows)
        for fqn in differing(loaded, cut):
            if fqn not in largest:
                wrong.append(f"{number}: {fqn}")
                continue
            errors, norms = (values.double().norm(dim=1) for values in (loaded[fqn] - cut[fqn], cut[fqn]))
            lost = errors > torch.clamp(LARGEST_SHARE * norms, min=largest[fqn])
            wrong += [f"{number}: row {row} of {fqn}" for row in lost.nonzero().squeeze(1).tolist()]
    manager.close()
    tracker.close()
    return wrong


@pytest.mark.parametrize("is_async", [False, True])
def test_ranks_with_shards_of_all_kinds(tmp_path: Path, rank_pool: RankPools, is_async: bool) -> None:
    """Tables, rows and columns on two ranks; optimizer state and the dense part are exact."""
    assert rank_pool(2).run(train_and_compare, str(tmp_path), is_async) == [[], []]
    checkpoints = [cnr.read_checkpoint(tmp_path / f"step-{number}") for number in range(3)]
    assert [checkpoint.kind for checkpoint in checkpoints] == ["baseline", "delta", "delta"]
    entries = checkpoints[-1].manifest.tensors.values()
    assert any(isinstance(shard.scheme, Transformed) for entry in entries for shard in entry.shards)


def test_others_read_them(tmp_path: Path) -> None:
    """Exports, comparisons and reads of some rows give what ``load_table`` gives."""
    with running(tmp_path) as run:
        run.save()
        run.change(torch.arange(0, NUM_ROWS, 2), 1)
        run.save()
    wanted = cnr.load_table(tmp_path / "1", FQN)
    cnr.export(tmp_path / "1", tmp_path / "file.pt", to="torch")
    exported = torch.load(tmp_path / "file.pt", weights_only=True)
    assert torch.equal(exported["model"]["users.weight"], wanted)
    assert torch.equal(cnr.load_table(tmp_path / "1", FQN, rows=range(100, 130)), wanted[100:130])
    comparison = cnr.compare(tmp_path / "0", tmp_path / "1")
    (tensor,) = comparison.tensors
    assert tensor.num_differing == NUM_ROWS // 2

"""Single tables: what ``load_table`` reads is what a load of everything gives, of any lineage and any range of rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import torchrec_cnr as cnr
from tests.support import hand_made, models
from tests.support.faults import flip
from tests.support.hand_made import Content, Part
from tests.support.models import Whole, state, torchrec_job, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.format.boxes import Box
from torchrec_cnr.lineage.checkpoint import read_lineage
from torchrec_cnr.reading.plan import plan_fold
from torchrec_cnr.reading.regions import TensorRegion
from torchrec_cnr.storage import pack_writer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

NUM_ROWS = 40


def _same(first: Tensor, second: Tensor) -> bool:
    return first.dtype is second.dtype and torch.equal(first, second)


def _loaded(path: str | Path, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors, by a load of everything."""
    target = {fqn: torch.zeros_like(tensor) for fqn, tensor in like.items()}
    dcp.load(target, storage_reader=cnr.CNRStorageReader(path), planner=cnr.CNRLoadPlanner())
    return target


def _save_lineage(root: Path, seed: int, num_deltas: int, quantization: cnr.Quantization) -> list[dict[str, Tensor]]:
    """A baseline and deltas of two tables and other tensors; what each checkpoint loads as."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"a": nn.EmbeddingBag(NUM_ROWS, 8), "b": nn.Embedding(3, 4)})
    others = {"scalar": torch.tensor(3), "vector": torch.rand(6), "flags": torch.tensor([True, False])}
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    cuts = []
    for number in range(num_deltas + 1):
        rows = torch.randperm(NUM_ROWS)[: number * 5]
        with torch.no_grad():
            model["a"].weight[rows] = torch.randn(len(rows), 8)
        tracker.mark("a", rows)
        writer = models.writer(root / str(number), quantization=quantization)
        saved = {**model.state_dict(), **others}
        dcp.save(saved, storage_writer=writer, planner=planner)
        assert (cnr.read_checkpoint(root / str(number)).parent is None) == (number == 0)
        cuts.append(_loaded(root / str(number), saved))
    tracker.close()
    return cuts


@pytest.fixture(scope="module")
def lineage(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Tensor]]]:
    """Three checkpoints at 8 bits in blocks of three rows, and what each loads as."""
    root = tmp_path_factory.mktemp("lineage")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pack_writer, "BLOCK_BYTES", 3 * 8 * 4)
        return root, _save_lineage(root, 1, 2, cnr.Asymmetric(8))


@pytest.mark.parametrize("quantization", [cnr.NoQuantization(), cnr.Asymmetric(4), cnr.KMeans(2)], ids=["0", "4", "k2"])
def test_every_tensor_is_read_as_a_load_gives_it(tmp_path: Path, quantization: cnr.Quantization) -> None:
    """Tables, scalars, vectors and flags, of every link of a lineage, bit for bit."""
    cuts = _save_lineage(tmp_path, 7, 3, quantization)
    assert not torch.equal(cuts[0]["a.weight"], cuts[3]["a.weight"])
    for number, cut in enumerate(cuts):
        assert {fqn: _same(cnr.load_table(tmp_path / str(number), fqn), cut[fqn]) for fqn in cut} == dict.fromkeys(
            cut, True
        )


@pytest.mark.long
def test_every_range_of_rows_is_read(lineage: tuple[Path, list[dict[str, Tensor]]]) -> None:
    """Each range of a table's rows, empty ones too, is that part of the table, with one thread or three."""
    root, cuts = lineage
    table = cuts[2]["a.weight"]
    for start in range(0, NUM_ROWS + 1, 3):
        for stop in range(start, NUM_ROWS + 1, 4):
            got = cnr.load_table(root / "2", "a.weight", rows=range(start, stop), thread_count=1 + 2 * (stop % 2))
            assert _same(got, table[start:stop])


def test_only_blocks_with_wanted_rows_are_read(lineage: tuple[Path, list[dict[str, Tensor]]]) -> None:
    """Of each checkpoint: the blobs that may hold a wanted row, and the row numbers of those."""
    checkpoints = read_lineage(lineage[0] / "2")
    for start in range(0, NUM_ROWS, 5):
        wanted = range(start, start + 4)
        region = TensorRegion("a.weight", Box((start, 0), (4, 8)), torch.zeros(4, 8))
        for plan in plan_fold(checkpoints, [region]):
            manifest = plan.checkpoint.manifest
            (shard,) = manifest.tensors["a.weight"].shards
            assert len(shard.blobs) > 1
            needed = [b for b in shard.rows.blocks if b.first < wanted.stop and b.first + b.span > start]
            assert [read.rows for read in plan.reads.values()] == needed
            assert list(plan.row_blocks.values()) == [block for block in needed if block.coding != "all"]
            if manifest.parent is None:
                assert [block.first for block in shard.rows.blocks] == list(range(0, NUM_ROWS, 3))


slices = st.builds(slice, *[st.none() | st.integers(-50, 50)] * 2, st.none() | st.just(1))


@given(slices)
def test_slices_mean_what_they_mean_to_a_tensor(lineage: tuple[Path, list[dict[str, Tensor]]], rows: slice) -> None:
    """Slices count from the end and are cut off at the ends, as those of tensors are."""
    root, cuts = lineage
    assert _same(cnr.load_table(root / "2", "a.weight", rows=rows), cuts[2]["a.weight"][rows])


def test_values_go_into_a_tensor_that_is_there(lineage: tuple[Path, list[dict[str, Tensor]]]) -> None:
    """A parameter, a part of a larger tensor, and one whose elements lie apart are filled, and returned."""
    root, cuts = lineage
    table = cuts[2]["a.weight"]
    outs = [
        nn.Parameter(torch.zeros(NUM_ROWS, 8)),
        torch.zeros(NUM_ROWS + 5, 20)[3:-2, 4:12],
        torch.zeros(8, NUM_ROWS).t(),
        torch.zeros(NUM_ROWS, 16)[:, ::2],
    ]
    for out in outs:
        assert cnr.load_table(root / "2", "a.weight", out=out) is out
        assert torch.equal(out.detach(), table)
    around = torch.zeros(20, 8)
    cnr.load_table(root / "2", "a.weight", rows=slice(30, None), out=around[5:15])
    assert torch.equal(around[5:15], table[30:])
    assert not around[:5].any()
    assert not around[15:].any()


def _save_sharded(rank: int, root: str, shardings: Sequence[str]) -> Whole:
    """A lineage whose links are sharded differently; what the last holds."""
    for number, sharding in enumerate(shardings):
        job = torchrec_job(1 + number, sharding)
        tracker = cnr.RowTracker(job.model)
        if number:
            planner = cnr.CNRLoadPlanner(tracker)
            dcp.load(state(job), storage_reader=cnr.CNRStorageReader(f"{root}/{number - 1}"), planner=planner)
        train(job, number)
        save_planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
        dcp.save(state(job), storage_writer=models.writer(f"{root}/{number}"), planner=save_planner)
        tracker.close()
    assert cnr.read_checkpoint(f"{root}/{len(shardings) - 1}").kind == "delta"
    return whole(state(job))


@pytest.mark.parametrize("shardings", [["row", "column", "table"], ["table", "row", "column"]], ids="-".join)
def test_sharded_lineages_are_read_in_one_process(tmp_path: Path, rank_pool: RankPools, shardings: list[str]) -> None:
    """Tables and their row-wise state, of a lineage that ranks saved under changing sharding, without ranks."""
    expected = rank_pool(2).run(_save_sharded, str(tmp_path), shardings)[0]
    path = tmp_path / str(len(shardings) - 1)
    tensors = {fqn: value for fqn, value in expected.items() if isinstance(value, Tensor)}
    assert any(fqn.endswith("momentum1") and bool(value.any()) for fqn, value in tensors.items())
    for fqn, value in tensors.items():
        assert _same(cnr.load_table(path, fqn), value)
        if value.dim():
            middle = slice(len(value) // 3, -(len(value) // 4))
            assert _same(cnr.load_table(path, fqn, rows=middle), value[middle])


def test_a_store_in_memory_is_read(tmp_path: Path) -> None:
    """Any fsspec file system will do."""
    table = torch.rand(10, 4)
    dcp.save({"t": table}, storage_writer=models.writer(f"memory://{tmp_path}/0"))
    assert _same(cnr.load_table(f"memory://{tmp_path}/0", "t", rows=range(2, 9)), table[2:9])


def test_a_tracked_table_is_known_to_be_overwritten(tmp_path: Path) -> None:
    """After a read into a live table, only a baseline is right, and the tracker knows it."""
    model = nn.EmbeddingBag(10, 4)
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
    for number in range(2):
        dcp.save(model.state_dict(), storage_writer=models.writer(tmp_path / str(number)), planner=planner)
    planner.resolve_last_save()
    assert tracker.head is not None
    cnr.load_table(tmp_path / "0", "weight", rows=range(3), out=model.weight[:3])
    assert tracker.head is None
    tracker.close()


@pytest.mark.parametrize(
    ("fqn", "similar"),
    [("weight", "'a.weight', 'b.weight'"), ("a.weigth", "'a.weight'"), ("vector2", "'vector'"), ("zzz", "none")],
)
def test_an_unknown_name_is_answered_with_similar_ones(
    lineage: tuple[Path, list[dict[str, Tensor]]], fqn: str, similar: str
) -> None:
    """Names that hold it or are spelled much like it, and the checkpoint."""
    root, _ = lineage
    with pytest.raises(cnr.StateMismatchError, match=rf"unknown tensor '{fqn}' in {root}/2; similar names: {similar}"):
        cnr.load_table(root / "2", fqn)


def test_arguments_that_cannot_work_are_refused(lineage: tuple[Path, list[dict[str, Tensor]]], tmp_path: Path) -> None:
    """The error names the argument, what was expected and what was given; no byte is read into ``out``."""
    path = lineage[0] / "2"
    wrong: list[tuple[type[Exception], str, str, dict[str, Any]]] = [
        (cnr.ConfigurationError, "step 1", "a.weight", {"rows": range(0, 10, 2)}),
        (cnr.ConfigurationError, "step 1", "a.weight", {"rows": slice(None, None, -1)}),
        (cnr.ConfigurationError, "range or slice", "a.weight", {"rows": 3}),
        (cnr.ConfigurationError, "range or slice", "a.weight", {"rows": [1, 2]}),
        (cnr.ConfigurationError, r"within the 40 .*range\(30, 41\)", "a.weight", {"rows": range(30, 41)}),
        (cnr.ConfigurationError, "within the 40 rows", "a.weight", {"rows": range(-1, 3)}),
        (cnr.ConfigurationError, "no dimensions", "scalar", {"rows": range(0)}),
        (cnr.ConfigurationError, "thread_count", "a.weight", {"thread_count": 0}),
        (cnr.StateMismatchError, r"\[40, 8\] .*got \[40, 4\]", "a.weight", {"out": torch.zeros(40, 4)}),
        (
            cnr.StateMismatchError,
            r"\[3, 8\] .*got \[40, 8\]",
            "a.weight",
            {"out": torch.zeros(40, 8), "rows": range(3)},
        ),
        (cnr.StateMismatchError, "float32 .*float16", "a.weight", {"out": torch.zeros(40, 8).half()}),
    ]
    for kind, words, fqn, options in wrong:
        with pytest.raises(kind, match=words):
            cnr.load_table(path, fqn, **options)
    with pytest.raises(cnr.CheckpointNotFoundError, match="no committed checkpoint"):
        cnr.load_table(cnr.latest(tmp_path), "a.weight")
    dcp.save({"o": 1}, storage_writer=models.writer(tmp_path / "objects"))
    with pytest.raises(cnr.StateMismatchError, match=r"'o' in .* is not a tensor"):
        cnr.load_table(tmp_path / "objects", "o")


def test_damage_is_noticed(tmp_path: Path) -> None:
    """A flipped bit in what is read is an error that names the file."""
    dcp.save({"t": torch.rand(10, 4)}, storage_writer=models.writer(tmp_path / "0"))
    (pack,) = (tmp_path / "0").glob("*.safetensors")
    for place in (9, -1):
        flip(pack, place)
        with pytest.raises(cnr.DamagedError, match=pack.name):
            cnr.load_table(tmp_path / "0", "t")
        flip(pack, place)


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float64, 1e308), (torch.float32, 1e38), (torch.int64, 2**62)])
def test_state_of_equal_values_is_exact(tmp_path: Path, dtype: torch.dtype, largest: float) -> None:
    """Row-wise state of a shard is what was stored, bit for bit, however older checkpoints divide the table."""
    generator = torch.Generator().manual_seed(0)
    values = ((torch.rand(NUM_ROWS, dtype=torch.float64, generator=generator) - 0.5) * largest).to(dtype)

    def contents(widths: Sequence[int]) -> dict[str, Content]:
        table, state, column = [], [], 0
        for number, width in enumerate(widths):
            box = Box((0, column), (NUM_ROWS, width))
            table.append(Part(box, torch.zeros(box.sizes)))
            state.append(Part(Box((number * NUM_ROWS,), (NUM_ROWS,)), values, mask, table_box=box))
            column += width
        size = (NUM_ROWS * len(widths),)
        return {
            "t": Content((NUM_ROWS, column), tuple(table), is_table=True),
            "s": Content(size, tuple(state), table="t"),
        }

    mask = None
    baseline = hand_made.write(tmp_path / "1", contents([3, 4, 6]))
    mask = hand_made.mask_of(range(NUM_ROWS // 2), NUM_ROWS)
    hand_made.write(tmp_path / "2", contents([13]), parent=baseline)
    assert _same(cnr.load_table(tmp_path / "2", "s"), values)

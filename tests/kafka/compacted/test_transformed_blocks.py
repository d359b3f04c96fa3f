"""Transform-coded rows in a compacted topic: blocks that are kept have other transforms than those that are written.

Each check compares every row with the live table, and rows that a save did not write with what they were before.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.kafka.compacted.test_compacted_topics import puts_that_fail
from tests.kafka.compacted.topic_jobs import compact, compacted
from tests.kafka.compacted.transformed_jobs import (
    BLOCK_ROWS,
    NUM_BLOCKS,
    NUM_ROWS,
    BlockRun,
    block_run,
    directories_of,
    shards_of,
)
from tests.quantization.test_transform_coded import DIM
from tests.quantization.test_transformed_checkpoints import FQN, RULE, train_and_compare
from tests.servers.kafka_server import Broker
from tests.support.faults import act_before, causes, failures_of, raising
from tests.support.ranks import RankPools
from torchrec_cnr.kafka.connection import KafkaLog
from torchrec_cnr.kafka.pack_targets import KeyedTarget
from torchrec_cnr.quantization import Transformed
from torchrec_cnr.quantization.packed_rows import most_bytes
from torchrec_cnr.saving import block_writer

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is"), pytest.mark.long]


def _three_saves(run: BlockRun) -> None:
    """Deltas with blocks of three steps, each of which only one delta has."""
    for number in range(3):
        run.change(2 * number, scale=0.4**number)
        run.change(2 * number + 1, scale=0.4**number)
        run.save_and_check()


def test_deltas_take_fewer_bytes(tmp_path: Path, kafka: Broker) -> None:
    """Far fewer than with 4 bits, also with the files of transforms; what is kept is not counted."""
    sizes: dict[str, list[int]] = {}
    for name, rule in (("transformed", RULE), ("4 bits", RULE.error_of)):
        with block_run(tmp_path / name, kafka, quantization=rule) as run:
            for number in range(1, 3):
                run.change(number)
                run.change(number + 2)
                delta = run.save()
                sent = [pack for pack in delta.manifest.packs if pack.name.startswith(delta.manifest.save_id)]
                sizes.setdefault(name, []).append(sum(pack.num_bytes for pack in sent))
                assert {number, number + 2} == run.written_blocks
                assert name != "transformed" or shards_of(delta)
    assert all(size < 0.65 * other for size, other in zip(sizes["transformed"], sizes["4 bits"], strict=True)), sizes


@pytest.mark.parametrize("is_async", [False, True])
def test_kept_blocks_keep_their_transforms(tmp_path: Path, kafka: Broker, is_async: bool) -> None:
    """Each delta names the files of the deltas that have stored them, also after Kafka has compacted the topic."""
    with block_run(tmp_path, kafka) as run:
        for number in range(4):
            run.change(number, scale=0.4**number)
            delta = run.save_and_check(is_async=is_async)
            shards = shards_of(delta)
            assert run.written_blocks == {number}
            assert len({shard.scheme for shard in shards}) == number + 1
            assert len({shard.scheme.basis for shard in shards if isinstance(shard.scheme, Transformed)}) == 1
            earlier = {f"../step-{step}" for step in (0, *range(2, number + 1))}  # the first delta has stored none
            assert directories_of(shards, delta) - {None} == earlier
        compact(run.rows)
        run.check()


def test_a_save_of_nothing_stores_no_transform(tmp_path: Path, kafka: Broker) -> None:
    """All blocks are kept."""
    with block_run(tmp_path, kafka) as run:
        _three_saves(run)
        schemes = {shard.scheme for shard in shards_of(run.save_and_check())}
        assert run.written_blocks == set()
        assert {shard.scheme for shard in shards_of(run.save_and_check())} == schemes
        assert not list((tmp_path / "step-5").glob("*.safetensors"))


def test_what_is_chosen_suits_the_rows_that_are_written(tmp_path: Path, kafka: Broker) -> None:
    """Not those that are kept: few rows are not worth a transform, and small rows among large ones get a step."""
    with block_run(tmp_path, kafka) as run:
        for block in range(5):
            run.change(block)
        run.save_and_check()
        run.change(5, scale=1e-3)
        shards = shards_of(run.save_and_check())
        assert len({shard.scheme for shard in shards}) == 2
        few = slice(5 * BLOCK_ROWS, NUM_ROWS)
        error = (run.loaded - run.table)[few].norm(dim=1).mean()
        other = cnr.AdaptiveAsymmetric(4).choose(lambda: run.table[few], 0)
        wanted = (other.decode(other.encode(run.table[few]).codes, DIM, torch.float32) - run.table[few]).norm(dim=1)
        assert error < 1.1 * wanted.mean()


@pytest.mark.parametrize("is_async", [False, True])
def test_few_rows_are_not_worth_a_transform(tmp_path: Path, kafka: Broker, is_async: bool) -> None:
    """However many others are kept; they keep theirs."""
    with block_run(tmp_path, kafka) as run:
        for block in range(1, 6):
            run.change(block)
        run.save_and_check()
        run.change(0, scale=1e-3, num_rows=20)
        shards = run.save_and_check(is_async=is_async).committed.tensors[FQN].shards
        num_rows = {type(shard.scheme): shard.rows.num_rows for shard in shards}
        assert num_rows == {type(RULE.error_of): 20, Transformed: NUM_ROWS - BLOCK_ROWS}


def test_exact_rows_of_kept_blocks(tmp_path: Path, kafka: Broker) -> None:
    """They are counted, and come back."""
    with block_run(tmp_path, kafka) as run:
        run.change(0)
        run.table[3, 4], run.table[4] = float("nan"), 1e9
        run.tracker.mark("users", torch.tensor([3, 4]))
        assert run.save_and_check().num_exact_rows == 2
        run.change(1, scale=0.3)
        assert run.save_and_check().num_exact_rows == 2
        loaded = run.load()
        assert torch.equal(loaded[4], run.table[4])
        assert bool(loaded[3, 4].isnan())


def test_a_process_that_resumes_keeps_blocks(tmp_path: Path, kafka: Broker) -> None:
    """With the transforms of the process before it; it learns one of its own."""
    with block_run(tmp_path, kafka) as run:
        _three_saves(run)
        bases = {shard.scheme.basis for shard in shards_of(run.head) if isinstance(shard.scheme, Transformed)}
        run.restart()
        run.change(0, scale=0.5)
        shards = shards_of(run.save_and_check())
        assert run.written_blocks == {0}
        assert bases < {shard.scheme.basis for shard in shards if isinstance(shard.scheme, Transformed)}


def test_prunes_keep_the_transforms_of_kept_blocks(tmp_path: Path, kafka: Broker) -> None:
    """Deltas and all else that they contain are removed."""
    with block_run(tmp_path, kafka) as run:
        for number in range(5):
            run.change(number, scale=0.4**number)
            run.save_and_check()
            cnr.execute(cnr.plan_prune(tmp_path, cnr.Keep(last=1), row_log=run.rows))
            run.check()
        names = sorted(path.parent.name for path in tmp_path.glob("*/manifest.json"))
        assert names == ["step-0", "step-5"]
        assert all(len(list((tmp_path / f"step-{step}").iterdir())) == 1 for step in range(2, 5))
        run.planner = cnr.CNRSavePlanner(run.tracker, policy=cnr.Full())
        run.save_and_check()
        cnr.execute(cnr.plan_prune(tmp_path, cnr.Keep(last=1), row_log=run.rows))
        assert [path.name for path in tmp_path.glob("step-*")] == ["step-6"]
        run.planner = cnr.CNRSavePlanner(run.tracker, policy=cnr.OneShot())
        run.change(0)
        assert directories_of(shards_of(run.save_and_check()), run.head) <= {None, "../step-6"}


@pytest.mark.parametrize("prunes", [False, True])
def test_a_head_that_was_compacted(tmp_path: Path, kafka: Broker, prunes: bool) -> None:
    """It is a baseline then. If it still has rows in the topic, which later saves overwrite, the next is one, too."""
    with block_run(tmp_path, kafka) as run:
        _three_saves(run)
        cnr.compact(run.head.store.url, row_log=run.rows, self_contained=prunes)
        run.check()
        if prunes:
            cnr.execute(cnr.plan_prune(tmp_path, cnr.Keep(last=1), row_log=run.rows))
        run.change(0)
        assert run.save_and_check().kind == ("delta" if prunes else "baseline")
        run.change(1)
        run.save_and_check()
        compact(run.rows)
        run.check()


def test_blocks_whose_transforms_are_gone_are_written_again(
    tmp_path: Path, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if none of the files were in a root where prunes know that they are needed."""
    with block_run(tmp_path, kafka) as run:
        _three_saves(run)
        monkeypatch.setattr("torchrec_cnr.saving.planned_save.transforms_of", lambda *_: {})
        run.change(0)
        shards = shards_of(run.save_and_check())
        assert run.written_blocks == set(range(NUM_BLOCKS))
        assert directories_of(shards, run.head) == {None}


def test_a_head_that_is_not_the_newest_is_not_pruned_during_a_save(tmp_path: Path, kafka: Broker) -> None:
    """A save has a lease on it, since it may name its transforms."""
    with block_run(tmp_path, kafka) as run:
        _three_saves(run)
        run.go_on_from("step-3")  # so that no block is written again
        run.change(0)
        run.save_and_check()
        run.go_on_from("step-3")
        run.change(1)

        def prune() -> None:
            assert cnr.execute(cnr.plan_prune(tmp_path, cnr.Keep(last=1), row_log=run.rows)).removed
            assert (tmp_path / "step-3" / "manifest.json").exists()

        act_before(run.writer, "finish", prune)
        run.save_and_check()
        assert "../step-3" in directories_of(shards_of(run.head), run.head)


def test_no_commit_names_a_file_that_was_removed(tmp_path: Path, kafka: Broker) -> None:
    """The checkpoint before stays the newest, and can be loaded."""
    with block_run(tmp_path, kafka) as run:
        _three_saves(run)
        run.change(0)
        moved = tmp_path / "moved"
        act_before(run.writer, "finish", lambda: shutil.move(tmp_path / "step-2", moved))
        head = run.head
        with pytest.raises(CheckpointException) as raised:
            run.save()
        assert "step-2" in str(causes(raised.value)[0])
        shutil.move(moved, tmp_path / "step-2")
        assert cnr.latest(tmp_path, row_log=run.rows) == head.store.url
        compact(run.rows)
        assert torch.equal(run.load(), run.loaded)
        delattr(run.writer, "finish")
        run.save_and_check()


def test_a_block_of_more_values_than_a_blob_may_have(
    tmp_path: Path, kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stored as several blobs in one data file, and kept as such."""
    monkeypatch.setattr(block_writer, "MAX_VALUES", 200 * DIM)
    with block_run(tmp_path, kafka) as run:
        run.change(0)
        run.change(5)
        (shard,) = shards_of(run.save_and_check())
        assert len(shard.blobs) == 3 + 3
        assert len({blob.pack for blob in shard.blobs}) == 2
        run.change(1)
        run.save_and_check()
        assert run.written_blocks == {1}
        run.change(0, scale=0.3)
        run.save_and_check(is_async=True)
        assert run.written_blocks == {0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_data_file_is_larger_than_the_tombstones_cover(
    tmp_path: Path, kafka: Broker, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large numbers and exact rows; and also if the coder took the most bits for all, and all rows were exact."""
    sizes: list[tuple[int, int]] = []
    put = KeyedTarget.put

    def put_and_look(target: KeyedTarget, name: str, parts: Sequence[Any]) -> Any:
        sizes.append((sum(len(bytes(part)) for part in parts), target.most_bytes))
        return put(target, name, parts)

    monkeypatch.setattr(KeyedTarget, "put", put_and_look)
    with block_run(tmp_path, kafka, dtype) as run:
        run.change(0)
        run.table[: BLOCK_ROWS // 2] *= 3_000 if dtype is torch.bfloat16 else 1_000
        run.table[BLOCK_ROWS // 2 : BLOCK_ROWS] = float("nan")
        run.tracker.mark("users", torch.arange(BLOCK_ROWS))
        run.save()
    assert len(sizes) == 1
    most = most_bytes(BLOCK_ROWS, DIM) + BLOCK_ROWS * (DIM * dtype.itemsize + 4)
    assert all(size <= most <= covered for size, covered in sizes), (sizes, most)


STEPS = ("save", "save", "behind", "fail", "half", "restart", "compact", "prune")
CHANGES = st.lists(
    st.tuples(
        st.integers(0, NUM_BLOCKS - 1), st.sampled_from((1.0, 1.0, 0.3, 4.0)), st.sampled_from((BLOCK_ROWS, 90, 5))
    ),
    min_size=1,
    max_size=3,
)


def _take(run: BlockRun, step: str) -> None:
    match step:
        case "save" | "behind":
            run.save_and_check(is_async=step == "behind")
        case "fail" | "half":
            head = run.head
            with pytest.MonkeyPatch.context() as patch:
                if step == "fail":
                    patch.setattr(KafkaLog, "mark", raising("mark"))
                    failures_of(run.save)
                else:
                    with puts_that_fail(1):
                        try:
                            run.save()
                        except CheckpointException:
                            run.head = head
            run.head = cnr.read_checkpoint(str(cnr.latest(run.root, row_log=run.rows)))
            run.loaded = run.load() if run.head != head else run.loaded
        case "restart":
            run.restart()
        case "compact":
            compact(run.rows)
            assert torch.equal(run.load(), run.loaded)
        case "prune":
            cnr.execute(cnr.plan_prune(run.root, cnr.Keep(last=1), row_log=run.rows))
            assert torch.equal(run.load(), run.loaded)


@settings(
    max_examples=3,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=st.lists(st.tuples(CHANGES, st.sampled_from(STEPS)), max_size=9))
def test_the_newest_checkpoint_holds_all_rows(
    tmp_path_factory: pytest.TempPathFactory,
    kafka: Broker,
    steps: Sequence[tuple[Sequence[tuple[int, float, int]], str]],
) -> None:
    """Whatever changes, is saved, fails, starts again, and is compacted and pruned."""
    with block_run(tmp_path_factory.mktemp("run"), kafka) as run:
        for changes, step in (*steps, ([(0, 1.0, BLOCK_ROWS), (3, 0.3, BLOCK_ROWS)], "save"), ([], "compact")):
            for block, scale, num_rows in changes:
                run.change(block, scale, num_rows)
            _take(run, step)
        assert any(isinstance(shard.scheme, Transformed) for shard in run.head.committed.tensors[FQN].shards)


def test_a_subscriber_follows(tmp_path: Path, kafka: Broker) -> None:
    """Its rows are those of the newest checkpoint, which it reads from the topic and from the files of transforms."""
    with block_run(tmp_path, kafka) as run:
        served = nn.ModuleDict({"users": nn.EmbeddingBag(NUM_ROWS, DIM)})
        with cnr.RowSubscriber(served, tmp_path, row_log=run.rows, interval_secs=600) as subscriber:
            for number in range(3):
                run.change(number, scale=0.4**number)
                run.save_and_check()
                subscriber.update()
                assert torch.equal(served.get_parameter("users.weight"), run.loaded)


@pytest.mark.parametrize("is_async", [False, True])
def test_ranks_with_shards_of_all_kinds(tmp_path: Path, kafka: Broker, rank_pool: RankPools, is_async: bool) -> None:
    """Tables, rows and columns on two ranks; optimizer state and the dense part are exact."""
    rows = compacted(kafka, row_block_bytes=1_000 * 32)
    assert rank_pool(2).run(train_and_compare, str(tmp_path), is_async, rows) == [[], []]
    entries = cnr.read_checkpoint(tmp_path / "step-2").committed.tensors.values()
    assert any(isinstance(shard.scheme, Transformed) for entry in entries for shard in entry.shards)

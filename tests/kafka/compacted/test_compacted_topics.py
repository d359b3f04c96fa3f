"""Rows in a compacted topic that the broker really compacts: what is committed can be loaded, and no more stays."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

import torchrec_cnr as cnr
from tests.kafka.compacted.topic_jobs import PART_BYTES, TopicJob, compact, compacted, live
from tests.servers.kafka_server import Broker
from tests.support import faults, models
from tests.support.models import differing, plain_job, whole
from torchrec_cnr.errors import DamagedError
from torchrec_cnr.kafka.pack_targets import KeyedTarget
from torchrec_cnr.saving.row_blocks import BlockKey

pytestmark = pytest.mark.long


def test_a_compacted_topic_holds_the_newest_checkpoint(run: TopicJob) -> None:
    """After many saves the broker has removed most records, and the newest checkpoint loads bit for bit."""
    for _ in range(6):
        run.train()
        run.commit()
    before, after = compact(run.row_log)
    assert after < before
    run.check()
    fresh = whole(models.state(plain_job(99, "rowwise_adagrad"), place=-1))
    assert differing(fresh, run.committed)


def test_blocks_that_were_not_touched_are_taken_over(run: TopicJob) -> None:
    """A save writes the row blocks that were touched since the head, and names packs of earlier saves for others."""
    for _ in range(4):
        run.train()
        run.commit()
    saves = {pack.name.split("-")[0] for pack in run.packs()}
    assert len(saves) > 1
    before = {pack.name for pack in run.packs()}
    run.commit()  # nothing was trained
    assert {pack.name for pack in run.packs()} == before
    compact(run.row_log)
    run.check()


def test_a_failed_save_overwrites_nothing_that_is_committed(run: TopicJob) -> None:
    """Records of a save that died before its marker take the place of no record that the head needs."""
    run.train()
    run.commit()
    for _ in range(3):
        run.train()
        run.fail()
    before, after = compact(run.row_log)
    assert after < before
    run.check()
    run.commit()
    compact(run.row_log)
    run.check()


def test_without_slots_a_failed_save_would_destroy_the_head(run: TopicJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test before relies on them: with one slot, compaction removes what the head needs, and a load says so."""
    run.train()
    run.commit()
    free = BlockKey.free
    monkeypatch.setattr(BlockKey, "free", lambda *args: replace(free(*args), slot=0))
    run.train()
    run.fail()
    compact(run.row_log)
    with pytest.raises(CheckpointException) as raised:
        run.load()
    assert any(isinstance(error, DamagedError) for error, _ in raised.value.failures.values())


STEPS = st.lists(
    st.sampled_from(("train", "save", "save", "fail", "half", "restart", "compact", "behind")), max_size=14
)


@contextmanager
def puts_that_fail(num: int) -> Iterator[None]:
    """Packs of row blocks, but for the first ones, are not written."""
    put, count = KeyedTarget.put, iter(range(num))

    def put_or_fail(*args: Any) -> Any:
        if next(count, None) is None:
            raise faults.InjectedError("no more")
        return put(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeyedTarget, "put", put_or_fail)
        yield


@settings(
    max_examples=3,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=STEPS, num_puts=st.integers(0, 6), optimizer=st.sampled_from(("sgd", "rowwise_adagrad")))
def test_the_newest_checkpoint_is_what_was_committed_last(
    tmp_path_factory: pytest.TempPathFactory, kafka: Broker, steps: Sequence[str], num_puts: int, optimizer: str
) -> None:
    """Whatever trains, saves, fails, starts again and is compacted: the newest checkpoint equals the perfect model."""
    run = TopicJob(tmp_path_factory.mktemp("run"), compacted(kafka), optimizer=optimizer)
    run.commit()
    for step in (*steps, "train", "fail", "compact"):
        match step:
            case "save":
                run.train()
                run.commit()
            case "half":
                run.train()
                with puts_that_fail(num_puts):
                    run.fail()
            case "behind":
                run.train()
                run.commit(asynchronously=True)
            case "compact":
                compact(run.row_log)
                run.check()
            case "restart":
                run.restart(2, place=-1)
            case _:
                getattr(run, step)()
    run.check()
    run.close()


def test_the_topic_does_not_grow(run: TopicJob) -> None:
    """However many saves, no more than two packs of each row block are there, and no part of any other."""
    num_blocks = 10 + 3  # of both tables
    for _ in range(15):
        run.train()
        run.commit()
    compact(run.row_log)
    slots = {key.rsplit(b"/", 1)[0] for key in live(run.row_log)}
    assert len({slot.rsplit(b"/", 1)[0] for slot in slots}) == num_blocks
    assert num_blocks < len(slots) <= 2 * num_blocks
    run.check()
    used = {str(pack.log and pack.log.key).encode() for pack in run.packs()}
    assert used < slots


def test_a_smaller_pack_leaves_no_parts_of_a_larger_one(run: TopicJob) -> None:
    """Tombstones take the place of what an earlier pack of the same slot had besides."""
    target = run.row_log.target("0" * 16, 0, True)
    key = target.keyed("0/t/1x0/0", 10 * PART_BYTES)  # type: ignore[union-attr] - the topic is compacted
    key.put("large.safetensors", [bytes(5 * PART_BYTES)])
    assert len(live(run.row_log)) == 5
    key.put("small.safetensors", [bytes(2 * PART_BYTES)])
    assert sorted(live(run.row_log)) == [b"0/t/1x0/0/0", b"0/t/1x0/0/1"]


def test_a_new_baseline_removes_the_rows_before_it(run: TopicJob) -> None:
    """Once a baseline is committed, nothing is left of the rows of older deltas; and the next deltas are right."""
    for _ in range(4):
        run.train()
        run.commit()
    assert live(run.row_log)
    run.commit(cnr.CNRSavePlanner(run.tracker, policy=cnr.Full()))
    assert live(run.row_log) == []
    compact(run.row_log)
    run.check()
    run.planner = cnr.CNRSavePlanner(run.tracker, policy=cnr.OneShot())
    for _ in range(2):
        run.train()
        run.commit()
    compact(run.row_log)
    run.check()

"""Asynchronous saves with the stock ``dcp.async_save``: what training does behind them is in the next checkpoint."""

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torchrec_cnr as cnr
from tests.simulator.leaks import allocated_bytes
from tests.support import faults, models
from tests.support.models import Job, Whole, differing, plain_job, state, torchrec_job, train, whole
from tests.support.ranks import RankPools
from torchrec_cnr.format import manifest_json
from torchrec_cnr.kernels.cpu import compiling
from torchrec_cnr.saving.staged_values import StagingBuffer, StagingBuffers
from torchrec_cnr.throttling import CpuThrottle

POLICIES = [cnr.Full(), cnr.OneShot(), cnr.Consecutive(), cnr.Intermittent(), cnr.Compacted()]
EXECUTORS = [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS]


def _build(kind: str, seed: int) -> Job:
    return torchrec_job(seed) if kind == "torchrec" else plain_job(seed, kind)


def _save_while_training(
    rank: int,
    root: str,
    kind: str,
    policy: cnr.Policy,
    executor: AsyncCheckpointerType,
    num_saves: int,
    staging_bytes: int = 1 << 30,
) -> list[tuple[Whole, str]]:
    """Train and save; what each save was of, and of what kind its checkpoint is."""
    job = _build(kind, seed=1)
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker, policy=policy)
    writer = models.writer(root, staging_bytes=staging_bytes)
    group = dist.new_group(backend="gloo")
    cuts, futures = [], []
    for number in range(num_saves):
        train(job, number)
        cuts.append(whole(state(job)))
        place = f"{root}/{number}"
        futures.append(models.save_behind(state(job), place, writer, planner, group=group, executor=executor))
        train(job, 1000 + number)
        assert differing(cuts[-1], whole(state(job)))
    for future in futures:
        future.result(timeout=100)
    planner.resolve_last_save()
    assert tracker.head is not None
    assert tracker.head.ref.path == f"{root}/{num_saves - 1}"
    writer.close()
    tracker.close()
    return [(cut, cnr.read_checkpoint(f"{root}/{number}").kind) for number, cut in enumerate(cuts)]


def _check(rank: int, root: str, kind: str, cuts: list[tuple[Whole, str]]) -> None:
    target = _build(kind, seed=2)
    for number, (cut, _) in enumerate(cuts):
        assert differing(models.load(target, f"{root}/{number}"), cut) == []


def _cells() -> Iterator[Any]:
    """Every policy with TorchRec's tables, and some with those of ``torch.optim``; all in the slow run."""
    for kind in ("torchrec", "sgd", "adagrad"):
        for policy in POLICIES:
            for executor in EXECUTORS:
                is_common = isinstance(policy, cnr.Consecutive | cnr.Compacted)
                is_slow = not is_common and (kind != "torchrec" or executor is AsyncCheckpointerType.PROCESS)
                name = f"{kind}-{type(policy).__name__}-{executor.value}"
                yield pytest.param(kind, policy, executor, id=name, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize(("kind", "policy", "executor"), list(_cells()))
def test_a_checkpoint_is_of_the_moment_of_its_cut(
    tmp_path: Path, rank_pool: RankPools, kind: str, policy: cnr.Policy, executor: AsyncCheckpointerType
) -> None:
    """Training goes on at once; each checkpoint holds what was there when ``async_save`` was called, bit for bit."""
    ranks = rank_pool(2 if kind == "torchrec" else 1)
    found = ranks.run(_save_while_training, str(tmp_path), kind, policy, executor, 5)
    kinds = [kind for _, kind in found[0]]
    assert kinds[0] == "baseline"
    assert ("delta" in kinds) != isinstance(policy, cnr.Full)
    ranks.run(_check, str(tmp_path), kind, found[0])


@pytest.mark.parametrize("staging_bytes", [0, 700, 2_000])
def test_training_waits_for_what_exceeds_the_budget(tmp_path: Path, rank_pool: RankPools, staging_bytes: int) -> None:
    """Tables that must not be copied are written before training goes on."""
    ranks = rank_pool(2)
    executor = AsyncCheckpointerType.THREAD
    found = ranks.run(_save_while_training, str(tmp_path), "torchrec", cnr.Consecutive(), executor, 4, staging_bytes)
    assert [kind for _, kind in found[0]] == ["baseline", "delta", "delta", "delta"]
    ranks.run(_check, str(tmp_path), "torchrec", found[0])


# While a save is under way


def _save_while_busy(rank: int, root: str, when_busy: Any) -> tuple[list[int | None], int]:
    """Ask for a second save while rank 0 is held up in the first, and for a third afterwards: which were taken."""
    job = torchrec_job(1)
    tracker = cnr.RowTracker(job.model)
    saved: list[cnr.Saved] = []
    manager = cnr.CheckpointManager(
        root, tracker, policy=cnr.Consecutive(), background=cnr.Background(when_busy=when_busy), on_saved=saved.append
    )
    train(job, 1)
    manager.save(1, lambda: state(job))
    held, writer = threading.Event(), manager._writer
    original = writer.write_data

    def hold(plan: Any, planner: Any) -> Any:
        held.wait(30 if rank == 0 else 0)
        return original(plan, planner)

    faults.replace_method(writer, "write_data", hold)
    train(job, 2)
    manager.async_save(2, lambda: state(job))
    train(job, 3)
    answers: list[Any] = []
    threading.Timer(1.0, held.set).start()
    began = time.monotonic()
    try:
        answers.append(manager.async_save(3, lambda: state(job)))
    except cnr.SaveError as error:
        answers.append(str(error))
    waited = time.monotonic() - began
    assert (waited > 0.5) == (when_busy == "wait")
    held.set()
    dist.barrier()
    manager.wait()
    train(job, 4)
    end = whole(state(job))
    answers.append(manager.async_save(4, lambda: state(job)))
    manager.close()
    tracker.close()
    assert differing(models.load(torchrec_job(2), f"{root}/step-4"), end) == []
    return [answer if isinstance(answer, str) or answer is None else "saved" for answer in answers], len(saved)


@pytest.mark.parametrize(
    ("when_busy", "answers", "num_saved"),
    [
        ("wait", ["saved", "saved"], 4),
        ("skip", [None, "saved"], 3),
        ("fail", ["step 3: the previous save is still running; a later save includes all rows", "saved"], 3),
    ],
)
def test_what_becomes_of_a_save_while_another_is_under_way(
    tmp_path: Path, rank_pool: RankPools, when_busy: str, answers: list[Any], num_saved: int
) -> None:
    """It waits, is skipped, or fails, on all ranks alike; rows that were skipped are in the next one."""
    found = rank_pool(2).run(_save_while_busy, str(tmp_path), when_busy)
    assert found == [(answers, num_saved)] * 2


def test_two_trackers_of_one_state_are_refused(tmp_path: Path) -> None:
    """DCP does not say which planner a state is staged for: both have one, and neither is guessed at."""
    job = plain_job(1)
    trackers = [cnr.RowTracker(job.model) for _ in range(2)]
    planners = [cnr.CNRSavePlanner(tracker) for tracker in trackers]
    writer = models.writer(tmp_path / "0")
    future = dcp.async_save(state(job), storage_writer=writer, planner=planners[0])
    refused = faults.failure_of(lambda: future.result())  # type: ignore[union-attr]
    assert isinstance(refused, cnr.ConfigurationError)
    assert "2 trackers that have a planner" in str(refused)
    trackers[1].close()
    dcp.async_save(state(job), storage_writer=writer, planner=planners[0]).result()  # type: ignore[union-attr]
    assert differing(models.load(plain_job(2), str(tmp_path / "0")), whole(state(job))) == []
    trackers[0].close()


def test_rows_are_not_staged_for_another_planner(tmp_path: Path) -> None:
    """A tracked state that is saved with a planner that knows no tracker: refused behind training, not before it."""
    job = plain_job(1)
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker)
    for other in (None, cnr.CNRSavePlanner()):
        future = dcp.async_save(state(job), storage_writer=models.writer(tmp_path / "0"), planner=other)
        with pytest.raises(CheckpointException) as raised:
            future.result()  # type: ignore[union-attr]
        assert all(isinstance(cause, cnr.ConfigurationError) for cause in faults.causes(raised.value).values())
    writer = models.writer(tmp_path / "1")
    dcp.async_save(state(job), storage_writer=writer, planner=planner).result()  # type: ignore[union-attr]
    dcp.save(state(job), checkpoint_id=str(tmp_path / "2"), storage_writer=writer)
    for name in ("1", "2"):
        assert differing(models.load(plain_job(2), str(tmp_path / name)), whole(state(job))) == []
    tracker.close()


def test_new_writers_use_the_memory_of_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many jobs make a writer for each save. Another tracker's saves have memory of their own; closing frees it."""
    taken: list[tuple[int, int]] = []
    take = StagingBuffers.take

    def spy(buffers: StagingBuffers, *args: Any, **options: Any) -> StagingBuffer:
        buffer = take(buffers, *args, **options)
        taken.append((id(buffers), buffer._memory.data_ptr()))
        return buffer

    monkeypatch.setattr(StagingBuffers, "take", spy)
    jobs = [plain_job(seed) for seed in (1, 2)]
    trackers = [cnr.RowTracker(job.model) for job in jobs]
    writers = []
    for number, (job, tracker) in enumerate([*zip(jobs, trackers, strict=True)] * 3):
        train(job, 1)
        writers.append(models.writer(tmp_path / str(number)))
        planner = cnr.CNRSavePlanner(tracker, policy=cnr.Full())
        dcp.async_save(state(job), storage_writer=writers[-1], planner=planner).result()  # type: ignore[union-attr]
        assert differing(models.load(plain_job(3), str(tmp_path / str(number))), whole(state(job))) == []
    assert taken[0] == taken[2] == taken[4] != taken[1] == taken[3] == taken[5]
    buffers = StagingBuffers.of(trackers[0])
    assert [len(buffer._memory) > 0 for buffer, _ in buffers._buffers] == [True]
    writers[0].close()
    assert buffers._buffers == []
    for tracker in trackers:
        tracker.close()


@pytest.mark.long
def test_a_share_of_a_core_is_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work rests as long as its share asks for, and not at all where it has the whole core."""
    rests: list[float] = []
    lifted = threading.Event()
    monkeypatch.setattr(lifted, "wait", rests.append)
    for share, least in ((0.25, 0.6), (1.0, None)):
        rests.clear()
        pace, worked = CpuThrottle(share, lifted), time.thread_time()
        while time.thread_time() - worked < 0.21:
            sum(range(10_000))
            pace.rest()
        assert sum(rests) >= least if least is not None else rests == []
    for share in (0.0, -1.0, 1.1):
        with pytest.raises(cnr.ConfigurationError, match="'cpu_share'"):
            cnr.CNRStorageWriter("nowhere", cpu_share=share)


def test_a_save_behind_training_encodes_in_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that training waits for takes as many as torch has."""
    asked_for: list[int] = []
    original = compiling._pool.of

    def of(num_threads: int) -> Any:
        asked_for.append(num_threads)
        return original(num_threads)

    monkeypatch.setattr(compiling._pool, "of", of)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    model = torch.nn.EmbeddingBag(10_000, 16)
    tracker = cnr.RowTracker(model)
    planner = cnr.CNRSavePlanner(tracker)
    writer = models.writer(tmp_path / "0", quantization={"*": cnr.Asymmetric(8)})
    future = dcp.async_save({"model": model.state_dict()}, storage_writer=writer, planner=planner)
    future.result()  # type: ignore[union-attr]
    assert asked_for == []
    dcp.save({"model": model.state_dict()}, checkpoint_id=str(tmp_path / "1"), storage_writer=writer)
    assert asked_for
    tracker.close()


def test_a_profile_names_the_phases(tmp_path: Path) -> None:
    """A trace of training shows what a save does, and when."""
    job = plain_job(1)
    tracker = cnr.RowTracker(job.model)
    planner = cnr.CNRSavePlanner(tracker)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dcp.save(state(job), storage_writer=models.writer(tmp_path / "0"), planner=planner)
        future = dcp.async_save(state(job), storage_writer=models.writer(tmp_path / "1"), planner=planner)
    future.result()  # type: ignore[union-attr]
    names = {event.name for event in profile.events()}
    assert {f"torchrec_cnr.{phase}" for phase in ("stage", "encode", "commit")} <= names
    tracker.close()


def _footprint() -> tuple[int, int, float, float]:
    """Open files, threads, MiB allocated and MiB resident of this process, whose save's thread may be about to end."""
    time.sleep(0.02)
    manifest_json.forget()  # parsed manifests are kept, up to a bound
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident_mib = pages * resource.getpagesize() / (1 << 20)
    return len(os.listdir("/proc/self/fd")), threading.active_count(), allocated_bytes() / (1 << 20), resident_mib


def _save_many_rows(rank: int, root: str, num_saves: int) -> list[tuple[int, int, float, float]]:
    """What this process holds after each of some saves of 400,000 rows."""
    for _ in range(2_500):  # PyTorch's flight recorder keeps the last 2,000 collectives of a group
        dist.barrier()
    job = plain_job(1, rows=(400_000, 12), dims=(16, 3))
    with closing(cnr.RowTracker(job.model)) as tracker:
        planner = cnr.CNRSavePlanner(tracker, policy=cnr.Consecutive())
        writer = models.writer(root, quantization=cnr.Asymmetric(4))
        held = []
        for number in range(num_saves):
            train(job, number)
            tracker.mark("bag", torch.arange(400_000))
            models.save_behind(state(job), f"{root}/{number}", writer, planner).result(timeout=100)
            held.append(_footprint())
        planner.resolve_last_save()
        assert tracker.head is not None
        assert tracker.head.ref.path == f"{root}/{num_saves - 1}"
        writer.close()
    return held


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_saves_of_many_rows_keep_nothing(tmp_path: Path, rank_pool: RankPools) -> None:
    """As many files and threads, and as much memory, as after the tenth: nothing waits for a garbage collection.

    What malloc keeps free goes up and down by the rows that a save stages. Two copies of these are allowed; one that
    each save left would be 190.
    """
    (held,) = rank_pool(1).run(_save_many_rows, str(tmp_path), 200, timeout_secs=800.0)
    files, threads, allocated_mib, resident_mib = zip(*held[9:], strict=True)
    assert min(files[-10:]) <= min(files[:10])
    assert min(threads[-10:]) <= min(threads[:10])
    assert min(allocated_mib[-10:]) < max(allocated_mib[:10]) + 1, allocated_mib
    assert min(resident_mib[-10:]) < max(resident_mib[:10]) + 2 * 25, resident_mib

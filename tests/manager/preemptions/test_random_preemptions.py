"""Jobs that a signal stops at random moments go on bit for bit: samples, weights and random numbers, on all ranks."""

import os
import random
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torchrec_cnr as cnr
from tests.support.counted_samples import BATCH, PIPELINES, CountedSamples, batches_of
from tests.support.killing import in_child

NUM_SAMPLES, WORLD_SIZE = 600, 2
NUM_STEPS = NUM_SAMPLES // WORLD_SIZE // BATCH
NUM_STOPS = 7  # with each pipeline
SEED = 5


class _Stop(NamedTuple):
    """When a signal comes: at a step of a rank, so many microseconds after its begin."""

    rank: int
    step: int
    micros: int


class _Lived(NamedTuple):
    """What a life of a rank did: its steps, random numbers after each, exit status, and the counts of its samples."""

    steps: Sequence[int]
    drawn: Sequence[tuple[float, ...]]
    exit_status: int
    counts: Sequence[int]


def _drawn() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def _live(rank: int, root: str, group: str, pipeline: str, life: int, stop: _Stop | None) -> _Lived:
    """Resume, and train until told to stop, or to the end of the data."""
    dist.init_process_group(
        "gloo", init_method=f"file://{group}", rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=60)
    )
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(SEED + 100 * life + rank)  # what a restore must replace
    job, reader = (
        CountedSamples(NUM_SAMPLES),
        cnr.ReaderState(lambda first: batches_of(rank, WORLD_SIZE, NUM_SAMPLES, first)),
    )
    state: dict[str, Any] = {"model": job.model.state_dict(), "reader": reader, "random": cnr.RandomState()}
    manager = cnr.CheckpointManager(
        root, cnr.RowTracker(job.model), every_steps=3, preemption=cnr.Preemption(), quantization=None
    )
    step = manager.restore(state) or 0
    timers, steps, drawn = [], [], []
    batches = reader.train(job.pipeline(pipeline))
    while True:
        if stop is not None and (rank, step + 1) == (stop.rank, stop.step):
            timers.append(threading.Timer(stop.micros / 1e6, os.kill, (os.getpid(), signal.SIGTERM)))
            timers[-1].start()
        if next(batches, None) is None:
            break
        step += 1
        steps.append(step)
        drawn.append(_drawn())
        manager.async_save(step, state)
        if manager.should_stop:
            break
    for timer in timers:
        timer.join()
    manager.close()
    return _Lived(steps, drawn, manager.exit_status, job.counts())


def _life(folder: Path, pipeline: str, life: int, stop: _Stop | None) -> list[_Lived]:
    folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor(WORLD_SIZE) as threads:
        place = str(folder / "root"), str(folder / f"group-{life}")
        lives = [threads.submit(in_child, _live, rank, *place, pipeline, life, stop) for rank in range(WORLD_SIZE)]
        found = [lived.result(timeout=100) for lived in lives]
    assert not any(isinstance(lived, int) for lived in found), found
    return [lived for lived in found if isinstance(lived, _Lived)]


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_preempted_jobs_go_on_bit_for_bit(tmp_path: Path, pipeline: str) -> None:
    """Each sample is trained once, and the numbers drawn are those of a job that nothing stopped."""
    expected = _life(tmp_path / "whole", pipeline, 0, None)
    assert [lived.steps for lived in expected] == [list(range(1, NUM_STEPS + 1))] * WORLD_SIZE
    rng = random.Random(pipeline)
    lives: list[list[_Lived]] = []
    step = 0
    while step < NUM_STEPS:
        stop = None
        if len(lives) < NUM_STOPS:
            stop = _Stop(rng.randrange(WORLD_SIZE), step + rng.randrange(1, 7), rng.randrange(5_000))
        lives.append(_life(tmp_path / "stopped", pipeline, len(lives), stop))
        steps = {lived.steps[-1] for lived in lives[-1]}
        assert len(steps) == 1, "all ranks stop at the same step"
        step = steps.pop()
    assert [lived.exit_status for life in lives for lived in life] == [143] * NUM_STOPS * WORLD_SIZE + [0] * WORLD_SIZE
    for rank in range(WORLD_SIZE):
        assert [number for life in lives for number in life[rank].steps] == list(range(1, NUM_STEPS + 1))
        assert [drawn for life in lives for drawn in life[rank].drawn] == expected[rank].drawn
        assert lives[-1][rank].counts == expected[rank].counts == [1] * len(expected[rank].counts)

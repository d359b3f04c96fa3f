"""Training lost when all ranks of a job are killed at random moments, and whether it continues bit for bit."""

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.support.jobs.killed_job import RESTORED, Line, log_of
from benchmarks.support.registry import Benchmark
from benchmarks.support.report import Figure, Report, Table
from benchmarks.support.rounds import Setup

NUM_RANKS, NUM_ROWS, NUM_QUICK_ROWS = 2, 20_000, 500
NUM_KILLS, NUM_QUICK_KILLS = 50, 1
EVERY_SECS = 0.75
MIN_SECS, MAX_SECS = 0.0, 6.0  # from the first step to the kill
START_SECS = 120.0
MAX_LOST_SECS = 1.0
_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Restart:
    """What a job restored after a kill.

    Attributes:
        lost_secs: Seconds of training before the kill that the restored checkpoint lacks.
        num_lost: Number of steps that it lacks.
        step_secs: The median time of a step of the run that was killed.
        is_equal: Whether every rank restored the state that training had at this step.
    """

    lost_secs: float
    num_lost: int
    step_secs: float
    is_equal: bool


def run(setup: Setup) -> Report:
    """Start a job, kill all its ranks, and start it again."""
    num_kills = NUM_QUICK_KILLS if setup.quick else NUM_KILLS
    generator = random.Random(0)
    restarts, num_repeated = [], 0
    killed_at = _killed(setup, generator)
    for number in range(num_kills):
        before = [Line.all_of(log_of(setup.folder, rank)) for rank in range(NUM_RANKS)]
        next_killed_at = _killed(setup, generator)
        after = [Line.all_of(log_of(setup.folder, rank)) for rank in range(NUM_RANKS)]
        new = [lines[len(old) :] for old, lines in zip(before, after, strict=True)]
        restarts.append(_restart(before, new, killed_at))
        num_repeated += _checked_steps(before, new)
        last = restarts[-1]
        setup.say(f"kill {number + 1}: lost {last.num_lost} steps, {last.lost_secs:.2f} s")
        killed_at = next_killed_at
    beyond_step = [each.lost_secs - each.step_secs for each in restarts]
    return Report(
        title=f"{num_kills} kills of all {NUM_RANKS} ranks of a job with a local checkpoint every {EVERY_SECS} s",
        notes=(
            f"Between {MIN_SECS:.0f} and {MAX_SECS:.0f} s after a step, by SIGKILL; the moments are drawn at random.",
            "Lost is the time from the end of the restored step to the kill. The states that are",
            "restored, and those after steps that are trained again, are compared with what was lost.",
        ),
        figures=(
            Figure("training lost by a kill, at most, less a step", max(beyond_step), "s", at_most=MAX_LOST_SECS),
            Figure.over_rounds("training lost by a kill", [each.lost_secs for each in restarts], "s"),
            Figure("restores with another state", sum(not each.is_equal for each in restarts), "", at_most=0),
        ),
        tables=(
            Table(
                ("kills", "steps lost, mean", "most", "states of ranks compared"),
                (
                    (
                        str(num_kills),
                        f"{sum(each.num_lost for each in restarts) / num_kills:.1f}",
                        str(max(each.num_lost for each in restarts)),
                        f"{num_repeated:,}",
                    ),
                ),
            ),
        ),
    )


def _killed(setup: Setup, generator: random.Random) -> float:
    """Start the job, kill it some time after it has trained a step, and return when."""
    num_lines = len(Line.all_of(log_of(setup.folder, 0)))
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    rows = NUM_QUICK_ROWS if setup.quick else NUM_ROWS
    options = [f"--folder={setup.folder}", f"--rows={rows}", f"--every-secs={EVERY_SECS}"]
    job = subprocess.Popen(
        [sys.executable, "-m", *launcher, "-m", "benchmarks.support.jobs.killed_job", *options],
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + START_SECS
        while len(Line.all_of(log_of(setup.folder, 0))) < num_lines + 2:
            if job.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the job has trained no step")
            time.sleep(0.02)
        time.sleep(generator.uniform(MIN_SECS, MAX_SECS))
        return time.time()
    finally:
        _kill_all(job)


def _kill_all(job: "subprocess.Popen[bytes]") -> None:
    """Kill the ranks first, which torchrun has put into sessions of their own, and then torchrun."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    for pid in [*map(int, children.read_text().split()), job.pid] if children.exists() else [job.pid]:
        os.kill(pid, signal.SIGKILL)
    job.wait()


def _restart(before: Sequence[Sequence[Line]], new: Sequence[Sequence[Line]], killed_at: float) -> Restart:
    restored = [lines[0] for lines in new]
    assert all(line.kind == RESTORED and line.step == restored[0].step for line in restored)
    step = restored[0].step
    # The last of the lines of a step, since it may have been trained several times.
    lines = [next((line for line in reversed(old) if line.step == step), None) for old in before]
    of_last_run = _last_run(before[0])
    ends = [line.secs for line in of_last_run]
    step_secs = [end - start for start, end in pairwise(ends[1:])]
    return Restart(
        lost_secs=killed_at - (ends[0] if lines[0] is None else lines[0].secs),
        num_lost=of_last_run[-1].step - step,
        step_secs=statistics.median(step_secs) if step_secs else 0.0,
        is_equal=all(
            old is not None and old.digest == found.digest for old, found in zip(lines, restored, strict=True)
        ),
    )


def _last_run(lines: Sequence[Line]) -> Sequence[Line]:
    first = max(number for number, line in enumerate(lines) if line.kind == RESTORED)
    return lines[first:]


def _checked_steps(before: Sequence[Sequence[Line]], new: Sequence[Sequence[Line]]) -> int:
    """Compare the steps that were trained again with what they gave before, and return their number.

    Raises:
        AssertionError: A step gave another state.
    """
    num_checked = 0
    for old, lines in zip(before, new, strict=True):
        digests = {line.step: line.digest for line in old}
        for line in lines:
            if line.step in digests:
                assert line.digest == digests[line.step], f"step {line.step} gave another state"
                num_checked += 1
    return num_checked


BENCHMARK = Benchmark(run, "training lost when all ranks are killed at random moments", is_long=True)

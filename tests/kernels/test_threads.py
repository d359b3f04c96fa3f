"""Threads of kernels: all rows are done once, errors come out when nothing runs any more, and forks have their own."""

import os
import threading
import time

import pytest
import torch

from torchrec_cnr.kernels.cpu.compiling import in_parallel


@pytest.fixture(autouse=True)
def _four_threads() -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(num_threads)


def test_every_row_is_done_once() -> None:
    """The ranges handed out make up all rows, without overlaps, and several threads take part."""
    ranges: list[tuple[int, int]] = []
    threads: set[int] = set()

    def work(start: int, stop: int) -> None:
        ranges.append((start, stop))
        threads.add(threading.get_ident())
        time.sleep(0.05)

    in_parallel(work, 10_000, chunk_rows=1)
    assert [row for start, stop in sorted(ranges) for row in range(start, stop)] == list(range(10_000))
    assert len(threads) > 1


def test_nothing_runs_once_an_error_has_come_out() -> None:
    """An error in one range is raised when all other ranges are done."""
    done: list[int] = []

    def work(start: int, stop: int) -> None:
        if start == 0:
            raise ValueError("the first range")
        time.sleep(0.1)
        done.append(start)

    with pytest.raises(ValueError, match="the first range"):
        in_parallel(work, 4, chunk_rows=1)
    assert sorted(done) == [1, 2, 3]


def test_a_child_of_a_fork_has_threads_of_its_own() -> None:
    """After the parent has used its threads, a forked child works too."""
    in_parallel(lambda start, stop: time.sleep(0.1), 4, chunk_rows=1)  # so long that no thread does two ranges
    child = os.fork()
    if child == 0:
        done: list[int] = []
        in_parallel(lambda start, stop: done.extend(range(start, stop)), 8, chunk_rows=1)
        os._exit(0 if sorted(done) == list(range(8)) else 1)
    for _ in range(100):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.1)
    os.kill(child, 9)
    pytest.fail("the child hangs")

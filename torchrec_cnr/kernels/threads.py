"""Threads for compiled kernels, which release the interpreter's lock: as many as torch uses.

numba's own parallel loops are not used: its portable threading layer ends the process when two Python threads enter it
at once, as a save in the background and a load may, and none of its layers survives a fork for certain.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import pairwise

import torch


class _Pool:
    """The pool of this process: threads do not survive a fork, and a child makes its own."""

    def __init__(self) -> None:
        self._made: tuple[int, int, ThreadPoolExecutor] | None = None  # by which process, for how many threads

    def of(self, num_threads: int) -> ThreadPoolExecutor:
        made = self._made
        if made is None or made[0] != os.getpid() or made[1] < num_threads:
            executor = ThreadPoolExecutor(num_threads, thread_name_prefix="torchrec_cnr-kernel")
            self._made = made = (os.getpid(), num_threads, executor)
        return made[2]


_pool = _Pool()


class _Callers(threading.local):
    """What holds for the calling thread."""

    is_alone = False


_callers = _Callers()


@contextmanager
def one_thread() -> Iterator[None]:
    """Kernels that this thread calls run in it, and in no other: for work that must leave the cores to training."""
    _callers.is_alone = True
    try:
        yield
    finally:
        _callers.is_alone = False


def in_parallel(work: Callable[[int, int], None], num_rows: int, chunk_rows: int = 1024) -> None:
    """Call ``work(start, stop)`` for ranges that together are all rows, one of them in the calling thread.

    Args:
        work: Must not depend on how the rows are divided.
        num_rows: How many there are.
        chunk_rows: At least, for a thread: with fewer, waking it takes longer than the work.
    """
    num_threads = 1 if _callers.is_alone else torch.get_num_threads()
    num_chunks = max(1, min(num_threads, num_rows // chunk_rows))
    bounds = [num_rows * number // num_chunks for number in range(num_chunks + 1)]
    if num_chunks == 1:
        work(0, num_rows)
        return
    executor = _pool.of(num_chunks - 1)
    others = [executor.submit(work, start, stop) for start, stop in pairwise(bounds[1:])]
    try:
        work(bounds[0], bounds[1])
    finally:
        wait(others)  # nothing is written any more when this returns or raises
    for other in others:
        other.result()

"""Threads for compiled kernels, which release the interpreter's lock: as many as torch uses.

numba's own parallel loops are not used: its portable threading layer ends the process when two Python threads enter it
at once, as a save in the background and a load may, and none of its layers survives a fork for certain.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch


class _Pool:
    """The pool of this process: threads do not survive a fork, and a child makes its own."""

    def __init__(self) -> None:
        self.process_id = 0
        self.num_threads = 0
        self.executor: ThreadPoolExecutor | None = None

    def of(self, num_threads: int) -> ThreadPoolExecutor:
        if self.executor is None or self.process_id != os.getpid() or self.num_threads < num_threads:
            self.process_id, self.num_threads = os.getpid(), num_threads
            self.executor = ThreadPoolExecutor(num_threads, thread_name_prefix="torchrec_cnr-kernel")
        return self.executor


_pool = _Pool()


def in_parallel(work: Callable[[int, int], None], num_rows: int, chunk_rows: int = 1024) -> None:
    """Call ``work(start, stop)`` for ranges that together are all rows, one of them in the calling thread.

    Args:
        work: Must not depend on how the rows are divided.
        num_rows: How many there are.
        chunk_rows: At least, for a thread: with fewer, waking it takes longer than the work.
    """
    num_chunks = max(1, min(torch.get_num_threads(), num_rows // chunk_rows))
    bounds = [num_rows * number // num_chunks for number in range(num_chunks + 1)]
    if num_chunks == 1:
        work(0, num_rows)
        return
    executor = _pool.of(num_chunks - 1)
    others = [executor.submit(work, start, stop) for start, stop in pairwise(bounds[1:])]
    try:
        work(bounds[0], bounds[1])
    finally:
        for other in others:
            other.result()

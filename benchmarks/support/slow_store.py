"""A store with a latency for each request, whose bandwidth all processes share."""

import fcntl
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torchrec_cnr.testing import FaultyStore
from torchrec_cnr.testing.faults import Operation

ResultT = TypeVar("ResultT")

_FREE_AT = struct.Struct("<d")  # the time at which all bytes so far have been sent, on the clock of the machine


class SlowStore(FaultyStore):
    """A directory behind a slow connection.

    Args:
        root: The directory.
        latency_secs: The latency of a request.
        bytes_per_sec: The bandwidth of all processes together.

    Attributes:
        num_read_bytes: Bytes that this process has read.
        num_requests: Requests of this process.
        is_slow: Whether requests take time.
    """

    def __init__(self, root: Path, latency_secs: float, bytes_per_sec: float) -> None:
        super().__init__(root, name="slow")
        self.num_read_bytes = 0
        self.num_requests = 0
        self.is_slow = False
        self._latency_secs = latency_secs
        self._bytes_per_sec = bytes_per_sec
        self._line = root.with_name(f"{root.name}.line")

    def do(self, operation: Operation, act: Callable[[bool], ResultT]) -> ResultT | None:
        """Do an operation in the time that it takes."""
        if self.is_slow:
            time.sleep(self._latency_secs)
        result = act(False)
        num_bytes = len(result) if isinstance(result, bytes) else operation.num_bytes
        if self.is_slow:
            self._send(num_bytes)
        with self._lock:
            self.num_requests += 1
            self.num_read_bytes += num_bytes if operation.kind == "read" else 0
        return result

    def _send(self, num_bytes: int) -> None:
        descriptor = os.open(self._line, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            stored = os.pread(descriptor, _FREE_AT.size, 0)
            free_at = max(time.monotonic(), _FREE_AT.unpack(stored)[0] if stored else 0.0)
            free_at += num_bytes / self._bytes_per_sec
            os.pwrite(descriptor, _FREE_AT.pack(free_at), 0)
        finally:
            os.close(descriptor)
        time.sleep(max(0.0, free_at - time.monotonic()))

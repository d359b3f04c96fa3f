"""Resident memory of this process: now, and at its peak."""

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path


def peak_mib(act: Callable[[], object]) -> float:
    """How far this process's resident memory rises while something is done; Linux counts it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts anew, from now
    before_mib = resident_mib()
    act()
    return max(0.0, resident_mib("VmHWM") - before_mib)


def resident_mib(field: str = "VmRSS") -> float:
    """This process's resident memory now, or at its highest since the last peak was asked for (``VmHWM``)."""
    found = re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {field}; this benchmark needs Linux")
    return int(found[1]) / 1024

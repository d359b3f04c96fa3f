"""Resident memory of this process: now, and at its peak."""

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path


def peak_mib(act: Callable[[], object]) -> float:
    """Run a function, and return by how many MiB the peak of resident memory exceeds the memory before (Linux only)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before_mib = resident_mib()
    act()
    return max(0.0, resident_mib("VmHWM") - before_mib)


def resident_mib(field: str = "VmRSS") -> float:
    """Return this process's resident memory in MiB, now or at its peak since the last reset (``VmHWM``)."""
    found = re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {field}; this benchmark needs Linux")
    return int(found[1]) / 1024

"""What schedules must not leave in this process: errors that keep what callers hold, registries, threads, memory."""

import ctypes
import gc
import os
import sys
import time
from collections.abc import Sized
from dataclasses import dataclass
from types import TracebackType

from tests.simulator.engine import disk_calls, storage
from tests.simulator.engine.scheduler import FindingError
from torchrec_cnr.errors import CNRError
from torchrec_cnr.format import manifest_json

NUM_WARM_UP = 100  # schedules, after which nothing grows
MIN_SCHEDULES = 300  # for which it is looked
MAX_GROWN_BYTES = 2 << 20  # after 100 schedules it grows by 0.5 MB, most of it by the first 4,000 of 8,000
MAX_GROWN_BLOCKS = 5_000  # differs by up to 1,000
_LIBRARY = ("torchrec_cnr.", "tests.simulator.mutants.")
_PATIENCE_SECS = 2.0  # for a thread that has done its work to be gone


def check_errors() -> None:
    """No error is in a variable of the library's that its own traceback has: without a collection, both stay.

    Called when a schedule has ended, while nothing collects garbage.

    Raises:
        FindingError: One is.
    """
    for found in gc.get_objects():
        if isinstance(found, CNRError) and (where := _own_variable(found, found.__traceback__)) is not None:
            raise FindingError("an error keeps itself", f"{type(found).__name__} in {where}: {found}")


def _own_variable(error: CNRError, trace: TracebackType | None) -> str | None:
    while trace is not None:
        frame = trace.tb_frame
        if str(frame.f_globals.get("__name__")).startswith(_LIBRARY):
            for name, value in frame.f_locals.items():
                if value is error:
                    return f"{name!r} of {frame.f_code.co_qualname}"
        trace = trace.tb_next
    return None


@dataclass(frozen=True)
class Resources:
    """What this process has.

    Attributes:
        num_threads: Real threads.
        num_files: File descriptors.
        registries: How many entries the containers have that modules of the library have, and objects in these modules.
        num_bytes: Bytes that the C allocator has given out. What it keeps of freed memory depends on the order of
            requests: resident memory grows by megabytes, and stays there.
        num_blocks: Blocks that Python's own allocator has given out.
    """

    num_threads: int
    num_files: int
    registries: dict[str, int]
    num_bytes: int
    num_blocks: int

    @classmethod
    def now(cls, most_threads: int | None = None) -> "Resources":
        """At this moment; threads that are about to end are waited for until there are no more than so many."""
        storage.open_objects(None)  # the store of the last schedule has what is left of its tasks
        disk_calls.open_disk(None)
        until = time.monotonic() + _PATIENCE_SECS
        while (num_threads := len(os.listdir("/proc/self/task"))) > (most_threads or num_threads):
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        manifest_json._KNOWN.clear()  # it is bounded
        gc.unfreeze()
        gc.collect()  # after the threads, which hold what they worked with until they are gone
        num_files = len(os.listdir("/proc/self/fd"))
        return cls(num_threads, num_files, _registries(), allocated_bytes(), sys.getallocatedblocks())

    def grown(self, before: "Resources") -> list[str]:
        """What there is more of than before, but for a little memory."""
        found = [
            f"{name}: {size} entries, before {before.registries.get(name, 0)}"
            for name, size in self.registries.items()
            if size > before.registries.get(name, 0)
        ]
        if self.num_threads > before.num_threads:
            found.append(f"{self.num_threads} threads, before {before.num_threads}")
        if self.num_files > before.num_files:
            found.append(f"{self.num_files} files, before {before.num_files}")
        if self.num_bytes > before.num_bytes + MAX_GROWN_BYTES:
            found.append(f"{self.num_bytes:,} bytes of memory, before {before.num_bytes:,}")
        if self.num_blocks > before.num_blocks + MAX_GROWN_BLOCKS:
            found.append(f"{self.num_blocks:,} blocks of memory, before {before.num_blocks:,}")
        return found

    def __str__(self) -> str:
        entries = sum(self.registries.values())
        memory = f"{self.num_bytes / (1 << 20):.1f} MB, {self.num_blocks:,} blocks"
        return f"{self.num_threads} threads, {self.num_files} files, {entries} entries, {memory}"


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc, whose numbers are sums over all arenas."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


def allocated_bytes() -> int:
    """Bytes that this process has allocated by ``malloc`` and not freed."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallocInfo
    numbers = mallinfo2().numbers
    mapped, in_arenas = numbers[4], numbers[7]
    return int(mapped + in_arenas)


def _registries() -> dict[str, int]:
    """Sizes of what modules of the library keep, by name: containers, those in objects and classes, and caches."""
    found: dict[str, int] = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("torchrec_cnr."):
            for attribute, value in list(vars(module).items()):
                if not attribute.startswith("__"):
                    _measure(f"{name}.{attribute}", value, found, name)
    return found


def _measure(name: str, value: object, found: dict[str, int], module: str, *, is_inner: bool = False) -> None:
    if (cache := getattr(value, "cache_info", None)) is not None:
        found[name] = cache().currsize
    elif isinstance(value, Sized) and not isinstance(value, type | str | bytes | tuple):
        found[name] = len(value)
    is_own = str(getattr(value if isinstance(value, type) else type(value), "__module__", "")) == module
    if not is_inner and is_own:
        for attribute, inner in list(getattr(value, "__dict__", {}).items()):
            if not attribute.startswith("__"):
                _measure(f"{name}.{attribute}", inner, found, module, is_inner=True)

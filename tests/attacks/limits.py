"""Limits: what one input may cost its reader, whatever is in it, and which errors may come of it."""

import contextlib
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torchrec_cnr
from torchrec_cnr.errors import CNRError

MAX_SECS = 2.0
MAX_MEMORY_BYTES = 1 << 26  # beyond the input's own size
_LIBRARY = str(Path(torchrec_cnr.__file__).parent)


@dataclass(frozen=True)
class Cost:
    """What reading an input came to.

    Attributes:
        secs: Processor time of all threads.
        memory_bytes: The most memory at a time, beyond the input: what Python and NumPy allocated, or what the process
            grew by, whichever is more.
        error: What was raised that is no ``CNRError``; None if nothing was.
    """

    secs: float
    memory_bytes: int
    error: Exception | None

    @property
    def complaint(self) -> str | None:
        """Which limit was exceeded, and where an error was raised; None if all is well."""
        if self.error is not None:
            frames = traceback.extract_tb(self.error.__traceback__)
            own = [frame for frame in frames if frame.filename.startswith(_LIBRARY)] or frames
            place = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
            return f"{type(self.error).__name__} at {place}: {str(self.error)[:200]}"
        if self.secs > MAX_SECS:
            return f"more than {MAX_SECS:.0f} s of processor time"
        if self.memory_bytes > MAX_MEMORY_BYTES:
            return f"more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
        return None


def cost_of(read: Callable[[bytes], None], data: bytes) -> Cost:
    """Have an input read, and measure what that costs."""
    error = None
    with _traced():
        before_bytes, before_resident_bytes = tracemalloc.get_traced_memory()[0], _most_resident_bytes(is_anew=True)
        tracemalloc.reset_peak()
        began = time.process_time()
        try:
            read(data)
        except CNRError:
            pass
        except Exception as raised:  # noqa: BLE001 - whatever is raised is what is looked for
            error = raised
        secs = time.process_time() - began
        traced = tracemalloc.get_traced_memory()[1] - before_bytes
        grown = _most_resident_bytes() - before_resident_bytes
    return Cost(secs, max(0, max(traced, grown) - len(data)), error)


def _most_resident_bytes(is_anew: bool = False) -> int:
    """The most memory that the process has had at a time; if ``is_anew``, from now on."""
    if is_anew:
        with contextlib.suppress(OSError):  # else the peak is that since the process began
            Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


@contextlib.contextmanager
def _traced() -> Iterator[None]:
    is_tracing = tracemalloc.is_tracing()
    if not is_tracing:
        tracemalloc.start()
    try:
        yield
    finally:
        if not is_tracing:
            tracemalloc.stop()

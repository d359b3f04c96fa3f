"""Compilation of CPU kernels, and the threads that run them.

numba caches the machine code of a kernel next to its source, or in the user's cache directory. It checks only the file
that defines the kernel to decide whether this code is still valid, but kernels call functions from all files of the
package. Cached code is therefore keyed by the digest of all these files, so that an upgrade never runs old code. And
it is kept in files whose names say what they hold, see `CodeFiles`.

Kernels release the GIL and run in as many threads as torch uses. numba's own parallel loops are not used, because its
portable threading layer ends the process if two Python threads enter it at once. A background save and a load may do
so. None of numba's threading layers is safe after a fork.
"""

import hashlib
import logging
import os
import pickle
import platform
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from llvmlite.binding import get_host_cpu_features
from numba import njit
from numba.core import config
from numba.core.caching import IndexDataCacheFile
from numba.core.cpu import CPUTargetOptions
from numba.core.event import Event, Listener, register

from torchrec_cnr.errors import ConfigurationError

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 32

# Kernels allocate nothing, so numba need not count references. It does so with atomic instructions, for each array at
# each call of a function, which took a third of the time. The option is not public, and may be missing.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
if hasattr(CPUTargetOptions, "_nrt"):
    _OPTIONS["_nrt"] = False


def named(function: Callable[..., None], suffix: int) -> Callable[..., None]:
    """Give one of several functions that a factory makes a unique name, before it is compiled.

    numba distinguishes functions of the same name and signature by a counter of the process. Kernels that different
    processes compiled could therefore call the wrong functions.
    """
    function.__qualname__ += f"_{suffix}"
    return function


class CodeFiles(IndexDataCacheFile):
    """The files with the machine code of one kernel: one for each signature, CPU and state of the sources.

    numba numbers these files, and keeps the numbers in an index. Two processes that compile a kernel for two dtypes at
    once may both take the next number. A later process would then run the code of the other dtype.
    """

    def save(self, key: Any, data: Any) -> None:
        """Write the code for a key, and remove what was compiled from other sources."""
        path = self._path_of(key)
        for other in path.parent.glob(f"{self._base}.*"):
            if other.suffix in (".nbc", ".nbi") and not other.name.startswith(f"{self._base}.{self._sources}."):
                other.unlink(missing_ok=True)
        content = self._dump(data)
        with self._open_for_write(str(path)) as file:
            file.write(hashlib.sha256(content).digest() + content)

    def load(self, key: Any) -> Any:
        """Return the code for a key; None if there is none, or if its file is damaged."""
        try:
            content = self._path_of(key).read_bytes()
        except OSError:
            return None
        digest, content = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        return pickle.loads(content) if hashlib.sha256(content).digest() == digest else None

    def _path_of(self, key: Any) -> Path:
        digest = hashlib.sha256(repr((self._version, key)).encode()).hexdigest()[:16]
        return Path(self._cache_path, f"{self._base}.{self._sources}.{digest}.nbc")

    @property
    def _base(self) -> str:
        return self._index_name.removesuffix(".nbi")

    @property
    def _sources(self) -> str:
        return self._source_stamp[:16]


class Kernel:
    """A compiled function, which runs without the GIL.

    It is compiled at its first call for each dtype, which takes some seconds; later processes load the cached code. If
    the code cannot be cached (no directory is writable, or a disk is full), every process compiles it again.

    Args:
        function: The function to compile.

    Raises:
        ConfigurationError: When called, if numba compiles for a CPU that cannot convert fp16. Otherwise LLVM would end
            the process.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.__doc__ = function.__doc__
        self._name = f"{function.__module__}.{function.__name__}"
        try:
            self._compiled = njit(**_OPTIONS, cache=True)(function)
            cache = self._compiled._cache  # not public in numba: tested
            cache._cache_file = CodeFiles(cache.cache_path, cache._impl.filename_base, _sources_digest())
        except RuntimeError as error:
            self._tell(error)
            self._compiled = njit(**_OPTIONS)(function)
        _notice.kernels.add(self._compiled)

    def __call__(self, *args: Any) -> None:
        """Run the kernel with the arguments of the function."""
        _check_cpu()
        try:
            self._compiled(*args)
        except OSError as error:
            self._tell(error)
            self._compiled(*args)  # the first call has compiled it, and failed only to cache it

    def _tell(self, error: Exception) -> None:
        logger.warning("%s is compiled again by every process, because its code cannot be kept: %s", self._name, error)


class _Notice(Listener):
    """Logs that kernels are being compiled: once per process, because the first save of a machine waits for it."""

    def __init__(self) -> None:
        self.kernels: WeakSet[Any] = WeakSet()
        self._is_given = False

    def on_start(self, event: Event) -> None:
        """Log the notice before the first kernel is compiled. numba also calls this for the code of others."""
        if not self._is_given and event.data["dispatcher"] in self.kernels:
            self._is_given = True
            logger.warning(
                "compiling kernels for CPUs, which takes ten seconds to a minute; later processes load them from a "
                "cache"
            )

    def on_end(self, event: Event) -> None:
        """Do nothing: other kernels may follow."""


_notice = _Notice()
register("numba:compile", _notice)


@cache
def _sources_digest() -> str:
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


@cache
def _check_cpu() -> None:
    features = get_host_cpu_features().flatten() if config.CPU_FEATURES is None else config.CPU_FEATURES
    if platform.machine() in ("x86_64", "AMD64") and "+f16c" not in features:
        raise ConfigurationError(
            f"numba compiles for a CPU without F16C (name {config.CPU_NAME!r}, features {features[:80]!r}); if it has "
            "that, say so by NUMBA_CPU_NAME and NUMBA_CPU_FEATURES=+f16c,+avx2, or store with NoQuantization"
        )


class _Pool:
    """The thread pool of this process."""

    def __init__(self) -> None:
        self._made: tuple[int, ThreadPoolExecutor] | None = None  # with its number of threads

    def of(self, num_threads: int) -> ThreadPoolExecutor:
        size_and_executor = self._made
        if size_and_executor is None or size_and_executor[0] < num_threads:
            executor = ThreadPoolExecutor(num_threads, thread_name_prefix="torchrec_cnr-kernel")
            self._made = size_and_executor = (num_threads, executor)
        return size_and_executor[1]

    def forget(self) -> None:
        """Drop the pool in a child after a fork: its threads do not survive, so the child creates its own pool."""
        self._made = None


_pool = _Pool()
os.register_at_fork(after_in_child=_pool.forget)


class _Callers(threading.local):
    """State of the calling thread."""

    is_alone = False


_callers = _Callers()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run kernels only in the calling thread, for work that must leave the other cores to training."""
    _callers.is_alone = True
    try:
        yield
    finally:
        _callers.is_alone = False


def in_parallel(work: Callable[[int, int], None], num_rows: int, chunk_rows: int = 1024) -> None:
    """Call ``work(start, stop)`` for ranges that together cover all rows, one of them in the calling thread.

    Args:
        work: The function to call. Its results must not depend on how the rows are divided.
        num_rows: Number of rows.
        chunk_rows: The fewest rows for a thread; with fewer, waking it takes longer than the work.
    """
    num_threads = 1 if _callers.is_alone else torch.get_num_threads()
    num_chunks = max(1, min(num_threads, num_rows // chunk_rows))
    bounds = [num_rows * number // num_chunks for number in range(num_chunks + 1)]
    if num_chunks == 1:
        work(0, num_rows)
        return
    executor = _pool.of(num_chunks - 1)
    futures = [executor.submit(work, start, stop) for start, stop in pairwise(bounds[1:])]
    try:
        work(bounds[0], bounds[1])
    finally:
        wait(futures)  # so that no thread writes any more after this function returns or raises
    for future in futures:
        future.result()

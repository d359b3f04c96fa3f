"""Compiled once: numba keeps the machine code of a kernel beside its source, or in the user's cache directory.

numba tells from the one file that a kernel stands in whether what it kept is still right, but kernels are made of
functions from all files of this folder. What is kept therefore bears the digest of them all: no upgrade runs old code.
"""

import hashlib
import logging
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite.binding import get_host_cpu_features
from numba import njit
from numba.core import config
from numba.core.cpu import CPUTargetOptions

from torchrec_cnr.errors import ConfigurationError

logger = logging.getLogger(__name__)

# Kernels allocate nothing, so that no references need to be counted: numba does that by locked instructions, for each
# array at each call of a function, and they took a third of the time. The option is not public, and may be missing.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
if hasattr(CPUTargetOptions, "_nrt"):
    _OPTIONS["_nrt"] = False


def named(function: Callable[..., None], suffix: int) -> Callable[..., None]:
    """Give one of several functions that a factory makes a name of its own, before it is compiled.

    numba tells functions of one name and signature apart by a number that each process counts for itself. Kernels that
    different processes compiled would therefore take one another's.
    """
    function.__qualname__ += f"_{suffix}"
    return function


class Kernel:
    """A compiled function; it runs with the interpreter's lock released.

    It is compiled at its first call for each dtype, which takes some seconds, and loaded by later processes. Where its
    code cannot be kept (nothing is writable, or a disk is full), every process compiles for itself.

    Args:
        function: What to compile.

    Raises:
        ConfigurationError: When called, if numba compiles for a CPU that cannot convert fp16: LLVM would end it all.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.__doc__ = function.__doc__
        self._name = f"{function.__module__}.{function.__name__}"
        try:
            self._compiled = njit(**_OPTIONS, cache=True)(function)
            self._compiled._cache._cache_file._source_stamp = _sources_digest()  # not public in numba: tested
        except RuntimeError as error:
            self._tell(error)
            self._compiled = njit(**_OPTIONS)(function)

    def __call__(self, *args: Any) -> None:
        """Run it; the arguments are the function's."""
        _check_cpu()
        try:
            self._compiled(*args)
        except OSError as error:
            self._tell(error)
            self._compiled(*args)  # it is compiled by now

    def _tell(self, error: Exception) -> None:
        logger.warning("%s is compiled anew by every process, because its code cannot be kept: %s", self._name, error)


@cache
def _sources_digest() -> str:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


@cache
def _check_cpu() -> None:
    features = get_host_cpu_features().flatten() if config.CPU_FEATURES is None else config.CPU_FEATURES
    if platform.machine() in ("x86_64", "AMD64") and "+f16c" not in features:
        raise ConfigurationError(
            f"numba compiles for a CPU without F16C (name {config.CPU_NAME!r}, features {features[:80]!r}); if it has "
            "that, say so by NUMBA_CPU_NAME and NUMBA_CPU_FEATURES=+f16c,+avx2, or store with NoQuantization"
        )

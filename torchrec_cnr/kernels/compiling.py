"""Compiled once: numba keeps the machine code of a kernel beside its source, or in the user's cache directory."""

import logging
from collections.abc import Callable
from typing import Any

from numba import njit

logger = logging.getLogger(__name__)


class Kernel:
    """A compiled function; it runs with the interpreter's lock released.

    It is compiled at its first call for each dtype, which takes some seconds, and loaded by later processes. Where its
    code cannot be kept (nothing is writable, or a disk is full), every process compiles for itself.

    Args:
        function: What to compile.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.__doc__ = function.__doc__
        self._name = f"{function.__module__}.{function.__name__}"
        try:
            self._compiled = njit(nogil=True, error_model="numpy", cache=True)(function)
        except RuntimeError as error:
            self._tell(error)
            self._compiled = njit(nogil=True, error_model="numpy")(function)

    def __call__(self, *args: Any) -> None:
        """Run it; the arguments are the function's."""
        try:
            self._compiled(*args)
        except OSError as error:
            self._tell(error)
            self._compiled(*args)  # it is compiled by now

    def _tell(self, error: Exception) -> None:
        logger.warning("%s is compiled anew by every process, because its code cannot be kept: %s", self._name, error)

"""The roots that this process has a manager for: two would save under the same names, and prune each other's work."""

import os
from weakref import WeakValueDictionary

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.human_text import url_text
from torchrec_cnr.storage.urls import without_client


class OpenRoots:
    """Managers that are open, by root; a forked process has none."""

    def __init__(self) -> None:
        self._managers: WeakValueDictionary[tuple[int, str], object] = WeakValueDictionary()

    def enter(self, root: str, manager: object) -> None:
        """A manager is made for a root.

        Raises:
            ConfigurationError: Another one is open.
        """
        if self._managers.setdefault(_key(root), manager) is not manager:
            raise ConfigurationError(
                f"{url_text(root)}: this process has a manager for this root already: close that one first, or give "
                "each model a root of its own"
            )

    def leave(self, root: str, manager: object) -> None:
        """A manager is closed."""
        if self._managers.get(_key(root)) is manager:
            del self._managers[_key(root)]


def _key(root: str) -> tuple[int, str]:
    return os.getpid(), without_client(root)


open_roots = OpenRoots()

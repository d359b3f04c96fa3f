"""The roots that this process has a manager for.

Two managers of one root would save under the same names, and each would prune the other's checkpoints.
"""

import os
from weakref import WeakValueDictionary

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.human_text import url_text
from torchrec_cnr.storage.urls import without_client


class OpenRoots:
    """The open managers of this process, by root. A forked process starts with none."""

    def __init__(self) -> None:
        self._managers: WeakValueDictionary[tuple[int, str], object] = WeakValueDictionary()

    def enter(self, root: str, manager: object) -> None:
        """Register the manager of a root.

        Raises:
            ConfigurationError: Another manager of this root is open.
        """
        if self._managers.setdefault(_key(root), manager) is not manager:
            raise ConfigurationError(
                f"{url_text(root)}: this process already has a manager for this root; close that one first, or use a "
                "separate root for each model"
            )

    def leave(self, root: str, manager: object) -> None:
        """Remove the manager of a root, if it is registered."""
        if self._managers.get(_key(root)) is manager:
            del self._managers[_key(root)]


def _key(root: str) -> tuple[int, str]:
    return os.getpid(), without_client(root)


open_roots = OpenRoots()

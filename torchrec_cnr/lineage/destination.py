"""The directory in which a checkpoint will be saved, and why it may not be saved there.

If the root is listed once, its names answer most questions: whether the directory exists, whether the root is itself a
checkpoint, and which fences there are.
"""

import logging
import math
import posixpath
from dataclasses import dataclass

from torchrec_cnr.errors import CheckpointExistsError, ConfigurationError, StoreError
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.human_text import url_text
from torchrec_cnr.lineage.latest import committed_ns
from torchrec_cnr.storage.files import Listing
from torchrec_cnr.storage.store import Store

_DCP_METADATA = ".metadata"  # commits a checkpoint in DCP's own format


@dataclass(frozen=True)
class Destination:
    """The directory of a new checkpoint.

    Attributes:
        store: The directory.
        root: Content of its root, before the save; None if it was not listed.
    """

    store: Store
    root: Listing | None = None

    @classmethod
    def of(cls, store: Store, lists_root: bool) -> "Destination":
        """Return a destination; with ``lists_root``, list its root, unless the store refuses that.

        A root may have many more files than those of this library. So list it only for jobs that do so anyway.
        """
        if not lists_root:
            return cls(store)
        try:
            return cls(store, store.at("..").listing())
        except StoreError:  # it may be forbidden to read there, or be no place for files
            return cls(store)

    @property
    def is_new(self) -> bool:
        """Whether it is known that the directory does not exist."""
        return self.root is not None and posixpath.basename(self.store.path) not in self.root.names

    def refuse_nesting(self) -> None:
        """Refuse to save where a checkpoint would hide others, or be hidden by one.

        Raises:
            ConfigurationError: The directory is a root that contains checkpoints, or lies in a checkpoint.
        """
        if not self.is_new and contains_checkpoints(self.store):
            raise ConfigurationError(
                f"{url_text(self.store.url)} is a root that contains checkpoints; save in a new directory in it, such "
                f"as {url_text(self.store.url)}/step-1"
            )
        if self.root is not None and MANIFEST_FILE not in self.root.files:
            return
        outer = self.store.at("..")
        try:
            is_inside = is_committed(outer)
        except StoreError:
            return
        if is_inside:
            raise ConfigurationError(
                f"{url_text(outer.url)} is a checkpoint, which cannot contain another one (got "
                f"{url_text(self.store.url)}); save in another directory"
            )

    def refuse_other_format(self) -> None:
        """Refuse to save over a checkpoint of DCP's own writer.

        Raises:
            CheckpointExistsError: There is one.
            StoreError: The store does not answer.
        """
        self._refuse(_DCP_METADATA, "contains a checkpoint in DCP's own format; save under another checkpoint_id")

    def refuse_committed(self) -> None:
        """Refuse to save over a committed checkpoint.

        Raises:
            CheckpointExistsError: There is one.
            StoreError: The store does not answer.
        """
        advice = "save under another checkpoint_id, or with a manager, at another step"
        self._refuse(MANIFEST_FILE, f"already contains a committed checkpoint; {advice}")

    def _refuse(self, name: str, problem: str) -> None:
        if not self.is_new and self.store.exists(name):
            raise CheckpointExistsError(f"{self.store.url} {problem}")


def contains_checkpoints(store: Store) -> bool:
    """Return whether a directory contains committed checkpoints; false if it cannot be listed."""
    try:
        return any(is_committed(store.at(name)) for name in store.listing().directories)
    except StoreError:
        return False


def is_committed(store: Store) -> bool:
    """Return whether a directory has a manifest of this library, not some other file of that name."""
    at_ns = committed_ns(store, logging.DEBUG)
    return at_ns is not None and math.isfinite(at_ns)

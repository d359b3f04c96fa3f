"""The interface of row logs: Kafka topics that hold rows of deltas instead of files, and commit records.

A row log takes packs, as a directory does, and markers. If the store of a checkpoint has a log, the checkpoint's marker
commits it: the writer appends the marker when everything else of the checkpoint is durable, and only then gives the
manifest its name. So a reader of the log sees only committed checkpoints, in the order of their commits. A reader of
directories sees the same checkpoints a moment later.

A log keeps either all packs for a limited time, or the newest pack of each row block forever; see ``row_blocks``.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from torchrec_cnr.errors import ConfigurationError
from torchrec_cnr.storage.files import Buffer
from torchrec_cnr.storage.urls import without_client

if TYPE_CHECKING:  # stores need no torch
    from torchrec_cnr.format.manifest import LogRange, Pack


@dataclass(frozen=True)
class Marker:
    """The commit record of a checkpoint.

    Attributes:
        root: :func:`root_id` of the root's URL, since several roots can share a log.
        name: Name of the checkpoint's directory in its root.
        save_id: Id of the save that wrote the checkpoint.
        sha256: SHA-256 digest of the checkpoint's manifest.
        parent_sha256: SHA-256 digest of its parent's manifest; None for a baseline.
        created_ns: Unix time of the commit, in nanoseconds.
        offset: Position among the markers of the log, which are in the order of their commits; -1 before it is written.
    """

    root: str
    name: str
    save_id: str
    sha256: str
    parent_sha256: str | None
    created_ns: int
    offset: int = -1


def root_id(url: str) -> str:
    """Return a short name for a root, made from its URL. URLs that differ only in the client have the same name."""
    return hashlib.sha256(without_client(url).encode()).hexdigest()[:16]


class PackTarget(Protocol):
    """A place that packs are written to: a directory or a log."""

    def put(self, name: str, parts: Sequence[Buffer]) -> "LogRange | None":
        """Write a pack whose name no other writer uses. Return its place in the log, or None for a file."""
        ...


@runtime_checkable
class BlockTarget(Protocol):
    """A log that packs of row blocks are written to."""

    @property
    def owner(self) -> str:
        """Prefix of the keys of the records that this rank writes."""
        ...

    def keyed(self, key: str, most_bytes: int) -> PackTarget:
        """Return the target for a pack that replaces the earlier pack with the same key.

        Args:
            key: Prefix of the keys of the pack's records.
            most_bytes: Largest size of any pack with that key, in bytes.
        """
        ...


class RowLog(Protocol):
    """A log of rows and markers; it can be pickled.

    Roots are given by their :func:`root_id`. Methods raise a ``StoreError`` if the log does not answer in time.
    """

    @property
    def topic(self) -> str:
        """Name of the log in manifests."""
        ...

    @property
    def block_bytes(self) -> int | None:
        """Bytes of values in a row block, if the log keeps only the newest pack of each; None if it keeps all packs."""
        ...

    def open(self, *, may_make: bool) -> bool:
        """Validate the log's configuration; create the log if it is missing and ``may_make`` is true.

        Raises:
            ConfigurationError: The log's configuration would lose rows.
        """
        ...

    def target(self, root: str, rank: int, is_coordinator: bool = False) -> PackTarget | BlockTarget:
        """Return the target of one rank for one save. All ranks call this before any of them writes.

        Args:
            root: Root of the checkpoint.
            rank: Rank of the process.
            is_coordinator: Whether this rank will commit the checkpoint.
        """
        ...

    def read(self, name: str, num_bytes: int, place: "LogRange", start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a pack from ``start`` to ``stop``.

        Raises:
            DamagedError: Records of the pack are missing, duplicated or out of order.
        """
        ...

    def holds(self, packs: "Sequence[Pack]") -> bool:
        """Return whether the log still has packs of one or several checkpoints, judging by the oldest and the newest.

        It does not have them if it has removed them, has lost its last part, or was created again.
        """
        ...

    def begin(self, root: str) -> None:
        """Begin a save that will end with a marker.

        From now on, the log rejects markers of earlier writers for this root.
        """
        ...

    def mark(self, marker: Marker, check: Callable[[], None]) -> None:
        """Commit a checkpoint by its marker.

        Args:
            marker: Marker of the checkpoint.
            check: Raises an error if this job may not commit. Called if another writer has begun a save since.

        Raises:
            StoreError: The marker was not written, or it is unknown whether it was.
        """
        ...

    def forget(self, root: str, packs: "Sequence[Pack]") -> None:
        """Remove packs by their keys, including newer packs with these keys. Call it right after :meth:`mark`.

        Raises:
            FencedError: Another job writes markers for this root now.
            StoreError: The packs were not removed.
        """
        ...

    def markers_from(self, offset: int, timeout_secs: float) -> tuple[Marker, ...]:
        """Return the markers from an offset on, waiting up to ``timeout_secs`` for the first.

        Raises:
            DamagedError: The log has removed the marker at that offset.
            StoreError: The log does not answer, even if there is no marker to read.
        """
        ...

    def end(self) -> int:
        """Return the offset after the last marker. A reader that continues from here misses no later marker."""
        ...

    def markers(self, root: str, most: int) -> tuple[Marker, ...]:
        """Return up to ``most`` of the newest markers of a root, oldest first.

        It does not wait, and reads only the last part of the log. So earlier markers can be missing, and markers that
        were never committed can be included.
        """
        ...

    def marked(self, root: str, manifests: Mapping[str, str | None]) -> frozenset[str]:
        """Return which of these manifests of a root a marker commits, once this is certain.

        Args:
            root: The root.
            manifests: Digest of each manifest, with the digest of its parent, whose marker comes before its own; None
                for a baseline.
        """
        ...


def check_row_log(row_log: object) -> None:
    """Refuse a value that is not a log, such as the address of a broker.

    Raises:
        ConfigurationError: The value is neither a log nor None.
    """
    if row_log is not None and (isinstance(row_log, type) or not callable(getattr(row_log, "open", None))):
        raise ConfigurationError(f"'row_log' must be a row log, such as KafkaRows(…), or None (got {row_log!r})")

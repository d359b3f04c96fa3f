"""Row logs: where the rows of deltas may lie beside a checkpoint's directory, and where checkpoints are announced.

A log takes packs, as a directory does, and markers. A checkpoint whose store has a log is committed by its marker: it
comes when everything else of the checkpoint is durable, and only then does its manifest get its name. So whoever
follows the log sees committed checkpoints only, in the order of their commits; and whoever looks at directories sees
the same ones, a moment later.

A log keeps all packs for a time, or the newest pack of each row block for ever; see ``row_blocks``.
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
    """What says that a checkpoint is committed.

    Attributes:
        root: Tells roots apart that share a log: :func:`root_id` of its URL.
        name: Of the checkpoint's directory, in its root.
        save_id: Of the save that wrote it.
        sha256: Digest of its manifest.
        parent_sha256: Digest of its parent's; None for a baseline.
        created_ns: Unix time of its commit, in nanoseconds.
        offset: Its place among the markers of its log; they are in the order of their commits.
    """

    root: str
    name: str
    save_id: str
    sha256: str
    parent_sha256: str | None
    created_ns: int
    offset: int = -1


def root_id(url: str) -> str:
    """A short name for the directory that checkpoints' directories lie in, by its URL, whatever client that names."""
    return hashlib.sha256(without_client(url).encode()).hexdigest()[:16]


class PackTarget(Protocol):
    """What packs are written to."""

    def put(self, name: str, parts: Sequence[Buffer]) -> "LogRange | None":
        """Write a pack whose name nobody else uses; returns where in a log it lies, None for a file."""
        ...


@runtime_checkable
class BlockTarget(Protocol):
    """What packs of row blocks are written to.

    Its ``owner`` begins the keys of what this rank writes.
    """

    @property
    def owner(self) -> str: ...

    def keyed(self, key: str, most_bytes: int) -> PackTarget:
        """Where to write a pack that takes the place of the one with that key.

        Args:
            key: What the keys of its records begin with.
            most_bytes: What any pack with that key may take.
        """
        ...


class RowLog(Protocol):
    """A log; a value that survives pickling.

    Roots are given by their :func:`root_id`. Methods raise a ``StoreError`` if the log does not answer in time.
    """

    @property
    def topic(self) -> str:
        """What manifests call it."""
        ...

    @property
    def block_bytes(self) -> int | None:
        """How many bytes of values a row block has, if it keeps the newest pack of each; None if it keeps all."""
        ...

    def open(self, *, may_make: bool) -> bool:
        """See that it is as it must be, and make it if it is missing and whoever asks may.

        Raises:
            ConfigurationError: It is set up in a way that would lose rows.
        """
        ...

    def target(self, root: str, rank: int, is_coordinator: bool = False) -> PackTarget | BlockTarget:
        """What one save of one rank writes to; made by all ranks before any of them writes.

        Args:
            root: Where the checkpoint is.
            rank: Of the process.
            is_coordinator: Whether it will commit.
        """
        ...

    def read(self, name: str, num_bytes: int, place: "LogRange", start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Bytes of a pack, from ``start`` to ``stop``.

        Raises:
            DamagedError: Records of it are missing, doubled, out of order, or were removed.
        """
        ...

    def holds(self, packs: "Sequence[Pack]") -> bool:
        """Whether packs, of one checkpoint or several, are there, as far as the oldest and the newest of them tell.

        They are not if the log has forgotten them, has lost its last part, or was made anew.
        """
        ...

    def begin(self, root: str) -> None:
        """A save begins that will end with a marker.

        Whoever began to write markers for this root before is shut out.
        """
        ...

    def mark(self, marker: Marker, check: Callable[[], None]) -> None:
        """Commit.

        Args:
            marker: Of the checkpoint.
            check: Raises if this job may not commit; asked if another one has begun to write markers since.

        Raises:
            StoreError: It was not written, or nobody can tell yet whether it was.
        """
        ...

    def forget(self, root: str, packs: "Sequence[Pack]") -> None:
        """Remove packs by their keys, right after a commit by :meth:`mark`; what is newer under these keys goes too.

        Raises:
            FencedError: Another job writes markers for this root now.
            StoreError: It was not done.
        """
        ...

    def markers_from(self, offset: int, timeout_secs: float) -> tuple[Marker, ...]:
        """Markers from an offset on; waits so long for the first.

        Raises:
            DamagedError: The log has forgotten that offset.
            StoreError: It does not answer; that is noticed although there is none.
        """
        ...

    def end(self) -> int:
        """The offset behind the last marker that is there: who reads on from here misses none that comes."""
        ...

    def markers(self, root: str, most: int) -> tuple[Marker, ...]:
        """Some of the newest markers of a root, oldest first, and no more than ``most``.

        It waits for nothing and looks at the last part of the log only: those may be missing that lie before it, and
        those may be there that were never committed.
        """
        ...

    def marked(self, root: str, manifests: Mapping[str, str | None]) -> frozenset[str]:
        """Which of these manifests of a root are committed by a marker; returns once it is certain.

        Args:
            root: The root.
            manifests: Their digests, each with that of its parent, whose marker lies before its own; None for a
                baseline.
        """
        ...


def check_row_log(row_log: object) -> None:
    """Refuse what is no log, such as the address of one.

    Raises:
        ConfigurationError: It is neither a log nor None.
    """
    if row_log is not None and (isinstance(row_log, type) or not callable(getattr(row_log, "open", None))):
        raise ConfigurationError(f"'row_log' must be a log, such as KafkaRows(…), or None (got {row_log!r})")

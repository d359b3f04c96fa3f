"""The journal: what was pruned, told by files under the root that outlive it.

A prune writes what it is about to remove into one new file before it removes anything, and in the end another in its
place, which tells what was removed; many files are folded into one.
So a report over months can still tell of checkpoints that are gone, and what a prune that died has left behind is
recognised by the next one. That a checkpoint is in the journal twice, or is still there, does no harm.
"""

import json
import logging
import re
import uuid
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from torchrec_cnr.errors import DamagedError, StoreError
from torchrec_cnr.format.manifest import CheckpointKind
from torchrec_cnr.human_text import bytes_text, count_text, name_text
from torchrec_cnr.storage.leases import LEASE_SECS
from torchrec_cnr.storage.store import Store, read_whole

logger = logging.getLogger(__name__)

DIRECTORY = "journal"
NUM_FOLDED = 16  # as many files become one
_NAME = re.compile(r"\d{20}-[0-9a-f]{16}\.json")
_TEMPORARY = re.compile(r"[0-9a-f]{16}\.(?P<at_ns>\d{20})-[0-9a-f]{16}\.json")
_FORMAT, _VERSION = "torchrec_cnr journal", 1
_MAX_BYTES = 1 << 28  # of a file; one of so many tells of a million checkpoints

BoundedCount = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


@dataclass(frozen=True)
class PrunedCheckpoint:
    """A checkpoint that was pruned.

    Attributes:
        name: Its directory under the root.
        created_ns: Unix time of its commit, in nanoseconds.
        kind: ``baseline`` or ``delta``, as it was saved.
        num_bytes: Bytes of the files that its save wrote.
        num_rows: Rows of tables that its save stored.
        num_table_rows: Rows of all tables.
        parent: Directory of the parent that it was saved on; a relative path where that is not under the root, None for
            a baseline.
        restore_bytes: What a load of it read, with all that it stood on; None if that was not all there.
        removed_ns: When it was removed.
        save_ids: What the names of packs in its directory began with.
        compactions: Time of each compaction of it, and bytes of the files that it wrote.
        log_bytes: Bytes of the packs that its save wrote to a log; they stay there as long as the log keeps them.
    """

    name: str
    created_ns: BoundedCount
    kind: CheckpointKind
    num_bytes: BoundedCount
    num_rows: BoundedCount
    num_table_rows: BoundedCount
    parent: str | None
    restore_bytes: BoundedCount | None
    removed_ns: BoundedCount
    save_ids: tuple[str, ...] = ()
    compactions: tuple[tuple[BoundedCount, BoundedCount], ...] = ()
    log_bytes: BoundedCount = 0

    def __repr__(self) -> str:
        size = f"{count_text(self.num_rows, 'row')}, {bytes_text(self.num_bytes)}"
        return f"PrunedCheckpoint({name_text(self.name)}, {self.kind}, {size})"


@dataclass(frozen=True)
class Prune:
    """A prune that has come to its end.

    Attributes:
        at_ns: Unix time in nanoseconds.
        name: The newest of the directories that it removed something from.
        freed_bytes: Bytes of the files that it removed.
    """

    at_ns: BoundedCount
    name: str
    freed_bytes: BoundedCount


@dataclass(frozen=True)
class Journal:
    """All that the journal's files tell.

    Attributes:
        pruned: Checkpoints that were, or were to be, removed, in order of time of commit, each once.
        died: Directories of saves that died, of which the files were removed.
        prunes: What removed them, in order of time.
        files: The files that were read, by name.
        abandoned: Files that a prune which died has left half-way.
    """

    pruned: tuple[PrunedCheckpoint, ...] = ()
    died: frozenset[str] = frozenset()
    prunes: tuple[Prune, ...] = ()
    files: tuple[str, ...] = ()
    abandoned: tuple[str, ...] = ()


class _File(msgspec.Struct):
    """What a file holds. A record is a list of its fields' values: without names it takes half of the room."""

    format: Literal["torchrec_cnr journal"]
    version: Literal[1]
    pruned: list[list[Any]]
    died: frozenset[str]
    prunes: list[list[Any]]


_Record = TypeVar("_Record", PrunedCheckpoint, Prune)


def is_journal_file(name: str) -> bool:
    """Whether a file in the journal's directory is the journal's."""
    return any(pattern.fullmatch(name) for pattern in (_NAME, _TEMPORARY))


def read_files(directory: Store, names: Iterable[str], now_ns: int) -> Journal:
    """Read the journal's files among ``names``; those that cannot be made sense of are passed over with a warning.

    A file that was begun long before ``now_ns`` is not going to be finished.

    Raises:
        StoreError: A file that is there cannot be read.
    """
    read, entries = [], []
    for name in sorted(name for name in names if _NAME.fullmatch(name)):
        try:
            entries.append(_parsed(read_whole(directory, name, _MAX_BYTES)))
            read.append(name)
        except (ValueError, RecursionError, DamagedError) as error:
            logger.warning("%s/%s: passed over, it is no file of a journal: %s", directory.url, name, error)
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            logger.info("%s: another prune has folded it meanwhile", error)
    pruned = _each_once(checkpoint for entry in entries for checkpoint in entry.pruned)
    died = frozenset(name for entry in entries for name in entry.died)
    prunes = {prune for entry in entries for prune in entry.prunes}
    begun = {name: int(found["at_ns"]) for name in names if (found := _TEMPORARY.fullmatch(name))}
    abandoned = tuple(name for name, at_ns in begun.items() if at_ns + LEASE_SECS * 10**9 < now_ns)
    in_order = tuple(sorted(prunes, key=lambda prune: (prune.at_ns, prune.name)))
    return Journal(pruned, died, in_order, tuple(read), abandoned)


def write_file(directory: Store, told: Journal, now_ns: int) -> str:
    """Write one file that tells something; returns its name.

    Raises:
        StoreError: It cannot be written. It is not there then.
    """
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "pruned": [_fields(checkpoint) for checkpoint in told.pruned],
        "died": sorted(told.died),
        "prunes": [astuple(prune) for prune in told.prunes],
    }
    id_ = uuid.uuid4().hex[:16]
    name = f"{now_ns:020d}-{id_}.json"
    directory.make()
    directory.put_new(name, json.dumps(data, separators=(",", ":")).encode(), id_)
    return name


def fold_files(directory: Store, told: Journal, now_ns: int) -> None:
    """Write what a journal tells into one file, and remove the files that it was read from.

    Raises:
        StoreError: That cannot be done; nothing is lost.
    """
    write_file(directory, told, now_ns)
    for name in told.files:
        directory.remove(name)


def _fields(checkpoint: PrunedCheckpoint) -> tuple[Any, ...]:
    """As journals had it before there were logs, where nothing went to one."""
    return astuple(checkpoint) if checkpoint.log_bytes else astuple(checkpoint)[:-1]


def _each_once(checkpoints: Iterable[PrunedCheckpoint]) -> tuple[PrunedCheckpoint, ...]:
    found: dict[tuple[str, int], PrunedCheckpoint] = {}
    for checkpoint in sorted(checkpoints, key=lambda checkpoint: checkpoint.removed_ns):
        found.setdefault((checkpoint.name, checkpoint.created_ns), checkpoint)
    return tuple(sorted(found.values(), key=lambda checkpoint: (checkpoint.created_ns, checkpoint.name)))


def _parsed(data: bytes) -> Journal:
    # Not by msgspec's own decoder, which refuses lone surrogates: a directory's name may have some.
    file = msgspec.convert(json.loads(data), _File)
    pruned = tuple(_record(PrunedCheckpoint, values, num_optional=1) for values in file.pruned)
    return Journal(pruned, file.died, tuple(_record(Prune, values) for values in file.prunes))


def _record(kind: type[_Record], values: list[Any], num_optional: int = 0) -> _Record:
    """From the values of its fields, in their order; those of the last ones may be missing."""
    names = [field.name for field in fields(kind)]
    if not len(names) - num_optional <= len(values) <= len(names):
        raise ValueError(f"not the fields {', '.join(names)}: {str(values)[:80]!r}")
    return msgspec.convert(dict(zip(names, values, strict=False)), kind)

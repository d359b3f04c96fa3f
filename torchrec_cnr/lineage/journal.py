"""The journal: files under the root that record which checkpoints were pruned.

Before a prune removes anything, it writes a file that lists what it will remove. At the end, it replaces this file with
one that lists what it has removed. Many files are merged into one.

So a report can include checkpoints that were removed months ago. And a prune recognises what an earlier one has left
that died. A checkpoint may be in the journal twice, or may still exist.
"""

import json
import logging
import posixpath
import re
import uuid
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from torchrec_cnr.errors import DamagedError, StoreError
from torchrec_cnr.format.manifest import MANIFEST_FILE, CheckpointKind
from torchrec_cnr.human_text import bytes_text, count_text, name_text
from torchrec_cnr.storage.leases import LEASE_SECS
from torchrec_cnr.storage.store import NOT_THERE, Store, read_whole

logger = logging.getLogger(__name__)

DIRECTORY = "journal"
NUM_FOLDED = 16  # this many files are merged into one
_NAME = re.compile(r"(?P<at_ns>\d{20})-[0-9a-f]{16}\.json")
_TEMPORARY = re.compile(r"[0-9a-f]{16}\.(?P<at_ns>\d{20})-[0-9a-f]{16}\.json")
_FORMAT, _VERSION = "torchrec_cnr journal", 1
_MAX_BYTES = 1 << 28  # of a file; enough for a million checkpoints

BoundedCount = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


@dataclass(frozen=True)
class PrunedCheckpoint:
    """The journal's record of a checkpoint that was pruned.

    Attributes:
        name: The name of its directory under the root.
        created_ns: The time of its commit, in nanoseconds since 1970.
        kind: ``baseline`` or ``delta``, as it was saved.
        num_bytes: The bytes of the files that its save wrote.
        num_rows: The number of rows of tables that its save stored.
        num_table_rows: The number of rows of all tables.
        parent: The directory of the parent at the time of the save; a relative path if it is not under the root, None
            for a baseline.
        restore_bytes: The bytes that a load of its whole chain read; None if the chain was not complete.
        removed_ns: The time of its removal, in nanoseconds since 1970.
        save_ids: The ids of the saves and compactions that wrote data files in its directory.
        compactions: For each compaction of it, the time in nanoseconds since 1970 and the bytes that it wrote.
        log_bytes: The bytes that its save wrote to Kafka. They are not removed by a prune.

    Examples:
        >>> checkpoint = cnr.compact("run/step-2", self_contained=True)
        >>> result = cnr.execute(cnr.plan_prune("run", cnr.Keep(last=1)))
        >>> pruned = cnr.read_journal("run")[0]
        >>> pruned.name, pruned.kind, pruned.num_rows
        ('step-1', 'baseline', 1000)
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
    """The journal's record of a completed prune.

    Attributes:
        at_ns: The time of the prune, in nanoseconds since 1970.
        name: The newest directory from which it removed something.
        freed_bytes: The bytes of the files that it removed.

    Examples:
        >>> checkpoint = cnr.compact("run/step-2", self_contained=True)
        >>> result = cnr.execute(cnr.plan_prune("run", cnr.Keep(last=1)))
        >>> prune = cnr.plan_prune("run").catalog.journal.prunes[0]
        >>> prune.name, prune.freed_bytes == result.freed_bytes
        ('step-1', True)
    """

    at_ns: BoundedCount
    name: str
    freed_bytes: BoundedCount


@dataclass(frozen=True)
class Journal:
    """The records of all files of the journal.

    Attributes:
        pruned: The checkpoints that were removed, or were about to be, in order of their commits, each once.
        died: The directories of saves that died, whose files were removed.
        prunes: The completed prunes, in order of time.
        files: The names of the files that were read.
        abandoned: The names of incomplete files of a prune that died.
    """

    pruned: tuple[PrunedCheckpoint, ...] = ()
    died: frozenset[str] = frozenset()
    prunes: tuple[Prune, ...] = ()
    files: tuple[str, ...] = ()
    abandoned: tuple[str, ...] = ()


class _File(msgspec.Struct):
    """The contents of a file. A record is a list of its fields' values, which is half as large as with names."""

    format: Literal["torchrec_cnr journal"]
    version: Literal[1]
    pruned: list[list[Any]]
    died: frozenset[str]
    prunes: list[list[Any]]


_Record = TypeVar("_Record", PrunedCheckpoint, Prune)


def is_journal_file(name: str) -> bool:
    """Return whether a file has a name like the journal's files."""
    return any(pattern.fullmatch(name) for pattern in (_NAME, _TEMPORARY))


def read_files(directory: Store, names: Iterable[str], now_ns: int) -> Journal:
    """Read the journal's files among ``names``. If a file is not valid, log a warning and skip it.

    An incomplete file that was begun long before ``now_ns`` counts as abandoned.

    Raises:
        StoreError: An existing file cannot be read.
    """
    read_names, entries = [], []
    for name in sorted(name for name in names if _NAME.fullmatch(name)):
        try:
            entries.append(_parsed(read_whole(directory, name, _MAX_BYTES)))
            read_names.append(name)
        except (ValueError, RecursionError, DamagedError) as error:
            logger.warning("%s/%s: skipped because it is not a valid journal file: %s", directory.url, name, error)
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            logger.info("%s: another prune has merged this file into another", error)
    pruned = _each_once(checkpoint for entry in entries for checkpoint in entry.pruned)
    died = frozenset(name for entry in entries for name in entry.died)
    prunes = {prune for entry in entries for prune in entry.prunes}
    begun_ns = {name: int(match["at_ns"]) for name in names if (match := _TEMPORARY.fullmatch(name))}
    abandoned = tuple(name for name, at_ns in begun_ns.items() if at_ns + LEASE_SECS * 10**9 < now_ns)
    ordered_prunes = tuple(sorted(prunes, key=lambda prune: (prune.at_ns, prune.name)))
    return Journal(pruned, died, ordered_prunes, tuple(read_names), abandoned)


def is_pruned(checkpoint: Store, created_ns: int) -> bool:
    """Return whether a checkpoint was pruned, or a prune has begun to remove it.

    A prune looks for leases before it removes a checkpoint. So a process that has a lease and then gets False may use
    the checkpoint as long as the lease is valid. A prune's request may take effect long after the prune has ended.

    Args:
        checkpoint: The directory of the checkpoint.
        created_ns: The time of its commit, in nanoseconds since 1970.

    Raises:
        StoreError: The store does not answer.
    """
    try:
        written_ns = checkpoint.modified_ns(MANIFEST_FILE)
    except StoreError as error:
        if error.errno in NOT_THERE:
            return True
        if not isinstance(error.__cause__, NotImplementedError):
            raise
        written_ns = 0  # the store keeps no times
    directory = checkpoint.at("..").at(DIRECTORY)
    # Both times are of the store's clock. The plan of a prune may be older than a manifest that it will list.
    later_names = [name for name in directory.names() if _written_ns(name) > written_ns - LEASE_SECS * 10**9]
    told = read_files(directory, later_names, now_ns=0)
    return (posixpath.basename(checkpoint.path), created_ns) in {(item.name, item.created_ns) for item in told.pruned}


def _written_ns(name: str) -> int:
    match = _NAME.fullmatch(name)
    return int(match["at_ns"]) if match is not None else 0


def write_file(directory: Store, told: Journal, now_ns: int) -> str:
    """Write records to a new file, and return its name.

    Raises:
        StoreError: The file cannot be written. It does not exist then.
    """
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "pruned": [astuple(checkpoint) for checkpoint in told.pruned],
        "died": sorted(told.died),
        "prunes": [astuple(prune) for prune in told.prunes],
    }
    file_id = uuid.uuid4().hex[:16]
    name = f"{now_ns:020d}-{file_id}.json"
    directory.make()
    directory.put_new(name, json.dumps(data, separators=(",", ":")).encode(), file_id)
    return name


def fold_files(directory: Store, told: Journal, now_ns: int) -> None:
    """Merge a journal into one file, and remove the files from which it was read.

    Raises:
        StoreError: A file cannot be written or removed. No record is lost.
    """
    write_file(directory, told, now_ns)
    for name in told.files:
        directory.remove(name)


def _each_once(checkpoints: Iterable[PrunedCheckpoint]) -> tuple[PrunedCheckpoint, ...]:
    records: dict[tuple[str, int], PrunedCheckpoint] = {}
    for checkpoint in sorted(checkpoints, key=lambda checkpoint: checkpoint.removed_ns):
        records.setdefault((checkpoint.name, checkpoint.created_ns), checkpoint)
    return tuple(sorted(records.values(), key=lambda checkpoint: (checkpoint.created_ns, checkpoint.name)))


def _parsed(data: bytes) -> Journal:
    # msgspec's own decoder refuses lone surrogates, and the name of a directory may contain some.
    file = msgspec.convert(json.loads(data), _File)
    pruned = tuple(_record(PrunedCheckpoint, values) for values in file.pruned)
    return Journal(pruned, file.died, tuple(_record(Prune, values) for values in file.prunes))


def _record(kind: type[_Record], values: list[Any]) -> _Record:
    """Return a record, given the values of its fields in order."""
    names = [field.name for field in fields(kind)]
    if len(values) != len(names):
        raise ValueError(f"expected the fields {', '.join(names)}, got {str(values)[:80]!r}")
    return msgspec.convert(dict(zip(names, values, strict=True)), kind)

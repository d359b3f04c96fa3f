"""``verify``: checks whether a restore would give exactly what was committed.

For every checkpoint of a chain, it compares manifests, headers and blobs with their digests, and decodes all rows; see
``damage``. It lists all problems, and continues after each.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torchrec_cnr.errors import ConfigurationError, DamagedError, LoadError, StoreError, VersionError
from torchrec_cnr.format.manifest import MANIFEST_FILE
from torchrec_cnr.human_text import bytes_text, count_text
from torchrec_cnr.lineage.checkpoint import Checkpoint, Lineage, read_checkpoint, read_lineage
from torchrec_cnr.maintenance.catalog import Catalog, is_checkpoint, no_checkpoint, read_catalog
from torchrec_cnr.maintenance.verification.damage import Problem, find_contradictions, find_damage, find_dead_damage
from torchrec_cnr.maintenance.verification.impact import unrestorable
from torchrec_cnr.progress import Progress
from torchrec_cnr.storage.pack_writer import check_thread_count
from torchrec_cnr.storage.row_log import RowLog
from torchrec_cnr.storage.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VerifyReport:
    """The result of a verification.

    Attributes:
        heads: The checkpoints whose chains were verified.
        checkpoints: All checkpoints of these chains whose manifests can be read.
        num_blobs: The number of blobs of these checkpoints.
        num_bytes: The bytes of these blobs.
        problems: All problems: of manifests, then of data files, then contradictions between checkpoints.
        unrestorable: The checkpoints of the root that cannot be restored because of the problems, oldest first, then
            those whose manifests cannot be read.
        newest_restorable: If there are problems, the newest checkpoint of the root that can be restored, which was
            verified, too. None if there is none, or if there are no problems.

    Examples:
        >>> report = cnr.verify("run/step-2")
        >>> report.is_right, report.problems
        (True, ())
    """

    heads: tuple[str, ...]
    checkpoints: tuple[str, ...]
    num_blobs: int
    num_bytes: int
    problems: tuple[Problem, ...]
    unrestorable: tuple[str, ...] = ()
    newest_restorable: str | None = None

    def __repr__(self) -> str:
        size = f"{count_text(len(self.checkpoints), 'checkpoint')}, {bytes_text(self.num_bytes)}"
        return f"VerifyReport({size}, {count_text(len(self.problems), 'problem')})"

    @property
    def is_right(self) -> bool:
        """Return whether there are no problems."""
        return not self.problems


def verify(
    path: str | os.PathLike[str] | Store,
    *,
    all_heads: bool = False,
    row_log: RowLog | None = None,
    progress: Progress | None = None,
    thread_count: int = 2,
) -> VerifyReport:
    """Read a whole checkpoint chain, compare all bytes with their digests, and decode all rows.

    After a compaction, data files may contain bytes that no load needs any more. These are compared with the manifests
    under which they were written, if those still exist. They do not count in ``num_blobs`` and ``num_bytes``.

    If there are problems, this also reads the manifests of the whole root, and verifies further checkpoints, newest
    first, until it has found one that can be restored.

    Args:
        path: A checkpoint, as a path or fsspec URL; or a root, to verify its newest checkpoint. Every unreadable
            manifest under a root is a problem, too, since it might be the newest.
        all_heads: Whether to verify all checkpoints of a root.
        row_log: The Kafka topic that contains the rows of deltas, if they are not in files (``KafkaRows``).
        progress: Called with the number of bytes that were verified, and the total.
        thread_count: Number of requests in flight at the same time. Each takes up to 16 MiB of memory.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        VersionError, StoreError: The checkpoint's own manifest cannot be read, or Kafka does not answer in time.
        ConfigurationError: An argument is out of its range, ``all_heads`` is true for a checkpoint, or rows are in a
            Kafka topic and ``row_log`` is missing.

    Examples:
        >>> report = cnr.verify("run")
        >>> report.is_right, len(report.checkpoints)
        (True, 2)
    """
    check_thread_count(thread_count)
    if row_log is not None:
        row_log.open(may_make=False)  # fails early: otherwise, each read of rows would wait for its timeout
    store = Store.open(path, row_log=row_log)
    if is_checkpoint(store):
        if all_heads:
            raise ConfigurationError(f"{store.url}: a checkpoint, but only a root can be verified whole: pass the root")
        return _with_impact(_verify([_read_links(store)], (), progress, thread_count), store.at(".."), thread_count)
    catalog = read_catalog(store)
    unreadable = tuple(_unreadable(catalog))
    newest = [] if catalog.newest is None else [catalog.newest]
    names = catalog.heads() if all_heads else newest
    if not names and not unreadable:
        raise no_checkpoint(catalog.root)
    found = _verify([_catalog_links(catalog, name) for name in names], unreadable, progress, thread_count)
    return _with_impact(found, catalog, thread_count)


def _with_impact(found: VerifyReport, root: Catalog | Store, thread_count: int) -> VerifyReport:
    """Return a report that also says which checkpoints of the root cannot be restored, and which one can."""
    if found.is_right:
        return found
    try:
        catalog = root if isinstance(root, Catalog) else read_catalog(root)
    except StoreError as error:
        logger.warning("cannot find out which checkpoints can be restored: %s", error)
        return found
    problems, verified = dict.fromkeys(found.problems), set(found.checkpoints)
    while True:
        is_lost = unrestorable(catalog, list(problems))
        usable = (name for name, lost in is_lost.items() if not (lost or catalog.entries[name].is_abandoned))
        newest = next(reversed(list(usable)), None)
        links = () if newest is None else _catalog_links(catalog, newest).checkpoints
        unverified = [link for link in links if link.store.url not in verified]
        if not unverified:
            break
        for link in unverified:
            problems |= dict.fromkeys(find_damage(link, thread_count, lambda _: None))
            verified.add(link.store.url)
    lost = [catalog.entries[name] for name, lost in is_lost.items() if lost]
    lost += [entry for entry in catalog.entries.values() if entry.problem is not None]
    restorable = None if newest is None else catalog.entries[newest].store.url
    return replace(
        found,
        problems=tuple(problems),
        unrestorable=tuple(entry.store.url for entry in lost),
        newest_restorable=restorable,
    )


@dataclass(frozen=True)
class _Links:
    """A checkpoint chain, as far as it can be read.

    Attributes:
        head: The path or URL of its newest checkpoint.
        checkpoints: The readable checkpoints, oldest first.
        problem: Why older ones cannot be read, or None.
    """

    head: str
    checkpoints: tuple[Checkpoint, ...]
    problem: Problem | None = None


def _verify(
    lineages: list[_Links], unreadable: Iterable[Problem], progress: Progress | None, thread_count: int
) -> VerifyReport:
    """Verify each checkpoint once, even if it belongs to several chains."""
    checkpoints = {checkpoint.store.url: checkpoint for links in lineages for checkpoint in links.checkpoints}
    manifests = [checkpoint.manifest for checkpoint in checkpoints.values()]
    num_bytes, done_bytes = sum(manifest.blob_bytes for manifest in manifests), 0

    def advance(count: int) -> None:
        nonlocal done_bytes
        done_bytes = min(done_bytes + count, num_bytes)
        if progress is not None:
            progress(done_bytes, num_bytes)

    problems = [*unreadable, *(links.problem for links in lineages if links.problem is not None)]
    for checkpoint in checkpoints.values():
        problems += find_damage(checkpoint, thread_count, advance)
    advance(num_bytes)
    problems += find_dead_damage(list(checkpoints.values()), thread_count)
    for links in lineages:
        if links.problem is None:
            problems += find_contradictions(Lineage(links.checkpoints))
    return VerifyReport(
        tuple(links.head for links in lineages),
        tuple(checkpoints),
        sum(1 for manifest in manifests for _ in manifest.blobs()),
        num_bytes,
        tuple(dict.fromkeys(problems)),
    )


def _unreadable(catalog: Catalog) -> Iterator[Problem]:
    for entry in catalog.entries.values():
        if entry.problem is not None:
            message = str(entry.problem)
            yield Problem(entry.store.url, _manifest_in(message, entry.store.url), None, message)


def _catalog_links(catalog: Catalog, name: str) -> _Links:
    lineage, store = catalog.lineage(name), catalog.checkpoints[name].store
    return _read_links(store) if lineage is None else _Links(store.url, lineage.checkpoints)


def _read_links(head: Store) -> _Links:
    """Read a checkpoint chain. If a manifest is corrupt, return the checkpoints that are newer than it."""
    try:
        return _Links(head.url, read_lineage(head).checkpoints)
    except (DamagedError, VersionError, StoreError) as error:
        checkpoints = list(_readable(head))
        if not checkpoints and not isinstance(error, DamagedError):
            raise
        message = str(error)
    parent = checkpoints[-1].parent if checkpoints else head.url
    file = None if parent is None else _manifest_in(message, parent)
    return _Links(head.url, tuple(reversed(checkpoints)), Problem(head.url, file, None, message))


def _readable(store: Store) -> Iterator[Checkpoint]:
    """Yield the checkpoints of a chain, newest first, as long as each has the digest that its child names."""
    seen_paths: set[str] = set()
    expected_sha256 = None
    while store.path not in seen_paths:
        seen_paths.add(store.path)
        try:
            checkpoint = read_checkpoint(store)
        except (LoadError, StoreError):
            return
        if expected_sha256 not in (None, checkpoint.sha256):
            return
        yield checkpoint
        parent = checkpoint.manifest.parent
        if parent is None:
            return
        store, expected_sha256 = store.at(parent.path), parent.sha256


def _manifest_in(message: str, url: str) -> str:
    """Return the manifest file of a checkpoint that a message names."""
    match = re.match(rf"{re.escape(url)}/manifest(-[0-9a-f]+)?\.json(?=: )", message)
    return match[0] if match else f"{url}/{MANIFEST_FILE}"

"""Which checkpoints are kept when a root is pruned, and why.

In addition to those that retention rules select, these are kept, with all that they need:

- those with a lease in their directory: some process is loading or compacting them, or saves a delta on top of them;
- those that cannot be loaded because a parent or a data file is missing, since a user may restore that file;
- symbolic links, and the checkpoints that they lead to;
- those that a save to another root has tagged because it depends on them.

A checkpoint needs the parents that its manifest names, and the data files that it uses in directories of others. A load
that began before a compaction still uses the replaced manifest. So for a checkpoint with a lease, all manifests count.

A checkpoint that cannot be read is kept: it is corrupt, of a newer version or forbidden, or the store did not answer.
Its parent is unknown. So every checkpoint is kept that was committed before its manifest was written, by the store's
clock plus one day, since clocks differ. If the store does not report that time, all checkpoints are kept. So once the
checkpoint can be read again, all that it is based on is still there. Later checkpoints cannot be among that, and
retention rules decide on them. So such a checkpoint does not block pruning forever. The plan says which checkpoint
keeps which others, until a user repairs or removes it.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from torchrec_cnr.human_text import instant, name_text
from torchrec_cnr.lineage.checkpoint import Checkpoint
from torchrec_cnr.lineage.other_roots import NEEDED_TAG
from torchrec_cnr.maintenance.catalog import Catalog, Entry
from torchrec_cnr.maintenance.pruning.retention import Keep
from torchrec_cnr.storage.leases import Lease

PackPath = tuple[str, str]  # a directory under the root, and a file in it


@dataclass(frozen=True)
class Needs:
    """The checkpoints and data files that some checkpoints need, and which of them need it.

    Attributes:
        checkpoints: The names of the needed checkpoints, including the given ones. The value is the first of the given
            ones that needs it.
        packs: The needed data files. The value is the first of the given checkpoints that needs it.
    """

    checkpoints: Mapping[str, str]
    packs: Mapping[PackPath, str]


def needed_by(catalog: Catalog, names: Iterable[str], loading: Collection[str] = ()) -> Needs:
    """Return what checkpoints need.

    Args:
        catalog: The contents of the root.
        names: The names of the checkpoints. If several need the same thing, the first of them is recorded.
        loading: Those of ``names`` that a load may be reading by a replaced manifest.
    """
    checkpoints: dict[str, str] = {}
    packs: dict[PackPath, str] = {}
    seen: set[tuple[str, bool]] = set()
    for head in names:
        waiting, is_loading = [head], head in loading
        while waiting:
            name = waiting.pop()
            if (name, True) in seen or (name, is_loading) in seen:
                continue
            seen.add((name, is_loading))
            checkpoints.setdefault(name, head)
            checkpoint = catalog.checkpoints[name]
            for manifest in checkpoint.manifests if is_loading else (checkpoint.manifest,):
                view = replace(checkpoint, manifest=manifest)
                for pack in catalog.uses(view):
                    packs.setdefault(pack, head)
                parent = catalog.parent(view)
                waiting += () if parent is None else (parent,)
    return Needs(checkpoints, packs)


def why_broken(catalog: Catalog) -> dict[str, str]:
    """Return the checkpoints that cannot be loaded although their manifests can be read, and why, as far as known."""
    reasons: dict[str, str] = {}
    for name in catalog.checkpoints:  # parents come first, or are not older
        reason = _parent_problem(catalog, name, reasons) or _pack_problem(catalog, name)
        if reason is not None:
            reasons[name] = reason
    return reasons


def _parent_problem(catalog: Catalog, name: str, broken: Mapping[str, str]) -> str | None:
    checkpoint = catalog.checkpoints[name]
    ref = checkpoint.manifest.parent
    parent = None if ref is None else catalog.name_of(checkpoint.store.at(ref.path))
    if ref is None or parent is None:  # a parent under another root is assumed to exist
        return None
    parent_checkpoint, entry = catalog.checkpoints.get(parent), catalog.entries.get(parent)
    if parent_checkpoint is None:
        return f"its parent {parent} {'is missing' if entry is None or entry.problem is None else 'cannot be read'}"
    if parent_checkpoint.sha256 != ref.sha256:
        return f"its parent {parent} was replaced"
    if parent_checkpoint.created_ns >= checkpoint.created_ns:
        return f"it is not newer than its parent {parent}"
    return f"its parent {parent} cannot be loaded" if parent in broken else None


def _pack_problem(catalog: Catalog, name: str) -> str | None:
    store, manifest = catalog.checkpoints[name].store, catalog.checkpoints[name].manifest
    for pack in manifest.packs:
        directory = name if pack.directory is None else catalog.name_of(store.at(pack.directory))
        entry = catalog.entries.get(directory or "")
        if (
            pack.log is not None
            or directory is None
            or (entry is not None and (entry.is_link or entry.problem is not None))
        ):
            continue  # its files are not listed in the catalog
        num_bytes = None if entry is None else entry.files.get(pack.name)
        if num_bytes is None or num_bytes < pack.num_bytes:  # no load reads bytes after the committed ones
            what = "is missing" if num_bytes is None else f"has {num_bytes} bytes, expected {pack.num_bytes}"
            return f"its data file {directory}/{pack.name} {what}"
    return None


_CLOCKS_NS = 24 * 3600 * 10**9  # the largest expected difference between the clocks of jobs and of the store
_PURPOSES = {"save": "a save", "load": "a load", "compact": "a compaction"}


@dataclass(frozen=True)
class Kept:
    """The checkpoints that are kept.

    Attributes:
        reasons: The reasons why each checkpoint is kept, by name.
        needs: What these checkpoints need.
        untouched: The directories in which nothing may be removed.
        horizon_ns: The time until which a committed checkpoint may be needed by one that cannot be read, in nanoseconds
            since 1970.
    """

    reasons: Mapping[str, tuple[str, ...]]
    needs: Needs
    untouched: frozenset[str]
    horizon_ns: float


def find_kept(catalog: Catalog, keep: Keep, now_ns: int) -> Kept:
    """Find the checkpoints of a catalog that are kept.

    Raises:
        ConfigurationError: There are checkpoints, and the retention rules select none.
    """
    broken = why_broken(catalog)
    leases = {name: entry.leases(now_ns) for name, entry in catalog.entries.items()}
    leased = [name for name in catalog.checkpoints if leases[name]]
    horizon_ns, unreadable = _horizon(catalog.entries.values())
    reasons = {name: list(texts) for name, texts in keep.choose(_candidates(catalog, broken)).items()}
    for name in leased:
        reasons.setdefault(name, []).append(lease_text(leases[name][0], now_ns))
    for name, reason in _linked(catalog).items():
        reasons.setdefault(name, []).append(reason)
    for name in catalog.checkpoints:
        if any(tag.startswith(NEEDED_TAG) for tag in catalog.entries[name].tags):
            reasons.setdefault(name, []).append("tagged because another root needs it")
    for name, reason in broken.items():
        reasons.setdefault(name, []).append(f"cannot be loaded: {name_text(reason)}")
    older_names = [name for name, checkpoint in catalog.checkpoints.items() if checkpoint.created_ns <= horizon_ns]
    for name in older_names:
        if unreadable is not None:
            reasons.setdefault(name, []).append(f"{name_text(unreadable.name)}, which cannot be read, may need it")
    needs = needed_by(catalog, _newest_first(catalog, reasons), leased)
    for name, user in needs.checkpoints.items():
        if name not in reasons:
            reasons[name] = [f"needed by {name_text(user)}"]
    entries = catalog.entries.items()
    fixed_names = (name for name, entry in entries if entry.is_link or entry.problem is not None or leases[name])
    untouched = frozenset({*broken, *older_names, *fixed_names})
    return Kept({name: tuple(texts) for name, texts in reasons.items()}, needs, untouched, horizon_ns)


def lease_text(lease: Lease, now_ns: int) -> str:
    """Return why a checkpoint with a lease is kept, for example ``leased (a load, until 14:03 UTC)``."""
    until = instant(lease.until_ns)
    day = "" if until.date() == instant(now_ns).date() else f"{until:%Y-%m-%d} "
    return f"leased ({_PURPOSES.get(lease.purpose, lease.purpose)}, until {day}{until:%H:%M} UTC)"


def _candidates(catalog: Catalog, broken: Mapping[str, str]) -> list[tuple[Entry, Checkpoint]]:
    entries = ((catalog.entries[name], checkpoint) for name, checkpoint in catalog.checkpoints.items())
    return [(entry, checkpoint) for entry, checkpoint in entries if entry.name not in broken and not entry.is_link]


def _horizon(entries: Iterable[Entry]) -> tuple[float, Entry | None]:
    """Return the latest time at which an ancestor of an unreadable checkpoint may be committed, and that checkpoint."""
    horizon_ns, latest = -math.inf, None
    for entry in entries:
        until_ns = math.inf if entry.modified_ns is None else entry.modified_ns + _CLOCKS_NS
        if entry.problem is not None and until_ns > horizon_ns:
            horizon_ns, latest = until_ns, entry
    return horizon_ns, latest


def _linked(catalog: Catalog) -> dict[str, str]:
    """Return why links to checkpoints, and the checkpoints that they lead to, are kept."""
    links = {name: checkpoint for name, checkpoint in catalog.checkpoints.items() if catalog.entries[name].is_link}
    targets = {checkpoint.sha256: name for name, checkpoint in links.items()}
    reasons = {
        name: f"linked as {name_text(targets[checkpoint.sha256])}"
        for name, checkpoint in catalog.checkpoints.items()
        if checkpoint.sha256 in targets
    }
    return {**reasons, **dict.fromkeys(links, "a link")}


def _newest_first(catalog: Catalog, names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (catalog.checkpoints[name].created_ns, name), reverse=True)

"""Which checkpoints are kept when a root is pruned, and why.

Besides those that retention keeps, these are kept, with all that they need:

- those with a lease in their directory, which some process is saving, loading or compacting;
- while a save is in progress, which may be based on any of them, the newest of each lineage, and what was ever a
  baseline: the job goes on by the lineage that it knows, although a compaction may have folded that meanwhile;
- those that cannot be loaded because a parent or a pack is missing, since it may be put back;
- symbolic links, and what they lead to;
- those that a save to another root has tagged, because it depends on them.

A checkpoint needs the parents that its manifest names, and the packs that it uses in directories of others. A load that
began before a compaction still reads by the manifest that was replaced: of a checkpoint that may be loaded, all
manifests count.

A checkpoint that cannot be read (corrupt, of a newer version, forbidden, or the store did not answer) is kept. Its
parent is unknown. So everything is kept that was committed before its manifest was written, by the store's clock and a
day more, since clocks differ; or simply everything, where the store does not tell when. Whoever can read it, now or
once it is repaired, then finds all that it is based on. What came later cannot be among that, and retention decides on
it: so pruning is not blocked forever, since what such a checkpoint holds back does not grow. The plan says which
checkpoint holds back what, until a user repairs or removes it.
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

PackPath = tuple[str, str]  # directory under the root, and file in it


@dataclass(frozen=True)
class Needs:
    """What some checkpoints need, and which of them needs it.

    Attributes:
        checkpoints: Names, those who need them included; each with the first of those.
        packs: Directory and file, each with the first of those who need it.
    """

    checkpoints: Mapping[str, str]
    packs: Mapping[PackPath, str]


def needed_by(catalog: Catalog, names: Iterable[str], loading: Collection[str] = ()) -> Needs:
    """What checkpoints need.

    Args:
        catalog: What there is.
        names: Of checkpoints; the first that needs something is the one that is named.
        loading: Those of ``names`` that may be read by manifests that were replaced.
    """
    checkpoints: dict[str, str] = {}
    packs: dict[PackPath, str] = {}
    seen: set[tuple[str, bool]] = set()
    for head in names:
        waiting, by_any = [head], head in loading
        while waiting:
            name = waiting.pop()
            if (name, True) in seen or (name, by_any) in seen:
                continue
            seen.add((name, by_any))
            checkpoints.setdefault(name, head)
            checkpoint = catalog.checkpoints[name]
            for manifest in checkpoint.manifests if by_any else (checkpoint.manifest,):
                view = replace(checkpoint, manifest=manifest)
                for pack in catalog.uses(view):
                    packs.setdefault(pack, head)
                parent = catalog.parent(view)
                waiting += () if parent is None else (parent,)
    return Needs(checkpoints, packs)


def why_broken(catalog: Catalog) -> dict[str, str]:
    """The checkpoints that cannot be loaded although their manifests can be read, and why; as far as is known."""
    found: dict[str, str] = {}
    for name in catalog.checkpoints:  # parents come first, or are not older
        reason = _parent_problem(catalog, name, found) or _pack_problem(catalog, name)
        if reason is not None:
            found[name] = reason
    return found


def _parent_problem(catalog: Catalog, name: str, broken: Mapping[str, str]) -> str | None:
    checkpoint = catalog.checkpoints[name]
    ref = checkpoint.manifest.parent
    parent = None if ref is None else catalog.name_of(checkpoint.store.at(ref.path))
    if ref is None or parent is None:  # elsewhere: it may well be there
        return None
    there, entry = catalog.checkpoints.get(parent), catalog.entries.get(parent)
    if there is None:
        return f"its parent {parent} {'is missing' if entry is None or entry.problem is None else 'cannot be read'}"
    if there.sha256 != ref.sha256:
        return f"its parent {parent} was replaced"
    if there.created_ns >= checkpoint.created_ns:
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
            continue  # what is in there is not known
        there = None if entry is None else entry.files.get(pack.name)
        if there is None or there < pack.num_bytes:  # what is behind the committed bytes, no load reads
            what = "is missing" if there is None else f"has {there} bytes, expected {pack.num_bytes}"
            return f"its pack {directory}/{pack.name} {what}"
    return None


def newest_of_lineages(catalog: Catalog) -> list[str]:
    """Of all that was saved on top of one baseline, the newest checkpoint: what a save in progress may stand on."""
    baseline_of: dict[str, str] = {}
    newest: dict[str, str] = {}
    for name, checkpoint in catalog.checkpoints.items():
        parent = catalog.parent(replace(checkpoint, manifest=checkpoint.committed))
        baseline_of[name] = name if parent is None else baseline_of.get(parent, parent)
        newest[baseline_of[name]] = name
    return list(newest.values())


def saves_stand_on(catalog: Catalog) -> dict[str, str]:
    """What a save in progress may stand on, and what each of them is: the newest of a lineage, or its baseline."""
    newest = dict.fromkeys(newest_of_lineages(catalog), "newest of its lineage")
    needed = needed_by(catalog, newest).checkpoints
    baselines = [
        name
        for name, checkpoint in catalog.checkpoints.items()
        if name not in needed and any(manifest.parent is None for manifest in checkpoint.manifests)
    ]
    return {**newest, **dict.fromkeys(baselines, "baseline before a compaction")}


_CLOCKS_NS = 24 * 3600 * 10**9  # by as much, clocks of jobs and of the store may differ
_PURPOSES = {"save": "a save", "load": "a load", "compact": "a compaction"}


@dataclass(frozen=True)
class Kept:
    """What stays.

    Attributes:
        reasons: Why each checkpoint stays, by name.
        needs: What these need.
        untouched: Directories in which nothing may be removed.
        horizon_ns: What was committed until then may be needed by a checkpoint that cannot be read.
    """

    reasons: Mapping[str, tuple[str, ...]]
    needs: Needs
    untouched: frozenset[str]
    horizon_ns: float


def find_kept(catalog: Catalog, keep: Keep, now_ns: int) -> Kept:
    """Work out what stays of a catalog.

    Raises:
        ConfigurationError: There are checkpoints, and retention wants none.
    """
    broken = why_broken(catalog)
    leases = {name: entry.leases(now_ns) for name, entry in catalog.entries.items()}
    leased = [name for name in catalog.checkpoints if leases[name]]
    horizon_ns, unreadable = _horizon(catalog.entries.values())
    reasons = {name: list(found) for name, found in keep.choose(_candidates(catalog, broken)).items()}
    for name in leased:
        reasons.setdefault(name, []).append(lease_text(leases[name][0], now_ns))
    for name, reason in _linked(catalog).items():
        reasons.setdefault(name, []).append(reason)
    for name in catalog.checkpoints:
        if any(tag.startswith(NEEDED_TAG) for tag in catalog.entries[name].tags):
            reasons.setdefault(name, []).append("needed by another root, which has tagged it")
    for name, reason in broken.items():
        reasons.setdefault(name, []).append(f"cannot be loaded: {name_text(reason)}")
    saving = [name for name, found in leases.items() if found and name not in catalog.checkpoints]
    for name, what in saves_stand_on(catalog).items() if saving else ():
        reasons.setdefault(name, []).append(f"{what}, which {name_text(saving[0])} may stand on")
    older = [name for name, checkpoint in catalog.checkpoints.items() if checkpoint.created_ns <= horizon_ns]
    for name in older:
        if unreadable is not None:
            reasons.setdefault(name, []).append(f"{name_text(unreadable.name)}, which cannot be read, may need it")
    needs = needed_by(catalog, _newest_first(catalog, reasons), leased)
    for name, by in needs.checkpoints.items():
        if name not in reasons:
            reasons[name] = [f"needed by {name_text(by)}"]
    entries = catalog.entries.items()
    fixed = (name for name, entry in entries if entry.is_link or entry.problem is not None or leases[name])
    untouched = frozenset({*broken, *older, *fixed})
    return Kept({name: tuple(found) for name, found in reasons.items()}, needs, untouched, horizon_ns)


def lease_text(lease: Lease, now_ns: int) -> str:
    """Why what has a lease stays: ``leased (a load, until 14:03 UTC)``."""
    until = instant(lease.until_ns)
    day = "" if until.date() == instant(now_ns).date() else f"{until:%Y-%m-%d} "
    return f"leased ({_PURPOSES.get(lease.purpose, lease.purpose)}, until {day}{until:%H:%M} UTC)"


def _candidates(catalog: Catalog, broken: Mapping[str, str]) -> list[tuple[Entry, Checkpoint]]:
    entries = ((catalog.entries[name], checkpoint) for name, checkpoint in catalog.checkpoints.items())
    return [(entry, checkpoint) for entry, checkpoint in entries if entry.name not in broken and not entry.is_link]


def _horizon(entries: Iterable[Entry]) -> tuple[float, Entry | None]:
    """Until when what cannot be read may have its ancestors, and which that is."""
    horizon_ns, latest = -math.inf, None
    for entry in entries:
        until_ns = math.inf if entry.modified_ns is None else entry.modified_ns + _CLOCKS_NS
        if entry.problem is not None and until_ns > horizon_ns:
            horizon_ns, latest = until_ns, entry
    return horizon_ns, latest


def _linked(catalog: Catalog) -> dict[str, str]:
    """Links to checkpoints, and the checkpoints that they lead to."""
    links = {name: checkpoint for name, checkpoint in catalog.checkpoints.items() if catalog.entries[name].is_link}
    targets = {checkpoint.sha256: name for name, checkpoint in links.items()}
    found = {
        name: f"linked as {name_text(targets[checkpoint.sha256])}"
        for name, checkpoint in catalog.checkpoints.items()
        if checkpoint.sha256 in targets
    }
    return {**found, **dict.fromkeys(links, "a link")}


def _newest_first(catalog: Catalog, names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (catalog.checkpoints[name].created_ns, name), reverse=True)

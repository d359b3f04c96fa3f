"""What checkpoints need of one another: their lineages, and packs in the directories of others.

A checkpoint needs the parents that its manifest names, and the packs that it uses. A load that began before a
compaction still reads by the manifest that was replaced: of a checkpoint that somebody may load, all manifests count.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from torchrec_cnr.maintenance.catalog import Catalog

Pack = tuple[str, str]  # directory under the root, and file in it


@dataclass(frozen=True)
class Needs:
    """What some checkpoints need, and which of them needs it.

    Attributes:
        checkpoints: Names, those who need them included; each with the first of those.
        packs: Directory and file, each with the first of those who need it.
    """

    checkpoints: Mapping[str, str]
    packs: Mapping[Pack, str]


def needed_by(catalog: Catalog, names: Iterable[str], loading: Collection[str] = ()) -> Needs:
    """What checkpoints need.

    Args:
        catalog: What there is.
        names: Of checkpoints; the first that needs something is the one that is named.
        loading: Those of ``names`` that may be read by manifests that were replaced.
    """
    checkpoints: dict[str, str] = {}
    packs: dict[Pack, str] = {}
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
        if there != pack.num_bytes:
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

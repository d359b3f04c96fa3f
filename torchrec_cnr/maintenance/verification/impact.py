"""Finds the checkpoints of a root that cannot be restored because of corrupt data.

A load reads each tensor from the newest checkpoint of the chain that has all its rows, and from the newer ones. Objects
are read from the latest checkpoint only. So corrupt data prevents only the loads that read it: a tensor that is corrupt
in a baseline does not matter for a delta that has all its rows again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchrec_cnr.errors import LoadError, StoreError
from torchrec_cnr.format.manifest import Manifest
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.lineage.checkpoint import Checkpoint, read_lineage
from torchrec_cnr.maintenance.catalog import Catalog
from torchrec_cnr.maintenance.verification.damage import Problem
from torchrec_cnr.storage.pack_reader import place_of

_EVERYTHING = ""  # among the names that a load cannot read; no tensor has this name

Names = frozenset[str]


@dataclass(frozen=True)
class _Damage:
    """Corrupt data.

    Attributes:
        blobs: The file and the offset of each corrupt blob; offset 0 means that nothing of the file can be read.
        files: The files of these blobs.
        checkpoints: The checkpoints that are corrupt in another way.
    """

    blobs: frozenset[tuple[str, int]]
    files: frozenset[str]
    checkpoints: frozenset[str]

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> "_Damage":
        blobs = frozenset((found.file, found.offset) for found in problems if found.file and found.offset is not None)
        return cls(
            blobs,
            frozenset(file for file, _ in blobs),
            frozenset(found.checkpoint for found in problems if found.file is None),
        )

    def above(self, below: Names, checkpoint: Checkpoint) -> Names:
        """Return the names that a load of a checkpoint cannot read, given those of its parent."""
        manifest = checkpoint.manifest
        found = {name for name in below if name == _EVERYTHING or not _is_whole(manifest, name)}
        if checkpoint.store.url in self.checkpoints:
            found.add(_EVERYTHING)
        files = [place_of(checkpoint.store.at(pack.directory or "."), pack) for pack in manifest.packs]
        if not self.files.isdisjoint(files):
            found.update(
                name
                for name, blob in _named_blobs(manifest)
                if {(files[blob.pack], 0), (files[blob.pack], blob.offset)} & self.blobs
            )
        return frozenset(found)


def _is_whole(manifest: Manifest, name: str) -> bool:
    """Return whether a load reads nothing of a name from the parent; true for names of objects."""
    return name not in manifest.tensors or manifest.tensors[name].is_whole


def _named_blobs(manifest: Manifest) -> Iterator[tuple[str, Blob]]:
    for fqn, entry in manifest.tensors.items():
        for shard in entry.shards:
            yield from ((fqn, blob) for blob in (*shard.blobs, *shard.transform_blobs))
            yield from ((fqn, block.blob) for block in shard.rows.blocks if block.blob is not None)
    yield from manifest.objects.items()


def unrestorable(catalog: Catalog, problems: Sequence[Problem]) -> Mapping[str, bool]:
    """Return for each checkpoint of a root whether it cannot be restored, by name, oldest first.

    Args:
        catalog: The contents of the root.
        problems: All known problems. Other data counts as right.
    """
    damage = _Damage.of(problems)
    found: dict[str, Names] = {}
    for name, checkpoint in catalog.checkpoints.items():
        parent = catalog.parent(checkpoint)
        below = found[parent] if parent in found else _below(checkpoint, damage)
        found[name] = damage.above(below, checkpoint)
    return {name: bool(names) for name, names in found.items()}


def _below(checkpoint: Checkpoint, damage: _Damage) -> Names:
    """Return the names that a load of the parent cannot read, for a parent that is not in the catalog."""
    names: Names = frozenset()
    try:
        for link in read_lineage(checkpoint.store).checkpoints[:-1]:
            names = damage.above(names, link)
    except (LoadError, StoreError):
        return frozenset([_EVERYTHING])
    return names

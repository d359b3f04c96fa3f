"""The bytes that a restore of a checkpoint reads, computed from manifests alone.

A load reads the manifests of the whole lineage. It reads each tensor from the newest checkpoint that has all its rows,
and from the newer ones. It reads objects from the latest checkpoint only, and a transform that several checkpoints use
once. Headers of data files, and gaps between blobs that are read along with them, are not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchrec_cnr.format.boxes import Box
from torchrec_cnr.format.manifest import Manifest
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.lineage.checkpoint import Checkpoint, Lineage
from torchrec_cnr.maintenance.catalog import Catalog


@dataclass(frozen=True)
class _Reads:
    """The bytes that a load of a lineage reads.

    Attributes:
        manifest_bytes: The bytes of all manifests.
        tensors: The bytes of each tensor of the latest checkpoint, by FQN.
        object_bytes: The bytes of the objects of the latest checkpoint.
        transforms: By FQN and shard region, the digests of the transforms and bases in the newest checkpoint that has
            rows there. Saves do not go back to those that they used before, so only these can be needed again.
    """

    manifest_bytes: int = 0
    tensors: Mapping[str, int] = field(default_factory=dict)
    object_bytes: int = 0
    transforms: Mapping[str, Mapping[Box, frozenset[str]]] = field(default_factory=dict)

    def below(self, checkpoint: Checkpoint) -> "_Reads":
        """Return the bytes if ``checkpoint`` is added to the lineage as the latest."""
        manifest = checkpoint.manifest
        tensors = tensor_bytes(manifest)
        transforms: dict[str, Mapping[Box, frozenset[str]]] = {}
        counted: set[str] = set()  # for an earlier tensor of this checkpoint
        for fqn, entry in manifest.tensors.items():
            known = {} if entry.is_whole else self.transforms.get(fqn, {})
            parts: dict[str, Blob] = {}
            digests: dict[Box, frozenset[str]] = {}
            for shard in entry.shards:
                if own_parts := shard.transform_parts:
                    parts |= own_parts
                    digests[shard.box] = digests.get(shard.box, frozenset()) | own_parts.keys()
            read_before = frozenset().union(*known.values()) - counted
            tensors[fqn] -= sum(blob.num_bytes for digest, blob in parts.items() if digest in read_before)
            tensors[fqn] += 0 if entry.is_whole else self.tensors.get(fqn, 0)
            transforms[fqn] = {**known, **digests}
            counted |= parts.keys()
        object_bytes = sum(blob.num_bytes for blob in manifest.objects.values())
        return _Reads(self.manifest_bytes + checkpoint.manifest_bytes, tensors, object_bytes, transforms)

    @property
    def num_bytes(self) -> int:
        """Return the total."""
        return self.manifest_bytes + sum(self.tensors.values()) + self.object_bytes


def restore_bytes(lineage: Lineage) -> int:
    """Return the bytes of manifests and blobs that a load of all tensors and objects reads."""
    reads = _Reads()
    for checkpoint in lineage.checkpoints:
        reads = reads.below(checkpoint)
    return reads.num_bytes


def all_restore_bytes(catalog: Catalog) -> Mapping[str, int | None]:
    """Return the bytes that a load of each checkpoint reads, by name; None if its lineage is incomplete in the root."""
    reads_by_name: dict[str, _Reads | None] = {}
    for name, checkpoint in catalog.checkpoints.items():  # oldest first, so each parent is before its children
        parent = catalog.parent(checkpoint)
        if checkpoint.manifest.parent is None:
            reads_by_name[name] = _Reads().below(checkpoint)
        else:
            parent_reads = reads_by_name[parent] if parent is not None else None
            reads_by_name[name] = None if parent_reads is None else parent_reads.below(checkpoint)
    return {name: None if reads is None else reads.num_bytes for name, reads in reads_by_name.items()}


def tensor_bytes(manifest: Manifest) -> dict[str, int]:
    """Return the bytes of each tensor's blobs and row numbers. Shared blobs count for the first tensor only."""
    counted: set[Blob] = set()
    bytes_by_fqn = {}
    for fqn, entry in manifest.tensors.items():
        shared_blobs = {block.blob for shard in entry.shards for block in shard.rows.blocks if block.blob is not None}
        shared_blobs.update(blob for shard in entry.shards for blob in shard.transform_blobs)
        row_bytes = sum(blob.num_bytes for shard in entry.shards for blob in shard.blobs)
        bytes_by_fqn[fqn] = row_bytes + sum(blob.num_bytes for blob in shared_blobs - counted)
        counted |= shared_blobs
    return bytes_by_fqn

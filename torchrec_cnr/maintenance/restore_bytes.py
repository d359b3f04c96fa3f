"""What a restore of a checkpoint reads, from manifests alone.

A load reads the manifests of the whole lineage, and of each tensor no checkpoint older than the newest that has it
whole. Objects are read from the head only. Headers of packs and gaps between blobs, which are read along with them, are
not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchrec_cnr.format.manifest import Manifest
from torchrec_cnr.format.row_sets import Blob
from torchrec_cnr.lineage.checkpoint import Checkpoint, Lineage
from torchrec_cnr.maintenance.catalog import Catalog


@dataclass(frozen=True)
class _Reads:
    """Bytes that are read of a lineage.

    Attributes:
        manifest_bytes: Of all manifests.
        tensors: Of each tensor of the head.
        object_bytes: Of the head's objects.
    """

    manifest_bytes: int = 0
    tensors: Mapping[str, int] = field(default_factory=dict)
    object_bytes: int = 0

    def below(self, checkpoint: Checkpoint) -> "_Reads":
        """With a checkpoint on top."""
        manifest = checkpoint.manifest
        tensors = {
            fqn: num_bytes + (0 if manifest.tensors[fqn].is_whole else self.tensors.get(fqn, 0))
            for fqn, num_bytes in tensor_bytes(manifest).items()
        }
        num_bytes = self.manifest_bytes + checkpoint.manifest_bytes
        return _Reads(num_bytes, tensors, sum(blob.num_bytes for blob in manifest.objects.values()))

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return self.manifest_bytes + sum(self.tensors.values()) + self.object_bytes


def restore_bytes(lineage: Lineage) -> int:
    """Bytes of manifests and blobs that a load of everything reads."""
    reads = _Reads()
    for checkpoint in lineage.checkpoints:
        reads = reads.below(checkpoint)
    return reads.num_bytes


def all_restore_bytes(catalog: Catalog) -> Mapping[str, int | None]:
    """The same for each checkpoint of a catalog, by name; None where its lineage is not complete under the root."""
    found: dict[str, _Reads | None] = {}
    for name, checkpoint in catalog.checkpoints.items():  # oldest first: a parent before its children
        parent = catalog.parent(checkpoint)
        if checkpoint.manifest.parent is None:
            found[name] = _Reads().below(checkpoint)
        else:
            under = found[parent] if parent is not None else None
            found[name] = None if under is None else under.below(checkpoint)
    return {name: None if reads is None else reads.num_bytes for name, reads in found.items()}


def tensor_bytes(manifest: Manifest) -> dict[str, int]:
    """Bytes of the blobs of each tensor, with its row numbers; those that several share count for the first of them."""
    known: set[Blob] = set()
    found = {}
    for fqn, entry in manifest.tensors.items():
        numbers = {block.blob for shard in entry.shards for block in shard.rows.blocks if block.blob is not None}
        own = sum(blob.num_bytes for shard in entry.shards for blob in shard.blobs)
        found[fqn] = own + sum(blob.num_bytes for blob in numbers - known)
        known |= numbers
    return found

"""Manifests that this process has parsed: their bytes are read and hashed each time, but parsed once.

Each save looks at the whole lineage that it goes on from, and each load does twice. A digest tells a manifest from all
others, so what was validated under it stays valid, wherever it is read from.
"""

import threading
from collections import OrderedDict

from torchrec_cnr.manifest import Manifest

_MOST_SHARDS = 1 << 18  # of all that is kept; each takes about one KiB


class KnownManifests:
    """The manifests that were used last, by the digests of their bodies.

    Args:
        most_shards: How many shards, packs and row sets those that are kept have, together.
    """

    def __init__(self, most_shards: int = _MOST_SHARDS) -> None:
        self._most_shards = most_shards
        self._lock = threading.Lock()
        self._found: OrderedDict[str, tuple[Manifest, int]] = OrderedDict()
        self._num_shards = 0

    def get(self, digest: str) -> Manifest | None:
        """The manifest with a digest, if it is kept."""
        with self._lock:
            if digest not in self._found:
                return None
            self._found.move_to_end(digest)
            return self._found[digest][0]

    def add(self, digest: str, manifest: Manifest) -> None:
        """Keep a manifest that is valid, and let go of those that were not used for longest."""
        shards = sum(len(entry.shards) + len(entry.folded or ()) for entry in manifest.tensors.values())
        size = 1 + shards + len(manifest.packs) + len(manifest.row_sets) + len(manifest.objects)
        with self._lock:
            self._num_shards += size - self._found.pop(digest, (manifest, 0))[1]
            self._found[digest] = (manifest, size)
            while self._num_shards > self._most_shards:
                self._num_shards -= self._found.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._found.clear()
            self._num_shards = 0

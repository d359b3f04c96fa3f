"""The checkpoint chain of a load: the coordinator reads its manifests, and sends them to the other ranks.

Every rank reads the newest checkpoint's manifest, since it plans its reads by that. Only the coordinator reads the
older ones. DCP then sends a plan to each rank, and these manifests with it, so that no further collective is necessary.
A rank that does not get all of them reads the rest itself: if they are too large, or if the planner makes new plans.
"""

import torch.distributed as dist

from torchrec_cnr.lineage.checkpoint import Checkpoint, Lineage, read_checkpoint, read_lineage, read_lineage_of
from torchrec_cnr.lineage.manifest_files import KeptFiles, ReadFile, SentFiles, read_file
from torchrec_cnr.storage.store import Store
from torchrec_cnr.throttling import Bandwidth


class OpenedChain:
    """The checkpoint chain of a load, of which this rank may have read only the newest checkpoint.

    Args:
        store: The newest checkpoint.
        bandwidth: The bandwidth limit for reading rows.

    Raises:
        LoadError, StoreError: It cannot be read; see ``read_lineage``.
    """

    def __init__(self, store: Store, bandwidth: Bandwidth) -> None:
        self._bandwidth = bandwidth
        self._lineage: Lineage | None = None
        num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self._kept = KeptFiles(store, num_ranks) if num_ranks > 1 else None
        if num_ranks == 1 or dist.get_rank() == 0:  # by default, the coordinator; it need not be the one of this load
            self._lineage = read_lineage(store, read=self._read_file).limited(bandwidth)
            self._newest = self._lineage.newest
        else:
            self._newest = read_checkpoint(store)

    @property
    def newest(self) -> Checkpoint:
        """The newest checkpoint of the chain."""
        return self._newest

    def read(self) -> Lineage:
        """Return the whole chain; read it if this rank does not have it.

        Raises:
            LoadError, StoreError: The chain cannot be read.
        """
        return self._lineage or self._completed(self._read_file)

    def sent(self) -> SentFiles | None:
        """Return what to send to other ranks, at the first call; None if this rank has read nothing for them."""
        kept, self._kept = self._kept, None
        return None if kept is None else kept.sent(self._newest.sha256)

    def receive(self, sent: SentFiles) -> None:
        """Complete the chain by what the coordinator has sent, if it is the same chain.

        Raises:
            LoadError, StoreError: The chain cannot be read.
        """
        if self._lineage is None and sent.newest_sha256 == self._newest.sha256:
            self._completed(sent.reader_at(self._newest.store))

    def _completed(self, read: ReadFile) -> Lineage:
        self._lineage = read_lineage_of(self._newest, read).limited(self._bandwidth)
        return self._lineage

    @property
    def _read_file(self) -> ReadFile:
        return read_file if self._kept is None else self._kept.read

"""The head: what a running job stands on."""

from dataclasses import dataclass

from torchrec_cnr.manifest import CheckpointRef, History


@dataclass(frozen=True)
class Head:
    """The checkpoint that a running job stands on: what its next save may be a delta of.

    Attributes:
        lineage: From the baseline to the newest checkpoint, by full path.
        created_ns: Time of the newest one's commit.
        history: Of the lineage.
        num_restores: Restores that the newest one's state has been through.
    """

    lineage: tuple[CheckpointRef, ...]
    created_ns: int
    history: History
    num_restores: int

    @property
    def ref(self) -> CheckpointRef:
        """The newest checkpoint."""
        return self.lineage[-1]

    @property
    def baseline(self) -> CheckpointRef:
        """The one that all deltas stand on."""
        return self.lineage[0]
